package memory

import (
	"context"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/flight"
)

// looker is an engine that shows what runs.
type looker interface {
	Waited(add func(w flight.Wait, d time.Duration))
	Running() []flight.Running
	Awaits() []int
	Pauses() []flight.Pause
}

// tell has this rank tell of the heap and of what runs on it, until mute is called.
func (h *Heap) tell() (mute func()) {
	rank, members := h.group.Flight()
	_, home := h.home.Flight()
	p := &flight.Part{Memory: h}
	e, looks := h.engine.(looker)
	if h.dev.Kind() != device.HostKind {
		rank.On(h.dev.String())
	}
	p.Heap = func() flight.Heap {
		s := h.Stats()
		m := flight.Heap{Device: h.dev.String(), Reserved: s.Committed, Used: s.InUse, Peak: s.Peak, LargestFree: s.LargestFree}
		if looks {
			m.Awaits = slices.Repeat([]int{-1}, rank.Size)
			for p, q := range e.Awaits() {
				if q >= 0 && q < len(members) {
					m.Awaits[home[p]] = members[q]
				}
			}
		}
		return m
	}
	p.Waited, p.Running = h.shares.waits.tell, h.shares.waits.running
	if looks {
		p.Waited = func(add func(w flight.Wait, d time.Duration)) {
			h.shares.waits.tell(add)
			e.Waited(func(w flight.Wait, d time.Duration) {
				w.Peer = members[w.Peer]
				add(w, d)
			})
		}
		p.Pauses = func() []flight.Pause {
			pauses := e.Pauses()
			for i := range pauses {
				pauses[i].Group, pauses[i].For = h.group.Name(), members[pauses[i].For]
			}
			return pauses
		}
		p.Running = func() []flight.Running {
			calls := e.Running()
			for i := range calls {
				c := &calls[i]
				c.Group, c.WaitsFor = h.group.Name(), members[c.WaitsFor]
				for k, p := range c.Absent {
					c.Absent[k] = members[p]
				}
			}
			return append(calls, h.shares.waits.running()...)
		}
	}
	return rank.Add(p)
}

// span is a call that grows the heap. end tells those who look on.
func (h *Heap) span(ctx context.Context, n int64) (end func(err *error)) {
	g := h.group
	rank, members := g.Flight()
	e := flight.Event{Name: "grow", Context: ctx, Group: g.Name(), Rank: g.Rank(), Size: len(members), Job: rank.Job, Epoch: rank.Epoch(), Bytes: n, Began: time.Now()}
	return func(err *error) {
		e.Err = *err
		flight.Happened(e)
	}
}
