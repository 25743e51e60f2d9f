package dispatch_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// hostsOf are the ranks of each host, nil where there is one.
func hostsOf(r *rank) (hosts [][]int) {
	t := r.Group.Topology()
	for h := 0; t.Hosts > 1 && h < t.Hosts; h++ {
		var ranks []int
		for local := range t.PerHost {
			ranks = append(ranks, t.RankOf(h, local))
		}
		hosts = append(hosts, ranks)
	}
	return hosts
}

// Dispatches of all layouts and types cross hosts, with combines and gradients of all kinds, in halves, and with handles in flight.
func TestRandomWorldsAcrossHosts(t *testing.T) {
	for _, w := range worldtest.HostWorlds() {
		t.Run(fmt.Sprintf("%d of %d", w[0], w[1]), func(t *testing.T) {
			worldtest.Hosts(t, w[0], w[1], 8<<20, func(r *worldtest.Rank) { randomWorlds(&rank{Rank: r}, uint64(100*w[0]+w[1]), 8) })
		})
	}
}

// The same with a process for every rank, in network namespaces.
func TestRandomWorldsAcrossHostsOfProcesses(t *testing.T) {
	worldtest.EachHostWorld(t, 8<<20, func(r *worldtest.Rank) { randomWorlds(&rank{Rank: r}, 7, 4) })
}

// The other tests pass with their ranks on two hosts, too, where a call allocates. Masks and Shared are for one host.
func TestOtherTestsOnTwoHosts(t *testing.T) {
	worldtest.Again(t, "NoAllocation|RandomWorlds|Mask|Share|AnotherDispatcher|DifferentDispatchers")
}

// A rank of another host that does not come is named at the deadline.
func TestF1_DeadlineNamesARankOfAnotherHost(t *testing.T) {
	var waited sync.WaitGroup
	waited.Add(3)
	worldtest.Hosts(t, 4, 2, 4*segment, func(w *worldtest.Rank) {
		r := &rank{Rank: w}
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: 4, TopK: 1, Hidden: 8, MaxTokens: 4, Timeout: time.Second})
		require.NoError(r, err)
		x := memory.Host(make([]byte, 32))
		if r.Group.Rank() == 3 {
			waited.Wait() // a barrier before would be a mistake of its own
		} else {
			_, err = d.Dispatch(nil, tokens(x, []int32{3}, nil))
			waited.Done()
			require.ErrorContains(r, err, "rank 3")
			require.ErrorContains(r, err, "timed out")
		}
		require.NoError(r, r.Group.Barrier(r.Ctx))
		require.NoError(r, d.Close(r.Ctx))
		d, err = dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: 4, TopK: 1, Hidden: 8, MaxTokens: 4}) // in the same memory, in which nothing lands late
		require.NoError(r, err)
		h, err := d.Dispatch(nil, tokens(x, []int32{3}, nil))
		require.NoError(r, err)
		h.Release()
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Ranks that are lost in the middle of dispatches and combines are named on all hosts, and the hosts that are left go on.
func TestF2_ARankOfAnotherHostDies(t *testing.T) {
	worldtest.HostDies(t, 16*segment, func(r *worldtest.Rank) (func() error, func(context.Context) error) {
		const topK, hidden, count = 4, 512, 512
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: 8, TopK: topK, Hidden: hidden, MaxTokens: count})
		r.Must(err)
		x, y := make([]float32, count*hidden), make([]float32, count*hidden)
		for i := range x {
			x[i] = float32(i%1000 + 1000*r.Rank())
		}
		idx := make([]int32, topK*count)
		for i := range idx {
			idx[i] = int32(i % 8)
		}
		return func() error {
			clear(y)
			h, err := d.Dispatch(nil, tokens(numbers(x), idx, nil))
			if err == nil {
				err = d.Combine(nil, numbers(y), h.Rows(), h, plain)
				h.Release()
			}
			for i := range x {
				if want := topK * x[i]; err == nil && y[i] != want {
					err = fmt.Errorf("element %d of the sums is %v, want %v", i, y[i], want)
				}
			}
			return err
		}, d.Close
	})
}
