// Package train is what ranks do: steps of training, the evaluation at the end, and how they go on when the ranks change.
package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/model"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/rebalance"
)

// worker is one rank at work: its part of the model and what connects it with the others.
type worker struct {
	cfg         config.Config
	rank, ranks int
	group       *comm.Group
	text        *text.Corpus

	heap       *memory.Heap
	dispatcher *dispatch.Dispatcher
	buckets    *allreduce.Buckets

	model *model.Model
	loop  *rebalance.Loop // nil without -balance, and where ranks have different numbers of experts
	stats []float32       // of a step, summed over the ranks: see statLoss

	at     []int // the batch
	final  int   // the step whose gradients of this rank's experts are whole
	summed int64 // bytes that the ranks sum in a step

	report.History // what the ranks know in common
}

// Statistics that the ranks sum in every step, in addition to gradients. After these come the tokens of every expert of every layer.
const (
	statLoss = iota
	statStop // ranks that were asked to stop
	statComm // seconds in communication so far
	statTime // seconds so far
	statLoad
)

var (
	// ErrStopped says that somebody asked for an end before the last step.
	ErrStopped = errors.New("stopped")
	// ErrDiverged says that the loss is no number any more. All ranks find that out in the same step.
	ErrDiverged = errors.New("training has diverged")
	// errAdmit says that it is time for a fresh rank to come.
	errAdmit = errors.New("a fresh rank is to be admitted")
)

// newWorker is collective: every rank of the group calls it.
func newWorker(ctx context.Context, g *comm.Group, c config.Config, text *text.Corpus, p *dispatch.Placement) (*worker, error) {
	w := &worker{cfg: c, rank: g.Rank(), ranks: g.Size(), group: g, text: text}
	if err := w.open(ctx, p); err != nil {
		g.Abort(err) // the others need not wait for this rank
		return nil, errors.Join(err, w.close(ctx))
	}
	return w, nil
}

func (w *worker) open(ctx context.Context, p *dispatch.Placement) (err error) {
	c := w.cfg
	if w.heap, err = memory.NewHeap(ctx, w.group, device.Host(), memory.Options{}); err != nil {
		return err
	}
	// A step sums over the ranks: statistics, and the gradients of the dense part by stage of backward.
	sizes := append([]int{statLoad + c.Layers*c.Experts}, model.StageSizes(c)...)
	var sums []allreduce.Gradient
	for _, n := range sizes {
		sums = append(sums, allreduce.Gradient{Len: n})
		w.summed += 4 * int64(n)
	}
	w.buckets, err = allreduce.NewBuckets(ctx, w.heap, sums, allreduce.BucketOptions{BucketBytes: 128 << 10})
	if err != nil {
		return err
	}
	w.dispatcher, err = dispatch.New(ctx, w.heap, dispatch.Options{
		Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden,
		MaxTokens: (c.Batch + w.ranks - 1) / w.ranks,
		Handles:   c.Layers,
		Placement: p, HostCounts: true, Layer: "experts",
	})
	if err != nil {
		return err
	}
	w.stats = w.buckets.Float32(0)
	grads := make([][]float32, len(sizes)-1)
	for i := range grads {
		grads[i] = w.buckets.Float32(1 + i)
	}
	made := make([]memory.View, c.Layers)
	for i := range made {
		if made[i], err = alloc(ctx, w.heap, w.dispatcher.MaxRows()*c.Hidden); err != nil {
			return err
		}
	}
	w.model = model.New(c, w.rank, w.dispatcher, grads, made)
	if w.loop, err = w.balance(ctx); err != nil {
		return err
	}
	w.at = make([]int, c.Batch)
	w.Tokens = make([]int64, c.Layers*c.Experts)
	return nil
}

// alloc takes n floats of the heap, after growing it if there is no room. All ranks come to the same.
func alloc(ctx context.Context, h *memory.Heap, n int) (memory.View, error) {
	b, err := h.Alloc(4 * int64(n))
	if errors.Is(err, memory.ErrOutOfMemory) {
		if err = h.Grow(ctx, 4*int64(n)); err == nil {
			b, err = h.Alloc(4 * int64(n))
		}
	}
	if err != nil {
		return memory.View{}, err
	}
	return b.View(), nil
}

// close is collective as well, but does not wait for ranks that are lost.
func (w *worker) close(ctx context.Context) error {
	var errs []error
	if w.loop != nil {
		errs = append(errs, w.loop.Close(ctx))
	}
	if w.buckets != nil {
		errs = append(errs, w.buckets.Close(ctx))
	}
	if w.dispatcher != nil {
		errs = append(errs, w.dispatcher.Close(ctx))
	}
	if w.heap != nil {
		errs = append(errs, w.heap.Close(ctx))
	}
	return errors.Join(errs...)
}

// train runs the steps that are not done yet. It ends before the last, with ErrStopped, when ctx ends on any rank: all ranks do so
// after the same step. watch, which may be nil, is called after each.
func (w *worker) train(ctx context.Context, watch func(*worker)) error {
	start := time.Now().Add(-w.Elapsed)
	for n := w.Done() + 1; n <= w.cfg.Steps; n++ {
		if n == w.cfg.ReplaceAt && !w.Asked {
			return errAdmit
		}
		stop, err := w.step(n, ctx.Err() != nil)
		w.Elapsed = time.Since(start)
		if err != nil {
			return fmt.Errorf("step %d: %w", n, err)
		}
		if watch != nil {
			watch(w)
		}
		if stop && n < w.cfg.Steps {
			return ErrStopped
		}
		if err := w.even(context.WithoutCancel(ctx), n); err != nil {
			return fmt.Errorf("after step %d: %w", n, err)
		}
	}
	return nil
}

// step trains on one batch, of which every rank takes its part. It reports whether any rank wanted to stop.
func (w *worker) step(n int, stop bool) (stopped bool, err error) {
	c, m := w.cfg, w.model
	m.Clock.Begin(phase.Dense)
	defer m.Clock.Stop()
	text.Batch(w.at, w.text.Train, c.Context, c.Seed, n)
	lo, hi := config.Slice(c.Batch, w.rank, w.ranks)
	mine := w.at[lo:hi]
	if err := m.Forward(w.text.Train, mine); err != nil {
		return false, err
	}
	clear(w.stats)
	w.stats[statLoss] = float32(m.Loss(w.text.Train, mine))
	if stop {
		w.stats[statStop] = 1
	}
	if n == c.AtStep && w.rank == c.KillRank && len(w.Changes) == 0 {
		return false, w.kill()
	}
	communication, all := m.Clock.Total()
	w.stats[statComm], w.stats[statTime] = float32(communication.Seconds()), float32(all.Seconds())
	for i, l := range m.Layers {
		copy(w.stats[statLoad+i*c.Experts:], l.Load)
	}
	if err := w.buckets.Ready(nil, 0); err != nil {
		return false, err
	}

	// Gradients leave for the other ranks as soon as they are final, while backward goes on. Those of the experts are
	// whole already: backward brought them the gradients of all tokens of all ranks.
	err = m.Backward(func(stage int) error {
		if stage == c.Layers+1 {
			w.final = n
		}
		return w.buckets.Ready(nil, 1+stage)
	})
	if err != nil {
		return false, err
	}
	m.Clock.Enter(phase.AllReduce)
	if err := w.buckets.Wait(nil); err != nil {
		return false, err
	}

	m.Clock.Enter(phase.Optimizer)
	loss := float64(w.stats[statLoss]) / float64(c.Batch)
	w.Losses = append(w.Losses, loss)
	if w.stats[statTime] > 0 {
		w.Share = float64(w.stats[statComm] / w.stats[statTime])
		w.Pace = float64(w.stats[statTime]) / float64(w.ranks*n)
	}
	if math.IsNaN(loss) || math.IsInf(loss, 0) {
		return false, fmt.Errorf("%w: the loss is %v; try a lower -rate than %g", ErrDiverged, loss, c.Rate)
	}
	k := nn.NewAdam(n, c.RateAt(n))
	for _, s := range m.Slabs {
		k.Apply(s)
	}
	for i, l := range m.Layers {
		load := w.stats[statLoad+i*c.Experts:][:c.Experts]
		if c.Balance == 0 {
			l.Rebalance(load, c.Batch)
		}
		for e, n := range load {
			w.Tokens[i*c.Experts+e] += int64(n)
		}
	}
	return w.stats[statStop] > 0, nil
}
