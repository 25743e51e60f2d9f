package config

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKillRankFlags(t *testing.T) {
	for args, want := range map[string]string{
		"-kill-rank 4":                               "-kill-rank is 4, the ranks are 0 to 3",
		"-kill-rank -2":                              "-kill-rank is -2, want a rank",
		"-at-step 4":                                 "-at-step needs -kill-rank",
		"-kill-rank 1 -at-step 0":                    "-at-step is 0",
		"-kill-rank 1 -at-step 11 -steps 10":         "-at-step is 11, the steps are 1 to 10",
		"-replace-at-step 4":                         "-replace-at-step needs -kill-rank",
		"-kill-rank 1 -at-step 5 -replace-at-step 5": "want a step after the 5 of -at-step",
		"-kill-rank 1 -steps 9 -at-step 5 -replace-at-step 10": "at most the 9 of -steps",
		"-late":                                "-late needs -join",
		"-kill-rank 0 -ranks 1":                "use at least -ranks 2",
		"-kill-rank 0 -check":                  "leave out -kill-rank",
		"-html -":                              "-html wants the name of a file",
		"-check -html x":                       "-check makes no report",
		"-rate Inf":                            "-rate is +Inf",
		"-html /no/such/folder/x":              "output: open /no/such/folder/x",
		"-ranks 100000 -batch 100000 -steps 3": "lower -ranks",
	} {
		c, err := Parse(strings.Fields(args), nil)
		if err == nil {
			if err = c.TryFiles(); err == nil {
				err = c.Affordable()
			}
		}
		var wrong *UsageError
		require.ErrorAs(t, err, &wrong, args)
		require.ErrorContains(t, err, want, args)
	}
}

func TestSlicesCoverABatch(t *testing.T) {
	for _, n := range []int{3, 61, 512} {
		var all []int
		for r := range 3 {
			lo, hi := Slice(n, r, 3)
			require.LessOrEqual(t, hi-lo, (n+2)/3)
			for i := lo; i < hi; i++ {
				all = append(all, i)
			}
		}
		require.Len(t, all, n)
		require.True(t, slices.IsSorted(all))
	}
}
