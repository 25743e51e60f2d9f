package dispatch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

// A wait for counts looks for a while and then sleeps. After one that has lost its core while it looked, the next sleeps at once, and once
// a rest is over they look again.
func TestAWaitForCountsLearnsFromThoseBefore(t *testing.T) {
	var p shm.Patience
	const us = time.Microsecond
	w := waitForCounts(&p, 0)
	require.Zero(t, w.pause(10*us))
	require.Zero(t, w.pause(countsLook-us))
	require.Equal(t, countsLeastSleep, w.pause(countsLook), "that was long enough")
	require.Equal(t, 3*time.Millisecond/countsSleepPart, w.pause(3*time.Millisecond))
	require.Equal(t, countsMostSleep, w.pause(time.Second))
	w.done(time.Second)

	w = waitForCounts(&p, time.Second)
	require.Zero(t, w.pause(time.Second), "a wait that was long has lost no core")
	require.Positive(t, w.pause(time.Second+7*time.Millisecond), "somebody else had the core meanwhile")

	later := time.Second + 8*time.Millisecond
	w = waitForCounts(&p, later)
	require.Equal(t, countsLeastSleep, w.pause(later+us), "it sleeps at once")
	w.done(later + 2*us)

	w = waitForCounts(&p, later+time.Minute)
	require.Zero(t, w.pause(later+time.Minute))
}
