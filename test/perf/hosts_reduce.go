package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// hostReductions serves lines of hosts -reduce: sums of float32, of which every element of the last is checked.
func hostReductions(ctx context.Context, h *memory.Heap, fence *alltoallv.Exchanger, src, dst memory.View) (err error) {
	x, err := allreduce.New(ctx, h, allreduce.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	me, n := h.Group().Rank(), h.Group().Size()
	return eachLine(func(bytes int64, calls int) error {
		if bytes > src.Len() || bytes%4 != 0 {
			return fmt.Errorf("%d bytes, want a multiple of 4 and at most %d", bytes, src.Len())
		}
		in, out := src.Slice(0, bytes), dst.Slice(0, bytes)
		sent, got := shm.View[float32](in.Bytes()), shm.View[float32](out.Bytes())
		for i := range sent {
			sent[i], got[i] = float32((me+1)*(i%1021)), -1
		}
		if err := x.AllReduce(nil, out, in, kernels.Float32, kernels.Sum); err != nil {
			return err
		}
		clear(got)
		if err := fence.Barrier(nil); err != nil {
			return err
		}
		start := time.Now()
		for range calls {
			if err := x.AllReduce(nil, out, in, kernels.Float32, kernels.Sum); err != nil {
				return err
			}
		}
		us := float64(time.Since(start).Nanoseconds()) / 1e3 / float64(calls)
		for i, v := range got {
			if want := float32(n * (n + 1) / 2 * (i % 1021)); v != want {
				return fmt.Errorf("element %d of %d bytes is %v, want %v", i, bytes, v, want)
			}
		}
		fmt.Printf("%.2f reduction\n", us)
		return nil
	})
}
