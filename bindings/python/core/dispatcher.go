package core

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// DispatcherOptions are those of package dispatch, in types that JSON carries.
type DispatcherOptions struct {
	Experts, TopK, Hidden, MaxTokens  int
	DType                             kernels.DType
	Padded                            bool
	Align, Capacity, MaxRows, Handles int
	Placement                         [][]int
}

// Dispatcher is a dispatch.Dispatcher whose calls run in the queue of its Comm.
type Dispatcher struct {
	comm    *Comm
	inner   *dispatch.Dispatcher
	options DispatcherOptions
}

// NewDispatcher submits the making of a dispatcher. put names it; the name is the ticket's value.
func (c *Comm) NewDispatcher(o DispatcherOptions, put func(*Dispatcher) uint64) (Ticket, error) {
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		d := &Dispatcher{comm: c, options: o}
		opts := dispatch.Options{
			Experts: o.Experts, TopK: o.TopK, Hidden: o.Hidden, MaxTokens: o.MaxTokens, DType: o.DType, Align: o.Align,
			Capacity: o.Capacity, MaxRows: o.MaxRows, Handles: o.Handles, HostCounts: true, Timeout: seconds(c.options.TimeoutSeconds),
		}
		if o.Padded {
			opts.Layout = dispatch.Padded
		}
		if o.Placement != nil {
			opts.Placement = &dispatch.Placement{Ranks: o.Placement}
		}
		if d.inner, err = dispatch.New(c.ctx, h, opts); err != nil {
			return 0, err
		}
		c.dispatchers = append(c.dispatchers, d)
		return int64(put(d)), nil
	})
}

// MaxRows is the most rows that this rank can get in one dispatch.
func (d *Dispatcher) MaxRows() int { return d.inner.MaxRows() }

// Traffic is the bytes of rows sent to each rank so far.
func (d *Dispatcher) Traffic() []int64 { return d.inner.Counters().Bytes }

// close is Close on the worker.
func (d *Dispatcher) close() error { return d.inner.Close(context.WithoutCancel(d.comm.ctx)) }

// Close submits the end of the dispatcher. It is collective.
func (d *Dispatcher) Close() (Ticket, error) {
	return d.comm.do(func() (int64, error) {
		d.comm.dispatchers = slices.DeleteFunc(d.comm.dispatchers, func(o *Dispatcher) bool { return o == d })
		return 0, d.close()
	})
}

// Handle is a dispatch.Handle that may be released from anywhere, any number of times.
type Handle struct {
	d     *Dispatcher
	inner *dispatch.Handle
	rows  dispatch.HostCounts
	once  sync.Once
}

// Dispatch submits a dispatch of tokens x with expert choices idx and their weights, each [tokens, TopK] with n entries
// in all. The memory belongs to the operation until it is complete. put names the handle; the name is the ticket's value.
func (d *Dispatcher) Dispatch(x Buffer, idx, weights uintptr, n int64, put func(*Handle) uint64) (Ticket, error) {
	v, err := d.comm.view(x)
	if err != nil {
		return 0, err
	}
	if n < 0 {
		return 0, fmt.Errorf("core: %w: %d choices", ErrInvalid, n)
	}
	t := dispatch.Tokens{X: v, Experts: memory.Host(shm.At(idx, 4*n)), Weights: memory.Host(shm.At(weights, 4*n))}
	return d.comm.do(func() (int64, error) {
		h, err := d.inner.Dispatch(nil, t)
		if err != nil {
			return 0, err
		}
		rows, err := h.HostCounts(d.comm.ctx)
		if err != nil {
			h.Release()
			return 0, err
		}
		return int64(put(&Handle{d: d, inner: h, rows: rows})), nil
	})
}

// Combine submits y = the rows of h, weighted, brought back to their tokens; with backward it is the gradient of
// Dispatch, where weights are 1.
func (d *Dispatcher) Combine(y, rows Buffer, h *Handle, backward bool) (Ticket, error) {
	yv, err := d.comm.view(y)
	if err != nil {
		return 0, err
	}
	rv, err := h.view(rows)
	if err != nil {
		return 0, err
	}
	return d.comm.do(func() (int64, error) {
		if backward {
			return 0, d.inner.DispatchBackward(nil, yv, memory.View{}, rv, memory.View{}, h.inner)
		}
		return 0, d.inner.Combine(nil, yv, rv, h.inner, dispatch.CombineOptions{})
	})
}

// CombineBackward submits the gradients of Combine. dWeights has n entries.
func (d *Dispatcher) CombineBackward(dRows Buffer, dWeights uintptr, n int64, dy, rows Buffer, h *Handle) (Ticket, error) {
	if n < 0 {
		return 0, fmt.Errorf("core: %w: %d gradients of weights", ErrInvalid, n)
	}
	dyv, err := d.comm.view(dy)
	if err != nil {
		return 0, err
	}
	rv, err := h.view(rows)
	if err != nil {
		return 0, err
	}
	drv, err := h.view(dRows)
	if err != nil {
		return 0, err
	}
	w := memory.Host(shm.At(dWeights, 4*n))
	return d.comm.do(func() (int64, error) {
		return 0, d.inner.CombineBackward(nil, drv, w, dyv, rv, h.inner, dispatch.CombineOptions{})
	})
}

// view is a buffer of rows, symmetric where it lies in the handle's output.
func (h *Handle) view(b Buffer) (memory.View, error) {
	rows := h.inner.Rows()
	if addr := shm.Addr(rows.Bytes()); b.Bytes > 0 && b.Addr >= addr && b.Addr-addr < uintptr(rows.Len()) {
		if off := int64(b.Addr - addr); b.Bytes <= rows.Len()-off {
			return rows.Slice(off, b.Bytes), nil
		}
	}
	return h.d.comm.view(b)
}

// Rows is the output and how many rows it has, padding included.
func (h *Handle) Rows() (Buffer, int) {
	o := h.d.options
	b := h.inner.Rows().Slice(0, int64(h.rows.Rows)*int64(o.Hidden)*o.DType.Size()).Bytes()
	return Buffer{shm.Addr(b), int64(len(b))}, h.rows.Rows
}

// Counts and Offsets are those of the dispatch, Experts which experts they are about.
func (h *Handle) Counts() (counts, offsets []int32, experts []int) {
	return h.rows.Counts, h.rows.Offsets, h.inner.LocalExperts()
}

// Release gives the handle's output back, behind the operations submitted before. On a closed Comm there is nothing left
// to give back.
func (h *Handle) Release() {
	h.once.Do(func() {
		_, _ = h.d.comm.do(func() (int64, error) {
			h.inner.Release()
			return 0, nil
		})
	})
}
