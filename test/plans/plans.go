// Package plans has plans of known collectives, for tests.
package plans

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// builder makes the programs of a plan.
type builder struct{ p *plan.Plan }

func build(name string, c plan.Collective, ranks, chunks, scratch int) builder {
	return builder{&plan.Plan{Name: fmt.Sprintf("%s-%s-%d", c, name, ranks), Collective: c, Ranks: ranks, Chunks: chunks, Scratch: scratch, Programs: make([][]plan.Step, ranks)}}
}

func (b builder) add(rank int, s plan.Step) { b.p.Programs[rank] = append(b.p.Programs[rank], s) }

func (b builder) move(rank int, do plan.Kind, to plan.Place, from ...plan.Place) {
	b.add(rank, plan.Step{Do: do, From: from, To: &to})
}

func (b builder) flag(rank int, do plan.Kind, peer int) { b.add(rank, plan.Step{Do: do, Peer: &peer}) }

// hand is a step of a ring: a rank puts a chunk to the next one, and waits for what the last one put.
func (b builder) hand(rank int, to, from plan.Place) {
	ranks := b.p.Ranks
	next, last := (rank+1)%ranks, (rank+ranks-1)%ranks
	b.move(rank, plan.Put, to.Of(next), from)
	b.flag(rank, plan.Signal, next)
	b.flag(rank, plan.Wait, last)
}

// OneShotAllReduce has every rank put its whole input to all others, and combine what came in the order of ranks. It is for small calls.
func OneShotAllReduce(ranks int) *plan.Plan {
	b := build("one-shot", plan.AllReduce, ranks, 1, ranks)
	for rank := range ranks {
		for i := 1; i < ranks; i++ {
			peer := (rank + i) % ranks
			b.move(rank, plan.Put, plan.At(plan.Scratch, rank).Of(peer), plan.At(plan.Input, 0))
			b.flag(rank, plan.Signal, peer)
		}
		var from []plan.Place
		for peer := range ranks {
			if peer == rank {
				from = append(from, plan.At(plan.Input, 0))
				continue
			}
			from = append(from, plan.At(plan.Scratch, peer))
			b.flag(rank, plan.Wait, peer)
		}
		b.move(rank, plan.Reduce, plan.At(plan.Output, 0), from...)
	}
	return b.p
}

// RingAllReduce has partial results go once around the ring to be combined and once to be handed on. Each rank sends every byte twice.
func RingAllReduce(ranks int) *plan.Plan {
	b := build("ring", plan.AllReduce, ranks, ranks, ranks-1)
	for rank := range ranks {
		chunk := func(back int) int { return (rank - back + 2*ranks) % ranks }
		from := plan.Input
		for step := range ranks - 1 {
			b.hand(rank, plan.At(plan.Scratch, step), plan.At(from, chunk(step)))
			b.move(rank, plan.Reduce, plan.At(plan.Output, chunk(step+1)), plan.At(plan.Scratch, step), plan.At(plan.Input, chunk(step+1)))
			from = plan.Output
		}
		for step := range ranks - 1 {
			b.hand(rank, plan.At(plan.Output, chunk(step-1)), plan.At(plan.Output, chunk(step-1)))
		}
	}
	return b.p
}

// RingAllGather hands every rank's slice around the ring.
func RingAllGather(ranks int) *plan.Plan {
	b := build("ring", plan.AllGather, ranks, 1, 0)
	for rank := range ranks {
		b.move(rank, plan.Copy, plan.At(plan.Output, rank), plan.At(plan.Input, 0))
		for step := range ranks - 1 {
			slice := (rank - step + ranks) % ranks
			b.hand(rank, plan.At(plan.Output, slice), plan.At(plan.Output, slice))
		}
	}
	return b.p
}

// DirectAllToAll has every rank put each slice to its rank, the next rank first.
func DirectAllToAll(ranks int) *plan.Plan {
	b := build("direct", plan.AllToAll, ranks, 1, 0)
	for rank := range ranks {
		for i := 1; i < ranks; i++ {
			peer := (rank + i) % ranks
			b.move(rank, plan.Put, plan.At(plan.Output, rank).Of(peer), plan.At(plan.Input, peer))
			b.flag(rank, plan.Signal, peer)
		}
		b.move(rank, plan.Copy, plan.At(plan.Output, rank), plan.At(plan.Input, rank))
		for i := 1; i < ranks; i++ {
			b.flag(rank, plan.Wait, (rank+ranks-i)%ranks)
		}
	}
	return b.p
}
