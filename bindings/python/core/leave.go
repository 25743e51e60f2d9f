package core

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Close submits the end of the Comm: nothing can be submitted after it. It is collective. With keep the symmetric memory
// stays where it is until the process ends, for tensors that are still alive.
func (c *Comm) Close(keep bool) (Ticket, error) {
	t, err := c.do(func() (int64, error) { return 0, c.release(keep) })
	if err == nil {
		c.end()
		c.requests.close()
	}
	return t, err
}

func (c *Comm) release(keep bool) error {
	c.mu.Lock()
	root, g, h, watched, gpus, point := c.root, c.group, c.heap, c.watched, c.gpus, c.point
	c.leaving = true
	c.mu.Unlock()
	var errs []error
	ctx, cancel := c.meeting()
	defer cancel()
	if c.masks { // a rank may be lost of which the group says nothing before a call
		_ = g.Barrier(ctx)
	}
	for _, gpu := range gpus {
		errs = append(errs, gpu.stop(c.ctx))
	}
	for _, d := range c.dispatchers {
		errs = append(errs, d.inner.Close(ctx))
	}
	if point != nil {
		errs = append(errs, point.Close(ctx)) // it waits for requests
	}
	if c.reducer != nil {
		errs = append(errs, c.reducer.Close(ctx))
	}
	if c.exchanger != nil {
		errs = append(errs, c.exchanger.Close(ctx))
	}
	// Heaps are closed together, which a rank that keeps its memory has no part in. Where there is one, the others let go of
	// theirs without it: peers have mappings of their own.
	free := ctx
	if g != nil {
		if all, err := g.AllGather(ctx, fmt.Append(nil, keep)); err == nil && slices.ContainsFunc(all, func(b []byte) bool { return string(b) == "true" }) {
			over, cancel := context.WithCancel(ctx)
			cancel()
			free = over
		}
	}
	if !keep {
		var freed []error
		for _, gpu := range gpus {
			freed = append(freed, gpu.free(free))
		}
		if h != nil {
			freed = append(freed, h.Close(free))
		}
		if free.Err() == nil { // else they say that others may still use it
			errs = append(errs, freed...)
		}
	}
	for _, g := range append(watched, g, root) {
		if g != nil {
			errs = append(errs, g.Close())
		}
	}
	c.cancel()
	return errors.Join(errs...)
}

// Abort fails the group on every rank, at once.
func (c *Comm) Abort(reason string) {
	c.mu.Lock()
	root := c.root
	c.mu.Unlock()
	if root != nil {
		root.Abort(errors.New(reason)) // and with it the groups that it made
	}
	c.cancel()
}

// Abandon ends the Comm without its peers, when the process is about to end or its group has been dropped. Operations that are under
// way get the time drain to become complete and are aborted then; none of them touches a caller's memory after Abandon.
// With keep the symmetric memory stays mapped. It reports whether everything had become complete.
func (c *Comm) Abandon(drain time.Duration, keep bool) bool {
	c.end()
	c.requests.close()
	began := time.Now()
	clean := c.settle(drain)
	clean = c.requests.settle(max(drain-time.Since(began), 0)) && clean
	for _, gpu := range c.onGPUs() {
		clean = clean && gpu.drain(drain)
	}
	stopped := clean
	if !clean {
		c.Abort("the process has ended with operations under way")
		stopped = c.settle(time.Minute) && c.requests.settle(time.Minute)
	}
	c.mu.Lock()
	root, g, h, watched := c.root, c.group, c.heap, c.watched
	c.leaving = true
	c.mu.Unlock()
	c.cancel()
	for _, gpu := range c.onGPUs() {
		// Its kernels have seen the abort word. A kernel that still runs is not Switchyard's, and the memory stays for it.
		if stopped && gpu.drain(grace) {
			_ = gpu.stop(c.ctx) // a context that is over, as below
			if !keep {
				_ = gpu.free(c.ctx)
			}
		}
	}
	if h != nil && stopped && !keep {
		// A context that is over: what is mapped here is let go of at once, which is what the error says. Peers have
		// mappings of their own.
		_ = h.Close(c.ctx)
	}
	for _, g := range append(watched, g, root) {
		if g != nil {
			_ = g.Close() // it is always nil
		}
	}
	return clean
}

// settle waits until the worker has stopped.
func (c *Comm) settle(d time.Duration) bool {
	select {
	case <-c.stopped:
		return true
	case <-time.After(d):
		return false
	}
}
