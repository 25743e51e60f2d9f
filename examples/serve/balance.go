package main

import (
	"context"
	"fmt"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/rebalance"
)

// placement is where experts are at first: with spare expert slots, some on several ranks. A rank that comes late gets another one.
func (r *rank) placement(ranks int) *dispatch.Placement {
	experts := r.whole.Config.Experts
	if r.Spare == 0 {
		return dispatch.Contiguous(experts, ranks)
	}
	slots := min(experts, (experts+ranks-1)/ranks+r.Spare)
	p, err := dispatch.Balance(make([]float64, experts), dispatch.BalanceOptions{Ranks: ranks, Slots: slots})
	if err != nil { // the numbers are those of a model, and there is room for all
		panic(err)
	}
	return p
}

// balance makes the loop of -balance. What moves with an expert is its weights, in every layer.
func (r *rank) balance(ctx context.Context) (*rebalance.Loop, error) {
	p := r.stack.Dispatcher.Placement()
	slots := len(p.Local(0))
	for rank := range r.group.Size() {
		if r.Balance == 0 || len(p.Local(rank)) != slots {
			return nil, nil
		}
	}
	c := r.whole.Config
	part := slots * c.ExpertSize()
	var tensors []memory.View
	for i := range c.Layers {
		tensors = append(tensors, memory.Wrap(r.model.Experts().W[i*part:(i+1)*part]))
	}
	return rebalance.New(ctx, r.stack.Heap, r.stack.Dispatcher, tensors, rebalance.Options{Window: r.Balance})
}

// even has the ranks look at their load after a step, and move experts to where they are equally busy.
func (r *rank) even() (moved string, err error) {
	if r.loop == nil {
		return "", nil
	}
	ctx, stop := context.WithTimeout(context.Background(), callTimeout)
	defer stop()
	change, err := r.loop.Step(ctx, nil)
	if err != nil || !change.Moved() {
		return "", err
	}
	return fmt.Sprintf("%.2f times the mean, now %.2f", change.Before, change.After), nil
}
