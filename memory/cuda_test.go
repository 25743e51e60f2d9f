package memory

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/kernels"
)

// needGPU skips a test with the reason if there is no GPU. Ranks are spread over all there are, and share one otherwise.
func needGPU(t testing.TB) {
	t.Helper()
	n, err := device.CUDACount()
	if errors.Is(err, device.ErrUnavailable) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	if n == 0 {
		t.Skip("needs a GPU: the driver sees none")
	}
	for i := range n { // keeps the contexts: making one for every rank takes seconds
		d, err := device.CUDA(i)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
	}
}

func rankGPU(t require.TestingT, rank int) *device.CUDADevice {
	n, err := device.CUDACount()
	require.NoError(t, err)
	d, err := device.CUDA(rank % n)
	require.NoError(t, err)
	return d
}

// cudaRank is a rank's GPU, a stream on it and a heap.
type cudaRank struct {
	*rankT
	g *comm.Group
	d *device.CUDADevice
	s *device.CUDAStream
	h *Heap
}

func newCUDARank(t *rankT, g *comm.Group, o Options) *cudaRank {
	r := &cudaRank{rankT: t, g: g, d: rankGPU(t, g.Rank())}
	o.LegacyIPC, o.ShareGPUs = t.legacy, true
	s, err := r.d.NewStream()
	require.NoError(t, err)
	r.s = s.(*device.CUDAStream)
	r.h, err = NewHeap(t.ctx, g, r.d, o)
	require.NoError(t, err)
	return r
}

func (r *cudaRank) close() {
	require.NoError(r, r.h.Close(r.ctx))
	require.NoError(r, r.h.Close(r.ctx))
	require.NoError(r, r.s.Close())
	require.NoError(r, r.d.Close())
}

func (r *cudaRank) read(v View) []byte {
	b := make([]byte, v.Len())
	require.NoError(r, Copy(r.s, Host(b), v))
	return b
}

func (r *cudaRank) write(v View, b []byte) { require.NoError(r, Copy(r.s, v, Host(b))) }

// peer is n bytes at a place of rank p's segment.
func (r *cudaRank) peer(p int, place, n int64) View {
	sp := r.h.Space()
	return Device(sp.Addr(p, place), n)
}

func (r *cudaRank) barrier() { require.NoError(r, r.g.Barrier(r.ctx)) }

func pattern(n int64, from, to, salt int) []byte {
	b := make([]byte, n)
	for i := range b {
		x := uint32(i)*2654435761 + uint32(from)*40503 + uint32(to)*9973 + uint32(salt)*131
		b[i] = byte(x >> 13)
	}
	return b
}

func TestCUDASegmentsAreWhereArithmeticSays(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda bytes")
}

func TestCUDASegmentsOfLegacyIPCAreWhereTheTableSays(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "legacy bytes")
}

// cudaBytesScenario has every rank write to every other by address, in the heap's first memory and in what it grew by.
func cudaBytesScenario(t *rankT, g *comm.Group) {
	for round := range 2 { // the second finds the memory that the first has dirtied
		r := newCUDARank(t, g, Options{SegmentBytes: 6 << 20})
		sp := r.h.Space()
		require.Nil(t, sp.Mem)
		require.NotZero(t, sp.Base)
		first := r.h.extents[0].n
		begin := int64(0)
		if t.legacy {
			begin = kernels.SegmentsOffset
			table := r.read(r.peer(g.Rank(), begin, int64(8*g.Size())))
			for p := range g.Size() {
				require.EqualValues(t, sp.Addr(p, 0), binary.LittleEndian.Uint64(table[8*p:]))
			}
			require.Equal(t, sp.Addr(g.Rank(), begin), sp.SegmentTable())
			begin += int64(len(table))
			require.ErrorIs(t, r.h.Grow(t.ctx, 3<<20), ErrUnsupported)
		} else {
			require.Zero(t, sp.SegmentTable())
			require.NoError(t, r.h.Grow(t.ctx, 3<<20))
			require.True(t, bytes.Equal(make([]byte, 3<<20), r.read(r.peer(g.Rank(), first, 3<<20))), "the memory is zero")
		}
		require.True(t, bytes.Equal(make([]byte, first-begin), r.read(r.peer(g.Rank(), begin, first-begin))), "the memory is zero")
		const n = 100_003
		for range 3 {
			b, err := r.h.AllocOn(r.s, int64(g.Size())*n)
			require.NoError(t, err)
			require.Nil(t, b.Bytes())
			require.Equal(t, sp.Base+uintptr(int64(g.Rank())*sp.Stride+b.Offset()), b.View().Ptr())
			off, ok := b.View().Slice(5, 10).Symmetric(r.h)
			require.True(t, ok)
			require.Equal(t, b.Offset()+5, off)
			r.barrier()
			for p := range g.Size() {
				r.write(r.peer(p, b.Offset()+int64(g.Rank())*n, n), pattern(n, g.Rank(), p, round))
			}
			r.barrier()
			for p := range g.Size() {
				require.True(t, bytes.Equal(pattern(n, p, g.Rank(), round), r.read(b.View().Slice(int64(p)*n, n))), "from rank %d", p)
				from := r.peer(p, b.Offset()+int64(g.Rank())*n, n)
				require.True(t, bytes.Equal(pattern(n, g.Rank(), p, round), r.read(from)), "read from rank %d", p)
			}
			r.barrier()
			if err := b.FreeOn(r.s); err != nil {
				require.NoError(t, err)
			}
		}
		big, err := r.h.AllocOn(r.s, 3<<20)
		require.NoError(t, err)
		for !t.legacy && big.Segment() != 1 { // fill the first segment until the pool turns to the one it grew by
			big, err = r.h.AllocOn(r.s, 3<<20)
			require.NoError(t, err)
		}
		ones := bytes.Repeat([]byte{0xff}, 3<<20)
		r.barrier()
		r.write(r.peer((g.Rank()+1)%g.Size(), big.Offset(), 3<<20), ones)
		r.barrier()
		require.True(t, bytes.Equal(ones, r.read(big.View())))
		require.NoError(t, r.h.Verify(t.ctx))
		r.barrier()
		r.close()
	}
}

// spinPTX waits until the word is not zero and stores 1, or 2 when that takes longer than a number of nanoseconds.
const spinPTX = `
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .align 8 .b8 args[24])
{
	.reg .pred p;
	.reg .b64 d<8>;
	ld.param.u64 d1, [args];
	ld.param.u64 d2, [args+8];
	ld.param.u64 d3, [args+16];
	mov.u64 d4, %globaltimer;
again:
	ld.relaxed.sys.global.u64 d5, [d1];
	setp.ne.u64 p, d5, 0;
	@p bra seen;
	mov.u64 d6, %globaltimer;
	sub.u64 d6, d6, d4;
	setp.lt.u64 p, d6, d3;
	@p bra again;
	mov.u64 d7, 2;
	st.global.u64 [d2], d7;
	ret;
seen:
	mov.u64 d7, 1;
	st.global.u64 [d2], d7;
	ret;
}
`

type spinner struct {
	r *cudaRank
	m cuda.Module
	f cuda.Function
}

func newSpinner(r *cudaRank) *spinner {
	c := r.d.Context()
	m, err := c.LoadModule(append([]byte(spinPTX), 0))
	require.NoError(r, err)
	f, err := c.Function(m, "spin")
	require.NoError(r, err)
	return &spinner{r, m, f}
}

func (k *spinner) launch(s device.Stream, word, out uintptr, limit time.Duration, blocks, threads uint32) {
	a := binary.LittleEndian.AppendUint64(nil, uint64(word))
	a = binary.LittleEndian.AppendUint64(a, uint64(out))
	a = binary.LittleEndian.AppendUint64(a, uint64(limit))
	var b cuda.Batch
	b.Launch(0, cuda.Launch{Function: k.f, Grid: [3]uint32{blocks, 1, 1}, Block: [3]uint32{threads, 1, 1}, Args: a})
	require.NoError(k.r, k.r.d.Context().Submit(&b, s.Handle()))
}

func (k *spinner) close() { require.NoError(k.r, k.r.d.Context().UnloadModule(k.m)) }

func TestF1_CUDAAbortWordReachesKernelsThatFillTheGPU(t *testing.T) {
	needGPU(t)
	everywhere(t, 2, "cuda abort")
	everywhere(t, 2, "legacy abort")
}

func cudaAbortScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	k := newSpinner(r)
	const streams = 40 // more than the driver has queues
	out, err := r.h.Alloc(8 * streams)
	require.NoError(t, err)
	r.write(out.View(), make([]byte, 8*streams))
	word := r.h.Space().Base + uintptr(int64(g.Rank())*r.h.Space().Stride)
	var all []device.Stream
	for range streams {
		s, err := r.d.NewStream()
		require.NoError(t, err)
		all = append(all, s)
	}
	r.barrier() // loading and making waits for kernels that run
	for i, s := range all {
		blocks, threads := uint32(1), uint32(32)
		if i == 0 {
			blocks, threads = 400, 1024 // more than run at once
		}
		k.launch(s, word, out.View().Ptr()+uintptr(8*i), 5*time.Second, blocks, threads)
	}
	r.barrier()
	time.Sleep(50 * time.Millisecond)
	began := time.Now()
	if g.Rank() == 0 {
		g.Abort(errors.New("enough"))
	}
	for _, s := range all {
		require.NoError(t, s.Synchronize())
	}
	took := time.Since(began)
	t.logf("the last of %d kernels ended %v after the abort", streams, took)
	for i := range streams {
		require.EqualValues(t, 1, r.read(out.View().Slice(int64(8*i), 8))[0], "kernel of stream %d", i)
	}
	require.Less(t, took, time.Second)
	for _, s := range all {
		require.NoError(t, s.Close())
	}
	k.close()
	r.close()
}

func TestF1_CUDAGrowEndsWithItsContext(t *testing.T) {
	needGPU(t)
	everywhere(t, 2, "cuda bounded")
}

// Kernels that fill the GPU wait, and so, perhaps, does the driver when the heap wants memory.
func cudaBoundedScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	k := newSpinner(r)
	b, err := r.h.Alloc(4096)
	require.NoError(t, err)
	r.write(b.View(), make([]byte, 4096))
	word := r.h.Space().Base + uintptr(int64(g.Rank())*r.h.Space().Stride)
	r.barrier()
	k.launch(r.s, word, b.View().Ptr(), 20*time.Second, 400, 1024)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.ctx, 500*time.Millisecond)
	defer cancel()
	err = r.h.Grow(ctx, 2<<20)
	took := time.Since(began)
	t.logf("rank %d: grow ended after %v: %v", g.Rank(), took, err)
	require.Less(t, took, 3*time.Second)
	r.h.abort()
	require.NoError(t, r.s.Synchronize())
	require.Less(t, time.Since(began), 5*time.Second)
	k.close()
	require.NoError(t, r.s.Close())
	short, cancel := context.WithTimeout(t.ctx, 2*time.Second)
	defer cancel()
	r.h.Close(short) // after a cut call ranks may not meet any more
	require.Less(t, time.Since(began), 9*time.Second)
	require.NoError(t, r.d.Close())
}

func TestF2_ADeadRankEndsItsPeersKernels(t *testing.T) {
	needGPU(t)
	for _, name := range []string{"cuda killed", "legacy killed"} {
		errs := processes(t, 3, name)
		require.NoError(t, errs[0])
		require.Error(t, errs[1], "it kills itself")
		require.NoError(t, errs[2])
	}
}

func cudaKilledScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	k := newSpinner(r)
	b, err := r.h.Alloc(4096)
	require.NoError(t, err)
	r.write(b.View(), make([]byte, 4096))
	r.barrier()
	if g.Rank() == 1 {
		time.Sleep(200 * time.Millisecond) // let the others leave the barrier
		os.Exit(3)
	}
	word := r.h.Space().Base + uintptr(int64(g.Rank())*r.h.Space().Stride)
	k.launch(r.s, word, b.View().Ptr(), 20*time.Second, 1, 32)
	require.NoError(t, r.s.Synchronize())
	require.EqualValues(t, 1, r.read(b.View())[0], "the kernel saw the abort word")
	require.ErrorIs(t, g.Err(), comm.ErrPeerLost)
	if !t.legacy {
		r.write(r.peer(1, b.Offset(), 4096), pattern(4096, g.Rank(), 1, 0)) // its memory is there as long as it is mapped
	}
	k.close()
	r.close()
}

func TestF3_CUDAAndHostHeapsDoNotMix(t *testing.T) {
	needGPU(t)
	everywhere(t, 2, "cuda mismatch")
}

func cudaMismatchScenario(t *rankT, g *comm.Group) {
	d := rankGPU(t, 0)
	var mine device.Device = d
	if g.Rank() == 1 {
		mine = device.Host()
	}
	_, err := NewHeap(t.ctx, g, mine, Options{ShareGPUs: true})
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "device: rank 0 has cuda, rank 1 has host")
	_, err = NewHeap(t.ctx, g, d, Options{SegmentBytes: 1 << 40, ReserveBytes: 2 << 40, ShareGPUs: true})
	require.ErrorIs(t, err, ErrOutOfMemory)
	h, err := NewHeap(t.ctx, g, d, Options{SegmentBytes: 2 << 20, ShareGPUs: true})
	require.NoError(t, err, "nothing is left of it")
	require.ErrorIs(t, h.Grow(t.ctx, 1<<38), ErrOutOfMemory)
	require.NoError(t, h.Grow(t.ctx, 1<<20))
	hs, err := device.Host().NewStream()
	require.NoError(t, err)
	_, err = h.AllocOn(hs, 100)
	require.ErrorIs(t, err, ErrInvalid)
	require.NoError(t, hs.Close())
	require.NoError(t, h.Close(t.ctx))
	require.NoError(t, d.Close())
}

// outside is an allocation of cuMemCreate that belongs to nobody here, such as another library's.
type outside struct {
	c       *cuda.Context
	addr    uintptr
	n, room int64
}

func newOutside(t require.TestingT, d *device.CUDADevice, n int64) *outside {
	o := &outside{c: d.Context(), n: n}
	var err error
	o.room = 2*n + 4<<20
	o.addr, err = o.c.Reserve(o.room, 0, 0)
	require.NoError(t, err)
	o.fill(t)
	return o
}

func (o *outside) fill(t require.TestingT) {
	h, err := o.c.MemCreate(o.n, cuda.PosixFile)
	require.NoError(t, err)
	require.NoError(t, o.c.MemMap(o.addr, o.n, 0, h))
	require.NoError(t, o.c.MemRelease(h))
	require.NoError(t, o.c.SetAccess(o.addr, o.n, o.c.Device()))
}

func (o *outside) empty(t require.TestingT) { require.NoError(t, o.c.MemUnmap(o.addr, o.n)) }

// Memory that was mapped in pieces, as torch's expandable segments are.
func TestADeviceViewThatSpansMappingsIsRefused(t *testing.T) {
	needGPU(t)
	runRanks(t, localRanks(t, 1), func(t *rankT, g *comm.Group) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		c, unit := r.d.Context(), r.h.granule
		addr, err := c.Reserve(4*unit, 0, 0)
		require.NoError(t, err)
		a, b := &outside{c: c, addr: addr, n: unit}, &outside{c: c, addr: addr + uintptr(unit), n: 2 * unit}
		a.fill(t)
		b.fill(t)
		pa, err := c.Pointer(a.addr + 10)
		require.NoError(t, err)
		pb, err := c.Pointer(b.addr + 10)
		require.NoError(t, err)
		require.NotEqual(t, pa.BufferID, pb.BufferID, "each piece has an identity")
		_, err = r.h.Register(t.ctx, Device(addr+uintptr(unit)-100, 200))
		require.ErrorIs(t, err, ErrUnsupported)
		reg, err := r.h.Register(t.ctx, Device(b.addr, b.n))
		require.NoError(t, err)
		_, ok := Device(b.addr+5, 100).Symmetric(r.h)
		require.True(t, ok)
		_, ok = Device(b.addr-5, 100).Symmetric(r.h)
		require.False(t, ok)
		require.NoError(t, reg.Deregister(t.ctx))
		a.empty(t)
		b.empty(t)
		require.NoError(t, c.Unreserve(addr, 4*unit))
		r.close()
	})
}

func TestM7_CUDARegistration(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda register")
}

func cudaRegisterScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	me := g.Rank()
	o := newOutside(t, r.d, int64(me+1)*r.h.granule)
	inner := &outside{c: o.c, addr: o.addr + uintptr(o.n), n: r.h.granule} // in the same range of addresses
	inner.fill(t)
	n := int64(100_000 + 7*me)
	v := Device(o.addr+4096+uintptr(256*me), n)
	_, ok := v.Symmetric(r.h)
	require.False(t, ok)
	reg, err := r.h.Register(t.ctx, v)
	require.NoError(t, err)
	for p := range g.Size() {
		require.EqualValues(t, 100_000+7*p, reg.PeerLen(p))
		r.write(r.peer(p, reg.Offset()+int64(1000*me), 1000), pattern(1000, me, p, 1))
	}
	r.barrier()
	for p := range g.Size() {
		require.Equal(t, pattern(1000, p, me, 1), r.read(v.Slice(int64(1000*p), 1000)), "what rank %d wrote to its address of the memory", p)
	}
	off, ok := v.Slice(77, 100).Symmetric(r.h)
	require.True(t, ok)
	require.Equal(t, reg.Offset()+77, off)
	_, ok = Device(v.Ptr()-1, 10).Symmetric(r.h)
	require.False(t, ok, "it begins before what is registered")
	_, ok = Device(v.Ptr()+1, n).Symmetric(r.h)
	require.False(t, ok, "it ends after what is registered")
	_, ok = reg.View().Symmetric(r.h)
	require.True(t, ok)

	// the same address with other memory
	before, err := o.c.Pointer(o.addr)
	require.NoError(t, err)
	r.barrier()
	o.empty(t)
	o.fill(t)
	after, err := o.c.Pointer(o.addr)
	require.NoError(t, err)
	require.Equal(t, before.Base, after.Base)
	_, ok = v.Slice(77, 100).Symmetric(r.h)
	require.False(t, ok, "a freed and reallocated address is a miss: buffer ids %d and %d", before.BufferID, after.BufferID)
	require.Equal(t, pattern(1000, me, me, 1), r.read(reg.View().Slice(int64(1000*me), 1000)), "the registration holds the memory")
	again, err := r.h.Register(t.ctx, v)
	require.NoError(t, err)
	off, ok = v.Symmetric(r.h)
	require.True(t, ok)
	require.Equal(t, again.Offset(), off)
	r.barrier()
	require.NoError(t, reg.Deregister(t.ctx))
	require.ErrorIs(t, reg.View().Valid(), ErrFreed)

	// one rank without
	mine := View{}
	if me == 1 {
		mine = v
	}
	part, err := r.h.Register(t.ctx, mine)
	require.NoError(t, err)
	require.Zero(t, part.PeerLen(0))
	require.EqualValues(t, 100_007, part.PeerLen(1))
	r.read(r.peer(1, part.Offset(), 100_007))
	require.NoError(t, r.h.Verify(t.ctx))

	// refused on every rank
	pinned, err := o.c.NewHostBuffer(4096)
	require.NoError(t, err)
	for _, bad := range []struct {
		v   View
		why string
	}{
		{Device(pinned.Addr(), 4096), "not memory of a GPU"},
		{Host(make([]byte, 8)), "memory of the host"},
		{Device(o.addr+10, o.n), "more than one allocation"},
		{r.peer(me, 0, 10), "cannot be passed to peers"}, // the heap's own, by its address
	} {
		b := View{}
		if me == 0 {
			b = bad.v
		}
		_, err = r.h.Register(t.ctx, b)
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, bad.why)
	}
	require.NoError(t, pinned.Close())
	r.barrier()
	o.empty(t)
	inner.empty(t)
	require.NoError(t, o.c.Unreserve(o.addr, o.room))
	r.close() // what is registered yet goes with the heap
}

func TestM2_CUDAStreamsWaitForTheStreamThatFreed(t *testing.T) {
	needGPU(t)
	runRanks(t, localRanks(t, 1), func(t *rankT, g *comm.Group) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		k := newSpinner(r)
		other, err := r.d.NewStream()
		require.NoError(t, err)
		flag, err := r.h.Alloc(16)
		require.NoError(t, err)
		r.write(flag.View(), make([]byte, 16))
		a, err := r.h.AllocOn(r.s, 1<<20)
		require.NoError(t, err)
		// the stream is held up by a kernel until the host sets a flag
		k.launch(r.s, flag.View().Ptr(), flag.View().Ptr()+8, 10*time.Second, 1, 32)
		require.NoError(t, r.d.Context().Set(cuda.Stream(r.s.Handle()), a.View().Ptr(), 1, 1<<20))
		require.NoError(t, a.FreeOn(r.s))
		b, err := r.h.AllocOn(other, 1<<20)
		require.NoError(t, err)
		require.Equal(t, a.Offset(), b.Offset())
		require.NoError(t, r.d.Context().Set(cuda.Stream(other.Handle()), b.View().Ptr(), 2, 1<<20))
		e, err := other.Record()
		require.NoError(t, err)
		time.Sleep(20 * time.Millisecond)
		require.False(t, e.Done(), "the second user waits for the first")
		third, err := r.d.NewStream()
		require.NoError(t, err)
		require.NoError(t, Copy(third, flag.View().Slice(0, 8), Host([]byte{1, 0, 0, 0, 0, 0, 0, 0})))
		require.NoError(t, e.Wait())
		require.Equal(t, bytes.Repeat([]byte{2}, 1<<20), r.read(b.View()))
		require.EqualValues(t, 1, r.h.Stats().StreamWaits)
		require.NoError(t, b.FreeOn(other))
		c, err := r.h.Alloc(1 << 20)
		require.NoError(t, err, "the host waits itself")
		require.NoError(t, c.Free())
		require.NoError(t, third.Close())
		require.NoError(t, other.Close())
		k.close()
		r.close()
	})
}

func TestM5_AThousandCUDAHeapsLeaveNothing(t *testing.T) {
	needGPU(t)
	t.Run("mapped", func(t *testing.T) { heapsLeaveNothing(t, false, 1000) })
	t.Run("legacy", func(t *testing.T) { heapsLeaveNothing(t, true, 200) })
}

func heapsLeaveNothing(t *testing.T, legacy bool, n int) {
	gs := localRanks(t, 2)
	d0, d1 := rankGPU(t, 0), rankGPU(t, 1)
	heaps := func(n int) {
		for range n {
			var wg sync.WaitGroup
			for i, d := range []*device.CUDADevice{d0, d1} {
				wg.Go(func() {
					h, err := NewHeap(t.Context(), gs[i], d, Options{SegmentBytes: 2 << 20, LegacyIPC: legacy, ShareGPUs: true})
					if err == nil && !legacy {
						err = h.Grow(t.Context(), 1)
					}
					if err == nil {
						err = h.Close(t.Context())
					}
					if err != nil {
						t.Error(err)
						gs[i].Abort(err)
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				t.FailNow()
			}
		}
	}
	state := func() (free int64, fds, maps int) {
		free, _, err := d0.Context().MemInfo()
		require.NoError(t, err)
		list, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		m, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return free, len(list), bytes.Count(m, []byte("\n"))
	}
	heaps(50)
	free, fds, maps := state()
	if testing.Short() {
		n = 100
	}
	began := time.Now()
	heaps(n)
	took := time.Since(began) / time.Duration(n)
	free2, fds2, maps2 := state()
	t.Logf("%v a heap of 2 ranks; free %d -> %d, fds %d -> %d, maps %d -> %d", took, free, free2, fds, fds2, maps, maps2)
	require.GreaterOrEqual(t, free2, free, "device memory")
	require.LessOrEqual(t, fds2, fds, "file descriptors")
	require.InDelta(t, maps, maps2, 20, "mappings")
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
	require.NoError(t, d0.Close())
	require.NoError(t, d1.Close())
}

func TestCopyBetweenHostAndGPU(t *testing.T) {
	needGPU(t)
	d := rankGPU(t, 0)
	st, err := d.NewStream()
	require.NoError(t, err)
	s := st.(*device.CUDAStream)
	p, err := d.Context().MemAlloc(1 << 20)
	require.NoError(t, err)
	v := Device(p, 1<<20)
	want := pattern(1<<19, 1, 2, 3)
	require.NoError(t, Copy(s, v.Slice(0, 1<<19), Host(want)))
	got := make([]byte, 1<<19)
	g, err := s.Capture(func() error {
		require.ErrorIs(t, Copy(s, Host(got), v.Slice(0, 1<<19)), device.ErrCapturing)
		return Copy(s, v.Slice(1<<19, 1<<19), v.Slice(0, 1<<19))
	})
	require.NoError(t, err)
	require.NoError(t, g.Launch(s))
	require.NoError(t, Copy(s, Host(got), v.Slice(1<<19, 1<<19)))
	require.Equal(t, want, got)
	require.NoError(t, Copy(s, v.Slice(0, 0), View{}))
	require.ErrorIs(t, Copy(nil, v, v), ErrInvalid)
	require.ErrorIs(t, Copy(s, Host(got), Host(got)), ErrInvalid)
	require.NoError(t, g.Close())
	require.NoError(t, d.Context().MemFree(p))
	require.NoError(t, s.Close())
	require.NoError(t, d.Close())
}

func BenchmarkSymmetricLookupOfDeviceMemory(b *testing.B) {
	needGPU(b)
	gs := localRanks(b, 1)
	d := rankGPU(b, 0)
	h, err := NewHeap(context.Background(), gs[0], d, Options{SegmentBytes: 2 << 20})
	require.NoError(b, err)
	o := newOutside(b, d, h.granule)
	_, err = h.Register(context.Background(), Device(o.addr, o.n))
	require.NoError(b, err)
	v := Device(o.addr+100, 100)
	for b.Loop() {
		if _, ok := v.Symmetric(h); !ok {
			b.Fatal("not found")
		}
	}
}

// Ranks of one process that share a GPU are refused on every rank, with both of them, unless the option allows it.
func TestRanksOfAProcessDoNotShareAGPU(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	heaps := func(ranks int, o Options, check func(t *rankT, err error)) {
		o.SegmentBytes = 2 << 20
		runRanks(t, localRanks(t, ranks), func(t *rankT, g *comm.Group) {
			d := rankGPU(t, g.Rank())
			defer d.Close()
			h, err := NewHeap(t.ctx, g, d, o)
			check(t, err)
			if err == nil {
				require.NoError(t, h.Close(t.ctx))
			}
		})
	}
	heaps(emulated.Devices, Options{}, func(t *rankT, err error) { require.NoError(t, err) })
	heaps(emulated.Devices+2, Options{}, func(t *rankT, err error) {
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "ranks 0 and 4 of one process share a GPU")
	})
	heaps(emulated.Devices+2, Options{ShareGPUs: true}, func(t *rankT, err error) { require.NoError(t, err) })
}
