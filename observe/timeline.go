package observe

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
)

// event is one of a Chrome trace. Times are in microseconds since its base.
type event struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Pid   int            `json:"pid"` // the rank
	Tid   int            `json:"tid"`
	At    float64        `json:"ts"`
	Took  *float64       `json:"dur,omitempty"`
	ID    int            `json:"id,omitempty"`
	Cat   string         `json:"cat,omitempty"`
	Bind  string         `json:"bp,omitempty"`
	Scope string         `json:"s,omitempty"`
	Args  map[string]any `json:"args,omitempty"`
}

// Timeline writes calls as a Chrome trace, which Perfetto opens: a process for each rank, and in it a track for each communicator, or
// several where its calls run at the same time. A call that has not ended has no end there, and one on a GPU is a point, at the time when it
// was enqueued. Calls that ended before from are left out, and points before it. An arrow leads from the rank that began a call last to the
// one that began it first, and so waited longest. Counters are calls in flight on the host, and the bytes of their inputs so far.
//
// Times are those of the first host of each job. [Clocks] measures the others, and the trace says how far they were off.
func Timeline(w io.Writer, calls []Call, from time.Time) error {
	clocks := Clocks(calls)
	calls = shownCalls(calls, clocks, from)
	base := int64(0)
	if len(calls) > 0 {
		base = calls[0].shown().UnixNano()
	}
	return json.NewEncoder(w).Encode(map[string]any{
		"displayTimeUnit": "ns", "baseTimeNanoseconds": base, "traceEvents": events(calls, clocks, base, 0), "clocks": clocks,
	})
}

// firstMerged is the number of the first rank's process in a trace that has those of others, by their numbers: Linux has fewer than 2^22.
const firstMerged = 10_000_000

// MergeTimeline writes a trace of torch's profiler with the calls in it, as Timeline shows them. The trace has the same run, on a host whose
// clock is that of the calls.
func MergeTimeline(w io.Writer, trace io.Reader, calls []Call, from time.Time) error {
	var file map[string]json.RawMessage
	var others []json.RawMessage
	var base int64
	if err := json.NewDecoder(trace).Decode(&file); err != nil {
		return fmt.Errorf("observe: merge a timeline: %w", err)
	}
	if err := json.Unmarshal(file["traceEvents"], &others); err != nil {
		return fmt.Errorf("observe: merge a timeline: the trace's traceEvents: %w", err)
	}
	if err := json.Unmarshal(file["baseTimeNanoseconds"], &base); err != nil {
		return fmt.Errorf("observe: merge a timeline: the trace's baseTimeNanoseconds, which says when its times begin: %w", err)
	}
	clocks := Clocks(calls)
	for _, e := range events(shownCalls(calls, clocks, from), clocks, base, firstMerged) {
		b, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("observe: merge a timeline: %w", err)
		}
		others = append(others, b)
	}
	b, err := json.Marshal(others)
	if err != nil {
		return fmt.Errorf("observe: merge a timeline: %w", err)
	}
	file["traceEvents"] = b
	if file["clocks"], err = json.Marshal(clocks); err != nil {
		return fmt.Errorf("observe: merge a timeline: %w", err)
	}
	return json.NewEncoder(w).Encode(file)
}

// shownCalls are those that a timeline from a time on shows, on one clock, in the order of their beginnings.
func shownCalls(calls []Call, clocks []Clock, from time.Time) []Call {
	calls = slices.DeleteFunc(onOneClock(calls, clocks), func(c Call) bool { return c.over(from) })
	slices.SortStableFunc(calls, func(a, b Call) int { return a.shown().Compare(b.shown()) })
	return calls
}

// events are those of calls in the order of their beginnings, in microseconds since base. The first process has a number.
func events(calls []Call, clocks []Clock, base int64, first int) []event {
	all := []event{}
	at := func(x time.Time) float64 { return float64(x.UnixNano()-base) / 1e3 }

	jobs := map[string]int{}
	// Ranks of a second job are shown as processes from 100,000 on.
	process := func(c *Call) int {
		if _, ok := jobs[c.Job]; !ok {
			jobs[c.Job] = len(jobs)
		}
		return first + 100_000*jobs[c.Job] + c.Rank
	}
	tracks := tracks{at: map[communicator][]int{}, free: map[int][]*time.Time{}}
	type entered struct{ first, last event }
	together := map[meeting]*entered{}
	var order []meeting
	for i := range calls {
		c := &calls[i]
		pid := process(c)
		if !tracks.known(pid) {
			all = append(all, event{Name: "process_name", Phase: "M", Pid: pid, Args: map[string]any{"name": fmt.Sprintf("rank %d of job %s", c.Rank, c.Job)}})
			if label := clockOf(c, clocks); label != "" {
				all = append(all, event{Name: "process_labels", Phase: "M", Pid: pid, Args: map[string]any{"labels": label}})
			}
		}
		tid, fresh := tracks.of(c, pid)
		if fresh {
			all = append(all, event{Name: "thread_name", Phase: "M", Pid: pid, Tid: tid,
				Args: map[string]any{"name": fmt.Sprintf("%s, communicator %d", c.Group, c.ID)}})
		}
		e := event{Name: c.Operation, Cat: "call", Pid: pid, Tid: tid, At: at(c.shown()), Args: map[string]any{
			"call": c.Call, "algorithm": c.Algorithm, "payload_bytes": c.PayloadBytes, "state": c.State,
		}}
		if c.Error != "" {
			e.Args["error"] = c.Error
		}
		if c.Stream != "" {
			e.Args["stream"] = c.Stream
		}
		switch {
		case c.Started == nil:
			e.Phase, e.Scope = "i", "t"
		case c.Finished == nil:
			e.Phase = "B"
		default:
			took := float64(c.Finished.Sub(*c.Started)) / 1e3
			e.Phase, e.Took = "X", &took
			e.Args["queued_us"] = float64(c.Started.Sub(c.Enqueued)) / 1e3
		}
		all = append(all, e)
		for _, w := range c.Waits {
			all = append(all, waitSlice(c, w, e, at))
		}
		if c.Started == nil || c.Call == 0 {
			continue
		}
		k := meeting{c.Job, c.Group, c.ID, c.Call, c.Operation}
		if m := together[k]; m != nil {
			m.last = e
		} else {
			together[k] = &entered{e, e}
			order = append(order, k)
		}
	}
	for i, k := range order {
		m := together[k]
		if m.first.Pid == m.last.Pid {
			continue
		}
		// An arrow belongs to the slices that hold its ends. Both are at the time when the last rank came, if the first one was still there.
		from, to := m.last, m.first
		if to.Took != nil && to.At+*to.Took < from.At {
			continue // two ranks that do not wait for each other in this call
		}
		all = append(all,
			event{Name: "last to first", Cat: "wait", Phase: "s", ID: i + 1, Pid: from.Pid, Tid: from.Tid, At: from.At},
			event{Name: "last to first", Cat: "wait", Phase: "f", Bind: "e", ID: i + 1, Pid: to.Pid, Tid: to.Tid, At: from.At})
	}
	return append(all, counters(calls, process, at)...)
}

// waitSlice is a slice within that of a call, whose clock may differ a little.
func waitSlice(c *Call, w CallWait, of event, at func(time.Time) float64) event {
	began := max(of.At, at(w.Began))
	ends := at(w.Began) + w.Seconds*1e6
	if c.Finished != nil {
		ends = min(ends, at(*c.Finished))
	}
	took := max(0, ends-began)
	return event{Name: fmt.Sprintf("wait for rank %d", w.For), Cat: "wait", Phase: "X", Pid: of.Pid, Tid: of.Tid, At: began, Took: &took}
}

// clockOf says how far the clock of a call's host was off, nothing for the first host.
func clockOf(c *Call, clocks []Clock) string {
	for _, k := range clocks {
		if k.Job == c.Job && k.Host == c.Host && k.Calls == 0 {
			return fmt.Sprintf("host %d, whose clock is not known", k.Host)
		} else if k.Job == c.Job && k.Host == c.Host {
			return fmt.Sprintf("host %d, times moved by %v, known within %v", k.Host, k.Offset, k.Within)
		}
	}
	return ""
}

// counters are the calls in flight of each rank, as far as the host sees them, and the bytes of their inputs.
func counters(calls []Call, process func(c *Call) int, at func(time.Time) float64) (all []event) {
	type change struct {
		pid   int
		at    time.Time
		by    int
		bytes int64
	}
	var changes []change
	for i := range calls {
		c := &calls[i]
		if c.Started == nil {
			continue
		}
		changes = append(changes, change{process(c), *c.Started, 1, max(0, c.PayloadBytes)})
		if c.Finished != nil {
			changes = append(changes, change{process(c), *c.Finished, -1, 0})
		}
	}
	// Of changes at one time an end comes first, so that calls one after the other are never two.
	slices.SortStableFunc(changes, func(a, b change) int { return cmp.Or(a.at.Compare(b.at), a.by-b.by) })
	flight, bytes := map[int]int{}, map[int]int64{}
	for _, c := range changes {
		flight[c.pid] += c.by
		bytes[c.pid] += c.bytes
		all = append(all, event{Name: "calls in flight", Phase: "C", Pid: c.pid, At: at(c.at), Args: map[string]any{"calls": flight[c.pid]}})
		if c.bytes > 0 {
			all = append(all, event{Name: "input bytes", Phase: "C", Pid: c.pid, At: at(c.at), Args: map[string]any{"bytes": bytes[c.pid]}})
		}
	}
	return all
}

// shown is when a call begins on the timeline.
func (c *Call) shown() time.Time {
	if c.Started != nil {
		return *c.Started
	}
	return c.Enqueued
}

// over reports whether a call had ended, or was a point, before a time.
func (c *Call) over(at time.Time) bool {
	switch {
	case c.Started == nil:
		return c.Enqueued.Before(at)
	case c.Finished == nil:
		return false
	}
	return c.Finished.Before(at)
}

// meeting is one call as all ranks know it.
type meeting struct {
	job       string
	group     string
	id        int64
	call      uint64
	operation string
}

// communicator is one rank's end.
type communicator struct {
	pid   int
	group string
	id    int64
}

// tracks are those of the timeline. A track has one call at a time.
type tracks struct {
	at   map[communicator][]int // the numbers of a communicator's tracks
	free map[int][]*time.Time   // by process and number: when its last call ended, nil if it has not
}

func (t *tracks) known(pid int) bool { return len(t.free[pid]) > 0 }

// of is the track of a call, and whether it is a new one. Calls come in the order of their beginnings.
func (t *tracks) of(c *Call, pid int) (tid int, fresh bool) {
	k := communicator{pid, c.Group, c.ID}
	ends := c.Finished
	if c.Started == nil {
		ends = &c.Enqueued // a point
	}
	free := t.free[pid]
	for _, tid := range t.at[k] {
		if until := free[tid]; until != nil && until.Compare(c.shown()) <= 0 {
			free[tid] = ends
			return tid, false
		}
	}
	t.free[pid] = append(free, ends)
	t.at[k] = append(t.at[k], len(free))
	return len(free), true
}
