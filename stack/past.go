package stack

import (
	"maps"
	"slices"

	"github.com/switchyard-moe/switchyard/dispatch"
)

// past is what a rank brings from the stack that it leaves.
type past struct {
	ID  uint64
	Age int
	// Experts are which ranks had each expert when this rank left the stack, by their ids.
	Experts [][]uint64
	// Had are the experts that this rank had when it left its stacks, by their ages. A rank without any is fresh.
	Had map[int][]int
}

// leave is what this rank brings from s to the next stack. The placement is that of its dispatcher now.
func (s *Stack) leave() past {
	p := past{ID: s.id, Age: s.age}
	if s.Dispatcher == nil {
		return p
	}
	now := s.Dispatcher.Placement()
	for _, at := range now.Ranks {
		var on []uint64
		for _, r := range at {
			on = append(on, s.ids[r])
		}
		p.Experts = append(p.Experts, on)
	}
	p.Had = map[int][]int{s.age: now.Local(s.Group.Rank())}
	maps.Copy(p.Had, s.had)
	return p
}

// together is where experts are among ranks that bring these pasts, and what dispatch.Placement.Follow needs of the ranks: -1 for those that
// are fresh. nil if all are. age is that of the stack which they had then.
//
// Ranks may come from different stacks, when one was lost while others were being opened: what counts is the oldest, which all have had. They
// may also have left it with different placements, when one was lost while experts moved. A rank has the parameters of its own placement, so
// that says what it has; where two then have an expert that each had alone, the one in the first rank's placement keeps it.
func together(pasts []past) (before *dispatch.Placement, was []int, age int) {
	var oldest *past
	number := make(map[uint64]int)
	for r := range pasts {
		p := &pasts[r]
		number[p.ID] = r
		if p.Had == nil {
			was = append(was, -1)
			continue
		}
		was = append(was, r)
		if oldest == nil || p.Age < oldest.Age {
			oldest = p
		}
	}
	if oldest == nil {
		return nil, was, 0
	}
	before = &dispatch.Placement{Ranks: make([][]int, len(oldest.Experts))}
	for e, at := range oldest.Experts {
		has := func(r int) bool { return slices.Contains(pasts[r].Had[oldest.Age], e) }
		for _, id := range at {
			if r, ok := number[id]; ok && has(r) {
				before.Ranks[e] = append(before.Ranks[e], r)
			}
		}
		found := before.Ranks[e] != nil
		for r := 0; r < len(pasts) && !found; r++ {
			if has(r) {
				before.Ranks[e] = append(before.Ranks[e], r)
			}
		}
	}
	return before, was, oldest.Age
}
