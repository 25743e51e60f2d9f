package dispatch_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// maskedOnGPUs are options of dispatchers that can go on without ranks on GPUs.
var maskedOnGPUs = map[string]dispatch.Options{
	"flat":   {LowLatency: true, Handles: 1},
	"slab":   {LowLatency: true, Handles: 1, Layout: dispatch.Slab, Landed: true},
	"padded": {LowLatency: true, Handles: 1, Layout: dispatch.Padded},
}

func TestCUDA_AMaskedRankIsLeftOutAndComesBack(t *testing.T) {
	for name, o := range maskedOnGPUs {
		t.Run(name, func(t *testing.T) { gpus(t, 4, func(r *rank) { isLeftOutAndComesBack(r, o) }) })
	}
}

// Processes are killed one after the other, at any place of their calls, until one is left.
func TestCUDA_ProcessesThatAreKilledAreMasked(t *testing.T) {
	const ranks = 4
	if !proctest.Again() {
		if n, err := device.CUDACount(); err != nil || n == 0 {
			t.Skipf("needs a GPU: %v", err)
		}
		ps := proctest.Ranks(t, ranks, loopback.Addr(), proctest.Spec{Within: 2 * time.Minute})
		for r, err := range proctest.Failures(ps) {
			if r == ranks-1 {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "killed")
			}
		}
		return
	}
	worldtest.GPUProcs(t, ranks, memory.Options{SegmentBytes: gpuPart + 160<<20}, func(w *worldtest.Rank) {
		gpuTest(w, func(r *rank) {
			longest := areKilledAndMasked(r, maskedOnGPUs["slab"])
			t.Logf("the longest round in which a rank was lost took %v", longest)
		})
	})
}

// A graph that was captured before goes on without a rank that is masked, with tokens at copies of its experts, and with it when it is back.
func TestCUDA_GraphsGoOnWithoutAMaskedRank(t *testing.T) {
	const victim, rounds = 2, 20
	gpus(t, 4, func(r *rank) {
		m := newMaskedRounds(r, 16, maskedOnGPUs["slab"])
		s := r.gpuStream()
		x, idx := make([]float32, m.tokens*maskedHidden), make([]int32, m.tokens*maskedTopK)
		for i := range x {
			x[i] = float32(1 + m.Rank.Rank()*m.tokens + i/maskedHidden)
		}
		for i := range idx {
			idx[i] = int32((i/maskedTopK + 3*(i%maskedTopK)) % 8)
		}
		in, y := r.tokens(r.up(shm.Bytes(x)), idx, nil), r.up(make([]byte, 4*len(x)))
		var h *dispatch.Handle
		graph := r.capture(s, func() (err error) {
			if h, err = m.d.Dispatch(s, in); err == nil {
				err = m.d.Combine(s, y, h.Rows(), h, dispatch.CombineOptions{Weighting: dispatch.Unweighted})
			}
			return err
		})
		made := 0
		round := func() {
			made++
			r.replay(s, m.d, graph)
			for i, v := range shm.View[float32](r.down(y)) {
				require.Equal(r, maskedTopK*x[i], v, "token %d", i/maskedHidden)
			}
		}
		for made < rounds {
			round()
		}
		r.Barrier()
		if r.Group.Rank() == victim {
			require.NoError(r, m.d.Mask(victim))
		}
		r.Barrier()
		if r.Group.Rank() != victim {
			for made < 2*rounds || len(m.masked()) > 0 {
				round()
			}
		} else {
			require.NoError(r, graph.Launch(s))
			require.NoError(r, s.Synchronize())
			var masked *kernels.MaskedError
			require.ErrorAs(r, m.d.Fault(), &masked)
			calls, err := m.d.Unmask(r.Ctx)
			require.NoError(r, err)
			for made = int(calls / 2); made < 2*rounds; {
				round()
			}
		}
		for range rounds {
			round()
		}
		h.Release()
		require.NoError(r, graph.Close())
		require.NoError(r, m.d.Close(r.Ctx))
		require.NoError(r, s.Close())
	})
}

// GPUs refuse some options with masks.
func TestCUDA_F3_MasksThatGPUsRefuse(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		for what, o := range map[string]dispatch.Options{
			"needs LowLatency": {Handles: 1}, "is for one handle, there are 4": {LowLatency: true}, "not layout token-major": {LowLatency: true, Handles: 1, Layout: dispatch.TokenMajor},
		} {
			o.Experts, o.TopK, o.Hidden, o.MaxTokens, o.Masks = 4, 2, 64, 8, true
			_, err := dispatch.New(r.Ctx, r.Heap, o)
			require.ErrorContains(r, err, what)
		}
	})
}
