package comm

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"
)

// Topology says on which hosts the ranks of a group are. A host is a boot of a machine and a network namespace of it, or Config.Sockets
// instead of the namespace, with SWITCHYARD_HOSTID in front where that is set. Hosts are numbered in the order of their first ranks in
// the group. The local rank of a rank is its index among the ranks of its host, in the order of ranks.
type Topology struct {
	// Hosts is the number of hosts, and PerHost that of ranks on each of them: 0 where hosts have different numbers.
	Hosts, PerHost int
	// Host is this rank's host, and Local its local rank.
	Host, Local int

	of, local []int // by rank; nil on one host
	ranks     [][]int
}

// HostOf is the host of a rank.
func (t *Topology) HostOf(rank int) int {
	if t.of == nil {
		return 0
	}
	return t.of[rank]
}

// LocalOf is the local rank of a rank.
func (t *Topology) LocalOf(rank int) int {
	if t.local == nil {
		return rank
	}
	return t.local[rank]
}

// RankOf is the rank with a local rank on a host, -1 if it has none.
func (t *Topology) RankOf(host, local int) int {
	switch {
	case host < 0 || host >= t.Hosts || local < 0:
	case t.ranks == nil && local < t.PerHost:
		return local
	case t.ranks != nil && local < len(t.ranks[host]):
		return t.ranks[host][local]
	}
	return -1
}

// newTopology is that of ranks on the given hosts, which may have any numbers, as rank me sees it.
func newTopology(hosts []int, me int) Topology {
	t := Topology{of: make([]int, len(hosts)), local: make([]int, len(hosts))}
	numbers := map[int]int{}
	for r, h := range hosts {
		number, known := numbers[h]
		if !known {
			number = len(t.ranks)
			numbers[h] = number
			t.ranks = append(t.ranks, nil)
		}
		t.of[r], t.local[r] = number, len(t.ranks[number])
		t.ranks[number] = append(t.ranks[number], r)
	}
	t.Hosts, t.Host, t.Local, t.PerHost = len(t.ranks), t.of[me], t.local[me], len(t.ranks[0])
	if slices.ContainsFunc(t.ranks, func(of []int) bool { return len(of) != t.PerHost }) {
		t.PerHost = 0
	}
	if t.Hosts == 1 {
		t.of, t.local, t.ranks = nil, nil, nil
	}
	return t
}

// Topology says on which hosts the ranks of the group are. It is the same on every rank, but for Host and Local.
func (g *Group) Topology() Topology { return g.topology }

// Door is the address of this host's interface on which its ranks reach those of other hosts. It is not valid in a group of one host, and
// within a process.
func (g *Group) Door() netip.Addr {
	at, err := netip.ParseAddrPort(g.n.door)
	if err != nil {
		return netip.Addr{}
	}
	return at.Addr().Unmap()
}

// PeerTimeout is [Config.PeerTimeout].
func (g *Group) PeerTimeout() time.Duration {
	return cmp.Or(g.n.flight.PeerTimeout, DefaultPeerTimeout)
}

// Home is the group of this rank's host: the ranks of g there, in their order. On one host it is g itself. It is closed with g, and
// lives and fails as a subgroup of g does (see [Group.Split]).
func (g *Group) Home() (*Group, error) {
	switch {
	case g.topology.Hosts == 1:
		return g, nil
	case g.home != nil:
		return g.home, nil
	}
	return g.alone()
}

// Rail is the group of the ranks that have this rank's local rank on their hosts, in the order of hosts. On one host it is a group of
// this rank alone. It is closed with g, and lives and fails as a subgroup of g does.
func (g *Group) Rail() (*Group, error) {
	switch {
	case len(g.topology.ranks) == len(g.members): // a rank on each host
		return g, nil
	case g.rail != nil:
		return g.rail, nil
	}
	return g.alone()
}

// alone is the group of this rank alone, which is made when it is asked for.
func (g *Group) alone() (*Group, error) {
	if len(g.members) == 1 {
		return g, nil
	}
	g.making.Lock()
	defer g.making.Unlock()
	if g.single != nil {
		return g.single, nil
	}
	if err := g.Err(); errors.Is(err, ErrClosed) {
		return nil, err
	}
	single, err := g.n.register(groupID(g.id, "alone", uint64(g.rank), 0), g.name+"/alone", g.id)
	if err != nil {
		return nil, err
	}
	g.n.activate(single, []int{g.n.id})
	g.single = single
	return single, nil
}

// derived are the groups that are closed with g.
func (g *Group) derived() []*Group {
	g.making.Lock()
	defer g.making.Unlock()
	return slices.DeleteFunc([]*Group{g.home, g.rail, g.single}, func(d *Group) bool { return d == nil })
}
