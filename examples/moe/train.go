package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
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
	stats []float32 // of a step, summed over the ranks: the loss, then the tokens of every expert of every layer

	at      []int // the batch
	losses  []float64
	tokens  []int64 // by layer and expert, of all steps
	summed  int64   // bytes that the ranks sum in a step
	elapsed time.Duration
}

// newWorker is collective: every rank of the group calls it.
func newWorker(ctx context.Context, g *comm.Group, c config, text *corpus) (*worker, error) {
	w := &worker{cfg: c, rank: g.Rank(), ranks: g.Size(), group: g, text: text}
	if err := w.open(ctx); err != nil {
		g.Abort(err) // the others need not wait for this rank
		return nil, errors.Join(err, w.close(ctx))
	}
	return w, nil
}

func (w *worker) open(ctx context.Context) (err error) {
	c := w.cfg
	if w.heap, err = memory.NewHeap(ctx, w.group, device.Host(), memory.Options{}); err != nil {
		return err
	}
	// What a step sums over the ranks: statistics, and the gradients of the dense part by stage of backward.
	sizes := append([]int{1 + c.Layers*c.Experts}, stageSizes(c)...)
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
		Handles:   c.Layers, HostCounts: true,
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
	w.tokens = make([]int64, c.Layers*c.Experts)
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

// train runs all steps. watch, which may be nil, is called after each.
func (w *worker) train(watch func(*worker)) error {
	start := time.Now()
	for n := 1; n <= w.cfg.Steps; n++ {
		if err := w.step(n); err != nil {
			return fmt.Errorf("step %d: %w", n, err)
		}
		w.elapsed = time.Since(start)
		if watch != nil {
			watch(w)
		}
	}
	return nil
}

// step trains on one batch, of which every rank takes its part.
func (w *worker) step(n int) error {
	c, m := w.cfg, w.model
	m.clock.enter(computingDense)
	defer m.clock.stop()
	batchOf(w.at, w.text.train, c.Context, c.Seed, n)
	lo, hi := slice(c.Batch, w.rank, w.ranks)
	mine := w.at[lo:hi]
	if err := m.forward(w.text.train, mine); err != nil {
		return err
	}
	clear(w.stats)
	w.stats[0] = float32(m.loss(w.text.train, mine))
	for i, l := range m.layers {
		copy(w.stats[1+i*c.Experts:], l.load)
	}

	if err := w.buckets.Ready(nil, 0); err != nil {
		return err
	}

	// Gradients leave for the other ranks as soon as they are final, while backward goes on. Those of the experts are
	// whole already: backward brought them the gradients of all tokens of all ranks.
	err := m.backward(func(stage int) error { return w.buckets.Ready(nil, 1+stage) })
	if err != nil {
		return err
	}
	m.clock.enter(reducing)
	if err := w.buckets.Wait(nil); err != nil {
		return err
	}

	m.clock.enter(updating)
	adam := vec.NewAdamStep(n, c.rateAt(n), 0.9, 0.95, 1e-8, 0)
	for _, s := range m.slabs {
		adam.Apply(s.w, s.m, s.v, s.g)
	}
	for i, l := range m.layers {
		load := w.stats[1+i*c.Experts:][:c.Experts]
		l.rebalance(load, c.Batch)
		for e, n := range load {
			w.tokens[i*c.Experts+e] += int64(n)
		}
	}
	w.losses = append(w.losses, float64(w.stats[0])/float64(c.Batch))
	return nil
}

// rateAt is the learning rate of a step: up in a straight line for the first twentieth, then down half a cosine to a twentieth
// of the peak.
func (c config) rateAt(step int) float64 {
	const floor = 0.05
	at := float64(step) / float64(c.Steps)
	rise := min(1, 20*at)
	return c.Rate * rise * (floor + (1-floor)*(1+math.Cos(math.Pi*at))/2)
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
	all, err := w.group.AllGather(ctx, shm.Bytes([]float64{sum}))
	if err != nil {
		return 0, err
	}
	sum = 0
	for _, part := range all {
		sum += shm.View[float64](part)[0]
	}
	return sum / float64(len(at)), nil
}

// trainRank is what a rank does from beginning to end. The report is of all ranks together.
func trainRank(ctx context.Context, g *comm.Group, c config, text *corpus, watch func(*worker)) (*report, error) {
	stop := context.AfterFunc(ctx, func() { g.Abort(context.Cause(ctx)) })
	defer stop()
	if err := agree(ctx, g, c, text); err != nil {
		return nil, err
	}
	w, err := newWorker(ctx, g, c, text)
	if err != nil {
		return nil, err
	}
	r, err := w.run(ctx, watch)
	if err != nil {
		g.Abort(err) // a rank that gives up takes the others along; if another was first, this does nothing
	}
	return r, errors.Join(err, w.close(ctx))
}

func (w *worker) run(ctx context.Context, watch func(*worker)) (*report, error) {
	if err := w.train(watch); err != nil {
		return nil, err
	}
	if w.cfg.Check {
		return &report{losses: w.losses}, nil
	}
	return w.report(ctx)
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
