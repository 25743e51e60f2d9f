package flight

import (
	"slices"
	"time"
)

// KeptChanges is the number of changes that a rank keeps.
const KeptChanges = 16

// Change is a look at the load of ranks after which experts moved.
type Change struct {
	At time.Time
	// Group is the one whose ranks moved experts, Layer the name of the dispatcher's layer.
	Group, Layer string
	// Before and After are the load of the busiest rank over the mean: in the window that ended, and what it would have been after the moves.
	Before, After float64
	Moves         []Move
}

// Move is an expert that has come to a rank. From and To are ranks of the group that met.
type Move struct{ Expert, From, To int }

// Changed notes that experts have moved.
func (r *Rank) Changed(c Change) {
	c.At = time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	h := &r.past
	if len(h.changes) == KeptChanges {
		h.changes = slices.Delete(h.changes, 0, 1)
	}
	h.changes = append(h.changes, c)
}
