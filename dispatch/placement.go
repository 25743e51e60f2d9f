package dispatch

import (
	"fmt"
	"slices"
	"sort"
	"strings"
)

// Placement maps experts to ranks. The caller does not change it once a dispatcher has it.
type Placement struct {
	// Ranks[e] lists the ranks that have a copy of expert e, each rank once. An expert with several ranks is redundant;
	// Rank divides its tokens among them.
	Ranks [][]int
}

// Contiguous puts the first experts on rank 0, the next on rank 1 and so on. If the experts do not divide
// evenly, the first ranks have one more; with fewer experts than ranks the last ranks have none.
func Contiguous(experts, ranks int) *Placement {
	p := &Placement{Ranks: make([][]int, 0, experts)}
	for r := range ranks {
		n := experts / ranks
		if r < experts%ranks {
			n++
		}
		for range n {
			p.Ranks = append(p.Ranks, []int{r})
		}
	}
	return p
}

// Rank is the rank to which token number token of rank src goes for the expert: of the R ranks that hold it, the one with index
// (src + token) mod R. So a rank's tokens alternate, and ranks that have one token each begin at different copies. The result
// depends on nothing else, so ranks need not agree on it, and a run can be repeated.
func (p *Placement) Rank(src, token, expert int) int {
	at := p.Ranks[expert]
	return at[(src+token)%len(at)]
}

// Local lists the experts on a rank in ascending order, which is the order of the rank's expert slots.
func (p *Placement) Local(rank int) []int {
	var local []int
	for e, at := range p.Ranks {
		if slices.Contains(at, rank) {
			local = append(local, e)
		}
	}
	return local
}

// slots is the first expert slot of each rank, and the number of all at the end.
func (p *Placement) slots(ranks int) []int32 {
	first := make([]int32, ranks+1)
	for _, at := range p.Ranks {
		for _, r := range at {
			first[r+1]++
		}
	}
	for r := range ranks {
		first[r+1] += first[r]
	}
	return first
}

// table is the placement as kernels.DispatchBounds has it, for expert slots that begin at first.
func (p *Placement) table(first []int32) []int32 {
	experts, slots := len(p.Ranks), int(first[len(first)-1])
	t := make([]int32, experts+1+2*slots)
	copies, at, expert := t[:experts+1], t[experts+1:][:slots], t[experts+1+slots:]
	next := slices.Clone(first) // free slot of each rank
	n := int32(0)
	for e, ranks := range p.Ranks {
		copies[e] = n
		for _, r := range ranks {
			at[n] = next[r]
			expert[next[r]] = int32(e)
			next[r]++
			n++
		}
	}
	copies[experts] = n
	return t
}

// placementOf is the placement of a table.
func placementOf(table, first []int32) *Placement {
	slots := int(first[len(first)-1])
	experts := len(table) - 1 - 2*slots
	p := &Placement{Ranks: make([][]int, experts)}
	for e := range p.Ranks {
		for _, slot := range table[experts+1:][table[e]:table[e+1]] {
			after := sort.Search(len(first), func(r int) bool { return first[r] > slot })
			p.Ranks[e] = append(p.Ranks[e], after-1)
		}
	}
	return p
}

// String is like "0:[0] 1:[0 2] 2:[1]", expert by expert.
func (p *Placement) String() string {
	var b strings.Builder
	for e, at := range p.Ranks {
		if e > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%d:%v", e, at)
	}
	return b.String()
}

func (p *Placement) validate(experts, ranks int) error {
	if p == nil {
		return invalid("there is no placement")
	}
	if len(p.Ranks) != experts {
		return invalid("the placement has %d experts, Options.Experts is %d", len(p.Ranks), experts)
	}
	for e, at := range p.Ranks {
		if len(at) == 0 {
			return invalid("the placement has expert %d on no rank", e)
		}
		for i, r := range at {
			if r < 0 || r >= ranks {
				return invalid("the placement has expert %d on rank %d of %d", e, r, ranks)
			}
			if slices.Contains(at[:i], r) {
				return invalid("the placement has expert %d twice on rank %d: %v", e, r, at)
			}
		}
	}
	return nil
}

// clone is a copy that shares nothing with p.
func (p *Placement) clone() *Placement {
	c := &Placement{Ranks: make([][]int, len(p.Ranks))}
	for e, at := range p.Ranks {
		c.Ranks[e] = slices.Clone(at)
	}
	return c
}
