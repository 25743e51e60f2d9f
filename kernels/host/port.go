package host

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// port is one communicator's end of an Engine.
type port struct {
	e        *Engine
	channels Channels       // of exchanges
	reduce   ReduceChannels // of reductions
	moe      *moe           // of a dispatcher
	nonce    *shm.Nonce     // by which peers know this rank's memory
	sources  []source       // by rank
	leaving  atomic.Bool    // its waits are over

	complaints uint64   // how many of this rank's receivers' it has taken in
	heard      []uint64 // by rank: the call of the last
	mismatched uint64   // the last call for which this rank has returned that sizes differ
}

// source is where a port finds a peer's memory outside its segment.
type source struct {
	readable bool        // this rank may read it
	memory   shm.Process // which is there, in another process
}

// The defaults of exchanges. Slots are smaller where they would exceed their bound together.
const (
	defaultPacketBytes  = 128
	defaultEagerBytes   = 1 << 10
	defaultSlots        = 4
	defaultStagingBytes = 32 << 20
	maxSlotBytes        = 256 << 10
)

// The defaults of reductions, likewise.
const (
	defaultOneShotBytes  = 16 << 10
	defaultReduceSlots   = 4
	defaultReduceStaging = 16 << 20
	maxReduceSlotBytes   = 64 << 10
)

// Defaults are those of the host device.
func (e *Engine) Defaults(f kernels.Family) {
	switch c := f.(type) {
	case *kernels.Channels:
		c.PacketBytes, c.EagerBytes = kernels.Default(c.PacketBytes, defaultPacketBytes), kernels.Default(c.EagerBytes, defaultEagerBytes)
		c.DefaultSlots(defaultSlots, defaultStagingBytes, maxSlotBytes, c.Size)
	case *kernels.ReduceChannels:
		c.OneShotBytes, c.Blocks = kernels.Default(c.OneShotBytes, defaultOneShotBytes), 0
		c.DefaultSlots(defaultReduceSlots, defaultReduceStaging, maxReduceSlotBytes, c.Size+1)
	}
}

// Layout tells the size of a communicator's control block.
func (e *Engine) Layout(f kernels.Family) (kernels.Layout, error) {
	switch f := f.(type) {
	case *kernels.Channels:
		c := Channels{Channels: *f}
		return kernels.Layout{Bytes: c.Bytes(), Zero: c.ControlBytes()}, nil
	case *kernels.ReduceChannels:
		c := ReduceChannels{ReduceChannels: *f}
		return kernels.Layout{Bytes: c.Bytes(), Zero: c.ControlBytes()}, nil
	case *kernels.MoE:
		l := newLanes(f, 0)
		return l.layout(), nil
	}
	return kernels.Layout{}, fmt.Errorf("kernels: the host engine has no %s", f.Family())
}

// Open makes a port.
func (e *Engine) Open(f kernels.Family, offset int64) (kernels.Port, error) {
	p := &port{e: e}
	switch f := f.(type) {
	case *kernels.Channels:
		p.channels = Channels{*f, offset}
		p.show()
	case *kernels.ReduceChannels:
		p.reduce = ReduceChannels{*f, offset}
	case *kernels.MoE:
		p.moe = newMoE(f, offset)
	default:
		return nil, fmt.Errorf("kernels: the host engine has no %s", f.Family())
	}
	return p, nil
}

// Close does nothing: the heap has the memory.
func (*Engine) Close() error { return nil }

// Ready looks for the memory of the peers.
func (p *port) Ready() kernels.Traits {
	if p.nonce == nil {
		return kernels.Traits{}
	}
	err := p.look()
	return kernels.Traits{Pulls: err == nil, Slow: err}
}

// Launch runs op on a host stream's worker, or at once when s is nil. On a stream its error is the stream's.
func (p *port) Launch(s device.Stream, op kernels.Operation) error {
	switch op := op.(type) {
	case *kernels.AllToAllV:
		return p.launch(s, (*allToAllV)(op))
	case *kernels.Reduction:
		return p.launch(s, (*reduction)(op))
	case *kernels.Dispatch:
		return p.launch(s, (*dispatch)(op))
	case *kernels.Combine:
		return p.launch(s, (*combine)(op))
	case *kernels.CombineBackward:
		return p.launch(s, (*combineBackward)(op))
	}
	return fmt.Errorf("kernels: the host engine has no %s", op.Operation())
}

// Fault is nil: operations are done when they have run.
func (*port) Fault() error { return nil }

// Drain waits for the last stream.
func (p *port) Drain(ctx context.Context, last device.Stream) error {
	return kernels.Drain(ctx, func() error { return device.Follow(nil, last) }, func() {
		p.leaving.Store(true) // a wait looks at it once in sleepFor
	})
}

// Close does nothing.
func (*port) Close() error { return nil }
