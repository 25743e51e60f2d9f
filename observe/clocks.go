package observe

import (
	"slices"
	"time"
)

// Clock says how far a host's clock is from that of the first host of its job.
type Clock struct {
	Job  string `json:"job"`
	Host int    `json:"host"`
	// Offset is added to the host's times. It is off by Within at most, as Calls calls that both hosts made tell; without one nothing is known.
	Offset time.Duration `json:"offset_ns"`
	Within time.Duration `json:"within_ns"`
	Calls  int           `json:"calls"`
}

// meets are operations that end on no rank before all ranks have begun them.
func meets(operation string) bool {
	return slices.Contains([]string{"alltoallv", "dispatch", "all-reduce", "all-gather", "reduce-scatter"}, operation)
}

// Clocks measures the clocks of hosts by their calls, without a message: no rank ends an exchange before every other has begun it, so each
// call bounds the offset from both sides. The bounds of the shortest calls are a round trip apart.
func Clocks(calls []Call) (clocks []Clock) {
	type span struct{ started, finished time.Time } // the last start and the first end of a call's ranks on a host
	type place struct {
		job  string
		host int
	}
	of := map[place]map[meeting]span{}
	var order []place
	for i := range calls {
		c := &calls[i]
		p := place{c.Job, c.Host}
		if of[p] == nil {
			of[p] = map[meeting]span{}
			order = append(order, p)
		}
		if c.State != "finished" || c.Started == nil || c.Call == 0 || !meets(c.Operation) {
			continue
		}
		k := meeting{c.Job, c.Group, c.ID, c.Call, c.Operation}
		s, ok := of[p][k]
		if !ok || c.Started.After(s.started) {
			s.started = *c.Started
		}
		if !ok || c.Finished.Before(s.finished) {
			s.finished = *c.Finished
		}
		of[p][k] = s
	}
	first := map[string]place{}
	for _, p := range order {
		if f, ok := first[p.job]; !ok || p.host < f.host {
			first[p.job] = p
		}
	}
	for _, p := range order {
		f := first[p.job]
		if p == f {
			continue
		}
		clock := Clock{Job: p.job, Host: p.host}
		var least, most time.Duration
		for k, there := range of[p] {
			here, ok := of[f][k]
			if !ok {
				continue
			}
			low, high := here.started.Sub(there.finished), here.finished.Sub(there.started)
			if clock.Calls++; clock.Calls == 1 {
				least, most = low, high
			}
			least, most = max(least, low), min(most, high)
		}
		if clock.Calls > 0 {
			clock.Offset, clock.Within = (least+most)/2, (most-least).Abs()/2
		}
		clocks = append(clocks, clock)
	}
	return clocks
}

// onOneClock is the calls with their times on the clock of the first host of their job.
func onOneClock(calls []Call, clocks []Clock) []Call {
	calls = slices.Clone(calls)
	for i := range calls {
		c := &calls[i]
		at := slices.IndexFunc(clocks, func(k Clock) bool { return k.Job == c.Job && k.Host == c.Host })
		if at < 0 {
			continue
		}
		moved := func(t *time.Time) *time.Time {
			if t == nil {
				return nil
			}
			m := t.Add(clocks[at].Offset)
			return &m
		}
		c.Enqueued, c.Started, c.Finished = c.Enqueued.Add(clocks[at].Offset), moved(c.Started), moved(c.Finished)
		c.Waits = slices.Clone(c.Waits)
		for k := range c.Waits {
			c.Waits[k].Began = c.Waits[k].Began.Add(clocks[at].Offset)
		}
	}
	return calls
}
