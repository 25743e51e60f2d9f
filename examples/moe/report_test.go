package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
)

// made is a report of so many ranks, experts and layers.
func made(ranks, experts, layers int) *report {
	c := tiny()
	c.Ranks, c.Experts, c.Layers, c.Steps = ranks, experts, layers, 2000
	r := newReport(c)
	r.Steps, r.ElapsedSeconds, r.TrafficSince, r.ReducedBytes = 2000, 3600, 1, 123456789
	for i := range 2000 {
		r.Losses = append(r.Losses, 6/math.Sqrt(float64(i+1)))
	}
	r.TrainLoss, r.HeldoutLoss, r.BigramLoss = 1.5, 1.6, 2.7
	r.Sample = &sample{Prompt: "if a <b> & \"c\" {\n" + strings.Repeat("long ", 60) + "\n", Model: "</script>\n", Bigram: "xyz"}
	for range layers {
		layer := make([]int64, experts)
		for e := range layer {
			layer[e] = int64(1000 + e)
		}
		r.ExpertTokens = append(r.ExpertTokens, layer)
	}
	for e := range experts {
		r.ExpertRanks = append(r.ExpertRanks, e%ranks)
	}
	for range ranks {
		row := make([]int64, ranks)
		for p := range row {
			row[p] = 987_654_321_000
		}
		r.TrafficBytes = append(r.TrafficBytes, row)
		r.timeline = append(r.timeline, []span{{computingDense, 1e15, 1e15 + 2e6}, {combining, 1e15 + 2e6, 1e15 + 9e6}})
	}
	for _, name := range phaseNames {
		r.PhasesMS[name] = 123.456
	}
	return r
}

func TestReportFitsTheTerminal(t *testing.T) {
	for _, ranks := range []int{1, 4, 9, 10, 64, 1000} {
		for _, experts := range []int{1, 8, 33, 1000} {
			for _, layers := range []int{1, 2, 8, 100} {
				r := made(ranks, experts, layers)
				r.Events = []string{strings.Repeat("rank 1 was lost ", 20)}
				r.TrafficSince = 1500
				for _, width := range []int{40, 80, 200} {
					var out bytes.Buffer
					r.write(&out, width)
					lines := strings.Split(out.String(), "\n")
					require.Less(t, len(lines), 120)
					for _, line := range lines {
						if width >= 80 {
							require.LessOrEqual(t, utf8.RuneCountInString(line), width, "%d ranks, %d experts, %d layers: %q", ranks, experts, layers, line)
						}
					}
				}
			}
		}
	}
}

func TestBlocksOfTheTrafficAreSums(t *testing.T) {
	m := [][]int64{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}}
	require.Equal(t, m, sumBlocks(m, blocks(3, 5)))
	require.Equal(t, [][]int64{{1, 5}, {11, 28}}, sumBlocks(m, blocks(3, 2)))
	r := made(100, 8, 2)
	var out bytes.Buffer
	r.write(&out, 80)
	require.Contains(t, out.String(), "blocks of ranks are summed")
	require.Regexp(t, `to 0-\d+ .*to \d+-99\n`, out.String())
}

func TestPageIsWholeAndSelfContained(t *testing.T) {
	diverged := made(3, 8, 2)
	diverged.Steps, diverged.Losses, diverged.Error = 2, numbers{3, math.NaN()}, "the loss is NaN"
	diverged.Sample, diverged.TrafficBytes, diverged.timeline = nil, nil, nil
	one := made(1, 1, 1)
	one.Steps, one.Losses = 1, numbers{4}
	for name, r := range map[string]*report{"usual": made(4, 8, 2), "wide": made(1000, 1000, 100), "one": one, "diverged": diverged} {
		path := filepath.Join(t.TempDir(), "report.html")
		require.NoError(t, r.writeHTML(path), name)
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		text := string(b)
		require.Less(t, len(b), 3<<20, name)
		require.NotRegexp(t, `(?i)<script|<link|<img|https?://|url\(|@import|ZgotmplZ`, text, name)
		if name != "diverged" {
			require.NotContains(t, text, "NaN", name)
			require.GreaterOrEqual(t, strings.Count(text, "<svg"), 4, "%s: loss, load, traffic and a step", name)
			require.Contains(t, text, "if a &lt;b&gt; &amp;", name)
		}
		// Every element is closed, every number of a picture is one.
		body := text[strings.Index(text, "<body>"):strings.Index(text, "</html>")]
		for d := xml.NewDecoder(strings.NewReader(body)); ; {
			tok, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, name)
			if e, ok := tok.(xml.StartElement); ok {
				for _, a := range e.Attr {
					switch a.Name.Local {
					case "x", "y", "x1", "x2", "y1", "y2", "width", "height":
						require.Regexp(t, `^\d+(\.\d+)?(e-\d+)?$`, a.Value, "%s: %s %s", name, e.Name.Local, a.Name.Local)
					}
				}
			}
		}
	}
}

// What goes to standard output with -json - is JSON and nothing else, however the run ends.
func TestJSONOfStandardOutputAlwaysParses(t *testing.T) {
	text := poem(t)
	parse := func(out string) (r report) {
		require.NoError(t, json.Unmarshal([]byte(out), &r), out)
		require.Equal(t, switchyard.Version, r.Version)
		require.Equal(t, 61, r.Config.Batch)
		return r
	}
	for _, more := range []string{"", "-procs"} {
		args := func(a ...string) []string {
			return append(append(small("-json", "-"), strings.Fields(more)...), a...)
		}
		code, out, errs := start(t, args("-text", text, "-steps", "20")...).wait(t, patience)
		require.Zero(t, code, errs)
		r := parse(out)
		require.Len(t, r.Losses, 20)
		require.Contains(t, errs, "expert load", "people read the other stream")

		code, out, errs = start(t, args("-text", text, "-rate", "1e30", "-steps", "100")...).wait(t, patience)
		require.Equal(t, 1, code)
		r = parse(out)
		require.Contains(t, r.Error, "diverged")
		require.False(t, r.Stopped, "nobody asked for it")
		require.Regexp(t, `(?m)^step \d+/100  loss (NaN|[+-]Inf)  .*  stopped$`, errs)
		require.Contains(t, out, "null")
		require.Regexp(t, `(?m)^moe: step \d+: training has diverged: the loss is .*; try a lower -rate than 1e\+30$`, errs)
		require.Equal(t, 1, strings.Count(errs, "moe:"), errs)

		code, out, _ = start(t, args("-text", "/no/such/file")...).wait(t, patience)
		require.Equal(t, 2, code)
		require.Contains(t, parse(out).Error, "no such file")

		p := start(t, args("-text", text, "-steps", "100000000")...)
		p.wrote(t, `step \d+/`)
		require.NoError(t, p.Process.Signal(os.Interrupt))
		code, out, errs = p.wait(t, patience)
		require.Equal(t, 130, code)
		r = parse(out)
		require.True(t, r.Stopped)
		require.Empty(t, r.Error, errs)
		require.Len(t, r.Losses, r.Steps)
	}

	p := start(t, small("-json", "-", "-procs", "-text", text, "-steps", "100000000")...)
	p.wrote(t, `step \d+/`)
	_, errs := p.text()
	require.NoError(t, kill(regexp.MustCompile(`rank 0 is process (\d+)`).FindStringSubmatch(errs)[1]))
	code, out, _ := p.wait(t, patience)
	require.Equal(t, 1, code)
	require.Contains(t, parse(out).Error, "rank 0, process")
}

// Who sends a signal to a process and to its group, as timeout does, means one. A later one ends the program at once.
func TestASignalThatComesTwiceLeavesTheReport(t *testing.T) {
	text := poem(t)
	for _, more := range []string{"", "-procs"} {
		p := start(t, append(small("-json", "-", "-text", text, "-steps", "100000000"), strings.Fields(more)...)...)
		p.wrote(t, `step \d+/`)
		for range 10 {
			_ = p.Process.Signal(os.Interrupt) // it may have ended
			time.Sleep(2 * time.Millisecond)
		}
		code, out, errs := p.wait(t, patience)
		require.Equal(t, 130, code, errs)
		var r report
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%q", out)
		require.True(t, r.Stopped)
	}

	// The report of this takes seconds.
	p := start(t, "-text", text, "-batch", "4096", "-layers", "4", "-inner", "1024")
	p.seen(t, `step \d+/`)
	require.NoError(t, p.Process.Signal(os.Interrupt))
	require.Eventually(t, func() bool {
		return p.Process.Signal(os.Interrupt) != nil // it has ended
	}, patience, again/4)
	code, _, _ := p.wait(t, patience)
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
		code, out, errs := p.wait(t, patience)
		require.NotZero(t, code, args)
		require.Regexp(t, `^moe: `, errs, args)
		if want == "" {
			require.Empty(t, out)
			require.NoFileExists(t, filepath.Join(folder, "report.json"))
			continue
		}
		var r report
		require.NoError(t, json.Unmarshal([]byte(out), &r), "%s: %q", args, out)
		require.Contains(t, r.Error, want, args)
		require.Equal(t, switchyard.Version, r.Version)
		require.Contains(t, errs, want, args)
	}
}

func TestNumbersThatAreNone(t *testing.T) {
	b, err := json.Marshal(numbers{1.5, math.NaN(), math.Inf(1), math.Inf(-1)})
	require.NoError(t, err)
	require.Equal(t, "[1.5,null,null,null]", string(b))
}

func TestReadable(t *testing.T) {
	require.Equal(t, "    a·é\n··b·", readable([]byte("\ta\x1bé\n\xff\x00b\r")))
}

func TestPromptBeginsWithALine(t *testing.T) {
	text := []byte(strings.Repeat("0123456789 0123456789 0123456789 012345678\n", 100))
	p := prompt(text, 8)
	require.Equal(t, byte('0'), p[0])
	require.Equal(t, byte('\n'), p[len(p)-1])
	require.LessOrEqual(t, len(p), promptBytes)
	for _, context := range []int{1, 50, 1000} {
		for _, text := range [][]byte{text, bytes.Repeat([]byte("x"), 1001), bytes.Repeat([]byte("\n"), 1001)} {
			require.GreaterOrEqual(t, len(prompt(text, context)), context)
		}
	}
}

func TestFold(t *testing.T) {
	require.Equal(t, []string{"aaa bb", "cc", "", "ddddddd", "d"}, fold("aaa bb cc\n\ndddddddd", 7))
	require.Equal(t, []string{"a", "b"}, fold("ab", 0))
}
