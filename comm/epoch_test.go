package comm

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// A group that loses a rank and takes another in is two epochs further, on the ranks that were there and on the newcomer. A group of some of
// its ranks that shrinks is not it.
func TestEpochsGrow(t *testing.T) {
	onOneHost(t, 4, func(t *testing.T, gs []*Group) {
		cfg := Config{Addr: freeName(t), Secret: []byte("sesame"), Name: "workers"}
		for _, g := range gs {
			s := g.n.flight.State(false)
			require.Equal(t, []any{0, []int{0, 1, 2, 3}}, []any{s.Epoch, s.Members})
		}
		gs[1].Kill()
		alive := []*Group{gs[0], gs[2], gs[3]}
		rest := requireSurvivors(t, alive, 0, 2, 3)
		for i, g := range rest {
			s := g.n.flight.State(false)
			require.Equal(t, []any{1, []int{0, 2, 3}}, []any{s.Epoch, s.Members})
			require.Len(t, s.Past, 1)
			require.Equal(t, []any{"lost", 1, "world"}, []any{s.Past[0].Kind, s.Past[0].Culprit, s.Past[0].Group})
			_, socket := g.n.links[1].(*sockLink)
			require.Equal(t, socket, s.Past[0].Silent >= 0, "rank %d: how long rank 1 was silent is known by its connection", i)
		}
		parts := make([]*Group, 3)
		requireAll(t, onEach(rest, func(g *Group) (err error) {
			parts[g.Rank()], err = g.Split(testContext(t), 0, g.Rank())
			return err
		}))
		requireSurvivors(t, parts, 0, 1, 2)
		require.Equal(t, 1, rest[0].n.flight.Epoch())

		var wg sync.WaitGroup
		all := make([]*Group, 4)
		wg.Go(func() {
			late := cfg
			late.Late = true
			var err error
			all[3], err = Join(testContext(t), late)
			require.NoError(t, err)
		})
		requireAll(t, onEach(rest, func(g *Group) (err error) {
			all[g.Rank()], err = g.Admit(testContext(t), 1, cfg)
			return err
		}))
		wg.Wait()
		for r, g := range all {
			s := g.n.flight.State(false)
			require.Equal(t, []any{2, []int{0, 1, 2, 3}}, []any{s.Epoch, s.Members}, "rank %d", r)
			require.Equal(t, []int{0, 2, 3, 1}, s.Seats, "the newcomer has the place of the lost rank")
			require.Equal(t, s.Seats[r], g.n.flight.Place())
			if r < 3 {
				require.Len(t, s.Past, 1)
				require.Equal(t, []any{1, "world"}, []any{s.Past[0].Culprit, s.Past[0].Group})
				require.Equal(t, map[flight.Fault]uint64{{Kind: "lost", Culprit: 1}: 1}, s.Faults)
				old := rest[r].n.flight.State(false)
				require.Empty(t, old.Past)
				require.True(t, old.Passed)
			} else {
				require.Empty(t, s.Past, "it has seen none")
			}
		}
		for _, g := range append(append(parts, all...), alive...) {
			g.Close()
		}
	})
}
