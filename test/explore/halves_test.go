package explore_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/test/explore"
)

// interleaved draws an order of calls: each handle is dispatched to and combined from, rounds times.
func interleaved(rng *rand.Rand, handles, rounds int) (program []explore.Half) {
	next := make([]int, handles)
	for len(program) < 4*handles*rounds {
		h := rng.IntN(handles)
		if next[h] == 4*rounds {
			continue
		}
		program = append(program, explore.Half{Handle: h, Combine: next[h]%4 >= 2, Receive: next[h]%2 == 1})
		next[h]++
	}
	return program
}

// Every order of what the ranks do leads to the end, with every notice and row read in the call that it belongs to.
func TestHalves(t *testing.T) {
	for n := 2; n <= 3; n++ {
		for seed := range uint64(24) {
			program := interleaved(rand.New(rand.NewPCG(seed, 1)), 1+int(seed%3), 2)
			if n == 3 {
				program = interleaved(rand.New(rand.NewPCG(seed, 1)), 1+int(seed%2), 2)
			}
			r, err := explore.Check(explore.NewHalves(n, program, explore.NoHalvesBug), 1<<20)
			require.NoError(t, err)
			require.Nil(t, r.Violation, "%v\n%v", program, r.Violation)
		}
	}
}

// The mistakes are found, some of them only when calls of several handles interleave.
func TestHalvesFindsBugs(t *testing.T) {
	for bug, name := range map[explore.HalvesBug]string{
		explore.OneNotice: "one notice", explore.OneDone: "one done line", explore.DoneBeforeRows: "done before rows",
		explore.RowsBeforeNotice: "rows before notice", explore.ReadersNotAwaited: "readers not awaited",
	} {
		t.Run(name, func(t *testing.T) {
			found := ""
			for seed := uint64(0); seed < 12 && found == ""; seed++ {
				program := interleaved(rand.New(rand.NewPCG(seed, 1)), 2, 2)
				r, err := explore.Check(explore.NewHalves(2, program, bug), 1<<20)
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
