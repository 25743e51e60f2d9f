package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

func parseOp(name string) (kernels.ReduceOp, error) {
	for op := kernels.ReduceOp(0); op.Valid(); op++ {
		if op.String() == name {
			return op, nil
		}
	}
	return 0, fmt.Errorf("-op: %q is no reduction", name)
}

// benchAllReduce times AllReduce of float32, out of place. Elements are small integers, so that every one can be checked
// exactly.
func benchAllReduce(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	n, me := g.Size(), g.Rank()
	op, err := parseOp(c.Reduce)
	if err != nil {
		return nil, err
	}
	var largest int64
	for _, s := range c.Sizes {
		largest = max(largest, s)
	}
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 2*largest + 256<<20})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	x, err := allreduce.New(ctx, h, allreduce.Options{Algorithm: c.Algorithm})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	fence, err := newFence(ctx, h)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fence.x.Close(ctx)) }()
	value := func(rank, i int) float32 { return float32(1 + (rank*3+i)%5) }

	for _, size := range c.Sizes {
		size = size / 4 * 4
		srcBuf, err := h.Alloc(size)
		if err != nil {
			return nil, err
		}
		dstBuf, err := h.Alloc(size)
		if err != nil {
			return nil, err
		}
		src, dst := srcBuf.View(), dstBuf.View()
		if c.Staged {
			src, dst = memory.Host(make([]byte, size)), memory.Host(make([]byte, size))
		}
		for i, in := 0, shm.View[float32](src.Bytes()); i < len(in); i++ {
			in[i] = value(me, i)
		}
		for i, out := 0, dst.Bytes(); i < len(out); i++ {
			out[i] = 0xff
		}
		var t timer
		warm, timed := c.iterations(size)
		for i := -warm; i < timed; i++ {
			if err := fence.wait(); err != nil {
				return nil, err
			}
			start := time.Now()
			if err := x.AllReduce(nil, dst, src, kernels.Float32, op); err != nil {
				return nil, err
			}
			if i >= 0 {
				t.us = append(t.us, float64(time.Since(start).Nanoseconds())/1e3)
			}
		}
		for i, got := range shm.View[float32](dst.Bytes()) {
			want := value(0, i)
			for p := 1; p < n; p++ {
				switch v := value(p, i); op {
				case kernels.Min:
					want = min(want, v)
				case kernels.Max:
					want = max(want, v)
				case kernels.Prod:
					want *= v
				default:
					want += v
				}
			}
			if op == kernels.Avg {
				want /= float32(n)
			}
			if got != want {
				return nil, fmt.Errorf("%v of %d bytes: element %d is %v, want %v", op, size, i, got, want)
			}
		}
		us, err := t.merge(ctx, g)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(srcBuf.Free(), dstBuf.Free()); err != nil {
			return nil, err
		}
		if me != 0 {
			continue
		}
		d, err := x.Explain(kernels.AllReduce, size/4, kernels.Float32)
		if err != nil {
			return nil, err
		}
		link := 2 * float64(n-1) / float64(n) * float64(size)
		rows = append(rows, row{Op: c.Op, Ranks: n, Procs: c.Procs, Device: "host", Splits: op.String() + " of float32", Algorithm: d.Algorithm,
			BytesPerRank: size, US: median(us), P10: quantile(us, .1), P90: quantile(us, .9), GBpsLink: link / median(us) / 1e3, Checked: true})
	}
	return rows, nil
}
