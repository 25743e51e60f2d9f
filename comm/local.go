package comm

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"
)

// LocalOptions are the options of [Local]. The zero value works.
type LocalOptions struct {
	// Name of the group, for logs and messages. Default "world".
	Name string
	// PerHost, when set, makes hosts of that many ranks each, as far as
	// [Group.Topology] tells: for tests of several hosts in one process.
	PerHost int
	// Logger gets what is worth knowing. Default: nothing is logged.
	Logger *slog.Logger
}

// MaxSize is the most ranks a group may have.
const MaxSize = 4096

func (o *LocalOptions) validate(n int) error {
	if n < 1 || n > MaxSize {
		return fmt.Errorf("comm: local: %d ranks, want 1 to %d", n, MaxSize)
	}
	if o.PerHost < 0 {
		return fmt.Errorf("comm: local: %d ranks a host", o.PerHost)
	}
	if o.Name == "" {
		o.Name = "world"
	}
	return nil
}

// Local makes a group of n ranks in this process, one entry a rank. Each entry
// is meant for a goroutine of its own, and is closed by it. At most one
// LocalOptions is used. There are no sockets and no goroutines behind it, and
// it fails the way a group of processes does; see [Group.Kill]. Only a rank that
// hangs is not found out: the others wait for it until their context ends.
func Local(n int, opts ...LocalOptions) ([]*Group, error) {
	var o LocalOptions
	if len(opts) > 0 {
		o = opts[0]
	}
	if err := o.validate(n); err != nil {
		return nil, err
	}
	nodes, job := make([]*node, n), rand.Uint64()
	for i := range nodes {
		nodes[i] = newNode(i, n, o.Logger)
		nodes[i].flight.Job = job
		if o.PerHost > 0 && o.PerHost < n {
			of := make([]int, n)
			for r := range of {
				of[r] = r / o.PerHost
			}
			nodes[i].hosts = &hosts{Topology: newTopology(of, i)}
		}
	}
	members := make([]int, n)
	groups := make([]*Group, n)
	for i, nd := range nodes {
		members[i] = i
		for j, peer := range nodes {
			if j != i {
				nd.setLink(j, &localLink{from: i, to: peer}, 0)
			}
		}
		g, err := nd.register(1, o.Name, 0)
		if err != nil {
			return nil, fmt.Errorf("comm: local: %w", err)
		}
		groups[i] = g
	}
	for i, nd := range nodes {
		nd.activate(groups[i], members)
	}
	return groups, nil
}

// localLink hands messages to a rank of the same process.
type localLink struct {
	from int
	to   *node
}

func (l *localLink) send(m message) {
	m.data = bytes.Clone(m.data) // ranks do not share memory by accident
	l.to.deliver(l.from, m)
}

func (l *localLink) flush(time.Time)     {}
func (l *localLink) close(time.Duration) {}

func (l *localLink) cut() {
	l.to.lose(l.from, &failure{code: failLost, culprit: l.from, detail: "killed"})
}
