package core

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// Handle is a dispatch.Handle that may be released from anywhere, any number of times.
type Handle struct {
	d        *Dispatcher
	inner    *dispatch.Handle
	released atomic.Bool // no call can be made with it
	back     atomic.Bool // its memory was given back
}

// handle refuses one that is not alive here.
func (d *Dispatcher) handle(h *Handle) (*dispatch.Handle, error) {
	if h.d != d || h.released.Load() {
		return nil, fmt.Errorf("core: %w", dispatch.ErrReleased)
	}
	return h.inner, nil
}

// named names a handle that a call has made. On a GPU the caller is still here, and finds the name and the place of the rows in the call.
func (d *Dispatcher) named(inner *dispatch.Handle, name *uint64, rows *uintptr, put func(*Handle) uint64) uint64 {
	d.alive.Add(1)
	h := &Handle{d: d, inner: inner}
	made := put(h)
	if d.gpu != nil {
		*name, *rows = made, h.Place()
	}
	return made
}

// Place is where the rows begin.
func (h *Handle) Place() uintptr { return h.inner.Rows().Ptr() }

// Output is where what a dispatch leaves lies: rows, scales, counts, offsets, rank counts, indices, weights, sources and landed, as
// dispatch.Handle has them. It is the same for every dispatch whose rows lie in the same place.
func (h *Handle) Output() (out [9]Buffer) {
	in := h.inner
	for i, v := range [...]memory.View{in.Rows(), in.Scales(), in.Counts(), in.Offsets(), in.RankCounts(), in.Indices(), in.Weights(), in.Sources(), in.Landed()} {
		if out[i].Bytes = v.Len(); v.Len() > 0 {
			out[i].Addr = v.Ptr()
		}
	}
	return out
}

// HostCounts is how many rows came. It waits for that until ctx ends.
func (h *Handle) HostCounts(ctx context.Context) (dispatch.HostCounts, error) {
	inner, err := h.d.handle(h)
	if err != nil {
		return dispatch.HostCounts{}, err
	}
	return inner.HostCounts(ctx)
}

// gone marks the handle as released, and reports whether it was not before.
func (h *Handle) gone() bool {
	if h.released.Swap(true) {
		return false
	}
	h.d.alive.Add(-1)
	return true
}

// Release gives the handle's output back: on the host behind the operations submitted before, on a GPU behind what streams have been
// given. On a closed Comm there is nothing left to give back.
func (h *Handle) Release() {
	if !h.gone() {
		return
	}
	release := func() (int64, error) {
		if !h.back.Swap(true) {
			h.inner.Release()
		}
		return 0, nil
	}
	if h.d.gpu != nil {
		_, _ = release()
		return
	}
	_, _ = h.d.comm.do(release)
}
