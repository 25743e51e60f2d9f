package dispatch

import (
	"cmp"
	"math"
	"slices"
)

// BalanceOptions are the bounds of Balance.
type BalanceOptions struct {
	// Ranks is the number of ranks, Slots the number of expert slots of each. Slots beyond the number of experts hold copies of
	// the busiest.
	Ranks, Slots int
	// Nodes is the number of hosts. Each has the same number of ranks, in order; default 1.
	Nodes int
	// Groups is the number of groups of equal size into which the experts divide, in order; default 1. Experts of a group stay on
	// one node, for routers that choose groups first. It is a multiple of Nodes.
	Groups int
}

// Balance proposes a placement. load[e] is the work of expert e, for example the sum of Counters.Choices over the ranks. Balance
// first deals groups to nodes. On each node, spare slots go to copies of the experts with the highest load per copy. Then it deals
// the copies to the node's ranks, which get the same number each and no expert twice. Each deal gives the heaviest remaining piece
// to the receiver with the least load. The same arguments give the same placement.
func Balance(load []float64, o BalanceOptions) (*Placement, error) {
	setDefault(&o.Nodes, 1)
	setDefault(&o.Groups, 1)
	experts := len(load)
	switch {
	case o.Ranks < 1 || o.Slots < 1 || o.Nodes < 1 || o.Groups < 1:
		return nil, invalid("balance over %d ranks of %d slots, %d nodes, %d groups", o.Ranks, o.Slots, o.Nodes, o.Groups)
	case o.Ranks%o.Nodes != 0:
		return nil, invalid("balance: %d ranks on %d nodes", o.Ranks, o.Nodes)
	case experts == 0 || experts%o.Groups != 0:
		return nil, invalid("balance: %d experts in %d groups", experts, o.Groups)
	case o.Nodes > 1 && o.Groups%o.Nodes != 0:
		return nil, invalid("balance: %d groups on %d nodes", o.Groups, o.Nodes)
	}
	each, ranks := experts/o.Nodes, o.Ranks/o.Nodes // of a node
	if slots := ranks * o.Slots; slots < each || o.Slots > each {
		return nil, invalid("balance: a node has %d experts for %d ranks of %d slots: every expert needs a slot, and no rank has one twice",
			each, ranks, o.Slots)
	}
	for e, l := range load {
		if !(l >= 0) || math.IsInf(l, 0) {
			return nil, invalid("balance: the load of expert %d is %v", e, l)
		}
	}
	p := &Placement{Ranks: make([][]int, experts)}
	for node, mine := range o.dealGroups(load) {
		copies := replicate(load, mine, ranks, ranks*o.Slots)
		for r, held := range dealCopies(load, mine, copies, ranks, o.Slots) {
			for _, e := range held {
				p.Ranks[e] = append(p.Ranks[e], node*ranks+r)
			}
		}
	}
	return p, nil
}

// Imbalance is the load of the busiest rank over the mean of all ranks, where copies of an expert share its load: 1 where all are equally
// busy, and where there is no load. load[e] is the work of expert e.
func (p *Placement) Imbalance(load []float64, ranks int) float64 {
	held, all := make([]float64, ranks), 0.0
	for e, at := range p.Ranks {
		all += load[e]
		for _, r := range at {
			held[r] += load[e] / float64(len(at))
		}
	}
	if all == 0 {
		return 1
	}
	return slices.Max(held) * float64(ranks) / all
}

// dealGroups lists the experts of each node.
func (o *BalanceOptions) dealGroups(load []float64) [][]int {
	size := len(load) / o.Groups
	weight, order := make([]float64, o.Groups), make([]int, o.Groups)
	for g := range weight {
		order[g] = g
		for _, l := range load[g*size : (g+1)*size] {
			weight[g] += l
		}
	}
	heaviestFirst(order, weight)
	held, nodes := make([]float64, o.Nodes), make([][]int, o.Nodes)
	for _, g := range order {
		n := lightest(held, func(n int) bool { return len(nodes[n]) < len(load)/o.Nodes })
		held[n] += weight[g]
		for e := g * size; e < (g+1)*size; e++ {
			nodes[n] = append(nodes[n], e)
		}
	}
	return nodes
}

// replicate shares slots among experts: how many copies each has, at most one a rank.
func replicate(load []float64, experts []int, ranks, slots int) []int {
	copies := make([]int, len(experts))
	for i := range copies {
		copies[i] = 1
	}
	for range slots - len(experts) {
		most := -1
		for i, e := range experts {
			if copies[i] < ranks && (most < 0 || load[e]*float64(copies[most]) > load[experts[most]]*float64(copies[i])) {
				most = i
			}
		}
		copies[most]++
	}
	return copies
}

// dealCopies lists the experts of each rank.
func dealCopies(load []float64, experts, copies []int, ranks, slots int) [][]int {
	share := make([]float64, len(load)) // of one copy
	order := make([]int, 0, len(experts))
	for i, e := range experts {
		share[e] = load[e] / float64(copies[i])
		for range copies[i] {
			order = append(order, e)
		}
	}
	heaviestFirst(order, share)
	held, at := make([]float64, ranks), make([][]int, ranks)
	put := func(r, e int) {
		at[r] = append(at[r], e)
		held[r] += share[e]
	}
	for _, e := range order {
		r := lightest(held, func(r int) bool { return len(at[r]) < slots && !slices.Contains(at[r], e) })
		if r >= 0 {
			put(r, e)
			continue
		}
		// Every rank with room has e already. A full rank without e can trade another expert for it: it has at least two experts
		// that the rank with room lacks.
		r = lightest(held, func(r int) bool { return len(at[r]) < slots })
		from, which, best := -1, -1, math.Inf(1)
		for f := range at {
			if len(at[f]) < slots || slices.Contains(at[f], e) {
				continue
			}
			for i, x := range at[f] {
				worst := max(held[r]+share[x], held[f]-share[x]+share[e])
				if !slices.Contains(at[r], x) && worst < best {
					from, which, best = f, i, worst
				}
			}
		}
		x := at[from][which]
		at[from] = slices.Delete(at[from], which, which+1)
		held[from] -= share[x]
		put(r, x)
		put(from, e)
	}
	return at
}

// heaviestFirst sorts items by weight, then by number.
func heaviestFirst(items []int, weight []float64) {
	slices.SortFunc(items, func(a, b int) int { return cmp.Or(cmp.Compare(weight[b], weight[a]), cmp.Compare(a, b)) })
}

// lightest is the first index of the least weight among those that may be taken, -1 where none may.
func lightest(weight []float64, may func(i int) bool) int {
	best := -1
	for i, w := range weight {
		if may(i) && (best < 0 || w < weight[best]) {
			best = i
		}
	}
	return best
}
