package main

import (
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var evened = regexp.MustCompile(`^After step (\d+) experts? [\d, ]+ moved: of the load of the last \d+ steps the busiest rank had ([\d.]+) times the mean, and would have ([\d.]+)\.$`)

// Experts that move change who is busy, and nothing else: the losses have the same bits.
func TestExpertsMoveToWhereRanksAreEquallyBusy(t *testing.T) {
	text := poem(t)
	still, _ := trained(t, text, "-experts", "8", "-balance", "100000")
	require.Empty(t, still.Events)
	for _, more := range []string{"", "-procs"} {
		r, _ := trained(t, text, append([]string{"-experts", "8", "-balance", "20"}, strings.Fields(more)...)...)
		require.Equal(t, still.Losses, r.Losses, more)
		require.Equal(t, still.HeldoutLoss, r.HeldoutLoss)
		require.Equal(t, still.ExpertTokens, r.ExpertTokens)
		require.NotEqual(t, still.ExpertRanks, r.ExpertRanks)
		require.NotEmpty(t, r.Events)
		for _, e := range r.Events {
			m := evened.FindStringSubmatch(e)
			require.NotNil(t, m, e)
			before, _ := strconv.ParseFloat(m[2], 64)
			after, _ := strconv.ParseFloat(m[3], 64)
			require.Less(t, after, before-0.2*(before-1)+0.01, e)
		}
		// Of the tokens of the whole run the busiest rank has fewer than it would have had.
		require.Less(t, busiest(r.ExpertTokens, r.ExpertRanks), busiest(still.ExpertTokens, still.ExpertRanks))
	}
}

// busiest is the load of the busiest rank over the mean.
func busiest(tokens [][]int64, ranks []int) float64 {
	held, all := make([]float64, 4), 0.0
	for _, layer := range tokens {
		for e, n := range layer {
			held[ranks[e]] += float64(n)
			all += float64(n)
		}
	}
	return max(held[0], held[1], held[2], held[3]) * 4 / all
}

// With a rank that is lost, and a fresh one, experts go on to move once all have equally many.
func TestExpertsMoveAfterALoss(t *testing.T) {
	r, _ := trained(t, poem(t), "-experts", "8", "-balance", "15", "-kill-rank", "1", "-at-step", "100", "-replace-at-step", "150")
	require.Len(t, r.Losses, 300)
	require.Less(t, float64(r.HeldoutLoss), float64(r.BigramLoss)/2)
	late := 0
	for _, e := range r.Events {
		if m := evened.FindStringSubmatch(e); m != nil {
			step, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			require.False(t, step >= 100 && step < 150, "ranks have different numbers of experts: %s", e)
			late += step / 150
		}
	}
	t.Logf("%d moves after the fresh rank: %q", late, r.Events)
	requireEveryStepOnce(t, r)
}

func TestBalanceNeedsEquallyManyExperts(t *testing.T) {
	code, _, errs := start(t, "-balance", "10", "-experts", "7").end()
	require.Equal(t, 2, code)
	require.Contains(t, errs, "-experts is 7, -ranks 4")
	code, out, errs := start(t, small("-check", "-balance", "10", "-text", poem(t))...).end()
	require.Zero(t, code, errs)
	require.Contains(t, out, "check: ok")
}
