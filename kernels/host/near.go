package host

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// near is a rank of the space: its words in the header of its segment.
type near struct {
	e *Engine
	who
	doorbell, sleepers, core, awaited, passes *atomic.Uint32
	waiting                                   *atomic.Uint64
}

// near is rank p of the space.
func (e *Engine) near(p int) *near { return &e.peers[p] }

func (n *near) id() who   { return n.who }
func (n *near) mark() int { return n.place }

func (n *near) looks(w *waiter) (looks, yields bool) {
	return !w.asleep && w.e.patience.Looks(w.since.Sub(w.e.began)), w.e.shares(n.place)
}

func (n *near) goesOn() bool {
	_, failed := n.e.awaits(n.place)
	return failed == 0
}

func (n *near) begun(w *waiter) bool {
	return w.call.epoch == 0 || n.e.word(n.place, w.call.at).Load() >= w.call.epoch
}

func (n *near) elsewhere(w *waiter) error { return w.elsewhere(n.place) }

// silence counts from when it has moved something, or the rank that it waits for, and so on.
func (n *near) silence(w *waiter, waited time.Duration) time.Duration {
	if waited >= w.lookAt || waited-w.heard > w.timeout {
		w.lookAt = waited + w.timeout/looksAtMoved
		if w.anyMoved(n.place) {
			w.heard = waited
			w.say()
		}
	}
	return waited - w.heard
}

// late blames no rank that waits for another one itself.
func (n *near) late(w *waiter) error {
	e := w.e
	culprit := e.culprit(n.place, w.call.at)
	name, sizes := e.space.Name(culprit), w.sizes(n.rank)
	if rank, waits := e.beyond(culprit); waits {
		w.leaves(len(e.peers)+rank, gaveUpBit)
		return &lateError{rank, fmt.Errorf("%w after %v%s: rank %d waits for rank %d of another host", comm.ErrTimeout, w.timeout, sizes, name, rank)}
	}
	w.leaves(culprit, gaveUpBit)
	waits := ""
	if culprit != n.place {
		waits = fmt.Sprintf("rank %d waits for rank %d itself; ", n.rank, name)
	}
	return &lateError{name, fmt.Errorf("%w after %v%s: %s%s", comm.ErrTimeout, w.timeout, sizes, waits, e.near(culprit).doing(w))}
}

func (n *near) doing(w *waiter) string {
	e, p, rank := n.e, n.place, n.rank
	at := ""
	if call, seq := e.space.Instead(p); seq != 0 {
		at = " and waits in " + call
	}
	if c, _, ok := w.callOf(n.waiting.Load()); ok {
		at = fmt.Sprintf(" and waits in %v, call %d of that kind", c.op, c.epoch)
	}
	if text := w.with.doing(rank); text != "" {
		return text + at
	}
	begun := e.word(p, w.call.at).Load()
	if begun < w.call.epoch {
		calls := "calls"
		if begun == 1 {
			calls = "call"
		}
		return fmt.Sprintf("rank %d has made %d %s%s; this is call %d, %v (it is busy, stopped, or makes other calls)",
			rank, begun, calls, at, w.call.epoch, w.call.op)
	}
	return fmt.Sprintf("rank %d has begun call %d, %v, and not come further (it waits for another rank, or is stopped)", rank, w.call.epoch, w.call.op)
}
