package memory

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
)

func TestCopyOnTheHost(t *testing.T) {
	a, b := []byte("switchyard"), make([]byte, 10)
	require.NoError(t, Copy(nil, Host(b), Host(a)))
	require.Equal(t, a, b)
	s := device.NewHostStream()
	require.NoError(t, Copy(s, Host(b[:5]), Host(a[5:])))
	require.NoError(t, s.Close())
	require.Equal(t, "hyardhyard", string(b))
	require.NoError(t, Copy(nil, View{}, View{}))

	require.ErrorIs(t, Copy(nil, Host(b), Host(a[1:])), ErrInvalid)
	require.ErrorContains(t, Copy((*device.HostStream)(nil), Host(b), Host(a)), "the stream is a nil *device.HostStream")
	require.ErrorContains(t, Copy((*device.CUDAStream)(nil), Host(b), Host(a)), "the stream is a nil *device.CUDAStream")
	err := Copy(nil, Device(4096, 10), Host(a))
	require.ErrorIs(t, err, ErrInvalid)
	require.EqualError(t, err, "memory: copy 10 bytes: invalid argument: from the host to a GPU by a stream of the caller")

	err = Copy(nil, Wrap(make([]float32, 4)), Wrap(make([]float64, 2)))
	require.EqualError(t, err, "memory: copy 16 bytes: invalid argument: elements of float64 into elements of float32")
	require.NoError(t, Copy(nil, Wrap(make([]uint32, 4)), Wrap(make([]int32, 4))))
	require.NoError(t, Copy(nil, Host(make([]byte, 16)), Wrap(make([]float64, 2))))
}
