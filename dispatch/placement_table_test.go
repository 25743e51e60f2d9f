package dispatch

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// A placement comes back from its table, also where ranks have no expert.
func TestAPlacementComesBackFromItsTable(t *testing.T) {
	for range 200 {
		ranks := 1 + rand.IntN(6)
		p := &Placement{Ranks: make([][]int, 1+rand.IntN(12))}
		for e := range p.Ranks {
			p.Ranks[e] = rand.Perm(ranks)[:1+rand.IntN(ranks)]
		}
		first := p.slots(ranks)
		require.Equal(t, p, placementOf(p.table(first), first))
	}
}
