package host

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// These functions show calls while they run. They read shared memory, so nobody calls them once the heap is closed.

// waits is the wait of a port's call that has begun to sleep, zero in between.
type waits struct {
	since     atomic.Int64 // in nanoseconds since 1970, 0: there is none
	rank      atomic.Int64 // of the group
	at, epoch atomic.Uint64
	op        atomic.Uint32
}

// show tells of a wait, and reports whether it is a new one.
func (s *waits) show(w *waiter) (first bool) {
	s.rank.Store(int64(w.rank))
	if first = s.since.Load() == 0; first {
		s.at.Store(uint64(w.call.at))
		s.epoch.Store(w.call.epoch)
		s.op.Store(uint32(w.call.op))
		s.since.Store(w.since.UnixNano())
	}
	return first
}

// end is the end of the wait.
func (s *waits) end() {
	if s.since.Load() != 0 {
		s.since.Store(0)
	}
}

// note adds to the time that operations have waited for a rank of the group. absent says that it had not begun the call.
func (e *Engine) note(op opcode, rank int, d time.Duration, absent bool) {
	row := e.waited[op].Load()
	for row == nil || rank >= len(*row) {
		e.widen(op, max(rank+1, len(e.peers)))
		row = e.waited[op].Load()
	}
	if w := &(*row)[rank]; absent {
		w.absent.Add(int64(d))
	} else {
		w.begun.Add(int64(d))
	}
}

// waitedFor is the time that this rank has waited for another, in nanoseconds: in waits at whose beginning that one had begun the call, and
// in others.
type waitedFor struct{ begun, absent atomic.Int64 }

// widen makes room for n ranks. A rank of this host has a place from the first wait on, those of other hosts follow: what other goroutines
// add at that moment may be lost.
func (e *Engine) widen(op opcode, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	old := e.waited[op].Load()
	if old != nil && len(*old) >= n {
		return
	}
	wide := make([]waitedFor, n)
	if old != nil {
		for r := range *old {
			wide[r].begun.Store((*old)[r].begun.Load())
			wide[r].absent.Store((*old)[r].absent.Load())
		}
	}
	e.waited[op].Store(&wide)
}

// Waited tells how long this rank has waited for each rank of the group, by operation.
func (e *Engine) Waited(add func(w flight.Wait, d time.Duration)) {
	for op := range e.waited {
		if row := e.waited[op].Load(); row != nil {
			for rank := range *row {
				w := &(*row)[rank]
				if d := w.begun.Load(); d > 0 {
					add(flight.Wait{Operation: opcode(op).String(), Peer: rank}, time.Duration(d))
				}
				if d := w.absent.Load(); d > 0 {
					add(flight.Wait{Operation: opcode(op).String(), Peer: rank, Absent: true}, time.Duration(d))
				}
			}
		}
	}
}

// Running tells of the calls that wait, longer than a rank looks before it sleeps, in terms of the group.
func (e *Engine) Running() (calls []flight.Running) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.ports {
		since := p.waits.since.Load()
		if since == 0 {
			continue
		}
		at, epoch := int64(p.waits.at.Load()), p.waits.epoch.Load()
		c := flight.Running{ID: p.offset, Operation: opcode(p.waits.op.Load()).String(), Number: epoch, Since: time.Unix(0, since), WaitsFor: int(p.waits.rank.Load())}
		c.Absent = e.absent(at, epoch)
		calls = append(calls, c)
	}
	return calls
}

// absent are the ranks of this host, as ranks of the group, that have not begun a call of the communicator whose counter lies at an offset.
// A call between two ranks has the number 0, and none of them.
func (e *Engine) absent(at int64, epoch uint64) (ranks []int) {
	for peer := range e.peers {
		if epoch != 0 && e.word(peer, at).Load() < epoch {
			ranks = append(ranks, e.space.Name(peer))
		}
	}
	return ranks
}

// Awaits says for each rank of this host for which other one of the group it waits, -1 for none.
func (e *Engine) Awaits() []int {
	awaits := make([]int, len(e.peers))
	for p := range awaits {
		if rank, waits := e.beyond(p); waits {
			awaits[p] = rank
		} else if awaits[p], _ = e.awaits(p); awaits[p] >= 0 && awaits[p] < len(e.peers) {
			awaits[p] = e.space.Name(awaits[p])
		}
	}
	return awaits
}

// Waits that took at least shownPause are kept, the last keptPauses of a rank: to keep one takes 0.1% of its time.
const (
	shownPause = 20 * time.Microsecond
	keptPauses = 2048
)

// pauses are the last long waits of a rank.
type pauses struct {
	mu   sync.Mutex
	ring []pause
	made int
}

// pause is a wait in a call of the communicator at an offset, for a rank of the group. It counts from when the engine was made.
type pause struct {
	offset      int64
	rank        int
	began, took time.Duration
}

func (p *pauses) add(one pause) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ring[p.made%len(p.ring)] = one
	p.made++
}

// Pauses are the last long waits, oldest first, for ranks of the group.
func (e *Engine) Pauses() (all []flight.Pause) {
	p := &e.pauses
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := max(0, p.made-len(p.ring)); k < p.made; k++ {
		one := &p.ring[k%len(p.ring)]
		all = append(all, flight.Pause{ID: one.offset, For: one.rank, Began: e.began.Add(one.began), Took: one.took})
	}
	return all
}
