package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// worker is one rank at work: its part of the model and what connects it with the others.
type worker struct {
	cfg         config
	rank, ranks int
	group       *comm.Group
	text        *corpus

	heap    *memory.Heap
	moving  *dispatch.Dispatcher
	buckets *allreduce.Buckets

	model *model
	stats []float32 // of a step, summed over the ranks: see statLoss

	at      []int // the batch
	final   int   // the step whose gradients of this rank's experts are whole
	summed  int64 // bytes that the ranks sum in a step
	history       // what the ranks know in common
}

// What the ranks sum of every step beside gradients. After these come the tokens of every expert of every layer.
const (
	statLoss = iota
	statStop // ranks that were asked to stop
	statComm // seconds in communication so far
	statTime // seconds so far
	statLoad
)

// history is what a run has come to, the same on every rank.
type history struct {
	Losses  []float64 // of every step
	Tokens  []int64   // by layer and expert, of all steps
	Share   float64   // of communication in the ranks' time, up to the last step's forward
	Pace    float64   // seconds that a step takes, the same
	Elapsed time.Duration
	Events  []string // ranks that were lost, and that came
	Since   int      // the first step of the ranks that are there now
	Asked   bool     // a fresh rank has been asked for
}

// done is the number of steps that are done.
func (h *history) done() int { return len(h.Losses) }

var (
	// errStopped says that somebody asked for an end before the last step.
	errStopped = errors.New("stopped")
	// errDiverged says that the loss is no number any more. All ranks find that out in the same step.
	errDiverged = errors.New("training has diverged")
	// errAdmit says that it is time for a fresh rank to come.
	errAdmit = errors.New("a fresh rank is to be admitted")
)

// newWorker is collective: every rank of the group calls it.
func newWorker(ctx context.Context, g *comm.Group, c config, text *corpus, p *dispatch.Placement) (*worker, error) {
	w := &worker{cfg: c, rank: g.Rank(), ranks: g.Size(), group: g, text: text, history: history{Since: 1}}
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
	// What a step sums over the ranks: statistics, and the gradients of the dense part by stage of backward.
	sizes := append([]int{statLoad + c.Layers*c.Experts}, stageSizes(c)...)
	var sums []allreduce.Gradient
	for _, n := range sizes {
		sums = append(sums, allreduce.Gradient{Len: n})
		w.summed += 4 * int64(n)
	}
	w.buckets, err = allreduce.NewBuckets(ctx, w.heap, sums, allreduce.BucketOptions{BucketBytes: 128 << 10})
	if err != nil {
		return err
	}
	w.moving, err = dispatch.New(ctx, w.heap, dispatch.Options{
		Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden,
		MaxTokens: (c.Batch + w.ranks - 1) / w.ranks,
		Handles:   c.Layers,
		Placement: p, HostCounts: true,
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
		if made[i], err = alloc(ctx, w.heap, w.moving.MaxRows()*c.Hidden); err != nil {
			return err
		}
	}
	w.model = newModel(c, w.rank, w.moving, grads, made)
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
	if w.buckets != nil {
		errs = append(errs, w.buckets.Close(ctx))
	}
	if w.moving != nil {
		errs = append(errs, w.moving.Close(ctx))
	}
	if w.heap != nil {
		errs = append(errs, w.heap.Close(ctx))
	}
	return errors.Join(errs...)
}

// train runs the steps that are not done yet. It ends before the last, with errStopped, when ctx ends on any rank: all ranks do so
// after the same step. watch, which may be nil, is called after each.
func (w *worker) train(ctx context.Context, watch func(*worker)) error {
	start := time.Now().Add(-w.Elapsed)
	for n := w.done() + 1; n <= w.cfg.Steps; n++ {
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
			return errStopped
		}
	}
	return nil
}

// step trains on one batch, of which every rank takes its part. It reports whether any rank wanted to stop.
func (w *worker) step(n int, stop bool) (stopped bool, err error) {
	c, m := w.cfg, w.model
	m.clock.begin(computingDense)
	defer m.clock.stop()
	batchOf(w.at, w.text.train, c.Context, c.Seed, n)
	lo, hi := slice(c.Batch, w.rank, w.ranks)
	mine := w.at[lo:hi]
	if err := m.forward(w.text.train, mine); err != nil {
		return false, err
	}
	clear(w.stats)
	w.stats[statLoss] = float32(m.loss(w.text.train, mine))
	if stop {
		w.stats[statStop] = 1
	}
	if n == c.AtStep && w.rank == c.KillRank && len(w.Events) == 0 {
		return false, w.kill()
	}
	communication, all := m.clock.total()
	w.stats[statComm], w.stats[statTime] = float32(communication.Seconds()), float32(all.Seconds())
	for i, l := range m.layers {
		copy(w.stats[statLoad+i*c.Experts:], l.load)
	}
	if err := w.buckets.Ready(nil, 0); err != nil {
		return false, err
	}

	// Gradients leave for the other ranks as soon as they are final, while backward goes on. Those of the experts are
	// whole already: backward brought them the gradients of all tokens of all ranks.
	err = m.backward(func(stage int) error {
		if stage == c.Layers+1 {
			w.final = n
		}
		return w.buckets.Ready(nil, 1+stage)
	})
	if err != nil {
		return false, err
	}
	m.clock.enter(reducing)
	if err := w.buckets.Wait(nil); err != nil {
		return false, err
	}

	m.clock.enter(updating)
	loss := float64(w.stats[statLoss]) / float64(c.Batch)
	w.Losses = append(w.Losses, loss)
	if w.stats[statTime] > 0 {
		w.Share = float64(w.stats[statComm] / w.stats[statTime])
		w.Pace = float64(w.stats[statTime]) / float64(w.ranks*n)
	}
	if math.IsNaN(loss) || math.IsInf(loss, 0) {
		return false, fmt.Errorf("%w: the loss is %v; try a lower -rate than %g", errDiverged, loss, c.Rate)
	}
	k := newAdam(n, c.rateAt(n))
	for _, s := range m.slabs {
		k.apply(s)
	}
	for i, l := range m.layers {
		load := w.stats[statLoad+i*c.Experts:][:c.Experts]
		l.rebalance(load, c.Batch)
		for e, n := range load {
			w.Tokens[i*c.Experts+e] += int64(n)
		}
	}
	return w.stats[statStop] > 0, nil
}

// rateAt is the learning rate of a step: up in a straight line for the first twentieth, then down half a cosine to a twentieth
// of the peak.
func (c config) rateAt(step int) float64 {
	const floor = 0.05
	at := float64(step) / float64(c.Steps)
	rise := min(1, 20*at)
	return float64(c.Rate) * rise * (floor + (1-floor)*(1+math.Cos(math.Pi*at))/2)
}

// heldoutLoss is the mean loss at the given places of the held-out text, in nats per byte. The ranks share the work.
func (w *worker) heldoutLoss(ctx context.Context, at []int) (float64, error) {
	var sum float64
	for i := 0; i < len(at); i += w.cfg.Batch {
		batch := at[i:min(i+w.cfg.Batch, len(at))]
		lo, hi := slice(len(batch), w.rank, w.ranks)
		if err := w.model.forward(w.text.heldout, batch[lo:hi]); err != nil {
			return 0, fmt.Errorf("held-out text: %w", err)
		}
		w.model.release()
		sum += w.model.loss(w.text.heldout, batch[lo:hi])
	}
	w.model.clock.stop()
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

// How long ranks have to end by themselves: when one has failed; when they were asked to before the first step; and when they were
// asked to later, which takes a step and a report. The latter is in seconds and, for slow steps, in steps.
const (
	grace      = 5 * time.Second
	graceFirst = time.Second
	graceStop  = 30 * time.Second
	graceSteps = 64
)

// trainRank is what a rank does from beginning to end. The report is of all ranks together, if this rank is 0 at the end.
//
// When ctx ends the rank stops in good order, with a report of what is done. It gives up when that takes too long.
func trainRank(ctx context.Context, g *comm.Group, c config, text *corpus, watch func(*worker)) (r *report, err error) {
	defer func() { g.Close() }()
	inner, giveUp := context.WithCancelCause(context.WithoutCancel(ctx))
	defer giveUp(nil)
	var step atomic.Int64 // what a step takes, once there are any
	defer context.AfterFunc(ctx, func() {
		select { // another rank may have told of the first step just before this one has done it
		case <-inner.Done():
			return
		case <-time.After(graceFirst):
		}
		wait := time.Duration(0)
		if s := step.Load(); s > 0 {
			wait = graceStop + graceSteps*time.Duration(s)
		}
		t := time.AfterFunc(wait, func() { giveUp(context.Cause(ctx)) })
		context.AfterFunc(inner, func() { t.Stop() })
	})()
	// The group must not change under the one who aborts it.
	var mu sync.Mutex
	defer context.AfterFunc(inner, func() {
		mu.Lock()
		defer mu.Unlock()
		g.Abort(context.Cause(inner))
	})()

	if err := agree(inner, g, c, text); err != nil {
		return nil, err
	}
	var w *worker
	if c.Late {
		w, err = carryOn(inner, g, c, text, nil)
	} else {
		w, err = newWorker(inner, g, c, text, nil)
	}
	for err == nil {
		r, err = w.run(ctx, inner, func(w *worker) {
			step.Store(int64(w.Elapsed) / int64(w.done()))
			if w.rank == 0 && watch != nil {
				watch(w)
			}
		})
		change := w.heal
		switch {
		case errors.Is(err, errAdmit):
			change = w.grow
		case !c.heals() || !errors.Is(err, comm.ErrPeerLost) || ctx.Err() != nil:
			change = nil
		}
		if change == nil {
			break
		}
		if w, err = change(inner); err == nil && w.group != g {
			mu.Lock()
			g.Close()
			g = w.group
			mu.Unlock()
		}
	}
	if errors.Is(err, errKilled) {
		return nil, w.close(inner)
	}
	if err != nil && !errors.Is(err, errStopped) && !errors.Is(err, errDiverged) {
		g.Abort(err) // a rank that gives up takes the others along; if another was first, this does nothing
	}
	if w != nil {
		err = errors.Join(err, w.close(inner))
	}
	return r, err
}

// run trains and makes the report, also of what was done when there is an error.
func (w *worker) run(ctx, inner context.Context, watch func(*worker)) (*report, error) {
	err := w.train(ctx, watch)
	if errors.Is(err, errAdmit) {
		return nil, err
	}
	var r *report
	if w.rank == 0 {
		r = w.soFar()
		r.Stopped = errors.Is(err, errStopped) || err != nil && ctx.Err() != nil
	}
	if w.cfg.Check || err != nil && !errors.Is(err, errStopped) {
		return r, err
	}
	return r, errors.Join(err, w.finish(inner, r, err != nil))
}

// agree makes sure that all ranks were given the same flags and the same text.
func agree(ctx context.Context, g *comm.Group, c config, text *corpus) error {
	mine, err := json.Marshal(struct {
		Config config
		Train  int
		Digest uint64
	}{c.shared(), len(text.train), text.digest()})
	if err != nil {
		return err
	}
	all, err := g.AllGather(ctx, mine)
	if err != nil {
		return err
	}
	for r := range all {
		if string(all[r]) != string(all[0]) {
			return fmt.Errorf("%w: rank 0 has %s, rank %d has %s", comm.ErrMismatch, all[0], r, all[r])
		}
	}
	return nil
}
