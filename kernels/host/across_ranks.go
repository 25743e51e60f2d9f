package host

import "github.com/switchyard-moe/switchyard/kernels"

// hostRanks is where the ranks of a group on several hosts are, as one of them sees it.
type hostRanks struct {
	hosts     *kernels.Hosts
	host      int     // this rank's,
	local     int     // and its local rank
	perHost   int     // ranks
	locals    []int   // by rank: its local rank
	of        [][]int // the ranks of each host, by local rank
	others    []int   // ranks of other hosts,
	railPeers []int   // and of those, by host, the ones with this rank's local rank
	at        []int   // by rank, once open: its number in the space, -1 for ranks of other hosts
}

func newHostRanks(h *kernels.Hosts) hostRanks {
	n := hostRanks{hosts: h, host: h.Host[h.Rank], perHost: len(h.Ranks), of: make([][]int, h.Count())}
	for r, host := range h.Host {
		n.locals = append(n.locals, len(n.of[host]))
		n.of[host] = append(n.of[host], r)
		if host != n.host {
			n.others = append(n.others, r)
		}
	}
	n.local = n.locals[h.Rank]
	for host, ranks := range n.of {
		if host != n.host {
			n.railPeers = append(n.railPeers, ranks[n.local])
		}
	}
	return n
}

// open finds the ranks of this host in the space. The rail wakes them all when something lands here.
func (n *hostRanks) open(e *Engine) {
	n.at = make([]int, len(n.locals))
	for r := range n.at {
		n.at[r] = -1
	}
	for p := range e.space.Size {
		n.at[e.space.Name(p)] = p
	}
	e.ringMates()
}

// mate is the number in the space of the rank of this host that has a rank's local rank.
func (n *hostRanks) mate(rank int) int { return n.at[n.of[n.host][n.locals[rank]]] }

// number is that of a rank among those of other hosts, as ranks of a host count them.
func (n *hostRanks) number(host, rank int) int64 {
	other := n.hosts.Host[rank]
	if other > host {
		other--
	}
	return int64(other*n.perHost + n.locals[rank])
}
