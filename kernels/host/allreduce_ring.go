package host

import "github.com/switchyard-moe/switchyard/kernels"

// ring sends chunk after chunk of every slice around the ranks: first as partial results, from the rank behind the
// slice's owner to the owner, then as results, from the owner on. All slices travel at the same time, each one rank
// behind the next, so every step of every rank takes one chunk from the previous rank and hands one to the next.
//
// A step waits for earlier steps of its neighbours alone, so the ring cannot stop: for the step before this one of the
// previous rank, which has filled the slot that is read here, and for the step of the next rank, Slots-1 back, that has
// emptied the slot that is filled here.
func (x *reducing) ring() error {
	a, c, n := x.a, x.c, x.c.Size
	for i := range x.links {
		x.enter(&x.links[i], -1, -1, kernels.Seq(x.epoch, 0))
	}
	if err := x.meetAll(); err != nil {
		return err
	}
	next, prev := &x.links[0], &x.links[n-2]
	steps, sent := a.RingSteps(), 0
	for k := 1; k <= int(a.Chunks(a.Longest())); k++ {
		for t := 0; t <= steps; t++ {
			gather := t // the step's number among those that gather; below 0 are those that reduce
			if a.Call.Collective.Reduces() {
				gather -= n - 1
			}
			var in, out []byte
			if t > 0 {
				if err := x.w.until(x.e.near(prev.peer), prev.entry, kernels.Seq(x.epoch, sent)); err != nil {
					return err
				}
				in = x.e.space.Range(x.me, c.Slot(prev.peer, sent), c.SlotBytes)
			}
			if t < steps {
				if emptied := sent + 1 - c.Slots; emptied > 0 {
					if err := x.w.until(x.e.near(next.peer), next.progress, kernels.Seq(x.epoch, emptied)); err != nil {
						return err
					}
				}
				out = x.e.space.Range(next.peer, c.Slot(x.me, sent+1), c.SlotBytes)
			}
			x.step(gather, k, in, out)
			if t > 0 {
				x.e.signal(prev.peer, prev.myProgress, kernels.Seq(x.epoch, sent))
			}
			if t < steps {
				sent++
				x.e.signal(next.peer, next.myEntry, kernels.Seq(x.epoch, sent))
			}
		}
	}
	if sent == 0 {
		return nil
	}
	// Chunks that the next rank has not read yet belong to this call.
	return x.w.until(x.e.near(next.peer), next.progress, kernels.Seq(x.epoch, sent))
}

// step handles chunk k of one slice. in is what came from the previous rank, nil in the first step; out is the next
// rank's slot, nil in the last. Slice me-gather is the one that rank me-1 handled a step before.
func (x *reducing) step(gather, k int, in, out []byte) {
	a, n := x.a, x.c.Size
	slice := (x.me - gather + n) % n
	_, length := a.Slice(slice)
	lo, hi := x.span(k, length)
	if lo >= hi {
		return
	}
	x.e.at(takingData, x.me)
	if gather < 0 {
		if mine := x.input(slice, lo, hi); in == nil {
			x.fold.start(out, mine)
		} else {
			x.fold.step(out, in, mine, a.Call.Op)
		}
		return
	}
	result := x.output(slice, lo, hi)
	switch {
	case gather > 0:
		copy(result, in)
	case a.Call.Collective.Reduces():
		x.fold.end(result, in, x.input(slice, lo, hi), a.Call.Op, n)
	default:
		move(result, x.input(slice, lo, hi))
	}
	copy(out, result)
}
