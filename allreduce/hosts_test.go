package allreduce_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/plans"
)

// Calls of all kinds cross hosts.
func TestR2_AcrossHosts(t *testing.T) {
	for _, w := range worldtest.HostWorlds() {
		t.Run(fmt.Sprintf("%d of %d", w[0], w[1]), func(t *testing.T) {
			worldtest.Hosts(t, w[0], w[1], 96<<20, func(r *worldtest.Rank) {
				random(r, allreduce.Options{}, uint64(w[0]), 30, 20<<10)
				random(r, allreduce.Options{}, uint64(w[0]), 4, 2<<20) // in several pieces, at the places of the last
			})
		})
	}
}

// The same with a process for every rank, in network namespaces.
func TestR2_AcrossHostsOfProcesses(t *testing.T) {
	worldtest.EachHostWorld(t, 96<<20, func(r *worldtest.Rank) { random(r, allreduce.Options{}, 5, 6, 1<<20) })
}

// The other tests pass with their ranks on two hosts, too. There a call allocates, one way is for all calls, and plans are refused.
func TestOtherTestsOnTwoHosts(t *testing.T) {
	worldtest.Again(t, "Allocat|NothingSignals|ExplainAndForce|RandomWorlds|Multicast|Ring|Driver|Plans")
}

// Explain says that a call crosses hosts, and the deadline names a rank of another one.
func TestF1_DeadlineNamesARankOfAnotherHost(t *testing.T) {
	var waited sync.WaitGroup
	waited.Add(3)
	worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{Timeout: time.Second})
		d, err := x.Explain(kernels.AllReduce, 1000, f32)
		r.Must(err)
		require.Equal(r.T, 2, d.Hosts)
		require.Equal(r.T, "two-shot, with a partial result of each of 2 hosts", d.String())
		b := hostBuf(4000)
		if r.Rank() == 3 {
			waited.Wait() // a barrier before would be a mistake of its own
		} else {
			err = x.AllReduce(nil, b, b, f32, kernels.Sum)
			waited.Done()
			require.ErrorContains(r.T, err, "rank 3")
			require.ErrorContains(r.T, err, "timed out")
		}
		r.Barrier()
		r.Must(x.Close(r.Ctx))
		x = newReducer(r, allreduce.Options{}) // in the same memory, in which nothing lands late
		r.Must(x.AllReduce(nil, b, b, f32, kernels.Sum))
		r.Must(x.Close(r.Ctx))
	})
}

// Plans are refused on several hosts, on all ranks, and the next Reducer works.
func TestF3_PlansOnSeveralHostsAreRefused(t *testing.T) {
	worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
		_, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Plans: []*plan.Checked{checkedPlan(r, plans.RingAllReduce(4))}})
		require.ErrorIs(r.T, err, allreduce.ErrUnsupported)
		require.ErrorContains(r.T, err, "1 plans on several hosts")
		x, b := newReducer(r, allreduce.Options{}), hostBuf(4000)
		r.Must(x.AllReduce(nil, b, b, f32, kernels.Sum))
		r.Must(x.Close(r.Ctx))
	})
}

// Ranks that are lost in the middle of reductions are named on all hosts, and the hosts that are left go on.
func TestF2_ARankOfAnotherHostDies(t *testing.T) {
	worldtest.HostDies(t, 64<<20, func(r *worldtest.Rank) (func() error, func(context.Context) error) {
		x, n := newReducer(r, allreduce.Options{}), r.Size()
		v := make([]float32, 1<<16)
		b := memory.Host(shm.Bytes(v))
		return func() error {
			for i := range v {
				v[i] = float32(i%100 + r.Rank())
			}
			if err := x.AllReduce(nil, b, b, f32, kernels.Sum); err != nil {
				return err
			}
			for i := range v {
				if want := float32(i%100*n + n*(n-1)/2); v[i] != want {
					return fmt.Errorf("element %d is %v, want %v", i, v[i], want)
				}
			}
			return nil
		}, x.Close
	})
}
