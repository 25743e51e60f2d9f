package memory

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
)

// onlyRank is a heap of a single rank on the device.
func onlyRank(t *testing.T, d device.Device) *Heap {
	t.Helper()
	groups, err := comm.Local(1)
	require.NoError(t, err)
	h, err := NewHeap(t.Context(), groups[0], d, Options{SegmentBytes: 4 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(h.Close(context.Background()), groups[0].Close())) })
	return h
}

func pins(t *testing.T, h *Heap) *Pinned {
	for _, n := range []int64{0, -8, 12} {
		_, err := h.Pin(n)
		require.ErrorIs(t, err, ErrInvalid)
	}
	p, err := h.Pin(1024)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 1024), p.Bytes())
	o := p.Operand(64, 128)
	require.EqualValues(t, 128, o.Bytes)
	require.False(t, o.Reach)
	o.Mem[0] = 9
	require.Equal(t, byte(9), p.Bytes()[64])
	return p
}

func TestPin(t *testing.T) {
	p := pins(t, onlyRank(t, device.Host()))
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	require.Nil(t, p.Bytes())
	require.NoError(t, (*Pinned)(nil).Close())
}

// onlyGPU is the first GPU, for as long as the test runs.
func onlyGPU(t *testing.T) *device.CUDADevice {
	needGPU(t)
	d := rankGPU(t, 0)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// A GPU writes there, and the host sees it.
func TestCUDAPin(t *testing.T) {
	d := onlyGPU(t)
	h := onlyRank(t, d)
	p := pins(t, h)
	s, err := d.NewStream()
	require.NoError(t, err)
	b, err := h.Alloc(8)
	require.NoError(t, err)
	require.NoError(t, Copy(s, b.View(), Host([]byte{1, 2, 3, 4, 5, 6, 7, 8})))
	require.NoError(t, Copy(s, Device(p.Operand(256, 8).Ptr, 8), b.View().Slice(0, 8)))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []byte{1, 2, 3, 4, 5, 6, 7, 8}, p.Bytes()[256:264])
	require.NoError(t, errors.Join(p.Close(), p.Close(), s.Close(), b.Free()))
}
