package alltoallv_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

func twoExchangers(r *worldtest.Rank) (xs [2]*alltoallv.Exchanger) {
	for i := range xs {
		var err error
		xs[i], err = alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 5 * time.Minute})
		r.Must(err)
	}
	return xs
}

// Ranks that call two Exchangers in different orders wait for each other. Both learn it long before their timeout, also where one of
// them at once makes the call in which the other waits.
func TestF3_CallsInDifferentOrdersAreNamed(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, n := range []int64{8, 1 << 20} {
		t.Run(fmt.Sprintf("bytes=%d", n), func(t *testing.T) {
			t.Parallel()
			worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
				xs := twoExchangers(r)
				src, dst := memory.Host(make([]byte, 2*n)), memory.Host(make([]byte, 2*n))
				sp := &alltoallv.Splits{Send: []int64{n, n}, Recv: []int64{n, n}}
				r.Must(xs[0].Exchange(nil, dst, src, sp))
				time.Sleep(time.Duration(r.Rank()) * 20 * time.Millisecond)
				start := time.Now()
				err := xs[r.Rank()].Exchange(nil, dst, src, sp)
				require.Less(r.T, time.Since(start), time.Minute)
				var pe *comm.PeerError
				if !errors.Is(err, comm.ErrOutOfStep) || !errors.As(err, &pe) || pe.Rank != 1-r.Rank() {
					r.Must(fmt.Errorf("got %v", err))
				}
				require.ErrorContains(r.T, err, "which this rank has not made")
				for _, x := range xs { // what the peer sent for the call that it gave up may be there
					err := x.Exchange(nil, dst, src, sp)
					if !errors.Is(err, comm.ErrOutOfStep) || !errors.As(err, &pe) || pe.Rank != 1-r.Rank() {
						r.Must(fmt.Errorf("later got %v", err))
					}
					r.Must(x.Close(r.Ctx))
				}
			})
		})
	}
}

// The error of a barrier says once that it is one.
func TestF3_ABarrierOutOfStepIsNamedOnce(t *testing.T) {
	t.Parallel() // it mostly waits
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		xs := twoExchangers(r)
		err := xs[r.Rank()].Barrier(nil)
		require.ErrorIs(r.T, err, comm.ErrOutOfStep)
		require.Equal(r.T, 1, strings.Count(err.Error(), "barrier: "), "%v", err)
		for _, x := range xs {
			r.Must(x.Close(r.Ctx))
		}
	})
}

// A rank that makes a call of the control plane instead is named when half of the timeout is over, with that call.
func TestF3_ACallOfTheControlPlaneInsteadIsNamed(t *testing.T) {
	t.Parallel() // it mostly waits
	worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
		const timeout = 4 * time.Second
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: timeout})
		r.Must(err)
		one := []int64{1, 1, 1}
		exchange := func() error {
			return x.Exchange(nil, memory.Host(make([]byte, 3)), memory.Host(make([]byte, 3)), &alltoallv.Splits{Send: one, Recv: one})
		}
		r.Must(exchange())
		if r.Rank() == 1 {
			time.Sleep(10 * time.Millisecond)
			r.Must(r.Group.Barrier(r.Ctx)) // which the others come to later
			return
		}
		err = exchange()
		var pe *comm.PeerError
		if !errors.Is(err, comm.ErrOutOfStep) || !errors.As(err, &pe) || pe.Rank != 1 {
			r.Must(fmt.Errorf("got %v", err))
		}
		require.ErrorContains(r.T, err, "rank 1 waits in barrier, call ")
		require.ErrorContains(r.T, err, "of group world, which this rank has not made; this is alltoallv, call 2 of its kind")
		r.Must(r.Group.Barrier(r.Ctx))
	})
}

// A thread of a rank that is late for a call of the control plane holds up no exchange of another thread.
func TestAControlCallBesideExchangesIsNoMistake(t *testing.T) {
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 4 * time.Second})
		r.Must(err)
		met := make(chan error, 1)
		go func() {
			time.Sleep(time.Duration(r.Rank()) * 1400 * time.Millisecond)
			met <- r.Group.Barrier(r.Ctx)
		}()
		one := []int64{1, 1}
		for call := range 6 {
			if r.Rank() == call%2 {
				time.Sleep(200 * time.Millisecond)
			}
			r.Must(x.Exchange(nil, memory.Host(make([]byte, 2)), memory.Host(make([]byte, 2)), &alltoallv.Splits{Send: one, Recv: one}))
		}
		r.Must(<-met)
		r.Must(x.Close(r.Ctx))
	})
}

// Two threads of each rank may call two Exchangers side by side, in whatever order they get to it.
func TestCallsSideBySideAreNoMistake(t *testing.T) {
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		errs := make(chan error, 2)
		var xs [2]*alltoallv.Exchanger
		for i := range xs {
			var err error
			xs[i], err = alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
			r.Must(err)
		}
		for i, x := range xs {
			go func() {
				src, dst := memory.Host(make([]byte, 2<<10)), memory.Host(make([]byte, 2<<10))
				sp := &alltoallv.Splits{Send: []int64{1 << 10, 1 << 10}, Recv: []int64{1 << 10, 1 << 10}}
				for call := range 3 {
					if i == r.Rank() && call == 1 {
						time.Sleep(300 * time.Millisecond) // far below the 2 s after which it is held for a mistake
					}
					if err := x.Exchange(nil, dst, src, sp); err != nil {
						errs <- err
						return
					}
				}
				errs <- nil
			}()
		}
		for range xs {
			r.Must(<-errs)
		}
		for _, x := range xs {
			r.Must(x.Close(r.Ctx))
		}
	})
}
