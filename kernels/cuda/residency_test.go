package cuda

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Blocks that wait for each other must all run at once. The emulated driver has room for 2 blocks on each of 132 multiprocessors and counts
// a launch of more as a mistake. So that ranks which share a GPU fit on it together, each gets its part of that room.
func TestX6_LaunchesHaveNoMoreBlocksThanRunAtOnce(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	d, ctx := emulated.Device(t, 0)
	multiprocessors, err := d.Attribute(cuda.Multiprocessors)
	require.NoError(t, err)
	atOnce := 2 * multiprocessors
	memory, err := ctx.MemAlloc(1 << 20)
	require.NoError(t, err)
	defer func() { require.NoError(t, ctx.MemFree(memory)) }()
	engine := func(sharers int) *Engine {
		e, err := New(ctx, kernels.Space{Base: memory, Stride: 512 << 10, Size: 2}, sharers, func() error { return nil })
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, e.Close()) })
		return e
	}
	exchanges := &kernels.ExchangeBounds{Size: 2}
	engine(1).Defaults(exchanges)
	exchanges.Stripes = 2 * atOnce
	reductions := func(blocks int) *kernels.ReduceBounds {
		c := &kernels.ReduceBounds{Size: 2, Blocks: blocks}
		c.DefaultSlots(reduceSlots, reduceStaging, maxReduceChunk, 4*blocks)
		return c
	}
	dispatches := &kernels.DispatchBounds{
		Ranks: 2, Experts: 2, First: []int32{0, 1, 2}, TopK: 1, MaxTokens: 64, Hidden: 128, IndexBytes: 4,
		TokenType: kernels.BFloat16, RowType: kernels.BFloat16, SumType: kernels.BFloat16, Layout: kernels.FlatRows, Rows: 128, Align: 1,
		Handles: make([]kernels.DispatchHandle, 1),
	}

	t.Run("too many ranks share the GPU", func(t *testing.T) {
		e := engine(atOnce + 1)
		for _, f := range []kernels.Family{exchanges, reductions(1), dispatches} {
			_, err := e.Open(f, kernels.HeaderBytes)
			require.ErrorContains(t, err, fmt.Sprintf("%d ranks do not fit", atOnce+1), f.Family())
		}
	})
	t.Run("reductions", func(t *testing.T) {
		for _, sharers := range []int{1, 3} {
			e, fits := engine(sharers), atOnce/sharers
			_, err := e.Open(reductions(fits+1), kernels.HeaderBytes)
			require.ErrorContains(t, err, fmt.Sprintf("%d blocks, of which %d run at once", fits+1, fits))
			p, err := e.Open(reductions(fits), kernels.HeaderBytes)
			require.NoError(t, err)
			require.NoError(t, p.Close())
		}
	})
	t.Run("exchanges and dispatches", func(t *testing.T) {
		launches := func(f kernels.Family, ops ...kernels.Operation) {
			p, err := engine(1).Open(f, kernels.HeaderBytes)
			require.NoError(t, err)
			for _, op := range ops {
				require.NoError(t, p.Launch(nil, op))
				require.Zero(t, emulated.Mistakes.Of(t, d), "%s: more than %d blocks were launched", op.Operation(), atOnce)
			}
			require.NoError(t, p.Close())
		}
		many, bounded := 10*atOnce, kernels.Launched{Timeout: time.Second}
		exchange := func(bytes int64) *kernels.AllToAllV {
			c := []int64{bytes, bytes}
			return &kernels.AllToAllV{
				Routes: routes([][]int64{c, c}, 0, func() int64 { return 0 }), Launched: bounded,
				Schedule: kernels.Schedule{Blocks: many, CopyBlocks: many},
			}
		}
		launches(exchanges, exchange(16), exchange(64<<20))
		call := func(op kernels.DispatchOp) kernels.DispatchCall {
			return kernels.DispatchCall{Op: op, Phase: kernels.Both, Tokens: 64, Blocks: many, Launched: bounded}
		}
		launches(dispatches, &kernels.Dispatch{DispatchCall: call(kernels.OpDispatch)}, &kernels.Combine{DispatchCall: call(kernels.OpCombine)},
			&kernels.CombineBackward{DispatchCall: call(kernels.OpCombineBackward)})
	})
}

// Kernels that wait for peers have to run at the same time as NCCL's, whose 32 blocks take a multiprocessor each, whichever of the two a rank launches
// first. So a call whose caller sets no bound leaves 36 of the emulated GPU's 132 multiprocessors. Passes that wait for nobody may take them: partial sums
// of rows that no kernel of the caller is still making.
func TestX10_CallsLeaveMultiprocessorsToOthers(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	d, ctx := emulated.Device(t, 0)
	memory, err := ctx.MemAlloc(1 << 20)
	require.NoError(t, err)
	defer func() { require.NoError(t, ctx.MemFree(memory)) }()
	e, err := New(ctx, kernels.Space{Base: memory, Stride: 512 << 10, Size: 2}, 1, func() error { return nil })
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	const left = 132 - 36
	for _, layout := range []kernels.RowLayout{kernels.FlatRows, kernels.PaddedRows, kernels.SlabRows, kernels.TokenRows, kernels.RankRows} {
		for _, tokens := range []int{1, 16, 48, 49, 128, 1024, 1025, 4096, 20000} {
			for _, quantised := range []bool{false, true} {
				m := &kernels.DispatchBounds{
					Ranks: 2, Experts: 64, First: []int32{0, 32, 64}, TopK: 8, MaxTokens: tokens, Hidden: 7168, IndexBytes: 4, LowLatency: tokens <= 1024,
					TokenType: kernels.BFloat16, RowType: kernels.BFloat16, SumType: kernels.BFloat16, Layout: layout, Rows: 64, Align: 1, Capacity: 2 * int64(tokens),
					Handles: make([]kernels.DispatchHandle, 1),
				}
				if quantised {
					m.RowType, m.Scales = kernels.Float8E4M3, kernels.Scales{Block: 128}
				}
				p, err := e.Open(m, kernels.HeaderBytes)
				require.NoError(t, err)
				call := func(op kernels.DispatchOp) kernels.DispatchCall {
					return kernels.DispatchCall{Op: op, Phase: kernels.Both, Tokens: tokens, Launched: kernels.Launched{Timeout: time.Second}}
				}
				combine := &kernels.Combine{DispatchCall: call(kernels.OpCombine), Rows: kernels.Buffer{Reach: true}}
				if !layout.ByToken() {
					combine.Ready = kernels.Buffer{Ptr: memory, Bytes: 4 * 32}
				}
				for _, op := range []kernels.Operation{&kernels.Dispatch{DispatchCall: call(kernels.OpDispatch)}, combine} {
					before := emulated.Blocks.Of(t, d)
					require.NoError(t, p.Launch(nil, op))
					require.LessOrEqual(t, emulated.Blocks.Of(t, d)-before, left, "%s of %d tokens, %v, quantised %v", op.Operation(), tokens, layout, quantised)
				}
				require.NoError(t, p.Close())
			}
		}
	}
	reductions := &kernels.ReduceBounds{Size: 2}
	e.Defaults(reductions)
	require.LessOrEqual(t, reductions.Blocks, left)
	exchanges := &kernels.ExchangeBounds{Size: 2}
	e.Defaults(exchanges)
	require.LessOrEqual(t, exchanges.Stripes, left)
}

// DispatchCall.DefaultBlocks takes the place of a call's own default, below what calls leave to others. A bound of the caller goes before it,
// and kernels next to a pass or a copy have theirs as without it.
func TestDefaultBlocksOfADispatch(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	d, ctx := emulated.Device(t, 0)
	memory, err := ctx.MemAlloc(1 << 20)
	require.NoError(t, err)
	defer func() { require.NoError(t, ctx.MemFree(memory)) }()
	e, err := New(ctx, kernels.Space{Base: memory, Stride: 512 << 10, Size: 2}, 1, func() error { return nil })
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	blocks := func(layout kernels.RowLayout, tokens, bound, byDefault int, copied bool) (dispatch, combine int) {
		m := &kernels.DispatchBounds{
			Ranks: 2, Experts: 64, First: []int32{0, 32, 64}, TopK: 8, MaxTokens: tokens, Hidden: 7168, IndexBytes: 4, LowLatency: tokens <= 1024,
			TokenType: kernels.BFloat16, RowType: kernels.BFloat16, SumType: kernels.BFloat16, Layout: layout, Rows: 64, Align: 1,
			Handles: make([]kernels.DispatchHandle, 1),
		}
		l, err := e.Layout(m)
		require.NoError(t, err)
		require.Equal(t, tokens <= 1024, l.LowLatency)
		p, err := e.Open(m, kernels.HeaderBytes)
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Close()) }()
		launch := func(op kernels.Operation) int {
			before := emulated.Blocks.Of(t, d)
			require.NoError(t, p.Launch(nil, op))
			return int(emulated.Blocks.Of(t, d) - before)
		}
		call := func(op kernels.DispatchOp) kernels.DispatchCall {
			return kernels.DispatchCall{Op: op, Phase: kernels.Both, Tokens: tokens, Blocks: bound, DefaultBlocks: byDefault, Launched: kernels.Launched{Timeout: time.Second}}
		}
		there := &kernels.Dispatch{DispatchCall: call(kernels.OpDispatch)}
		if copied {
			there.Into = &kernels.Results{}
		}
		return launch(there), launch(&kernels.Combine{DispatchCall: call(kernels.OpCombine), Rows: kernels.Buffer{Reach: true}})
	}
	for _, c := range []struct {
		layout                                   kernels.RowLayout
		tokens, bound, byDefault, there, andBack int
	}{
		{kernels.RankRows, 16, 0, 0, 64, 64},
		{kernels.RankRows, 16, 0, 8, 8, 8},
		{kernels.RankRows, 16, 0, 132, 96, 96},
		{kernels.RankRows, 16, 24, 8, 24, 24},
		{kernels.SlabRows, 128, 0, 0, 96, 96},
		{kernels.SlabRows, 128, 0, 40, 40, 40},
		{kernels.RankRows, 4096, 0, 0, 24, 24},
		{kernels.TokenRows, 4096, 0, 16, 16, 16},
		{kernels.TokenRows, 4096, 0, 48, 32, 48}, // no more than 32 send faster
		{kernels.TokenRows, 4096, 20, 16, 20, 20},
	} {
		there, andBack := blocks(c.layout, c.tokens, c.bound, c.byDefault, false)
		require.Equal(t, []int{c.there, c.andBack}, []int{there, andBack}, "%+v", c)
	}
	for layout, copied := range map[kernels.RowLayout]bool{kernels.FlatRows: false, kernels.TokenRows: true} {
		without, _ := blocks(layout, 4096, 0, 0, copied)
		with, _ := blocks(layout, 4096, 0, 8, copied)
		require.Equal(t, without, with, "%v", layout)
	}
}
