package comm_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
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
