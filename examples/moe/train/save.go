package train

import (
	"context"
	"errors"
	"slices"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/examples/moe/checkpoint"
)

// save is collective: rank 0 gets the experts of all ranks and writes the model to a file.
func (w *worker) save(ctx context.Context) error {
	x, err := allreduce.New(ctx, w.heap, allreduce.Options{})
	if err != nil {
		return err
	}
	whole := checkpoint.New(w.cfg.Shared())
	for e, at := range w.dispatcher.Placement().Ranks {
		if at[0] == w.rank {
			slot := slices.Index(w.dispatcher.Placement().Local(w.rank), e)
			copyAll(whole.Experts[e], w.model.ExpertWeights(slot))
		}
		if err := broadcast(x, whole.Experts[e], at[0]); err != nil {
			return errors.Join(err, x.Close(ctx))
		}
	}
	if err := x.Close(ctx); err != nil || w.rank != 0 {
		return err
	}
	copyAll(whole.Dense, w.model.Weights())
	return whole.Write(w.cfg.Save)
}
