// Package phase says what ranks are busy with, and for how long.
package phase

import "time"

// Phase is what a rank is busy with.
type Phase int

// The phases.
const (
	Dense Phase = iota
	Experts
	Dispatch  // forward, and dispatch backward
	Combine   // forward, and combine backward
	AllReduce // what backward did not hide of it
	Optimizer
	Count
)

// Names are those of the phases.
var Names = [Count]string{"dense", "experts", "dispatch", "combine", "allreduce", "optimizer"}

// communicates says whether a phase is communication. That includes waiting for slower ranks.
func (p Phase) communicates() bool { return p == Dispatch || p == Combine || p == AllReduce }

// Span is a phase from beginning to end, in nanoseconds of the machine's clock, which its processes share.
type Span struct {
	Phase      Phase
	Begin, End int64
}

// Clock adds up the time of a rank by phase, and remembers when the phases of the last steps were.
type Clock struct {
	Spent [Count]time.Duration
	now   Phase
	since time.Time // zero while stopped
	steps [tracedSteps][]Span
	step  int // steps begun
}

// tracedSteps is how many steps the clock remembers. The report shows the median one.
const tracedSteps = 9

// Enter ends the phase before.
func (c *Clock) Enter(p Phase) {
	t := time.Now()
	if !c.since.IsZero() {
		c.Spent[c.now] += t.Sub(c.since)
		if t := t.UnixNano(); c.step > 0 {
			trace := &c.steps[c.step%tracedSteps]
			*trace = append(*trace, Span{c.now, c.since.UnixNano(), t})
		}
	}
	c.now, c.since = p, t
}

// Begin is Enter for the first phase of a step.
func (c *Clock) Begin(p Phase) {
	c.step++
	trace := &c.steps[c.step%tracedSteps]
	*trace = (*trace)[:0]
	c.Enter(p)
}

// Stop ends the phase; the time until the next Enter is nobody's.
func (c *Clock) Stop() {
	c.Enter(c.now)
	c.since = time.Time{}
}

// Trace is the spans of the last whole steps, oldest first.
func (c *Clock) Trace() [][]Span {
	var all [][]Span
	for i := max(1, c.step-tracedSteps+1); i <= c.step; i++ {
		all = append(all, append([]Span(nil), c.steps[i%tracedSteps]...))
	}
	return all
}

// Total is the time in communication and all time so far.
func (c *Clock) Total() (comm, all time.Duration) {
	for p, d := range c.Spent {
		all += d
		if Phase(p).communicates() {
			comm += d
		}
	}
	return comm, all
}

// CommFraction is the part of the time that was communication.
func (c *Clock) CommFraction() float64 {
	comm, all := c.Total()
	if all == 0 {
		return 0
	}
	return float64(comm) / float64(all)
}
