package cuda

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
)

// In memory that other dispatchers have next, no peer writes there before its rank has begun the call, and none reads there when it has
// ended: the scenario "turns" of the emulation has the modes by which that holds.
func TestCallsLeaveSharedMemoryToOthers(t *testing.T) {
	for _, shared := range []*kernels.DispatchShared{nil, {Shape: 1}} {
		for layout := kernels.FlatRows; layout <= kernels.RankRows; layout++ {
			for _, release := range []bool{false, true} {
				x := newDispatches(&kernels.DispatchBounds{Layout: layout, Shared: shared}, 0)
				frees := x.frees(&kernels.Combine{Release: release})
				if shared != nil {
					require.Zero(t, frees)
					require.Zero(t, x.keeps(true))
					continue
				}
				require.Equal(t, !layout.ByToken() || release && layout == kernels.RankRows, frees == dispatchFree)
				require.EqualValues(t, dispatchKeep, x.keeps(true))
				require.Zero(t, x.keeps(false))
			}
		}
	}
}
