package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/proctest/netns"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
)

// needHosts skips a test where there are no namespaces, or no UCX.
func needHosts(t *testing.T) {
	t.Helper()
	net, err := netns.New(1)
	if errors.Is(err, netns.ErrUnavailable) {
		proctest.Missing(t, "netns", err)
	}
	require.NoError(t, err)
	net.Close()
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
}

// Ranks in two namespaces exchange in turn with a peer that speaks as they do, and the row says what crossed.
func TestHostsStandBesideAPeer(t *testing.T) {
	needHosts(t)
	out := output(t, "hosts", "-per-host", "1", "-sizes", "1KiB", "-blocks", "2", "-json", "-peer", `while read n calls; do echo 250.5; done`)
	var r hostsRow
	require.NoError(t, json.Unmarshal(out, &r), "%s", out)
	require.Equal(t, 250.5, *r.PeerUS)
	require.Len(t, r.Blocks, 2)
	require.Positive(t, r.US)
	require.True(t, r.Checked)
	require.GreaterOrEqual(t, r.SentBytes, int64(1024))
	require.Less(t, r.SentBytes, int64(4096))
}

// Dispatches cross hosts once a token, and the row says by how much what crosses exceeds the rows.
func TestHostsDispatch(t *testing.T) {
	needHosts(t)
	out := output(t, "hosts", "-dispatch", "-per-host", "2", "-sizes", "1KiB,2KiB", "-blocks", "1", "-json", "-peer", "")
	dec := json.NewDecoder(bytes.NewReader(out))
	for _, row := range []int64{1024, 2048} {
		var r hostsRow
		require.NoError(t, dec.Decode(&r), "%s", out)
		require.Equal(t, row, r.Bytes)
		require.Greater(t, r.Crossing, 0.99) // nearly every token goes to both hosts
		require.Less(t, r.Crossing, 1.3)
	}
}

// The error of a peer that ends is the error of the command, which leaves nothing behind.
func TestHostsNameAPeerThatEnds(t *testing.T) {
	needHosts(t)
	err := run(t.Context(), []string{"hosts", "-per-host", "1", "-sizes", "1KiB", "-blocks", "1", "-peer", "false"})
	require.ErrorContains(t, err, "the peer")
	require.ErrorContains(t, err, "rank 1: exit status 1")
}

// Reductions cross hosts, and a peer is asked for them by name.
func TestHostsReduce(t *testing.T) {
	needHosts(t)
	out := output(t, "hosts", "-reduce", "-per-host", "2", "-sizes", "4KiB,1MiB", "-blocks", "1", "-json", "-peer", `test {op} = hosts-reduce && while read n calls; do echo 250.5; done`)
	dec := json.NewDecoder(bytes.NewReader(out))
	for _, n := range []int64{4096, 1 << 20} {
		var r hostsRow
		require.NoError(t, dec.Decode(&r), "%s", out)
		require.Equal(t, n, r.Bytes)
		require.Equal(t, "reduction", r.Way)
		require.Equal(t, 250.5, *r.PeerUS)
		require.GreaterOrEqual(t, r.SentBytes, n) // the host's sums
	}
}
