package alltoallv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
	"github.com/switchyard-moe/switchyard/memory"
)

// ErrClosed is returned by calls on a closed Exchanger.
var ErrClosed = errors.New("alltoallv: exchanger is closed")

// Exchanger carries the all-to-all exchanges of one group over one symmetric heap. Its methods may be called from
// several goroutines, but all ranks must make the same calls in the same order.
type Exchanger struct {
	heap     *memory.Heap
	group    *comm.Group
	engine   *host.Engine
	channels kernels.Channels
	block    *memory.Buffer
	options  Options
	registry *registry

	mu       sync.Mutex // orders calls
	cache    *cache
	closed   bool
	last     device.Stream // of the last launch
	counting Splits        // of Counts
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
}

// New makes an Exchanger. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. What fails on one rank is an error on all. The caller closes it before the heap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Exchanger, error) {
	x := &Exchanger{heap: h, group: h.Group()}
	mine, err := x.configure(o)
	if err := agree(ctx, x.group, "compare options", mine, err); err != nil {
		return nil, err
	}
	// No peer may write before our block is zero, so all ranks meet again once it is.
	err = x.allocate()
	if err := agree(ctx, x.group, "allocate channels", "", err); err != nil {
		if x.block != nil {
			err = errors.Join(err, x.block.Free())
		}
		return nil, err
	}
	return x, nil
}

// configure checks the options and describes what must be equal on all ranks.
func (x *Exchanger) configure(o Options) (mine string, err error) {
	if x.channels, err = o.channels(x.group.Size()); err != nil {
		return "", err
	}
	if x.registry, err = newRegistry(o.Algorithms, o.Algorithm, x.group.Rank(), x.group.Size()); err != nil {
		return "", err
	}
	if k := x.heap.Device().Kind(); k != device.HostKind {
		return "", invalid("no engine for %v devices", k)
	}
	x.options, x.cache = o, newCache(o.CacheEntries)
	return o.fingerprint(&x.channels, x.registry.names()), nil
}

func (x *Exchanger) allocate() (err error) {
	c := &x.channels
	if x.block, err = x.heap.Alloc(c.Bytes()); err != nil {
		return fmt.Errorf("alltoallv: %d bytes for channels and staging: %w", c.Bytes(), err)
	}
	c.Offset = x.block.Offset()
	clear(x.block.Bytes()[:c.ControlBytes()])
	x.engine = host.New(x.heap.Space(), x.group.Err)
	return nil
}

// agree brings a description, or the error that keeps this rank from going on, to all ranks. The error is this rank's,
// another's, or says which descriptions differ.
func agree(ctx context.Context, g *comm.Group, what, mine string, failed error) error {
	const ok, bad = "+", "-"
	text := ok + mine
	if failed != nil {
		text = bad + failed.Error()
	}
	all, err := g.AllGather(ctx, []byte(text))
	switch {
	case failed != nil:
		return failed
	case err != nil:
		return fmt.Errorf("alltoallv: %s: %w", what, err)
	}
	for r, theirs := range all {
		if why, failed := strings.CutPrefix(string(theirs), bad); failed {
			return fmt.Errorf("alltoallv: %s: rank %d: %s", what, r, why)
		}
	}
	for r, theirs := range all {
		if string(theirs) != string(all[0]) {
			return fmt.Errorf("alltoallv: %w: rank 0 has %s; rank %d has %s", comm.ErrMismatch, all[0][1:], r, theirs[1:])
		}
	}
	return nil
}

// Exchange sends Send[k] elements of src to every rank k and receives Recv[k] elements from it into dst.
//
// The call is enqueued on s; with a nil stream it is complete on return. Both buffers belong to the exchange until then
// and must not overlap. A dst in the symmetric heap is written by the peers directly. Send[k] here must equal Recv of
// this rank on rank k.
//
// Bad arguments return an error (ErrInvalid, memory.ErrFreed, ErrClosed) before anything is enqueued; the call then has
// not happened and may be repeated, which the other ranks wait for. A lost peer is an error that is comm.ErrPeerLost, a
// peer that does not come within Options.Timeout one that is comm.ErrTimeout; both name the peer, and the Exchanger can
// then only be closed. A *kernels.CountMismatchError is an error of this call alone. On a stream these are errors of the
// stream.
func (x *Exchanger) Exchange(s device.Stream, dst, src memory.View, sp *Splits) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	p, inPlace, dstOffset, err := x.prepare(dst, src, sp)
	if x.options.Validate {
		err = x.validate(sp, err)
	}
	if err != nil {
		return err
	}
	if err := x.order(s); err != nil {
		return err
	}
	o := &x.inline
	if s != nil {
		o = x.op()
	}
	o.plan, o.dst, o.src = p, dst, src
	a := &o.args
	a.Channels, a.Timeout = &x.channels, x.options.Timeout
	a.Src, a.Dst, a.DstOffset = src.Bytes(), dst.Bytes(), -1
	a.Routes = &p.routes[0]
	if inPlace {
		a.DstOffset, a.Routes = dstOffset, &p.routes[1]
	}
	p.users.Add(1)
	err = x.engine.AllToAllV(s, a)
	switch {
	case s == nil:
		x.release(o, err)
	case err != nil: // it was not enqueued
		x.retire(o, nil)
	}
	if err != nil {
		return fmt.Errorf("alltoallv: %w", err)
	}
	return nil
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
	if p, err = x.plan(sp); err != nil {
		return nil, false, 0, err
	}
	if err := src.Valid(); err != nil {
		return nil, false, 0, fmt.Errorf("alltoallv: source: %w", err)
	}
	if err := dst.Valid(); err != nil {
		return nil, false, 0, fmt.Errorf("alltoallv: destination: %w", err)
	}
	if src.Len() < p.srcBytes {
		return nil, false, 0, invalid("the source has %d bytes, the send splits %v of %d-byte elements need %d", src.Len(), sp.Send, sp.elem(), p.srcBytes)
	}
	if dst.Len() < p.dstBytes {
		return nil, false, 0, invalid("the destination has %d bytes, the receive splits %v of %d-byte elements need %d", dst.Len(), sp.Recv, sp.elem(), p.dstBytes)
	}
	if shm.Overlap(src.Bytes()[:p.srcBytes], dst.Bytes()[:p.dstBytes]) {
		return nil, false, 0, invalid("source and destination overlap")
	}
	off, inPlace = dst.Symmetric(x.heap)
	if staged := !inPlace || p.routes[1].Staged; staged && chunkFor(p.largestRecv) > x.channels.SlotBytes {
		return nil, false, 0, invalid("a message of %d bytes takes more than %d chunks of Options.SlotBytes, %d", p.largestRecv, kernels.MaxChunks, x.channels.SlotBytes)
	}
	return p, inPlace, off, nil
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

// order makes s wait for the launch before, when that was on another stream.
func (x *Exchanger) order(s device.Stream) error {
	if x.last != nil && x.last != s {
		e, err := x.last.Record()
		if err != nil {
			return fmt.Errorf("alltoallv: order streams: %w", err)
		}
		if s == nil {
			err = e.Wait()
		} else {
			err = s.Wait(e)
		}
		if err != nil {
			return fmt.Errorf("alltoallv: order streams: %w", err)
		}
	}
	x.last = s
	return nil
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
		var mismatch *kernels.CountMismatchError
		if !errors.As(err, &mismatch) {
			failure := err
			x.broken.CompareAndSwap(nil, &failure)
		}
	}
	o.plan.users.Add(-1)
	o.plan, o.dst, o.src = nil, memory.View{}, memory.View{}
	o.args.Src, o.args.Dst = nil, nil
}

// validate compares counts on the control plane. mine is this rank's own complaint, which every rank hears of.
func (x *Exchanger) validate(sp *Splits, mine error) error {
	type claim struct {
		Error      string
		Send, Recv []int64
		Elem       int64
	}
	var c claim
	if mine != nil {
		c.Error = mine.Error()
	} else {
		c = claim{Send: sp.Send, Recv: sp.Recv, Elem: sp.elem()}
	}
	text, err := json.Marshal(c)
	if err != nil {
		return errors.Join(mine, fmt.Errorf("alltoallv: validate: %w", err))
	}
	ctx, cancel := context.WithTimeout(context.Background(), x.options.Timeout)
	defer cancel()
	all, err := x.group.AllGather(ctx, text)
	if err != nil {
		return errors.Join(mine, fmt.Errorf("alltoallv: validate: %w", err))
	}
	claims := make([]claim, len(all))
	for r := range all {
		if err := json.Unmarshal(all[r], &claims[r]); err != nil {
			return fmt.Errorf("alltoallv: validate: rank %d: %w", r, err)
		}
		if claims[r].Error != "" && mine == nil {
			mine = invalid("rank %d refused the call: %s", r, claims[r].Error)
		}
	}
	if mine != nil {
		return mine
	}
	for s := range claims {
		for d := range claims {
			sent, expected := claims[s].Send[d]*claims[s].Elem, claims[d].Recv[s]*claims[d].Elem
			if sent != expected {
				return invalid("rank %d sends %d bytes to rank %d, which expects %d", s, sent, d, expected)
			}
		}
	}
	return nil
}

// Counts tells every rank how much it will receive: send[k] arrives as recv[this rank] on rank k. Both have one entry a
// rank. It is enqueued on s like Exchange, and recv is valid once that is complete.
func (x *Exchanger) Counts(s device.Stream, send, recv []int64) error {
	size := x.group.Size()
	if len(send) != size || len(recv) != size {
		return invalid("%d counts to send and %d to receive for %d ranks", len(send), len(recv), size)
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
	return x.Exchange(s, memory.Host(shm.Bytes(recv)), memory.Host(shm.Bytes(send)), &x.counting)
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
	if last != nil {
		if e, err := last.Record(); err == nil {
			_ = e.Wait()
		}
	}
	var err error
	if x.group.Err() == nil {
		if err = x.group.Barrier(ctx); err != nil {
			err = fmt.Errorf("alltoallv: close: %w", err)
		}
	}
	return errors.Join(err, x.block.Free())
}
