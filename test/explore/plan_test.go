package explore_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/test/explore"
	"github.com/switchyard-moe/switchyard/test/plans"
)

// planSystem is the system of a plan.
func planSystem(p *plan.Plan) *explore.Plan {
	in, out := p.Chunks, p.Chunks
	if p.Collective == plan.ReduceScatter || p.Collective == plan.AllToAll {
		in *= p.Ranks
	}
	if p.Collective == plan.AllGather || p.Collective == plan.AllToAll {
		out *= p.Ranks
	}
	return explore.NewPlan(p, in, out)
}

var planBuilders = []func(int) *plan.Plan{plans.OneShotAllReduce, plans.RingAllReduce, plans.RingAllGather, plans.DirectAllToAll}

func TestPlansInEveryOrder(t *testing.T) {
	for _, build := range planBuilders {
		for ranks := 2; ranks <= 3; ranks++ {
			p := build(ranks)
			r, err := explore.Check(planSystem(p), 1<<21)
			require.NoError(t, err)
			if r.Violation != nil {
				t.Fatalf("%s: %v", p.Name, r.Violation)
			}
			t.Logf("%s: %d states, %d deep", p.Name, r.States, r.Depth)
		}
	}
}

// spoil changes a plan at random: a step goes, moves, comes twice, has another place, peer or semaphore, or combines in
// another order. Most of its steps stay right by themselves.
func spoil(rnd *rand.Rand, p *plan.Plan) {
	rank := rnd.IntN(p.Ranks)
	steps := p.Programs[rank]
	i, j := rnd.IntN(len(steps)), rnd.IntN(len(steps))
	s := &steps[i]
	switch rnd.IntN(7) {
	case 0:
		p.Programs[rank] = append(steps[:i], steps[i+1:]...)
	case 1:
		steps[i], steps[j] = steps[j], steps[i]
	case 2:
		p.Programs[rank] = append(steps, steps[i])
	case 3:
		if s.Peer != nil {
			to := (rank + 1 + rnd.IntN(p.Ranks-1)) % p.Ranks
			s.Peer = &to
			break
		}
		at := *s.To
		at.Chunk = rnd.IntN(2)
		s.To = &at
	case 4:
		if s.Peer != nil {
			s.Semaphore = rnd.IntN(2)
			break
		}
		at := &s.From[rnd.IntN(len(s.From))]
		at.Chunk = rnd.IntN(2)
	case 5:
		if len(s.From) > 1 {
			s.From[0], s.From[1] = s.From[1], s.From[0]
		}
	case 6:
		if s.Peer == nil {
			at := &s.From[rnd.IntN(len(s.From))]
			*at = plan.At(plan.Buffer(rnd.IntN(3)), rnd.IntN(2))
			if s.Do != plan.Put && rnd.IntN(2) == 0 {
				*at = at.Of((rank + 1) % p.Ranks)
			}
		}
	}
}

// Package plan looks at one run of a plan, and the exploration at all: they agree on plans that are right and on plans that are not.
func TestTheCheckOfPlansIsExact(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	tries := 4000
	if testing.Short() {
		tries = 800
	}
	right, wrong := 0, map[string]int{}
	for range tries {
		p := planBuilders[rnd.IntN(len(planBuilders))](2 + rnd.IntN(2))
		for range 1 + rnd.IntN(2) {
			spoil(rnd, p)
		}
		if p.Validate() != nil {
			continue // the exploration knows only steps that are right by themselves
		}
		_, err := plan.Check(p)
		r, limit := explore.Check(planSystem(p), 1<<18)
		require.NoError(t, limit)
		if (r.Violation == nil) != (err == nil) {
			t.Fatalf("plan.Check: %v\nexploration: %v\n%+v", err, r.Violation, p.Programs)
		}
		if err == nil {
			right++
			continue
		}
		for _, kind := range []error{explore.ErrDeadlock, explore.ErrRace, explore.ErrResult} {
			if errors.Is(r.Violation, kind) {
				wrong[kind.Error()]++
			}
		}
	}
	t.Logf("%d right, wrong: %v", right, wrong)
	require.Greater(t, right, 10)
	require.Len(t, wrong, 3)
}

// A plan that is right stays so in parts, since ranks meet between them. Without that a rank that is ahead writes scratch which another still
// reads: in some plans no other signal orders the two.
func TestPlansInPartsMeetBetweenThem(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 11))
	apart := 0
	for range 300 {
		c := []plan.Collective{plan.AllReduce, plan.ReduceScatter, plan.AllGather, plan.AllToAll}[rnd.IntN(4)]
		p := plans.Random(rnd, c, 2+rnd.IntN(4))
		_, err := plan.Check(plans.InParts(p, 2+rnd.IntN(2), true))
		require.NoError(t, err)
		if _, err := plan.Check(plans.InParts(p, 2, false)); err != nil {
			require.ErrorContains(t, err, "a race for scratch:")
			apart++
		}
	}
	t.Logf("%d of 300 plans need to meet", apart)
	require.NotZero(t, apart)
	for _, build := range []func(int) *plan.Plan{plans.OneShotAllReduce, plans.RingAllReduce} {
		r, err := explore.Check(planSystem(plans.InParts(build(2), 2, true)), 1<<21)
		require.NoError(t, err)
		require.Nil(t, r.Violation)
	}
	r, err := explore.Check(planSystem(plans.InParts(plans.OneShotAllReduce(2), 2, false)), 1<<21)
	require.NoError(t, err)
	require.NotNil(t, r.Violation)
	require.ErrorIs(t, r.Violation, explore.ErrRace)
}
