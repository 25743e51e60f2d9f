package memory

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/kernels"
)

func (r *cudaRank) malloc(n int64) uintptr {
	p, err := r.d.Context().MemAlloc(n)
	require.NoError(r, err)
	return p
}

func (r *cudaRank) free(p uintptr) { require.NoError(r, r.d.Context().MemFree(p)) }

// exchange has every rank write n bytes to every other's part of reg, by its address, and checks v, which is this rank's.
func (r *cudaRank) exchange(reg *Registration, v View, n int64, salt int) {
	me, sp := r.g.Rank(), r.h.Space()
	r.barrier()
	for p := range r.g.Size() {
		if reg.PeerLen(p) > 0 {
			r.write(Device(sp.Addr(p, reg.Offset()+n*int64(me)), n), pattern(n, me, p, salt))
		}
	}
	r.barrier()
	if v.Len() == 0 {
		return
	}
	for p := range r.g.Size() {
		require.Equal(r, pattern(n, p, me, salt), r.read(v.Slice(n*int64(p), n)), "what rank %d wrote to its address of the memory", p)
	}
}

func TestM7_CudaMallocMemoryIsRegistered(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda malloc")
	everywhere(t, 3, "legacy malloc")
}

func cudaMallocScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	me, sp := g.Rank(), r.h.Space()
	p := r.malloc(int64(3<<20 + 256*me)) // with room of another length on every rank
	v := Device(p+uintptr(4096+256*me+13), int64(100_000+7*me))
	_, ok := v.Symmetric(r.h)
	require.False(t, ok)
	reg, err := r.h.Register(t.ctx, v)
	require.NoError(t, err)
	require.Equal(t, v.Ptr(), reg.View().Ptr())
	for q := range g.Size() {
		require.EqualValues(t, 100_000+7*q, reg.PeerLen(q))
	}
	r.exchange(reg, v, 1000, 1)
	off, ok := v.Slice(77, 100).Symmetric(r.h)
	require.True(t, ok)
	require.Equal(t, reg.Offset()+77, off)
	off, ok = reg.View().Slice(77, 100).Symmetric(r.h)
	require.True(t, ok)
	require.Equal(t, reg.Offset()+77, off)
	_, ok = Device(v.Ptr()-1, 10).Symmetric(r.h)
	require.False(t, ok, "it begins before what is registered")
	_, ok = Device(v.Ptr()+1, v.Len()).Symmetric(r.h)
	require.False(t, ok, "it ends after what is registered")

	// another part of the allocation, and one so small that the driver puts several of them together
	other := Device(p+1<<20, 3000)
	reg2, err := r.h.Register(t.ctx, other)
	require.NoError(t, err)
	s := r.malloc(3000)
	small := Device(s, 3000)
	reg3, err := r.h.Register(t.ctx, small)
	require.NoError(t, err)
	require.NotEqual(t, reg.Offset(), reg2.Offset())
	r.exchange(reg2, other, 1000, 2)
	r.exchange(reg3, small, 1000, 3)
	row := r.read(r.peer(me, kernels.AliasOffset+int64(8*g.Size()), int64(8*g.Size())))
	for q := range g.Size() {
		require.EqualValues(t, sp.Addr(q, reg2.Offset()), binary.LittleEndian.Uint64(row[8*q:]), "what kernels read")
	}
	outside := 2 * (g.Size() - 1) // two allocations of every other rank, and of the heap's segments
	if t.legacy {
		outside += g.Size() - 1
	}
	if len(r.h.gpu.opened) > 0 { // the ranks do not share a process
		require.Len(t, r.h.gpu.opened, outside)
	}
	require.NoError(t, reg.Deregister(t.ctx))
	_, ok = v.Symmetric(r.h)
	require.False(t, ok)
	require.Zero(t, sp.Addr(me, reg.Offset()))
	r.exchange(reg2, other, 1000, 4)
	require.NoError(t, reg2.Deregister(t.ctx))
	require.ErrorIs(t, reg2.Deregister(t.ctx), ErrFreed)
	require.Equal(t, make([]byte, 8*g.Size()), r.read(r.peer(me, kernels.AliasOffset+int64(8*g.Size()), int64(8*g.Size()))))
	r.exchange(reg3, small, 1000, 5)

	// one rank without, in the first row that is free
	mine := View{}
	if me == 1 {
		mine = v
	}
	part, err := r.h.Register(t.ctx, mine)
	require.NoError(t, err)
	require.Equal(t, reg.Offset(), part.Offset())
	require.Zero(t, part.PeerLen(0))
	r.exchange(part, mine, 1000, 6)
	require.NoError(t, r.h.Verify(t.ctx))

	// what one rank cannot do is an error on all
	pinned, err := r.d.Context().NewHostBuffer(4096)
	require.NoError(t, err)
	for _, bad := range []struct {
		v   View
		why string
	}{
		{Device(pinned.Addr(), 4096), "not memory of a GPU"},
		{Host(make([]byte, 8)), "memory of the host"},
		{Device(p+100, 4<<20), "more than one allocation"},
	} {
		b := View{}
		if me == 0 {
			b = bad.v
		}
		_, err = r.h.Register(t.ctx, b)
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, bad.why)
	}
	if o := newOutside(t, r.d, 2<<20); t.legacy {
		_, err := r.h.Register(t.ctx, Device(o.addr, o.n))
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "only CUDA IPC")
		o.empty(t)
		require.NoError(t, o.c.Unreserve(o.addr, o.room))
	} else {
		o.empty(t)
		require.NoError(t, o.c.Unreserve(o.addr, o.room))
	}
	require.NoError(t, pinned.Close())
	r.barrier()
	require.NoError(t, r.h.Close(t.ctx), "what is registered yet goes with the heap")
	require.Empty(t, r.h.gpu.opened)
	r.free(p)
	r.free(s)
	r.close()
}

func TestM7_MemoryOfBothKindsMeetsInOneRegistration(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda mixed")
}

func cudaMixedScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	me := g.Rank()
	o := newOutside(t, r.d, r.h.granule)
	p := r.malloc(1 << 20)
	for round := range 3 {
		v := Device(p+512, 100_000)
		if (me+round)%3 == 0 {
			v = Device(o.addr+8192, 100_000)
		}
		reg, err := r.h.Register(t.ctx, v)
		require.NoError(t, err)
		r.exchange(reg, v, 1000, round)
		off, ok := v.Symmetric(r.h)
		require.True(t, ok)
		require.Equal(t, reg.Offset(), off)
		r.barrier()
		if round < 2 {
			require.NoError(t, reg.Deregister(t.ctx))
		}
	}
	r.barrier()
	require.NoError(t, r.h.Close(t.ctx))
	o.empty(t)
	require.NoError(t, o.c.Unreserve(o.addr, o.room))
	r.free(p)
	r.close()
}

func TestM7_AnAddressThatCudaMallocGivesAgainIsAMiss(t *testing.T) {
	needGPU(t)
	runRanks(t, localRanks(t, 1), func(t *rankT, g *comm.Group) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		const n = 64 << 20
		p := r.malloc(n)
		v := Device(p, n)
		reg, err := r.h.Register(t.ctx, v)
		require.NoError(t, err)
		_, ok := v.Symmetric(r.h)
		require.True(t, ok)
		r.free(p) // with no peer to harm
		again := r.malloc(n)
		require.Equal(t, p, again, "the driver gives the address again")
		_, ok = v.Symmetric(r.h)
		require.False(t, ok)
		reg2, err := r.h.Register(t.ctx, v)
		require.NoError(t, err)
		off, ok := v.Symmetric(r.h)
		require.True(t, ok)
		require.Equal(t, reg2.Offset(), off)
		require.NoError(t, reg.Deregister(t.ctx))
		_, ok = v.Symmetric(r.h)
		require.True(t, ok)
		require.NoError(t, reg2.Deregister(t.ctx))
		r.free(again)
		r.close()
	})
}

func TestM4_ImportersCloseBeforeTheExporterFrees(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda order")
	everywhere(t, 3, "legacy order")
}

func cudaOrderScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	me := g.Rank()
	const n = 64 << 20
	p := r.malloc(n)
	reg, err := r.h.Register(t.ctx, Device(p, n))
	require.NoError(t, err)
	r.exchange(reg, reg.View(), 1000, 1)
	r.barrier()
	if me == 1 {
		time.Sleep(300 * time.Millisecond) // a peer that is late
	}
	entered := time.Now()
	require.NoError(t, reg.Deregister(t.ctx))
	left := time.Now()
	times, err := g.AllGather(t.ctx, binary.LittleEndian.AppendUint64(nil, uint64(entered.UnixNano())))
	require.NoError(t, err)
	require.Greater(t, uint64(left.UnixNano()), binary.LittleEndian.Uint64(times[1]), "no rank goes on before the last has let go")
	// Memory that another process had open yet would not come back.
	for turn := range g.Size() {
		r.barrier()
		if turn != me {
			continue
		}
		before, _, err := r.d.Context().MemInfo()
		require.NoError(t, err)
		r.free(p)
		after, _, err := r.d.Context().MemInfo()
		require.NoError(t, err)
		require.GreaterOrEqual(t, after-before, int64(n))
	}
	r.barrier()
	r.close()
}

func TestM5_CudaMallocRegistrationsLeaveNothing(t *testing.T) {
	needGPU(t)
	everywhere(t, 2, "cuda cycles")
	everywhere(t, 2, "legacy cycles")
}

func cudaCyclesScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	cycles := func(n int) {
		for range n {
			p := r.malloc(3 << 20)
			reg, err := r.h.Register(t.ctx, Device(p+100, 2<<20))
			require.NoError(t, err)
			require.NoError(t, reg.Deregister(t.ctx))
			r.free(p)
		}
	}
	state := func() (free int64, fds int) {
		for turn := range g.Size() { // looking takes a descriptor, and the ranks may share a process
			r.barrier()
			if turn != g.Rank() {
				continue
			}
			var err error
			free, _, err = r.d.Context().MemInfo()
			require.NoError(t, err)
			list, err := os.ReadDir("/proc/self/fd")
			require.NoError(t, err)
			fds = len(list)
		}
		r.barrier()
		return free, fds
	}
	cycles(20)
	free, fds := state()
	began := time.Now()
	cycles(200)
	took := time.Since(began) / 200
	free2, fds2 := state()
	t.logf("%v a registration of %d ranks; free %d -> %d, fds %d -> %d", took, g.Size(), free, free2, fds, fds2)
	require.GreaterOrEqual(t, free2, free, "device memory")
	require.LessOrEqual(t, fds2, fds, "file descriptors")
	require.Zero(t, r.h.Stats().Registrations)
	require.NotContains(t, r.h.rows, true)
	r.close()
}

// A handle that cannot be opened is an error on every rank, which then hold nothing of each other.
func TestM4_MemoryThatARankCannotOpenIsLetGoByAll(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda unopened")
	everywhere(t, 3, "legacy unopened")
}

func cudaUnopenedScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	me := g.Rank()
	p := r.malloc(1 << 20)
	src, err := r.h.gpu.identify(Device(p, 1<<20))
	require.NoError(t, err)
	claims, err := agree.On(t.ctx, g, agree.Claim{Op: "names", Info: src.name[:]}, nil)
	require.NoError(t, err)
	names := make([]name, g.Size())
	for q := range names {
		copy(names[q][:], claims[q].Info)
	}
	open := len(r.h.gpu.opened)
	if me == 2 { // what it is told of rank 1 is wrong
		names[1][nameAddr] = 12345
		clear(names[1][nameIPC:])
	}
	_, err = r.h.attachAll(t.ctx, "test", names)
	require.ErrorContains(t, err, "memory of rank 1 by CUDA IPC")
	var cut *agree.CutError
	require.False(t, errors.As(err, &cut))
	require.Len(t, r.h.gpu.opened, open)
	reg, err := r.h.Register(t.ctx, Device(p, 1<<20))
	require.NoError(t, err, "the heap goes on")
	r.exchange(reg, reg.View(), 1000, 1)
	require.NoError(t, reg.Deregister(t.ctx))
	r.free(p)
	r.close()
}

func TestRegistrationsOnAGPUAreLimited(t *testing.T) {
	needGPU(t)
	require.Equal(t, 256, kernels.AliasRows(1))
	require.Equal(t, 256, kernels.AliasRows(8))
	require.Equal(t, 112, kernels.AliasRows(64))
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		p := r.malloc(1 << 20)
		var all []*Registration
		for i := range 256 {
			reg, err := r.h.Register(t.ctx, Device(p+uintptr(1024*i), 1024))
			require.NoError(t, err)
			all = append(all, reg)
		}
		r.exchange(all[255], all[255].View(), 100, 1)
		_, err := r.h.Register(t.ctx, Device(p, 1024))
		require.ErrorIs(t, err, ErrOutOfMemory)
		require.ErrorContains(t, err, "room for 256 registrations")
		require.NoError(t, all[100].Deregister(t.ctx))
		reg, err := r.h.Register(t.ctx, Device(p, 1024))
		require.NoError(t, err)
		require.Equal(t, all[100].Offset(), reg.Offset())
		for i, o := range append(slices.Delete(all, 100, 101), reg) {
			require.NoError(t, o.Deregister(t.ctx), i)
		}
		r.free(p)
		r.close()
	})
}

func TestCUDAMemoryOfAnotherGPUIsRefused(t *testing.T) {
	needGPU(t)
	if n, err := device.CUDACount(); err != nil || n < 2 {
		t.Skipf("needs two GPUs: %d, %v", n, err)
	}
	runRanks(t, localRanks(t, 1), func(t *rankT, g *comm.Group) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		other := rankGPU(t, 1)
		p, err := other.Context().MemAlloc(4096)
		require.NoError(t, err)
		_, err = r.h.Register(t.ctx, Device(p, 4096))
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "memory of cuda:1 on a heap of cuda:0")
		require.NoError(t, other.Context().MemFree(p))
		require.NoError(t, other.Close())
		r.close()
	})
}

func TestAGPUWithoutFileDescriptorsMakesAHeapOfLegacyIPC(t *testing.T) {
	needGPU(t)
	runRanks(t, socketRanks(t, 3), func(t *rankT, g *comm.Group) {
		d := rankGPU(t, g.Rank())
		lacking := func(d device.Device) (backing, error) {
			b, err := newBacking(d)
			if err == nil && g.Rank() == 1 {
				b.(*cudaBacking).scattered = true // as the probe would have it
			}
			return b, err
		}
		h, err := newHeap(t.ctx, g, d, Options{SegmentBytes: 2 << 20, ShareGPUs: true}, lacking, ucx.Open)
		require.NoError(t, err)
		require.Len(t, h.Space().Segments, 3)
		err = h.Grow(t.ctx, 1)
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "SegmentBytes")
		require.NoError(t, h.Close(t.ctx))
		require.NoError(t, d.Close())
	})
}

func TestLegacyIPCIsForGPUs(t *testing.T) {
	gs := localRanks(t, 1)
	_, err := NewHeap(context.Background(), gs[0], device.Host(), Options{LegacyIPC: true})
	require.ErrorIs(t, err, ErrInvalid)
	require.NoError(t, gs[0].Close())
}

func TestNamesTellProcessesApart(t *testing.T) {
	pid, pids, err := thisProcess()
	require.NoError(t, err)
	require.EqualValues(t, os.Getpid(), pid)
	require.NotZero(t, pids)
	n := name{nameIPC: 0x0807060504030201}
	h := n.ipc()
	require.Equal(t, []byte{1, 2, 3, 4, 5, 6, 7, 8, 0}, h[:9])
}
