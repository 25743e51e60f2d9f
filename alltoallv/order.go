package alltoallv

import (
	"math"
	"slices"
)

// The order of sends where splits are skewed. With the rotation as it is, all ranks reach the receiver that gets most at about
// the same time, share its port until it is done, and only then send the rest of what they have: their other messages come on
// top of that receiver's time. Better some send to it early while others send everything else first, so that its port is
// never idle and nobody has much left when it is through.

const (
	// orderedBytes is how much the busiest port must carry for an order to be worth working out.
	orderedBytes = 16 << 20
	// orderedRanks is up to how many ranks it is worked out.
	orderedRanks = 16
	// turnBytes is what a link carries, roughly, while a sender turns to its next peer.
	turnBytes = 1 << 20
)

// sends is an order: the rotation, but the `last` largest messages of a rank come at its end, the largest last, unless the
// rotation has them among its first `early`.
type sends struct{ last, early int }

// of writes the order of a rank. to is what goes to each rank, from whichever rank.
func (s sends) of(order []int32, to []float64, rank int) []int32 {
	n := len(to)
	order = order[:0]
	for i := 1; i < n; i++ {
		order = append(order, int32((rank+i)%n))
	}
	var late [2]int32
	for i := range s.last {
		late[i] = -1
		for p := range int32(n) { // of equal ones all ranks take the same
			if int(p) != rank && !slices.Contains(late[:i], p) && (late[i] < 0 || to[p] > to[late[i]]) {
				late[i] = p
			}
		}
	}
	for i := s.last - 1; i >= 0; i-- {
		if (int(late[i])-rank-1+n)%n >= s.early {
			at := slices.Index(order, late[i])
			order = append(slices.Delete(order, at, at+1), late[i])
		}
	}
	return order
}

// finish is when all messages have arrived, in bytes that a port carries meanwhile, where every rank sends one message after the
// other and a receiver's port is shared by those that send to it.
func (s sends) finish(to []float64) float64 {
	n := len(to)
	orders := make([]int32, n*(n-1))
	type sender struct {
		order      []int32
		left, turn float64 // of the message, and of the time before it
	}
	all := make([]sender, n)
	next := func(x *sender) {
		for len(x.order) > 0 && to[x.order[0]] == 0 {
			x.order = x.order[1:]
		}
		if len(x.order) > 0 {
			x.left, x.turn = to[x.order[0]], turnBytes
		}
	}
	for r := range all {
		at := r * (n - 1)
		all[r].order = s.of(orders[at:at:at+n-1], to, r)
		next(&all[r])
	}
	shared := make([]float64, n)
	var now float64
	for {
		clear(shared)
		for r := range all {
			if x := &all[r]; len(x.order) > 0 && x.turn <= 0 {
				shared[x.order[0]]++
			}
		}
		step := math.Inf(1) // until the next of them comes to something else
		for r := range all {
			switch x := &all[r]; {
			case len(x.order) == 0:
			case x.turn > 0:
				step = min(step, x.turn)
			default:
				step = min(step, x.left*shared[x.order[0]])
			}
		}
		if math.IsInf(step, 1) {
			return now
		}
		now += step
		for r := range all {
			x := &all[r]
			switch {
			case len(x.order) == 0:
			case x.turn > 0:
				x.turn -= step
			default:
				if x.left -= step / shared[x.order[0]]; x.left <= 1 {
					x.order = x.order[1:]
					next(x)
				}
			}
		}
	}
}

// ordered says that an order of this rank's sends is worth working out, where its algorithm leaves it one.
func (t *Traffic) ordered() bool {
	return t.Multiprocessors && !t.Live && t.Size > 2 && t.Size <= orderedRanks && t.link() >= orderedBytes
}

// sendOrder is the order in which this rank sends skewed splits. It takes its own splits for those of all others, as they are
// where some ranks are popular; where they are not, it is an order like any other.
func (t *Traffic) sendOrder(order []int32) []int32 {
	to := make([]float64, t.Size)
	for p, n := range t.SendBytes {
		to[p] = float64(n)
	}
	to[t.Rank] = float64(t.RecvTotal) / float64(t.Size-1)
	var best sends
	least := best.finish(to) * fewer // another order has to be worth it
	for last := 1; last <= min(2, t.Size-2); last++ {
		for early := 1; early < t.Size-1; early++ {
			s := sends{last, early}
			if at := s.finish(to); at < least {
				best, least = s, at
			}
		}
	}
	return best.of(order, to, t.Rank)
}
