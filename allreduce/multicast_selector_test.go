package allreduce

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
)

// asking selects on GPUs with Options.Multicast; vain is the reason why that cannot be honoured.
func asking(t *testing.T, c *kernels.ReduceBounds, what, vain string) *selector {
	s := onGPU(t, c, "")
	s.byMulticast = byMulticast{what, vain}
	return s
}

func TestMulticastIsChosenOnlyWhereItIsAskedForAndAdds(t *testing.T) {
	c := &kernels.ReduceBounds{Size: 4, OneShotBytes: 512 << 10, Slots: 4, SlotBytes: 32 << 10, Blocks: 96, Multicast: true}
	const staging = 96 * 4 * (32 << 10) * 4
	choose := func(s *selector, coll kernels.Collective, bytes int64, dt kernels.DType, o kernels.ReduceOp) *kernels.Reduction {
		r := gpuReduction(c, coll, bytes)
		r.Call.Count, r.Call.DType, r.Call.Op = bytes/dt.Size(), dt, o
		for p := range r.Bounds {
			r.Bounds[p] = r.Call.Count * int64(p) / int64(c.Size)
		}
		require.NoError(t, s.choose(r))
		x := *r
		d := s.explain(&x)
		require.Equal(t, r.Multicast, d.Multicast)
		require.Equal(t, r.Multicast != kernels.NoMulticast, d.Way == multicastWay)
		return r
	}
	for _, m := range []struct {
		option string
		bytes  int64
		dt     kernels.DType
		op     kernels.ReduceOp
		want   kernels.Pipeline
	}{
		{"", 64 << 20, kernels.BFloat16, kernels.Sum, kernels.NoMulticast},
		{"auto", 64 << 10, kernels.BFloat16, kernels.Sum, kernels.MulticastPackets},
		{"auto", 64 << 10, kernels.BFloat16, kernels.Max, kernels.MulticastPackets}, // ranks combine for themselves
		{"warps", 64 << 10, kernels.Uint8, kernels.Prod, kernels.MulticastPackets},  // or the size of packets would differ
		{"blocks", 64 << 10, kernels.Float16, kernels.Avg, kernels.MulticastPackets},
		{"auto", 349526, kernels.BFloat16, kernels.Max, kernels.NoMulticast}, // of 512 KiB 2 thirds are 349524
		{"auto", staging, kernels.BFloat16, kernels.Sum, kernels.WarpPipeline},
		{"auto", staging + 2, kernels.BFloat16, kernels.Sum, kernels.BlockPipeline},
		{"warps", 64, kernels.BFloat16, kernels.Sum, kernels.WarpPipeline},
		{"warps", 1 << 30, kernels.Float16, kernels.Sum, kernels.WarpPipeline},
		{"blocks", 64, kernels.Int32, kernels.Sum, kernels.BlockPipeline},
		{"blocks", 64 << 20, kernels.Float32, kernels.Avg, kernels.BlockPipeline},
		{"blocks", 64 << 20, kernels.Float64, kernels.Avg, kernels.BlockPipeline},
		{"blocks", 64 << 20, kernels.Int64, kernels.Sum, kernels.BlockPipeline},
		{"blocks", 64 << 20, kernels.BFloat16, kernels.Avg, kernels.NoMulticast}, // rounds twice
		{"blocks", 64 << 20, kernels.Float32, kernels.Max, kernels.NoMulticast},
		{"blocks", 64 << 20, kernels.Float32, kernels.Prod, kernels.NoMulticast},
		{"blocks", 64 << 20, kernels.Uint8, kernels.Sum, kernels.NoMulticast},
		{"blocks", 64 << 20, kernels.Float8E4M3, kernels.Sum, kernels.NoMulticast},
	} {
		r := choose(asking(t, c, m.option, ""), kernels.AllReduce, m.bytes, m.dt, m.op)
		require.Equal(t, m.want, r.Multicast, "%+v", m)
		switch m.want {
		case kernels.NoMulticast:
			require.False(t, m.option != "" && r.Packets, "their places are those of multicast")
		case kernels.MulticastPackets:
			require.Equal(t, []any{kernels.OneShot, true}, []any{r.Algorithm, r.Packets})
		default:
			require.Equal(t, []any{kernels.TwoShot, false, false, false, 0.0}, []any{r.Algorithm, r.Packets, r.Pull, r.Push, r.Rate})
			require.GreaterOrEqual(t, r.Blocks, leastPipelineBlocks)
		}
		without := choose(asking(t, c, m.option, "rank 1: its GPU has none"), kernels.AllReduce, m.bytes, m.dt, m.op)
		require.Equal(t, kernels.NoMulticast, without.Multicast)
		plain := choose(asking(t, c, "", ""), kernels.AllReduce, m.bytes, m.dt, m.op)
		require.Equal(t, plain.Packets, without.Packets, "as without the option")
	}
	for _, m := range []struct {
		option string
		coll   kernels.Collective
		bytes  int64
		dt     kernels.DType
		op     kernels.ReduceOp
		want   kernels.Pipeline
	}{
		{"", kernels.AllGather, 64 << 20, kernels.BFloat16, kernels.Sum, kernels.NoMulticast},
		{"", kernels.ReduceScatter, 64 << 20, kernels.BFloat16, kernels.Sum, kernels.NoMulticast},
		{"warps", kernels.AllGather, 64 << 10, kernels.Uint8, kernels.Sum, kernels.WarpPipeline},
		{"blocks", kernels.AllGather, 64 << 20, kernels.Float8E4M3, kernels.Sum, kernels.BlockPipeline},
		{"blocks", kernels.Broadcast, 64 << 20, kernels.Uint8, kernels.Sum, kernels.BlockPipeline},
		{"auto", kernels.AllGather, 64 << 10, kernels.BFloat16, kernels.Sum, kernels.MulticastPackets},
		{"auto", kernels.Broadcast, 64 << 10, kernels.Uint8, kernels.Sum, kernels.MulticastPackets},
		{"auto", kernels.AllGather, staging, kernels.BFloat16, kernels.Sum, kernels.WarpPipeline},
		{"auto", kernels.AllGather, staging + 8, kernels.BFloat16, kernels.Sum, kernels.BlockPipeline},
		{"warps", kernels.ReduceScatter, 64, kernels.BFloat16, kernels.Sum, kernels.WarpPipeline},
		{"blocks", kernels.ReduceScatter, 64 << 20, kernels.Float64, kernels.Avg, kernels.BlockPipeline},
		{"auto", kernels.ReduceScatter, 64 << 10, kernels.BFloat16, kernels.Sum, kernels.NoMulticast},
		{"auto", kernels.ReduceScatter, staging, kernels.BFloat16, kernels.Sum, kernels.WarpPipeline},
		{"warps", kernels.ReduceScatter, 64 << 20, kernels.BFloat16, kernels.Avg, kernels.NoMulticast},
		{"warps", kernels.ReduceScatter, 64 << 20, kernels.Float32, kernels.Max, kernels.NoMulticast},
		{"warps", kernels.ReduceScatter, 64 << 20, kernels.Uint8, kernels.Sum, kernels.NoMulticast},
	} {
		require.Equal(t, m.want, choose(asking(t, c, m.option, ""), m.coll, m.bytes, m.dt, m.op).Multicast, "%+v", m)
		require.Equal(t, kernels.NoMulticast, choose(asking(t, c, m.option, "rank 1: its GPU has none"), m.coll, m.bytes, m.dt, m.op).Multicast)
	}
}

func TestExplainSaysWhatBecameOfMulticast(t *testing.T) {
	c := &kernels.ReduceBounds{Size: 4, OneShotBytes: 512 << 10, Slots: 4, SlotBytes: 32 << 10, Blocks: 96, Multicast: true}
	say := func(s *selector, bytes int64, o kernels.ReduceOp) string {
		r := gpuReduction(c, kernels.AllReduce, bytes)
		r.Call.Op = o
		require.NoError(t, s.choose(r))
		return s.explain(r).String()
	}
	require.NotContains(t, say(asking(t, c, "", ""), 64<<20, kernels.Sum), "multicast")
	s := asking(t, c, "auto", "")
	require.Regexp(t, `^multicast block pipeline \(asked for\); (.|\n)*multicast +no estimate  .*never run on hardware`, say(s, 128<<20, kernels.Sum))
	for coll, why := range map[kernels.Collective]string{kernels.AllGather: "switches hand every slice to all; it has never", kernels.ReduceScatter: "switches add; it has never"} {
		r := gpuReduction(c, coll, 128<<20)
		require.NoError(t, s.choose(r))
		require.Regexp(t, `^multicast block pipeline \(asked for\); (.|\n)*multicast +no estimate  `+why, s.explain(r).String())
	}
	require.Regexp(t, `^multicast packets \(asked for\); (.|\n)*two-shot packet +\+Inf us  packets by multicast take one shot(.|\n)*multicast +no estimate  one store of a packet reaches`,
		say(s, 64<<10, kernels.Max))
	require.Regexp(t, `one-shot packet +\+Inf us  more than packets by multicast carry`, say(s, 400<<10, kernels.Max))
	scatter := gpuReduction(c, kernels.ReduceScatter, 64<<10)
	require.NoError(t, s.choose(scatter))
	require.Regexp(t, `^one-shot packet \(lowest(.|\n)*multicast +no estimate  packets are taken`, s.explain(scatter).String())
	require.Regexp(t, `^two-shot( push)? \(lowest(.|\n)*multicast +\+Inf us  multicast only adds`, say(s, 64<<20, kernels.Max))
	s.vain = "rank 0: its environment forbids it (NCCL_NVLS_ENABLE=0)"
	require.Regexp(t, `^two-shot( push)? \(lowest(.|\n)*multicast +\+Inf us  rank 0: its environment`, say(s, 64<<20, kernels.Sum))
}
