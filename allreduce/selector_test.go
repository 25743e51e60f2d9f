package allreduce

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/curve"
	"github.com/switchyard-moe/switchyard/kernels"
)

// gpuReduction is a call of that many bytes of bfloat16 in equal slices.
func gpuReduction(c *kernels.ReduceBounds, coll kernels.Collective, bytes int64) *kernels.Reduction {
	r := &kernels.Reduction{Family: c, Call: kernels.ReduceCall{Collective: coll, DType: kernels.BFloat16, Count: bytes / 2}}
	for p := range int64(c.Size) + 1 {
		r.Bounds = append(r.Bounds, r.Call.Count*p/int64(c.Size))
	}
	return r
}

// onGPU selects by the package's table.
func onGPU(t *testing.T, c *kernels.ReduceBounds, forced string) *selector {
	t.Helper()
	table, err := builtinTable()
	require.NoError(t, err)
	return &selector{gpu: true, bounds: c, forced: forced, table: table.forWorld(c.Size, c.Blocks)}
}

// The selector takes the way that was fastest on 2 H200, or one that was at most a few percent slower.
func TestSelectionOnGPUsFollowsTheMeasurements(t *testing.T) {
	c := &kernels.ReduceBounds{Size: 2, OneShotBytes: 1 << 20, Slots: 4, SlotBytes: 32 << 10, Blocks: 128}
	s := onGPU(t, c, "")
	for _, m := range []struct {
		coll        kernels.Collective
		bytes       int64
		ways        []string
		least, most int // blocks
	}{
		{kernels.AllReduce, 0, []string{"one-shot packet"}, 1, 16},
		{kernels.AllReduce, 8 << 10, []string{"one-shot packet"}, 8, 16},
		{kernels.AllReduce, 128 << 10, []string{"one-shot packet"}, 32, 64},
		{kernels.AllReduce, 1 << 20, []string{"one-shot packet", "two-shot packet"}, 96, 128},
		{kernels.AllReduce, 2 << 20, []string{"two-shot packet"}, 96, 128},
		{kernels.AllReduce, 4 << 20, []string{"two-shot"}, 32, 128},
		{kernels.AllReduce, 128 << 20, []string{"two-shot push"}, 32, 128},
		{kernels.ReduceScatter, 8 << 10, []string{"one-shot packet"}, 2, 16},
		{kernels.ReduceScatter, 2 << 20, []string{"one-shot packet"}, 96, 128},
		{kernels.ReduceScatter, 128 << 20, []string{"two-shot", "two-shot push"}, 16, 128},
		{kernels.AllGather, 2 << 20, []string{"one-shot packet"}, 96, 128},
		{kernels.AllGather, 8 << 20, []string{"two-shot"}, gatherBlocks, 128},
		{kernels.AllGather, 128 << 20, []string{"two-shot"}, gatherBlocks, 128},
		{kernels.Broadcast, 8 << 10, []string{"one-shot packet"}, 8, 16},
		{kernels.Broadcast, 128 << 20, []string{"two-shot"}, gatherBlocks, 128},
	} {
		r := gpuReduction(c, m.coll, m.bytes)
		require.NoError(t, s.choose(r))
		require.Contains(t, m.ways, way{r.Algorithm, r.Packets, r.Pull, r.Push, r.Plan}.String(), "%v", r.Call)
		require.GreaterOrEqual(t, r.Blocks, m.least, "%v", r.Call)
		require.LessOrEqual(t, r.Blocks, m.most, "%v", r.Call)
		require.True(t, !r.Packets || r.Rate == 0, "%v", r.Call)
	}
	r := gpuReduction(c, kernels.AllGather, 128<<20)
	require.NoError(t, s.choose(r))
	require.Positive(t, r.Rate, "large gathers are held to what a link carries")
	require.Contains(t, s.explain(r).String(), "GB/s")
	few := *c
	few.Blocks = 16
	r = gpuReduction(&few, kernels.AllGather, 128<<20)
	require.NoError(t, onGPU(t, &few, "").choose(r))
	require.Equal(t, 16, r.Blocks, "MaxSMs bounds them")
}

// The times of a way grow with the bytes, and none is less than a link allows.
func TestTheTableIsWellFormed(t *testing.T) {
	table, err := builtinTable()
	require.NoError(t, err)
	require.NotEmpty(t, table.Origin)
	for k, points := range table.forWorld(2, 128) {
		for i := 1; i < len(points); i++ {
			require.GreaterOrEqual(t, points[i].US, points[i-1].US, "%+v: more bytes take less time", k)
		}
		last := points[len(points)-1]
		require.Less(t, math.Exp2(last.Size-last.US)/1e3, 400.0, "%+v: GB/s above the link's", k)
	}
}

func TestTablesAreReadAsTheyWereWritten(t *testing.T) {
	table, err := builtinTable()
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, table.Write(&b))
	again, err := ReadTable(&b)
	require.NoError(t, err)
	require.Equal(t, table, again)
	path := filepath.Join(t.TempDir(), "table.json")
	require.NoError(t, os.WriteFile(path, defaultTable, 0o600))
	again, err = LoadTable(path)
	require.NoError(t, err)
	require.Equal(t, curve.Digest(table), curve.Digest(again))
}

func TestBadTablesAreRefused(t *testing.T) {
	good := func() *Table {
		t := &Table{Device: "cuda"}
		for _, coll := range collectives {
			t.Curves = append(t.Curves, Curve{Collective: coll.String(), Algorithm: "two-shot", Ranks: 2, SMs: 16, Bytes: []int64{1, 9}, Microseconds: []float64{1, 2}})
		}
		return t
	}
	require.NoError(t, good().validate())
	for want, spoil := range map[string]func(*Table){
		"device":                     func(t *Table) { t.Device = "host" },
		"by \"three-shot\"":          func(t *Table) { t.Curves[0].Algorithm = "three-shot" },
		"by \"two-shot pull\"":       func(t *Table) { t.Curves[0].Algorithm = "two-shot pull" },
		"on 1 ranks":                 func(t *Table) { t.Curves[1].Ranks = 1 },
		"two curves":                 func(t *Table) { t.Curves = append(t.Curves, t.Curves[2]) },
		"2 sizes and 1 times":        func(t *Table) { t.Curves[0].Microseconds = []float64{1} },
		"-1 us for 9 bytes":          func(t *Table) { t.Curves[0].Microseconds[1] = -1 },
		"1 us for 0 bytes":           func(t *Table) { t.Curves[0].Bytes[0] = 0 },
		"does any reduce-scatter of": func(t *Table) { t.Curves[1].Collective, t.Curves[1].SMs = "all-reduce", 8 },
		"no curves":                  func(t *Table) { t.Curves = nil },
	} {
		table := good()
		spoil(table)
		err := table.validate()
		require.ErrorIs(t, err, ErrInvalid, want)
		require.ErrorContains(t, err, want)
	}
	_, err := ReadTable(strings.NewReader(`{"origin":"","device":"cuda","curves":[],"more":1}`))
	require.ErrorContains(t, err, "more")
	_, err = LoadTable(filepath.Join(t.TempDir(), "none.json"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestForcedAlgorithmsOnGPUs(t *testing.T) {
	c := &kernels.ReduceBounds{Size: 4, OneShotBytes: 1000, Slots: 4, SlotBytes: 4096, Blocks: 7}
	s := onGPU(t, c, "one-shot")
	r := gpuReduction(c, kernels.AllReduce, 1000)
	require.NoError(t, s.choose(r))
	require.True(t, r.Packets)
	require.Equal(t, 7, r.Blocks)
	require.ErrorIs(t, s.choose(gpuReduction(c, kernels.AllReduce, 1002)), ErrInvalid)
	require.NoError(t, s.choose(gpuReduction(c, kernels.ReduceScatter, 4000)))
	require.ErrorIs(t, s.choose(gpuReduction(c, kernels.ReduceScatter, 4008)), ErrInvalid)
	s.forced = "two-shot"
	r = gpuReduction(c, kernels.AllReduce, 4000)
	require.NoError(t, s.choose(r))
	require.True(t, r.Packets)
	r = gpuReduction(c, kernels.AllReduce, 4008)
	require.NoError(t, s.choose(r))
	require.False(t, r.Packets)
	alone := &kernels.ReduceBounds{Size: 1, OneShotBytes: 1000, Slots: 4, SlotBytes: 4096, Blocks: 7}
	s = onGPU(t, alone, "")
	r = gpuReduction(alone, kernels.AllReduce, 100)
	require.NoError(t, s.choose(r))
	require.False(t, r.Packets, "nobody to send packets to")
	require.Contains(t, s.explain(r).String(), "multiprocessors")
}
