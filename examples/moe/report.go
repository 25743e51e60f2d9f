package main

import (
	"context"
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
)

// report is what a run has to say, of all ranks together. What a run that ended early has not found out is empty.
type report struct {
	// Version is that of Switchyard.
	Version string `json:"version"`
	Go      string `json:"go"`
	Config  config `json:"config"`

	// Ranks is how many there were at the end, Steps how many steps were done, in ElapsedSeconds of training.
	Ranks          int     `json:"ranks"`
	Steps          int     `json:"steps"`
	ElapsedSeconds float64 `json:"elapsed_seconds"`
	// Stopped says that the run ended before its last step because somebody asked for it, Error why else it ended early.
	Stopped bool     `json:"stopped"`
	Error   string   `json:"error,omitempty"`
	Events  []string `json:"events"`

	// Losses are mean cross-entropies in nats per byte: of every step, of the last tenth of the steps, and of the same places in
	// the held-out text. One that is no number is null.
	Losses      numbers `json:"losses"`
	TrainLoss   number  `json:"train_loss"`
	HeldoutLoss number  `json:"heldout_loss"`
	BigramLoss  number  `json:"bigram_loss"`
	// Sample is what the models write.
	Sample *sample `json:"sample,omitempty"`

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

	timeline [][]span // of the median of the last steps, by rank
}

// number is a float64 that JSON can hold whatever it is.
type number float64

// MarshalJSON writes null for what is no number.
func (n number) MarshalJSON() ([]byte, error) {
	if v := float64(n); math.IsNaN(v) || math.IsInf(v, 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(n))
}

// numbers are written like number.
type numbers []float64

// MarshalJSON writes null for what is no number.
func (n numbers) MarshalJSON() ([]byte, error) {
	v := make([]number, len(n))
	for i := range n {
		v[i] = number(n[i])
	}
	return json.Marshal(v)
}

// How many places of the held-out text are judged: so many, and not more than so many batches.
const (
	heldoutPlaces  = 32 << 10
	heldoutBatches = 32
)

func (c config) heldoutPlaces() int { return min(heldoutPlaces, heldoutBatches*c.Batch) }

// newReport is the report of a run that has not begun.
func newReport(c config) *report {
	return &report{Version: switchyard.Version, Go: runtime.Version(), Config: c, Ranks: c.Ranks, Events: []string{}, Losses: numbers{},
		ExpertTokens: [][]int64{}, ExpertRanks: []int{}, TrafficBytes: [][]int64{}, PhasesMS: map[string]float64{},
		TrainLoss: number(math.NaN()), HeldoutLoss: number(math.NaN()), BigramLoss: number(math.NaN())}
}

// soFar is what this rank can report alone.
func (w *worker) soFar() *report {
	c, r := w.cfg, newReport(w.cfg)
	r.Ranks, r.Steps, r.ElapsedSeconds = w.ranks, w.done(), w.Elapsed.Seconds()
	r.Events = append(r.Events, w.Events...)
	r.Losses, r.Corpus = w.Losses, w.text.name
	r.ReducedBytes, r.TrafficSince = w.summed, w.Since
	if n := w.done(); n > 0 {
		r.TrainLoss = number(mean(w.Losses[n*9/10:]))
		r.TokensPerSecond = float64(c.Batch*n) / w.Elapsed.Seconds()
	}
	r.times([]*clock{w.model.clock})
	for i := range c.Layers {
		r.ExpertTokens = append(r.ExpertTokens, w.Tokens[i*c.Experts:(i+1)*c.Experts])
	}
	for _, at := range w.moving.Placement().Ranks {
		r.ExpertRanks = append(r.ExpertRanks, at[0])
	}
	return r
}

// times fills in what clocks say.
func (r *report) times(clocks []*clock) {
	var total clock
	for _, c := range clocks {
		for p, d := range c.spent {
			total.spent[p] += d
		}
	}
	r.CommFraction = total.commFraction()
	for p, d := range total.spent {
		r.PhasesMS[phaseNames[p]] = d.Seconds() * 1e3 / float64(len(clocks)*max(1, r.Steps))
	}
}

// finish is collective: it evaluates the model on the held-out text and puts what the ranks know together, in the report of rank 0.
// On other ranks r is nil.
func (w *worker) finish(ctx context.Context, r *report, stopped bool) error {
	type share struct {
		Spent   [phases]time.Duration
		Trace   [][]span
		Traffic []int64
	}
	mine := share{Spent: w.model.clock.spent, Trace: w.model.clock.trace()} // of training only

	at := make([]int, w.cfg.heldoutPlaces())
	spread(at, w.text.heldout, w.cfg.Context)
	heldout, err := w.heldoutLoss(ctx, at)
	if err != nil {
		return err
	}
	counters, err := w.moving.Counters()
	if err != nil {
		return err
	}
	mine.Traffic = counters.Bytes
	text, err := w.sample(stopped)
	if err != nil {
		return err
	}
	b, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	all, err := w.group.AllGather(ctx, b)
	if err != nil || r == nil {
		return err
	}
	shares := make([]share, len(all))
	var clocks []*clock
	for rank := range all {
		if err := json.Unmarshal(all[rank], &shares[rank]); err != nil {
			return fmt.Errorf("report of rank %d: %w", rank, err)
		}
		r.TrafficBytes = append(r.TrafficBytes, shares[rank].Traffic)
		clocks = append(clocks, &clock{spent: shares[rank].Spent})
	}
	r.times(clocks)
	// The step to show is the median of the last.
	steps := make([]int, len(shares[0].Trace))
	for i := range steps {
		steps[i] = i
	}
	long := func(i int) int64 { t := shares[0].Trace[i]; return t[len(t)-1].End - t[0].Begin }
	slices.SortFunc(steps, func(a, b int) int { return int(long(a) - long(b)) })
	for _, s := range shares {
		r.timeline = append(r.timeline, s.Trace[steps[len(steps)/2]])
	}
	r.HeldoutLoss, r.BigramLoss, r.Sample = number(heldout), number(w.text.bigram().loss(w.text.heldout, at)), &text
	return nil
}

func mean(v []float64) float64 {
	var sum float64
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// writeJSON writes the report as data to a file, or to standard output for "-".
func (r *report) writeJSON(path string) error {
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

// write writes the report for a person, in lines of at most so many columns as far as it can.
func (r *report) write(out io.Writer, columns int) {
	p := func(format string, args ...any) { fmt.Fprintf(out, format, args...) }
	width := max(min(columns, maxWidth), 40)
	lines := func(text string) {
		for _, line := range fold(text, width) {
			p("%s\n", line)
		}
	}

	steps := count(r.Steps, "step")
	if r.Steps < r.Config.Steps {
		steps = fmt.Sprintf("%d of %d steps", r.Steps, r.Config.Steps)
	}
	p("\n")
	lines(fmt.Sprintf("%s of %d tokens on %s in %.1f s", steps, r.Config.Batch, count(r.Ranks, "rank"), r.ElapsedSeconds))
	lines(fmt.Sprintf("%.0f tokens/s, %.0f%% of the time in communication", r.TokensPerSecond, 100*r.CommFraction))
	if n := runtime.NumCPU(); n < r.Ranks {
		lines(fmt.Sprintf("%d ranks share %s: much of that is waiting for one another", r.Ranks, count(n, "processor")))
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
			for _, line := range fold(strings.Trim(s.text, "\n"), width-4) {
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
	for _, name := range phaseNames {
		ms := r.PhasesMS[name]
		line := fmt.Sprintf("  %-10s %8.2f ms  %5.1f%% %s", name, ms, 100*ms/step, bar(ms/step, min(32, width-33)))
		p("%s\n", strings.TrimRight(line, " "))
	}
	p("  %-10s %8.2f ms\n", "step", step)
}

// block is a run of things [lo, hi).
type block struct{ lo, hi int }

// blocks divides n things into at most so many blocks of about equal size.
func blocks(n, most int) []block {
	most = min(n, max(most, 1))
	b := make([]block, most)
	for i := range b {
		b[i].lo, b[i].hi = slice(n, i, most)
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
func (r *report) writeLoad(p func(string, ...any), width int) {
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
func (r *report) writeTraffic(p func(string, ...any), width int) {
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
	for _, line := range fold(note+since, width-2) {
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
	p("  not counted: the allreduce, which sums %s bytes in every step\n", grouped(r.ReducedBytes))
}

// bar draws a part of width characters, filled from the left.
func bar(part float64, width int) string {
	return strings.Repeat("#", int(min(max(part, 0), 1)*float64(width)+0.5))
}

// grouped writes an integer with its digits in groups of three.
func grouped(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
