package stack

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
)

// Ranks 10, 11 and 12 had a stack together, and rank 12 is lost.
func TestF2_ExpertsAreWhereRanksHaveThem(t *testing.T) {
	old, moved := [][]uint64{{10}, {10}, {11}, {11}, {12}, {12}}, [][]uint64{{12}, {10}, {10}, {11}, {11}, {12}}
	for _, c := range []struct {
		name  string
		ranks []past
		want  [][]int
		was   []int
	}{
		{"one placement", []past{{10, 1, moved, map[int][]int{1: {1, 2}}}, {11, 1, moved, map[int][]int{1: {3, 4}}}},
			[][]int{nil, {0}, {0}, {1}, {1}, nil}, []int{0, 1}},
		{"the first rank has the old one", []past{{10, 1, old, map[int][]int{1: {0, 1}}}, {11, 1, moved, map[int][]int{1: {3, 4}}}},
			[][]int{{0}, {0}, nil, {1}, {1}, nil}, []int{0, 1}},
		{"the first rank has the new one", []past{{10, 1, moved, map[int][]int{1: {1, 2}}}, {11, 1, old, map[int][]int{1: {2, 3}}}},
			[][]int{nil, {0}, {0}, {1}, nil, nil}, []int{0, 1}},
		{"copies keep their order", []past{{10, 1, [][]uint64{{12, 11, 10}}, map[int][]int{1: {0}}}, {11, 1, [][]uint64{{12, 11, 10}}, map[int][]int{1: {0}}}},
			[][]int{{1, 0}}, []int{0, 1}},
		{"one rank has a newer stack, another is fresh", []past{
			{10, 2, [][]uint64{{10}, {10}, {10}, {11}, {11}, {11}}, map[int][]int{1: {1, 2}, 2: {0, 1, 2}}}, {11, 1, moved, map[int][]int{1: {3, 4}}}, {ID: 13}},
			[][]int{nil, {0}, {0}, {1}, {1}, nil}, []int{0, 1, -1}},
		{"all are fresh", []past{{ID: 10}, {ID: 11}}, nil, []int{-1, -1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, was, age := together(c.ranks)
			require.Equal(t, c.was, was)
			if c.want == nil {
				require.Nil(t, before)
				return
			}
			require.Equal(t, 1, age)
			require.Equal(t, &dispatch.Placement{Ranks: c.want}, before)
		})
	}
}
