package allreduce_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

func gpuOf(r *worldtest.Rank) *cuda.Device { return r.Device.(*device.CUDADevice).Context().Device() }

func TestReducersOptionsForMulticastAreChecked(t *testing.T) {
	refused := func(r *worldtest.Rank, o allreduce.Options, says string) {
		_, err := allreduce.New(r.Ctx, r.Heap, o)
		require.ErrorIs(r.T, err, allreduce.ErrInvalid)
		require.ErrorContains(r.T, err, says)
	}
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		refused(r, allreduce.Options{Multicast: "auto"}, "a heap without memory.Options.Multicast")
		refused(r, allreduce.Options{Multicast: "nvls"}, `is "nvls", want "auto"`)
	})
	if !emulated.Driver(t) {
		return
	}
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 16 << 20}, func(r *worldtest.Rank) {
		refused(r, allreduce.Options{Multicast: "warps"}, "a heap without memory.Options.Multicast")
	})
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 16 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
		refused(r, allreduce.Options{Multicast: "warps", Algorithm: "one-shot"}, "multicast takes two shots")
		refused(r, allreduce.Options{Multicast: "blocks", MaxSMs: 2}, "with 2 multiprocessors, want at least 3")
	})
}

// Where the environment forbids it nothing of multicast is made, loaded or launched, whatever options say.
func TestReducersHaveNoMulticastWhereItIsForbidden(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	t.Setenv("NCCL_NVLS_ENABLE", "0")
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 16 << 20, Multicast: memory.MulticastByFile}, func(r *worldtest.Rank) {
		x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Multicast: "warps", SlotBytes: 4096, MaxSMs: 8})
		r.Must(err)
		d, err := x.Explain(kernels.AllReduce, 1<<22, kernels.Float32)
		r.Must(err)
		require.Equal(r.T, kernels.NoMulticast, d.Multicast)
		require.Contains(r.T, d.String(), "its environment forbids it (NCCL_NVLS_ENABLE=0)")
		b, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		r.Must(x.AllReduce(nil, b.View(), b.View(), kernels.Float32, kernels.Sum))
		r.Barrier()
		require.Zero(r.T, emulated.Launches.Of(r.T, gpuOf(r)))
		require.Zero(r.T, emulated.Multicast.Of(r.T, gpuOf(r)))
		r.Must(x.Close(r.Ctx))
	})
}
