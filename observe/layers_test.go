package observe_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
)

// sent dispatches tokens with these experts, one each, and releases them.
func sent(r *worldtest.Rank, d *dispatch.Dispatcher, hidden int, experts ...int32) error {
	x := memory.NewMatrix[float32](len(experts), hidden)
	h, err := d.Dispatch(nil, dispatch.Tokens{X: x.View(), Experts: memory.Wrap(experts)})
	if err == nil {
		h.Release()
	}
	return err
}

// A layer that has a name tells its tokens by expert, and dispatchers without one tell where theirs went.
func TestLayersTellTheirTokens(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		const hidden = 4
		o := dispatch.Options{Experts: 4, TopK: 1, Hidden: hidden, MaxTokens: 8}
		silent, err := dispatch.New(r.Ctx, r.Heap, o)
		r.Must(err)
		o.Layer, o.Layout, o.Capacity = "block 7", dispatch.Padded, 5
		named, err := dispatch.New(r.Ctx, r.Heap, o)
		r.Must(err)
		before := observe.Snapshot()
		r.Barrier()
		r.Must(sent(r, silent, hidden, 3))
		r.Must(sent(r, named, hidden, 0, 0, 1, 3)) // experts 0 and 1 are on rank 0
		r.Barrier()
		middle := observe.Snapshot()
		s := stateOf(middle, r.Rank())
		require.Len(r.T, s.Layers, 2)
		require.Equal(r.T, observe.Layer{Routed: []float64{0, 1}, Imbalance: 2}, s.Layers[0], "tokens by expert are told where asked for only")
		want := observe.Layer{Layer: "block 7", Tokens: []uint64{2, 1, 0, 1}, Owners: [][]int{{0}, {0}, {1}, {1}}, Routed: []float64{3, 1}, Imbalance: 1.5}
		require.Equal(r.T, want, s.Layers[1])
		require.Equal(r.T, []float64{3, 2}, s.Choices)
		// A row of 16 bytes, and on rank 1 those of experts 0 and 1 from tokens 0, 1 and 2.
		toOther := []uint64{2 * 16, 3 * 16}
		other := s.Peers[1-r.Rank()]
		require.Equal(r.T, []uint64{toOther[r.Rank()], toOther[1-r.Rank()]}, []uint64{other.SentBytes, other.ReceivedBytes})
		require.Zero(r.T, s.Peers[r.Rank()].SentBytes)
		want.Job, want.Tokens, want.Routed = s.Job, []uint64{4, 2, 0, 2}, []float64{6, 2}
		require.Equal(r.T, want, middle.Since(before).Layers[1])

		// The experts of ranks 0 and 1 change places: what came before stays where it went.
		r.Must(named.SetPlacement(r.Ctx, &dispatch.Placement{Ranks: [][]int{{1}, {1}, {0}, {0}}}))
		r.Must(sent(r, named, hidden, 0))
		var full *dispatch.OverflowError
		require.True(r.T, errors.As(sent(r, named, hidden, 2, 2, 2), &full)) // 6 for 5 rows
		r.Barrier()
		now := observe.Snapshot()
		l := stateOf(now, r.Rank()).Layers[1]
		require.Equal(r.T, []uint64{3, 1, 0, 1}, l.Tokens, "a dispatch that fails routes nothing")
		require.Equal(r.T, []float64{3, 2}, l.Routed)
		require.Equal(r.T, []uint64{1, 0}, l.Overflows)
		since := now.Since(middle).Layers[1]
		require.Equal(r.T, []any{[]uint64{2, 0, 0, 0}, []float64{0, 2}, 2.0, []uint64{1, 0}}, []any{since.Tokens, since.Routed, since.Imbalance, since.Overflows})

		if r.Rank() == 0 {
			var text, table strings.Builder
			r.Must(observe.WriteMetrics(&text, now, observe.OpenMetrics))
			for _, line := range []string{
				`switchyard_expert_tokens_total{rank="1",host="0",layer="block 7",expert="0"} 3`,
				`switchyard_routed_tokens_total{rank="1",host="0",layer="block 7",peer="1"} 2`,
				`switchyard_routed_tokens_total{rank="1",host="0",peer="1"} 1`,
				`switchyard_imbalance_ratio{rank="1",host="0",layer="block 7"} 1.2`,
				`switchyard_overflows_total{rank="1",host="0",layer="block 7",peer="0"} 1`,
			} {
				require.Contains(r.T, text.String(), "\n"+line+"\n")
			}
			require.NotRegexp(r.T, `expert_tokens_total{[^}]*host="0",expert`, text.String())
			now.Table(&table)
			require.Contains(r.T, table.String(), "\nlayer block 7: rank 0 gets 1.20 times the tokens of the mean rank; of 4 experts these get most: 0 (60%), 1 (20%), 3 (20%); 1 dispatches did not fit on rank 0\n")
		}
		r.Barrier()
		r.Must(named.Close(r.Ctx))
		gone := stateOf(observe.Snapshot(), r.Rank()).Layers
		require.Len(r.T, gone, 2)
		require.Equal(r.T, []uint64{3, 1, 0, 1}, gone[1].Tokens, "counters do not go back when a dispatcher is closed")
		bytes := stateOf(observe.Snapshot(), r.Rank()).Peers[1-r.Rank()]
		require.Equal(r.T, []uint64{48, 48}, []uint64{bytes.SentBytes, bytes.ReceivedBytes})
		r.Must(silent.Close(r.Ctx))
	})
}

// A heap that is closed before its dispatchers takes their counters along: who looks on later reads what they had told, not memory that is gone.
func TestAClosedHeapIsNotRead(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, MaxTokens: 8, Layer: "left open"})
		r.Must(err)
		r.Must(sent(r, d, 4, 0, 1, 1))
		r.Barrier()
		r.Must(r.Heap.Close(r.Ctx))
		r.Barrier()
		s := stateOf(observe.Snapshot(), r.Rank())
		require.Equal(r.T, []uint64{1, 2}, s.Layers[len(s.Layers)-1].Tokens)
		r.Barrier()            // the rank's part of the group tells until all have looked
		r.Must(d.Close(r.Ctx)) // its heap has taken the memory along
	})
}

// The name of a layer is one on all ranks, and a name.
func TestLayersHaveNames(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		o := dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, Layer: []string{"a", "b"}[r.Rank()]}
		_, err := dispatch.New(r.Ctx, r.Heap, o)
		require.ErrorContains(r.T, err, `Layer "a"`)
		o.Layer = "x\xff"
		_, err = dispatch.New(r.Ctx, r.Heap, o)
		require.ErrorIs(r.T, err, dispatch.ErrInvalid)
		o.Layer = strings.Repeat("x", 81)
		_, err = dispatch.New(r.Ctx, r.Heap, o)
		require.ErrorContains(r.T, err, "Options.Layer is")
	})
}

// stagedOf are the calls of an operation that went through staging.
func stagedOf(rank int, operation string) map[string]uint64 {
	all := map[string]uint64{}
	for _, o := range stateOf(observe.Snapshot(), rank).Operations {
		for reason, n := range o.Staged {
			if o.Operation == operation {
				all[reason] += n
			}
		}
	}
	return all
}

// Calls that go through staging are counted with the reason, and others are not.
func TestStagedCallsHaveReasons(t *testing.T) {
	worldtest.Local(t, 2, 64<<20, func(r *worldtest.Rank) {
		const large = 1 << 20
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		y, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Algorithm: "two-shot"})
		r.Must(err)
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, MaxTokens: 8})
		r.Must(err)
		in, out := memory.Host(make([]byte, 2*large)), memory.Host(make([]byte, 2*large))
		heap, err := r.Heap.Alloc(2 * large)
		r.Must(err)
		send := &alltoallv.Splits{Send: []int64{large, large}, Recv: []int64{large, large}}
		r.Must(x.Exchange(nil, heap.View(), in, send))
		r.Must(x.Exchange(nil, out, in, send))
		require.Empty(r.T, stagedOf(r.Rank(), "alltoallv"), "in place, or read where the sender has it")
		send.Limits.Algorithm = "pipelined"
		r.Must(x.Exchange(nil, out, in, send))
		require.Equal(r.T, map[string]uint64{"algorithm": 1}, stagedOf(r.Rank(), "alltoallv"))

		r.Must(y.AllReduce(nil, heap.View(), heap.View(), kernels.Float32, kernels.Sum))
		require.Empty(r.T, stagedOf(r.Rank(), "all-reduce"))
		r.Must(y.AllReduce(nil, heap.View(), in, kernels.Float32, kernels.Sum))
		r.Must(y.AllReduce(nil, out, heap.View(), kernels.Float32, kernels.Sum))
		require.Equal(r.T, map[string]uint64{"input": 1, "output": 1}, stagedOf(r.Rank(), "all-reduce"))

		combine := func(rows func(h *dispatch.Handle) memory.View) {
			h, err := d.Dispatch(nil, dispatch.Tokens{X: memory.NewMatrix[float32](2, 4).View(), Experts: memory.Wrap([]int32{0, 1})})
			r.Must(err)
			r.Must(d.Combine(nil, memory.NewMatrix[float32](2, 4).View(), rows(h), h, dispatch.CombineOptions{Release: true}))
		}
		combine(func(h *dispatch.Handle) memory.View { return h.Rows() })
		require.Empty(r.T, stagedOf(r.Rank(), "combine"))
		combine(func(*dispatch.Handle) memory.View { return memory.NewMatrix[float32](2, 4).View() })
		require.Equal(r.T, map[string]uint64{"input": 1}, stagedOf(r.Rank(), "combine"))

		r.Barrier()
		if r.Rank() == 0 {
			var text, table strings.Builder
			s := observe.Snapshot()
			r.Must(observe.WriteMetrics(&text, s, observe.PrometheusText))
			require.Contains(r.T, text.String(), `switchyard_staged_calls_total{rank="1",host="0",operation="combine",algorithm="flat",reason="input"} 1`+"\n")
			s.Table(&table)
			require.Contains(r.T, table.String(), "\n2 calls of combine (flat) went through staging: the input is not in the symmetric heap\n")
		}
		r.Barrier()
		r.Must(heap.Free())
		r.Must(x.Close(r.Ctx))
		r.Must(y.Close(r.Ctx))
		r.Must(d.Close(r.Ctx))
	})
}
