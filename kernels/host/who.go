package host

import "github.com/switchyard-moe/switchyard/kernels"

// who is a rank of the group: its number there, its host, and its place among the ranks of that host, which is its number in their space.
type who struct{ rank, host, place int }

// hostRanks are the ranks of a group on several hosts, as one of them sees it.
type hostRanks struct {
	hosts     *kernels.Hosts
	me        who
	perHost   int
	ranks     []who   // by rank
	of        [][]int // the ranks of each host, by place
	others    []int   // ranks of other hosts,
	railPeers []int   // and of those, by host, the ones with this rank's place
	fars      []*far  // of others, in their order, once open
}

func newHostRanks(h *kernels.Hosts) hostRanks {
	n := hostRanks{hosts: h, perHost: len(h.Ranks), of: make([][]int, h.Count())}
	for r, host := range h.Host {
		n.ranks = append(n.ranks, who{r, host, len(n.of[host])})
		n.of[host] = append(n.of[host], r)
		if host != h.Host[h.Rank] {
			n.others = append(n.others, r)
		}
	}
	n.me = n.ranks[h.Rank]
	for host, ranks := range n.of {
		if host != n.me.host {
			n.railPeers = append(n.railPeers, ranks[n.me.place])
		}
	}
	return n
}

// place is the number of a rank in the space, -1 of those of other hosts.
func (n *hostRanks) place(rank int) int {
	if n.ranks[rank].host != n.me.host {
		return -1
	}
	return n.ranks[rank].place
}

// number is that of a rank among those of other hosts, as ranks of a host count them.
func (n *hostRanks) number(host, rank int) int64 {
	other := n.ranks[rank].host
	if other > host {
		other--
	}
	return int64(other*n.perHost + n.ranks[rank].place)
}

// index is the number of a rank of another host among fars.
func (n *hostRanks) index(rank int) int { return int(n.number(n.me.host, rank)) }

// far is a rank of another host.
func (n *hostRanks) far(rank int) *far { return n.fars[n.index(rank)] }

// peer is a rank that a call waits for.
func (n *hostRanks) peer(e *Engine, rank int) peer {
	if p := n.place(rank); p >= 0 {
		return e.near(p)
	}
	return n.far(rank)
}

// openFar makes f the next of the ranks of other hosts. words is the length of a line, and line is where that of a rank begins in the segments
// of a host.
func (n *hostRanks) openFar(f *far, e *Engine, words int, line func(host, from int) int64) {
	f.who = n.ranks[n.others[len(n.fars)]]
	f.e, f.rail, f.puts = e, n.hosts.Rail, make([]uint64, words)
	f.here, f.there = line(n.me.host, f.rank), line(f.host, n.me.rank)
	n.fars = append(n.fars, f)
}

// openFars makes all of them. The rail wakes all ranks of this host when something lands here.
func (n *hostRanks) openFars(e *Engine, words int, line func(host, from int) int64) {
	for range n.others {
		n.openFar(new(far), e, words, line)
	}
	e.ringMates()
}
