package explore_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/test/explore"
)

// railWorlds are worlds in which every order of steps is tried.
var railWorlds = map[string]explore.RailWorld{
	"two words":          {Ranks: 2, Rounds: []int{2}, Words: 2, Pieces: 1},
	"pieces":             {Ranks: 2, Rounds: []int{2}, Words: 1, Pieces: 2},
	"three rounds":       {Ranks: 2, Rounds: []int{3}, Words: 1, Pieces: 1},
	"delivered twice":    {Ranks: 2, Rounds: []int{3}, Words: 1, Pieces: 1, Twice: true},
	"two communicators":  {Ranks: 2, Rounds: []int{1, 2}, Words: 1, Pieces: 1, Tail: true},
	"a network is cut":   {Ranks: 2, Rounds: []int{2}, Words: 1, Pieces: 1, Tail: true, Cut: true},
	"cut, twice, pieces": {Ranks: 2, Rounds: []int{1}, Words: 1, Pieces: 2, Cut: true, Twice: true},
	"three ranks":        {Ranks: 3, Rounds: []int{1}, Words: 1, Pieces: 1},
}

// safe visits all states of a system that keeps its promises.
func safe(t *testing.T, sys explore.System) {
	t.Helper()
	r, err := explore.Check(sys, 1<<22)
	require.NoError(t, err)
	require.Nil(t, r.Violation, "%v", r.Violation)
	t.Logf("%d states, %d moves, depth %d", r.States, r.Moves, r.Depth)
}

// broken wants a system to break a promise in one of its worlds at least, and wherever it does for a reason that has these words.
func broken[W any](t *testing.T, worlds map[string]W, sys func(w W) explore.System, want string) {
	t.Helper()
	found := ""
	for world, w := range worlds {
		r, err := explore.Check(sys(w), 1<<22)
		require.NoError(t, err)
		if r.Violation == nil {
			t.Log("not in: ", world)
			continue
		}
		require.Contains(t, r.Violation.Err.Error(), want, "%v", r.Violation)
		found = world + ": " + r.Violation.Error()
	}
	require.NotEmpty(t, found)
	t.Log(found)
}

// Every order of what ranks and the network do leads to the end, and every rank reads what was put for it in this round.
func TestRail(t *testing.T) {
	for name, w := range railWorlds {
		t.Run(name, func(t *testing.T) {
			safe(t, explore.NewRail(w, explore.NoRailBug))
		})
	}
}

// The mistakes are found. Some of them show only where puts can be delivered twice, or the network is cut.
func TestRailFindsBugs(t *testing.T) {
	for name, c := range map[string]struct {
		bug  explore.RailBug
		want string // of the violation in all worlds in which it shows
	}{
		"signal before its put":             {explore.RailSignalBeforePut, "want"},
		"the newest put counts":             {explore.RailNewestCounts, "want"},
		"deliveries are counted":            {explore.RailCountsTwice, "want"},
		"bytes that are delivered again":    {explore.RailLandsTwice, "want"},
		"bytes land after an interrupt":     {explore.RailLandsInterrupted, "has given back"},
		"memory goes before the rail":       {explore.RailMemoryFirst, "has given back"},
		"no flush":                          {explore.RailNoFlush, "want"},
		"one buffer":                        {explore.RailOneBuffer, "want"},
		"a wait that ends with no failure":  {explore.RailDeafWait, "never"},
		"a communicator that does not rest": {explore.RailNoRest, "want"},
	} {
		t.Run(name, func(t *testing.T) {
			broken(t, railWorlds, func(w explore.RailWorld) explore.System { return explore.NewRail(w, c.bug) }, c.want)
		})
	}
}
