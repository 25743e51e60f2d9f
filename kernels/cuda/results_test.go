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

// Rows of few tokens are written where the caller wants a copy of them, as many as there is room for, and the rest is copied: unless the kernel
// takes rows of masked ranks back, or rows are by expert, with padding that it may write.
func TestRowsOfFewTokensGoStraightToTheCaller(t *testing.T) {
	const wire = 32
	results := func(at int64) *kernels.Results {
		r := &kernels.Results{}
		r.Add(kernels.ResultPart{To: kernels.Buffer{Ptr: uintptr(at), Bytes: 5 * wire}, Row: wire, Rows: true})
		r.Add(kernels.ResultPart{To: kernels.Buffer{Ptr: 512, Bytes: 8}, Row: 8})
		return r
	}
	for name, c := range map[string]struct {
		m    kernels.DispatchBounds
		at   int64
		room int64 // 0: all is copied
	}{
		"without gaps":            {kernels.DispatchBounds{Layout: kernels.TokenRows, Rows: 8}, 4096, 5},
		"by rank":                 {kernels.DispatchBounds{Layout: kernels.RankRows, Rows: 8}, 4096, 5},
		"more room than rows":     {kernels.DispatchBounds{Layout: kernels.TokenRows, Rows: 4}, 4096, 4},
		"not at a multiple of 16": {kernels.DispatchBounds{Layout: kernels.TokenRows, Rows: 8}, 4100, 0},
		"with masks":              {kernels.DispatchBounds{Layout: kernels.RankRows, Rows: 8, Masks: true}, 4096, 0},
		"by expert":               {kernels.DispatchBounds{Layout: kernels.SlabRows, Rows: 8}, 4096, 0},
	} {
		a, r := &dispatchArgs{wireBytes: wire}, results(c.at)
		left := (&dispatchCall{dispatches: &dispatches{m: &c.m}}).straight(a, r)
		if c.room == 0 {
			require.Same(t, r, left, name)
			require.Zero(t, a.out, name)
			continue
		}
		require.Equal(t, 1, left.Count, name)
		require.Equal(t, r.Parts[1], left.Parts[0], name)
		require.EqualValues(t, c.at, a.out.rows, name)
		require.Equal(t, c.room, a.out.room, name)
		require.Equal(t, 2, r.Count, "the caller's are as they were")
	}
}

// Peers write rows of many tokens where the caller wants a copy of them, as many as there is room for, and the rest is copied: unless they do not
// reach that, or the tokens lie there.
func TestRowsOfManyTokensGoStraightToTheCaller(t *testing.T) {
	const wire = 32
	for name, c := range map[string]struct {
		layout kernels.RowLayout
		reach  bool
		at     int64
		rows   int64
		room   int64 // 0: all is copied
	}{
		"without gaps":            {kernels.TokenRows, true, 4096, 8, 5},
		"more room than rows":     {kernels.TokenRows, true, 4096, 4, 4},
		"not reached":             {kernels.TokenRows, false, 4096, 8, 0},
		"not at a multiple of 16": {kernels.TokenRows, true, 4100, 8, 0},
		"where tokens lie":        {kernels.TokenRows, true, 1024, 8, 0},
		"by rank":                 {kernels.RankRows, true, 4096, 8, 0},
	} {
		r := &kernels.Results{}
		r.Add(kernels.ResultPart{To: kernels.Buffer{Ptr: uintptr(c.at), Place: c.at - 64, Reach: c.reach, Bytes: 5 * wire}, Row: wire, Rows: true})
		r.Add(kernels.ResultPart{To: kernels.Buffer{Ptr: 512, Bytes: 8}, Row: 8})
		a, m := &dispatchArgs{wireBytes: wire}, &kernels.DispatchBounds{Layout: c.layout, Rows: c.rows}
		left, ok := (&dispatchCall{dispatches: &dispatches{m: m}}).inPlace(a, &kernels.Buffer{Ptr: 1000, Bytes: 100}, r)
		require.Equal(t, c.room != 0, ok, name)
		if !ok {
			require.Zero(t, a.send, name)
			require.Zero(t, a.out, name)
			continue
		}
		require.Equal(t, 1, left.Count, name)
		require.Equal(t, r.Parts[1], left.Parts[0], name)
		require.EqualValues(t, c.at-64, a.send.toRows, name)
		require.Equal(t, c.room, a.out.room, name)
		require.Equal(t, 2, r.Count, "the caller's are as they were")
	}
}
