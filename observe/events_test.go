package observe_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

// Two ranks join, grow their heap, take a third in, and one of them leaves: each call is an event of each rank, with the caller's context.
func TestGroupsAndHeapsTellTheirEvents(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "mine")
	var mu sync.Mutex
	seen := map[string][]observe.Event{}
	stop := observe.OnEvent(func(e observe.Event) {
		if e.Context.Value(key{}) == "mine" {
			mu.Lock()
			seen[e.Name] = append(seen[e.Name], e)
			mu.Unlock()
		}
	})
	began := time.Now()
	first, second := loopback.Addr(), loopback.Addr()
	var all, three sync.WaitGroup
	three.Add(3)
	shrunk := func(g *comm.Group) {
		small, err := g.Shrink(ctx, 2)
		if err == nil {
			err = small.Close()
		}
		require.NoError(t, err)
	}
	for rank := range 2 {
		all.Go(func() {
			g, err := comm.Join(ctx, comm.Config{Rank: rank, Size: 2, Addr: first, Name: "pair"})
			require.NoError(t, err)
			defer g.Close()
			h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 1 << 20})
			require.NoError(t, err)
			require.NoError(t, h.Grow(ctx, 1<<20))
			require.Error(t, h.Grow(ctx, -1))
			require.NoError(t, h.Close(ctx))
			next, err := g.Admit(ctx, 1, comm.Config{Addr: second, Name: "three", JoinTimeout: time.Minute})
			require.NoError(t, err)
			defer next.Close()
			three.Done()
			three.Wait() // a rank that is left out earlier fails to join
			shrunk(next)
		})
	}
	all.Go(func() {
		g, err := comm.Join(ctx, comm.Config{Late: true, Addr: second, Name: "three", JoinTimeout: time.Minute})
		require.NoError(t, err)
		defer g.Close()
		three.Done()
		<-g.Done() // it is left out
		_, err = g.Shrink(ctx)
		require.Error(t, err)
	})
	all.Wait()
	stop()
	_, err := comm.Join(ctx, comm.Config{Rank: 3, Size: 2})
	require.Error(t, err, "of which nobody hears any more")

	require.Len(t, seen["join"], 3)
	require.Len(t, seen["grow"], 4)
	require.Len(t, seen["admit"], 2)
	require.Len(t, seen["shrink"], 3)
	job := seen["admit"][0].Job
	for name, events := range seen {
		for _, e := range events {
			require.False(t, e.Began.Before(began) || e.Ended.Before(e.Began))
			switch {
			case name == "grow":
				require.Equal(t, []any{2, "pair", e.Bytes < 0}, []any{e.Size, e.Group, e.Err != nil})
			case name == "shrink" && e.Rank == 2:
				require.ErrorIs(t, e.Err, comm.ErrPeerLost)
				require.Equal(t, 3, e.Size, "of the group it was made with")
			case name == "shrink":
				require.Equal(t, []any{2, 2, job}, []any{e.Size, e.Epoch, e.Job})
			case name == "admit":
				require.Equal(t, []any{3, 1, job, nil}, []any{e.Size, e.Epoch, e.Job, e.Err})
			default:
				require.NoError(t, e.Err)
				require.Contains(t, []int{2, 3}, e.Size)
			}
		}
	}
}
