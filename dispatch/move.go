package dispatch

import "slices"

// Move is an expert that has come to a rank which did not have its parameters.
type Move struct {
	Expert int
	// From is a rank that has the parameters, -1 if no rank has them: they are lost, unless a copy exists elsewhere, on a disk for
	// example.
	From int
	To   int
}

// Follow adapts a placement to another group. was[r] is the number that rank r of that group had in the group of p, -1 if it is
// new. Experts stay on their ranks; copies on lost ranks are dropped, and the tokens of such an expert go to the copies that
// remain. An expert without a copy goes to the rank with the fewest experts. New ranks take experts from the ranks with most,
// until they have an equal share.
//
// The placement depends on p and was alone, so all ranks that have both get the same. Moves contain ranks of the new group.
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

// release takes the last expert of the fullest old rank that rank fresh does not have and that is not lost, and returns the move.
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
