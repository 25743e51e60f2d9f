package main

import (
	"context"
	"errors"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/memory"
)

// callsPerGraph is how many exchanges one graph holds.
const callsPerGraph = 20

// cudaRig times exchanges on GPUs, one a rank while there are enough. A sample is the GPU's time, between two events of the stream, of
// many calls back to back, divided by their number: a replay of a graph that holds them, or calls from Go. The samples
// follow each other without a pause.
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

func newCUDARig(ctx context.Context, g *comm.Group, c config, send, recv, control int64) (_ *cudaRig, err error) {
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
	if r.h, err = memory.NewHeap(ctx, g, r.dev, memory.Options{SegmentBytes: send + recv + control}); err != nil {
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
	t, err := r.calls(ctx, size, x.Fault, func() error { return x.Exchange(r.s, dst, src, r.splits) })
	if err != nil {
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

// calls times a call of about size bytes a rank. fault is what calls that have run have come to.
func (r *cudaRig) calls(ctx context.Context, size int64, fault, call func() error) (t timer, err error) {
	samples, calls := 25, callsPerGraph
	if size > 16<<20 {
		samples = 8
	}
	if r.c.Iters > 0 {
		samples = r.c.Iters
	}
	if r.c.Quick {
		samples = 7
		if size > 16<<20 {
			calls = 4
		}
	}
	one := func() error {
		for range calls {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	}
	// Allocation and what a first call loads may wait for running kernels: all ranks are past it before any goes on.
	if err := errors.Join(r.s.Synchronize(), r.h.Group().Barrier(ctx)); err != nil {
		return t, err
	}
	if err := errors.Join(call(), r.s.Synchronize(), fault()); err != nil {
		return t, err
	}
	if !r.c.EagerLaunch {
		graph, err := r.s.Capture(one)
		if err != nil {
			return t, err
		}
		defer graph.Close()
		one = func() error { return graph.Launch(r.s) }
	}
	if t, err = timeOnGPU(ctx, r.h.Group(), r.dev, r.s, samples, calls, one); err != nil {
		return t, err
	}
	return t, fault()
}

// timeOnGPU times a number of runs of one, which makes calls, on a stream of this rank.
func timeOnGPU(
	ctx context.Context, g *comm.Group, dev *device.CUDADevice, stream *device.CUDAStream, samples, calls int, one func() error,
) (t timer, err error) {
	const warm = 2
	c, s := dev.Context(), cuda.Stream(stream.Handle())
	events := make([]cuda.Event, samples+1)
	defer func() {
		for _, e := range events {
			if e != 0 {
				err = errors.Join(err, c.DestroyEvent(e))
			}
		}
	}()
	for i := range events {
		if events[i], err = c.NewEvent(true); err != nil {
			return t, err
		}
	}
	if err := g.Barrier(ctx); err != nil {
		return t, err
	}
	for i := -warm; i <= samples; i++ {
		if i >= 0 {
			if err := c.Record(events[i], s); err != nil {
				return t, err
			}
		}
		if i < samples {
			if err := one(); err != nil {
				return t, err
			}
		}
	}
	if err := stream.Synchronize(); err != nil {
		return t, err
	}
	for i := range samples {
		d, err := c.Elapsed(events[i], events[i+1])
		if err != nil {
			return t, err
		}
		t.us = append(t.us, float64(d.Nanoseconds())/1e3/float64(calls))
	}
	return t, nil
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
