package dispatch

import "github.com/switchyard-moe/switchyard/kernels"

// FailsLate has d take note that the calls of handles have failed, as an engine tells that has no other way.
func (d *Dispatcher) FailsLate(err error, handles ...*Handle) error {
	hit := &kernels.HandlesError{Err: err}
	for _, h := range handles {
		hit.Handles = append(hit.Handles, h.memory)
	}
	return d.late(hit)
}

// DefaultAlign is Align where nothing is said.
func (o *Options) DefaultAlign() int { return o.defaultAlign() }

// Taken reports whether the next launch with h, if it is a copy, may take rows as they come.
func (h *Handle) Taken() bool { return h.taken }

// Steps says by how many tokens how many multiprocessors calls of a kind take by the table among a number of ranks, 0 for the engine's choice.
func (t *Table) Steps(lowLatency, byExpert bool, ranks int) func(tokens int) int {
	return t.steps(pairs{lowLatency, byExpert}, ranks).at
}

// BuiltinTable is the table of the package.
func BuiltinTable() (*Table, error) { return builtinTable() }
