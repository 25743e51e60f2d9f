// Package rollcall waits for all ranks in the order of a stream.
package rollcall

import (
	"cmp"
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
	c        *communicator.Communicator // its lock is held during calls
	bounds   kernels.RollCallBounds
	launches communicator.Launches[kernels.RollCall, *kernels.RollCall]
}

// New makes a Caller. It is collective. What fails on one rank is an error on all.
func New(ctx context.Context, h *memory.Heap, o Options) (*Caller, error) {
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	var refused error
	if o.Timeout < 0 {
		refused = comm.Invalid("rollcall", "Options.Timeout is %v", o.Timeout)
	}
	x := &Caller{bounds: kernels.RollCallBounds{Size: h.Group().Size()}}
	h.Engine().Defaults(&x.bounds)
	var err error
	x.c, err = communicator.Open(ctx, h, communicator.Config{Name: "rollcall", Family: &x.bounds, Timeout: o.Timeout}, refused)
	if err != nil {
		return nil, err
	}
	x.launches.C, x.launches.Reset = x.c, func(a *kernels.RollCall) { *a = kernels.RollCall{Launched: kernels.Launched{Timeout: o.Timeout}} }
	return x, nil
}

// Call enqueues a roll call on s. With a nil stream it returns when all ranks have called.
func (x *Caller) Call(s device.Stream) error {
	x.c.Lock()
	defer x.c.Unlock()
	if err := x.c.Usable(); err != nil {
		return err
	}
	return x.launches.Launch(s, x.launches.Take())
}

// Fault is what calls that have run by now have come to.
func (x *Caller) Fault() error { return x.c.Fault() }

// Close waits for the calls and gives the memory back. It is collective and idempotent.
func (x *Caller) Close(ctx context.Context) error { return x.c.Close(ctx) }
