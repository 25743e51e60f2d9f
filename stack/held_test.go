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

// manyRounds are enough for flat to see a leak of 25 KiB in each.
const manyRounds = 100

// flat compares the last third of a series with the second: what happens once has happened in the first. It takes the least of descriptors and
// mappings and the median of memory. Over a hundred rounds it allows for less than a descriptor in 33 rounds, a mapping in 6, or 20 KiB in each.
// In few rounds memory still settles, and on a busy machine threads begin late, which stay with two mappings each.
func flat(series []held) error {
	n := len(series)
	before, after := thirds(series)
	maps, kib := 5, 600
	if n < manyRounds {
		maps, kib = 9, 4096
	}
	if after.fds > before.fds || after.maps > before.maps+maps || after.kib > before.kib+kib {
		return fmt.Errorf("the last %d of %d rounds: %v, and %v before", n-n*2/3, n, after, before)
	}
	return nil
}

func thirds(series []held) (second, third held) {
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
		require.NoError(t, flat(series(100, 0, 0, 0)))
		require.Error(t, flat(series(10, 0, 4, 0)))
		require.Error(t, flat(series(10, 0, 0, 1)))
		require.Error(t, flat(series(10, 2000, 0, 0)))
		require.Error(t, flat(series(100, 25, 0, 0)))
		require.Error(t, flat(series(100, 0, 1, 0)))
		require.Error(t, flat(series(100, 0, 0, 33)))
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
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			h.kib, err = strconv.Atoi(f[1])
		}
	}
	return h, err
}
