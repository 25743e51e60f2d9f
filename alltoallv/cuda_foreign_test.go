package alltoallv_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// gpuMemory is memory of cudaMalloc, as tensors lie in.
func gpuMemory(r *worldtest.Rank, n int64) (v memory.View, free func()) {
	c := r.Device.(*device.CUDADevice).Context()
	p, err := c.MemAlloc(n)
	r.Must(err)
	return memory.Device(p, n), func() { r.Must(c.MemFree(p)) }
}

// splitsUpTo are random, of packets, of messages with credit, and of nothing.
func splitsUpTo(rng *rand.Rand, size int, most int64) [][]int64 {
	m := make([][]int64, size)
	for i := range m {
		m[i] = make([]int64, size)
		for k := range m[i] {
			switch rng.IntN(4) {
			case 0:
			case 1:
				m[i][k] = rng.Int64N(5000)
			default:
				m[i][k] = rng.Int64N(most)
			}
		}
	}
	return m
}

// intoForeignMemory exchanges into memory of cudaMalloc that is registered, and then, at the same address, into memory that is not.
func intoForeignMemory(r *worldtest.Rank) {
	const most = 200_000
	n, me := r.Size(), r.Rank()
	dst, freeDst := gpuMemory(r, int64(n*most+4096+256*me))
	src, freeSrc := gpuMemory(r, int64(n*most))
	s := gpuStream(r)
	own := dst.Slice(int64(256*me+3), int64(n*most)) // no two alike in the last bits
	reg, err := r.Heap.Register(r.Ctx, own)
	r.Must(err)
	for _, copies := range []bool{false, true} {
		o := alltoallv.Options{PacketBytes: 8 << 10, SlotBytes: 16 << 10, Timeout: 20 * time.Second, NoSMs: copies}
		x, err := alltoallv.New(r.Ctx, r.Heap, o)
		r.Must(err)
		rng := rand.New(rand.NewPCG(7, 7))
		for call := range 12 {
			m := splitsUpTo(rng, n, most)
			c := newGPUCall(r, s, own.Slice(0, total(column(m, me))), src, m, call)
			if copies {
				c.sp.PeerDispls = peerDispls(m, me)
			}
			if at, ok := c.dst.Symmetric(r.Heap); c.dst.Len() > 0 && (!ok || at != reg.Offset()) {
				r.Must(fmt.Errorf("it lies at %d of what is registered: %v", at, ok))
			}
			// In place by what the exchange itself says: copy engines refuse a destination that is not.
			r.Must(x.Exchange(s, c.dst, src.Slice(0, total(m[me])), c.sp))
			r.Must(s.Synchronize())
			r.Must(x.Fault())
			if err := c.check(); err != nil {
				r.Must(fmt.Errorf("copy engines %v, call %d: %w", copies, call, err))
			}
		}
		r.Must(x.Close(r.Ctx))
	}
	r.Must(reg.Deregister(r.Ctx))

	x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{PacketBytes: -1, NoSMs: true})
	r.Must(err)
	sp := &alltoallv.Splits{Send: make([]int64, n), Recv: make([]int64, n), PeerDispls: make([]int64, n)}
	for p := range n {
		sp.Send[p], sp.Recv[p], sp.PeerDispls[p] = 1000, 1000, int64(1000*me)
	}
	if err := x.Exchange(s, own.Slice(0, int64(1000*n)), src.Slice(0, int64(1000*n)), sp); !errors.Is(err, alltoallv.ErrInvalid) {
		r.Must(fmt.Errorf("it is not registered any more: %v", err))
	}
	r.Must(x.Close(r.Ctx))
	r.Must(s.Close())
	r.Barrier()
	freeDst()
	freeSrc()
}

func TestCUDA_RegisteredCudaMallocMemoryIsWrittenInPlace(t *testing.T) {
	t.Run("one process", func(t *testing.T) {
		worldtest.GPUHeaps(t, 3, memory.Options{SegmentBytes: 96 << 20}, intoForeignMemory)
	})
	t.Run("processes", func(t *testing.T) {
		worldtest.GPUProcs(t, 2, memory.Options{SegmentBytes: 96 << 20}, intoForeignMemory)
	})
}

// The whole exchange where segments lie anywhere, into memory of the heap, memory that is registered, and memory that is not.
func overLegacyHeap(r *worldtest.Rank) {
	const most = 150_000
	n, me := r.Size(), r.Rank()
	b, err := r.Heap.Alloc(int64(n * most))
	r.Must(err)
	foreign, free := gpuMemory(r, int64(n*most))
	src, freeSrc := gpuMemory(r, int64(n*most))
	s := gpuStream(r)
	for _, force := range []string{"", "direct", "pipelined", "ring", "copy"} {
		o := alltoallv.Options{Algorithm: force, PacketBytes: 8 << 10, SlotBytes: 16 << 10, Timeout: 20 * time.Second}
		x, err := alltoallv.New(r.Ctx, r.Heap, o)
		r.Must(err)
		rng := rand.New(rand.NewPCG(8, 8))
		for call := range 6 {
			to := b.View()
			if call%2 == 1 && force != "copy" {
				to = foreign
			}
			m := splitsUpTo(rng, n, most)
			c := newGPUCall(r, s, to.Slice(0, total(column(m, me))), src, m, call)
			if force == "copy" {
				c.sp.PeerDispls = peerDispls(m, me)
			}
			r.Must(x.Exchange(s, c.dst, src.Slice(0, total(m[me])), c.sp))
			r.Must(s.Synchronize())
			r.Must(x.Fault())
			if err := c.check(); err != nil {
				r.Must(fmt.Errorf("%q, call %d: %w", force, call, err))
			}
		}
		r.Must(x.Close(r.Ctx))
	}
	r.Must(s.Close())
	r.Must(b.Free())
	free()
	freeSrc()
}

func TestCUDA_ExchangeOverLegacyIPC(t *testing.T) {
	legacy := memory.Options{SegmentBytes: 96 << 20, LegacyIPC: true}
	for name, f := range map[string]func(*worldtest.Rank){"heap": overLegacyHeap, "registered": intoForeignMemory} {
		t.Run(name+" in one process", func(t *testing.T) { worldtest.GPUHeaps(t, 3, legacy, f) })
		t.Run(name+" in processes", func(t *testing.T) { worldtest.GPUProcs(t, 2, legacy, f) })
	}
}

func TestCUDA_GraphsReplayIntoRegisteredMemory(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{MaxSMs: 4, Timeout: 20 * time.Second})
		r.Must(err)
		s := gpuStream(r)
		src, freeSrc := gpuMemory(r, 4<<20)
		dst, freeDst := gpuMemory(r, 4<<20)
		reg, err := r.Heap.Register(r.Ctx, dst.Slice(0, 3<<20))
		r.Must(err)
		m := [][]int64{{1000, 900001}, {700003, 300_000}}
		c := newGPUCall(r, s, dst.Slice(0, total(column(m, r.Rank()))), src, m, 1)
		g, err := s.(*device.CUDAStream).Capture(func() error { return x.Exchange(s, c.dst, c.src.Slice(0, total(m[r.Rank()])), c.sp) })
		r.Must(err)
		r.Barrier() // see TestCUDA_GraphReplays
		for range 5 {
			c.poison()
			r.Must(g.Launch(s))
			r.Must(s.Synchronize())
			r.Must(x.Fault())
			r.Must(c.check())
			// Others come and go meanwhile.
			later, err := r.Heap.Register(r.Ctx, dst.Slice(3<<20, 1000))
			r.Must(err)
			r.Must(later.Deregister(r.Ctx))
		}
		r.Must(g.Close())
		r.Must(reg.Deregister(r.Ctx))
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
		r.Barrier()
		freeSrc()
		freeDst()
	})
}
