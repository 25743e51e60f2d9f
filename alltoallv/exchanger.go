package alltoallv

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Exchanger carries the all-to-all exchanges of one group over one symmetric heap. Its methods may be called from
// several goroutines, but all ranks must make the same calls in the same order.
type Exchanger struct {
	c        *communicator.Communicator // its lock guards what follows
	bounds   kernels.ExchangeBounds
	options  Options
	plans    planner
	counters bool // Counts goes through memory of the heap, because kernels cannot read Go memory

	counting Splits // of Counts
	nothing  Splits // of Barrier
	guess    Splits // of calls with splits in device memory and no estimate
	inline   op     // the launch of calls without a stream
	idle     communicator.Pool[op]
}

// op is one launch, and keeps its arguments alive until it has run.
type op struct {
	args kernels.AllToAllV
	plan *plan
}

// New makes an Exchanger. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. The heap grows if it has no room. A failure on one rank is an error on all. The
// caller closes the Exchanger before the heap.
//
// A ctx that ends while ranks wait for each other may leave the group out of step, as in memory.NewHeap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Exchanger, error) {
	if h == nil {
		return nil, invalid("the heap is nil")
	}
	if o.Logger == nil {
		o.Logger = h.Group().Logger()
	}
	x := &Exchanger{}
	mine, err := x.configure(h, o)
	own := communicator.Config{Name: "alltoallv", Must: []string{mine}, Family: &x.bounds, Timeout: x.options.Timeout, Hosts: true, GPUs: true, Rest: x.bounds.Hosts != nil, Counters: x.tell}
	if x.counters = !h.Serves(memory.Host(make([]byte, 1))); x.counters {
		own.ExtraBytes = 16 * int64(h.Group().Size())
	}
	if x.c, err = communicator.Open(ctx, h, own, err); err != nil {
		return nil, err
	}
	x.plans.traits = x.c.Traits
	if why := x.c.Traits.Slow; why != nil {
		x.options.Logger.Info("alltoallv: large messages into memory outside the heap take two copies", "rank", h.Group().Rank(), "why", why)
	}
	return x, nil
}

// configure checks the options and describes what must be equal on all ranks.
func (x *Exchanger) configure(h *memory.Heap, o Options) (mine string, err error) {
	rank, size, kind := h.Group().Rank(), h.Group().Size(), h.Device().Kind()
	if x.bounds, err = o.complete(size, h.Engine(), kind); err != nil {
		return "", err
	}
	if x.bounds.Hosts = h.Hosts(); x.bounds.Hosts != nil {
		x.bounds.BundleBytes = o.bundleBytes(&x.bounds)
	}
	r, err := newRegistry(&o, rank, size, kind)
	if err != nil {
		return "", err
	}
	x.options, x.plans = o, planner{registry: r, cache: newCache(o.CacheEntries), bounds: &x.bounds, rank: rank}
	return o.fingerprint(&x.bounds, r.told()), nil
}

// Exchange sends Send[k] elements of src to every rank k and receives Recv[k] elements from it into dst.
//
// Elements of src and dst that are known, as those of memory.Wrap, are of the same type, and no part cuts one.
//
// The call is enqueued on s; with a nil stream it is complete on return. Both buffers belong to the exchange until it is
// complete, and must not overlap. A call on another stream than the last call waits for that; a program that replays a
// CUDA graph orders the calls in it. Peers write a dst in the symmetric heap directly; other memory is written by this rank
// alone. Send[k] must equal Recv of this rank on rank k.
//
// Bad arguments return an error (ErrInvalid, memory.ErrFreed, ErrClosed) before anything is enqueued; the call has not
// happened and may be repeated, and the other ranks wait for it. Two errors are of one call, and later calls work:
//
//   - A *kernels.SplitsError is about Splits.Live of some rank, and every rank gets it from this call.
//   - A *kernels.CountMismatchError has the sizes on both ranks, and its Epoch the number of the call. On the host, or with Options.Validate, it is
//     also for known elements that differ between the ranks, of messages of any bytes. A rank whose small message is not as its receiver expected
//     gets it from the next call, which is complete.
//
// After any other error the Exchanger can only be closed. All of these name the peer: comm.ErrPeerLost if it is lost,
// comm.ErrTimeout if it does not come within Options.Timeout, and comm.ErrOutOfStep if it waits in a call that this rank has not
// made. That is known after 2 seconds or half of the timeout, whichever is shorter, and for a call of the control plane such as
// Group.Barrier after half of the timeout.
//
// Ranks of other hosts find a disagreement on counts in its own call, also for small messages.
//
// On a host stream the errors of calls that have begun are errors of the stream; on a CUDA stream Fault and the next call return them.
func (x *Exchanger) Exchange(s device.Stream, dst, src memory.View, sp *Splits) error {
	x.c.Lock()
	defer x.c.Unlock()
	return x.exchange(s, dst, src, sp, false)
}

// Barrier is an exchange without messages, enqueued on s, with the errors of Exchange: work on s behind it runs when the streams of all
// ranks have reached their barriers. With a nil stream it returns when all ranks have called it.
func (x *Exchanger) Barrier(s device.Stream) error {
	x.c.Lock()
	defer x.c.Unlock()
	if x.nothing.Send == nil {
		none := make([]int64, x.bounds.Size)
		x.nothing = Splits{Send: none, Recv: none}
	}
	err := x.exchange(s, memory.View{}, memory.View{}, &x.nothing, true)
	var peer *comm.PeerError
	named := errors.As(err, &peer) && peer.Op == "barrier"
	if !named && (errors.Is(err, comm.ErrMismatch) || errors.Is(err, comm.ErrOutOfStep)) {
		err = fmt.Errorf("barrier: %w", err) // peers send bytes
	}
	return err
}

func (x *Exchanger) exchange(s device.Stream, dst, src memory.View, sp *Splits, barrier bool) error {
	if sp != nil && sp.Live.Len() > 0 && sp.Send == nil && sp.Recv == nil {
		sp = x.equalParts(sp, min(dst.Len(), src.Len()))
		defer func() { x.guess.Live = memory.View{} }()
	}
	p, at, place, err := x.prepare(dst, src, sp)
	if x.options.Validate {
		err = x.validate(dst, src, sp, barrier, err)
	}
	if err != nil {
		return err
	}
	o := &x.inline
	if s != nil {
		o = x.op()
	}
	o.plan = p
	a := &o.args
	a.Routes, a.Schedule, a.Barrier, a.Timeout = &p.routes[at], p.schedule[at], barrier, x.c.Timeout()
	a.Note.Algorithm, a.Note.Payload, a.Note.Send, a.Note.Recv = p.chosen[at].Algorithm, p.sendAll, p.routes[0].SendBytes, p.routes[0].RecvBytes
	a.Note.Staged = x.staging(p, at)
	if sp.Live.Len() > 0 { // the splits are a guess
		a.Note.Payload, a.Note.Send, a.Note.Recv = -1, nil, nil
	}
	h := x.c.Heap
	a.Dst, a.Src, a.Splits = h.Operand(dst), h.Operand(src), h.Operand(sp.Live)
	if a.Dst.Place, a.Dst.Reach = place, at == 1; x.c.Traits.Pulls {
		a.Src = h.SymmetricOperand(src)
	}
	p.users.Add(1)
	err = x.c.Launch(s, a)
	if s == nil {
		o.release()
	} else if err != nil { // not enqueued
		o.release()
		x.idle.Give(o)
	}
	return err
}

// staging is why the largest message to this rank goes through slots of staging, where it is too large to be eager or a packet.
func (x *Exchanger) staging(p *plan, at int) flight.Staging {
	switch {
	case p.schedule[at].Staged:
		return flight.StagedAlgorithm
	case at == 1 || x.bounds.Mode(p.largestRecv) != kernels.CreditMode:
		return flight.NotStaged
	case x.c.Traits.Slow != nil:
		return flight.StagedUnreadable
	case p.chosen[at].Pulled:
		return flight.NotStaged // this rank reads it where the sender has it
	}
	return flight.StagedOutput
}

// equalParts is the estimate for splits in device memory without one.
func (x *Exchanger) equalParts(sp *Splits, bytes int64) *Splits {
	size := x.bounds.Size
	x.guess.Live, x.guess.PeerDispls, x.guess.Limits = sp.Live, sp.PeerDispls, sp.Limits
	x.guess.Send = x.guess.Send[:0]
	for range size {
		x.guess.Send = append(x.guess.Send, bytes/int64(size))
	}
	x.guess.Recv = x.guess.Send
	return &x.guess
}

// prepare checks the arguments and finds or makes the plan. at is the index of its route, place the place at which peers write dst, if
// they do.
func (x *Exchanger) prepare(dst, src memory.View, sp *Splits) (p *plan, at int, place int64, err error) {
	if err := x.c.Usable(); err != nil {
		return nil, 0, 0, err
	}
	if sp == nil {
		return nil, 0, 0, invalid("nil splits")
	}
	if p, err = x.plans.of(sp); err != nil {
		return nil, 0, 0, err
	}
	if err := x.c.Serves("source", src); err != nil {
		return nil, 0, 0, err
	}
	if err := x.c.Serves("destination", dst); err != nil {
		return nil, 0, 0, err
	}
	if !dst.Alike(src) {
		return nil, 0, 0, invalid("the source has elements of %s, the destination of %s", src.Element(), dst.Element())
	}
	srcBytes, dstBytes, largestRecv := p.srcBytes, p.dstBytes, p.largestRecv
	live := sp.live()
	if live {
		if err := x.checkLive(sp.Live); err != nil {
			return nil, 0, 0, err
		}
		srcBytes, dstBytes, largestRecv = src.Len(), dst.Len(), dst.Len()
	}
	if src.Len() < srcBytes {
		return nil, 0, 0, invalid("the source has %d bytes, the send splits %s of %d-byte elements need %d", src.Len(), placed(sp.Send, sp.SendDispls), sp.elem(), srcBytes)
	}
	if dst.Len() < dstBytes {
		return nil, 0, 0, invalid("the destination has %d bytes, the receive splits %s of %d-byte elements need %d", dst.Len(), placed(sp.Recv, sp.RecvDispls), sp.elem(), dstBytes)
	}
	if !live && !src.Whole(p.sendGrain) {
		return nil, 0, 0, invalid("the source has elements of %s, the send splits %s of %d-byte elements cut one", src.Element(), placed(sp.Send, sp.SendDispls), sp.elem())
	}
	if !live && !dst.Whole(p.recvGrain) {
		return nil, 0, 0, invalid("the destination has elements of %s, the receive splits %s of %d-byte elements cut one", dst.Element(), placed(sp.Recv, sp.RecvDispls), sp.elem())
	}
	if a, b := src.Ptr(), dst.Ptr(); srcBytes > 0 && dstBytes > 0 && a < b+uintptr(dstBytes) && b < a+uintptr(srcBytes) {
		return nil, 0, 0, invalid("source and destination overlap")
	}
	place, inPlace := dst.Symmetric(x.c.Heap)
	at = x.plans.ready(p, inPlace)
	k := &p.schedule[at]
	if p.chosen[at].Forced && p.chosen[at].Algorithm == (copyEngine{}).Name() {
		switch {
		case live:
			return nil, 0, 0, invalid("copy engines cannot read splits from device memory")
		case x.c.Traits.CopyEngines && !k.Copies && max(p.largestSend, p.largestRecv) > x.bounds.PacketBytes:
			return nil, 0, 0, invalid("copy engines need a symmetric destination (it is: %v) and Splits.PeerDispls (given: %v)",
				inPlace, p.routes[at].PeerOffsets != nil)
		}
	}
	if staged := !inPlace || k.Staged; staged && chunkFor(largestRecv) > x.bounds.SlotBytes {
		return nil, 0, 0, invalid("a message of %d bytes takes more than %d chunks of Options.SlotBytes, %d", largestRecv, kernels.MaxChunks, x.bounds.SlotBytes)
	}
	return p, at, place, nil
}

// checkLive checks a view of splits on the device.
func (x *Exchanger) checkLive(v memory.View) error {
	if x.options.Validate {
		return invalid("Options.Validate cannot compare splits in device memory")
	}
	if err := v.Valid(); err != nil {
		return fmt.Errorf("alltoallv: splits: %w", err)
	}
	if need := LiveBytes(x.bounds.Size); v.Len() < need {
		return invalid("splits in %d bytes of device memory, %d ranks need %d", v.Len(), x.bounds.Size, need)
	}
	if !v.Holds(kernels.Int64) {
		return invalid("splits have elements of %s, want int64", v.Element())
	}
	if !x.c.Heap.Serves(v) || v.Ptr()%8 != 0 {
		return invalid("splits at %#x are not aligned memory of %v", v.Ptr(), x.c.Heap.Device())
	}
	return nil
}

// Fault returns the error of launches on a GPU that have run by now, nil if there is none; Exchange describes the errors. It
// costs a load, and knows nothing of work that still runs. It returns a disagreement on counts once, and clears it before it
// returns, so the next call on any stream finds a clean record.
func (x *Exchanger) Fault() error { return x.c.Fault() }

// op is a launch for a stream.
func (x *Exchanger) op() *op {
	o := x.idle.Take()
	if o == nil {
		o = new(op)
		o.args.Done = func(err error) {
			x.c.Done(err)
			o.release()
			x.idle.Give(o)
		}
	}
	return o
}

// release drops the memory that a launch used.
func (o *op) release() {
	o.plan.users.Add(-1)
	o.plan = nil
	o.args.Src, o.args.Dst, o.args.Splits = kernels.Buffer{}, kernels.Buffer{}, kernels.Buffer{}
}

// validate compares counts and elements on the control plane. mine is this rank's own error, which every rank gets.
func (x *Exchanger) validate(dst, src memory.View, sp *Splits, barrier bool, mine error) error {
	var claim agree.Claim
	if mine == nil {
		text, err := json.Marshal(counts{Send: sp.Send, Recv: sp.Recv, Elem: sp.elem(), Src: x.c.Heap.Operand(src).Elements, Dst: x.c.Heap.Operand(dst).Elements})
		if err != nil {
			mine = fmt.Errorf("alltoallv: validate: %w", err)
		}
		call := "an exchange"
		if barrier {
			call = "a barrier"
		}
		claim.Must, claim.Own = agree.Same(call), string(text)
	}
	all, err := x.c.Agree(claim, mine)
	if err != nil {
		return err
	}
	return compareCounts(all)
}

// counts is a rank's message in a call with Options.Validate.
type counts struct {
	Send, Recv []int64
	Elem       int64
	Src, Dst   kernels.Elements
}

// compareCounts reads the messages of all ranks. The error is the first disagreement.
func compareCounts(all []string) error {
	ranks := make([]counts, len(all))
	for r := range all {
		c := &ranks[r]
		if err := json.Unmarshal([]byte(all[r]), c); err != nil {
			return fmt.Errorf("alltoallv: validate: rank %d: %w", r, err)
		}
		if len(c.Send) != len(all) || len(c.Recv) != len(all) {
			return fmt.Errorf("alltoallv: validate: rank %d: malformed: %d and %d counts", r, len(c.Send), len(c.Recv))
		}
	}
	for s := range ranks {
		for d := range ranks {
			sent, expected, from, to := ranks[s].Send[d]*ranks[s].Elem, ranks[d].Recv[s]*ranks[d].Elem, ranks[s].Src, ranks[d].Dst
			if sent != expected || sent > 0 && !from.Alike(to) {
				return fmt.Errorf("alltoallv: %w: rank %d sends %d bytes to rank %d, which expects %s", comm.ErrMismatch, s, sent, d, fmt.Sprint(expected)+from.Unlike(to))
			}
		}
	}
	return nil
}

// Counts tells every rank how much it will receive: send[k] arrives as recv[this rank] on rank k. Both have one entry a
// rank. It is enqueued on s like Exchange, and recv is valid once that is complete. On a GPU, whose kernels cannot read Go
// memory, it is complete on return and cannot be captured (device.ErrCapturing).
func (x *Exchanger) Counts(s device.Stream, send, recv []int64) error {
	size := x.bounds.Size
	if len(send) != size || len(recv) != size {
		return invalid("%d counts to send and %d to receive for %d ranks", len(send), len(recv), size)
	}
	for k, n := range send {
		if n < 0 {
			return invalid("the count for rank %d is %d", k, n)
		}
	}
	if err := x.c.Takes(s); err != nil {
		return err
	}
	if x.counters {
		if capturing, err := device.Capturing(s); err != nil || capturing {
			return fmt.Errorf("alltoallv: counts: %w", cmp.Or(err, device.ErrCapturing))
		}
	}
	x.c.Lock()
	if x.counting.Send == nil {
		one := make([]int64, size)
		for k := range one {
			one[k] = 1
		}
		x.counting = Splits{Send: one, Recv: one, ElemSize: 8}
	}
	x.c.Unlock()
	in, out := memory.Host(shm.Bytes(send)), memory.Host(shm.Bytes(recv))
	if !x.counters {
		return x.Exchange(s, out, in, &x.counting)
	}
	n := 8 * int64(size)
	devIn, devOut := x.c.Extra().Slice(0, n), x.c.Extra().Slice(n, n)
	if s == nil {
		own, err := x.c.Heap.Device().NewStream()
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

// Explain says which algorithm an exchange with these splits would use, and why. inPlace says whether the destination
// would lie in the symmetric heap. It exchanges no message.
func (x *Exchanger) Explain(sp *Splits, inPlace bool) (Decision, error) {
	x.c.Lock()
	defer x.c.Unlock()
	if err := x.c.Alive(); err != nil {
		return Decision{}, err
	}
	if sp == nil {
		return Decision{}, invalid("nil splits")
	}
	p, err := x.plans.of(sp)
	if err != nil {
		return Decision{}, err
	}
	return x.plans.explain(p, inPlace), nil
}

// CacheStats counts the calls whose splits were in the cache.
type CacheStats struct {
	Hits, Misses uint64
	Entries      int
}

// tell tells of the cache of plans.
func (x *Exchanger) tell(add func(name string, n uint64)) {
	add("plan_cache_hits", x.plans.hits.Load())
	add("plan_cache_misses", x.plans.misses.Load())
}

// CacheStats returns this rank's counters.
func (x *Exchanger) CacheStats() CacheStats {
	x.c.Lock()
	defer x.c.Unlock()
	return CacheStats{x.plans.hits.Load(), x.plans.misses.Load(), len(x.plans.plans)}
}

// SetTimeout sets [Options.Timeout] for the calls of this rank from now on.
func (x *Exchanger) SetTimeout(d time.Duration) error { return x.c.SetTimeout(d) }

// Close waits for the exchanges on streams and gives the control block back. It is collective and idempotent: no rank frees
// a block that a peer may still signal. After a failure of the group it releases this rank's memory and returns. When ctx
// ends, calls that wait for peers give up.
func (x *Exchanger) Close(ctx context.Context) error { return x.c.Close(ctx) }
