// Package report says what came of a run: while it goes on, and at its end, as text, as JSON, and as a page with pictures.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/examples/moe/words"
)

// History is what a run has come to, the same on every rank.
type History struct {
	Losses  []float64 // of every step
	Tokens  []int64   // by layer and expert, of all steps
	Share   float64   // of communication in the ranks' time, up to the last step's forward
	Pace    float64   // seconds that a step takes, the same
	Elapsed time.Duration
	Events  []string // ranks that were lost, and that came
	Changes []int    // for each time that the ranks changed, the first step of those after it
	Asked   bool     // a fresh rank has been asked for
}

// Done is the number of steps that are done.
func (h *History) Done() int { return len(h.Losses) }

// Since is the first step of the ranks that are there now.
func (h *History) Since() int {
	if n := len(h.Changes); n > 0 {
		return h.Changes[n-1]
	}
	return 1
}

// Report is what a run has to say, of all ranks together. What a run that ended early has not found out is empty.
type Report struct {
	Saved string `json:"-"` // the file of the model

	// Version is that of Switchyard.
	Version string        `json:"version"`
	Go      string        `json:"go"`
	Config  config.Config `json:"config"`

	// Ranks is how many there were at the end, Steps how many steps were done, in ElapsedSeconds of training.
	Ranks          int     `json:"ranks"`
	Steps          int     `json:"steps"`
	ElapsedSeconds float64 `json:"elapsed_seconds"`
	// Stopped says that the run ended before its last step because somebody asked for it, Error why else it ended early.
	Stopped bool     `json:"stopped"`
	Error   string   `json:"error,omitempty"`
	Events  []string `json:"events"`
	// Changes are the steps before which the ranks changed.
	Changes []int `json:"change_steps"`

	// Losses are mean cross-entropies in nats per byte: of every step, of the last tenth of the steps, and of the same places in
	// the held-out text. One that is no number is null.
	Losses      Numbers       `json:"losses"`
	TrainLoss   config.Number `json:"train_loss"`
	HeldoutLoss config.Number `json:"heldout_loss"`
	BigramLoss  config.Number `json:"bigram_loss"`
	// Sample is what the models write.
	Sample *text.Sample `json:"sample,omitempty"`

	// TokensPerSecond is the speed of training, all ranks together.
	TokensPerSecond float64 `json:"tokens_per_second"`
	// CommFraction is the part of the ranks' time that went into communication, waiting for one another included.
	CommFraction float64 `json:"comm_fraction"`
	// ExpertTokens[i][e] is how many tokens visited expert e of layer i in training, ExpertRanks[e] where the expert is.
	ExpertTokens [][]int64 `json:"expert_tokens"`
	ExpertRanks  []int     `json:"expert_ranks"`
	// TrafficBytes[r][p] is the size of the rows that rank r sent to rank p in dispatch, combine and their backwards,
	// evaluation included; [r][r] is what stayed where it was. It is of the ranks at the end, since step TrafficSince.
	TrafficBytes [][]int64 `json:"traffic_bytes"`
	TrafficSince int       `json:"traffic_since_step"`
	// PhasesMS is the time of a training step in milliseconds, the mean of the ranks, by phase.
	PhasesMS map[string]float64 `json:"phases_ms"`
	// ReducedBytes is what the allreduce sums over the ranks in a step.
	ReducedBytes int64 `json:"reduced_bytes"`

	// Corpus is the name of the text.
	Corpus string `json:"text"`

	// Timeline is the spans of each rank in one step, the median of the last.
	Timeline [][]phase.Span `json:"-"`
}

// Numbers are written like config.Number.
type Numbers []float64

// MarshalJSON writes null for what is no number.
func (n Numbers) MarshalJSON() ([]byte, error) {
	v := make([]config.Number, len(n))
	for i := range n {
		v[i] = config.Number(n[i])
	}
	return json.Marshal(v)
}

// New is the report of a run that has not begun.
func New(c config.Config) *Report {
	return &Report{Version: switchyard.Version, Go: runtime.Version(), Config: c, Ranks: c.Ranks, Events: []string{}, Losses: Numbers{}, Changes: []int{},
		ExpertTokens: [][]int64{}, ExpertRanks: []int{}, TrafficBytes: [][]int64{}, PhasesMS: map[string]float64{},
		TrainLoss: config.Number(math.NaN()), HeldoutLoss: config.Number(math.NaN()), BigramLoss: config.Number(math.NaN())}
}

// Times fills in what clocks say.
func (r *Report) Times(clocks []*phase.Clock) {
	var total phase.Clock
	for _, c := range clocks {
		for p, d := range c.Spent {
			total.Spent[p] += d
		}
	}
	r.CommFraction = total.CommFraction()
	for p, d := range total.Spent {
		r.PhasesMS[phase.Names[p]] = d.Seconds() * 1e3 / float64(len(clocks)*max(1, r.Steps))
	}
}

// Mean is NaN of nothing.
func Mean(v []float64) float64 {
	var sum float64
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// WriteJSON writes the report as data to a file, or to standard output for "-".
func (r *Report) WriteJSON(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if path == "-" {
		_, err = os.Stdout.Write(b)
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// Write writes the report for a person, in lines of at most the given columns where it can.
func (r *Report) Write(out io.Writer, columns int) {
	p := func(format string, args ...any) { fmt.Fprintf(out, format, args...) }
	width := max(min(columns, maxWidth), 40)
	lines := func(text string) {
		for _, line := range words.Fold(text, width) {
			p("%s\n", line)
		}
	}

	steps := words.Count(r.Steps, "step")
	if r.Steps < r.Config.Steps {
		steps = fmt.Sprintf("%d of %d steps", r.Steps, r.Config.Steps)
	}
	p("\n")
	lines(fmt.Sprintf("%s of %d tokens on %s in %.1f s", steps, r.Config.Batch, words.Count(r.Ranks, "rank"), r.ElapsedSeconds))
	lines(fmt.Sprintf("%.0f tokens/s, %.0f%% of the time in communication", r.TokensPerSecond, 100*r.CommFraction))
	if n := runtime.NumCPU(); n < r.Ranks {
		lines(fmt.Sprintf("%d ranks share %s: much of that is waiting for one another", r.Ranks, words.Count(n, "processor")))
	}
	for _, e := range r.Events {
		lines(e)
	}
	if r.Steps == 0 {
		return
	}

	p("\nloss, nats/byte\n  training  %.3f  mean of the last tenth of the steps\n", r.TrainLoss)
	if r.Sample != nil {
		verdict := "beats the bigram model"
		if !(r.HeldoutLoss < r.BigramLoss) {
			verdict = "does not beat the bigram model"
		}
		p("  held-out  %.3f  %s\n  bigram    %.3f  on the same held-out text\n", r.HeldoutLoss, verdict, r.BigramLoss)
		p("\ntext\n")
		for _, s := range []struct{ name, text string }{
			{"held-out text, as it is", r.Sample.Prompt},
			{fmt.Sprintf("the model goes on, seeing %d bytes", r.Config.Context), r.Sample.Model},
			{"the bigram model goes on, seeing 1", r.Sample.Bigram},
		} {
			lines("  " + s.name + ":")
			for _, line := range words.Fold(strings.Trim(s.text, "\n"), width-4) {
				p("%s\n", strings.TrimRight("  | "+line, " "))
			}
		}
	}
	r.writeLoad(p, width)
	r.writeTraffic(p, width)

	var step float64
	for _, ms := range r.PhasesMS {
		step += ms
	}
	p("\ntime of a step by phase, mean of the ranks, waiting included\n")
	for _, name := range phase.Names {
		ms := r.PhasesMS[name]
		line := fmt.Sprintf("  %-10s %8.2f ms  %5.1f%% %s", name, ms, 100*ms/step, bar(ms/step, min(32, width-33)))
		p("%s\n", strings.TrimRight(line, " "))
	}
	p("  %-10s %8.2f ms\n", "step", step)
}

// block is a run of things [lo, hi).
type block struct{ lo, hi int }

// blocks divides n things into at most the given number of blocks of about equal size.
func blocks(n, most int) []block {
	most = min(n, max(most, 1))
	b := make([]block, most)
	for i := range b {
		b[i].lo, b[i].hi = config.Slice(n, i, most)
	}
	return b
}

// name is like "expert 3" or "experts 4-7".
func (b block) name(what string) string {
	if b.hi-b.lo == 1 {
		return fmt.Sprintf("%s %d", what, b.lo)
	}
	return fmt.Sprintf("%ss %d-%d", what, b.lo, b.hi-1)
}

func (b block) short() string {
	if b.hi-b.lo == 1 {
		return fmt.Sprint(b.lo)
	}
	return fmt.Sprintf("%d-%d", b.lo, b.hi-1)
}

// mostRows is how many lines of a table a person wants to see.
const mostRows = 32

// writeLoad writes how the tokens of each layer were spread over the experts. Where there are many, a line is for several experts and
// a column for several layers.
func (r *Report) writeLoad(p func(string, ...any), width int) {
	rows := blocks(r.Config.Experts, mostRows)
	label := func(b block) string {
		if b.hi-b.lo > 1 {
			return b.name("expert")
		}
		return fmt.Sprintf("%s, rank %d", b.name("expert"), r.ExpertRanks[b.lo])
	}
	left := 0
	for _, b := range rows {
		left = max(left, len(label(b)))
	}
	room := width - 2 - left
	cols := blocks(r.Config.Layers, room/9)
	each := room/len(cols) - 2
	bars := min(each-6, 16)
	if bars < 4 {
		bars, each = 0, 7
	} else {
		each = 6 + bars
	}
	head := fmt.Sprintf("  %-*s", left, "")
	for _, c := range cols {
		name := c.name("layer")
		if len(name) > each {
			name = c.short()
		}
		head += fmt.Sprintf("  %-*s", each, name)
	}
	p("\nexpert load, %% of a layer's tokens\n%s\n", strings.TrimRight(head, " "))
	for _, b := range rows {
		line := fmt.Sprintf("  %-*s", left, label(b))
		for _, c := range cols {
			var some, all int64
			for _, layer := range r.ExpertTokens[c.lo:c.hi] {
				for e, n := range layer {
					if all += n; e >= b.lo && e < b.hi {
						some += n
					}
				}
			}
			part := float64(some) / float64(max(all, 1))
			mark := bar(part*float64(len(rows))/2, bars)
			line += fmt.Sprintf("  %-*s", each, fmt.Sprintf("%5.1f %s", 100*part, mark))
		}
		p("%s\n", strings.TrimRight(line, " "))
	}
}

// sumBlocks is the matrix with rows and columns summed by blocks.
func sumBlocks(m [][]int64, b []block) [][]int64 {
	sums := make([][]int64, len(b))
	for i, rows := range b {
		sums[i] = make([]int64, len(b))
		for j, cols := range b {
			for _, row := range m[rows.lo:rows.hi] {
				for _, n := range row[cols.lo:cols.hi] {
					sums[i][j] += n
				}
			}
		}
	}
	return sums
}

// unit is what bytes are counted in so that the largest has at most 4 digits before the point.
func unit(largest int64) (name string, bytes float64) {
	name, bytes = "bytes", 1
	for _, next := range []string{"kB", "MB", "GB", "TB", "PB"} {
		if float64(largest) < 9999.5*bytes {
			break
		}
		name, bytes = next, bytes*1000
	}
	return name, bytes
}

// writeTraffic writes the traffic matrix, summed by blocks of ranks where it would not fit.
func (r *Report) writeTraffic(p func(string, ...any), width int) {
	n := len(r.TrafficBytes)
	if n == 0 {
		return
	}
	label := len(fmt.Sprintf("from %d-%d", n-1, n-1))
	each := max(len(fmt.Sprintf("to %d-%d", n-1, n-1)), len("1234.5"))
	if n <= (width-2-len("from 00"))/8 {
		label, each = len("from 00"), len("1234.5")
	}
	b := blocks(n, (width-2-label)/(each+2))
	sums := sumBlocks(r.TrafficBytes, b)
	var most int64
	for _, row := range sums {
		most = max(most, slices.Max(row))
	}
	name, bytes := unit(most)
	digits := 1
	if bytes == 1 {
		digits = 0
	}
	p("\ntraffic, %s of tokens from rank (row) to rank (column)\n", name)
	since := ""
	if r.TrafficSince > 1 {
		since = fmt.Sprintf(", since step %d", r.TrafficSince)
	}
	note := "the diagonal stayed where it was"
	if len(b) < n {
		note = "blocks of ranks are summed; the diagonal includes what stayed where it was"
	}
	for _, line := range words.Fold(note+since, width-2) {
		p("  %s\n", line)
	}
	line := fmt.Sprintf("  %-*s", label, "")
	for _, c := range b {
		line += fmt.Sprintf("  %*s", each, "to "+c.short())
	}
	p("%s\n", line)
	for i, row := range sums {
		line := fmt.Sprintf("  %-*s", label, "from "+b[i].short())
		for _, n := range row {
			line += fmt.Sprintf("  %*.*f", each, digits, float64(n)/bytes)
		}
		p("%s\n", line)
	}
	p("  not counted: the allreduce, which sums %s bytes in every step\n", words.Grouped(r.ReducedBytes))
}

// bar draws a part of width characters, filled from the left.
func bar(part float64, width int) string {
	return strings.Repeat("#", int(min(max(part, 0), 1)*float64(width)+0.5))
}
