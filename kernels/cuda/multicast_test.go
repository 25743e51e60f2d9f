package cuda

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// On a GPU the kernels are loaded, which makes no multicast object, and not run.
func TestTheKernelsOfMulticastLoad(t *testing.T) {
	d, err := cuda.Open()
	if errors.Is(err, cuda.ErrUnavailable) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	v, err := d.Device(0)
	if errors.Is(err, cuda.InvalidDevice) {
		t.Skip("needs a GPU: the driver sees none")
	}
	require.NoError(t, err)
	c, err := v.Primary()
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	e, err := New(c, kernels.Space{Size: 2}, 1, func() error { return nil })
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	_, err = loadOnce[multicastKernels](e)
	require.ErrorContains(t, err, "no multicast addresses")
	e.space.Multicast = 1 << 30
	k, err := loadOnce[multicastKernels](e)
	require.NoError(t, err)
	require.NotZero(t, k.warps)
	require.NotZero(t, k.blocks)
	require.NotZero(t, k.packets)
	require.GreaterOrEqual(t, k.limit, maxReduceBlocks)
}
