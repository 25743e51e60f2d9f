package core

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/observe"
)

// fallbacksOf are those of the ranks of a process group, by rank.
func fallbacksOf(group string) map[int][]observe.Fallback {
	all := map[int][]observe.Fallback{}
	for _, r := range observe.Snapshot().Ranks {
		if r.Group == group {
			all[r.Rank] = append(all[r.Rank], r.Fallbacks...)
		}
	}
	return all
}

// Calls that another library makes are told of a rank before its group has met, and of the same rank afterwards.
func TestFallbacksOfARankThatMeetsLater(t *testing.T) {
	for _, o := range []UnmetOptions{{}, {Size: 2, Rank: 2}, {Size: 2, Rank: -1}, {Size: 2, LocalRank: -1}} {
		_, err := NewUnmet(o)
		require.ErrorIs(t, err, ErrInvalid)
	}
	const name = "meets later"
	u, err := NewUnmet(UnmetOptions{Rank: 0, Size: 1, Name: name, Job: "here"})
	require.NoError(t, err)
	require.NoError(t, FellBack(u, "all_reduce", "gloo", "reduction"))
	require.ErrorIs(t, FellBack(u, "all_reduce", "gloo", "rainy"), ErrInvalid)
	require.Equal(t, map[int][]observe.Fallback{0: {{Operation: "all_reduce", Backend: "gloo", Reason: "reduction", Calls: 1}}}, fallbacksOf(name))
	each(t, 1, func(c *Comm) error {
		before := len(observe.Snapshot().Ranks)
		if err := u.Met(c); err != nil {
			return err
		}
		require.NoError(t, FellBack(c, "all_reduce", "gloo", "reduction"))
		s := observe.Snapshot()
		require.Len(t, s.Ranks, before-1, "the rank is there once")
		require.Empty(t, fallbacksOf(name))
		var counted []uint64
		for _, r := range s.Ranks {
			for _, f := range r.Fallbacks {
				counted = append(counted, f.Calls)
			}
		}
		require.Equal(t, []uint64{2}, counted)
		ticket, err := c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

func TestFallbacksOfARankThatNeverMeets(t *testing.T) {
	const name = "never meets"
	u, err := NewUnmet(UnmetOptions{Rank: 1, Size: 2, Name: name, Job: "here"})
	require.NoError(t, err)
	require.NoError(t, FellBack(u, "all_reduce", "gloo", "group"))
	require.True(t, slices.ContainsFunc(observe.Snapshot().Findings, func(f observe.Finding) bool {
		return f.Text == "rank 1: calls of all_reduce fall back to gloo, 1 in all: the ranks of the group have no symmetric memory together"
	}))
	require.NoError(t, u.Met(nil))
	require.Empty(t, fallbacksOf(name))
}
