package alltoallv

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
)

func finish(s sends, to []float64) float64 { return new(fluid).finish(s, to, math.Inf(1)) }

// popular is what goes to each rank where rank k is the (perm[k]+1)th most popular by a Zipf law.
func popular(perm []int, bytes float64) []float64 {
	var all float64
	for k := range perm {
		all += 1 / float64(k+1)
	}
	to := make([]float64, len(perm))
	for k, p := range perm {
		to[k] = bytes / all / float64(p+1)
	}
	return to
}

func TestOrdersAreCompleteAndLate(t *testing.T) {
	to := popular([]int{3, 0, 1, 2, 4, 5, 6, 7}, 1<<27) // rank 1 gets most, then rank 2
	require.Equal(t, []int32{1, 2, 3, 4, 5, 6, 7}, sends{}.of(nil, to, 0))
	require.Equal(t, []int32{1, 2, 3, 4, 5, 6, 7}, sends{1, 3}.of(nil, to, 0), "among the first three as it is")
	require.Equal(t, []int32{5, 6, 7, 0, 2, 3, 1}, sends{1, 3}.of(nil, to, 4))
	require.Equal(t, []int32{5, 6, 7, 0, 3, 2, 1}, sends{2, 3}.of(nil, to, 4), "the largest last")
	require.Equal(t, []int32{3, 4, 5, 6, 7, 0, 1}, sends{1, 1}.of(nil, to, 2))
}

func TestFinishOfEqualPartsIsTheWire(t *testing.T) {
	const part = 1 << 24
	to := slices.Repeat([]float64{part}, 8)
	require.InDelta(t, 7*(part+turnBytes), finish(sends{}, to), 8)
	require.Zero(t, finish(sends{}, make([]float64, 8)))
}

func TestOrderKeepsThePopularRankBusy(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var before, guess, after, worst float64
	const trials = 100
	for range trials {
		to := popular(rng.Perm(8), 1<<27)
		ideal := 7 * slices.Max(to)
		rotation := finish(sends{}, to) / ideal
		x := Traffic{Size: 8, Rank: rng.IntN(8), SendBytes: make([]int64, 8)}
		for k, n := range to {
			x.SendBytes[k] = int64(n)
		}
		x.RecvTotal = int64(7 * to[x.Rank])
		best := rotation
		guess += finish(x.guess(new(fluid)), to) / ideal / trials
		for last := 1; last <= 2; last++ {
			for early := 1; early < 7; early++ {
				best = min(best, finish(sends{last, early}, to)/ideal)
			}
		}
		before, after, worst = before+rotation/trials, after+best/trials, max(worst, best)
		order := x.sendOrder(new(fluid), nil)
		sorted := slices.Clone(order)
		slices.Sort(sorted)
		var peers []int32
		for p := range int32(8) {
			if int(p) != x.Rank {
				peers = append(peers, p)
			}
		}
		require.Equal(t, peers, sorted)
	}
	require.Greater(t, before, 1.07)
	require.Less(t, guess, 1.04)
	require.Less(t, after, 1.03)
	require.Less(t, worst, 1.06)
}

// All ranks come to the same order, each from its own splits, and the plan holds it.
func TestSkewedCallsAreReordered(t *testing.T) {
	to := popular([]int{3, 0, 6, 1, 5, 7, 2, 4}, 32<<20)
	o, guesses := Options{}, 0
	for rank := range 8 {
		c, err := o.complete(8, new(cuda.Engine), device.CUDAKind)
		require.NoError(t, err)
		r, err := newRegistry(&o, rank, 8, device.CUDAKind)
		require.NoError(t, err)
		r.traits = gpu
		sp := &Splits{}
		for k := range to {
			sp.Send, sp.Recv = append(sp.Send, int64(to[k])), append(sp.Recv, int64(to[rank]))
		}
		var p plan
		require.NoError(t, p.build(sp, rank, 8))
		k := planner{registry: r, cache: newCache(1), bounds: &c, rank: rank}
		k.ready(&p, true)
		require.Equal(t, "ring", p.chosen[1].Algorithm)
		first := p.routes[1].Order
		if !slices.Equal(r.all[r.find("ring")].order, first) {
			guesses++
		}
		kept := slices.Clone(first)
		for range reorderAfter {
			k.ready(&p, true)
		}
		require.Equal(t, kept, first, "launches under way may read it")
		found := false
		for last := 1; last <= 2; last++ {
			for early := 1; early < 7; early++ {
				if s := (sends{last, early}); finish(s, to) < 1.03*7*slices.Max(to) {
					found = found || slices.Equal(s.of(nil, to, rank), p.routes[1].Order)
				}
			}
		}
		require.True(t, found, "rank %d: %v", rank, p.routes[1].Order)
		require.Equal(t, r.all[r.find("ring")].reverse, p.routes[1].ReverseOrder)

		even := equal(8, 32<<20, false)
		require.NoError(t, p.build(even, rank, 8))
		r.choose(&p, 1, &c, rank)
		require.Equal(t, r.all[r.find("ring")].order, p.routes[1].Order)
	}
	require.Greater(t, guesses, 4, "of 8 ranks have another order than the rotation at once")
}

func BenchmarkSendOrder(b *testing.B) {
	to := popular([]int{3, 0, 6, 1, 5, 7, 2, 4}, 1<<27)
	x := Traffic{Size: 8, SendBytes: make([]int64, 8), RecvTotal: 1 << 26}
	for k, n := range to {
		x.SendBytes[k] = int64(n)
	}
	var f fluid
	var order []int32
	for b.Loop() {
		order = x.sendOrder(&f, order)
	}
}

func BenchmarkFinish(b *testing.B) {
	to := popular([]int{3, 0, 6, 1, 5, 7, 2, 4}, 1<<27)
	var f fluid
	for b.Loop() {
		f.finish(sends{2, 3}, to, math.Inf(1))
	}
}
