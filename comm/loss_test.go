package comm_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/flight"
)

// A group whose ranks outlive a loss works in shared memory without the rank, and its next call fails with the loss on all of them.
func TestAGroupOutlivesALoss(t *testing.T) {
	groups, err := comm.Local(4, comm.LocalOptions{})
	require.NoError(t, err)
	lost := make(chan int, 3)
	for _, g := range groups[:3] {
		stop := g.OnLoss(func(rank int, ended bool) {
			if ended { // it is a goroutine
				rank = -1
			}
			lost <- rank
		})
		defer stop()
	}
	groups[3].Kill()
	for range 3 {
		require.Equal(t, 3, <-lost)
	}
	for _, g := range groups[:3] {
		require.NoError(t, g.Err())
	}
	require.ErrorIs(t, groups[1].Barrier(t.Context()), comm.ErrPeerLost)
	for _, g := range groups[:3] {
		<-g.Done()
		var lost *comm.PeerError
		require.ErrorAs(t, g.Err(), &lost)
		require.Equal(t, 3, lost.Rank)
		require.NoError(t, g.Close())
	}
}

// A rank that is lost while another one waits for it in a call, or has stopped to outlive losses, fails the group.
func TestALossFailsAGroupThatNeedsTheRank(t *testing.T) {
	for _, stops := range []bool{false, true} {
		groups, err := comm.Local(2, comm.LocalOptions{})
		require.NoError(t, err)
		stop := groups[0].OnLoss(func(int, bool) {})
		if stops {
			stop()
		}
		groups[1].Kill()
		require.ErrorIs(t, groups[0].Barrier(t.Context()), comm.ErrPeerLost)
		<-groups[0].Done()
		stop()
		require.NoError(t, groups[0].Close())
	}
}

// A group that has failed waits at its Close for those who want to see that, with all that it has told: once, and where it is the last of its
// rank's groups.
func TestTheEndOfAFailedGroupIsSeen(t *testing.T) {
	groups, err := comm.Local(2, comm.LocalOptions{})
	require.NoError(t, err)
	g := groups[0]
	rank, _ := g.Flight()
	var seen []int
	flight.OnEnd(time.Minute, func(r *flight.Rank) {
		if r == rank {
			require.Contains(t, flight.Ranks(), r)
			seen = append(seen, r.State(false).Last.Culprit)
		}
	})
	groups[1].Kill()
	<-g.Done()
	alone, err := g.Shrink(t.Context())
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.Empty(t, seen)
	require.NoError(t, alone.Close())
	require.NoError(t, alone.Close())
	require.Equal(t, []int{1}, seen)
	require.NotContains(t, flight.Ranks(), rank)
}
