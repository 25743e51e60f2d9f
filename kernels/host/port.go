package host

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
)

// port is one communicator's end of an Engine.
type port struct {
	e       *Engine
	name    string
	fam     family
	offset  int64                 // of its control block
	place   int                   // of its family in the table
	ops     []string              // the names of its operations
	leaving atomic.Bool           // its waits are over
	waits   waits                 // the wait of the call that runs
	absent  atomic.Pointer[[]int] // ranks of the group that had not begun the call when a wait of it failed
	missed  atomic.Pointer[error] // see Fault
	pending sync.WaitGroup        // launches that have not ended
}

// Defaults are those of the host device.
func (e *Engine) Defaults(f kernels.Family) {
	if x, _, err := familyOf(f, 0); err == nil {
		x.defaults()
	}
}

// Layout tells the size of a communicator's control block.
func (e *Engine) Layout(f kernels.Family) (kernels.Layout, error) {
	x, _, err := familyOf(f, 0)
	if err != nil {
		return kernels.Layout{}, err
	}
	return x.layout(), nil
}

// Open makes a port.
func (e *Engine) Open(f kernels.Family, offset int64) (kernels.Port, error) {
	x, place, err := familyOf(f, offset)
	if err != nil {
		return nil, err
	}
	x.open(e)
	p := &port{e: e, name: f.Family(), fam: x, offset: offset, place: place, ops: families()[place].operations}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ports = append(e.ports, p)
	return p, nil
}

// Close does nothing: the heap has the memory.
func (*Engine) Close() error { return nil }

// Ready looks for what the family wants of its peers.
func (p *port) Ready() kernels.Traits { return p.fam.ready(p.e) }

// Launch runs op on a host stream's worker, or at once when s is nil. On a stream its error is the stream's.
func (p *port) Launch(s device.Stream, op kernels.Operation) error {
	if _, ok := opcodeOf(p.place, p.ops, op.Operation()); !ok {
		return fmt.Errorf("kernels: %s on a port of %s", op.Operation(), p.name)
	}
	if s == nil {
		p.pending.Add(1)
		return p.run(op)
	}
	hs, ok := s.(*device.HostStream)
	if !ok {
		return fmt.Errorf("kernels: the host engine needs a host stream, not one of %v", s.Device())
	}
	p.pending.Add(1)
	err := hs.Enqueue(p.e.task(p, op))
	if err != nil {
		p.pending.Done()
	}
	return err
}

// run is a launch, from its beginning to its end.
func (p *port) run(op kernels.Operation) error {
	defer p.pending.Done()
	err := p.Fault()
	if err == nil {
		err = p.fam.run(p, op)
	}
	p.waits.end()
	var absent []int
	if ranks := p.absent.Load(); ranks != nil {
		absent = *ranks
		p.absent.Store(nil)
	}
	op.Noted().Finished(err, absent...)
	op.Finish(err)
	return err
}

// call is the call in which p runs op. at is the offset of the word that counts the communicator's calls.
func (p *port) call(op kernels.Operation, at int64, epoch uint64) call {
	code, _ := opcodeOf(p.place, p.ops, op.Operation())
	return call{code, at, epoch}
}

// Fault is nil, since operations are done when they have run, but for a call that a peer gave up because this rank was in one of another port.
// Bytes that the peer sent for it may lie here, and no later call may take them for its own.
func (p *port) Fault() error {
	if err := p.missed.Load(); err != nil {
		return *err
	}
	return nil
}

// misses ends the communicator of a call that peer gives up, since this rank has not made it and is in another itself.
func (e *Engine) misses(peer int, c, in call) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var of *port
	for _, p := range e.ports {
		if p.offset <= c.at && (of == nil || p.offset > of.offset) {
			of = p
		}
	}
	if of == nil {
		return
	}
	var err error = &comm.PeerError{Rank: e.space.Name(peer), Op: c.op.String(), Epoch: c.epoch,
		Err: fmt.Errorf("%w: it waited there while this rank waited in %v, call %d of its kind", comm.ErrOutOfStep, in.op, in.epoch)}
	of.missed.CompareAndSwap(nil, &err)
}

// Drain waits for the last stream, and for launches on all others.
func (p *port) Drain(ctx context.Context, last device.Stream) error {
	return kernels.Drain(ctx, func() error {
		err := device.Follow(nil, last)
		p.pending.Wait()
		return err
	}, func() {
		p.leaving.Store(true) // a wait looks at it once in sleepFor
	})
}

// Rest is what launches have left behind that no later one can put right. All launches of all ranks have ended.
func (p *port) Rest() error {
	if f, ok := p.fam.(interface{ rest(e *Engine) error }); ok {
		return f.rest(p.e)
	}
	return nil
}

// Close forgets the port.
func (p *port) Close() error {
	if f, ok := p.fam.(interface{ stop(e *Engine) }); ok {
		f.stop(p.e)
	}
	p.e.mu.Lock()
	defer p.e.mu.Unlock()
	p.e.ports = slices.DeleteFunc(p.e.ports, func(q *port) bool { return q == p })
	return nil
}
