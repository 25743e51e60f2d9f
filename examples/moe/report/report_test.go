package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
)

// made is a report of a run with the given ranks, experts and layers.
func made(ranks, experts, layers int) *Report {
	c := config.Defaults()
	c.Ranks, c.Experts, c.Layers, c.Steps = ranks, experts, layers, 2000
	r := New(c)
	r.Steps, r.ElapsedSeconds, r.TrafficSince, r.ReducedBytes = 2000, 3600, 1, 123456789
	for i := range 2000 {
		r.Losses = append(r.Losses, 6/math.Sqrt(float64(i+1)))
	}
	r.TrainLoss, r.HeldoutLoss, r.BigramLoss = 1.5, 1.6, 2.7
	r.Sample = &text.Sample{Prompt: "if a <b> & \"c\" {\n" + strings.Repeat("long ", 60) + "\n", Model: "</script>\n", Bigram: "xyz"}
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
		r.Timeline = append(r.Timeline, []phase.Span{{Phase: phase.Dense, Begin: 1e15, End: 1e15 + 2e6}, {Phase: phase.Combine, Begin: 1e15 + 2e6, End: 1e15 + 9e6}})
	}
	for _, name := range phase.Names {
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
					r.Write(&out, width)
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
	r.Write(&out, 80)
	require.Contains(t, out.String(), "blocks of ranks are summed")
	require.Regexp(t, `to 0-\d+ .*to \d+-99\n`, out.String())
}

func TestPageIsWholeAndSelfContained(t *testing.T) {
	diverged := made(3, 8, 2)
	diverged.Steps, diverged.Losses, diverged.Error = 2, Numbers{3, math.NaN()}, "the loss is NaN"
	diverged.Sample, diverged.TrafficBytes, diverged.Timeline = nil, nil, nil
	one := made(1, 1, 1)
	one.Steps, one.Losses = 1, Numbers{4}
	for name, r := range map[string]*Report{"usual": made(4, 8, 2), "wide": made(1000, 1000, 100), "one": one, "diverged": diverged} {
		path := filepath.Join(t.TempDir(), "report.html")
		require.NoError(t, r.WriteHTML(path), name)
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

// The numbers in the cells of a grid can be read on a light page and on a dark one: contrast 4.5, as WCAG 2 asks.
func TestNumbersOfAGridCanBeRead(t *testing.T) {
	for name, th := range map[string]theme{"light": light, "dark": dark} {
		require.Contains(t, page, "--card: "+th.card.String(), name)
		require.Contains(t, page, "--heat: "+th.heat.String(), name)
		for part := 0.0; part <= 1; part += 1.0 / 256 {
			heat, ink := shade(part)
			black := strings.HasPrefix(ink, "black")
			if name == "dark" {
				black = strings.HasSuffix(ink, "dark-black")
			}
			contrast := 1.05 / (th.cell(heat).luminance() + 0.05)
			if black {
				contrast = (th.cell(heat).luminance() + 0.05) / 0.05
			}
			require.GreaterOrEqual(t, contrast, 4.5, "%s, %v", name, part)
		}
	}
}

// The chart of the loss has a line for each time that the ranks changed.
func TestEveryChangeOfRanksHasALine(t *testing.T) {
	r := made(4, 8, 2)
	for _, c := range []struct{ changes, labels []int }{{nil, nil}, {[]int{500}, []int{500}}, {[]int{500, 1000}, []int{500, 1000}}, {[]int{500, 510, 1500}, []int{500, 1500}}} {
		r.Changes = c.changes
		path := filepath.Join(t.TempDir(), "report.html")
		require.NoError(t, r.WriteHTML(path))
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, len(c.changes), strings.Count(string(b), `<line class="event"`), c.changes)
		require.Equal(t, len(c.labels), strings.Count(string(b), "the ranks change<"), c.changes)
	}
}

func TestNumbersThatAreNone(t *testing.T) {
	b, err := json.Marshal(Numbers{1.5, math.NaN(), math.Inf(1), math.Inf(-1)})
	require.NoError(t, err)
	require.Equal(t, "[1.5,null,null,null]", string(b))
}
