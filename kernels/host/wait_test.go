package host

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A rank that waits says for whom, in which call and for what, again and again; at its deadline the error says as much.
func TestWaitsSayForWhom(t *testing.T) {
	w := newWorld(t, 2, kernels.Channels{Slots: 2, SlotBytes: 256, EagerBytes: 100, PacketBytes: 20}, 0)
	var log bytes.Buffer
	w.engines[0].space.Log = slog.New(slog.NewTextHandler(&log, nil))
	w.engines[0].tellEvery = 20 * time.Millisecond
	m := [][]int64{{0, 5}, {7, 0}}
	call := func(rank int, timeout time.Duration) error {
		ro := routes(m, rank)
		return w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(make([]byte, ro.SendBytes[1-rank]), -1),
			Dst: buffer(make([]byte, ro.RecvBytes[1-rank]), -1), Launched: kernels.Launched{Timeout: timeout}})
	}
	var ranks sync.WaitGroup
	ranks.Go(func() {
		time.Sleep(150 * time.Millisecond)
		if err := call(1, 10*time.Second); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, call(0, 10*time.Second))
	ranks.Wait()
	said := strings.Split(strings.TrimSpace(log.String()), "\n")
	require.GreaterOrEqual(t, len(said), 2, "again and again")
	require.Less(t, len(said), 10)
	for _, line := range said {
		require.Contains(t, line, `level=INFO msg=waiting rank=0 for=1 call="1, alltoallv (7 bytes from it and 5 to it)" waited=`)
		require.Contains(t, line, `timeout=10s seen="rank 1 has made 0 calls; this is call 1, alltoallv`)
	}

	err := call(0, 30*time.Millisecond)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "alltoallv: rank 1, epoch 2: timed out after 30ms (7 bytes from it and 5 to it): rank 1 has made 1 calls; this is call 2, alltoallv")
}
