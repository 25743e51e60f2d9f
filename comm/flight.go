package comm

import (
	"context"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Flight is for packages of this module: what is known of this rank, and the ranks of g as ranks of the group that met.
func (g *Group) Flight() (r *flight.Rank, members []int) { return g.n.flight, g.members }

// tell has the rank tell of its links, as a rank of the group that met. n.mu is held.
func (n *node) tell(met *Group) {
	n.flight.Group, n.flight.Host, n.flight.Hosts, n.flight.Local = met.name, met.topology.Host, met.topology.Hosts, met.topology.Local
	n.current = met
	n.flight.Regroup(n.epoch, met.members)
	n.dumb = n.flight.Add(&flight.Part{Heard: n.heard, Pids: n.pids})
}

// span is a call that makes a group. end tells those who look on of the group that it has made, or of its error.
func span(ctx context.Context, name, group string, rank, size int) (end func(made **Group, err *error)) {
	e := flight.Event{Name: name, Context: ctx, Group: group, Rank: rank, Size: size, Began: time.Now()}
	return func(made **Group, err *error) {
		if e.Err = *err; e.Err == nil {
			g := *made
			e.Group, e.Rank, e.Size, e.Job, e.Epoch = g.name, g.rank, len(g.members), g.n.flight.Job, g.n.flight.Epoch()
		}
		flight.Happened(e)
	}
}

// span is a call that makes another group of this one.
func (g *Group) span(ctx context.Context, name string) (end func(made **Group, err *error)) {
	return span(ctx, name, g.name, g.rank, len(g.members))
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

// pids are the processes of the ranks that this one is connected with on its host.
func (n *node) pids() []int {
	n.mu.Lock()
	defer n.mu.Unlock()
	pids := make([]int, len(n.links))
	for r, l := range n.links {
		if s, ok := l.(*sockLink); ok {
			pids[r] = s.pid
		}
	}
	return pids
}

var faultNames = map[failCode]string{failLost: "lost", failLeft: "left", failAborted: "aborted", failMismatch: "mismatch", failAbsent: "absent"}

// seats are the numbers in the group that met first of the ranks of a group that is g and n newcomers, who get the lowest that are free: a
// fresh rank has that of the one whose place it takes.
func (g *Group) seats(n int) []int {
	all := make([]int, len(g.members))
	for r, m := range g.members {
		all[r] = g.n.flight.Seat(m)
	}
	for seat := 0; n > 0; seat++ {
		if !slices.Contains(all, seat) {
			all = append(all, seat)
			n--
		}
	}
	return all
}

// regroup notes that g has become next, if the rank's group is g: other groups than that one have no epoch.
func (n *node) regroup(g, next *Group) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.current == g {
		n.current = next
		n.flight.Regroup(n.flight.Epoch()+1, next.members)
	}
}

// note notes a failure once, however many groups it ends, and reports whether it has. n.mu is held.
func (n *node) note(f *failure, err error) bool {
	fault := flight.Fault{Kind: faultNames[f.code], Culprit: f.culprit}
	if n.noted[fault] {
		return false
	}
	n.noted[fault] = true
	silent := time.Duration(-1)
	if f.culprit >= 0 && f.culprit < len(n.links) {
		if l, ok := n.links[f.culprit].(*sockLink); ok {
			l.mu.Lock()
			silent = time.Since(l.heard)
			l.mu.Unlock()
		}
	}
	n.flight.Failed(fault.Kind, fault.Culprit, silent, err)
	return true
}
