package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Each rank has this many tokens in a call of hosts -dispatch, and each token this many of the experts.
const (
	hostTokens  = 512
	hostExperts = 32
	hostTopK    = 8
)

// crossing is how many bytes of rows the ranks of a host send to other hosts in a dispatch and a combine in which every token goes to every
// host.
func (c *hostsConfig) crossing(rowBytes int64) int64 {
	return 2 * int64(c.perHost) * hostTokens * int64(c.hosts-1) * rowBytes
}

// hostDispatch is a worker of hosts -dispatch.
type hostDispatch struct {
	h     *memory.Heap
	fence *alltoallv.Exchanger
	bytes int64 // of a row
	batch *dispatchBatch
}

// calls makes dispatches with combines of rows of a number of bytes, in bfloat16, and checks every token of the last.
func (w *hostDispatch) calls(ctx context.Context, bytes int64, calls int) (us float64, err error) {
	if w.batch == nil || w.bytes != bytes {
		if err := w.close(ctx); err != nil {
			return 0, err
		}
		o := dispatch.Options{Experts: hostExperts, TopK: hostTopK, Hidden: int(bytes / kernels.BFloat16.Size()), MaxTokens: hostTokens, Handles: 1,
			DType: kernels.BFloat16, CombineDType: kernels.BFloat16, Layout: kernels.TokenRows}
		d, err := dispatch.New(ctx, w.h, o)
		if err != nil {
			return 0, err
		}
		w.bytes, w.batch = bytes, newDispatchBatch(d, o, w.h.Group().Rank())
	}
	if err := w.batch.call(); err != nil {
		return 0, err
	}
	clear(w.batch.y.Bytes())
	if err := w.fence.Barrier(nil); err != nil {
		return 0, err
	}
	start := time.Now()
	for range calls {
		if err := w.batch.call(); err != nil {
			return 0, err
		}
	}
	us = float64(time.Since(start).Nanoseconds()) / 1e3 / float64(calls)
	if err := w.batch.check(); err != nil {
		return 0, fmt.Errorf("rows of %d bytes: %w", bytes, err)
	}
	return us, nil
}

func (w *hostDispatch) close(ctx context.Context) (err error) {
	if w.batch != nil {
		err = w.batch.d.Close(ctx)
		w.batch = nil
	}
	return err
}

// dispatches serves lines of hosts -dispatch.
func hostDispatches(ctx context.Context, h *memory.Heap, fence *alltoallv.Exchanger) (err error) {
	w := &hostDispatch{h: h, fence: fence}
	defer func() { err = errors.Join(err, w.close(ctx)) }()
	return eachLine(func(bytes int64, calls int) error {
		us, err := w.calls(ctx, bytes, calls)
		if err == nil {
			fmt.Printf("%.2f dispatch\n", us)
		}
		return err
	})
}
