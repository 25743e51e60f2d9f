package core

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

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

// DispatcherOptions are those of a dispatcher of a Place.
type DispatcherOptions struct {
	dispatch.Options
	// ShareMemory has it take turns with the place's others that share memory for rows.
	ShareMemory bool
	// ShareOrder has it keep one order of calls with those, and memory of its own.
	ShareOrder bool
}

// with are the options with what the place has.
func (o DispatcherOptions) with(shared *dispatch.Shared) dispatch.Options {
	if o.ShareMemory || o.ShareOrder {
		o.Shared, o.OwnRows = shared, !o.ShareMemory
	}
	return o.Options
}

// NewDispatcher submits the making of a dispatcher, as Place describes.
func (c *Comm) NewDispatcher(o DispatcherOptions, put func(*Dispatcher) uint64) (Ticket, error) {
	o.HostCounts = true // it costs nothing here
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		d := &Dispatcher{comm: c}
		if err := d.open(h, o.with(&c.shared)); err != nil {
			return 0, err
		}
		c.dispatchers = append(c.dispatchers, d)
		return int64(put(d)), nil
	})
}

// NewDispatcher submits the making of a dispatcher, as Place describes.
func (g *GPU) NewDispatcher(o DispatcherOptions, put func(*Dispatcher) uint64) (Ticket, error) {
	return g.comm.do(func() (int64, error) {
		g.mu.Lock()
		closed := g.closed
		g.mu.Unlock()
		if closed {
			return 0, ErrClosed
		}
		d := &Dispatcher{comm: g.comm, gpu: g}
		if err := d.open(g.heap, o.with(&g.shared)); err != nil {
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
	o.Timeout = d.comm.within()
	ctx, cancel := d.comm.meeting()
	defer cancel()
	if o.Masks {
		d.comm.masks = true
		d.comm.unwatch() // a call that waits for a rank would fail the group with its loss
	}
	d.inner, err = dispatch.New(ctx, h, o)
	return err
}

// Comm is that of the dispatcher's place.
func (d *Dispatcher) Comm() *Comm { return d.comm }

// OnGPU reports whether calls are enqueued.
func (d *Dispatcher) OnGPU() bool { return d.gpu != nil }

// MaxTokens is the most tokens that one rank has in a call.
func (d *Dispatcher) MaxTokens() int { return d.inner.MaxTokens() }

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

// Mask has the calls of all ranks go on without a rank, as dispatch.Dispatcher.Mask does. It waits for nothing.
func (d *Dispatcher) Mask(rank int) error { return d.inner.Mask(rank) }

// Masked are the ranks that are masked, a bit for each, as this rank knows.
func (d *Dispatcher) Masked() (bits uint64, err error) {
	ranks, err := d.inner.Masked()
	for _, r := range ranks {
		bits |= 1 << r
	}
	return bits, err
}

// Unmask submits that the others take this rank in again. The ticket's value is how many calls they have made by then. within bounds the
// wait, 0 for the timeout of the Comm.
func (d *Dispatcher) Unmask(within time.Duration) (Ticket, error) {
	return d.comm.do(func() (int64, error) {
		ctx, cancel := context.WithTimeout(d.comm.ctx, cmp.Or(within, d.comm.timeout()))
		defer cancel()
		calls, err := d.inner.Unmask(ctx)
		return int64(calls), err
	})
}

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

// run makes a call: on a GPU at once, on the host in the queue.
func (d *Dispatcher) run(stream uintptr, call func(s device.Stream) (uint64, error)) (Ticket, error) {
	if d.gpu != nil {
		return 0, d.atOnce(stream, func(s device.Stream) error {
			_, err := call(s)
			return err
		})
	}
	if stream != 0 {
		return 0, fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
	}
	return d.comm.do(func() (int64, error) {
		value, err := call(nil)
		return int64(value), err
	})
}

// atOnce makes a call before it returns: on a GPU it is enqueued.
func (d *Dispatcher) atOnce(stream uintptr, call func(s device.Stream) error) error {
	g := d.gpu
	if g == nil {
		return call(nil)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	s, err := g.wrap(stream)
	if err != nil {
		return err
	}
	return call(s)
}

// view is memory as calls take it: symmetric where it is.
func (d *Dispatcher) view(b Buffer) (memory.View, error) {
	if v, ok := d.own(b); ok {
		return v, nil
	}
	if g := d.gpu; g != nil {
		g.mu.Lock() // others may make or close dispatchers
		defer g.mu.Unlock()
		return g.view(b)
	}
	return d.comm.view(b)
}

// own is memory as a part of the dispatcher's.
func (d *Dispatcher) own(b Buffer) (memory.View, bool) {
	own, shared := d.inner.Memory()
	for _, m := range [...]memory.View{own, shared} {
		if at := m.Ptr(); b.Bytes > 0 && b.Addr >= at && b.Addr-at < uintptr(m.Len()) {
			if off := int64(b.Addr - at); b.Bytes <= m.Len()-off {
				return m.Slice(off, b.Bytes), true
			}
		}
	}
	return memory.View{}, false
}

// views are several of them.
func (d *Dispatcher) views(of ...*Buffer) (v [10]memory.View, err error) {
	for i, b := range of {
		if v[i], err = d.view(*b); err != nil {
			return v, err
		}
	}
	return v, nil
}
