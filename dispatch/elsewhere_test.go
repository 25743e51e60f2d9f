package dispatch_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// One rank reduces where the others exchange: all learn it long before their timeout, from what they see of each other.
func TestF3_DifferentCollectivesAreNamed(t *testing.T) {
	run := func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 5 * time.Minute})
		r.Must(err)
		red, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Timeout: 5 * time.Minute})
		r.Must(err)
		n := int64(r.Size())
		v := memory.Host(make([]byte, 1<<10*n))
		w := memory.Host(make([]byte, 1<<10*n))
		start := time.Now()
		if r.Rank() == 1 {
			err = red.AllReduce(nil, v, v, kernels.Float32, kernels.Sum)
		} else {
			parts := make([]int64, n)
			for i := range parts {
				parts[i] = 1 << 10
			}
			err = x.Exchange(nil, w, v, &alltoallv.Splits{Send: parts, Recv: parts})
		}
		require.Less(r.T, time.Since(start), time.Minute)
		var pe *comm.PeerError
		if errors.Is(err, comm.ErrMismatch) || !errors.Is(err, comm.ErrOutOfStep) || !errors.As(err, &pe) || (pe.Rank == 1) == (r.Rank() == 1) {
			r.Must(fmt.Errorf("got %v", err))
		}
		call := "all-reduce"
		if r.Rank() == 1 {
			call = "alltoallv"
		}
		require.ErrorContains(r.T, err, "waits in "+call+", call 1 of that kind")
		r.Must(red.Close(r.Ctx))
		r.Must(x.Close(r.Ctx))
	}
	t.Parallel() // it mostly waits
	t.Run("threads", func(t *testing.T) { t.Parallel(); worldtest.Local(t, 3, 32<<20, run) })
	t.Run("processes", func(t *testing.T) { t.Parallel(); worldtest.Procs(t, 2, 32<<20, run) })
}
