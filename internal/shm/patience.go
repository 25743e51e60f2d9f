package shm

import (
	"sync/atomic"
	"time"
)

// Patience is what a thread has learned from its waits: whether the next one looks at first, or sleeps at once.
//
// To look is to spin, or to give the core to whoever is ready for it and look again. It sees an answer within a microsecond, and nobody has to wake it. But it
// uses up the slice of time that the scheduler gives a thread. Where other threads are ready for the core, a thread without a slice left gets it back after a
// slice of each of them: milliseconds later. One that sleeps has most of its slice left, and is let in ahead of them when it is woken.
//
// A look that lasts much longer than it was meant to has lost the core to others. After that all waits sleep first, for a rest. When the rest is over they
// look again. If looks until the next loss have not been worth that loss, the next rest is longer. So a machine that stays busy costs one loss
// a longestRest, and a loss now and then on a machine that is not busy costs one shortestRest.
//
// The zero Patience looks. Threads may share one. Time is that of any clock that only grows.
type Patience struct {
	until atomic.Int64 // waits sleep first before this time
	rest  atomic.Int64 // how long the last rest was
	paid  atomic.Int64 // looks since the last loss that ended with an answer
}

const (
	// lostFrom is the length of a look from which it has lost the core. Looks are meant to last 0.1 ms. A slice of Linux is at least 1.4 ms on two
	// processors and 2.8 ms on eight; another rank that has the core gives it back sooner, but for copies of megabytes.
	lostFrom = time.Millisecond
	// lookSaves is what a look that pays saves: a sleep and a wake-up take that much longer. (Two processes that exchange 8 KiB: 21 us with two sleeps
	// instead of 2.6 us.)
	lookSaves = 10 * time.Microsecond
	// Rests. A loss takes a slice of each thread that is ready for the core: 3 to 15 ms with 2 to 8 busy loops on 2 cores.
	shortestRest = 10 * time.Millisecond
	longestRest  = time.Second
	restGrowth   = 4
)

// Looks reports whether a wait that begins at a time looks before it sleeps.
func (p *Patience) Looks(now time.Duration) bool { return int64(now) >= p.until.Load() }

// Looked takes in what came of a look of some length that ends at a time: whether it ended with an answer.
func (p *Patience) Looked(now, length time.Duration, answered bool) {
	switch {
	case length < lostFrom && answered:
		p.paid.Add(1)
	case length >= lostFrom && p.Looks(now): // of several threads that lose the core at once the first counts
		rest := min(restGrowth*time.Duration(p.rest.Load()), longestRest)
		if worth := time.Duration(p.paid.Swap(0)) * lookSaves; worth >= length || rest == 0 {
			rest = shortestRest
		}
		p.rest.Store(int64(rest))
		p.until.Store(int64(now + rest))
	}
}
