package observe_test

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
	"github.com/switchyard-moe/switchyard/stack"
)

// A group that has lost a rank and goes on without it says so: its epoch, its ranks, and how long it took until a call worked.
func TestAFaultHasAStory(t *testing.T) {
	var met sync.WaitGroup
	met.Add(2)
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() != 1 {
			met.Done()
		} else {
			met.Wait() // a rank that ends at once may take the barrier of the others along
			r.Group.Kill()
			return
		}
		<-r.Group.Done()
		s := stateOf(observe.Snapshot(), r.Rank())
		require.Equal(r.T, []any{0, []int{0, 1, 2}}, []any{s.Epoch, s.Members})
		require.Nil(r.T, s.LastFault.HealedSeconds)
		require.Equal(r.T, -1.0, s.LastFault.SilentSeconds, "ranks of one process have no connection")
		next, err := r.Group.Shrink(r.Ctx)
		r.Must(err)
		defer func() { _ = next.Close() }()
		k, err := stack.Open(r.Ctx, next, r.Heap.Device(), stack.Options{Exchanger: &alltoallv.Options{}})
		r.Must(err)
		sp := &alltoallv.Splits{Send: []int64{8, 8}, Recv: []int64{8, 8}}
		r.Must(k.Exchanger.Exchange(nil, memory.Host(make([]byte, 16)), memory.Host(make([]byte, 16)), sp))
		all := observe.Snapshot()
		s = stateOf(all, r.Rank())
		require.Equal(r.T, []any{1, []int{0, 2}}, []any{s.Epoch, s.Members})
		require.Len(r.T, s.Past, 1)
		require.Equal(r.T, []any{"lost", 1, "world", s.Job}, []any{s.Past[0].Kind, s.Past[0].Culprit, s.Past[0].Group, s.Past[0].Job})
		require.NotNil(r.T, s.Past[0].HealedSeconds)
		require.Equal(r.T, s.Past[0], *s.LastFault)
		require.Len(r.T, s.Recovery, 1)
		require.InDelta(r.T, *s.Past[0].HealedSeconds, s.Recovery[0].Seconds, 1e-9)
		h := s.Heaps[len(s.Heaps)-1]
		require.Equal(r.T, h.ReservedBytes-h.UsedBytes, h.FreeBytes)
		require.Positive(r.T, h.FreeBytes)

		var text, table strings.Builder
		r.Must(observe.WriteMetrics(&text, all, observe.OpenMetrics))
		for _, want := range []string{
			`switchyard_group_epoch{rank="0",host="0"} 1`, `switchyard_group_size{rank="2",host="0"} 2`, `# TYPE switchyard_fault_recovery_seconds histogram`,
			`switchyard_fault_recovery_seconds_bucket{rank="0",host="0",kind="lost",le="+Inf"} 1`, `switchyard_fault_recovery_seconds_count{rank="0",host="0",kind="lost"} 1`,
			`switchyard_heap_free_bytes{rank="0",host="0",device="host"} `,
		} {
			if r.Rank() == 0 || !strings.Contains(want, `rank="0"`) {
				require.Contains(r.T, text.String(), want)
			}
		}
		if all.Table(&table); r.Rank() == 0 {
			require.Regexp(r.T, `rank 1 was lost at [0-9:]+: .*; the group, epoch 1, went on with 2 ranks, and its first call ended [0-9.e-]+s later`, table.String())
			require.Contains(r.T, table.String(), "group world is in epoch 1, of 2 ranks\n")
		}
		b, err := json.Marshal(all)
		r.Must(err)
		require.Contains(r.T, string(b), `"healed_seconds":`)
		r.Must(next.Barrier(r.Ctx))
		r.Must(k.Close(r.Ctx))
	})
}

// Detection is a histogram too, and a fault of a group that this one came from is told with its group.
func TestWhatWentWrongBeforeIsTold(t *testing.T) {
	after := 0.8
	s := observe.Merge(observe.State{Ranks: []observe.Rank{{Rank: 0, Size: 4, Group: "workers", Job: "a", Epoch: 2, Members: []int{0, 1, 2, 3}, Peers: make([]observe.Peer, 4),
		Past:      []observe.Failure{{Kind: "lost", Culprit: 3, Group: "world", Error: "its connection ended", HealedSeconds: &after}},
		Detection: []observe.Spread{{Kind: "lost", Count: 2, Seconds: 0.5, Buckets: []uint64{1, 0, 1}}}}}})
	require.Empty(t, s.Findings, "it is over")
	var text, table strings.Builder
	s.Table(&table)
	require.Contains(t, table.String(), "group workers is in epoch 2, of 4 ranks; before, rank 3 of group world was lost at 00:00:00: its connection ended; "+
		"the group, epoch 2, went on with 4 ranks, and its first call ended 0.8s later\n")
	require.NoError(t, observe.WriteMetrics(&text, s, observe.OpenMetrics))
	require.Contains(t, text.String(), `switchyard_fault_detection_seconds_bucket{rank="0",host="0",kind="lost",le="0.002"} 1
switchyard_fault_detection_seconds_bucket{rank="0",host="0",kind="lost",le="+Inf"} 2
switchyard_fault_detection_seconds_count{rank="0",host="0",kind="lost"} 2
switchyard_fault_detection_seconds_sum{rank="0",host="0",kind="lost"} 0.5
`)
}
