package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAllMeasuresAndSaysWhatIsMissing(t *testing.T) {
	folder := t.TempDir()
	out := output(t, "all", "-quick", "-only", "Reduce-scatter on the host", "-o", folder)
	require.Contains(t, string(out), "1 runs in "+filepath.Join(folder, "bench.html"))
	text, err := os.ReadFile(filepath.Join(folder, "bench.json"))
	require.NoError(t, err)
	var d document
	require.NoError(t, json.Unmarshal(text, &d))
	require.Equal(t, 1, d.Schema)
	require.NotZero(t, d.Machine.Cores)
	require.Len(t, d.Runs, 1)
	require.Len(t, d.Runs[0].Rows, 4) // 2 and 4 ranks, two sizes
	for _, r := range d.Runs[0].Rows {
		require.Equal(t, true, r["checked"])
		require.Positive(t, r["us"])
	}
	page, err := os.ReadFile(filepath.Join(folder, "bench.html"))
	require.NoError(t, err)
	require.Contains(t, string(page), "<h2>Reduce-scatter on the host, from Go</h2>")
	require.Contains(t, string(page), `<h3>ranks 4</h3>`)
	require.Contains(t, string(page), "<polyline")

	again := t.TempDir()
	output(t, "all", "-from", filepath.Join(folder, "bench.json"), "-o", again)
	same, err := os.ReadFile(filepath.Join(again, "bench.html"))
	require.NoError(t, err)
	require.Equal(t, string(page), string(same))

	require.Contains(t, string(output(t, "all", "-quick", "-only", "all_reduce on the host", "-python", "/nowhere/python", "-o", folder)),
		"not measured: all_reduce on the host next to gloo, from Python: fork/exec /nowhere/python: no such file or directory")
}

// A measurement ends in time, with all of its processes and a list of what was not done.
func TestAShortMeasurementSaysWhatWasNotDone(t *testing.T) {
	folder := t.TempDir()
	python, pid := filepath.Join(folder, "python"), filepath.Join(folder, "pid")
	require.NoError(t, os.WriteFile(python, []byte("#!/bin/sh\nsleep 600 &\necho $! >"+pid+"\nwait\n"), 0o755))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var d document
	d.measure(ctx, []benchmark{{title: "first", python: true}, {title: "second", python: true}}, python, folder)
	require.Empty(t, d.Runs)
	why := "not done after 3m0s: use -long, or -only"
	require.Equal(t, []lack{{"first", why}, {"second", why}}, d.Missing)
	if text, err := os.ReadFile(pid); err == nil { // it has come so far
		child, err := strconv.Atoi(strings.TrimSpace(string(text)))
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
			return err != nil || strings.Contains(string(stat), ") Z ")
		}, time.Minute, 10*time.Millisecond)
	}
}

// The drivers of test/peers run where a Python has what they measure, and are listed as missing elsewhere.
func TestDriversOfPeersRunWhereTheirLibraryIs(t *testing.T) {
	folder := t.TempDir()
	python := filepath.Join(folder, "python")
	const script = `#!/bin/sh
case "$*" in
"-c import deep_ep") exit 1 ;;
-c*) exit 0 ;;
esac
test -f "../../$1" || exit 2
echo "{\"us\": 2, \"command\": \"$*\"}"
`
	require.NoError(t, os.WriteFile(python, []byte(script), 0o755))
	var runs []benchmark
	for _, b := range benchmarks(2, normal) {
		if b.driver != "" {
			runs = append(runs, b)
		}
	}
	require.Len(t, runs, 4)
	for _, b := range benchmarks(1, normal) {
		require.Empty(t, b.driver, "a peer of several GPUs")
	}
	var d document
	d.measure(t.Context(), runs, python, folder)
	require.Equal(t, []lack{{"Dispatch and combine on GPUs next to DeepEP, from Python", python + " has no deep_ep"}}, d.Missing)
	require.Len(t, d.Runs, 3)
	require.Equal(t, "test/peers/messages.py --json", d.Runs[0].Rows[0]["command"])
	require.Equal(t, "test/peers/symmetric_memory.py --json", d.Runs[1].Rows[0]["command"])
	require.Equal(t, "test/peers/moe.py flashinfer --json", d.Runs[2].Rows[0]["command"])
}

func TestAPageOfOtherSchemaIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bench.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"schema": 2}`), 0o666))
	require.ErrorContains(t, run(t.Context(), []string{"all", "-from", path}), "schema 2, want 1")
	require.ErrorContains(t, run(t.Context(), []string{"all", "more"}), `unexpected argument "more"`)
}

// Rows that differ in more than their bytes are charts of their own, and sizes of one algorithm are a region.
func TestRowsBecomeCurves(t *testing.T) {
	row := func(ranks int, bytes, us float64, algorithm string, peer any) map[string]any {
		return map[string]any{"ranks": ranks, "op": "x", "bytes": bytes, "us": us, "algorithm": algorithm, "peer_us": peer, "peer": "python gloo.py"}
	}
	all := curves(section{Rows: []map[string]any{
		row(4, 1<<20, 80, "ring", 40.0), row(2, 1<<20, 90, "ring (forced)", nil), row(2, 1<<10, 10, "direct", 30.0), row(2, 1<<15, 20, "direct", 30.0),
	}})
	require.Len(t, all, 2)
	require.Equal(t, "ranks 4", all[0].Title)
	require.False(t, all[0].Chart())
	require.Equal(t, 0.5, all[0].Points[0].Times)
	c := all[1]
	require.Equal(t, "gloo", c.Peer)
	require.True(t, c.Chart())
	require.Equal(t, []string{"1 KiB", "32 KiB", "1 MiB"}, []string{c.Points[0].Size, c.Points[1].Size, c.Points[2].Size})
	regions := c.Regions()
	require.Len(t, regions, 2)
	require.Equal(t, "direct", regions[0].Text)
	require.Equal(t, "ring", regions[1].Text)
	require.InDelta(t, regions[1].X, regions[0].X+regions[0].Width+2, 1e-9)
	require.Greater(t, c.y(10), c.y(90), "longer is higher")
	require.Len(t, c.Sizes(), 3)
}
