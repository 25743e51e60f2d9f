package observe_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/observe"
)

// lastCall is the last call of a rank.
func lastCall(rank int) (last observe.Call) {
	for _, c := range observe.Calls() {
		if c.Rank == rank {
			last = c
		}
	}
	return last
}

// A call in the recorder tells whom it has not heard of: while it waits, and when it has failed.
func TestACallTellsWhoHasNotBegunIt(t *testing.T) {
	var failed sync.WaitGroup
	failed.Add(2)
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		short, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 50 * time.Millisecond})
		r.Must(err)
		exchanges(r, x, 2)
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 2 {
			require.Eventually(r.T, func() bool { return len(lastCall(0).Absent) > 0 && len(lastCall(1).Absent) > 0 }, time.Minute, time.Millisecond)
			for rank := range 2 {
				c := lastCall(rank)
				require.Equal(r.T, []int{2}, c.Absent)
				require.Equal(r.T, []any{"started", uint64(3), "alltoallv"}, []any{c.State, c.Call, c.Operation})
			}
			require.Empty(r.T, lastCall(2).Absent, "it makes no call")
		}
		exchanges(r, x, 1)
		r.Must(r.Group.Barrier(r.Ctx))
		require.Equal(r.T, "finished", lastCall(r.Rank()).State)
		require.Empty(r.T, lastCall(r.Rank()).Absent, "all have come")
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 2 {
			failed.Wait()
			return
		}
		defer failed.Done()
		require.ErrorIs(r.T, short.Barrier(nil), comm.ErrTimeout)
		c := lastCall(r.Rank())
		require.Equal(r.T, "failed", c.State)
		require.Contains(r.T, c.Absent, 2) // and the third rank, where that came more than 50 ms later
		require.NotContains(r.T, c.Absent, r.Rank())
		require.Contains(r.T, stateOf(observe.Snapshot(), r.Rank()).LastFailed.Absent, 2)
	})
}

// A call tells its stream: by number on the host, by handle on a GPU, where 0 is one too.
func TestACallTellsItsStream(t *testing.T) {
	gpu := flight.New(7, 8)
	defer gpu.Add(&flight.Part{})()
	c := gpu.Recorder("world", 1<<20, []int{7}, "cuda:1")
	c.Begin("dispatch", "flat", 1, flight.NotStaged, flight.OnStream(0xbeef), false, nil, nil).Unseen()
	c.Begin("dispatch", "flat", 1, flight.NotStaged, flight.OnStream(0), false, nil, nil).Unseen()
	var on []string
	for _, k := range observe.Calls() {
		if k.Rank == 7 {
			on = append(on, k.Device+" "+k.Stream)
		}
	}
	require.Equal(t, []string{"cuda:1 0xbeef", "cuda:1 0x0"}, on)

	worldtest.Local(t, 1, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		exchanges(r, x, 1)
		require.Equal(r.T, []string{"host", ""}, []string{lastCall(0).Device, lastCall(0).Stream})
		var streams []*device.HostStream
		for range 2 {
			s := device.NewHostStream()
			streams = append(streams, s)
			r.Must(x.Barrier(s))
			require.Equal(r.T, fmt.Sprint(s.Number()), lastCall(0).Stream)
			r.Must(s.Close())
		}
		require.NotEqual(r.T, streams[0].Number(), streams[1].Number())
		r.Must(x.Close(r.Ctx))
	})
}
