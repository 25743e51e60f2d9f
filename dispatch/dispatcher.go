package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Dispatcher carries tokens to their experts and back, for one group over one symmetric heap. Its methods may be called
// from several goroutines, but all ranks must make the same calls in the same order, with handles of the same dispatch.
//
// A call is enqueued on its stream; with a nil stream it is complete on return. Views belong to the call until then. They are
// memory of the heap's device, in the heap or outside. Errors are of three kinds:
//
//   - Bad arguments (ErrInvalid, ErrReleased, ErrNoHandle, ErrHalf, memory.ErrFreed, ErrClosed) are refused before anything is
//     enqueued. The call has not happened and may be repeated; the other ranks wait for it.
//   - A disagreement of ranks is the same error on every rank, and the Dispatcher can be used further: *OverflowError, *IndexError,
//     *kernels.OrderError (ranks in different calls), *kernels.ShortError (a buffer too small for the rows of its dispatch). On
//     the host nothing has moved then; on a GPU the outputs of the call are undefined.
//   - A lost peer is comm.ErrPeerLost, a peer that does not come within Options.Timeout is comm.ErrTimeout, and a peer that waits
//     in a call of another kind, which this rank has not made, is comm.ErrOutOfStep. All name the peer. The Dispatcher can then
//     only be closed.
//
// On a host stream the errors of the last two kinds are errors of the stream. On a CUDA stream Fault and the next call return them.
type Dispatcher struct {
	c       *communicator.Communicator // its lock is held throughout a call, so that launches have one order
	options Options
	bounds  *kernels.DispatchBounds
	layout  kernels.Layout
	steps   steps // by which calls take multiprocessors
	// The placement as the engine reads it, and the words in which it counts.
	table, counters memory.View
	views           []handleViews
	ops             communicator.Pool[op]
	opened          time.Time
	stopMasks       func() // ends the masking of ranks that are lost, nil without Options.Masks
	masking         sync.Mutex
	masksOver       bool
	countsPatience  shm.Patience // of waits in Handle.HostCounts

	// mu guards the fields that launches on streams change too: the placement, and the lives of handles. It is not held during a wait
	// for a stream.
	mu        sync.Mutex
	placement *Placement
	local     []int          // this rank's experts
	mapped    *memory.Pinned // counts for the host, by handle; nil without Options.HostCounts and after Close
	holders   []*Handle      // the last handle that had each piece of memory
	next      int            // the piece of memory that take looks at first
	idle      []*Handle      // released, longest ago first
	ticket    uint64         // of the last dispatch
	routed    routed
}

// op is one launch, and keeps its arguments alive until it has run.
type op struct {
	dispatch kernels.Dispatch
	combine  kernels.Combine
	backward kernels.CombineBackward
	results  kernels.Results
	kind     kernels.DispatchOp
	handle   *Handle
	done     func(error) // for launches on a stream
}

// New makes a Dispatcher. It is collective: every rank of the heap's group calls it, in the same order as its other
// allocations, with equal options. It takes all its memory from the heap, which grows if it has no room. A failure on one rank is
// an error on all. The caller closes the Dispatcher before the heap.
//
// A ctx that ends while ranks wait for each other may leave the group out of step, as in memory.NewHeap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Dispatcher, error) {
	if h == nil {
		return nil, invalid("the heap is nil")
	}
	g := h.Group()
	d := &Dispatcher{opened: time.Now()}
	own := communicator.Config{Name: "dispatch", Layer: d.tellLayer, Hosts: true}
	own.Traffic = func(add func(rank int, t flight.Traffic)) { d.tellTraffic(h, add) }
	err := d.settle(h, o, &own)
	taken, err := d.options.Shared.take(h, err)
	most, failed := d.meet(ctx, h, taken, err)
	if failed != nil {
		return nil, failed
	}
	if o.AgreeMaxTokens && err == nil {
		o.MaxTokens = most
		err = d.settle(h, o, &own)
	}
	o = d.options
	own.Timeout = o.Timeout
	if o.Shared != nil {
		if err := o.Shared.enter(ctx, d, h, err); err != nil {
			return nil, err
		}
	}
	if d.c, err = communicator.Open(ctx, h, own, err); err != nil {
		return nil, errors.Join(err, d.mapped.Close(), o.Shared.leave(d))
	}
	if o.Shared != nil {
		if err := o.Shared.join(ctx, d); err != nil {
			return nil, errors.Join(err, d.Close(ctx))
		}
	}
	d.holders = make([]*Handle, o.Handles)
	for range o.Handles {
		d.idle = append(d.idle, &Handle{d: d})
	}
	if o.Masks {
		d.stopMasks = g.OnLoss(func(rank int, ended bool) { d.c.Port().(kernels.Masker).Mask(rank, ended) })
	}
	return d, nil
}

// Layer is the name of Options.Layer.
func (d *Dispatcher) Layer() string { return d.options.Layer }

// MaxTokens is the most tokens that one rank has in a call.
func (d *Dispatcher) MaxTokens() int { return d.options.MaxTokens }

// MaxRows is the number of rows that fit Handle.Rows. Heap buffers of that many rows serve every call without staging.
func (d *Dispatcher) MaxRows() int { return int(d.bounds.Rows) }

// NumberWords is the length of Tokens.Numbers.
func (d *Dispatcher) NumberWords() int { return d.bounds.MappedWords() }

// Memory is the dispatcher's memory in the heap, which holds the views of its handles: its own, and that of Options.Shared, where it has rows there.
// A caller that knows addresses only can slice views from it.
func (d *Dispatcher) Memory() (own, shared memory.View) {
	if d.options.sharesRows() {
		shared = d.options.Shared.view()
	}
	return d.c.Extra(), shared
}

// Placement is where the experts are now. It must not be changed.
func (d *Dispatcher) Placement() *Placement {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.placement
}

// SetPlacement moves the experts, for later dispatches; the caller moves their weights. Handles keep their dispatches. Every rank
// keeps its number of expert slots. It is collective, waits for earlier calls, and returns when all ranks have called it.
func (d *Dispatcher) SetPlacement(ctx context.Context, p *Placement) error {
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.c.Alive(); err != nil {
		return err
	}
	err := d.usable()
	if err == nil {
		err = p.validate(d.options.Experts, d.bounds.Ranks)
	}
	if err == nil {
		if first := p.slots(d.bounds.Ranks); !slices.Equal(first, d.bounds.First) {
			err = invalid("the placement has slots %v, the dispatcher was made with %v: every rank keeps its number", first, d.bounds.First)
		}
	}
	if err == nil {
		err = d.c.Wait()
	}
	var claim agree.Claim
	if err == nil {
		claim.Must = agree.Same("Placement " + p.String())
	}
	if _, err := agree.On(ctx, d.c.Group, claim, err); err != nil {
		return fmt.Errorf("dispatch: set placement: %w", err)
	}
	p = p.clone()
	if err := transfer(d.c.Heap, d.table, memory.Host(shm.Bytes(p.table(d.bounds.First)))); err != nil {
		d.c.Done(fmt.Errorf("set placement: %w", err)) // ranks may have different tables
		return fmt.Errorf("dispatch: set placement: %w", err)
	}
	d.mu.Lock()
	d.replaced()
	d.placement, d.local = p, p.Local(d.bounds.Rank)
	d.mu.Unlock()
	return nil
}

// transfer copies between the host and a dispatcher's memory, on a stream of its own.
func transfer(h *memory.Heap, dst, src memory.View) error {
	if dst.OnHost() && src.OnHost() {
		return memory.Copy(nil, dst, src)
	}
	s, err := h.Device().NewStream()
	if err != nil {
		return err
	}
	if err = memory.Copy(s, dst, src); err == nil {
		err = s.Synchronize()
	}
	return errors.Join(err, s.Close())
}

// op returns an idle launch.
func (d *Dispatcher) op(kind kernels.DispatchOp, h *Handle) *op {
	o := d.ops.Take()
	if o == nil {
		o = new(op)
		o.done = func(err error) {
			d.c.Done(err)
			d.retire(o, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	o.kind, o.handle = kind, h
	h.taken = false
	h.users++
	return o
}

// launchOf are the fields that all launches have.
func (d *Dispatcher) launchOf(kind kernels.DispatchOp, h *Handle) kernels.DispatchCall {
	l := kernels.Launched{Timeout: d.c.Timeout(), Note: kernels.Note{Algorithm: d.options.Layout.String(), Payload: -1}}
	if d.options.LowLatency {
		l.Note.Algorithm = "low latency"
	}
	c := kernels.DispatchCall{Handle: h.memory, Op: kind, Tokens: h.tokens, Routing: d.routing(h), Blocks: d.options.MaxSMs, Launched: l}
	if kind != kernels.OpCombineBackward { // whose times are not in tables
		c.DefaultBlocks = d.steps.at(h.tokens)
	}
	return c
}

// launch puts a call, or the half of it in phase, on s. After the first half the handle keeps the second.
func (d *Dispatcher) launch(s device.Stream, o *op, phase kernels.Phase) error {
	h := o.handle
	var second *op
	if phase == kernels.Send {
		second = d.op(o.kind, h)
		second.dispatch, second.combine, second.backward = o.dispatch, o.combine, o.backward
	}
	kind := o.kind
	err := d.late(d.c.Launch(s, o.operation(phase, s != nil)))
	if err == nil {
		d.options.Shared.called(d, h, kind)
	}
	switch {
	case s == nil:
		d.retire(o, err)
	case err != nil:
		d.recycle(o) // not enqueued
	}
	switch {
	case second == nil:
	case err != nil:
		d.recycle(second)
	default:
		d.mu.Lock()
		h.half = second
		d.mu.Unlock()
	}
	return err
}

// operation is the launch for the engine. streamed says that the engine will call Done.
func (o *op) operation(phase kernels.Phase, streamed bool) kernels.Operation {
	var call *kernels.DispatchCall
	var operation kernels.Operation
	switch o.kind {
	case kernels.OpResults:
		if o.results.Done = nil; streamed {
			o.results.Done = o.done
		}
		return &o.results
	case kernels.OpDispatch, kernels.OpRedispatch:
		call, operation = &o.dispatch.DispatchCall, &o.dispatch
	case kernels.OpCombineBackward:
		call, operation = &o.backward.DispatchCall, &o.backward
	default:
		call, operation = &o.combine.DispatchCall, &o.combine
	}
	if call.Phase, call.Done = phase, nil; streamed {
		call.Done = o.done
	}
	return operation
}

// second is the launch of the second half of a call of h.
func (d *Dispatcher) second(s device.Stream, h *Handle, kinds ...kernels.DispatchOp) error {
	if err := d.ready(h, true); err != nil {
		return err
	}
	d.mu.Lock()
	o := h.half
	if !slices.Contains(kinds, o.kind) {
		d.mu.Unlock()
		return fmt.Errorf("dispatch: %w: the handle is in a %v", ErrHalf, o.kind)
	}
	h.half = nil
	d.mu.Unlock()
	return d.launch(s, o, kernels.Receive)
}

// retire takes back a launch that has run.
func (d *Dispatcher) retire(o *op, err error) {
	if err != nil && o.kind == kernels.OpDispatch {
		d.mu.Lock()
		o.handle.err = err
		d.overflowed(err)
		d.mu.Unlock()
	}
	d.recycle(o)
}

// recycle makes a launch idle.
func (d *Dispatcher) recycle(o *op) {
	d.mu.Lock()
	o.handle.users--
	d.mu.Unlock()
	switch o.handle = nil; o.kind {
	case kernels.OpDispatch, kernels.OpRedispatch:
		o.dispatch, o.results = kernels.Dispatch{}, kernels.Results{}
	case kernels.OpCombineBackward:
		o.backward = kernels.CombineBackward{}
	case kernels.OpResults:
		o.results = kernels.Results{}
	default:
		o.combine = kernels.Combine{}
	}
	d.ops.Give(o)
}

// Fault returns the error of calls that have run by now, nil if there is none, on a device whose streams do not report it; the host's
// streams do. Fault or the next call returns a disagreement of ranks once; the handle of the failed call can then only be released.
func (d *Dispatcher) Fault() error {
	d.c.Lock()
	defer d.c.Unlock()
	if err := d.c.Alive(); err != nil {
		return err
	}
	return d.late(d.c.LockedFault())
}

// usable returns the error of a call that is not possible. The communicator is locked.
func (d *Dispatcher) usable() error { return d.late(d.c.Usable()) }

// late marks the handles of the calls whose error err is, which was reported after they were made, and returns err.
func (d *Dispatcher) late(err error) error {
	if err == nil {
		return nil
	}
	var hit *kernels.HandlesError
	if errors.As(err, &hit) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.overflowed(hit.Err)
		for _, i := range hit.Handles {
			if h := d.holders[i]; h != nil {
				h.lost, h.err = true, hit.Err
			}
		}
	}
	return err
}

// SetTimeout sets [Options.Timeout] for the calls of this rank from now on.
func (d *Dispatcher) SetTimeout(t time.Duration) error { return d.c.SetTimeout(t) }

// Close waits for the launches on streams and gives the memory back; handles are dead. It is collective and idempotent: no rank
// frees memory that a peer may still write. After a failure of the group it releases this rank's memory and returns. When ctx
// ends, launches that wait for peers give up.
func (d *Dispatcher) Close(ctx context.Context) error {
	d.endMasks()
	err := d.c.Close(ctx)
	if errors.Is(err, kernels.ErrRunning) {
		return err // and they write what is mapped
	}
	d.mu.Lock()
	mapped := d.mapped
	d.mapped = nil
	d.mu.Unlock()
	err = errors.Join(err, d.options.Shared.leave(d))
	if cerr := mapped.Close(); cerr != nil {
		err = errors.Join(err, fmt.Errorf("dispatch: close: %w", cerr))
	}
	return err
}
