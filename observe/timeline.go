package observe

import (
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
// one that began it first, and so waited longest.
func Timeline(w io.Writer, calls []Call, from time.Time) error {
	t := struct {
		Unit   string  `json:"displayTimeUnit"`
		Base   int64   `json:"baseTimeNanoseconds"`
		Events []event `json:"traceEvents"`
	}{Unit: "ns", Events: []event{}}
	calls = slices.DeleteFunc(slices.Clone(calls), func(c Call) bool { return c.over(from) })
	slices.SortStableFunc(calls, func(a, b Call) int { return a.shown().Compare(b.shown()) })
	if len(calls) > 0 {
		t.Base = calls[0].shown().UnixNano()
	}
	at := func(x time.Time) float64 { return float64(x.UnixNano()-t.Base) / 1e3 }

	jobs := map[string]int{}
	// Ranks of a second job are shown as processes from 100,000 on.
	process := func(c *Call) int {
		if _, ok := jobs[c.Job]; !ok {
			jobs[c.Job] = len(jobs)
		}
		return 100_000*jobs[c.Job] + c.Rank
	}
	tracks := tracks{at: map[communicator][]int{}, free: map[int][]*time.Time{}}
	type entered struct{ first, last event }
	together := map[meeting]*entered{}
	var order []meeting
	for i := range calls {
		c := &calls[i]
		pid := process(c)
		if !tracks.known(pid) {
			t.Events = append(t.Events, event{Name: "process_name", Phase: "M", Pid: pid, Args: map[string]any{"name": fmt.Sprintf("rank %d of job %s", c.Rank, c.Job)}})
		}
		tid, fresh := tracks.of(c, pid)
		if fresh {
			t.Events = append(t.Events, event{Name: "thread_name", Phase: "M", Pid: pid, Tid: tid,
				Args: map[string]any{"name": fmt.Sprintf("%s, communicator %d", c.Group, c.ID)}})
		}
		e := event{Name: c.Operation, Cat: "call", Pid: pid, Tid: tid, At: at(c.shown()), Args: map[string]any{
			"call": c.Call, "algorithm": c.Algorithm, "payload_bytes": c.PayloadBytes, "state": c.State,
		}}
		if c.Error != "" {
			e.Args["error"] = c.Error
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
		t.Events = append(t.Events, e)
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
		t.Events = append(t.Events,
			event{Name: "last to first", Cat: "wait", Phase: "s", ID: i + 1, Pid: from.Pid, Tid: from.Tid, At: from.At},
			event{Name: "last to first", Cat: "wait", Phase: "f", Bind: "e", ID: i + 1, Pid: to.Pid, Tid: to.Tid, At: from.At})
	}
	return json.NewEncoder(w).Encode(&t)
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
