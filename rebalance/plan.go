package rebalance

import (
	"slices"

	"github.com/switchyard-moe/switchyard/dispatch"
)

// stay gives the parts of a placement to the ranks of each node such that many experts stay where they are: the largest overlap of a part
// and what a rank has comes first. Ranks of a node are alike, so the load of the busiest is the same.
func stay(now, next *dispatch.Placement, ranks, nodes int) *dispatch.Placement {
	each := ranks / nodes
	to := make([]int, ranks) // the rank that gets the part of a rank of next
	for node := range nodes {
		first := node * each
		var parts, free []int
		for r := first; r < first+each; r++ {
			parts, free = append(parts, r), append(free, r)
		}
		for len(parts) > 0 {
			part, rank, most := 0, 0, -1
			for i, p := range parts {
				for j, r := range free {
					if n := overlap(next.Local(p), now.Local(r)); n > most {
						part, rank, most = i, j, n
					}
				}
			}
			to[parts[part]] = free[rank]
			parts, free = slices.Delete(parts, part, part+1), slices.Delete(free, rank, rank+1)
		}
	}
	moved := &dispatch.Placement{}
	for _, at := range next.Ranks {
		var ranks []int
		for _, r := range at {
			ranks = append(ranks, to[r])
		}
		slices.Sort(ranks)
		moved.Ranks = append(moved.Ranks, ranks)
	}
	return moved
}

func overlap(a, b []int) (n int) {
	for _, e := range a {
		if slices.Contains(b, e) {
			n++
		}
	}
	return n
}

// transfer is one expert's way from an expert slot of a rank to one of another or the same.
type transfer struct{ expert, from, fromSlot, to, toSlot int }

// transfers lists what every rank needs for its expert slots under next, in the same order on every rank. An expert that keeps its slot is
// left out. A copy comes from the rank itself if it has the expert, else from a rank of its node if one has it; several take turns.
func transfers(now, next *dispatch.Placement, ranks, nodes int) (all []transfer) {
	each := ranks / nodes
	for to := range ranks {
		have := now.Local(to)
		for slot, e := range next.Local(to) {
			if at := slices.Index(have, e); at >= 0 {
				if at != slot {
					all = append(all, transfer{e, to, at, to, slot})
				}
				continue
			}
			from := slices.DeleteFunc(slices.Clone(now.Ranks[e]), func(r int) bool { return r/each != to/each })
			if len(from) == 0 {
				from = now.Ranks[e]
			}
			r := from[to%len(from)]
			all = append(all, transfer{e, r, slices.Index(now.Local(r), e), to, slot})
		}
	}
	return all
}

// rounds divides transfers such that none has two of the same pair of ranks: each round is one exchange.
func rounds(all []transfer) (some [][]transfer) {
	seen := map[[2]int]int{}
	for _, t := range all {
		pair := [2]int{t.from, t.to}
		n := seen[pair]
		if seen[pair]++; n == len(some) {
			some = append(some, nil)
		}
		some[n] = append(some[n], t)
	}
	return some
}
