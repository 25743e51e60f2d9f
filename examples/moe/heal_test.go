package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
)

func kill(pid string) error {
	n, err := strconv.Atoi(pid)
	if err != nil {
		return err
	}
	return syscall.Kill(n, syscall.SIGKILL)
}

// trained runs 300 steps with 7 experts and more flags, and returns the report and what was said.
func trained(t *testing.T, text string, more ...string) (r report, out string) {
	path := filepath.Join(t.TempDir(), "report.json")
	args := append(small("-text", text, "-json", path, "-experts", "7", "-steps", "300"), more...)
	code, out, errs := start(t, args...).wait(t, patience)
	require.Zero(t, code, "%v: %s%s", more, out, errs)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &r))
	return r, out
}

// requireEveryStepOnce looks at where the tokens of 300 steps went.
func requireEveryStepOnce(t *testing.T, r report) {
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
	train := func(more ...string) report {
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

// A survivor that had not finished the step that another has finished does so.
func TestExpertsAreWhatTheyWere(t *testing.T) {
	c := tiny()
	text := babble(minText)
	w := oneRank(t, c, text)
	for n := 1; n <= 3; n++ {
		_, err := w.step(n, false)
		require.NoError(t, err)
	}
	other := oneRank(t, c, text)
	copyAll(other.model.dense(), w.model.dense())
	for slot := range w.model.layers[0].experts {
		copyAll(other.model.expert(slot), w.model.expert(slot))
	}
	for i, s := range w.model.slabs {
		o := other.model.slabs[i]
		require.Equal(t, s.w, o.w)
		require.Equal(t, s.m, o.m)
		require.Equal(t, s.v, o.v)
	}
	copyWeights(other.model.expert(2), w.model.expert(0))
	n := expertSize(c)
	from, to := w.model.slabs[len(w.model.slabs)-1], other.model.slabs[len(w.model.slabs)-1]
	require.Equal(t, from.w[4*n:5*n], to.w[6*n:7*n], "expert 2 of layer 1 is expert 0 of layer 1")
	require.NotEqual(t, from.m[4*n:5*n], to.m[6*n:7*n], "it begins anew")
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
		require.Positive(t, r.TrafficBytes[0][c.ranks-1])
		require.Less(t, float64(r.HeldoutLoss), float64(r.BigramLoss)/2)
		// What the fresh rank got is what the others had: the loss goes on where it was.
		if c.before > 10 {
			require.Less(t, mean(r.Losses[c.before-1:c.before+4]), mean(r.Losses[c.before-11:c.before-1])+0.3)
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

// Where no fresh rank comes, the others go on as they are.
func TestNoFreshRankComes(t *testing.T) {
	defer func(d time.Duration) { admitFor = d }(admitFor)
	admitFor = 200 * time.Millisecond
	c := tiny()
	c.Ranks, c.Steps, c.ReplaceAt = 2, 5, 3
	c.MeetAt = net.JoinHostPort(place())
	gs, err := comm.Local(2)
	require.NoError(t, err)
	text := babble(minText)
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := trainRank(context.Background(), gs[1], c, text, nil)
		assert.NoError(t, err)
	})
	r, err := trainRank(context.Background(), gs[0], c, text, nil)
	wg.Wait()
	require.NoError(t, err)
	require.Equal(t, []string{"No fresh rank came within 200ms before step 3."}, r.Events)
	require.Equal(t, 5, r.Steps)
	require.Equal(t, 1, r.TrafficSince)
}

func TestLastRankGoesOnAlone(t *testing.T) {
	code, out, errs := start(t, small("-text", poem(t), "-ranks", "2", "-steps", "40", "-kill-rank", "0")...).wait(t, patience)
	require.Zero(t, code, errs)
	require.Contains(t, out, "40 steps of 61 tokens on 1 rank")
}

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
		"-html /no/such/folder/x":              "report: open /no/such/folder/x",
		"-ranks 100000 -batch 100000 -steps 3": "lower -ranks",
	} {
		c, err := parseFlags(strings.Fields(args), nil)
		if err == nil {
			if err = c.tryFiles(); err == nil {
				err = c.affordable()
			}
		}
		var wrong *usageError
		require.ErrorAs(t, err, &wrong, args)
		require.ErrorContains(t, err, want, args)
	}
}
