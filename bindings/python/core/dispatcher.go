package core

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// Dispatcher is a dispatch.Dispatcher of a Place. On the host its calls run in the queue of the Comm. On a GPU they are enqueued on a
// CUstream by their caller, wait for nothing and have no ticket.
type Dispatcher struct {
	comm  *Comm
	gpu   *GPU // nil on the host
	inner *dispatch.Dispatcher
	alive atomic.Int64 // handles
}

// NewDispatcher submits the making of a dispatcher, as Place describes.
func (c *Comm) NewDispatcher(o dispatch.Options, put func(*Dispatcher) uint64) (Ticket, error) {
	o.HostCounts = true // it costs nothing here
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		d := &Dispatcher{comm: c}
		if err := d.open(h, o); err != nil {
			return 0, err
		}
		c.dispatchers = append(c.dispatchers, d)
		return int64(put(d)), nil
	})
}

// NewDispatcher submits the making of a dispatcher, as Place describes.
func (g *GPU) NewDispatcher(o dispatch.Options, put func(*Dispatcher) uint64) (Ticket, error) {
	return g.comm.do(func() (int64, error) {
		g.mu.Lock()
		closed := g.closed
		g.mu.Unlock()
		if closed {
			return 0, ErrClosed
		}
		d := &Dispatcher{comm: g.comm, gpu: g}
		if err := d.open(g.heap, o); err != nil {
			return 0, err
		}
		g.mu.Lock()
		g.dispatchers = append(g.dispatchers, d)
		g.mu.Unlock()
		return int64(put(d)), nil
	})
}

// open makes the dispatcher over a heap, on the worker.
func (d *Dispatcher) open(h *memory.Heap, o dispatch.Options) (err error) {
	o.Timeout = seconds(d.comm.options.TimeoutSeconds)
	ctx, cancel := d.comm.meeting()
	defer cancel()
	d.inner, err = dispatch.New(ctx, h, o)
	return err
}

// Comm is that of the dispatcher's place.
func (d *Dispatcher) Comm() *Comm { return d.comm }

// OnGPU reports whether calls are enqueued.
func (d *Dispatcher) OnGPU() bool { return d.gpu != nil }

// MaxRows is the most rows that this rank can get in one dispatch.
func (d *Dispatcher) MaxRows() int { return d.inner.MaxRows() }

// Experts lists this rank's experts.
func (d *Dispatcher) Experts() []int {
	_, g, err := d.comm.ready()
	if err != nil {
		return nil
	}
	return d.inner.Placement().Local(g.Rank())
}

// Alive is how many dispatches of this dispatcher have not been released.
func (d *Dispatcher) Alive() int { return int(d.alive.Load()) }

// Counters are what this rank has done so far.
func (d *Dispatcher) Counters() (dispatch.Counters, error) { return d.inner.Counters() }

// Close submits the end of the dispatcher. It is collective, and on a GPU waits for what streams have been given.
func (d *Dispatcher) Close() (Ticket, error) {
	return d.comm.do(func() (int64, error) {
		gone := func(o *Dispatcher) bool { return o == d }
		if g := d.gpu; g != nil {
			g.mu.Lock()
			g.dispatchers = slices.DeleteFunc(g.dispatchers, gone)
			g.mu.Unlock()
			return 0, d.inner.Close(context.WithoutCancel(d.comm.ctx))
		}
		d.comm.dispatchers = slices.DeleteFunc(d.comm.dispatchers, gone)
		ctx, cancel := d.comm.meeting()
		defer cancel()
		return 0, d.inner.Close(ctx)
	})
}

// Half says which part of a call is made: all of it, or the first half, whose second is Receive.
type Half int64

// The parts.
const (
	Whole Half = iota
	First
)

// DispatchCall is a dispatch as C callers describe it; see dispatch.Tokens. The memory belongs to the call until that is complete.
type DispatchCall struct {
	X, Scales, Experts, Weights Buffer
	// Handle names the dispatch whose ways other rows are sent, without Experts and Weights. 0: this is a new dispatch.
	Handle uint64
	Half   Half
	// Made and Rows are results on a GPU: the name of a new dispatch's handle, and where its rows lie.
	Made uint64
	Rows uintptr
}

// CombineCall is a combine as C callers describe it; see dispatch.CombineOptions.
type CombineCall struct {
	Y, Rows, Weights, SumWeights Buffer
	Bias                         [2]Buffer
	Ready, TokenWeights          Buffer
	Handle                       uint64
	// Routing names the routing that the call goes by in place of a handle. Not for halves.
	Routing uint64
	// Backward is not 0 for the gradient of a dispatch: Y that of the tokens, Rows of the rows, Weights of the weights of rows and
	// SumWeights of those of the tokens.
	Backward  int64
	Weighting int64
	Half      Half
	Release   int64 // not 0: give the handle back with the call
}

// BackwardCall is the gradients of a combine as C callers describe it; see dispatch.Dispatcher.CombineBackward.
type BackwardCall struct {
	DRows, DWeights, DY, Rows, Weights Buffer
	Handle                             uint64
	Weighting                          int64
}

// Handle is a dispatch.Handle that may be released from anywhere, any number of times.
type Handle struct {
	d        *Dispatcher
	inner    *dispatch.Handle
	released atomic.Bool // no call can be made with it
	back     atomic.Bool // its memory was given back
}

// run makes a call: on a GPU at once, on the host in the queue.
func (d *Dispatcher) run(stream uintptr, call func(s device.Stream) (uint64, error)) (Ticket, error) {
	g := d.gpu
	if g == nil {
		if stream != 0 {
			return 0, fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
		}
		return d.comm.do(func() (int64, error) {
			value, err := call(nil)
			return int64(value), err
		})
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return 0, ErrClosed
	}
	s, err := g.wrap(stream)
	if err != nil {
		return 0, err
	}
	_, err = call(s)
	return 0, err
}

// handle refuses one that is not alive here.
func (d *Dispatcher) handle(h *Handle) (*dispatch.Handle, error) {
	if h.d != d || h.released.Load() {
		return nil, fmt.Errorf("core: %w", dispatch.ErrReleased)
	}
	return h.inner, nil
}

// view is memory as calls take it: symmetric where it is.
func (d *Dispatcher) view(b Buffer) (memory.View, error) {
	if v, ok := d.own(b); ok {
		return v, nil
	}
	if d.gpu != nil {
		return d.gpu.view(b)
	}
	return d.comm.view(b)
}

// own is memory as a part of the dispatcher's.
func (d *Dispatcher) own(b Buffer) (memory.View, bool) {
	m := d.inner.Memory()
	if at := m.Ptr(); b.Bytes > 0 && b.Addr >= at && b.Addr-at < uintptr(m.Len()) {
		if off := int64(b.Addr - at); b.Bytes <= m.Len()-off {
			return m.Slice(off, b.Bytes), true
		}
	}
	return memory.View{}, false
}

// views are several of them.
func (d *Dispatcher) views(of ...*Buffer) (v [8]memory.View, err error) {
	for i, b := range of {
		if v[i], err = d.view(*b); err != nil {
			return v, err
		}
	}
	return v, nil
}

// Dispatch makes a dispatch, or where there is an h one of other rows by the ways of that. put names the handle of a new one. The name
// is the ticket's value, and on a GPU left in the call.
func (d *Dispatcher) Dispatch(stream uintptr, c *DispatchCall, h *Handle, put func(*Handle) uint64) (Ticket, error) {
	if h != nil && (c.Experts.Bytes != 0 || c.Weights.Bytes != 0) {
		return 0, fmt.Errorf("core: %w: experts or weights for a dispatch that was routed before", ErrInvalid)
	}
	v, err := d.views(&c.X, &c.Scales, &c.Experts, &c.Weights)
	if err != nil {
		return 0, err
	}
	first := c.Half == First
	if h != nil {
		inner, err := d.handle(h)
		if err != nil {
			return 0, err
		}
		return d.run(stream, func(s device.Stream) (uint64, error) {
			if first {
				return 0, d.inner.RedispatchSend(s, inner, v[0], v[1])
			}
			return 0, d.inner.Redispatch(s, inner, v[0], v[1])
		})
	}
	return d.run(stream, func(s device.Stream) (uint64, error) {
		call := d.inner.Dispatch
		if first {
			call = d.inner.DispatchSend
		}
		inner, err := call(s, dispatch.Tokens{X: v[0], Scales: v[1], Experts: v[2], Weights: v[3]})
		if err != nil {
			return 0, err
		}
		return d.named(inner, &c.Made, &c.Rows, put), nil
	})
}

// ResultCall is a copy of what a dispatch has left, as C callers describe it; see dispatch.Result. Buffers without bytes are not wanted.
type ResultCall struct {
	Rows, Scales, Indices, Weights, Sources, Counts, Offsets, RankCounts Buffer
	// Routing is filled with the routing: RoutingBytes of the dispatcher's device, from a multiple of 128 on. It belongs to the routing until
	// that is dropped and the calls that go by it are complete.
	Routing Buffer
	Handle  uint64
	Length  int64
	Release int64 // not 0: give the handle back with the call
	// Made is a result: the name of the routing, 0 without one.
	Made uint64
}

// RouteCall is Route as C callers describe it.
type RouteCall struct {
	Routing uint64
	// Made and Rows are results on a GPU: the name of the handle, and where its rows lie.
	Made uint64
	Rows uintptr
}

// Routing is a dispatch.Routing of a Dispatcher.
type Routing struct {
	d     *Dispatcher
	inner *dispatch.Routing
}

// RoutingBytes is the size of a routing.
func (d *Dispatcher) RoutingBytes() int64 { return d.inner.RoutingBytes() }

// Results copies what a complete dispatch has left to memory of the caller: on a GPU on the stream, on the host before it returns, in the
// caller's thread. put names the routing.
func (d *Dispatcher) Results(stream uintptr, c *ResultCall, h *Handle, put func(*Routing) uint64) error {
	to := dispatch.Result{Length: int(c.Length)}
	for _, part := range [...]struct {
		to   *memory.View
		from Buffer
	}{
		{&to.Rows, c.Rows}, {&to.Scales, c.Scales}, {&to.Indices, c.Indices}, {&to.Weights, c.Weights}, {&to.Sources, c.Sources},
		{&to.Counts, c.Counts}, {&to.Offsets, c.Offsets}, {&to.RankCounts, c.RankCounts}, {&to.Routing, c.Routing},
	} {
		if part.from.Bytes == 0 {
			continue
		}
		v, err := d.view(part.from)
		if err != nil {
			return err
		}
		*part.to = v
	}
	inner, err := d.handle(h)
	if err != nil {
		return err
	}
	var s device.Stream
	if g := d.gpu; g != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.closed {
			return ErrClosed
		}
		if s, err = g.wrap(stream); err != nil {
			return err
		}
	}
	routing, err := inner.CopyTo(s, to)
	if err != nil {
		return err
	}
	if routing != nil {
		c.Made = put(&Routing{d: d, inner: routing})
	}
	if c.Release != 0 && h.gone() {
		h.back.Store(true)
		inner.Release()
	}
	return nil
}

// Route takes a handle whose calls go by a routing, as dispatch.Dispatcher.Route does. put names it, as for Dispatch.
func (d *Dispatcher) Route(stream uintptr, c *RouteCall, r *Routing, put func(*Handle) uint64) (Ticket, error) {
	if err := d.owns(r); err != nil {
		return 0, err
	}
	return d.run(stream, func(device.Stream) (uint64, error) {
		inner, err := d.inner.Route(r.inner)
		if err != nil {
			return 0, err
		}
		return d.named(inner, &c.Made, &c.Rows, put), nil
	})
}

// owns refuses a routing of another dispatcher.
func (d *Dispatcher) owns(r *Routing) error {
	if r.d != d {
		return fmt.Errorf("core: %w: the routing is of another dispatcher", ErrInvalid)
	}
	return nil
}

// named names a handle that a call has made. On a GPU the caller is still here, and finds the name and the place of the rows in the call.
func (d *Dispatcher) named(inner *dispatch.Handle, name *uint64, rows *uintptr, put func(*Handle) uint64) uint64 {
	d.alive.Add(1)
	made := put(&Handle{d: d, inner: inner})
	if d.gpu != nil {
		*name, *rows = made, inner.Rows().Ptr()
	}
	return made
}

// Receive makes the second half of the call that the handle is in.
func (d *Dispatcher) Receive(stream uintptr, h *Handle, combine bool) (Ticket, error) {
	inner, err := d.handle(h)
	if err != nil {
		return 0, err
	}
	return d.run(stream, func(s device.Stream) (uint64, error) {
		if combine {
			return 0, d.inner.CombineReceive(s, inner)
		}
		return 0, d.inner.DispatchReceive(s, inner)
	})
}

// Combine makes a combine, or the gradient of a dispatch, by a handle or by a routing.
func (d *Dispatcher) Combine(stream uintptr, c *CombineCall, h *Handle, r *Routing) (Ticket, error) {
	v, err := d.views(&c.Y, &c.Rows, &c.Weights, &c.SumWeights, &c.Bias[0], &c.Bias[1], &c.Ready, &c.TokenWeights)
	if err != nil {
		return 0, err
	}
	var inner *dispatch.Handle
	switch {
	case r == nil:
		inner, err = d.handle(h)
	case c.Half == First || c.Release != 0:
		err = fmt.Errorf("core: %w: a combine by a routing in halves, or with the handle's release", ErrInvalid)
	default:
		err = d.owns(r)
	}
	if err != nil {
		return 0, err
	}
	o := dispatch.CombineOptions{
		Weighting: dispatch.Weighting(c.Weighting), Weights: v[2], SumWeights: v[3], Bias: [2]memory.View{v[4], v[5]}, Ready: v[6], TokenWeights: v[7],
		Release: c.Release != 0,
	}
	backward, first := c.Backward != 0, c.Half == First
	return d.run(stream, func(s device.Stream) (uint64, error) {
		inner := inner
		if r != nil {
			routed, err := d.inner.Route(r.inner)
			if err != nil {
				return 0, err
			}
			defer routed.Release()
			inner = routed
		}
		switch {
		case backward:
			return 0, d.inner.DispatchBackward(s, v[0], v[3], v[1], v[2], inner)
		case first:
			return 0, d.inner.CombineSend(s, v[0], v[1], inner, o)
		}
		err := d.inner.Combine(s, v[0], v[1], inner, o)
		if err == nil && o.Release {
			h.gone()
			h.back.Store(true)
		}
		return 0, err
	})
}

// CombineBackward makes the gradients of a combine.
func (d *Dispatcher) CombineBackward(stream uintptr, c *BackwardCall, h *Handle) (Ticket, error) {
	v, err := d.views(&c.DRows, &c.DWeights, &c.DY, &c.Rows, &c.Weights)
	if err != nil {
		return 0, err
	}
	inner, err := d.handle(h)
	if err != nil {
		return 0, err
	}
	o := dispatch.CombineOptions{Weighting: dispatch.Weighting(c.Weighting), Weights: v[4]}
	return d.run(stream, func(s device.Stream) (uint64, error) {
		return 0, d.inner.CombineBackward(s, v[0], v[1], v[2], v[3], inner, o)
	})
}

// Output is where what a dispatch leaves lies: rows, scales, counts, offsets, rank counts, indices, weights, sources and landed, as
// dispatch.Handle has them. It is the same for every dispatch whose rows lie in the same place.
func (h *Handle) Output() (out [9]Buffer) {
	in := h.inner
	for i, v := range [...]memory.View{in.Rows(), in.Scales(), in.Counts(), in.Offsets(), in.RankCounts(), in.Indices(), in.Weights(), in.Sources(), in.Landed()} {
		if out[i].Bytes = v.Len(); v.Len() > 0 {
			out[i].Addr = v.Ptr()
		}
	}
	return out
}

// HostCounts is how many rows came. It waits for that until ctx ends.
func (h *Handle) HostCounts(ctx context.Context) (dispatch.HostCounts, error) {
	inner, err := h.d.handle(h)
	if err != nil {
		return dispatch.HostCounts{}, err
	}
	return inner.HostCounts(ctx)
}

// gone marks the handle as released, and reports whether it was not before.
func (h *Handle) gone() bool {
	if h.released.Swap(true) {
		return false
	}
	h.d.alive.Add(-1)
	return true
}

// Release gives the handle's output back: on the host behind the operations submitted before, on a GPU behind what streams have been
// given. On a closed Comm there is nothing left to give back.
func (h *Handle) Release() {
	if !h.gone() {
		return
	}
	release := func() (int64, error) {
		if !h.back.Swap(true) {
			h.inner.Release()
		}
		return 0, nil
	}
	if h.d.gpu != nil {
		_, _ = release()
		return
	}
	_, _ = h.d.comm.do(release)
}
