package host

import (
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

// show tells of a wait.
func (s *waits) show(w *waiter) {
	s.rank.Store(int64(w.rank))
	if s.since.Load() == 0 {
		s.at.Store(uint64(w.call.at))
		s.epoch.Store(w.call.epoch)
		s.op.Store(uint32(w.call.op))
		s.since.Store(w.since.UnixNano())
	}
}

// end is the end of the wait.
func (s *waits) end() {
	if s.since.Load() != 0 {
		s.since.Store(0)
	}
}

// note adds to the time that operations have waited for a rank of the group.
func (e *Engine) note(op opcode, rank int, d time.Duration) {
	row := e.waited[op].Load()
	for row == nil || rank >= len(*row) {
		e.widen(op, max(rank+1, len(e.peers)))
		row = e.waited[op].Load()
	}
	(*row)[rank].Add(int64(d))
}

// widen makes room for n ranks. A rank of this host has a place from the first wait on, those of other hosts follow: what other goroutines
// add at that moment may be lost.
func (e *Engine) widen(op opcode, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	old := e.waited[op].Load()
	if old != nil && len(*old) >= n {
		return
	}
	wide := make([]atomic.Int64, n)
	if old != nil {
		for r := range *old {
			wide[r].Store((*old)[r].Load())
		}
	}
	e.waited[op].Store(&wide)
}

// Waited tells how long this rank has waited for each rank of the group, by operation.
func (e *Engine) Waited(add func(operation string, rank int, d time.Duration)) {
	for op := range e.waited {
		if row := e.waited[op].Load(); row != nil {
			for rank := range *row {
				if d := (*row)[rank].Load(); d > 0 {
					add(opcode(op).String(), rank, time.Duration(d))
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
		c := flight.Running{Operation: opcode(p.waits.op.Load()).String(), Number: epoch, Since: time.Unix(0, since), WaitsFor: int(p.waits.rank.Load())}
		for peer := range e.peers {
			if epoch != 0 && e.word(peer, at).Load() < epoch {
				c.Absent = append(c.Absent, e.space.Name(peer))
			}
		}
		calls = append(calls, c)
	}
	return calls
}

// Awaits says for each rank of this host for which other one it waits, -1 for none.
func (e *Engine) Awaits() []int {
	awaits := make([]int, len(e.peers))
	for p := range awaits {
		awaits[p] = int(e.peers[p].awaited.Load()) - 1
	}
	return awaits
}
