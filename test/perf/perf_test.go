package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/dispatch"
)

// TestMain lets the test binary be a worker: runProcs starts the running executable again.
func TestMain(m *testing.M) {
	if worker, err := runWorker(context.Background()); worker {
		exit(err)
	}
	if runBusy() {
		return
	}
	if len(os.Args) > 1 && benches[os.Args[1]] != nil { // for `perf all`, which starts the running executable too
		exit(run(context.Background(), os.Args[1:]))
	}
	os.Exit(m.Run())
}

// output runs the command and returns what it prints.
func output(t *testing.T, args ...string) []byte {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	old := os.Stdout
	os.Stdout = w
	defer func() { os.Stdout = old }()
	done := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(r)
		done <- b
	}()
	err = run(t.Context(), args)
	w.Close()
	out := <-done
	require.NoError(t, err)
	return out
}

func TestEveryOperationPrintsItsFields(t *testing.T) {
	for _, args := range [][]string{
		{"alltoallv", "-sizes", "8KiB,100KiB", "-splits", "uniform,zipf"},
		{"alltoallv", "-sizes", "100KiB", "-splits", "zipf", "-staged", "-algorithm", "ring", "-procs"},
		{"allreduce", "-sizes", "8KiB,100KiB", "-op", "max"},
		{"allreduce", "-sizes", "0,6,100KiB", "-collective", "reduce-scatter", "-op", "avg", "-dtype", "bfloat16"},
		{"allreduce", "-sizes", "8KiB,100KiB", "-collective", "all-gather", "-staged"},
		{"dispatch", "-tokens", "64", "-hidden", "32"},
		{"dispatch", "-tokens", "64", "-hidden", "160", "-layout", "token-major", "-dtype", "bfloat16", "-quantize"},
	} {
		out := output(t, append(args, "-ranks", "2", "-iters", "3", "-json")...)
		lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
		require.NotEmpty(t, lines)
		for _, line := range lines {
			var fields map[string]any
			require.NoError(t, json.Unmarshal(line, &fields), "%s", line)
			for _, name := range []string{"op", "ranks", "procs", "device", "splits", "algorithm", "bytes_per_rank", "us", "us_mean", "us_p10", "us_p90", "gbps_link", "checked", "peer", "peer_us"} {
				require.Contains(t, fields, name)
			}
			require.Equal(t, args[0], fields["op"])
			require.Equal(t, true, fields["checked"])
			require.Positive(t, fields["us"])
		}
	}
}

func TestPeerStandsBesideOurs(t *testing.T) {
	out := output(t, "alltoallv", "-ranks", "2", "-sizes", "8KiB", "-splits", "uniform", "-iters", "3", "-json", "-rounds", "2",
		"-peer", "echo '# {ranks} {splits}'; echo 8192 {ranks}00.5 1.0")
	var r row
	require.NoError(t, json.Unmarshal(out, &r))
	require.NotNil(t, r.PeerUS)
	require.Equal(t, 200.5, *r.PeerUS)
}

// Busy loops end when their standard input does, which it also does when the command is killed.
func TestBusyLoopsRunBesideAndEnd(t *testing.T) {
	stop, err := startBusy(2)
	require.NoError(t, err)
	require.NoError(t, stop())
	out := output(t, "alltoallv", "-ranks", "2", "-sizes", "8KiB", "-splits", "uniform", "-iters", "3", "-json", "-busy", "1")
	var r row
	require.NoError(t, json.Unmarshal(out, &r))
	require.Equal(t, 1, r.Busy)
	require.Positive(t, r.Mean)
}

func TestBadArgumentsAreErrors(t *testing.T) {
	for _, args := range [][]string{nil, {"nothing"}, {"alltoallv", "-sizes", "8QiB"}, {"alltoallv", "-ranks", "0"}, {"alltoallv", "-busy", "-1"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-splits", "odd"},
		{"hosts", "-hosts", "1"}, {"hosts", "-per-host", "x"}, {"hosts", "-sizes", "8QiB"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-staged=twice"}, {"alltoallv", "-ranks", "2", "-device", "tpu"}, {"tune", "-sms", "0"}, {"tune", "-rates", "-1"}, {"tune", "-ranks", "1"},
		{"allreduce", "-ranks", "2", "-sizes", "8", "-op", "median"}, {"allreduce", "-sizes", "8", "-collective", "gossip"}, {"allreduce", "-sizes", "8", "-dtype", "int8"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-peer", "echo x y"}, {"alltoallv", "-ranks", "2", "-sizes", "8", "-peer", "true"}} {
		require.Error(t, run(t.Context(), args), "%v", args)
	}
}

func TestAWrongElementOfAReductionIsFound(t *testing.T) {
	for _, coll := range []string{"all-reduce", "reduce-scatter", "all-gather"} {
		d, err := parseReduction(config{Collective: coll, DType: "bfloat16", Reduce: "prod"}, 3)
		require.NoError(t, err)
		_, out := d.lengths(3 * 7000 * 2)
		b := make([]byte, out)
		switch {
		case !d.coll.Reduces():
			for p := range int64(3) {
				d.load(b[p*14000:][:14000], int(p))
			}
		case d.coll.Gathers():
			d.fill(b, 0, d.combined)
		default:
			d.fill(b, 2*7000, d.combined)
		}
		require.NoError(t, d.check(b, 2))
		for _, at := range []int{0, 10001, len(b) - 1} {
			b[at] ^= 1
			require.Error(t, d.check(b, 2), "%s, byte %d", coll, at)
			b[at] ^= 1
		}
	}
}

func TestSplitMatrix(t *testing.T) {
	m, err := splitMatrix("zipf", 3, 1101*rowBytes)
	require.NoError(t, err)
	require.Equal(t, []int64{600 * rowBytes, 300 * rowBytes, 200 * rowBytes}, m[1])
	m, err = splitMatrix("uniform", 4, 1000)
	require.NoError(t, err)
	require.Equal(t, []int64{250, 250, 250, 250}, m[3])
}

func TestSplitsOfAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "splits.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"1000":[[100,900],[300,600]],"64":[[0,64],[1,63]]}`), 0o600))
	var lines []row
	for line := range bytes.Lines(output(t, "alltoallv", "-ranks", "2", "-splits", "file:"+path, "-iters", "3", "-json", "-staged=both")) {
		var r row
		require.NoError(t, json.Unmarshal(line, &r))
		lines = append(lines, r)
	}
	require.Len(t, lines, 4)
	for i, want := range []struct {
		bytes   int64
		busiest float64
		splits  string
	}{{64, 64, ""}, {1000, 900, ""}, {64, 64, ", staged"}, {1000, 900, ", staged"}} {
		require.Equal(t, want.bytes, lines[i].BytesPerRank)
		require.Equal(t, "file:"+path+want.splits, lines[i].Splits)
		require.InDelta(t, want.busiest, lines[i].GBpsLink*lines[i].US*1e3, 1e-6)
	}
	require.Equal(t, int64(1500), busiest([][]int64{{5, 500, 0}, {0, 7, 0}, {0, 1000, 9}}), "what one rank receives")
	for text, says := range map[string]string{
		`{"8":[[1,2],[3]]}`: "row 1 has 1 splits", `{"8":[[1,-2],[3,4]]}`: "negative", `{"x":[]}`: `"x"`, `{}`: "no splits", `[`: "JSON",
		`{"9":[[1,2],[3,4]]}`: "no splits of 8 bytes", `{"8":[[8]]}`: "of 1 ranks",
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		require.ErrorContains(t, run(t.Context(), []string{"alltoallv", "-ranks", "2", "-sizes", "8", "-splits", "file:" + path}), says)
	}
}

func TestTuneWritesATable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table.json")
	out := output(t, "tune", "-ranks", "2,3", "-sizes", "8KiB,300KiB", "-iters", "3", "-o", path, "-origin", "a test")
	require.Contains(t, string(out), "tune, 3 ranks, device host")
	require.Contains(t, string(out), "ring, staged")
	table, err := alltoallv.LoadTable(path)
	require.NoError(t, err)
	require.Equal(t, "host", table.Device)
	require.Equal(t, "a test", table.Origin)
	require.Len(t, table.Curves, 2*6)
	for _, c := range table.Curves {
		if c.Algorithm == "packet" {
			require.Equal(t, []int64{8 << 10}, c.Bytes, "300 KiB are not packets")
			continue
		}
		require.Equal(t, []int64{8 << 10, 300 << 10}, c.Bytes)
	}
	require.Contains(t, string(output(t, "alltoallv", "-ranks", "2", "-sizes", "8KiB", "-iters", "3", "-table", path)), "2 ranks")
	require.ErrorIs(t, run(t.Context(), []string{"alltoallv", "-ranks", "2", "-sizes", "8KiB", "-table", path + ".none"}), os.ErrNotExist)
}

// What reductions on GPUs are tuned by, and what comes of it, without a GPU.
func TestTuneOfReductions(t *testing.T) {
	c := config{Op: "tune", Device: "cuda", EachSMs: []int{16, 64}, TuneRates: []float64{0, 355}}
	variants := reductionVariants(c, 4)
	require.Len(t, variants, 4+3*2*4)
	var rows []row
	for i, v := range variants {
		var b bytes.Buffer
		require.NoError(t, v.table().Write(&b))
		table, err := allreduce.ReadTable(&b)
		require.NoError(t, err, "%v by %s", v.d, v.algorithm)
		cheapest := slices.MinFunc(table.Curves, func(a, b allreduce.Curve) int { return cmp.Compare(a.Microseconds[0], b.Microseconds[0]) })
		require.Equal(t, []any{v.d.coll.String(), v.algorithm, v.sms, v.rate}, []any{cheapest.Collective, cheapest.Algorithm, cheapest.SMs, cheapest.Rate})
		for _, size := range []int64{8 << 10, 8 << 20} {
			rows = append(rows, row{Device: "cuda", Ranks: 4, Collective: v.d.coll.String(), Algorithm: v.algorithm, SMs: v.sms, Rate: v.rate, BytesPerRank: size, US: float64(i + 1)})
		}
	}
	path := filepath.Join(t.TempDir(), "table.json")
	require.NoError(t, writeTable(path, rows, "a test"))
	table, err := allreduce.LoadTable(path)
	require.NoError(t, err)
	require.Equal(t, "a test", table.Origin)
	require.Len(t, table.Curves, len(variants))
	require.ErrorContains(t, run(t.Context(), []string{"tune", "-of", "allreduce", "-ranks", "2"}), "on cuda")
	require.ErrorContains(t, run(t.Context(), []string{"tune", "-of", "p2p", "-ranks", "2"}), "none of allreduce")
}

// The same of dispatches: every variant's table takes its number of multiprocessors, and a table of all is one that a benchmark reads.
func TestTuneOfDispatches(t *testing.T) {
	cases, each := tunedCases(config{}), []int{16, 48}
	require.Len(t, cases, 7+7+4)
	var rows []row
	for _, k := range cases {
		for i, sms := range each {
			var b bytes.Buffer
			require.NoError(t, k.table(4, sms).Write(&b))
			_, err := dispatch.ReadTable(&b)
			require.NoError(t, err, k.name())
			rows = append(rows, row{Op: "tune", Device: "cuda", Ranks: 4, SMs: sms, US: float64(i + 1),
				MoE: &moeFigures{Layout: k.o.Layout.String(), LowLatency: k.o.LowLatency, Tokens: k.Tokens}})
		}
	}
	slices.Reverse(rows) // fewer tokens first
	path := filepath.Join(t.TempDir(), "table.json")
	require.NoError(t, writeTable(path, rows, "a test"))
	table, err := dispatch.LoadTable(path)
	require.NoError(t, err)
	require.Equal(t, "a test", table.Origin)
	require.Len(t, table.Curves, 3*len(each))
	few := tunedCases(config{EachTokens: []int{16, 2048, 1024, 16}})
	require.Len(t, few, 2+2+3)
	require.Equal(t, 1024, few[0].Tokens)
	timed, err := casesOf(config{Table: path, Only: "bf16, flat"})
	require.NoError(t, err)
	require.Equal(t, table, timed[0].o.Table)
	onHost := func(args ...string) error {
		return run(t.Context(), append(args, "-ranks", "2"))
	}
	require.ErrorContains(t, onHost("dispatch", "-table", path), "Options.Table is for GPUs")
	require.ErrorIs(t, onHost("dispatch", "-table", path+".none"), os.ErrNotExist)
	require.ErrorContains(t, onHost("tune", "-of", "dispatch"), "on cuda")
	require.ErrorContains(t, onHost("tune", "-of", "dispatch", "-device", "cuda", "-sms", "0"), "multiprocessors")
	require.ErrorContains(t, onHost("tune", "-of", "dispatch", "-device", "cuda", "-tokens", "8,x"), "tokens")
}

func TestPatternIsCheckedToTheLastByte(t *testing.T) {
	for _, n := range []int{0, 1, 255, 65536, 65537, 200001} {
		b := make([]byte, n)
		pattern(b, 3, 5)
		require.NoError(t, patternHolds(b, 3, 5))
		for _, i := range []int{0, n / 2, n - 1} {
			if i >= 0 && i < n {
				b[i] ^= 0x40
				require.ErrorContains(t, patternHolds(b, 3, 5), "byte ")
				b[i] ^= 0x40
			}
		}
	}
}
