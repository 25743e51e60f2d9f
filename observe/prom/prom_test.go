package prom_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
	"github.com/switchyard-moe/switchyard/observe/prom"
)

// pair runs two ranks of this process, which make 3 exchanges of 8 bytes and a dispatch of a layer. then runs on each before it ends.
func pair(t *testing.T, then func(rank int)) {
	groups, err := comm.Local(2)
	require.NoError(t, err)
	ctx := t.Context()
	var all sync.WaitGroup
	failed := make(chan error, 2)
	for rank, g := range groups {
		all.Go(func() {
			failed <- func() error {
				defer g.Close()
				h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
				if err != nil {
					return err
				}
				x, err := alltoallv.New(ctx, h, alltoallv.Options{})
				if err != nil {
					return err
				}
				d, err := dispatch.New(ctx, h, dispatch.Options{Experts: 2, TopK: 1, Hidden: 2, MaxTokens: 2, Layer: "block 1"})
				if err != nil {
					return err
				}
				splits := &alltoallv.Splits{Send: []int64{8, 8}, Recv: []int64{8, 8}}
				for range 3 {
					if err := x.Exchange(nil, memory.Host(make([]byte, 16)), memory.Host(make([]byte, 16)), splits); err != nil {
						return err
					}
				}
				sent, err := d.Dispatch(nil, dispatch.Tokens{X: memory.NewMatrix[float32](2, 2).View(), Experts: memory.Wrap([]int32{0, 1})})
				if err != nil {
					return err
				}
				sent.Release()
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				then(rank)
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				return errors.Join(d.Close(ctx), x.Close(ctx), h.Close(ctx))
			}()
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		require.NoError(t, err)
	}
}

// A registry gathers the collector's metrics, whose names, help and units pass Prometheus's linter.
func TestARegistryGathersThem(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(prom.New()))
	var calls, missing, lint, linted string
	pair(t, func(rank int) {
		if rank != 0 {
			return
		}
		compare := func(want string, names ...string) string {
			if err := testutil.GatherAndCompare(registry, strings.NewReader(want), names...); err != nil {
				return err.Error()
			}
			return ""
		}
		calls = compare(`
# HELP switchyard_expert_tokens_total Choices of this rank's tokens for an expert, in layers that have a name.
# TYPE switchyard_expert_tokens_total counter
switchyard_expert_tokens_total{expert="0",host="0",layer="block 1",rank="0"} 1
switchyard_expert_tokens_total{expert="1",host="0",layer="block 1",rank="0"} 1
switchyard_expert_tokens_total{expert="0",host="0",layer="block 1",rank="1"} 1
switchyard_expert_tokens_total{expert="1",host="0",layer="block 1",rank="1"} 1
# HELP switchyard_sent_bytes_total Bytes to a rank: of exchanges, as their splits say, and of rows of dispatches.
# TYPE switchyard_sent_bytes_total counter
switchyard_sent_bytes_total{host="0",peer="0",rank="1"} 32
switchyard_sent_bytes_total{host="0",peer="1",rank="0"} 32
`, "switchyard_expert_tokens_total", "switchyard_sent_bytes_total")
		problems, err := testutil.GatherAndLint(registry)
		if err != nil {
			lint = err.Error()
		}
		for _, p := range problems {
			lint += p.Metric + ": " + p.Text + "\n"
		}
		for _, f := range observe.Families(observe.Snapshot()) {
			name := f.Name
			if f.Kind == "counter" {
				name += "_total"
			}
			n, err := testutil.GatherAndCount(registry, name)
			if err != nil || n != len(f.Samples) {
				missing += name + " "
			}
		}
		linted = "yes"
	})
	require.Empty(t, calls)
	require.Empty(t, missing)
	require.Empty(t, lint)
	require.Equal(t, "yes", linted)
}

// The text that a registry serves has the same samples as that of observe.
func TestItSaysWhatObserveSays(t *testing.T) {
	s := observe.Merge(observe.State{Version: "1", Ranks: []observe.Rank{{Rank: 1, Size: 2, Host: 3, GPU: "cuda:1", Members: []int{0, 1}, Peers: make([]observe.Peer, 2),
		Operations: []observe.Operation{{Operation: "combine", Algorithm: "flat", Calls: 5, Timed: 5, Seconds: 0.25, Buckets: []uint64{1, 0, 4}, Staged: map[string]uint64{"input": 2}}},
		Fallbacks:  []observe.Fallback{{Operation: "all_reduce", Backend: "gloo", Reason: "reduction", Calls: 7}},
	}}})
	registry := prometheus.NewRegistry()
	registry.MustRegister(prom.Of(func() observe.State { return s }))
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP switchyard_call_duration_seconds Time from the start of a call on the host to its end.
# TYPE switchyard_call_duration_seconds histogram
switchyard_call_duration_seconds_bucket{algorithm="flat",gpu="cuda:1",host="3",operation="combine",rank="1",le="1e-06"} 1
switchyard_call_duration_seconds_bucket{algorithm="flat",gpu="cuda:1",host="3",operation="combine",rank="1",le="2e-06"} 1
switchyard_call_duration_seconds_bucket{algorithm="flat",gpu="cuda:1",host="3",operation="combine",rank="1",le="+Inf"} 5
switchyard_call_duration_seconds_sum{algorithm="flat",gpu="cuda:1",host="3",operation="combine",rank="1"} 0.25
switchyard_call_duration_seconds_count{algorithm="flat",gpu="cuda:1",host="3",operation="combine",rank="1"} 5
# HELP switchyard_staged_calls_total Calls whose messages went through staging, by reason.
# TYPE switchyard_staged_calls_total counter
switchyard_staged_calls_total{algorithm="flat",gpu="cuda:1",host="3",operation="combine",rank="1",reason="input"} 2
`), "switchyard_call_duration_seconds", "switchyard_staged_calls_total"))

	s.Ranks[0].Fallbacks[0].Backend = "\xff"
	families, err := registry.Gather()
	require.ErrorContains(t, err, "prom: metric switchyard_fallback_calls_total: ")
	require.Greater(t, len(families), 5, "the others are there")
}
