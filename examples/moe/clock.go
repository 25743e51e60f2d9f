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

// span is a phase from beginning to end, in nanoseconds of the machine's clock, which its processes share.
type span struct {
	Phase      phase
	Begin, End int64
}

// clock adds up the time of a rank by phase, and remembers when the phases of the last steps were.
type clock struct {
	spent [phases]time.Duration
	now   phase
	since time.Time // zero while stopped
	steps [tracedSteps][]span
	step  int // steps begun
}

// tracedSteps is how many steps the clock remembers. The report shows the median one.
const tracedSteps = 9

// enter ends the phase before.
func (c *clock) enter(p phase) {
	t := time.Now()
	if !c.since.IsZero() {
		c.spent[c.now] += t.Sub(c.since)
		if t := t.UnixNano(); c.step > 0 {
			trace := &c.steps[c.step%tracedSteps]
			*trace = append(*trace, span{c.now, c.since.UnixNano(), t})
		}
	}
	c.now, c.since = p, t
}

// begin is enter for the first phase of a step.
func (c *clock) begin(p phase) {
	c.step++
	trace := &c.steps[c.step%tracedSteps]
	*trace = (*trace)[:0]
	c.enter(p)
}

func (c *clock) stop() {
	c.enter(c.now)
	c.since = time.Time{}
}

// trace is the spans of the last whole steps, oldest first.
func (c *clock) trace() [][]span {
	var all [][]span
	for i := max(1, c.step-tracedSteps+1); i <= c.step; i++ {
		all = append(all, append([]span(nil), c.steps[i%tracedSteps]...))
	}
	return all
}

// total is the time in communication and all time so far.
func (c *clock) total() (comm, all time.Duration) {
	for p, d := range c.spent {
		all += d
		if phase(p).communicates() {
			comm += d
		}
	}
	return comm, all
}

// commFraction is the part of the time that was communication.
func (c *clock) commFraction() float64 {
	comm, all := c.total()
	if all == 0 {
		return 0
	}
	return float64(comm) / float64(all)
}
