package cuda

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A copy takes rows while its dispatch runs where that was told of it, and tells of rows as they come: not of few rows, of which the host hears
// when all are there.
func TestACopyTakesRowsOfADispatchThatTellsOfThem(t *testing.T) {
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
	for _, c := range []struct {
		tokens        int
		taken, mapped bool
		want          bool
	}{{4096, true, true, true}, {128, true, true, false}, {4096, false, true, false}, {4096, true, false, false}} {
		m := &kernels.DispatchBounds{
			Ranks: 2, Experts: 64, First: []int32{0, 32, 64}, TopK: 8, MaxTokens: 4096, Hidden: 7168, IndexBytes: 4,
			TokenType: kernels.BFloat16, RowType: kernels.BFloat16, SumType: kernels.BFloat16, Layout: kernels.TokenRows, Rows: 8192, Align: 1,
			Handles: make([]kernels.DispatchHandle, 1),
		}
		if c.mapped {
			m.Handles[0].Mapped = kernels.Buffer{Ptr: memory, Bytes: 4 * int64(m.MappedWords())}
		}
		p, err := e.Open(m, kernels.HeaderBytes)
		require.NoError(t, err)
		before := emulated.Blocks.Of(t, d)
		require.NoError(t, p.Launch(nil, &kernels.Results{Taken: c.taken, Tokens: c.tokens, Launched: kernels.Launched{Timeout: time.Second}}))
		if c.want {
			require.EqualValues(t, dispatchTakeBesideBlocks, emulated.Blocks.Of(t, d)-before, "%+v", c)
		} else {
			require.EqualValues(t, 1, emulated.Blocks.Of(t, d)-before, "%+v: a copy of nothing", c)
		}
		require.NoError(t, p.Close())
	}
}
