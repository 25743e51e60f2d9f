package shm

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// answered is a number of looks that paid.
func answered(p *Patience, now time.Duration, n int) {
	for range n {
		p.Looked(now, 2*time.Microsecond, true)
	}
}

// Looks that end as they were meant to, with an answer or without, change nothing.
func TestPatienceLooksWhereNobodyWantsTheCore(t *testing.T) {
	var p Patience
	for now := time.Duration(0); now < time.Second; now += 100 * time.Microsecond {
		require.True(t, p.Looks(now))
		p.Looked(now, 99*time.Microsecond, now%(200*time.Microsecond) == 0)
	}
}

// Where every look loses the core at once, rests grow to the longest, so that losses are few.
func TestPatienceRestsLongerWhereLooksKeepLosing(t *testing.T) {
	var p Patience
	var rests []time.Duration
	lostAt, rested := time.Duration(-1), true
	for now := time.Duration(0); now < 10*time.Second; now += 50 * time.Microsecond {
		if !p.Looks(now) {
			rested = true
			continue
		}
		if rested && lostAt >= 0 {
			rests = append(rests, now-lostAt)
		}
		now += 8 * time.Millisecond
		p.Looked(now, 8*time.Millisecond, false)
		lostAt, rested = now, false
		answered(&p, now, 100) // worth 1 ms, less than was lost
	}
	require.Equal(t, []time.Duration{shortestRest, 40 * time.Millisecond, 160 * time.Millisecond, 640 * time.Millisecond, longestRest}, rests[:5])
	require.Less(t, len(rests), 5+10)
	for _, r := range rests[5:] {
		require.Equal(t, longestRest, r)
	}
}

// A loss now and then, with looks between that are worth more than it took, is followed by the shortest rest: also after a time in which all was lost.
func TestPatienceRestsBrieflyAfterALossThatLooksHavePaidFor(t *testing.T) {
	var p Patience
	now := time.Duration(0)
	for range 20 {
		p.Looked(now, 8*time.Millisecond, true)
		now += longestRest
	}
	for range 5 {
		answered(&p, now, int(8*time.Millisecond/lookSaves))
		p.Looked(now, 8*time.Millisecond, true)
		require.False(t, p.Looks(now))
		require.False(t, p.Looks(now+shortestRest-1))
		require.True(t, p.Looks(now+shortestRest))
		now += 500 * time.Millisecond
	}
}

// Threads that lose their cores at the same time have lost once.
func TestPatienceIsShared(t *testing.T) {
	var p Patience
	var threads sync.WaitGroup
	for range 4 {
		threads.Go(func() {
			for now := time.Duration(0); now < time.Millisecond; now += time.Microsecond {
				p.Looks(now)
				p.Looked(now, 2*time.Microsecond, true)
			}
		})
	}
	threads.Wait()
	require.EqualValues(t, 4000, p.paid.Load())
	for range 4 {
		p.Looked(time.Second, 8*time.Millisecond, false)
	}
	require.True(t, p.Looks(time.Second+shortestRest))
}
