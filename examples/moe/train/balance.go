package train

import (
	"context"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/rebalance"
)

// balance makes the loop of -balance. What moves with an expert is its weights and their moments, in every layer.
func (w *worker) balance(ctx context.Context) (*rebalance.Loop, error) {
	c, p := w.cfg, w.dispatcher.Placement()
	for r := range w.ranks {
		if c.Balance == 0 || len(p.Local(r)) != len(p.Local(0)) {
			return nil, nil
		}
	}
	s, n := w.model.Experts(), len(p.Local(w.rank))*c.ExpertSize()
	var tensors []memory.View
	for i := range c.Layers {
		for _, part := range [][]float32{s.W, s.M, s.V} {
			tensors = append(tensors, memory.Wrap(part[i*n:(i+1)*n]))
		}
	}
	return rebalance.New(ctx, w.heap, w.dispatcher, tensors, rebalance.Options{Window: c.Balance})
}

// even has the ranks look at their load after a step, and move experts.
func (w *worker) even(ctx context.Context, n int) error {
	if w.loop == nil {
		return nil
	}
	change, err := w.loop.Step(ctx, nil)
	if err != nil || !change.Moved() {
		return err
	}
	var moved []int
	for _, m := range change.Moves {
		moved = append(moved, m.Expert)
	}
	slices.Sort(moved)
	w.Events = append(w.Events, fmt.Sprintf("After step %d %s moved: of the load of the last %d steps the busiest rank had %.2f times the mean, and would have %.2f.",
		n, list("expert", moved), w.cfg.Balance, change.Before, change.After))
	return nil
}
