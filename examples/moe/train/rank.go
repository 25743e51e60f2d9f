package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
)

// All runs this process's ranks and returns when all have ended. The error is the first that happened. The report is that of
// rank 0, if it is here. watch, which may be nil, is called after each step of rank 0.
//
// Making many ranks takes long. When ctx ends before the first step, and nobody waits for these ranks elsewhere, All leaves them to
// the end of the process.
func All(ctx context.Context, groups []*comm.Group, c config.Config, text *text.Corpus, watch func(*report.History)) (*report.Report, error) {
	type end struct {
		rank   int
		report *report.Report
		err    error
	}
	ends := make(chan end, len(groups)+1)
	const making, training, abandoned = 0, 1, 2
	var now atomic.Int32
	seen := func(h *report.History) {
		now.CompareAndSwap(making, training)
		if watch != nil && now.Load() == training {
			watch(h)
		}
	}
	for _, g := range groups {
		rank := g.Rank()
		go func() {
			r, err := trainRank(ctx, g, c, text, seen)
			ends <- end{rank, r, err}
		}()
	}
	left := len(groups)
	alone, stop := context.WithCancel(ctx) // ends when only the one that is late is left, of those that are here
	defer stop()
	if c.Late || c.ReplaceAt > 0 && !c.Join {
		left++
		go func() {
			rank, r, err := trainLate(ctx, alone, c, text, seen)
			ends <- end{rank, r, err}
		}()
	}
	var r *report.Report
	var first error
	asked := ctx.Done()
	if c.Join {
		asked = nil
	}
	for left > 0 {
		if left == 1 && !c.Late {
			stop()
		}
		var e end
		select {
		case e = <-ends:
			left--
		case <-asked:
			if asked = nil; now.CompareAndSwap(making, abandoned) {
				return nil, context.Cause(ctx)
			}
			continue
		}
		if e.err != nil && first == nil {
			first = e.err
			if !errors.Is(e.err, ErrStopped) && !errors.Is(e.err, ErrDiverged) { // which all ranks have
				first = fmt.Errorf("rank %d: %w", e.rank, e.err)
			}
		}
		if e.report != nil {
			r = e.report
		}
	}
	return r, first
}

// lateFor is how long a fresh rank waits until it is admitted: longer than anybody trains.
const lateFor = 1000 * time.Hour

// trainLate is what a fresh rank does: it waits until the others admit it. When waiting ends before, nobody needs it.
func trainLate(ctx, waiting context.Context, c config.Config, text *text.Corpus, watch func(*report.History)) (rank int, r *report.Report, err error) {
	meet := meeting(c)
	meet.Late, meet.JoinTimeout = true, lateFor
	g, err := comm.Join(waiting, meet)
	if err != nil {
		if waiting.Err() != nil {
			err = nil
		}
		return -1, nil, err
	}
	rank, c.Late = g.Rank(), true
	r, err = trainRank(ctx, g, c, text, watch)
	return rank, r, err
}

// How long ranks have to end by themselves: when one has failed; when they were asked to before the first step; and when they were
// asked to later, which takes a step and a report. The latter is in seconds and, for slow steps, in steps.
const (
	Grace      = 5 * time.Second
	graceFirst = time.Second
	GraceStop  = 30 * time.Second
	graceSteps = 64
)

// trainRank is what a rank does from beginning to end. The report is of all ranks together, if this rank is 0 at the end.
//
// When ctx ends the rank stops in good order, with a report of what is done. It gives up when that takes too long.
func trainRank(ctx context.Context, g *comm.Group, c config.Config, text *text.Corpus, watch func(*report.History)) (r *report.Report, err error) {
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
			wait = GraceStop + graceSteps*time.Duration(s)
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
			step.Store(int64(w.Elapsed) / int64(w.Done()))
			if w.rank == 0 && watch != nil {
				watch(&w.History)
			}
		})
		change := w.heal
		switch {
		case errors.Is(err, errAdmit):
			change = w.grow
		case !c.Heals() || !errors.Is(err, comm.ErrPeerLost) || ctx.Err() != nil:
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
	if err != nil && !errors.Is(err, ErrStopped) && !errors.Is(err, ErrDiverged) {
		g.Abort(err) // a rank that gives up takes the others along; if another was first, this does nothing
	}
	if w != nil {
		err = errors.Join(err, w.close(inner))
	}
	return r, err
}

// run trains and makes the report, also of what was done when there is an error.
func (w *worker) run(ctx, inner context.Context, watch func(*worker)) (*report.Report, error) {
	err := w.train(ctx, watch)
	if errors.Is(err, errAdmit) {
		return nil, err
	}
	var r *report.Report
	if w.rank == 0 {
		r = w.soFar()
		r.Stopped = errors.Is(err, ErrStopped) || err != nil && ctx.Err() != nil
	}
	if w.cfg.Check || err != nil && !errors.Is(err, ErrStopped) {
		return r, err
	}
	if w.cfg.Save != "" {
		failed := w.save(inner)
		if r != nil && failed == nil {
			r.Saved = w.cfg.Save
		}
		err = errors.Join(err, failed)
	}
	return r, errors.Join(err, w.finish(inner, r, errors.Is(err, ErrStopped)))
}

// agree makes sure that all ranks were given the same flags and the same text.
func agree(ctx context.Context, g *comm.Group, c config.Config, text *text.Corpus) error {
	mine, err := json.Marshal(struct {
		Config config.Config
		Train  int
		Digest uint64
	}{c.Shared(), len(text.Train), text.Digest()})
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
