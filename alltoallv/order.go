package alltoallv

import "math"

// The order of sends with skewed splits. With the rotation all ranks reach the receiver that gets most at about the same time,
// share its port until it has everything, and send their other messages after that. It is faster if some send to it early while
// others send everything else first, so that its port is never idle and no rank has much left when it has everything.

const (
	// orderedBytes is how much the busiest port must carry for an order to be worth working out.
	orderedBytes = 16 << 20
	// orderedRanks is the largest number of ranks with such an order.
	orderedRanks = 16
	// turnBytes is about what a link carries while a sender turns to its next peer.
	turnBytes = 1 << 20
)

// sends is an order: the rotation, but the `last` largest messages of a rank come at its end, the largest last, unless the
// rotation has them among its first `early`.
type sends struct{ last, early int }

// of writes the order of a rank. to is what goes to each rank, from whichever rank.
func (s sends) of(order []int32, to []float64, rank int) []int32 {
	return s.from(order, largest(to), rank, len(to))
}

// largest are the ranks that get most, the first of them most; of equal ones the lower comes first, so all ranks find the same.
func largest(to []float64) (top [3]int32) {
	top = [3]int32{-1, -1, -1}
	for p, n := range to {
		i := len(top)
		for i > 0 && (top[i-1] < 0 || n > to[top[i-1]]) {
			i--
		}
		if i < len(top) {
			copy(top[i+1:], top[i:])
			top[i] = int32(p)
		}
	}
	return top
}

// from is of, for the ranks that get most.
func (s sends) from(order []int32, top [3]int32, rank, size int) []int32 {
	late := [2]int32{-1, -1}
	for i, k := 0, 0; k < s.last && i < len(top); i++ {
		if int(top[i]) != rank {
			late[k] = top[i]
			k++
		}
	}
	order = order[:0]
	for i, p := 1, rank; i < size; i++ {
		if p++; p == size {
			p = 0
		}
		if i <= s.early || int32(p) != late[0] && int32(p) != late[1] {
			order = append(order, int32(p))
		}
	}
	for k := s.last - 1; k >= 0; k-- {
		if p := late[k]; p >= 0 && (int(p)-rank-1+size)%size >= s.early {
			order = append(order, p)
		}
	}
	return order
}

// fluid is room for trying orders out, kept between calls. Senders and receivers are the same ranks.
type fluid struct {
	to     []float64
	orders [orderedRanks * orderedRanks]int32
	left   [orderedRanks][]int32 // what each sender has yet to send, the message that it is in first
	wake   [orderedRanks]float64 // when a sender has turned to its next receiver; never while it sends
	end    [orderedRanks]float64 // how far its receiver's port has got for each sender there when the message is through
	done   [orderedRanks]float64 // how far a port had got for each sender there,
	at     [orderedRanks]float64 // and when that was
	due    [orderedRanks]float64 // when the first of the messages there is through, if no other comes
	active [orderedRanks]float64 // how many there are
}

// finish is the time at which all messages have arrived, in bytes that a port carries until then, if every rank sends one message after
// the other and those that send to a receiver share its port. It stops at limit. There are at most orderedRanks ranks.
func (f *fluid) finish(s sends, to []float64, limit float64) float64 {
	n := len(to)
	never, top := math.Inf(1), largest(to)
	for r := range n {
		at := r * (n - 1)
		f.left[r] = s.from(f.orders[at:at:at+n-1], top, r, n)
		f.done[r], f.at[r], f.due[r], f.active[r] = 0, 0, never, 0
		f.turn(r, to, 0)
	}
	for now := 0.0; ; {
		next, who, sends := never, 0, false
		for r := range n {
			if f.wake[r] < next {
				next, who, sends = f.wake[r], r, true
			}
			if f.due[r] < next {
				next, who, sends = f.due[r], r, false
			}
		}
		if next == never {
			return now
		}
		if now = next; now > limit {
			return now
		}
		if sends {
			port := f.left[who][0]
			f.reach(port, now)
			f.active[port]++
			f.wake[who], f.end[who] = never, f.done[port]+to[port]
			f.settle(port, now, n)
			continue
		}
		port := int32(who)
		f.reach(port, now)
		for x := range n {
			if f.wake[x] == never && len(f.left[x]) > 0 && f.left[x][0] == port && f.end[x] <= f.done[port]+1 {
				f.active[port]--
				f.left[x] = f.left[x][1:]
				f.turn(x, to, now)
			}
		}
		f.settle(port, now, n)
	}
}

// turn makes a sender turn to its next receiver.
func (f *fluid) turn(x int, to []float64, now float64) {
	for len(f.left[x]) > 0 && to[f.left[x][0]] == 0 {
		f.left[x] = f.left[x][1:]
	}
	if f.wake[x] = math.Inf(1); len(f.left[x]) > 0 {
		f.wake[x] = now + turnBytes
	}
}

// reach moves a port on to now.
func (f *fluid) reach(port int32, now float64) {
	if f.active[port] > 0 {
		f.done[port] += (now - f.at[port]) / f.active[port]
	}
	f.at[port] = now
}

// settle computes when the next message at a port has arrived.
func (f *fluid) settle(port int32, now float64, n int) {
	first, never := math.Inf(1), math.Inf(1)
	for x := range n {
		if f.wake[x] == never && len(f.left[x]) > 0 && f.left[x][0] == port {
			first = min(first, f.end[x])
		}
	}
	f.due[port] = never
	if f.active[port] > 0 {
		f.due[port] = now + max(0, first-f.done[port])*f.active[port]
	}
}

// ordered says that an order of this rank's sends is worth the work, if its algorithm allows one. With 3 ranks the rotation is as good as
// any other.
func (t *Traffic) ordered() bool {
	return t.Multiprocessors && !t.Live && t.Size > 3 && t.Size <= orderedRanks && t.link() >= orderedBytes
}

const (
	// close is the factor by which an order may exceed the busy time of the most popular rank's port; the search ends with such an order.
	close = 1.02
	// tries is the number of orders that are tried: a try among 8 ranks takes 3 us, and the best is most often among the first six.
	tries = 6
)

// parts fills in the bytes that go to each rank, and returns their sum and the largest. It assumes that all ranks have this rank's
// splits. That is about right if some ranks are popular; otherwise the result is an order like any other.
func (t *Traffic) parts(f *fluid) (all, most float64) {
	f.to = sized(f.to, t.Size)
	for p, n := range t.SendBytes {
		if f.to[p] = float64(n); p == t.Rank {
			f.to[p] = float64(t.RecvTotal) / float64(t.Size-1)
		}
		all += f.to[p]
		most = max(most, f.to[p])
	}
	return all, most
}

// popularShare is the share of the most popular rank in all bytes from which a guess is better than the rotation.
const popularShare = 1 / 4.5

// guess is an order that takes less than a microsecond to find. Among 8 ranks, by the model of finish, skewed calls take 1 to 4%
// longer with it than with the best order, and 6 to 9% longer with the rotation.
func (t *Traffic) guess(f *fluid) sends {
	all, most := t.parts(f)
	early := int(math.Round(1.4 * (all - most) / most))
	if most < popularShare*all || early >= t.Size-1 {
		return sends{}
	}
	return sends{min(2, t.Size-2), max(1, early)}
}

// worthIt is the least gain over the rotation for which another order is taken.
const worthIt = 0.98

// sendOrder is the order in which this rank sends skewed splits.
func (t *Traffic) sendOrder(f *fluid, order []int32) []int32 {
	all, most := t.parts(f)
	var best sends
	ideal := float64(t.Size-1)*most + turnBytes
	least := worthIt * f.finish(best, f.to, math.Inf(1))
	// The popular port has no pause if the early senders keep it busy for as long as the others need for everything else. That number
	// of early senders is tried first, then more and fewer.
	first, tried := int(math.Round(1.2*(all-most)/most)), 0
	for i := 0; i < 2*t.Size && tried < tries; i++ {
		early := first + (i+1)/2*(1-i%2*2)
		if early < 1 || early >= t.Size-1 {
			continue
		}
		for last := min(2, t.Size-2); last >= 1 && least > close*ideal; last-- {
			tried++
			s := sends{last, early}
			if at := f.finish(s, f.to, least); at < least {
				best, least = s, at
			}
		}
	}
	return best.of(order, f.to, t.Rank)
}
