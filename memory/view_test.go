package memory

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

func TestViewOfForeignMemory(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	mem := []byte("0123456789")
	v := Host(mem[:8])
	require.Equal(t, int64(8), v.Len())
	require.Equal(t, "234", string(v.Slice(2, 3).Bytes()))
	require.Equal(t, shm.Addr(mem)+2, v.Slice(2, 3).Ptr())
	require.Equal(t, "4", string(v.Slice(2, 3).Slice(2, 1).Bytes()))
	require.Equal(t, 8, cap(v.Bytes()), "a view ends where it ends")
	_, ok := v.Symmetric(h)
	require.False(t, ok)
	require.NoError(t, v.Valid())
	require.True(t, v.OnHost())
	require.Zero(t, v.Slice(8, 0).Len())

	d := Device(0x1000, 100)
	require.Equal(t, uintptr(0x1010), d.Slice(16, 84).Ptr())
	require.Equal(t, int64(84), d.Slice(16, 84).Len())
	require.Nil(t, d.Bytes())
	require.NoError(t, d.Valid())
	require.False(t, d.OnHost())
	_, ok = d.Symmetric(h)
	require.False(t, ok)
	require.Panics(t, func() { Device(0, -1) })

	for _, v := range []View{{}, Host(nil), Host([]byte{}), Device(0, 0)} {
		require.Zero(t, v.Len())
		require.Empty(t, v.Bytes())
		require.NoError(t, v.Valid())
		require.True(t, v.OnHost())
		require.Zero(t, v.Slice(0, 0).Len())
		_, ok := v.Symmetric(h)
		require.False(t, ok)
	}
}

func TestViewSlicesLikeGo(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	b, err := h.Alloc(10)
	require.NoError(t, err)
	for _, v := range []View{Host(make([]byte, 10)), b.View(), Device(4096, 10)} {
		for _, s := range [][2]int64{{-1, 1}, {0, 11}, {11, 0}, {5, -1}, {5, 6}, {math.MaxInt64, 1}, {1, math.MaxInt64}} {
			require.Panics(t, func() { v.Slice(s[0], s[1]) }, s)
		}
	}
}

func TestViewOfBuffers(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	other := oneRank(t, Options{SegmentBytes: 1 << 20})
	b, err := h.Alloc(1000)
	require.NoError(t, err)
	v := b.View().Slice(100, 200)
	off, ok := v.Symmetric(h)
	require.True(t, ok)
	require.Equal(t, b.Offset()+100, off)
	_, ok = v.Symmetric(other)
	require.False(t, ok)
	v.Bytes()[0] = 9
	require.Equal(t, byte(9), b.Bytes()[100])
	require.Equal(t, 200, cap(v.Bytes()))
	off, ok = v.Slice(200, 0).Symmetric(h)
	require.True(t, ok)
	require.Equal(t, b.Offset()+300, off)

	require.NoError(t, b.Free())
	require.ErrorIs(t, v.Valid(), ErrFreed)
	_, ok = v.Symmetric(h)
	require.False(t, ok, "peers must not write to a freed buffer")
	// somebody else has the memory now; the old view stays dead
	c, err := h.Alloc(1000)
	require.NoError(t, err)
	require.Equal(t, b.Offset(), c.Offset())
	require.ErrorIs(t, v.Valid(), ErrFreed)
	require.NoError(t, c.View().Valid())
}

func TestViewsAllocateNothing(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	b, err := h.Alloc(1000)
	require.NoError(t, err)
	mem := make([]byte, 100)
	var sum int64
	require.Zero(t, testing.AllocsPerRun(100, func() {
		v := b.View().Slice(10, 50)
		off, _ := v.Symmetric(h)
		if errors.Is(v.Valid(), ErrFreed) {
			off++
		}
		sum += off + int64(len(Host(mem).Slice(1, 2).Bytes()))
	}))
	require.NotZero(t, sum)
}

func TestAllocRefusesSizes(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	calls := h.Stats().Calls
	for _, n := range []int64{-1, math.MinInt64, math.MaxInt64} {
		_, err := h.Alloc(n)
		require.ErrorIs(t, err, ErrInvalid)
	}
	require.Equal(t, calls, h.Stats().Calls)
	_, err := h.Alloc(maxAlloc)
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.Equal(t, calls+1, h.Stats().Calls, "running out of memory is a result like any other")
}

func BenchmarkAllocFree(b *testing.B) {
	g := localRanks(b, 1)[0]
	defer g.Close()
	h, err := NewHeap(b.Context(), g, device.Host(), Options{})
	require.NoError(b, err)
	defer h.Close(b.Context())
	b.ReportAllocs()
	for b.Loop() {
		buf, err := h.Alloc(4096)
		require.NoError(b, err)
		require.NoError(b, buf.Free())
	}
}
