package communicator

import (
	"context"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Close waits for the launches on streams and gives the memory back. It is collective and idempotent: no rank frees a control
// block that a peer may still write. After a failure of the group it releases this rank's memory and returns. When ctx ends, launches
// that wait for peers give up; memory of launches that still run is not released. A heap that was closed before has taken the memory along.
//
// On several hosts puts may be on their way to the memory after a launch of any rank has failed. Then all ranks leave it allocated until
// the heap is closed, and what else is on the heap goes on.
func (c *Communicator) Close(ctx context.Context) error {
	c.Lock()
	was, last := c.closed, c.last
	c.closed = true
	c.Unlock()
	if was {
		return nil
	}
	c.mute()
	if c.Heap.Closed() {
		return c.port.Close()
	}
	err := c.port.Drain(ctx, last)
	// A call of LaunchApart may have been let in just before c was closed, and reach the port only now.
	err = errors.Join(err, kernels.Drain(ctx, func() error { c.apart.Wait(); return nil }, func() { _ = c.port.Drain(ctx, last) }))
	if errors.Is(err, kernels.ErrRunning) {
		return fmt.Errorf("%s: close: %w", c.name, err)
	}
	keep := false
	switch rail := c.Heap.Rail(); {
	case rail == nil:
		err = errors.Join(err, c.rests(ctx))
	case c.Group.Err() != nil:
		rail.Interrupt() // puts may be on their way to the memory
	default:
		met, kept, unrest := c.restsAcross(ctx)
		if !met {
			rail.Interrupt()
		}
		keep, err = kept, errors.Join(err, unrest)
	}
	if err = errors.Join(err, c.release(keep)); err != nil {
		return fmt.Errorf("%s: close: %w", c.name, err)
	}
	return nil
}

// rests meets the ranks, and reports what launches have left behind.
func (c *Communicator) rests(ctx context.Context) (err error) {
	if p, ok := c.port.(rester); ok && c.rest && c.Group.Err() == nil {
		if err = c.Group.Barrier(ctx); err == nil {
			err = p.Rest()
		}
	}
	if c.Group.Err() == nil {
		err = errors.Join(err, c.Group.Barrier(ctx))
	}
	return err
}

// restsAcross is rests on several hosts. All ranks hear whether one of them has failed, for whose puts nobody then waits, and whether they have
// come to rest. keep says that not all have, and met that the ranks know this of each other. The error has what a rank finds itself, also a
// disagreement that an earlier call could not tell it, which leaves nothing on its way.
func (c *Communicator) restsAcross(ctx context.Context) (met, keep bool, err error) {
	failed := false
	looks := []func() error{c.port.Fault, func() error { return nil }}
	if p, ok := c.port.(rester); ok && c.rest {
		looks[1] = p.Rest
	}
	for i, look := range looks {
		lerr := look()
		failed = failed || lerr != nil && !kernels.Recoverable(lerr)
		if failed || i > 0 {
			err = errors.Join(err, lerr)
		}
		claim := agree.Claim{Op: "close", Info: []int64{0}}
		if failed {
			claim.Info[0] = 1
		}
		claims, merr := agree.On(ctx, c.Group, claim, nil)
		if merr != nil {
			return false, false, errors.Join(err, merr)
		}
		for _, info := range claims.Infos() {
			keep = keep || info[0] != 0
		}
		if keep {
			return true, true, err
		}
	}
	return true, false, err
}

// rester is a port that looks for what launches have left behind.
type rester interface{ Rest() error }

// release gives back the memory and the port that Open took, but for the memory when it is to be kept.
func (c *Communicator) release(keep bool) error {
	var err error
	if c.port != nil {
		err = c.port.Close()
	}
	if c.block != nil && !keep {
		err = errors.Join(err, c.block.Free(), c.rail.Free())
	}
	return err
}
