package main

import (
	"context"
	"errors"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/memory"
)

// callsPerGraph is how many exchanges one graph holds.
const callsPerGraph = 20

// cudaRig times exchanges on GPUs, one a rank while there are enough. A sample is many calls back to back, from a barrier
// to the end of the stream, divided by their number: replays of a graph that holds some of them, or calls from Go.
type cudaRig struct {
	c        config
	dev      *device.CUDADevice
	h        *memory.Heap
	s        *device.CUDAStream
	src, dst *memory.Buffer
	foreign  uintptr
	host     []byte
	splits   *alltoallv.Splits
}

func newCUDARig(ctx context.Context, g *comm.Group, c config, send, recv, channels int64) (_ rig, err error) {
	gpus, err := device.CUDACount()
	if err != nil {
		return nil, err
	}
	r := &cudaRig{c: c}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close(ctx))
		}
	}()
	if r.dev, err = device.CUDA(g.Rank() % gpus); err != nil {
		return nil, err
	}
	if r.h, err = memory.NewHeap(ctx, g, r.dev, memory.Options{SegmentBytes: send + recv + channels}); err != nil {
		return nil, err
	}
	s, err := r.dev.NewStream()
	if err != nil {
		return nil, err
	}
	r.s = s.(*device.CUDAStream)
	if r.src, err = r.h.Alloc(send); err != nil {
		return nil, err
	}
	if r.dst, err = r.h.Alloc(recv); err != nil {
		return nil, err
	}
	r.host = make([]byte, max(send, recv))
	return r, nil
}

func (r *cudaRig) heap() *memory.Heap { return r.h }

func (r *cudaRig) load(m [][]int64) error {
	me := r.h.Group().Rank()
	r.splits = splitsOf(m, me)
	n := sum(r.splits.Send)
	fillSource(r.host, r.splits, me)
	return memory.Copy(r.s, r.src.View().Slice(0, n), memory.Host(r.host[:n]))
}

func (r *cudaRig) time(ctx context.Context, x *alltoallv.Exchanger, staged bool, size int64) ([]float64, error) {
	g := r.h.Group()
	src, dst := r.src.View().Slice(0, sum(r.splits.Send)), r.dst.View()
	if staged {
		if r.foreign == 0 {
			var err error
			if r.foreign, err = r.dev.Context().MemAlloc(r.dst.Len()); err != nil {
				return nil, err
			}
		}
		dst = memory.Device(r.foreign, r.dst.Len())
	}
	dst = dst.Slice(0, sum(r.splits.Recv))
	if err := r.dev.Context().Set(cuda.Stream(r.s.Handle()), dst.Ptr(), 0xff, dst.Len()); err != nil {
		return nil, err
	}
	samples, replays, calls := 15, 10, callsPerGraph
	if size > 16<<20 {
		samples, replays = 8, 1
	}
	if r.c.Iters > 0 {
		samples = r.c.Iters
	}
	if r.c.Quick {
		samples, replays = 5, 2
		if size > 16<<20 {
			replays, calls = 1, 4
		}
	}
	one := func() error {
		for range calls {
			if err := x.Exchange(r.s, dst, src, r.splits); err != nil {
				return err
			}
		}
		return nil
	}
	// Allocation and what a first call loads may wait for running kernels: all ranks are past it before any goes on.
	if err := errors.Join(r.s.Synchronize(), g.Barrier(ctx)); err != nil {
		return nil, err
	}
	if err := errors.Join(x.Exchange(r.s, dst, src, r.splits), r.s.Synchronize(), x.Fault()); err != nil {
		return nil, err
	}
	if !r.c.EagerLaunch {
		graph, err := r.s.Capture(one)
		if err != nil {
			return nil, err
		}
		defer graph.Close()
		one = func() error { return graph.Launch(r.s) }
	}
	var t timer
	warm := 2
	if r.c.Quick {
		warm = 1
	}
	for i := -warm; i < samples; i++ {
		if err := g.Barrier(ctx); err != nil {
			return nil, err
		}
		start := time.Now()
		for range replays {
			if err := one(); err != nil {
				return nil, err
			}
		}
		if err := r.s.Synchronize(); err != nil {
			return nil, err
		}
		if i >= 0 {
			t.us = append(t.us, float64(time.Since(start).Nanoseconds())/1e3/float64(replays*calls))
		}
	}
	if err := x.Fault(); err != nil {
		return nil, err
	}
	got := r.host[:dst.Len()]
	if err := memory.Copy(r.s, memory.Host(got), dst); err != nil {
		return nil, err
	}
	if err := checkOutput(got, r.splits, g.Rank()); err != nil {
		return nil, err
	}
	return t.merge(ctx, g)
}

func (r *cudaRig) close(ctx context.Context) (err error) {
	if r.s != nil {
		err = r.s.Close()
	}
	if r.foreign != 0 {
		err = errors.Join(err, r.dev.Context().MemFree(r.foreign))
	}
	if r.h != nil {
		err = errors.Join(err, r.h.Close(ctx))
	}
	if r.dev != nil {
		err = errors.Join(err, r.dev.Close())
	}
	return err
}
