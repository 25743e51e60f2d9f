package core

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// Half says which part of a call is made: all of it, or the first half, whose second is Receive.
type Half int64

// The parts.
const (
	Whole Half = iota
	First
)

// DispatchCall is a dispatch as C callers describe it; see dispatch.Tokens. The memory belongs to the call until that is complete.
type DispatchCall struct {
	X, Scales, Experts, Weights, Numbers Buffer
	// Handle names the dispatch whose ways other rows are sent, without Experts, Weights and Numbers. 0: this is a new dispatch.
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

// Dispatch makes a dispatch, or where there is an h one of other rows by the ways of that. put names the handle of a new one. The name
// is the ticket's value, and on a GPU left in the call. taken is dispatch.Tokens.Taken.
func (d *Dispatcher) Dispatch(stream uintptr, c *DispatchCall, h *Handle, taken bool, put func(*Handle) uint64) (Ticket, error) {
	if h != nil && (c.Experts.Bytes != 0 || c.Weights.Bytes != 0 || c.Numbers.Bytes != 0) {
		return 0, fmt.Errorf("core: %w: experts, weights or numbers for a dispatch that was routed before", ErrInvalid)
	}
	if err := c.Half.check(); err != nil {
		return 0, err
	}
	v, err := d.views(&c.X, &c.Scales, &c.Experts, &c.Weights, &c.Numbers)
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
		inner, err := call(s, dispatch.Tokens{X: v[0], Scales: v[1], Experts: v[2], Weights: v[3], Numbers: v[4], Taken: taken})
		if err != nil {
			return 0, err
		}
		return d.named(inner, &c.Made, &c.Rows, put), nil
	})
}

// Deliver makes a new dispatch on a GPU, and copies what it leaves. The handle is named as by Dispatch, and not where the copy releases it.
func (d *Dispatcher) Deliver(stream uintptr, c *DispatchCall, r *ResultCall, put func(*Handle) uint64, putRouting func(*Routing) uint64) error {
	v, err := d.views(&c.X, &c.Scales, &c.Experts, &c.Weights, &c.Numbers)
	if err != nil {
		return err
	}
	to, err := d.result(r)
	if err != nil {
		return err
	}
	_, err = d.run(stream, func(s device.Stream) (uint64, error) {
		inner, routing, err := d.inner.DispatchTo(s, dispatch.Tokens{X: v[0], Scales: v[1], Experts: v[2], Weights: v[3], Numbers: v[4]}, to)
		if err != nil {
			return 0, err
		}
		if routing != nil {
			r.Made = putRouting(&Routing{d: d, inner: routing})
		}
		if r.Release != 0 {
			c.Rows = inner.Rows().Ptr()
			inner.Release()
			return 0, nil
		}
		return d.named(inner, &c.Made, &c.Rows, put), nil
	})
	return err
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
	if err := c.Half.check(); err != nil {
		return 0, err
	}
	weighting, err := Numbered[dispatch.Weighting]("Weighting", c.Weighting)
	if err != nil {
		return 0, err
	}
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
		Weighting: weighting, Weights: v[2], SumWeights: v[3], Bias: [2]memory.View{v[4], v[5]}, Ready: v[6], TokenWeights: v[7],
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
	weighting, err := Numbered[dispatch.Weighting]("Weighting", c.Weighting)
	if err != nil {
		return 0, err
	}
	v, err := d.views(&c.DRows, &c.DWeights, &c.DY, &c.Rows, &c.Weights)
	if err != nil {
		return 0, err
	}
	inner, err := d.handle(h)
	if err != nil {
		return 0, err
	}
	o := dispatch.CombineOptions{Weighting: weighting, Weights: v[4]}
	return d.run(stream, func(s device.Stream) (uint64, error) {
		return 0, d.inner.CombineBackward(s, v[0], v[1], v[2], v[3], inner, o)
	})
}
