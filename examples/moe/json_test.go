package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
)

// Standard output with -json - is JSON and nothing else, however the run ends.
func TestJSONOfStandardOutputAlwaysParses(t *testing.T) {
	text := poem(t)
	parse := func(out string) (r report.Report) {
		require.NoError(t, json.Unmarshal([]byte(out), &r), out)
		require.Equal(t, switchyard.Version, r.Version)
		require.Equal(t, 61, r.Config.Batch)
		return r
	}
	for _, more := range []string{"", "-procs"} {
		args := func(a ...string) []string {
			return append(append(small("-json", "-"), strings.Fields(more)...), a...)
		}
		code, out, errs := start(t, args("-text", text, "-steps", "20")...).end()
		require.Zero(t, code, errs)
		r := parse(out)
		require.Len(t, r.Losses, 20)
		require.Contains(t, errs, "expert load", "people read the other stream")

		code, out, errs = start(t, args("-text", text, "-rate", "1e30", "-steps", "100")...).end()
		require.Equal(t, 1, code)
		r = parse(out)
		require.Contains(t, r.Error, "diverged")
		require.False(t, r.Stopped, "nobody asked for it")
		require.Regexp(t, `(?m)^step \d+/100  loss (NaN|[+-]Inf)  .*  stopped$`, errs)
		require.Contains(t, out, "null")
		require.Regexp(t, `(?m)^moe: step \d+: training has diverged: the loss is .*; try a lower -rate than 1e\+30$`, errs)
		require.Equal(t, 1, strings.Count(errs, "moe:"), errs)

		code, out, _ = start(t, args("-text", "/no/such/file")...).end()
		require.Equal(t, 2, code)
		require.Contains(t, parse(out).Error, "no such file")

		p := start(t, args("-text", text, "-steps", "100000000")...)
		p.Wrote(`step \d+/`)
		p.Signal(syscall.SIGINT)
		code, out, errs = p.end()
		require.Equal(t, 130, code)
		r = parse(out)
		require.True(t, r.Stopped)
		require.Empty(t, r.Error, errs)
		require.Len(t, r.Losses, r.Steps)
	}

	p := start(t, small("-json", "-", "-procs", "-text", text, "-steps", "100000000")...)
	p.Wrote(`step \d+/`)
	require.NoError(t, syscall.Kill(p.ranks(t)[0], syscall.SIGKILL))
	code, out, _ := p.end()
	require.Equal(t, 1, code)
	require.Contains(t, parse(out).Error, "rank 0, process")
}

// The command timeout sends a signal to a process and to its group: both together count as one. A later signal ends the program at once.
func TestASignalThatComesTwiceLeavesTheReport(t *testing.T) {
	text := poem(t)
	for _, more := range []string{"", "-procs"} {
		p := start(t, append(small("-json", "-", "-text", text, "-steps", "100000000"), strings.Fields(more)...)...)
		p.Wrote(`step \d+/`)
		for range 10 {
			p.Signal(syscall.SIGINT)
			time.Sleep(2 * time.Millisecond)
		}
		code, out, errs := p.end()
		require.Equal(t, 130, code, errs)
		var r report.Report
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%q", out)
		require.True(t, r.Stopped)
	}

	// Nobody reads the pipe, so the report is not over until somebody does. SIGINT has no effect
	// again where a shell has started the tests in the background.
	pipe := filepath.Join(t.TempDir(), "report.json")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	reader, err := os.OpenFile(pipe, os.O_RDWR, 0) // the program tries at its start whether it can write
	require.NoError(t, err)
	p := start(t, small("-json", pipe, "-text", text, "-steps", "100000000")...)
	p.Saw(`step \d+/`)
	require.NoError(t, reader.Close())
	p.Signal(syscall.SIGTERM)
	ended := make(chan struct{})
	go func() {
		p.Wait()
		close(ended)
	}()
	for over := false; !over; {
		select {
		case <-ended:
			over = true
		case <-time.After(again / 4):
			p.Signal(syscall.SIGTERM)
		}
	}
	code, _, _ := p.end()
	require.Equal(t, -1, code, "ended by the signal")
}

// Flags that are refused are no exception.
func TestJSONOfRefusedFlagsParses(t *testing.T) {
	t.Setenv("RANK", "0") // for -join, to which that is not enough
	t.Setenv("WORLD_SIZE", "")
	folder := t.TempDir()
	for args, want := range map[string]string{
		"-ranks 0 -json -":                      "-ranks is 0, want at least 1",
		"-json=- -ranks 0 -procs":               "-ranks is 0, want at least 1",
		"-frobnicate --json -":                  "not defined",
		"go -json -":                            `unexpected argument "go"`,
		"-rate NaN -json -":                     "-rate is NaN",
		"-rate 1e999 -json -":                   "invalid value",
		"-check -json -":                        "-check makes no report",
		"-json - -html " + folder:               "is a directory",
		"-json - -ranks 1000000 -batch 1000000": "lower -ranks",
		"-json - -join -text " + poem(t):        "RANK is 0 but WORLD_SIZE is not set",
		"-json " + filepath.Join(folder, "report.json") + " -ranks 0": "",
	} {
		p := start(t, strings.Fields(args)...)
		code, out, errs := p.end()
		require.NotZero(t, code, args)
		require.Regexp(t, `^moe: `, errs, args)
		if want == "" {
			require.Empty(t, out)
			require.NoFileExists(t, filepath.Join(folder, "report.json"))
			continue
		}
		var r report.Report
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%s: %q", args, out)
		require.Contains(t, r.Error, want, args)
		require.Equal(t, switchyard.Version, r.Version)
		require.Contains(t, errs, want, args)
	}
}
