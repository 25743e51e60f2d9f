package allreduce

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
)

// gpuReduction is a call of so many bytes of bfloat16 in equal slices.
func gpuReduction(c *kernels.ReduceChannels, coll kernels.Collective, bytes int64) *kernels.Reduction {
	r := &kernels.Reduction{Channels: c, Call: kernels.ReduceCall{Collective: coll, DType: kernels.BFloat16, Count: bytes / 2}}
	for p := range int64(c.Size) + 1 {
		r.Bounds = append(r.Bounds, r.Call.Count*p/int64(c.Size))
	}
	return r
}

// What was fastest on 2 H200 is chosen, or something that was no more than a few percent slower.
func TestSelectionOnGPUsFollowsTheMeasurements(t *testing.T) {
	c := &kernels.ReduceChannels{Size: 2, OneShotBytes: 1 << 20, Slots: 4, SlotBytes: 32 << 10, Blocks: 128}
	s := selector{gpu: true, channels: c}
	for _, m := range []struct {
		coll        kernels.Collective
		bytes       int64
		way         string
		least, most int // blocks
	}{
		{kernels.AllReduce, 0, "one-shot packet", 1, 16},
		{kernels.AllReduce, 8 << 10, "one-shot packet", 8, 16},
		{kernels.AllReduce, 128 << 10, "one-shot packet", 32, 64},
		{kernels.AllReduce, 1 << 20, "one-shot packet", 96, 128},
		{kernels.AllReduce, 2 << 20, "two-shot packet", 96, 128},
		{kernels.AllReduce, 4 << 20, "two-shot", 64, 132},
		{kernels.AllReduce, 128 << 20, "two-shot", 96, 132},
		{kernels.ReduceScatter, 8 << 10, "one-shot packet", 2, 16},
		{kernels.ReduceScatter, 2 << 20, "one-shot packet", 96, 128},
		{kernels.ReduceScatter, 128 << 20, "two-shot", 48, 132},
		{kernels.AllGather, 2 << 20, "one-shot packet", 96, 128},
		{kernels.AllGather, 128 << 20, "two-shot", 48, 132},
	} {
		r := gpuReduction(c, m.coll, m.bytes)
		require.NoError(t, s.choose(r))
		require.Equal(t, m.way, way{r.Algorithm, r.Packets}.String(), "%v", r.Call)
		require.GreaterOrEqual(t, r.Blocks, m.least, "%v", r.Call)
		require.LessOrEqual(t, r.Blocks, m.most, "%v", r.Call)
		require.Equal(t, m.coll == kernels.AllGather && !r.Packets, r.Pull, "%v", r.Call)
	}
}

func TestForcedAlgorithmsOnGPUs(t *testing.T) {
	c := &kernels.ReduceChannels{Size: 4, OneShotBytes: 1000, Slots: 4, SlotBytes: 4096, Blocks: 7}
	s := selector{gpu: true, channels: c, forced: "one-shot"}
	r := gpuReduction(c, kernels.AllReduce, 1000)
	require.NoError(t, s.choose(r))
	require.True(t, r.Packets)
	require.Equal(t, 7, r.Blocks)
	require.ErrorIs(t, s.choose(gpuReduction(c, kernels.AllReduce, 1002)), ErrInvalid)
	require.NoError(t, s.choose(gpuReduction(c, kernels.ReduceScatter, 4000)))
	require.ErrorIs(t, s.choose(gpuReduction(c, kernels.ReduceScatter, 4008)), ErrInvalid)
	s.forced = "two-shot"
	r = gpuReduction(c, kernels.AllReduce, 4000)
	require.NoError(t, s.choose(r))
	require.True(t, r.Packets)
	r = gpuReduction(c, kernels.AllReduce, 4008)
	require.NoError(t, s.choose(r))
	require.False(t, r.Packets)
	alone := &kernels.ReduceChannels{Size: 1, OneShotBytes: 1000, Slots: 4, SlotBytes: 4096, Blocks: 7}
	s = selector{gpu: true, channels: alone}
	r = gpuReduction(alone, kernels.AllReduce, 100)
	require.NoError(t, s.choose(r))
	require.False(t, r.Packets, "nobody to send packets to")
	require.Contains(t, s.explain(r).String(), "multiprocessors")
}
