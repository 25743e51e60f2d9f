package flight

// Fallback is a kind of call that another library has made in the place of this one.
type Fallback struct {
	// Operation is torch's name of it, and Backend the one of torch's backends that has made it.
	Operation, Backend string
	// Reason is one of the Reasons.
	Reason string
}

// Reasons say in words why another library makes a call. Their names are values of a label.
var Reasons = map[string]string{
	"group":     "the ranks of the group have no symmetric memory together",
	"gpu":       "these GPUs cannot reach each other's memory",
	"device":    "Switchyard does not have it for tensors on these devices",
	"tensor":    "the tensors are no plain dense ones",
	"reduction": "Switchyard does not reduce this element type with this operator",
	"form":      "Switchyard does not have it with these options",
}

// FellBack notes a call that another library makes. It reports whether it is the first of its kind.
func (r *Rank) FellBack(f Fallback) (first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fellBack(f, 1)
	return r.fallbacks[f] == 1
}

// fellBack counts n calls. r.mu is held.
func (r *Rank) fellBack(f Fallback, n uint64) {
	if r.fallbacks == nil {
		r.fallbacks = map[Fallback]uint64{}
	}
	r.fallbacks[f] += n
}

// Was has r go on with the fallbacks that a rank noted before its group had met: they are one rank.
func (r *Rank) Was(unmet *Rank) {
	unmet.mu.Lock()
	before := unmet.fallbacks
	unmet.fallbacks = nil
	unmet.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	for f, n := range before {
		r.fellBack(f, n)
	}
}
