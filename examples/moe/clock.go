package main

import "time"

// phase is what a rank is busy with.
type phase int

const (
	computingDense phase = iota
	computingExperts
	dispatching // forward, and dispatch backward
	combining   // forward, and combine backward
	reducing    // what of the allreduce backward did not hide
	updating    // the optimizer
	phases
)

var phaseNames = [phases]string{"dense", "experts", "dispatch", "combine", "allreduce", "optimizer"}

// communicates says whether a phase is communication. That includes waiting for slower ranks.
func (p phase) communicates() bool { return p == dispatching || p == combining || p == reducing }

// clock adds up the time of a rank by phase.
type clock struct {
	spent [phases]time.Duration
	now   phase
	since time.Time // zero while stopped
}

// enter ends the phase before.
func (c *clock) enter(p phase) {
	t := time.Now()
	if !c.since.IsZero() {
		c.spent[c.now] += t.Sub(c.since)
	}
	c.now, c.since = p, t
}

func (c *clock) stop() {
	c.enter(c.now)
	c.since = time.Time{}
}

// commFraction is the part of the time that was communication.
func (c *clock) commFraction() float64 {
	var comm, all time.Duration
	for p, d := range c.spent {
		all += d
		if phase(p).communicates() {
			comm += d
		}
	}
	if all == 0 {
		return 0
	}
	return float64(comm) / float64(all)
}
