package core

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// GPUOptions say what a Comm has on a GPU.
type GPUOptions struct {
	// Device is the GPU's ordinal as CUDA_VISIBLE_DEVICES has it.
	Device int
	// HeapBytes is what the heap there has at first, for control blocks and staging of the exchanges and for symmetric memory. 0 is
	// SWITCHYARD_CUDA_HEAP, and defaultGPUHeap without that.
	HeapBytes int64
	// MaxSMs bounds the multiprocessors that an exchange above packets takes, and a reduction. CopySMs is for exchanges only, and so is
	// NoSMs, which has the copy engines do them. See alltoallv.Options and allreduce.Options.
	MaxSMs, CopySMs int
	NoSMs           bool
	// Environ is as in Options.
	Environ map[string]string
}

// defaultGPUHeap has room for the control blocks and staging of exchanges, 17 MiB for each rank of the group, and some for tensors. A heap on a
// GPU takes its memory at once. It grows for a reducer, which takes 108 MiB.
func defaultGPUHeap(ranks int) int64 { return (36 + 20*int64(ranks)) << 20 }

// GPU is a Comm's end on one GPU: a heap in its memory, an exchanger, dispatchers and, once there have been reductions, a reducer. Their
// calls are enqueued on the caller's stream by the caller's thread; everything else runs in the queue of the Comm.
type GPU struct {
	comm      *Comm
	dev       *device.CUDADevice
	heap      *memory.Heap
	exchanger *alltoallv.Exchanger
	point     *p2p.Endpoint
	reduces   allreduce.Options // of the reducer
	blocks    blocks
	opened    opened
	base, end uintptr // of this rank's segment

	mu          sync.Mutex // orders calls, and guards what is below
	closed      bool
	reducer     *allreduce.Reducer
	dispatchers []*Dispatcher
	kernels     []*Kernels
	shared      dispatch.Shared
	streams     map[uintptr]*device.CUDAStream
	last        *device.CUDAStream // of the streams, the one that was asked for last
	splits      alltoallv.Splits
}

// OpenGPU submits the making of the Comm's end on a GPU, which every rank does with one of its own or a shared one. put
// names it; the name is the ticket's value. It takes up to some seconds. A failure on one rank is an error on all;
// memory.ErrUnsupported says that these GPUs cannot do it.
func (c *Comm) OpenGPU(o GPUOptions, put func(*GPU) uint64) (Ticket, error) {
	return c.do(func() (int64, error) {
		g, err := c.openGPU(o)
		if err != nil {
			return 0, err
		}
		c.mu.Lock()
		c.gpus = append(c.gpus, g)
		c.mu.Unlock()
		return int64(put(g)), nil
	})
}

func (c *Comm) openGPU(o GPUOptions) (_ *GPU, err error) {
	_, group, err := c.ready()
	if err != nil {
		return nil, err
	}
	ctx, cancel := c.meeting()
	defer cancel()
	g := &GPU{comm: c, streams: make(map[uintptr]*device.CUDAStream)}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.stop(ctx), g.free(ctx))
		}
	}()
	heapBytes, err := o.heapBytes(group.Size())
	claim := agree.Claim{Must: agree.Same(fmt.Sprintf("a CUDA heap of %d bytes", heapBytes))}
	var missing error
	if g.dev, missing = device.CUDA(o.Device); missing != nil {
		claim.Own = missing.Error()
	}
	claims, err := agree.On(ctx, group, claim, err)
	if err != nil {
		return nil, fmt.Errorf("core: open cuda:%d: %w", o.Device, err)
	}
	for r, why := range claims.Owns() {
		if why != "" { // all ranks hear of it here, and all make something else of it
			return nil, fmt.Errorf("core: %w on rank %d: %s", memory.ErrUnsupported, r, why)
		}
	}
	if n := group.Topology().Hosts; n > 1 { // a heap could be made, but not what calls need
		return nil, fmt.Errorf("core: %w", memory.NoGPUsOn(n))
	}
	if g.heap, err = memory.NewHeap(ctx, group, g.dev, memory.Options{SegmentBytes: heapBytes}); err != nil {
		return nil, err
	}
	s := g.heap.Space()
	g.base = s.Base + uintptr(int64(s.Rank)*s.Stride)
	g.end = g.base + uintptr(s.Stride)
	x := c.options.exchanges(group, OnGPUs)
	x.Timeout, x.Validate, x.MaxSMs, x.CopySMs, x.NoSMs = c.within(), c.options.Validate, o.MaxSMs, o.CopySMs, o.NoSMs
	if s.Size > 4 { // most tensors are not symmetric, and then 2 MiB a rank of 8 take half as long in packets as through staging
		x.PacketBytes = 256 << 10
	}
	g.exchanger, err = alltoallv.New(ctx, g.heap, x)
	for more := heapBytes; errors.Is(err, memory.ErrOutOfMemory); more *= 2 { // on all ranks alike
		if err = g.heap.Grow(ctx, more); err != nil {
			break
		}
		g.exchanger, err = alltoallv.New(ctx, g.heap, x)
	}
	if err == nil {
		g.point, err = p2p.New(ctx, g.heap, p2p.Options{Timeout: x.Timeout, MaxSMs: o.MaxSMs})
	}
	g.reduces = c.planned()
	g.reduces.Timeout, g.reduces.Validate, g.reduces.MaxSMs = x.Timeout, x.Validate, o.MaxSMs
	return g, err
}

// meeting bounds how long ranks wait for one another to make something: who does not come makes another call.
func (c *Comm) meeting() (context.Context, context.CancelFunc) {
	limit := c.within()
	if limit <= 0 {
		limit = 2 * time.Minute
	}
	return context.WithTimeout(c.ctx, limit)
}

// OpenReducer submits the making of the GPU's reducer, which every rank does before its first reduction there. A failure on one rank is
// an error on all. A second call does nothing.
func (g *GPU) OpenReducer() (Ticket, error) {
	return g.comm.do(func() (int64, error) { return 0, g.openReducer() })
}

func (g *GPU) openReducer() error {
	g.mu.Lock()
	closed, found := g.closed, g.reducer != nil
	g.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if found {
		return nil
	}
	ctx, cancel := g.comm.meeting()
	defer cancel()
	x, err := allreduce.New(ctx, g.heap, g.reduces)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reducer = x
	return nil
}

func (o *GPUOptions) heapBytes(ranks int) (int64, error) {
	environment.Lock()
	defer environment.Unlock()
	if err := refresh(o.Environ); err != nil {
		return 0, err
	}
	if o.HeapBytes > 0 {
		return o.HeapBytes, nil
	}
	n, err := env.CUDAHeap()
	if err != nil {
		return 0, badEnvironment(err)
	}
	if n > 0 {
		return n, nil
	}
	return defaultGPUHeap(ranks), nil
}

// stream is the wrapper of a CUstream, always the same one: an exchange on another stream than the one before is ordered
// behind that. A nil GPU is the host, which has none.
func (g *GPU) stream(handle uintptr) (device.Stream, error) {
	if g == nil {
		return nil, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, ErrClosed
	}
	return g.wrap(handle)
}

// wrap is stream with g.mu held.
func (g *GPU) wrap(handle uintptr) (*device.CUDAStream, error) {
	if g.last != nil && g.last.Handle() == handle {
		return g.last, nil
	}
	s := g.streams[handle]
	if s == nil {
		var err error
		if s, err = g.dev.WrapStream(handle); err != nil {
			return nil, err
		}
		g.streams[handle] = s
	}
	g.last = s
	return s, nil
}

// view is device memory as calls take it: symmetric where it is. g.mu is held.
func (g *GPU) view(b Buffer) (memory.View, error) {
	switch {
	case b.Bytes == 0:
		return memory.View{}, nil
	case b.Bytes < 0 || b.Addr == 0:
		return memory.View{}, fmt.Errorf("core: %w: %d bytes at address %#x", ErrInvalid, b.Bytes, b.Addr)
	}
	if v, ok := g.blocks.view(b); ok {
		return v, nil
	}
	if v, ok := g.opened.view(b); ok {
		return v, nil
	}
	if b.Addr >= g.base && b.Addr < g.end {
		for _, d := range g.dispatchers {
			if v, ok := d.own(b); ok {
				return v, nil
			}
		}
		return memory.View{}, fmt.Errorf("core: %d bytes at %#x of the symmetric heap: %w", b.Bytes, b.Addr, memory.ErrFreed)
	}
	return memory.Device(b.Addr, b.Bytes), nil
}

// Size is the number of ranks.
func (g *GPU) Size() int { return g.comm.group.Size() }

// AllToAll enqueues an exchange on a CUstream, as alltoallv.Exchanger.Exchange describes. It waits for nothing and has no
// ticket: it is complete once the stream has run it.
func (g *GPU) AllToAll(stream, dst, src uintptr, shape Shape) (Ticket, error) {
	return g.enqueue(stream, Buffer{dst, shape.DstBytes}, Buffer{src, shape.SrcBytes}, func(s device.Stream, d, v memory.View) error {
		shape.assign(g.Size(), &g.splits)
		err := g.exchanger.Exchange(s, d, v, &g.splits)
		g.splits = alltoallv.Splits{} // it pointed to the caller's memory
		return err
	})
}

// AllReduce enqueues an all-reduce on a CUstream, as allreduce.Reducer.AllReduce describes; it has no ticket. There must be a reducer.
func (g *GPU) AllReduce(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error) {
	return g.reduce(stream, dst, src, func(s device.Stream, d, v memory.View) error { return g.reducer.AllReduce(s, d, v, dt, o) })
}

// ReduceScatter enqueues a reduce-scatter, as Place describes.
func (g *GPU) ReduceScatter(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error) {
	return g.reduce(stream, dst, src, func(s device.Stream, d, v memory.View) error { return g.reducer.ReduceScatter(s, d, v, dt, o) })
}

// AllGather enqueues an all-gather, as Place describes.
func (g *GPU) AllGather(stream uintptr, dst, src Buffer) (Ticket, error) {
	return g.reduce(stream, dst, src, func(s device.Stream, d, v memory.View) error { return g.reducer.AllGather(s, d, v, kernels.Uint8) })
}

// AllToAllByPlan enqueues an all-to-all by a plan, as Place describes.
func (g *GPU) AllToAllByPlan(stream uintptr, dst, src Buffer) (Ticket, error) {
	return g.reduce(stream, dst, src, func(s device.Stream, d, v memory.View) error { return g.reducer.AllToAll(s, d, v, kernels.Uint8) })
}

// Broadcast enqueues a broadcast, as Place describes.
func (g *GPU) Broadcast(stream uintptr, bytes Buffer, root int) (Ticket, error) {
	if err := broadcasts(g.Size(), root); err != nil {
		return 0, err
	}
	return g.reduce(stream, bytes, Buffer{}, func(s device.Stream, d, _ memory.View) error { return g.reducer.Broadcast(s, d, root) })
}

var errNoReducer = fmt.Errorf("core: %w: a reduction on a GPU without a reducer", ErrInvalid)

// reduce is enqueue of a call of the reducer.
func (g *GPU) reduce(stream uintptr, dst, src Buffer, call func(s device.Stream, d, v memory.View) error) (Ticket, error) {
	return g.enqueue(stream, dst, src, func(s device.Stream, d, v memory.View) error {
		if g.reducer == nil {
			return errNoReducer
		}
		return call(s, d, v)
	})
}

// enqueue makes a call with the stream and the buffers as views.
func (g *GPU) enqueue(stream uintptr, dst, src Buffer, call func(s device.Stream, d, v memory.View) error) (Ticket, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return 0, ErrClosed
	}
	s, err := g.wrap(stream)
	if err != nil {
		return 0, err
	}
	d, err := g.view(dst)
	if err != nil {
		return 0, err
	}
	v, err := g.view(src)
	if err != nil {
		return 0, err
	}
	return 0, call(s, d, v)
}

// Refuse waits until the other ranks have heard why this one does not make the call that they make now.
func (g *GPU) Refuse(why error) (Ticket, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return 0, g.comm.refuse(why)
}

// Explain says how an exchange into dst would be carried.
func (g *GPU) Explain(dst uintptr, shape Shape) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return "", ErrClosed
	}
	d, err := g.view(Buffer{dst, shape.DstBytes})
	if err != nil {
		return "", err
	}
	_, inPlace := d.Symmetric(g.heap)
	var sp alltoallv.Splits
	shape.assign(g.Size(), &sp)
	decision, err := g.exchanger.Explain(&sp, inPlace)
	if err != nil {
		return "", err
	}
	return decision.String(), nil
}

// ExplainReduction explains the GPU's reducer, as Place describes.
func (g *GPU) ExplainReduction(collective kernels.Collective, n int64, dt kernels.DType) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return "", ErrClosed
	case g.reducer == nil:
		return "", errNoReducer
	}
	return explained(g.reducer, collective, n, dt)
}

// Fault is what calls that have run by now have come to; see alltoallv.Exchanger.Fault.
func (g *GPU) Fault() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	err := errors.Join(g.exchanger.Fault(), g.point.Fault())
	if g.reducer != nil {
		err = errors.Join(err, g.reducer.Fault())
	}
	for _, d := range g.dispatchers {
		err = errors.Join(err, d.inner.Fault())
	}
	for _, k := range g.kernels {
		err = errors.Join(err, k.inner.Fault())
	}
	return err
}

// Alloc submits an allocation of symmetric memory for work on a CUstream. Every rank submits the same ones. The heap grows
// where it has to. put names the block; the name is the ticket's value.
func (g *GPU) Alloc(stream uintptr, n int64, put func(*Block) uint64) (Ticket, error) {
	return g.comm.do(func() (int64, error) {
		b, err := g.allocate(stream, n)
		if err != nil {
			return 0, err
		}
		return int64(put(b)), nil
	})
}

func (g *GPU) allocate(stream uintptr, n int64) (*Block, error) {
	s, err := g.stream(stream)
	if err != nil {
		return nil, err
	}
	b, err := g.blocks.allocate(g.comm.ctx, g.heap, s, n)
	if err != nil {
		return nil, err
	}
	b.comm, b.gpu = g.comm, g
	return b, nil
}

// Verify submits a comparison of what the ranks have allocated and freed.
func (g *GPU) Verify() (Ticket, error) {
	return g.comm.do(func() (int64, error) {
		ctx, cancel := g.comm.meeting()
		defer cancel()
		return 0, g.heap.Verify(ctx)
	})
}

// stop ends what is on the heap together with all ranks.
func (g *GPU) stop(ctx context.Context) error {
	g.mu.Lock()
	g.closed = true
	dispatchers, kernels := g.dispatchers, g.kernels
	g.mu.Unlock()
	var errs []error
	for _, k := range kernels {
		errs = append(errs, k.inner.Close(ctx))
	}
	for _, d := range dispatchers {
		errs = append(errs, d.inner.Close(ctx))
	}
	if g.reducer != nil {
		errs = append(errs, g.reducer.Close(ctx))
	}
	if g.point != nil {
		errs = append(errs, g.point.Close(ctx))
	}
	if g.exchanger != nil {
		errs = append(errs, g.exchanger.Close(ctx))
	}
	for _, s := range g.streams {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// free gives the symmetric memory back, after stop.
func (g *GPU) free(ctx context.Context) error {
	var errs []error
	if g.heap != nil {
		errs = append(errs, g.heap.Close(ctx))
	}
	if g.dev != nil {
		errs = append(errs, g.dev.Close())
	}
	return errors.Join(errs...)
}

// drain reports whether the GPU has run everything within d. It leaves a goroutine behind when not.
func (g *GPU) drain(d time.Duration) bool {
	done := make(chan struct{})
	go func() {
		_ = g.dev.Context().Synchronize() // with an error nothing runs any more either
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-time.After(d):
		return false
	}
}
