package explore

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

// Move is one atomic action that a System can take. Only the System knows what it stands for.
type Move uint32

// Step is one action of a trace.
type Step struct {
	Rank   int
	Action string
}

// System is a finite system of ranks that act one at a time on a state of a fixed number of words. Every behaviour of it
// must end: its states may not form a cycle.
type System interface {
	// Start is the first state.
	Start() []uint64
	// Moves appends every move that is possible in state s to moves.
	Moves(s []uint64, moves []Move) []Move
	// Apply makes the move in s. An error is a broken promise.
	Apply(s []uint64, m Move) error
	// Describe says what the move does in s.
	Describe(s []uint64, m Move) Step
	// End judges a state without moves: nil for a good end, an error for a deadlock.
	End(s []uint64) error
}

// Result of an exploration.
type Result struct {
	States int // different states
	Moves  int // actions tried
	Depth  int // actions on the way to the state that is furthest away
	// Violation is the shortest way to a broken promise, nil when there is none.
	Violation *Violation
}

// Violation is a broken promise and the way to it.
type Violation struct {
	Err   error
	Trace []Step
}

// Error is the broken promise with its trace, one action a line.
func (v *Violation) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v\nafter %d actions:", v.Err, len(v.Trace))
	for i, s := range v.Trace {
		fmt.Fprintf(&b, "\n%4d  rank %d  %s", i+1, s.Rank, s.Action)
	}
	return b.String()
}

// Unwrap is the broken promise.
func (v *Violation) Unwrap() error { return v.Err }

// ErrLimit is the error of an exploration that was cut short.
var ErrLimit = errors.New("explore: too many states")

// node is how a state was reached first.
type node struct {
	parent int32
	move   Move
}

// Check visits every state of sys that can be reached, breadth first, so that the violation it finds has a shortest trace.
// It gives up with ErrLimit beyond limit states. States are told apart by a 64-bit hash: among a million states one is
// taken for another, and left out, with a probability of 3e-8.
func Check(sys System, limit int) (Result, error) {
	start := sys.Start()
	width := len(start)
	var r Result
	var seen set
	seen.add(hash(start))
	nodes := []node{{parent: -1}}
	// The states of the frontier lie one after the other, as do their successors; first is the frontier's first node.
	frontier, next := append([]uint64(nil), start...), []uint64(nil)
	first := 0
	fail := func(at int, last []Move, err error) (Result, error) {
		r.States = len(nodes)
		r.Violation = &Violation{Err: err, Trace: trace(sys, nodes, at, last)}
		return r, nil
	}
	var moves []Move
	for len(frontier) > 0 {
		begin := len(nodes)
		next = next[:0]
		for i := 0; i < len(frontier)/width; i++ {
			s := frontier[i*width : (i+1)*width]
			moves = sys.Moves(s, moves[:0])
			if len(moves) == 0 {
				if err := sys.End(s); err != nil {
					return fail(first+i, nil, err)
				}
			}
			for _, m := range moves {
				r.Moves++
				at := len(next)
				next = append(next, s...)
				t := next[at:]
				if err := sys.Apply(t, m); err != nil {
					return fail(first+i, []Move{m}, err)
				}
				if !seen.add(hash(t)) {
					next = next[:at]
					continue
				}
				if len(nodes) >= limit {
					return r, fmt.Errorf("%w: %d", ErrLimit, limit)
				}
				nodes = append(nodes, node{parent: int32(first + i), move: m})
			}
		}
		frontier, next = next, frontier
		first = begin
		if len(frontier) > 0 {
			r.Depth++
		}
	}
	r.States = len(nodes)
	return r, nil
}

// hash of a state, never 0.
func hash(s []uint64) uint64 { return max(xxhash.Sum64(shm.Bytes(s)), 1) }

// set of hashes: a table in which a hash lies at its place or, where that is taken, at one of the next.
type set struct {
	table []uint64
	n     int
}

// add reports whether h is new.
func (s *set) add(h uint64) bool {
	if 2*s.n >= len(s.table) {
		old := s.table
		s.table, s.n = make([]uint64, max(1<<12, 4*len(old))), 0
		for _, h := range old {
			if h != 0 {
				s.add(h)
			}
		}
	}
	mask := uint64(len(s.table) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.table[i] {
		case 0:
			s.table[i] = h
			s.n++
			return true
		case h:
			return false
		}
	}
}

// trace replays the way to a node and the moves after it.
func trace(sys System, nodes []node, at int, last []Move) []Step {
	moves := last
	for ; nodes[at].parent >= 0; at = int(nodes[at].parent) {
		moves = append([]Move{nodes[at].move}, moves...)
	}
	s := sys.Start()
	steps := make([]Step, 0, len(moves))
	for _, m := range moves {
		steps = append(steps, sys.Describe(s, m))
		_ = sys.Apply(s, m) // the last one breaks the promise
	}
	return steps
}
