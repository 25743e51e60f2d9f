package train

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Rank 1 of three is lost while experts move, and a fresh rank has come.
func TestExpertsAreWhereRanksHaveThem(t *testing.T) {
	old, moved := [][]int{{0}, {1}, {2}, {0}}, [][]int{{2}, {0}, {1}, {0}}
	left := func(first, last []int) []testament {
		return []testament{{Rank: 0, Mine: first}, {Rank: -1}, {Rank: 2, Mine: last}}
	}
	require.Equal(t, [][]int{{0}, {}, {2}, {0}}, standing(old, left([]int{0, 3}, []int{2})).Ranks)
	require.Equal(t, [][]int{{2}, {0}, {}, {0}}, standing(moved, left([]int{1, 3}, []int{0})).Ranks)
	require.Equal(t, [][]int{{0}, {}, {}, {0}}, standing(old, left([]int{0, 3}, []int{0})).Ranks, "the first placement's copy stays")
	require.Equal(t, [][]int{{2}, {}, {}, {0}}, standing(moved, left([]int{0, 3}, []int{0})).Ranks)
	require.Equal(t, [][]int{{}, {0}, {2}, {0}}, standing(old, left([]int{1, 3}, []int{2})).Ranks)
}
