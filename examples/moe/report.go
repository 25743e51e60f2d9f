package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/dispatch"
)

// report is what a run has to say, of all ranks together.
type report struct {
	Ranks int `json:"ranks"`
	Steps int `json:"steps"`
	// Losses are mean cross-entropies in nats per byte. TrainLoss is that of the last tenth of the steps, the others are of
	// the same places in the held-out text.
	TrainLoss   float64 `json:"train_loss"`
	HeldoutLoss float64 `json:"heldout_loss"`
	BigramLoss  float64 `json:"bigram_loss"`
	// TokensPerSecond is the speed of training, all ranks together.
	TokensPerSecond float64 `json:"tokens_per_second"`
	// CommFraction is the part of the ranks' time that went into communication, waiting for one another included.
	CommFraction float64 `json:"comm_fraction"`
	// ExpertTokens[e] is how many tokens visited expert e in training, in all layers together.
	ExpertTokens []int64 `json:"expert_tokens"`
	// TrafficBytes[r][p] is the size of the rows that rank r sent to rank p in dispatch, combine and their backwards,
	// evaluation included; [r][r] is what stayed where it was.
	TrafficBytes [][]int64 `json:"traffic_bytes"`
	// PhasesMS is the time of a training step in milliseconds, the mean of the ranks, by phase.
	PhasesMS map[string]float64 `json:"phases_ms"`

	cfg     config
	losses  []float64 // of every step
	tokens  [][]int64 // by layer and expert
	elapsed time.Duration
	summed  int64 // bytes that the allreduce sums in a step
}

// heldoutPlaces is how many places of the held-out text are judged.
const heldoutPlaces = 32 << 10

// report is collective: it evaluates the model on the held-out text and puts what the ranks know together.
func (w *worker) report(ctx context.Context) (*report, error) {
	c := w.cfg
	type share struct {
		Spent   [phases]time.Duration
		Traffic []int64
	}
	mine := share{Spent: w.model.clock.spent} // of training only

	at := make([]int, heldoutPlaces)
	spread(at, w.text.heldout, c.Context)
	heldout, err := w.heldoutLoss(ctx, at)
	if err != nil {
		return nil, err
	}
	mine.Traffic = w.moving.Counters().Bytes

	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	all, err := w.group.AllGather(ctx, text)
	if err != nil {
		return nil, err
	}
	r := &report{
		Ranks: w.ranks, Steps: c.Steps,
		TrainLoss: mean(w.losses[len(w.losses)*9/10:]), HeldoutLoss: heldout, BigramLoss: w.text.bigram().loss(w.text.heldout, at),
		TokensPerSecond: float64(c.Batch*c.Steps) / w.elapsed.Seconds(),
		ExpertTokens:    make([]int64, c.Experts),
		PhasesMS:        map[string]float64{},
		cfg:             c, losses: w.losses, elapsed: w.elapsed, summed: w.summed,
	}
	var total clock
	for rank := range all {
		var s share
		if err := json.Unmarshal(all[rank], &s); err != nil {
			return nil, fmt.Errorf("report of rank %d: %w", rank, err)
		}
		r.TrafficBytes = append(r.TrafficBytes, s.Traffic)
		for p, d := range s.Spent {
			total.spent[p] += d
		}
	}
	r.CommFraction = total.commFraction()
	for p, d := range total.spent {
		r.PhasesMS[phaseNames[p]] = d.Seconds() * 1e3 / float64(w.ranks*c.Steps)
	}
	for i := range c.Layers {
		r.tokens = append(r.tokens, w.tokens[i*c.Experts:(i+1)*c.Experts])
		for e, n := range r.tokens[i] {
			r.ExpertTokens[e] += n
		}
	}
	return r, nil
}

func mean(v []float64) float64 {
	var sum float64
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// writeJSON writes the report as data.
func (r *report) writeJSON(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// write writes the report for a person.
func (r *report) write(out io.Writer) {
	fmt.Fprintf(out, "\n%s of %d tokens on %s in %.1f s: %.0f tokens/s, %.0f%% of the time in communication\n",
		count(r.Steps, "step"), r.cfg.Batch, count(r.Ranks, "rank"), r.elapsed.Seconds(), r.TokensPerSecond, 100*r.CommFraction)

	if n := runtime.NumCPU(); n < r.Ranks {
		fmt.Fprintf(out, "%d ranks share %s: much of that is waiting for one another\n", r.Ranks, count(n, "processor"))
	}

	verdict := "beats the bigram model"
	if r.HeldoutLoss >= r.BigramLoss {
		verdict = "does not beat the bigram model"
	}
	fmt.Fprintf(out, "\nloss, nats/byte\n  training  %.3f  mean of the last tenth of the steps\n  held-out  %.3f  %s\n  bigram    %.3f  on the same held-out text\n",
		r.TrainLoss, r.HeldoutLoss, verdict, r.BigramLoss)

	head := fmt.Sprintf("  %-16s", "")
	for i := range r.tokens {
		head += fmt.Sprintf("  %-22s", fmt.Sprintf("layer %d", i))
	}
	fmt.Fprintf(out, "\nexpert load, %% of a layer's tokens\n%s\n", strings.TrimRight(head, " "))
	for e, at := range dispatch.Contiguous(r.cfg.Experts, r.Ranks).Ranks {
		line := fmt.Sprintf("  %-16s", fmt.Sprintf("expert %d, rank %d", e, at[0]))
		for _, layer := range r.tokens {
			var all int64
			for _, n := range layer {
				all += n
			}
			part := float64(layer[e]) / float64(all)
			line += fmt.Sprintf("  %5.1f %-16s", 100*part, bar(part*float64(r.cfg.Experts)/2, 16))
		}
		fmt.Fprintln(out, strings.TrimRight(line, " "))
	}

	width := 0
	for _, row := range r.TrafficBytes {
		for _, n := range row {
			width = max(width, len(grouped(n)))
		}
	}
	fmt.Fprintf(out, "\ntraffic, bytes of tokens from rank (row) to rank (column); the diagonal stayed where it was\n  %-6s", "")
	for p := range r.TrafficBytes {
		fmt.Fprintf(out, "  %*s", width, fmt.Sprintf("to %d", p))
	}
	fmt.Fprintln(out)
	for p, row := range r.TrafficBytes {
		fmt.Fprintf(out, "  %-6s", fmt.Sprintf("from %d", p))
		for _, n := range row {
			fmt.Fprintf(out, "  %*s", width, grouped(n))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "  not counted: the allreduce, which sums %s bytes over the ranks in every step\n", grouped(r.summed))

	var step float64
	for _, ms := range r.PhasesMS {
		step += ms
	}
	fmt.Fprintf(out, "\ntime of a step by phase, mean of the ranks, waiting included\n")
	for _, name := range phaseNames {
		ms := r.PhasesMS[name]
		line := fmt.Sprintf("  %-10s %8.2f ms  %5.1f%% %s", name, ms, 100*ms/step, bar(ms/step, 32))
		fmt.Fprintln(out, strings.TrimRight(line, " "))
	}
	fmt.Fprintf(out, "  %-10s %8.2f ms\n", "step", step)
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
