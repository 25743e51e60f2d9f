package dispatch_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
)

// Every expert is somewhere, every rank has its number of slots and no expert twice, and groups stay on their node.
func checkPlacement(t *testing.T, p *dispatch.Placement, experts int, o dispatch.BalanceOptions) {
	t.Helper()
	require.Len(t, p.Ranks, experts)
	slots := make([]int, o.Ranks)
	for e, at := range p.Ranks {
		require.NotEmpty(t, at, "expert %d", e)
		for i, r := range at {
			slots[r]++
			require.NotContains(t, at[:i], r, "expert %d", e)
			if o.Nodes > 1 {
				first := p.Ranks[e/(experts/o.Groups)*(experts/o.Groups)][0]
				require.Equal(t, first/(o.Ranks/o.Nodes), r/(o.Ranks/o.Nodes), "node of expert %d", e)
			}
		}
	}
	for r, n := range slots {
		require.Equal(t, o.Slots, n, "slots of rank %d", r)
	}
}

// Zipf loads, as skewed as routers are when nothing holds them: the busiest rank gets little more than its share.
func TestBalanceOfSkewedLoads(t *testing.T) {
	for _, c := range []struct {
		experts int
		o       dispatch.BalanceOptions
		most    float64
	}{
		{256, dispatch.BalanceOptions{Ranks: 8, Slots: 36}, 1.01},
		{256, dispatch.BalanceOptions{Ranks: 16, Slots: 18, Nodes: 2, Groups: 8}, 1.01},
		{64, dispatch.BalanceOptions{Ranks: 8, Slots: 10}, 1.01},
		{12, dispatch.BalanceOptions{Ranks: 4, Slots: 4}, 1.01},
	} {
		t.Run(fmt.Sprint(c.experts, c.o), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 1))
			load := make([]float64, c.experts)
			for i, e := range rng.Perm(c.experts) {
				load[e] = 1e6 / math.Pow(float64(i+1), 0.8)
			}
			p, err := dispatch.Balance(load, c.o)
			require.NoError(t, err)
			checkPlacement(t, p, c.experts, c.o)
			before, after := dispatch.Contiguous(c.experts, c.o.Ranks).Imbalance(load, c.o.Ranks), p.Imbalance(load, c.o.Ranks)
			t.Logf("busiest rank over mean: %.3f before, %.3f after", before, after)
			require.Less(t, after, c.most)
			require.Less(t, after, before)
			again, err := dispatch.Balance(load, c.o)
			require.NoError(t, err)
			require.Equal(t, p, again)
		})
	}
}

// Any numbers give a good placement, also where most experts are on all ranks.
func TestBalanceAnyNumbers(t *testing.T) {
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 2))
		o := dispatch.BalanceOptions{Nodes: 1 + rng.IntN(3)}
		o.Ranks, o.Groups = o.Nodes*(1+rng.IntN(5)), o.Nodes*(1+rng.IntN(3))
		experts := o.Groups * (1 + rng.IntN(6))
		each, ranks := experts/o.Nodes, o.Ranks/o.Nodes
		least := (each + ranks - 1) / ranks
		o.Slots = least + rng.IntN(each-least+1)
		load := make([]float64, experts)
		for e := range load {
			if rng.IntN(4) > 0 {
				load[e] = math.Trunc(10 * rng.ExpFloat64())
			}
		}
		p, err := dispatch.Balance(load, o)
		require.NoError(t, err, "%+v", o)
		checkPlacement(t, p, experts, o)
	}
}

func TestBalanceRefuses(t *testing.T) {
	four := []float64{1, 2, 3, 4}
	for _, c := range []struct {
		load []float64
		o    dispatch.BalanceOptions
		text string
	}{
		{four, dispatch.BalanceOptions{Slots: 1}, "0 ranks"},
		{four, dispatch.BalanceOptions{Ranks: 3, Slots: 2, Nodes: 2}, "3 ranks on 2 nodes"},
		{four, dispatch.BalanceOptions{Ranks: 2, Slots: 2, Groups: 3}, "4 experts in 3 groups"},
		{nil, dispatch.BalanceOptions{Ranks: 2, Slots: 2}, "0 experts"},
		{four, dispatch.BalanceOptions{Ranks: 2, Slots: 2, Nodes: 2}, "1 groups on 2 nodes"},
		{four, dispatch.BalanceOptions{Ranks: 3, Slots: 1}, "4 experts for 3 ranks of 1 slots"},
		{four, dispatch.BalanceOptions{Ranks: 2, Slots: 5}, "no rank has one twice"},
		{[]float64{1, -1}, dispatch.BalanceOptions{Ranks: 1, Slots: 2}, "the load of expert 1 is -1"},
		{[]float64{math.NaN()}, dispatch.BalanceOptions{Ranks: 1, Slots: 1}, "NaN"},
	} {
		_, err := dispatch.Balance(c.load, c.o)
		require.ErrorIs(t, err, dispatch.ErrInvalid)
		require.ErrorContains(t, err, c.text)
	}
}
