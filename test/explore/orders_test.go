package explore_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/test/explore"
)

// permutations are all orders of the numbers.
func permutations(of []int) (all [][]int) {
	if len(of) == 0 {
		return [][]int{nil}
	}
	for i, first := range of {
		var rest []int
		rest = append(append(rest, of[:i]...), of[i+1:]...)
		for _, p := range permutations(rest) {
			all = append(all, append([]int{first}, p...))
		}
	}
	return all
}

// accepted are the orders of n ranks that a List may have.
func accepted(n int) (all [][][]int) {
	var add func(orders [][]int)
	add = func(orders [][]int) {
		if len(orders) == n {
			l := alltoallv.List{Name: "own", Orders: orders, Bytes: []int64{1}, Microseconds: []float64{1}}
			if l.Check() == nil {
				all = append(all, append([][]int{}, orders...))
			}
			return
		}
		var peers []int
		for p := range n {
			if p != len(orders) {
				peers = append(peers, p)
			}
		}
		for _, order := range permutations(peers) {
			add(append(orders[:len(orders):len(orders)], order))
		}
	}
	add(nil)
	return all
}

// styled is how a rank serves its peers by one of these orders.
func styled(orders [][]int, window int, more explore.Style) explore.Style {
	more.Order, more.Window = func(rank, _ int) []int { return orders[rank] }, window
	return more
}

// Whatever orders pass the check of an algorithm, every exchange by them ends with the right bytes, also where ranks choose differently: X2.
func TestX8_OrdersThatAreAcceptedEnd(t *testing.T) {
	three, four := accepted(3), accepted(4)
	require.Len(t, three, 2)
	require.Len(t, four, 24)
	uneven, times := [][]int64{{0, 12, 4}, {8, 0, 0}, {16, 12, 0}}, 2
	if testing.Short() {
		uneven, times = [][]int64{{0, 12, 0}, {4, 0, 0}, {8, 4, 0}}, 1
	}
	var styles []explore.Style
	for _, orders := range three {
		for window := range 3 {
			styles = append(styles, styled(orders, window, explore.Style{InPlace: window == 1, ChunkBytes: 8}))
		}
	}
	states := 0
	hold := func(w *explore.Workload) {
		t.Helper()
		r, err := explore.Check(explore.NewProtocol(w, explore.Options{Lines: true}), limit)
		require.NoError(t, err)
		require.Nil(t, r.Violation, "%v", r.Violation)
		states += r.States
	}
	for i, a := range styles {
		hold(calls(twoSlot, times, uneven, a))
		for j, b := range styles {
			if testing.Short() && (i+j)%3 != 0 {
				continue
			}
			hold(calls(twoSlot, 1, uneven, a, b, styles[(i+2*j)%len(styles)]))
		}
	}
	t.Logf("3 ranks: %d states", states)
	states = 0
	rnd := rand.New(rand.NewPCG(8, 8))
	sparse := [][]int64{{0, 4, 0, 4}, {4, 0, 4, 0}, {0, 4, 0, 4}, {4, 0, 4, 0}}
	for i, orders := range four {
		if testing.Short() && i%12 != 0 {
			continue
		}
		hold(calls(credits, 1, all(4, 4), styled(orders, 1, explore.Style{})))
		var differ []explore.Style
		for range 4 {
			differ = append(differ, styled(four[rnd.IntN(len(four))], 1+rnd.IntN(2), explore.Style{InPlace: rnd.IntN(2) == 0}))
		}
		hold(calls(credits, 1, sparse, differ...))
	}
	t.Logf("4 ranks: %d states", states)
}
