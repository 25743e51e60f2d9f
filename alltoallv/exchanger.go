package alltoallv

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// ErrClosed is returned by calls on a closed Exchanger.
var ErrClosed = errors.New("alltoallv: exchanger is closed")

// Exchanger carries the all-to-all exchanges of one group over one symmetric heap. Its methods may be called from
// several goroutines, but all ranks must make the same calls in the same order.
type Exchanger struct {
	heap     *memory.Heap
	group    *comm.Group
	carrier  carrier
	channels kernels.Channels
	block    *memory.Buffer
	counters *memory.Buffer // of Counts where a device cannot read Go memory
	options  Options
	registry *registry

	mu       sync.Mutex // orders calls
	cache    *cache
	closed   bool
	last     device.Stream // of the last launch that was not captured
	counting Splits        // of Counts
	guess    Splits        // of calls with splits in device memory and no estimate
	inline   op            // the launch of calls without a stream

	broken atomic.Pointer[error] // a call failed half-way: the channels are in no known state
	// Launches on streams. They end on their stream, while a call may hold mu and wait for that.
	ends sync.Mutex
	idle []*op
}

// op is one launch and what must live until it has run.
type op struct {
	args     kernels.AllToAllV
	plan     *plan
	dst, src memory.View
	live     memory.View // Splits.Live
}

// New makes an Exchanger. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. What fails on one rank is an error on all. The caller closes it before the heap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Exchanger, error) {
	x := &Exchanger{heap: h, group: h.Group()}
	mine, err := x.configure(o)
	devices, err := agree.On(ctx, x.group, agree.Claim{Must: []string{mine}, Own: identity(h.Device())}, err)
	if err != nil {
		return nil, fmt.Errorf("alltoallv: compare options: %w", err)
	}
	neighbours := 0
	for _, d := range devices {
		if d == devices[x.group.Rank()] {
			neighbours++
		}
	}
	x.registry.shared = neighbours > 1 && h.Device().Kind() == device.CUDAKind
	// No peer may write before our block is zero, so all ranks meet again once it is.
	if x.block, err = x.carrier.open(h, &x.channels, &x.options, neighbours); err == nil && h.Device().Kind() != device.HostKind {
		x.counters, err = allocate(h, 16*int64(x.group.Size()))
	}
	var claim agree.Claim
	if err == nil {
		claim.Must = []string{fmt.Sprintf("its channels at offset %d", x.block.Offset())}
	}
	if _, err := agree.On(ctx, x.group, claim, err); err != nil {
		return nil, errors.Join(fmt.Errorf("alltoallv: allocate channels: %w", err), x.free())
	}
	if x.registry.pulls, err = x.carrier.met(&x.channels); err != nil {
		x.options.Logger.Info("alltoallv: large messages into memory outside the heap take two copies", "rank", x.group.Rank(), "why", err)
	}
	return x, nil
}

// configure checks the options and describes what must be equal on all ranks.
func (x *Exchanger) configure(o Options) (mine string, err error) {
	if x.carrier, err = newCarrier(x.heap.Device()); err != nil {
		return "", err
	}
	if x.channels, err = o.channels(x.group.Size(), x.heap.Device().Kind()); err != nil {
		return "", err
	}
	if x.registry, err = newRegistry(&o, x.group.Rank(), x.group.Size(), x.heap.Device().Kind()); err != nil {
		return "", err
	}
	x.options, x.cache = o, newCache(o.CacheEntries)
	return o.fingerprint(&x.channels, x.registry.names()), nil
}

// identity tells devices of the group apart. Ranks on the host are not told apart.
func identity(d device.Device) string {
	if c, ok := d.(*device.CUDADevice); ok {
		if id, err := c.UUID(); err == nil {
			return id
		}
	}
	return d.String()
}

// Exchange sends Send[k] elements of src to every rank k and receives Recv[k] elements from it into dst.
//
// The call is enqueued on s; with a nil stream it is complete on return. A call on another stream than the one before
// waits for that one, except that calls captured into a CUDA graph are ordered by whoever replays it. Both buffers belong to the exchange until then
// and must not overlap. A dst in the symmetric heap is written by the peers directly, other memory by this rank alone.
// Send[k] here must equal Recv of this rank on rank k.
//
// Bad arguments return an error (ErrInvalid, memory.ErrFreed, ErrClosed) before anything is enqueued; the call then has
// not happened and may be repeated, which the other ranks wait for. A lost peer is an error that is comm.ErrPeerLost, a
// peer that does not come within Options.Timeout one that is comm.ErrTimeout; both name the peer, and the Exchanger can
// then only be closed, as after a *kernels.SplitsError. A *kernels.CountMismatchError is an error of this call alone. On a
// host stream these are errors of the stream; on a CUDA stream the next call returns them, and Fault does.
func (x *Exchanger) Exchange(s device.Stream, dst, src memory.View, sp *Splits) error {
	defer cuda.StartRange("all-to-all").End()
	x.mu.Lock()
	defer x.mu.Unlock()
	if sp != nil && sp.Live.Len() > 0 && sp.Send == nil && sp.Recv == nil {
		sp = x.equalParts(sp, min(dst.Len(), src.Len()))
		defer func() { x.guess.Live = memory.View{} }()
	}
	p, inPlace, dstOffset, err := x.prepare(dst, src, sp)
	if x.options.Validate {
		err = x.validate(sp, err)
	}
	if err != nil {
		return err
	}
	if err := x.follow(s); err != nil {
		return fmt.Errorf("alltoallv: %w", err)
	}
	o := &x.inline
	if s != nil {
		o = x.op()
	}
	o.plan, o.dst, o.src, o.live = p, dst, src, sp.Live
	a := &o.args
	a.Channels, a.Timeout, a.DstOffset, a.Routes = &x.channels, x.options.Timeout, -1, &p.routes[0]
	if inPlace {
		a.DstOffset, a.Routes = dstOffset, &p.routes[1]
	}
	p.users.Add(1)
	done, err := x.carrier.launch(s, o)
	switch {
	case s == nil:
		x.release(o, err)
	case done: // and if it failed, it was not enqueued
		x.retire(o, nil)
	}
	if err != nil {
		return fmt.Errorf("alltoallv: %w", err)
	}
	return nil
}

// follow orders a call behind the last one. A captured call has no place in that order.
func (x *Exchanger) follow(s device.Stream) error {
	if s == x.last {
		return nil
	}
	if captured, err := device.Capturing(s); err != nil || captured {
		return err
	}
	if err := device.Follow(s, x.last); err != nil {
		return err
	}
	x.last = s
	return nil
}

// equalParts is what splits in device memory are taken for when nothing is said about them.
func (x *Exchanger) equalParts(sp *Splits, bytes int64) *Splits {
	size := x.group.Size()
	x.guess.Live, x.guess.PeerDispls = sp.Live, sp.PeerDispls
	x.guess.Send = x.guess.Send[:0]
	for range size {
		x.guess.Send = append(x.guess.Send, bytes/int64(size))
	}
	x.guess.Recv = x.guess.Send
	return &x.guess
}

// prepare checks the arguments and finds or makes the plan.
func (x *Exchanger) prepare(dst, src memory.View, sp *Splits) (p *plan, inPlace bool, off int64, err error) {
	switch {
	case x.closed:
		return nil, false, 0, ErrClosed
	case sp == nil:
		return nil, false, 0, invalid("nil splits")
	}
	if broken := x.broken.Load(); broken != nil {
		return nil, false, 0, fmt.Errorf("alltoallv: an earlier call failed: %w", *broken)
	}
	select {
	case <-x.group.Done():
		return nil, false, 0, fmt.Errorf("alltoallv: %w", x.group.Err())
	default:
	}
	if err := x.fault(); err != nil {
		return nil, false, 0, err
	}
	if p, err = x.plan(sp); err != nil {
		return nil, false, 0, err
	}
	if err := src.Valid(); err != nil {
		return nil, false, 0, fmt.Errorf("alltoallv: source: %w", err)
	}
	if err := dst.Valid(); err != nil {
		return nil, false, 0, fmt.Errorf("alltoallv: destination: %w", err)
	}
	srcBytes, dstBytes, largestRecv := p.srcBytes, p.dstBytes, p.largestRecv
	live := sp.live()
	if live {
		if err := x.checkLive(sp.Live); err != nil {
			return nil, false, 0, err
		}
		srcBytes, dstBytes, largestRecv = src.Len(), dst.Len(), dst.Len()
	}
	if src.Len() < srcBytes {
		return nil, false, 0, invalid("the source has %d bytes, the send splits %v of %d-byte elements need %d", src.Len(), sp.Send, sp.elem(), srcBytes)
	}
	if dst.Len() < dstBytes {
		return nil, false, 0, invalid("the destination has %d bytes, the receive splits %v of %d-byte elements need %d", dst.Len(), sp.Recv, sp.elem(), dstBytes)
	}
	onHost := x.heap.Device().Kind() == device.HostKind
	for _, v := range [2]memory.View{src, dst} {
		if v.Len() > 0 && v.OnHost() != onHost {
			return nil, false, 0, invalid("a buffer at %#x is not memory of %v", v.Ptr(), x.heap.Device())
		}
	}
	if a, b := src.Ptr(), dst.Ptr(); srcBytes > 0 && dstBytes > 0 && a < b+uintptr(dstBytes) && b < a+uintptr(srcBytes) {
		return nil, false, 0, invalid("source and destination overlap")
	}
	off, inPlace = dst.Symmetric(x.heap)
	if live && x.registry.forced == (copyEngine{}) {
		return nil, false, 0, invalid("copy engines cannot read splits from device memory")
	}
	if x.registry.forced == (copyEngine{}) && !onHost && max(p.largestSend, p.largestRecv) > x.channels.PacketBytes && (!inPlace || p.places == nil) {
		return nil, false, 0, invalid("copy engines need a symmetric destination (it is: %v) and Splits.PeerDispls (given: %v)", inPlace, p.places != nil)
	}
	if staged := !inPlace || p.routes[1].Staged; staged && chunkFor(largestRecv) > x.channels.SlotBytes {
		return nil, false, 0, invalid("a message of %d bytes takes more than %d chunks of Options.SlotBytes, %d", largestRecv, kernels.MaxChunks, x.channels.SlotBytes)
	}
	return p, inPlace, off, nil
}

// checkLive checks a view of splits on the device.
func (x *Exchanger) checkLive(v memory.View) error {
	if x.options.Validate {
		return invalid("Options.Validate cannot compare splits in device memory")
	}
	if err := v.Valid(); err != nil {
		return fmt.Errorf("alltoallv: splits: %w", err)
	}
	if need := LiveBytes(x.group.Size()); v.Len() < need {
		return invalid("splits in %d bytes of device memory, %d ranks need %d", v.Len(), x.group.Size(), need)
	}
	if v.OnHost() != (x.heap.Device().Kind() == device.HostKind) || v.Ptr()%8 != 0 {
		return invalid("splits at %#x are not aligned memory of %v", v.Ptr(), x.heap.Device())
	}
	return nil
}

// Fault is what launches on a GPU that have run by now have come to: nil, or the error that Exchange describes. It costs a
// load, and says nothing of work that still runs. A disagreement on counts is told once: Fault clears it, and waits until
// that is done, so that the next call on any stream finds a clean record.
func (x *Exchanger) Fault() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return ErrClosed
	}
	return x.fault()
}

func (x *Exchanger) fault() error {
	err := x.carrier.fault()
	if err == nil {
		return nil
	}
	x.fail(err)
	return fmt.Errorf("alltoallv: an earlier call failed: %w", err)
}

func (x *Exchanger) plan(sp *Splits) (*plan, error) {
	p, h := x.cache.get(sp)
	if p != nil {
		p.chosen[0].Cached, p.chosen[1].Cached = true, true
		return p, nil
	}
	p = x.cache.blank()
	if err := p.build(sp, x.group.Rank(), x.group.Size()); err != nil {
		return nil, err
	}
	x.registry.choose(p, false, &x.channels, x.group.Rank())
	x.registry.choose(p, true, &x.channels, x.group.Rank())
	x.cache.put(h, p)
	return p, nil
}

// op is a launch for a stream.
func (x *Exchanger) op() *op {
	x.ends.Lock()
	defer x.ends.Unlock()
	if n := len(x.idle); n > 0 {
		o := x.idle[n-1]
		x.idle = x.idle[:n-1]
		return o
	}
	o := new(op)
	o.args.Done = func(err error) { x.retire(o, err) }
	return o
}

// retire takes a launch back when its stream is through with it.
func (x *Exchanger) retire(o *op, err error) {
	x.release(o, err)
	x.ends.Lock()
	x.idle = append(x.idle, o)
	x.ends.Unlock()
}

// release lets go of what a launch used.
func (x *Exchanger) release(o *op, err error) {
	if err != nil {
		x.fail(err)
	}
	o.plan.users.Add(-1)
	o.plan, o.dst, o.src, o.live = nil, memory.View{}, memory.View{}, memory.View{}
	o.args.Src, o.args.Dst, o.args.Splits = nil, nil, nil
}

// fail marks the channels as broken, unless the ranks have merely disagreed.
func (x *Exchanger) fail(err error) {
	var mismatch *kernels.CountMismatchError
	if !errors.As(err, &mismatch) {
		x.broken.CompareAndSwap(nil, &err)
	}
}

// validate compares counts on the control plane. mine is this rank's own complaint, which every rank hears of.
func (x *Exchanger) validate(sp *Splits, mine error) error {
	var c counts
	if mine != nil {
		c.Error = mine.Error()
	} else {
		c = counts{Send: sp.Send, Recv: sp.Recv, Elem: sp.elem()}
	}
	text, err := json.Marshal(c)
	if err != nil {
		return errors.Join(mine, fmt.Errorf("alltoallv: validate: %w", err))
	}
	ctx, cancel := context.WithTimeout(context.Background(), x.options.Timeout)
	defer cancel()
	all, err := x.group.AllGather(ctx, text)
	switch {
	case err != nil:
		return errors.Join(mine, fmt.Errorf("alltoallv: validate: %w", err))
	case mine != nil:
		return mine
	}
	return compareCounts(all)
}

// counts is what a rank brings to a call with Options.Validate: its splits, or why it refuses them.
type counts struct {
	Error      string
	Send, Recv []int64
	Elem       int64
}

// compareCounts reads what every rank brought to a call. The error is the first complaint or disagreement.
func compareCounts(all [][]byte) error {
	ranks := make([]counts, len(all))
	for r := range all {
		c := &ranks[r]
		if err := json.Unmarshal(all[r], c); err != nil {
			return fmt.Errorf("alltoallv: validate: rank %d: %w", r, err)
		}
		if c.Error != "" {
			return invalid("rank %d refused the call: %s", r, c.Error)
		}
		if len(c.Send) != len(all) || len(c.Recv) != len(all) {
			return fmt.Errorf("alltoallv: validate: rank %d: malformed: %d and %d counts", r, len(c.Send), len(c.Recv))
		}
	}
	for s := range ranks {
		for d := range ranks {
			if sent, expected := ranks[s].Send[d]*ranks[s].Elem, ranks[d].Recv[s]*ranks[d].Elem; sent != expected {
				return invalid("rank %d sends %d bytes to rank %d, which expects %d", s, sent, d, expected)
			}
		}
	}
	return nil
}

// Counts tells every rank how much it will receive: send[k] arrives as recv[this rank] on rank k. Both have one entry a
// rank. It is enqueued on s like Exchange, and recv is valid once that is complete. On a GPU, whose kernels cannot read Go
// memory, it is complete on return and cannot be captured (device.ErrCapturing).
func (x *Exchanger) Counts(s device.Stream, send, recv []int64) error {
	size := x.group.Size()
	if len(send) != size || len(recv) != size {
		return invalid("%d counts to send and %d to receive for %d ranks", len(send), len(recv), size)
	}
	if x.counters != nil {
		if capturing, err := device.Capturing(s); err != nil || capturing {
			return fmt.Errorf("alltoallv: counts: %w", cmp.Or(err, device.ErrCapturing))
		}
	}
	x.mu.Lock()
	if x.counting.Send == nil {
		one := make([]int64, size)
		for k := range one {
			one[k] = 1
		}
		x.counting = Splits{Send: one, Recv: one, ElemSize: 8}
	}
	x.mu.Unlock()
	in, out := memory.Host(shm.Bytes(send)), memory.Host(shm.Bytes(recv))
	if x.counters == nil {
		return x.Exchange(s, out, in, &x.counting)
	}
	n := 8 * int64(size)
	devIn, devOut := x.counters.View().Slice(0, n), x.counters.View().Slice(n, n)
	if s == nil {
		own, err := x.heap.Device().NewStream()
		if err != nil {
			return fmt.Errorf("alltoallv: counts: %w", err)
		}
		defer own.Close()
		s = own
	}
	if err := memory.Copy(s, devIn, in); err != nil {
		return fmt.Errorf("alltoallv: counts: %w", err)
	}
	if err := x.Exchange(s, devOut, devIn, &x.counting); err != nil {
		return err
	}
	if err := memory.Copy(s, out, devOut); err != nil {
		return fmt.Errorf("alltoallv: counts: %w", err)
	}
	return x.Fault()
}

// Explain says which algorithm an exchange with these splits would use, and why. inPlace is whether the destination
// would lie in the symmetric heap. Nothing is exchanged.
func (x *Exchanger) Explain(sp *Splits, inPlace bool) (Decision, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return Decision{}, ErrClosed
	}
	if sp == nil {
		return Decision{}, invalid("nil splits")
	}
	p, err := x.plan(sp)
	if err != nil {
		return Decision{}, err
	}
	d := p.chosen[0]
	if inPlace {
		d = p.chosen[1]
	}
	d.Candidates = append([]Candidate(nil), d.Candidates...)
	return d, nil
}

// CacheStats says how often the splits of a call were remembered.
type CacheStats struct {
	Hits, Misses uint64
	Entries      int
}

// CacheStats returns this rank's counters.
func (x *Exchanger) CacheStats() CacheStats {
	x.mu.Lock()
	defer x.mu.Unlock()
	return CacheStats{x.cache.hits, x.cache.misses, len(x.cache.plans)}
}

// Close waits for the exchanges on streams and gives the channels back. It is collective and idempotent: no rank frees
// channels that a peer may still signal. After a failure of the group it releases what is this rank's and returns.
func (x *Exchanger) Close(ctx context.Context) error {
	x.mu.Lock()
	if x.closed {
		x.mu.Unlock()
		return nil
	}
	x.closed = true
	last := x.last
	x.mu.Unlock()
	err := x.carrier.drain(last)
	if x.group.Err() == nil {
		err = errors.Join(err, x.group.Barrier(ctx))
	}
	if err != nil {
		err = fmt.Errorf("alltoallv: close: %w", err)
	}
	return errors.Join(err, x.free())
}

// free gives back what New took.
func (x *Exchanger) free() error {
	if x.carrier == nil {
		return nil
	}
	err := x.carrier.close()
	for _, b := range [...]*memory.Buffer{x.counters, x.block} {
		if b != nil {
			err = errors.Join(err, b.Free())
		}
	}
	return err
}
