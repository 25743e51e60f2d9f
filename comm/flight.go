package comm

import (
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Flight is for packages of this module: what is known of this rank, and the ranks of g as ranks of the group that met.
func (g *Group) Flight() (r *flight.Rank, members []int) { return g.n.flight, g.members }

// tell has the rank tell of its links, as a rank of the group that met. n.mu is held.
func (n *node) tell(met *Group) {
	n.flight.Group, n.flight.Host, n.flight.Local = met.name, met.topology.Host, met.topology.Local
	n.dumb = n.flight.Add(&flight.Part{Heard: n.heard})
}

// heard is how long ago each rank gave a sign of life, -1 where no connection says it.
func (n *node) heard() []time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	ago := make([]time.Duration, len(n.links))
	for r, l := range n.links {
		ago[r] = -1
		if s, ok := l.(*sockLink); ok {
			s.mu.Lock()
			ago[r] = time.Since(s.heard)
			s.mu.Unlock()
		}
	}
	return ago
}

var faultNames = map[failCode]string{failLost: "lost", failLeft: "left", failAborted: "aborted", failMismatch: "mismatch", failAbsent: "absent"}

// note tells of a failure once, however many groups it ends. n.mu is held.
func (n *node) note(f *failure, err error) {
	fault := flight.Fault{Kind: faultNames[f.code], Culprit: f.culprit}
	if !n.noted[fault] {
		n.noted[fault] = true
		n.flight.Failed(fault.Kind, fault.Culprit, err)
	}
}
