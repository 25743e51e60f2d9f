package memory

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
)

// A heap lies on one host, and each of several may have its own.
func TestHeapOfOneHost(t *testing.T) {
	gs, err := comm.Local(4, comm.LocalOptions{PerHost: 2})
	require.NoError(t, err)
	errs := make(chan error, len(gs))
	for _, g := range gs {
		_, err := NewHeap(t.Context(), g, device.Host(), Options{})
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "2 hosts")
		go func() {
			home, err := g.Home()
			if err == nil {
				var h *Heap
				if h, err = NewHeap(t.Context(), home, device.Host(), Options{SegmentBytes: 1 << 20}); err == nil {
					err = h.Close(t.Context())
				}
			}
			errs <- err
		}()
	}
	for range gs {
		require.NoError(t, <-errs)
	}
	for _, g := range gs {
		require.NoError(t, g.Close())
	}
}
