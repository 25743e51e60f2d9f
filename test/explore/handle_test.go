package explore_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/test/explore"
)

var handleLayouts = map[string]explore.HandleLayout{
	"by expert": explore.ByExpert, "by expert, beside": explore.ByExpertBeside, "by rank": explore.ByRank, "compact": explore.Compact, "packets": explore.Packets,
}

// someCalls draws calls of one handle: dispatches with routings of their own, each with no combine or a few.
func someCalls(rng *rand.Rand, ranks, dispatches int) (calls []explore.HandleCall) {
	for range dispatches {
		rows := make([][]bool, ranks)
		for src := range rows {
			for range ranks {
				rows[src] = append(rows[src], rng.IntN(3) > 0)
			}
		}
		calls = append(calls, explore.HandleCall{Rows: rows})
		for left := rng.IntN(4); left > 0; left-- {
			switch last := left == 1; {
			case !last && rng.IntN(3) == 0:
				calls = append(calls, explore.HandleCall{}) // once more
			default:
				calls = append(calls, explore.HandleCall{Combine: true, Release: last && rng.IntN(2) == 0})
			}
		}
	}
	return calls
}

// Every order of what the ranks do in the calls of a handle leads to the end, and nothing is read but what was written for it.
func TestHandle(t *testing.T) {
	for name, layout := range handleLayouts {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(120) {
				rng := rand.New(rand.NewPCG(seed, 2))
				n, dispatches := 2, 3
				if seed%8 == 7 {
					n, dispatches = 3, 2
				}
				calls := someCalls(rng, n, dispatches)
				r, err := explore.Check(explore.NewHandle(n, layout, calls, explore.NoHandleBug), 4<<20)
				require.NoError(t, err)
				require.Nil(t, r.Violation, "%v\n%v", calls, r.Violation)
			}
		})
	}
}

// The mistakes are found, each in the layouts where it is one.
func TestHandleFindsBugs(t *testing.T) {
	for _, c := range []struct {
		name    string
		bug     explore.HandleBug
		layouts []string
	}{
		{"one line of beginnings", explore.OneBegin, []string{"by expert", "by expert, beside", "by rank", "compact"}},
		{"any number", explore.AnyNumber, []string{"by expert", "by expert, beside", "by rank", "compact"}},
		{"room is not awaited", explore.RoomNotAwaited, []string{"by expert", "by rank"}},
		{"free too soon", explore.FreeTooSoon, []string{"by rank"}},
		{"made is not awaited", explore.MadeNotAwaited, []string{"by expert, beside"}},
		{"staging is not awaited", explore.StagingNotAwaited, []string{"by expert", "by expert, beside"}},
		{"readers in place are not awaited", explore.InPlaceNotAwaited, []string{"by rank", "compact"}},
		{"one place for packets", explore.OnePlace, []string{"packets"}},
		{"beginnings are not awaited", explore.BeginNotAwaited, []string{"packets"}},
		{"done before rows", explore.DoneBeforeRowsOfHandle, []string{"by expert", "by expert, beside", "by rank", "compact"}},
	} {
		for _, layout := range c.layouts {
			t.Run(fmt.Sprintf("%s, %s", c.name, layout), func(t *testing.T) {
				found := ""
				for seed := uint64(0); seed < 40 && found == ""; seed++ {
					n, dispatches := 2, 3
					if seed%4 == 3 {
						n, dispatches = 3, 1
					}
					calls := someCalls(rand.New(rand.NewPCG(seed, 2)), n, dispatches)
					r, err := explore.Check(explore.NewHandle(n, handleLayouts[layout], calls, c.bug), 4<<20)
					require.NoError(t, err)
					if r.Violation != nil {
						found = fmt.Sprint(r.Violation)
					}
				}
				require.NotEmpty(t, found)
				t.Log(found)
			})
		}
	}
}
