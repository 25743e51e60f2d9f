package memory

import (
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// looker is an engine that shows what runs.
type looker interface {
	Waited(add func(operation string, peer int, d time.Duration))
	Running() []flight.Running
	Awaits() []int
}

// tell has this rank tell of the heap and of what runs on it, until mute is called.
func (h *Heap) tell() (mute func()) {
	rank, members := h.group.Flight()
	_, home := h.home.Flight()
	p := &flight.Part{}
	e, looks := h.engine.(looker)
	p.Heap = func() flight.Heap {
		s := h.Stats()
		m := flight.Heap{Device: h.dev.String(), Reserved: s.Committed, Used: s.InUse, Peak: s.Peak, LargestFree: s.LargestFree}
		if looks {
			m.Awaits = slices.Repeat([]int{-1}, rank.Size)
			for p, q := range e.Awaits() {
				if q >= 0 && q < len(home) {
					m.Awaits[home[p]] = home[q]
				}
			}
		}
		return m
	}
	if looks {
		p.Waited = func(add func(operation string, peer int, d time.Duration)) {
			e.Waited(func(operation string, peer int, d time.Duration) { add(operation, members[peer], d) })
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
			return calls
		}
	}
	return rank.Add(p)
}
