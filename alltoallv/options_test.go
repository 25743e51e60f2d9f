package alltoallv

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

func TestStagingStaysWithinItsBound(t *testing.T) {
	for _, c := range []struct {
		kind      device.Kind
		size      int
		asked     Options
		each      int // who has slots of its own: multiprocessors
		slots     int
		slotBytes int64
		bound     int64
	}{
		{device.HostKind, 2, Options{}, 1, 4, 256 << 10, 32 << 20},
		{device.HostKind, 64, Options{}, 1, 4, 128 << 10, 32 << 20},
		{device.CUDAKind, 4, Options{}, 16, 8, 128 << 10, 128 << 20},
		{device.CUDAKind, 8, Options{}, 16, 8, 128 << 10, 128 << 20},
		{device.CUDAKind, 64, Options{}, 16, 8, 16 << 10, 128 << 20},
		{device.CUDAKind, 8, Options{StagingBytes: 32 << 20}, 16, 8, 32 << 10, 32 << 20},
		{device.CUDAKind, 8, Options{StagingBytes: 32 << 20, MaxSMs: 4}, 4, 8, 128 << 10, 32 << 20},
	} {
		o := c.asked
		engine := kernels.Engine(new(host.Engine))
		if c.kind == device.CUDAKind {
			engine = new(cuda.Engine)
		}
		ch, err := o.complete(c.size, engine, c.kind)
		require.NoError(t, err)
		require.Equal(t, c.slots, ch.Slots, "%+v", c)
		require.Equal(t, c.slotBytes, ch.SlotBytes, "%+v", c)
		require.LessOrEqual(t, int64(c.size*c.each*ch.Slots)*ch.SlotBytes, c.bound, "%+v", c)
		require.Equal(t, c.asked.MaxSMs == 0, o.CopySMs > 0, "CopySMs has a default only without MaxSMs")
	}
}
