package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/memory"
)

// soFar is what this rank can report alone.
func (w *worker) soFar() *report.Report {
	c, r := w.cfg, report.New(w.cfg)
	r.Ranks, r.Steps, r.ElapsedSeconds = w.ranks, w.Done(), w.Elapsed.Seconds()
	r.Events = append(r.Events, w.Events...)
	r.Losses, r.Corpus = w.Losses, w.text.Name
	r.ReducedBytes, r.TrafficSince = w.summed, w.Since()
	r.Changes = append(r.Changes, w.Changes...)
	if n := w.Done(); n > 0 {
		r.TrainLoss = config.Number(report.Mean(w.Losses[n*9/10:]))
		r.TokensPerSecond = float64(c.Batch*n) / w.Elapsed.Seconds()
	}
	r.Times([]*phase.Clock{&w.model.Clock})
	for i := range c.Layers {
		r.ExpertTokens = append(r.ExpertTokens, w.Tokens[i*c.Experts:(i+1)*c.Experts])
	}
	for _, at := range w.dispatcher.Placement().Ranks {
		r.ExpertRanks = append(r.ExpertRanks, at[0])
	}
	return r
}

// finish is collective: it evaluates the model on the held-out text and puts what the ranks know together, in the report of rank 0.
// On other ranks r is nil.
func (w *worker) finish(ctx context.Context, r *report.Report, stopped bool) error {
	type share struct {
		Spent   [phase.Count]time.Duration
		Trace   [][]phase.Span
		Traffic []int64
	}
	mine := share{Spent: w.model.Clock.Spent, Trace: w.model.Clock.Trace()} // of training only

	at := make([]int, w.cfg.HeldoutPlaces())
	text.Spread(at, w.text.Heldout, w.cfg.Context)
	heldout, err := w.heldoutLoss(ctx, at)
	if err != nil {
		return err
	}
	counters, err := w.dispatcher.Counters()
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
	var clocks []*phase.Clock
	for rank := range all {
		if err := json.Unmarshal(all[rank], &shares[rank]); err != nil {
			return fmt.Errorf("report of rank %d: %w", rank, err)
		}
		r.TrafficBytes = append(r.TrafficBytes, shares[rank].Traffic)
		clocks = append(clocks, &phase.Clock{Spent: shares[rank].Spent})
	}
	r.Times(clocks)
	// The step to show is the median of the last.
	steps := make([]int, len(shares[0].Trace))
	for i := range steps {
		steps[i] = i
	}
	long := func(i int) int64 { t := shares[0].Trace[i]; return t[len(t)-1].End - t[0].Begin }
	slices.SortFunc(steps, func(a, b int) int { return int(long(a) - long(b)) })
	for _, s := range shares {
		r.Timeline = append(r.Timeline, s.Trace[steps[len(steps)/2]])
	}
	r.HeldoutLoss, r.BigramLoss, r.Sample = config.Number(heldout), config.Number(w.text.Bigram().Loss(w.text.Heldout, at)), &text
	return nil
}

// heldoutLoss is the mean loss at the given places of the held-out text, in nats per byte. The ranks share the work.
func (w *worker) heldoutLoss(ctx context.Context, at []int) (float64, error) {
	var sum float64
	for i := 0; i < len(at); i += w.cfg.Batch {
		batch := at[i:min(i+w.cfg.Batch, len(at))]
		lo, hi := config.Slice(len(batch), w.rank, w.ranks)
		if err := w.model.Forward(w.text.Heldout, batch[lo:hi]); err != nil {
			return 0, fmt.Errorf("held-out text: %w", err)
		}
		w.model.Release()
		sum += w.model.Loss(w.text.Heldout, batch[lo:hi])
	}
	w.model.Clock.Stop()
	all, err := w.group.AllGather(ctx, memory.Wrap([]float64{sum}).Bytes())
	if err != nil {
		return 0, err
	}
	sum = 0
	for _, part := range all {
		sum += memory.Of[float64](memory.Host(part))[0]
	}
	return sum / float64(len(at)), nil
}

const (
	temperature = 0.6 // below 1 the likely bytes become likelier
	bigramBytes = 120 // that the bigram model writes
)

// sample has the models go on with a prompt. It is collective; the ranks make the same text, byte by byte.
func (w *worker) sample(stopped bool) (text.Sample, error) {
	c := w.cfg
	begin := text.Prompt(w.text.Heldout, c.Context)
	all := slices.Clone(begin)
	r := rand.New(rand.NewPCG(c.Seed, 1<<40))
	p := make([]float32, 256)
	for len(all) < len(begin)+config.Sampled(w.Pace, stopped) {
		all = append(all, 0) // the byte to be found
		if err := w.model.Forward(all, []int{len(all) - 1}); err != nil {
			return text.Sample{}, fmt.Errorf("sample: %w", err)
		}
		w.model.Release()
		for i, v := range w.model.Logits[:256] {
			p[i] = v / temperature
		}
		nn.Softmax(p)
		all[len(all)-1] = text.Draw(p, r.Float32())
	}
	w.model.Clock.Stop()

	plain := w.text.Bigram().Continue(begin[len(begin)-1], bigramBytes, temperature, r)
	return text.Sample{Prompt: text.Readable(begin), Model: text.Readable(all[len(begin):]), Bigram: text.Readable(plain)}, nil
}
