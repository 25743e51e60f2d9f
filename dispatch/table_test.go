package dispatch_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// goodTable has curves of all kinds of calls.
func goodTable() *dispatch.Table {
	return &dispatch.Table{Origin: "a test", Device: "cuda", Curves: []dispatch.Curve{
		{LowLatency: true, Ranks: 2, SMs: 16, Tokens: []int64{16, 64, 256}, Microseconds: []float64{10, 30, 100}},
		{LowLatency: true, Ranks: 2, SMs: 48, Tokens: []int64{16, 64, 256}, Microseconds: []float64{9.9, 20, 70}},
		{LowLatency: true, Ranks: 2, SMs: 90, Tokens: []int64{16, 64, 256}, Microseconds: []float64{12, 20, 50}},
		{LowLatency: true, ByExpert: true, Ranks: 2, SMs: 40, Tokens: []int64{256}, Microseconds: []float64{50}},
		{Ranks: 2, SMs: 20, Tokens: []int64{1024, 4096}, Microseconds: []float64{100, 300}},
		{Ranks: 4, SMs: 28, Tokens: []int64{1024, 4096}, Microseconds: []float64{100, 300}},
	}}
}

func TestTablesAreReadAsTheyWereWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table.json")
	var b bytes.Buffer
	require.NoError(t, goodTable().Write(&b))
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	again, err := dispatch.LoadTable(path)
	require.NoError(t, err)
	require.Equal(t, goodTable(), again)
	_, err = dispatch.LoadTable(path + ".none")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = dispatch.ReadTable(strings.NewReader(`{"origin":"","device":"cuda","curves":[],"more":1}`))
	require.ErrorContains(t, err, "more")
	table, err := dispatch.BuiltinTable()
	require.NoError(t, err)
	require.NotEmpty(t, table.Origin)
}

func TestBadTablesAreRefused(t *testing.T) {
	for want, spoil := range map[string]func(*dispatch.Table){
		`device "host"`:              func(t *dispatch.Table) { t.Device = "host" },
		"no curves":                  func(t *dispatch.Table) { t.Curves = nil },
		"of 1 ranks":                 func(t *dispatch.Table) { t.Curves[5].Ranks = 1 },
		"with 0 multiprocessors":     func(t *dispatch.Table) { t.Curves[5].SMs = 0 },
		"by expert without low":      func(t *dispatch.Table) { t.Curves[3].LowLatency = false },
		"two curves of low latency":  func(t *dispatch.Table) { t.Curves[1].SMs = 16 },
		"two curves of rows":         func(t *dispatch.Table) { t.Curves[5] = t.Curves[4] },
		"2 sizes and 1 times":        func(t *dispatch.Table) { t.Curves[4].Microseconds = []float64{1} },
		"by expert on 2 ranks":       func(t *dispatch.Table) { t.Curves[3].Tokens = nil },
		"-1 us for 4096 tokens":      func(t *dispatch.Table) { t.Curves[4].Microseconds[1] = -1 },
		"100 us for 0 tokens":        func(t *dispatch.Table) { t.Curves[4].Tokens[0] = 0 },
		"300 us for 1024 tokens at ": func(t *dispatch.Table) { t.Curves[4].Tokens[1] = 1024 },
	} {
		table := goodTable()
		spoil(table)
		var b bytes.Buffer
		require.NoError(t, table.Write(&b))
		_, err := dispatch.ReadTable(&b)
		require.ErrorIs(t, err, dispatch.ErrInvalid, want)
		require.ErrorContains(t, err, want)
	}
}

// A call takes the number that was fastest with the nearest number of tokens, the smaller one within 2%, and the engine's choice beyond what was measured.
func TestTheTableSaysHowManyMultiprocessors(t *testing.T) {
	table := goodTable()
	low := table.Steps(true, false, 2)
	for tokens, want := range map[int]int{0: 16, 1: 16, 16: 16, 31: 16, 32: 48, 64: 48, 127: 48, 128: 90, 256: 90, 257: 0, 1024: 0} {
		require.Equal(t, want, low(tokens), "%d tokens", tokens)
	}
	require.Equal(t, 40, table.Steps(true, true, 2)(1))
	require.Equal(t, 20, table.Steps(false, false, 2)(4096))
	require.Equal(t, 28, table.Steps(false, false, 4)(4096))
	require.Zero(t, table.Steps(false, false, 4)(4097))
	require.Zero(t, table.Steps(false, false, 8)(4096), "another number of ranks")
	require.Zero(t, table.Steps(true, false, 4)(16))
	require.Zero(t, testing.AllocsPerRun(10, func() { low(200) }))
}

func TestHostsHaveNoTable(t *testing.T) {
	local(t, 2, func(r *rank) {
		_, err := dispatch.New(t.Context(), r.Heap, dispatch.Options{Experts: 2, TopK: 1, Hidden: 8, MaxTokens: 4, Table: goodTable()})
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		require.ErrorContains(r, err, "Options.Table is for GPUs")
	})
}

// Dispatches and combines take what the table says for this rank's tokens, unless the caller sets a bound. A copy that takes rows as they come
// leaves its dispatch as it is without a table, and so does CombineBackward.
func TestCallsTakeTheMultiprocessorsOfTheTable(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	bad := goodTable()
	bad.Curves[0].SMs = -1
	others := goodTable()
	others.Curves = others.Curves[5:] // of 4 ranks
	gpus(t, 2, func(r *rank) {
		gpu := r.Device.(*device.CUDADevice).Context().Device()
		blocks := func(call func() error) (n int) {
			for turn := range r.Size() { // the driver counts those of the process
				if turn == r.Rank.Rank() {
					before := emulated.Blocks.Of(r, gpu)
					r.Must(call())
					n = emulated.Blocks.Of(r, gpu) - before
				}
				r.Barrier()
			}
			return n
		}
		stream := r.Stream()
		const hidden = 64
		open := func(layout dispatch.Layout, most, sms int, table *dispatch.Table) *dispatch.Dispatcher {
			return r.dispatcher(dispatch.Options{
				Experts: 2, TopK: 1, Hidden: hidden, MaxTokens: most, DType: kernels.BFloat16, Layout: layout, LowLatency: true, MaxSMs: sms, Table: table,
			})
		}
		x := r.gpu.take(2 * hidden * 2048)
		batch := func(tokens int) dispatch.Tokens {
			return dispatch.Tokens{X: x.Slice(0, int64(tokens)*2*hidden), Experts: r.up(make([]byte, 4*tokens))}
		}
		for _, c := range []struct {
			layout            dispatch.Layout
			most, tokens, sms int
			table             *dispatch.Table
			want              []int // of a dispatch, a combine and a combine's backward
		}{
			{dispatch.RankPadded, 256, 64, 0, others, []int{96, 96, 24 + 1 + 96}},
			{dispatch.RankPadded, 256, 64, 0, goodTable(), []int{48, 48, 24 + 1 + 96}},
			{dispatch.RankPadded, 256, 16, 0, goodTable(), []int{16, 16, 24 + 1 + 96}},
			{dispatch.RankPadded, 256, 16, 30, goodTable(), []int{30, 30, 30 + 1 + 30}},
			{dispatch.Slab, 256, 64, 0, goodTable(), []int{40, 40, 24 + 1 + 132}},
			{dispatch.TokenMajor, 256, 64, 0, goodTable(), []int{48, 48, 24 + 1 + 96}},
			{dispatch.TokenMajor, 2048, 64, 0, goodTable(), []int{20, 20, 24 + 1 + 96}},
			{dispatch.RankPadded, 2048, 64, 0, goodTable(), []int{20, 20, 24 + 1 + 96}},
		} {
			d := open(c.layout, c.most, c.sms, c.table)
			var h *dispatch.Handle
			var got []int
			got = append(got, blocks(func() (err error) { h, err = d.Dispatch(stream, batch(c.tokens)); return err }))
			y := x.Slice(0, int64(c.tokens)*2*hidden)
			got = append(got, blocks(func() error { return d.Combine(stream, y, h.Rows(), h, dispatch.CombineOptions{}) }))
			got = append(got, blocks(func() error {
				return d.CombineBackward(stream, h.Rows(), memory.View{}, y, h.Rows(), h, dispatch.CombineOptions{Weighting: dispatch.Unweighted})
			}))
			require.Equal(r, c.want, got, "%+v", c)
			h.Release()
		}
		_, err := dispatch.New(t.Context(), r.Heap, dispatch.Options{Experts: 2, TopK: 1, Hidden: hidden, Table: bad})
		require.ErrorContains(r, err, "with -1 multiprocessors")
		to := dispatch.Result{}
		copied := func(table *dispatch.Table) int {
			d := open(dispatch.TokenMajor, 2048, 0, table)
			return blocks(func() error {
				h, _, err := d.DispatchTo(stream, batch(64), to)
				if err == nil {
					h.Release()
				}
				return err
			})
		}
		require.Equal(r, copied(others), copied(goodTable()))
	})
}
