package stack_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

// Ranks that wait on the host for one that has left the group in good order, before or during their wait, learn its name long before
// the timeout; so do those that wait for them.
func TestF2_WhoHasLeftIsNamed(t *testing.T) {
	for _, during := range []bool{false, true} {
		ctx := t.Context()
		gs, err := comm.Local(3)
		require.NoError(t, err)
		errs := make([]error, len(gs))
		var left, waits, ranks sync.WaitGroup
		left.Add(1)
		waits.Add(2)
		for i, g := range gs {
			ranks.Go(func() {
				h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
				if err != nil {
					errs[i] = err
					return
				}
				x, err := alltoallv.New(ctx, h, alltoallv.Options{Timeout: 10 * time.Minute})
				if err != nil {
					errs[i] = err
					return
				}
				if i == 0 {
					if during {
						waits.Wait()
						time.Sleep(10 * time.Millisecond) // most often enough for their wait to begin
					}
					errs[i] = g.Close()
					left.Done()
					return
				}
				waits.Done()
				if !during {
					left.Wait()
				}
				errs[i] = x.Barrier(nil)
			})
		}
		ranks.Wait()
		require.NoError(t, errs[0])
		for r := 1; r < 3; r++ {
			var lost *comm.PeerError
			require.ErrorAs(t, errs[r], &lost)
			require.ErrorIs(t, errs[r], comm.ErrPeerLost)
			require.Equal(t, 0, lost.Rank)
			require.ErrorContains(t, errs[r], "it has closed its end of group world or ended its process")
			require.ErrorIs(t, gs[r].Err(), comm.ErrPeerLost)
			require.NoError(t, gs[r].Close())
		}
	}
}
