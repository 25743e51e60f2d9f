package host

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
)

func TestHeadsHaveTheirSize(t *testing.T) {
	require.Equal(t, headBytes, binary.Size(head{}))
	require.Equal(t, headBytes, binary.Size(refusal{}))
	require.Equal(t, messageBytes, binary.Size(messageHead{}))
}

// A rank that copies to its mate for longer than the deadline sends nothing to other hosts in the meantime. Ranks there go on waiting for it.
func TestF1_WhoMovesBytesIsHeardOnOtherHosts(t *testing.T) {
	const pieces = 12
	timeout := proctest.Scaled(2 * time.Second)
	w := newAcrossWorldOf(t, double.New(1, 100*time.Microsecond), 2, 2, 4, 512, 32<<20)
	w.place = 4 << 20
	w.open(t)
	w.engines[2].step = func(p point, _ int) error {
		if p == copying {
			time.Sleep(timeout / 8)
		}
		return nil
	}
	m := [][]int64{{0, 1, 2, 3}, {1, 0, 2, 3}, {100 << 10, 1, 0, pieces * movedBytes}, {3, 2, 1, 0}}
	start := time.Now()
	for rank, err := range w.each(func(rank int) error {
		within := timeout
		if rank >= 2 {
			within = time.Hour
		}
		return w.call(rank, 1, m, within)
	}) {
		require.NoError(t, err, "rank %d", rank)
	}
	require.Greater(t, time.Since(start), timeout, "it took longer than the deadline")
	require.Positive(t, w.families(0)[0].across.far(2).count(movesWord))
}

// A rank that waits for its mate tells other hosts that the mate moves bytes.
func TestF1_WhoWaitsForWhoMovesBytesSaysSo(t *testing.T) {
	w := newAcrossWorld(t, double.New(1, 0), 2, 2, 4, 512)
	w.open(t)
	var wait waiter
	f := w.families(2)[0]
	wait.begin(w.ports[2].(*port), noSizes{}, call{at: f.c.Epoch(), epoch: 1}, time.Minute)
	wait.crosses(f.across.fars)
	wait.said = time.Time{}
	mate := wait.e.near(1)
	require.NoError(t, wait.idle(mate))
	mate.silence(&wait, time.Minute) // the first look
	require.Equal(t, 2*time.Minute, mate.silence(&wait, 2*time.Minute))
	require.Zero(t, f.across.far(0).puts[movesWord], "it has moved nothing")
	wait.e.word(1, f.c.Epoch()+movedOffset).Add(1)
	require.Zero(t, mate.silence(&wait, 3*time.Minute))
	for _, rank := range []int{0, 1} {
		require.EqualValues(t, 1, f.across.far(rank).puts[movesWord])
		heard := w.families(rank)[0].across.far(2)
		require.Eventually(t, func() bool { return heard.count(movesWord) == 1 }, time.Minute, time.Millisecond)
		heard.hear()
		require.False(t, heard.heard.IsZero())
	}
	wait.busy()
	for _, err := range w.each(func(rank int) error { return w.ports[rank].(*port).Rest() }) {
		require.NoError(t, err)
	}
}
