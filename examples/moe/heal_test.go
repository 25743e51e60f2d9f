package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/examples/moe/report"
)

// trained runs 300 steps with 7 experts and more flags, and returns the report and what was said.
func trained(t *testing.T, text string, more ...string) (r report.Report, out string) {
	path := filepath.Join(t.TempDir(), "report.json")
	args := append(small("-text", text, "-json", path, "-experts", "7", "-steps", "300"), more...)
	code, out, errs := start(t, args...).end()
	require.Zero(t, code, "%v: %s%s", more, out, errs)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &r))
	return r, out
}

// requireEveryStepOnce looks at where the tokens of 300 steps went.
func requireEveryStepOnce(t *testing.T, r report.Report) {
	for _, layer := range r.ExpertTokens {
		sum := int64(0)
		for _, n := range layer {
			sum += n
		}
		require.EqualValues(t, 300*61*2, sum, "every step counts once")
	}
}

// The others go on from the step in which a rank was killed: what they did before stays, no step is left out or done twice, and
// the model that comes out is as good.
func TestOthersGoOnWithoutAKilledRank(t *testing.T) {
	text := poem(t)
	train := func(more ...string) report.Report {
		r, out := trained(t, text, append([]string{"-ranks", "4"}, more...)...)
		if len(more) > 0 {
			require.Len(t, r.Events, 1)
			require.Contains(t, out, "lost in step")
		}
		return r
	}
	whole := train()
	ranks := []int{0, 1, 3}
	if testing.Short() {
		ranks = ranks[1:2]
	}
	for _, procs := range []bool{false, true} {
		for _, rank := range ranks {
			for _, step := range []int{1, 120} {
				more := []string{"-kill-rank", strconv.Itoa(rank), "-at-step", strconv.Itoa(step)}
				if procs {
					more = append(more, "-procs")
				}
				r := train(more...)
				require.Equal(t, 3, r.Ranks, more)
				require.Len(t, r.Losses, 300, more)
				require.InDeltaSlice(t, whole.Losses[:step-1], r.Losses[:step-1], 1e-3, more)
				require.Less(t, float64(r.HeldoutLoss), float64(r.BigramLoss)/2, more)
				require.InDelta(t, float64(whole.HeldoutLoss), float64(r.HeldoutLoss), 0.1, more)
				require.Contains(t, r.Events[0], fmt.Sprintf("Rank %d was lost in step %d. The others went on from there as ranks 0 to 2", rank, step))
				require.Equal(t, step, r.TrafficSince)
				require.Len(t, r.TrafficBytes, 3)
				requireEveryStepOnce(t, r)
			}
		}
	}
}

// A fresh rank takes the place of the one that was killed: it gets the dense part and experts, and every step is done once.
func TestAFreshRankReplacesAKilledOne(t *testing.T) {
	text := poem(t)
	for _, c := range []struct {
		procs           bool
		ranks, kill, at int
		before          int
	}{{false, 4, 1, 60, 120}, {true, 4, 0, 60, 120}, {false, 2, 1, 1, 2}, {true, 3, 2, 100, 300}} {
		if testing.Short() && c.ranks != 4 {
			continue
		}
		args := []string{"-ranks", strconv.Itoa(c.ranks), "-kill-rank", strconv.Itoa(c.kill), "-at-step", strconv.Itoa(c.at),
			"-replace-at-step", strconv.Itoa(c.before)}
		if c.procs {
			args = append(args, "-procs")
		}
		r, out := trained(t, text, args...)
		require.Equal(t, c.ranks, r.Ranks)
		require.Len(t, r.Losses, 300)
		require.Len(t, r.Events, 2)
		require.Contains(t, r.Events[0], fmt.Sprintf("Rank %d was lost in step %d.", c.kill, c.at))
		require.Contains(t, r.Events[1], fmt.Sprintf("A fresh rank came before step %d, as rank %d, and took over expert", c.before, c.ranks-1))
		require.Contains(t, strings.Join(strings.Fields(out), " "), r.Events[1])
		require.Contains(t, r.ExpertRanks, c.ranks-1)
		require.Equal(t, c.before, r.TrafficSince)
		require.Equal(t, []int{c.at, c.before}, r.Changes)
		require.Positive(t, r.TrafficBytes[0][c.ranks-1])
		require.Less(t, float64(r.HeldoutLoss), float64(r.BigramLoss)/2)
		// The fresh rank got what the others had: the loss goes on where it was.
		if c.before > 10 {
			require.Less(t, report.Mean(r.Losses[c.before-1:c.before+4]), report.Mean(r.Losses[c.before-11:c.before-1])+0.3)
		}
		requireEveryStepOnce(t, r)
	}
}

// Ranks meet at an address of their own, so that nobody else takes their port.
func TestPlace(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		host, _ := place()
		ip := net.ParseIP(host)
		require.True(t, ip.IsLoopback(), host)
		require.False(t, strings.HasPrefix(host, "127.0.") || strings.HasPrefix(host, "127.255."), host)
		seen[host] = true
	}
	require.Greater(t, len(seen), 90)
}

func TestLastRankGoesOnAlone(t *testing.T) {
	code, out, errs := start(t, small("-text", poem(t), "-ranks", "2", "-steps", "40", "-kill-rank", "0")...).end()
	require.Zero(t, code, errs)
	require.Contains(t, out, "40 steps of 61 tokens on 1 rank")
}
