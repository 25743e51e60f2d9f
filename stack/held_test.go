package stack_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// held is what a process holds.
type held struct{ fds, maps, kib int }

const heldText = "holds %d descriptors, %d mappings, %d KiB"

func (h held) String() string { return fmt.Sprintf(heldText, h.fds, h.maps, h.kib) }

// oneArena has the C library keep freed memory in one place. Else each thread keeps some of all sizes, over pages of its own, which takes
// hundreds of rounds to fill and looks like a leak of 20 KiB a round.
const oneArena = "GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"

// readHeld finds what a process has printed about itself.
func readHeld(out string) (series []held, err error) {
	for line := range strings.Lines(out) {
		var h held
		if strings.HasPrefix(line, "holds ") {
			_, e := fmt.Sscanf(line, heldText, &h.fds, &h.maps, &h.kib)
			err = errors.Join(err, e)
			series = append(series, h)
		}
	}
	return series, err
}

// manyRounds are enough for flat to see a leak of 25 KiB in each. Memory settles in the first half of them, and the last 100 count.
const manyRounds = 200

// flat compares the last third of the rounds that count with the second: what happens once has happened in the first. It takes the least of
// descriptors and mappings and the median of memory. Over a hundred rounds it allows for less than a descriptor in 33 rounds, a mapping in 6, or
// 20 KiB in each. In few rounds memory still settles, and on a busy machine threads begin late, which stay with two mappings each.
func flat(series []held) error {
	maps, kib := 9, 4096
	if len(series) >= manyRounds {
		maps, kib = 5, 600
	}
	n := len(counted(series))
	before, after := thirds(series)
	if after.fds > before.fds || after.maps > before.maps+maps || after.kib > before.kib+kib {
		return fmt.Errorf("the last %d of %d rounds: %v, and %v before", n-n*2/3, len(series), after, before)
	}
	return nil
}

// counted are the rounds of a series that flat looks at.
func counted(series []held) []held {
	if len(series) >= manyRounds {
		return series[len(series)-100:]
	}
	return series
}

// thirds are the second and the last one of those that count.
func thirds(series []held) (second, third held) {
	series = counted(series)
	n := len(series)
	return middle(series[n/3 : n*2/3]), middle(series[n*2/3:])
}

func middle(series []held) held {
	of := func(what func(held) int, at int) int {
		var all []int
		for _, h := range series {
			all = append(all, what(h))
		}
		slices.Sort(all)
		return all[at]
	}
	return held{of(func(h held) int { return h.fds }, 0), of(func(h held) int { return h.maps }, 0), of(func(h held) int { return h.kib }, len(series)/2)}
}

// The judgement finds a leak in each round, or in every third of descriptors, and finds none in what is only restless.
func TestFlat(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		series := func(rounds, kib, maps, perFD int) (s []held) {
			for k := range rounds {
				h := held{28, 142 + k*maps + rng.IntN(3), 22000 + 1500*k/(k+5) + k*kib + rng.IntN(800)}
				if rng.IntN(10) == 0 {
					h.fds++
				}
				if perFD > 0 {
					h.fds += k / perFD
				}
				s = append(s, h)
			}
			return s
		}
		require.NoError(t, flat(series(10, 0, 0, 0)))
		require.NoError(t, flat(series(manyRounds, 0, 0, 0)))
		require.Error(t, flat(series(10, 0, 4, 0)))
		require.Error(t, flat(series(10, 0, 0, 1)))
		require.Error(t, flat(series(10, 2000, 0, 0)))
		require.Error(t, flat(series(manyRounds, 25, 0, 0)))
		require.Error(t, flat(series(manyRounds, 0, 1, 0)))
		require.Error(t, flat(series(manyRounds, 0, 0, 33)))
	}
	got, err := readHeld("warning\n" + held{1, 2, 3}.String() + "\n" + held{4, 5, 6}.String() + "\n")
	require.NoError(t, err)
	require.Equal(t, []held{{1, 2, 3}, {4, 5, 6}}, got)
}

func holding() (h held, err error) {
	debug.FreeOSMemory()
	fds, err1 := os.ReadDir("/proc/self/fd")
	maps, err2 := os.ReadFile("/proc/self/maps")
	status, err3 := os.ReadFile("/proc/self/status")
	if err := errors.Join(err1, err2, err3); err != nil {
		return h, err
	}
	h.fds, h.maps = len(fds), bytes.Count(maps, []byte("\n"))
	for line := range strings.Lines(string(status)) { // without pages of files, which are read as code is used for the first time
		if f := strings.Fields(line); len(f) > 1 && (f[0] == "RssAnon:" || f[0] == "RssShmem:") {
			kib, e := strconv.Atoi(f[1])
			h.kib, err = h.kib+kib, errors.Join(err, e)
		}
	}
	if proctest.Race { // most is the detector's own, which grows with what has been touched ever
		h.kib = 0
	}
	return h, err
}
