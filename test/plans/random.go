package plans

import (
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// random makes a plan in one order of all ranks' steps, so that it ends. Every place is written once.
type random struct {
	builder
	rnd     *rand.Rand
	scratch []int    // chunks of each rank that are in use
	read    [][]bool // whether a rank reads another's input or output
}

// Random is a plan of a collective in which each chunk comes to each output in a way of its own: put or read, through scratch of other ranks,
// combined in any order and at once or by halves.
func Random(rnd *rand.Rand, c plan.Collective, ranks int) *plan.Plan {
	x := &random{builder: build("random", c, ranks, 1+rnd.IntN(3), 0), rnd: rnd, scratch: make([]int, ranks)}
	for range ranks {
		x.read = append(x.read, make([]bool, ranks))
	}
	chunks := x.p.Chunks
	for _, k := range rnd.Perm(chunks * ranks) {
		rank, chunk := k/chunks, k%chunks
		switch c {
		case plan.AllReduce:
			if rank == 0 {
				owner := rnd.IntN(ranks)
				x.combine(owner, chunk, chunk)
				x.spread(owner, plan.At(plan.Output, chunk))
			}
		case plan.ReduceScatter:
			x.combine(rank, k, chunk)
		case plan.AllGather:
			x.move(rank, plan.Copy, plan.At(plan.Output, k), plan.At(plan.Input, chunk))
			x.spread(rank, plan.At(plan.Output, k))
		case plan.AllToAll:
			for dst := range ranks {
				x.carry(rank, plan.At(plan.Input, dst*chunks+chunk), dst, plan.At(plan.Output, k))
			}
		}
	}
	for reader := range ranks {
		for rank, read := range x.read[reader] {
			if read {
				x.tell(reader, rank)
			}
		}
		x.p.Scratch = max(x.p.Scratch, x.scratch[reader])
	}
	return x.p
}

// tell has a rank wait for another.
func (x *random) tell(from, to int) {
	n := x.rnd.IntN(3)
	x.add(from, plan.Step{Do: plan.Signal, Peer: &to, Semaphore: n})
	x.add(to, plan.Step{Do: plan.Wait, Peer: &from, Semaphore: n})
}

// room is a chunk of a rank's scratch.
func (x *random) room(rank int) plan.Place {
	x.scratch[rank]++
	return plan.At(plan.Scratch, x.scratch[rank]-1)
}

// hand brings what is in a place of one rank to a place of another.
func (x *random) hand(from int, at plan.Place, to int, where plan.Place) {
	if x.rnd.IntN(2) == 0 {
		x.move(from, plan.Put, where.Of(to), at)
		x.tell(from, to)
		return
	}
	if at.Buffer != plan.Input {
		x.tell(from, to)
	}
	x.move(to, plan.Copy, where, at.Of(from))
	x.read[to][from] = true
}

// carry is hand, also within a rank, and at times through the scratch of any other.
func (x *random) carry(from int, at plan.Place, to int, where plan.Place) {
	if middle := x.rnd.IntN(x.p.Ranks); middle != from && x.rnd.IntN(3) == 0 {
		place := x.room(middle)
		x.hand(from, at, middle, place)
		from, at = middle, place
	}
	if from == to {
		x.move(to, plan.Copy, where, at)
		return
	}
	x.hand(from, at, to, where)
}

// combine leaves a chunk of all inputs in a rank's output.
func (x *random) combine(rank, input, output int) {
	var from []plan.Place
	for _, peer := range x.rnd.Perm(x.p.Ranks) {
		at := plan.At(plan.Input, input)
		switch {
		case peer == rank:
		case x.rnd.IntN(2) == 0:
			at = at.Of(peer)
			x.read[rank][peer] = true
		default:
			to := x.room(rank)
			x.carry(peer, at, rank, to)
			at = to
		}
		from = append(from, at)
	}
	if half := 2 + x.rnd.IntN(2); half < len(from) {
		part := x.room(rank)
		x.move(rank, plan.Reduce, part, from[:half]...)
		from = append(from[half:], part)
	}
	x.move(rank, plan.Reduce, plan.At(plan.Output, output), from...)
}

// spread brings what a rank has in a place of its output to that place of all others.
func (x *random) spread(rank int, at plan.Place) {
	have := []int{rank}
	for _, peer := range x.rnd.Perm(x.p.Ranks) {
		if peer != rank {
			x.hand(have[x.rnd.IntN(len(have))], at, peer, at)
			have = append(have, peer)
		}
	}
}
