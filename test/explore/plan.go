package explore

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// Errors of plans.
var (
	// ErrRace: a step writes a chunk while another rank uses it, or uses what is not there.
	ErrRace = errors.New("a race")
	// ErrResult: an output is not what the collective says, or not the same on all ranks.
	ErrResult = errors.New("a wrong result")
)

// Plan is the system of a plan whose ranks take their steps in any order. A step that moves data begins and ends apart from each other, so
// that other ranks act in between. It knows nothing of how package plan proves plans, and has to come to the same verdict.
//
// The state is, for each rank, twice the number of its steps that are done, plus 1 in the middle of one, then the value of every chunk of the
// outputs and of scratch.
type Plan struct {
	p      *plan.Plan
	values []string // by number; 0 is none
	number map[string]uint64
	cells  map[cellOf]int // place in the state
	width  int
}

// cellOf is a chunk of a rank.
type cellOf struct {
	rank   int
	buffer plan.Buffer
	chunk  int
}

// NewPlan is the system of p, whose steps have places within their buffers. The inputs' chunks begin at value 1.
func NewPlan(p *plan.Plan, input, output int) *Plan {
	x := &Plan{p: p, values: []string{""}, number: map[string]uint64{}, cells: map[cellOf]int{}, width: p.Ranks}
	for rank := range p.Ranks {
		for chunk := range input {
			x.value(fmt.Sprintf("%d.%d", rank, chunk))
		}
		for b, n := range map[plan.Buffer]int{plan.Output: output, plan.Scratch: p.Scratch} {
			for chunk := range n {
				x.cells[cellOf{rank, b, chunk}] = x.width
				x.width++
			}
		}
	}
	return x
}

// value is the number of a value.
func (x *Plan) value(text string) uint64 {
	n, ok := x.number[text]
	if !ok {
		n = uint64(len(x.values))
		x.number[text], x.values = n, append(x.values, text)
	}
	return n
}

// Start implements System.
func (x *Plan) Start() []uint64 { return make([]uint64, x.width) }

// step is the next step of a rank, nil when it has done all.
func (x *Plan) step(s []uint64, rank int) *plan.Step {
	if i := int(s[rank] / 2); i < len(x.p.Programs[rank]) {
		return &x.p.Programs[rank][i]
	}
	return nil
}

// count is how many steps of a kind for a semaphore a rank has done.
func (x *Plan) count(s []uint64, rank int, do plan.Kind, peer, semaphore int) (n int) {
	for _, t := range x.p.Programs[rank][:s[rank]/2] {
		if t.Do == do && *t.Peer == peer && t.Semaphore == semaphore {
			n++
		}
	}
	return n
}

// Moves implements System. A move is the rank that acts.
func (x *Plan) Moves(s []uint64, moves []Move) []Move {
	for rank := range x.p.Ranks {
		t := x.step(s, rank)
		if t == nil || t.Do == plan.Wait && x.count(s, *t.Peer, plan.Signal, rank, t.Semaphore) == x.count(s, rank, plan.Wait, *t.Peer, t.Semaphore) {
			continue
		}
		moves = append(moves, Move(rank))
	}
	return moves
}

func (x *Plan) at(rank int, p plan.Place) cellOf {
	if p.Rank >= 0 {
		rank = p.Rank
	}
	return cellOf{rank, p.Buffer, p.Chunk}
}

// uses are the chunks that a step reads and the one that it writes.
func (x *Plan) uses(rank int, t *plan.Step) (reads []cellOf, writes cellOf) {
	for _, p := range t.From {
		reads = append(reads, x.at(rank, p))
	}
	return reads, x.at(rank, *t.To)
}

// Apply implements System.
func (x *Plan) Apply(s []uint64, m Move) error {
	rank := int(m)
	t := x.step(s, rank)
	if t.To == nil {
		s[rank] += 2
		return nil
	}
	reads, writes := x.uses(rank, t)
	if s[rank]%2 == 0 {
		s[rank]++
		return x.begin(s, rank, reads, writes)
	}
	var parts []string
	for _, c := range reads {
		v := fmt.Sprintf("%d.%d", c.rank, c.chunk)
		if c.buffer != plan.Input {
			v = x.values[s[x.cells[c]]]
		}
		parts = append(parts, v)
	}
	v := parts[0]
	if len(parts) > 1 {
		v = "(" + strings.Join(parts, " ") + ")"
	}
	s[x.cells[writes]] = x.value(v)
	s[rank]++
	return nil
}

// begin looks for ranks that use the same chunks at that moment, and for those that are gone.
func (x *Plan) begin(s []uint64, rank int, reads []cellOf, writes cellOf) error {
	for _, c := range reads {
		if c.buffer != plan.Input && s[x.cells[c]] == 0 {
			return fmt.Errorf("%w: rank %d reads %v %d of rank %d, which is empty", ErrRace, rank, c.buffer, c.chunk, c.rank)
		}
	}
	for _, c := range append(reads, writes) {
		if c.rank != rank && c.buffer != plan.Scratch && x.step(s, c.rank) == nil {
			return fmt.Errorf("%w: rank %d uses %v %d of rank %d, which has ended", ErrRace, rank, c.buffer, c.chunk, c.rank)
		}
	}
	for other := range x.p.Ranks {
		if other == rank || s[other]%2 == 0 {
			continue
		}
		theirReads, theirWrites := x.uses(other, x.step(s, other))
		if theirWrites == writes || slices.Contains(theirReads, writes) || slices.Contains(reads, theirWrites) {
			return fmt.Errorf("%w: ranks %d and %d use a chunk at the same time", ErrRace, rank, other)
		}
	}
	return nil
}

// Describe implements System.
func (x *Plan) Describe(s []uint64, m Move) Step {
	how := []string{"begins ", "ends "}[s[m]%2]
	t := x.step(s, int(m))
	if t.To == nil {
		how = ""
	}
	return Step{Rank: int(m), Action: how + t.String()}
}

// End implements System.
func (x *Plan) End(s []uint64) error {
	for rank := range x.p.Ranks {
		if t := x.step(s, rank); t != nil {
			return fmt.Errorf("%w: rank %d is at its %v", ErrDeadlock, rank, t)
		}
	}
	for rank := range x.p.Ranks {
		for peer := range x.p.Ranks {
			for n := range plan.MaxSemaphores {
				if a, b := x.count(s, rank, plan.Signal, peer, n), x.count(s, peer, plan.Wait, rank, n); a != b {
					return fmt.Errorf("%w: %d signals from rank %d to rank %d, %d waits", ErrResult, a, rank, peer, b)
				}
			}
		}
	}
	for c, at := range x.cells {
		if c.buffer == plan.Output {
			if err := x.result(c.rank, c.chunk, x.values[s[at]]); err != nil {
				return err
			}
			if first := s[x.cells[cellOf{0, c.buffer, c.chunk}]]; x.p.Collective == plan.AllReduce && s[at] != first {
				return fmt.Errorf("%w: output %d is %s on rank %d and %s on rank 0", ErrResult, c.chunk, x.values[s[at]], c.rank, x.values[first])
			}
		}
	}
	return nil
}

// result judges what lies in an output.
func (x *Plan) result(rank, chunk int, have string) error {
	n := x.p.Chunks
	var want []string
	for r := range x.p.Ranks {
		switch x.p.Collective {
		case plan.AllReduce:
			want = append(want, fmt.Sprintf("%d.%d", r, chunk))
		case plan.ReduceScatter:
			want = append(want, fmt.Sprintf("%d.%d", r, rank*n+chunk))
		case plan.AllGather:
			want = []string{fmt.Sprintf("%d.%d", chunk/n, chunk%n)}
		case plan.AllToAll:
			want = []string{fmt.Sprintf("%d.%d", chunk/n, rank*n+chunk%n)}
		}
	}
	got := strings.FieldsFunc(have, func(r rune) bool { return strings.ContainsRune("() ", r) })
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("%w: output %d of rank %d is %q, want %v", ErrResult, chunk, rank, have, want)
	}
	return nil
}
