package communicator_test

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/memory"
)

func TestMain(m *testing.M) {
	os.Setenv("UCX_TLS", "tcp,self")
	os.Exit(m.Run())
}

// Reductions and dispatches refuse a group on several hosts, on all ranks and at once.
func TestCommunicatorsThatDoNotSpanHosts(t *testing.T) {
	if r, err := ucx.Open(rails.Config{Size: 1}); errors.Is(err, ucx.ErrUnavailable) {
		t.Skip("needs UCX: ", err)
	} else if err == nil {
		require.NoError(t, r.Close())
	}
	gs, err := comm.Local(4, comm.LocalOptions{PerHost: 2})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for _, g := range gs {
		wg.Go(func() {
			h, err := memory.NewHeap(t.Context(), g, device.Host(), memory.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			_, reductions := allreduce.New(t.Context(), h, allreduce.Options{})
			_, dispatches := dispatch.New(t.Context(), h, dispatch.Options{Experts: 8, Hidden: 64, MaxTokens: 16, TopK: 2})
			for _, err := range []error{reductions, dispatches} {
				if !errors.Is(err, comm.ErrUnsupported) || !strings.Contains(err.Error(), "2 hosts") {
					t.Errorf("rank %d: %v", g.Rank(), err)
				}
			}
			if err := h.Close(t.Context()); err != nil {
				t.Error(err)
			}
			g.Close()
		})
	}
	wg.Wait()
}
