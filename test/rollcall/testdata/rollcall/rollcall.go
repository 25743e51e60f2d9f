// Package rollcall waits for all ranks in the order of a stream.
package rollcall

import (
	"context"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

type Options struct {
	// Timeout bounds every wait for a peer. 0 is communicator.DefaultTimeout.
	Timeout time.Duration
}

// Caller makes the roll calls of one group over one symmetric heap. Its methods may be called from several goroutines, but all ranks must
// make as many calls.
type Caller struct {
	c           *communicator.Communicator // its lock is held during calls
	bounds      kernels.RollCallBounds
	now, queued kernels.RollCall // without a stream and on one: all launches are alike
}

// New makes a Caller. It is collective. What fails on one rank is an error on all.
func New(ctx context.Context, h *memory.Heap, o Options) (*Caller, error) {
	if o.Timeout == 0 {
		o.Timeout = communicator.DefaultTimeout
	}
	var refused error
	if o.Timeout < 0 {
		refused = comm.Invalid("rollcall", "Options.Timeout is %v", o.Timeout)
	}
	x := &Caller{bounds: kernels.RollCallBounds{Size: h.Group().Size()}}
	h.Engine().Defaults(&x.bounds)
	var err error
	if x.c, err = communicator.Open(ctx, h, communicator.Config{Name: "rollcall", Family: &x.bounds, Timeout: o.Timeout}, refused); err != nil {
		return nil, err
	}
	x.now.Timeout, x.queued.Timeout, x.queued.Done = o.Timeout, o.Timeout, x.c.Done
	return x, nil
}

// Call enqueues a roll call on s. With a nil stream it returns when all ranks have called.
func (x *Caller) Call(s device.Stream) error {
	x.c.Lock()
	defer x.c.Unlock()
	if err := x.c.Usable(); err != nil {
		return err
	}
	if s == nil {
		return x.c.Launch(nil, &x.now)
	}
	return x.c.Launch(s, &x.queued)
}

// Fault is what calls that have run by now have come to.
func (x *Caller) Fault() error { return x.c.Fault() }

// Close waits for the calls and gives the memory back. It is collective and idempotent.
func (x *Caller) Close(ctx context.Context) error { return x.c.Close(ctx) }
