package explore_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/test/explore"
)

// counters is a system of two ranks that increment one word without a lock: each loads it, then stores what it loaded
// plus one. Words: the counter, then for each rank what it loaded and how many of its two actions it has done.
type counters struct{}

func (counters) Start() []uint64 { return make([]uint64, 5) }

func (counters) Moves(s []uint64, moves []explore.Move) []explore.Move {
	for rank := range 2 {
		if s[2+2*rank] < 2 {
			moves = append(moves, explore.Move(rank))
		}
	}
	return moves
}

func (counters) Apply(s []uint64, m explore.Move) error {
	loaded, done := &s[1+2*m], &s[2+2*m]
	if *done == 0 {
		*loaded = s[0]
	} else {
		s[0] = *loaded + 1
	}
	*done++
	return nil
}

func (counters) Describe(s []uint64, m explore.Move) explore.Step {
	return explore.Step{Rank: int(m), Action: []string{"loads", "stores"}[s[2+2*m]]}
}

var errLost = errors.New("an increment is lost")

func (counters) End(s []uint64) error {
	if s[0] != 2 {
		return errLost
	}
	return nil
}

func TestCheckFindsTheShortestTrace(t *testing.T) {
	r, err := explore.Check(counters{}, 100)
	require.NoError(t, err)
	require.ErrorIs(t, r.Violation, errLost)
	require.Len(t, r.Violation.Trace, 4)
	require.Contains(t, r.Violation.Error(), "after 4 actions:\n   1  rank 0  loads\n   2  rank 1  loads")

	_, err = explore.Check(counters{}, 3)
	require.ErrorIs(t, err, explore.ErrLimit)
}

// program is n ranks that take k turns each; done hears of the order when a run ends.
func program(n, k int, done func(order string)) func() explore.Program {
	return func() explore.Program {
		var p explore.Program
		order := ""
		for rank := range n {
			p.Ranks = append(p.Ranks, func(turn explore.Turn) error {
				for i := range k {
					if i > 0 {
						if err := turn("goes on", false); err != nil {
							return err
						}
					}
					order += fmt.Sprint(rank)
				}
				return nil
			})
		}
		p.End = func() error { done(order); return nil }
		return p
	}
}

func TestSchedulesRunsEveryOrderOnce(t *testing.T) {
	for _, c := range []struct{ ranks, turns, deviations, orders int }{
		{2, 3, 0, 1},
		{2, 3, 100, 20}, // 6 over 3
		{3, 2, 100, 90}, // 6! / (2! 2! 2!)
		{2, 3, 1, 4},    // as they come, or rank 1 at one of the 3 turns at which there are two
	} {
		seen := map[string]int{}
		r := explore.Schedules{Deviations: c.deviations}.Explore(program(c.ranks, c.turns, func(o string) { seen[o]++ }))
		require.Nil(t, r.Violation)
		require.Equal(t, c.orders, r.Schedules, "%+v: %v", c, seen)
		require.Len(t, seen, c.orders, "%+v", c)
	}
	r := explore.Schedules{Random: 50}.Explore(program(2, 3, func(string) {}))
	require.Equal(t, 51, r.Schedules)
}

func TestSchedulesFindsWhatIsWrong(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		bodies []func(explore.Turn) error
		err    error
		text   string
	}{
		"a rank's error": {[]func(explore.Turn) error{func(explore.Turn) error { return boom }}, boom, "rank 0: boom"},
		"a panic":        {[]func(explore.Turn) error{func(explore.Turn) error { panic("oh") }}, nil, "rank 0: panic: oh"},
		"a deadlock": {[]func(explore.Turn) error{
			func(turn explore.Turn) error { return turn("works", false) },
			func(turn explore.Turn) error {
				for {
					if err := turn("looks again", true); err != nil {
						return err
					}
				}
			},
		}, explore.ErrDeadlock, "1 ranks wait"},
	} {
		t.Run(name, func(t *testing.T) {
			r := explore.Schedules{}.Explore(func() explore.Program { return explore.Program{Ranks: c.bodies} })
			require.NotNil(t, r.Violation)
			require.Contains(t, r.Violation.Error(), c.text)
			if c.err != nil {
				require.ErrorIs(t, r.Violation, c.err)
			}
		})
	}
	r := explore.Schedules{}.Explore(func() explore.Program { return explore.Program{End: func() error { return boom }} })
	require.ErrorIs(t, r.Violation, boom)
}
