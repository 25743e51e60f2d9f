package memory

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
)

// GPUs on which a group cannot work are refused before there is any memory, on all ranks, in one sentence with the cure.
func TestGPUsOfNoUseAreRefused(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	refused := func(t *testing.T, want string) {
		t.Helper()
		runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
			d := rankGPU(t, g.Rank())
			_, err := NewHeap(t.ctx, g, d, Options{SegmentBytes: 2 << 20})
			require.ErrorContains(t, err, want)
			require.NotContains(t, err.Error(), "\n")
			require.NoError(t, d.Close())
		})
		a.nothingIsLeft(want)
	}
	t.Run("that do not reach each other", func(t *testing.T) {
		emulated.WithoutPeers(t, a.ctx[0])
		refused(t, "no peer access from device 0 to 1, 1 to 0: take GPUs that reach each other, by CUDA_VISIBLE_DEVICES; switch MIG and, on PCIe bridges, ACS off")
	})
	t.Run("without code for their driver", func(t *testing.T) {
		emulated.Version(t, a.ctx[0], 12090, 12)
		refused(t, "of compute capability 12: no kernels for a driver that implements CUDA 12.9: install NVIDIA's driver 580 or newer")
	})
}
