package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// The test binary is also the program, which starts itself.
func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"moe": func([]string) int { main(); return 0 }})
	os.Exit(m.Run())
}

// program is the program in a process of its own.
type program struct{ *proctest.Process }

func start(t *testing.T, args ...string) program {
	t.Helper()
	return program{proctest.Start(t, proctest.Spec{Part: "moe", Args: args})}
}

// end waits for the program.
func (p program) end() (code int, out, errors string) {
	code = p.Wait()
	out, errors = p.Output()
	return code, out, errors
}

// poem writes a text to a file that a bigram model cannot know well: what follows depends on more than one byte.
func poem(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "poem.txt")
	line := "a rose is a rose is a rose, and the train on the rails is never the train of the rail\n"
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(line, 400)), 0o644))
	return path
}

// small is a model that trains in no time.
func small(args ...string) []string {
	return append([]string{"-layers", "2", "-hidden", "16", "-inner", "16", "-embed", "8", "-batch", "61"}, args...)
}

func TestExitCodeForWrongFlags(t *testing.T) {
	for args, want := range map[string]string{
		"-ranks 0":              "-ranks is 0, want at least 1",
		"-topk 9":               "-topk 9 is more than -experts 8",
		"-batch 3":              "-batch 3 is less than -ranks 4",
		"-rate -1":              "-rate is -1",
		"-steps many":           "invalid value",
		"-frobnicate":           "not defined",
		"go":                    `unexpected argument "go"`,
		"-check -json x":        "-check makes no report",
		"-json /no/such/folder": "output: open /no/such/folder",
	} {
		code, _, errs := start(t, strings.Fields(args)...).end()
		require.Equal(t, 2, code, args)
		require.Contains(t, errs, want, args)
	}
	code, out, _ := start(t, "-help").end()
	require.Equal(t, 0, code)
	require.Contains(t, out, "-experts")
	for _, line := range strings.Split(out, "\n") {
		require.LessOrEqual(t, len(strings.ReplaceAll(line, "\t", "        ")), 80, line)
	}
}

// Output that cannot be written is an error, on either stream.
func TestOutputThatCannotBeWritten(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no full device: ", err)
	}
	defer full.Close()
	text := poem(t)
	for _, args := range []string{"-help", "-steps 2", "-steps 2 -procs", "-check -steps 2", "-steps 2 -json -"} {
		p := program{proctest.Start(t, proctest.Spec{Part: "moe", Args: small(append(strings.Fields(args), "-text", text)...), Stdout: full})}
		code, _, errs := p.end()
		require.Equal(t, 1, code, "%s: %s", args, errs)
		require.Contains(t, errs, "moe: write /dev/stdout: no space left on device\n", args)
	}
}

func TestManyRanksSayWhatTheyCost(t *testing.T) {
	p := start(t, "-ranks", "300", "-steps", "2000", "-text", poem(t))
	begin := time.Now()
	p.Saw(`That many ranks on \d+ processors? cost about .* a step\n +and .* of memory: .* in all\n`)
	require.Less(t, time.Since(begin), time.Minute, "a fraction of a second where nothing else runs")
	// A signal ends the program before all ranks are made.
	begin = time.Now()
	p.Signal(syscall.SIGTERM)
	code, _, errs := p.end()
	require.Equal(t, 130, code)
	require.Equal(t, "moe: stopped before the first step: terminated signal received\n", errs)
	require.Less(t, time.Since(begin), time.Minute, "no time at all where nothing else runs")

	p = start(t, "-ranks", "1000000", "-batch", "1000000", "-text", poem(t))
	code, _, errs = p.end()
	require.Equal(t, 2, code)
	require.Regexp(t, `^moe: this run needs about .* TiB of memory and .* are free; the most, .* TiB, is for what ranks keep for each other: lower -ranks\n$`, errs)
}

func TestExitCodeForBadText(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "nothing"), 0o755))
	write("pictures/a.png", "\x89PNG\x00\x00"+strings.Repeat("x", text.Least))
	locked := write("locked", strings.Repeat("x", text.Least))
	require.NoError(t, os.Chmod(locked, 0))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "pipes"), 0o755))
	require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "pipes", "fifo"), 0o600))
	socket := filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(socket, 0o600))

	cases := map[string]string{
		filepath.Join(dir, "missing"):                           "no such file",
		write("empty", ""):                                      "is empty",
		filepath.Join(dir, "nothing"):                           "is empty",
		filepath.Join(dir, "pipes"):                             "pipes holds no regular file",
		filepath.Join(dir, "pictures"):                          "holds no text: 1 binary file",
		write("short", "a short text"):                          "is too short: 12 bytes, want at least",
		write("binary", "\x00"+strings.Repeat("x", text.Least)): "not text",
		socket: "it is a FIFO, not a file or a directory",
	}
	if os.Getuid() != 0 {
		cases[locked] = "permission denied"
	}
	for path, want := range cases {
		for _, more := range []string{"-check", "-procs"} {
			code, _, errs := start(t, "-text", path, more).end()
			require.Equal(t, 2, code, path)
			require.Contains(t, errs, want, path)
			require.Contains(t, errs, path)
			require.Equal(t, 1, strings.Count(errs, "\n"), "one line: %s", errs)
		}
	}
}

func TestReportAndJSON(t *testing.T) {
	for _, more := range [][]string{nil, {"-procs"}} {
		path := filepath.Join(t.TempDir(), "report.json")
		page := filepath.Join(t.TempDir(), "report.html")
		// 7 experts on 3 ranks, 61 tokens a step: nothing divides by anything.
		args := small("-text", poem(t), "-json", path, "-html", page, "-ranks", "3", "-experts", "7", "-steps", "400")
		code, out, errs := start(t, append(args, more...)...).end()
		require.Zero(t, code, errs)
		require.NotContains(t, out, "\r", "no bar without a terminal")
		require.Regexp(t, `step 400/400  loss [\d.]+  \d+ tokens/s  \d+% communication`, out)
		require.Contains(t, out, "beats the bigram model")
		require.Contains(t, out, "expert 6, rank 2")

		b, err := os.ReadFile(path)
		require.NoError(t, err)
		var fields map[string]any
		require.NoError(t, json.Unmarshal(b, &fields))
		var names []string
		for name := range fields {
			names = append(names, name)
		}
		require.ElementsMatch(t, []string{"version", "go", "config", "ranks", "steps", "elapsed_seconds", "stopped", "events", "change_steps", "losses",
			"text", "train_loss", "heldout_loss", "bigram_loss", "sample", "tokens_per_second", "comm_fraction", "expert_tokens", "expert_ranks",
			"traffic_bytes", "traffic_since_step", "phases_ms", "reduced_bytes"}, names)

		var r report.Report
		require.NoError(t, json.Unmarshal(b, &r))
		require.Equal(t, 3, r.Ranks)
		require.Equal(t, 400, r.Steps)
		require.Len(t, r.Losses, 400)
		require.Equal(t, 61, r.Config.Batch)
		require.Positive(t, r.ElapsedSeconds)
		require.Less(t, r.HeldoutLoss, 0.5*r.BigramLoss)
		require.InDelta(t, float64(r.TrainLoss), float64(r.HeldoutLoss), 0.1)
		require.Greater(t, r.TokensPerSecond, 0.0)
		require.True(t, r.CommFraction > 0 && r.CommFraction < 1, r.CommFraction)
		require.Len(t, r.ExpertTokens, 2)
		for _, layer := range r.ExpertTokens {
			require.Len(t, layer, 7)
			sum := int64(0)
			for _, n := range layer {
				require.Positive(t, n)
				sum += n
			}
			require.EqualValues(t, 400*61*2, sum, "every token visits 2 experts in a layer")
		}
		require.Len(t, r.ExpertRanks, 7)
		require.Len(t, r.TrafficBytes, 3)
		for _, row := range r.TrafficBytes {
			require.Len(t, row, 3)
			for _, n := range row {
				require.Positive(t, n)
			}
		}
		require.Len(t, r.PhasesMS, int(phase.Count))
		require.Contains(t, "a rose is a rose is a rose, and the train on the rails is never the train of the rail\n", strings.SplitAfter(r.Sample.Prompt, "\n")[0])
		require.Contains(t, r.Sample.Model, "a rose is a rose", "the model has learned the poem")

		html, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, picture := range []string{"loss by step", "expert 6, rank 2, layer 1", "from rank 2 to 1", "rank 2, combine"} {
			require.Contains(t, string(html), picture)
		}

		shares := regexp.MustCompile(`(\d+)% (communication|of the time in communication)`).FindAllStringSubmatch(out, -1)
		require.Equal(t, shares[len(shares)-2][1], shares[len(shares)-1][1], "the last of the progress and the report agree")
	}
}

func TestOneAndManyRanksAgree(t *testing.T) {
	text := poem(t)
	for _, args := range []string{
		"-ranks 4",
		"-ranks 3 -experts 8 -topk 3",
		"-ranks 5 -experts 3 -topk 1 -layers 1",
		"-ranks 2 -experts 5 -topk 5",
		"-ranks 2 -procs",
	} {
		code, out, errs := start(t, append(small("-check", "-text", text), strings.Fields(args)...)...).end()
		require.Zero(t, code, "%s: %s%s", args, out, errs)
		require.Contains(t, out, "check: ok", args)
		require.Contains(t, out, "in all 50 steps")
	}
}

func TestDisagreementIsAnError(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, compare(&out, []float64{2, 1}, []float64{2, 1.00009}, 4))
	err := compare(&out, []float64{2, 1}, []float64{2, 1.00011}, 4)
	require.ErrorIs(t, err, errCheck)
	require.ErrorContains(t, err, "in step 2")
	nan := append([]float64(nil), 0)
	nan[0] /= nan[0]
	require.ErrorIs(t, compare(&out, nan, nan, 4), errCheck)
	require.Contains(t, out.String(), "FAILED")
}

func TestCtrlCEndsAllRanksWithTheReport(t *testing.T) {
	for _, more := range [][]string{nil, {"-procs"}} {
		p := start(t, append(small("-text", poem(t), "-steps", "100000000"), more...)...)
		p.Saw(`step \d+/`)
		ranks := p.ranks(t)
		p.Signal(syscall.SIGINT)
		code, out, errs := p.end()
		require.Equal(t, 130, code, "%s%s", out, errs)
		require.Regexp(t, `^moe: stopped after step \d+ of 100000000: the report is of the steps until then\n$`, errs)
		require.Regexp(t, `\n\d+ of 100000000 steps of 61 tokens on 4 ranks`, out)
		require.Contains(t, out, "held-out")
		gone(t, ranks)
	}
}

func TestKilledRankEndsAllAndIsNamed(t *testing.T) {
	p := start(t, small("-text", poem(t), "-steps", "100000000", "-procs", "-ranks", "3")...)
	p.Saw(`step \d+/`)
	ranks := p.ranks(t)
	require.Len(t, ranks, 3)
	require.NoError(t, syscall.Kill(ranks[1], syscall.SIGKILL))
	code, _, errs := p.end()
	require.Equal(t, 1, code)
	require.Regexp(t, `moe: rank 1, process \d+: signal: killed`, errs)
	require.Regexp(t, `moe: rank 0: step \d+: .*rank 1.*peer lost`, errs)
	require.Regexp(t, `moe: rank 2: step \d+: .*rank 1.*peer lost`, errs)
	gone(t, ranks)
}

func TestRanksDoNotOutliveTheProgram(t *testing.T) {
	p := start(t, small("-text", poem(t), "-steps", "100000000", "-procs", "-ranks", "2")...)
	p.Saw(`step \d+/`)
	ranks := p.ranks(t)
	p.Signal(syscall.SIGKILL)
	gone(t, ranks)
}

// ranks are the processes that the program says it has started.
func (p program) ranks(t *testing.T) (pids []int) {
	out, errs := p.Output()
	for _, m := range regexp.MustCompile(`rank \d+ is process (\d+)`).FindAllStringSubmatch(out+errs, -1) {
		pid, err := strconv.Atoi(m[1])
		require.NoError(t, err)
		pids = append(pids, pid)
	}
	return pids
}

func gone(t *testing.T, pids []int) {
	for _, pid := range pids {
		require.Eventually(t, func() bool {
			stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
			return err != nil || bytes.Contains(stat, []byte(") Z ")) // dead, if not buried
		}, time.Minute, 5*time.Millisecond, "process %d", pid)
	}
}
