package dispatch

import "slices"

// Move is an expert whose parameters a rank needs and did not have before.
type Move struct {
	Expert int
	// From is a rank that has them, -1 when no rank has: the expert is lost, unless there is a copy elsewhere, on a disk say.
	From int
	To   int
}

// Follow carries a placement over to another group. was[r] is the number that rank r of that group had in the group of p, -1 when
// it is new. Experts stay where they are; copies on ranks that are gone are dropped, so that the tokens of a redundant expert go
// to those that remain. An expert of which no copy is left gets a place on the rank with the fewest. Ranks that are new
// take experts from those with most, until they have a fair share.
//
// The placement depends on p and was alone: all ranks that have both get the same. Numbers of moves are ranks of the new group.
func (p *Placement) Follow(was []int) (*Placement, []Move) {
	q := &Placement{Ranks: make([][]int, len(p.Ranks))}
	load := make([]int, len(was))
	copies := 0
	for e, at := range p.Ranks {
		for _, r := range at {
			if now := slices.Index(was, r); now >= 0 {
				q.Ranks[e] = append(q.Ranks[e], now)
				load[now]++
				copies++
			}
		}
	}
	var moves []Move
	for e, at := range q.Ranks {
		if len(at) == 0 {
			to := slices.Index(load, slices.Min(load))
			q.Ranks[e] = []int{to}
			load[to]++
			copies++
			moves = append(moves, Move{Expert: e, From: -1, To: to})
		}
	}
	lost := len(moves)
	for fresh, r := range was {
		if r >= 0 {
			continue
		}
		for load[fresh] < copies/len(was) {
			m := q.release(load, was, fresh, moves[:lost])
			if m.Expert < 0 {
				break
			}
			at := q.Ranks[m.Expert]
			at[slices.Index(at, m.From)] = fresh
			load[m.From]--
			load[fresh]++
			moves = append(moves, m)
		}
	}
	return q, moves
}

// release finds the last expert of the fullest old rank that the new one does not have and that is not lost.
func (p *Placement) release(load, was []int, fresh int, lost []Move) Move {
	from := -1
	for r := range load {
		if was[r] >= 0 && load[r] > load[fresh]+1 && (from < 0 || load[r] > load[from]) {
			from = r
		}
	}
	if from >= 0 {
		for e := len(p.Ranks) - 1; e >= 0; e-- {
			gone := slices.ContainsFunc(lost, func(m Move) bool { return m.Expert == e })
			if slices.Contains(p.Ranks[e], from) && !slices.Contains(p.Ranks[e], fresh) && !gone {
				return Move{Expert: e, From: from, To: fresh}
			}
		}
	}
	return Move{Expert: -1}
}
