package double

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
)

func TestRail(t *testing.T) {
	for seed := range uint64(5) {
		railtest.Run(t, New(seed, time.Duration(seed)*200*time.Microsecond).Open)
	}
}

// Puts with different words overtake each other, so tests of what stands on rails see that.
func TestPutsOvertake(t *testing.T) {
	for seed := range uint64(100) {
		ends := railtest.Ends(t, 2, New(seed, 2*time.Millisecond).Open)
		require.NoError(t, ends[0].Put(1, 4096, nil, 0))
		require.NoError(t, ends[0].Put(1, 4096, nil, 8))
		for ends[1].Word(0) == 0 && ends[1].Word(8) == 0 {
			time.Sleep(20 * time.Microsecond)
		}
		if ends[1].Word(0) == 0 {
			return
		}
	}
	t.Fatal("no put has overtaken another")
}

func TestALostRankHearsAndSaysNothing(t *testing.T) {
	net := New(1, time.Millisecond)
	ends := railtest.Ends(t, 3, net.Open)
	for range 10 {
		require.NoError(t, ends[0].Put(1, 4096, bytes.Repeat([]byte{1}, 64), 0))
		require.NoError(t, ends[1].Put(2, 4096, nil, 0))
	}
	net.Lose(1)
	time.Sleep(5 * time.Millisecond)
	here, there := ends[1].Word(0), ends[2].Word(0)
	err := ends[0].Put(1, 4096, nil, 0)
	var pe *comm.PeerError
	require.True(t, errors.As(err, &pe) && pe.Rank == 1 && errors.Is(err, comm.ErrPeerLost), "%v", err)
	require.ErrorIs(t, ends[1].Put(2, 4096, nil, 0), comm.ErrPeerLost)
	require.NoError(t, ends[0].Put(2, 4096, nil, 64))
	railtest.Await(t, ends[2], 64, 1)
	require.Equal(t, []uint64{here, there}, []uint64{ends[1].Word(0), ends[2].Word(0)})
}
