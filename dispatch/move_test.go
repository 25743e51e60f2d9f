package dispatch_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
)

func TestPlacementFollows(t *testing.T) {
	for _, c := range []struct {
		name  string
		p     *dispatch.Placement
		was   []int
		want  string
		moves []dispatch.Move
	}{
		{"redundant experts remain", &dispatch.Placement{Ranks: [][]int{{0}, {1, 2}, {2, 0}, {3}}}, []int{0, 1, 3},
			"0:[0] 1:[1] 2:[0] 3:[2]", nil},
		{"the last copy is lost", dispatch.Contiguous(8, 4), []int{0, 2, 3},
			"0:[0] 1:[0] 2:[0] 3:[1] 4:[1] 5:[1] 6:[2] 7:[2]", []dispatch.Move{{Expert: 2, From: -1, To: 0}, {Expert: 3, From: -1, To: 1}}},
		{"a newcomer takes what was lost", dispatch.Contiguous(8, 4), []int{0, 2, 3, -1},
			"0:[0] 1:[0] 2:[3] 3:[3] 4:[1] 5:[1] 6:[2] 7:[2]", []dispatch.Move{{Expert: 2, From: -1, To: 3}, {Expert: 3, From: -1, To: 3}}},
		{"a newcomer takes its share", dispatch.Contiguous(9, 2), []int{0, 1, -1},
			"0:[0] 1:[0] 2:[0] 3:[2] 4:[2] 5:[1] 6:[1] 7:[1] 8:[2]", []dispatch.Move{{Expert: 4, From: 0, To: 2}, {Expert: 3, From: 0, To: 2}, {Expert: 8, From: 1, To: 2}}},
		{"more ranks than experts", dispatch.Contiguous(2, 2), []int{-1, 0, 1},
			"0:[1] 1:[2]", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := c.p.String()
			q, moves := c.p.Follow(c.was)
			require.Equal(t, c.want, q.String())
			require.Equal(t, c.moves, moves)
			require.Equal(t, before, c.p.String())
		})
	}
}

// For every placement and all groups each expert has a rank, and moves list exactly the ranks that lack its parameters and the ranks that
// have them.
func TestPlacementFollowsAnything(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		ranks, experts := 1+rng.IntN(6), 1+rng.IntN(12)
		p := &dispatch.Placement{Ranks: make([][]int, experts)}
		for e := range p.Ranks {
			p.Ranks[e] = rng.Perm(ranks)[:1+rng.IntN(ranks)]
		}
		was := rng.Perm(ranks)[:1+rng.IntN(ranks)]
		for range rng.IntN(3) {
			was = append(was, -1)
		}
		q, moves := p.Follow(was)
		had := func(r, e int) bool { return was[r] >= 0 && slices.Contains(p.Ranks[e], was[r]) }
		for e, at := range q.Ranks {
			require.NotEmpty(t, at)
			for i, r := range at {
				require.NotContains(t, at[:i], r)
				moved := slices.ContainsFunc(moves, func(m dispatch.Move) bool { return m.Expert == e && m.To == r })
				require.NotEqual(t, had(r, e), moved, "seed %d, expert %d, rank %d", seed, e, r)
			}
		}
		for _, m := range moves {
			if m.From >= 0 {
				require.True(t, had(m.From, m.Expert), "seed %d: %+v", seed, m)
				continue
			}
			for r := range was {
				require.False(t, had(r, m.Expert), "seed %d: %+v", seed, m)
			}
		}
	}
}
