package host

import "github.com/switchyard-moe/switchyard/internal/shm"

// Ranks that are processes wait for one another far more cheaply when no core has more of them than it must: two that
// share one pay a switch for every message. The system's balancer does not know that they belong together, and on a
// busy machine it may leave them where they are. So every rank publishes its core when it begins to wait, and one that
// finds its core too full now and then moves to an emptier one. It is free to be moved again afterwards.

// waitsPerSpread is how many waits go by between two looks for a better core.
const waitsPerSpread = 64

// shares reports whether spinning would keep a rank from its work: ranks outnumber cores, or peer was last seen waiting on
// the core that this rank is on.
func (e *Engine) shares(peer int) bool {
	if e.bells != nil {
		return e.crowded
	}
	core := uint32(shm.Core() + 1)
	if own := e.peers[e.space.Rank].core; own.Load() != core {
		own.Store(core)
	}
	if peer == e.space.Rank || e.peers[peer].core.Load() != core {
		return e.crowded
	}
	if e.waits.Add(1)%waitsPerSpread == 0 {
		e.spread(int(core) - 1)
	}
	return true
}

// spread moves this rank from its core to the one with the fewest ranks, when that has at least two fewer and no higher
// rank is there to move instead.
func (e *Engine) spread(core int) {
	count := func(c int) (n int) {
		for p := range e.peers {
			if int(e.peers[p].core.Load())-1 == c {
				n++
			}
		}
		return n
	}
	for p := e.space.Rank + 1; p < len(e.peers); p++ {
		if int(e.peers[p].core.Load())-1 == core {
			return
		}
	}
	best, fewest := core, count(core)-1
	for _, c := range e.cores {
		if n := count(c); n < fewest {
			best, fewest = c, n
		}
	}
	if best != core {
		shm.MoveTo(best)
		e.peers[e.space.Rank].core.Store(uint32(best + 1))
	}
}
