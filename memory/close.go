package memory

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/kernels"
)

// boundMoment is how long a collective call may continue after its context has ended.
const boundMoment = 100 * time.Millisecond

// bounded makes a collective call end with its context. A call that continues for boundMoment waits in the driver for a kernel, which may
// wait for a peer: this rank's kernels are then told to give up, and the call is cut off. end notes the result.
func (h *Heap) bounded(ctx context.Context) (end func(error) error) {
	done := make(chan struct{})
	var cut atomic.Bool
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-done:
		case <-time.After(boundMoment):
			cut.Store(true)
			h.log.Warn("memory: a call waits for kernels longer than its context, which ends them", "rank", h.group.Rank())
			h.abort()
		}
	})
	return func(err error) error {
		stop()
		close(done)
		if err == nil && cut.Load() {
			err = &agree.CutError{Err: context.Cause(ctx)}
		}
		h.settle(err)
		return err
	}
}

// abort ends every wait of this rank's kernels.
func (h *Heap) abort() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.mapped {
		return
	}
	if h.rail != nil && h.across == nil { // before waits end, after which memory is given back
		h.rail.Interrupt()
	}
	h.engine.Interrupt()
	h.across.end() // what lands is not in memory that kernels give back: the segment goes last
	if h.gpu == nil {
		return
	}
	if err := h.gpu.raise(h.at(h.space.Rank, kernels.AbortOffset)); err != nil { // for kernels of others that watch it
		h.log.Warn("memory: set the abort word", "rank", h.space.Rank, "error", err)
	}
}

// Close releases the heap: its buffers, views and registrations are dead. It is collective and
// idempotent. Every rank first unmaps its peers' memory and then, after a barrier, releases its own (M4).
// The caller has waited for all work that touches the heap, and closes what it has made on the heap before: later calls of it
// are an ErrClosed.
//
// If the group has failed, or ctx ends before all ranks have called it, Close still releases everything
// that this rank holds. The latter is an error, because another rank may still use the memory.
func (h *Heap) Close(ctx context.Context) (err error) {
	h.together.Lock()
	defer h.together.Unlock()
	if h.closed.Swap(true) {
		return nil
	}
	h.mute()
	end := h.bounded(ctx)
	defer func() { err = end(err) }()
	h.mu.Lock()
	extents := h.extents
	h.mu.Unlock()

	registrations := h.registrations()
	for _, r := range registrations {
		r.own.freed.Store(true)
	}
	if e, ok := h.engine.(ringer); ok && h.rail != nil {
		e.Leave()
	}
	switch {
	case h.space.Segments != nil: // nothing is mapped in the range
	case !h.home.InProcess():
		for _, e := range extents {
			h.displaceAll(h.peers(), h.everyone(e))
		}
		for _, r := range registrations {
			h.displaceAll(h.peers(), r.parts)
		}
	}
	if h.gpu != nil {
		if err := h.gpu.detachAll(); err != nil {
			h.log.Warn("memory: close CUDA IPC", "rank", h.group.Rank(), "error", err)
		}
	}
	err = h.shares.closeOpened()
	if h.multi != nil { // peers may still use their own views: binds end when all have come
		err = errors.Join(err, h.multi.unmap(h.multi.objects...))
	}
	h.registered.Store(nil)
	if _, berr := agree.On(ctx, h.group, agree.Claim{Op: "close heap"}, nil); berr != nil && h.group.Err() == nil {
		err = errors.Join(err, fmt.Errorf("memory: close heap: others may still use it: %w", berr))
	}
	return errors.Join(err, h.release())
}

// Closed reports whether Close has been called on this rank.
func (h *Heap) Closed() bool { return h.closed.Load() }

// release gives back the range and everything in it.
func (h *Heap) release() error {
	h.shares.mail.Close()
	if h.back == nil {
		return nil
	}
	var err error
	h.across.end()
	if h.rail != nil { // before its segment goes, in which puts land until then
		if n := h.rail.Refused(); n > 0 {
			h.log.Warn("memory: messages of strangers over the network", "group", h.group.Name(), "rank", h.group.Rank(), "refused", n)
		}
		err = h.rail.Close()
	}
	if h.engine != nil {
		err = errors.Join(err, h.engine.Close())
	}
	if h.multi != nil {
		err = errors.Join(err, h.multi.close())
	}
	if h.unhook != nil {
		h.unhook()
	}
	h.mu.Lock()
	h.mapped = false
	h.mu.Unlock()
	if err = errors.Join(err, h.across.close(), h.back.close()); err != nil {
		return fmt.Errorf("memory: close heap: %w", err)
	}
	return nil
}
