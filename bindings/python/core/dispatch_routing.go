package core

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// ResultCall is a copy of what a dispatch has left, as C callers describe it; see dispatch.Result. Buffers without bytes are not wanted.
type ResultCall struct {
	Rows, Scales, Indices, Weights, Sources, Counts, Offsets, RankCounts Buffer
	// Routing is filled with the routing: RoutingBytes of the dispatcher's device, from a multiple of 128 on. It belongs to the routing until
	// that is dropped and the calls that go by it are complete.
	Routing Buffer
	// From is copied to To besides, as dispatch.Result has it.
	From, To Buffer
	Handle   uint64
	Length   int64
	Release  int64 // not 0: give the handle back with the call
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
	to, err := d.result(c)
	if err != nil {
		return err
	}
	inner, err := d.handle(h)
	if err != nil {
		return err
	}
	return d.atOnce(stream, func(s device.Stream) error {
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
	})
}

// result is the memory that a copy fills.
func (d *Dispatcher) result(c *ResultCall) (dispatch.Result, error) {
	to := dispatch.Result{Length: int(c.Length)}
	for _, part := range [...]struct {
		to   *memory.View
		from Buffer
	}{
		{&to.Rows, c.Rows}, {&to.Scales, c.Scales}, {&to.Indices, c.Indices}, {&to.Weights, c.Weights}, {&to.Sources, c.Sources},
		{&to.Counts, c.Counts}, {&to.Offsets, c.Offsets}, {&to.RankCounts, c.RankCounts}, {&to.Routing, c.Routing}, {&to.From, c.From}, {&to.To, c.To},
	} {
		if part.from.Bytes == 0 {
			continue
		}
		v, err := d.view(part.from)
		if err != nil {
			return to, err
		}
		*part.to = v
	}
	return to, nil
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
