package explore

import (
	"fmt"
	"strings"
)

// HandleLayout is how the rows of a handle lie, for what matters to the protocol.
type HandleLayout uint8

// The layouts.
const (
	// ByExpert rows land in staging, where each source has a part, and are taken from there. Partial sums are made in staging too.
	ByExpert HandleLayout = iota
	// ByExpertBeside is the same with passes that run next to the kernels which cross links.
	ByExpertBeside
	// ByRank rows land in the output, where each source has a part, and are read there.
	ByRank
	// Compact rows do so one source behind the other.
	Compact
	// Packets are rows of few tokens: they say by themselves of which call they are, and cross to places of their own without waiting for room.
	Packets
)

// HandleCall is one call with a handle, as all ranks make it.
type HandleCall struct {
	Combine bool
	// Rows says of a dispatch which rank has rows for which: Rows[src][dst]. Without it the dispatch sends other rows the ways of the last one.
	// A combine brings the rows of the dispatch before it back.
	Rows [][]bool
	// Release says that a combine gives the handle back.
	Release bool
}

// HandleBug is a mistake that Handle can make.
type HandleBug uint8

// The mistakes.
const (
	NoHandleBug HandleBug = iota
	// OneBegin has one line of beginnings for each pair of ranks, not one for each parity of calls.
	OneBegin
	// AnyNumber takes the number of any call for this one's.
	AnyNumber
	// RoomNotAwaited writes rows before the receiver is through with the last ones.
	RoomNotAwaited
	// FreeTooSoon says of an output that is read in place that it may be written when a combine begins that does not release it.
	FreeTooSoon
	// MadeNotAwaited reads partial sums when their rank has begun the call.
	MadeNotAwaited
	// StagingNotAwaited makes partial sums while those of the last call are still read.
	StagingNotAwaited
	// InPlaceNotAwaited gives rows back to their user while peers read them.
	InPlaceNotAwaited
	// DoneBeforeRowsOfHandle says that rows are there, then writes them.
	DoneBeforeRowsOfHandle
	// OnePlace has one place for packets and numbers, not one for each parity of calls.
	OnePlace
	// BeginNotAwaited ends a call with packets when those that it wants are there, and does not wait for the other ranks to begin.
	BeginNotAwaited
)

// Handle is the protocol of dispatch and combine on GPUs (kernels/cuda/dispatch): what ranks do in the calls of one handle, in which nothing is
// numbered but the calls.
//
// In every call a rank tells all others that it begins. A dispatch then waits for room, tells how many rows come, writes them, and says that
// they are there. A combine says in its beginning where its rows are; peers read them and say so. Packets need neither room nor words; a
// combine sends them, too. Lines of beginnings, done words, numbers and packets exist for even and odd calls; rows, partial sums and the
// numbers of compact rows do not. Every store is visible at once: Protocol has relaxed stores, this model and the emulation of the kernels do not.
type Handle struct {
	ranks    int
	layout   HandleLayout
	bug      HandleBug
	programs [][]phase // of each rank
	cells    map[string]int
}

// phase is one or two threads of a rank that run side by side. The next phase begins when both have ended.
type phase [2][]deed

type deedKind uint8

const (
	deedStore  deedKind = iota // cell = val
	deedAwait                  // until cell >= val
	deedLine                   // until the call in cell >= val, which it must be
	deedEqual                  // until cell == val
	deedRoom                   // until cell >= val, or other == before
	deedExpect                 // cell must be val
)

type deed struct {
	kind        deedKind
	cell, other int
	val, before uint64
	what        string
}

// NewHandle makes the system of n ranks.
func NewHandle(n int, layout HandleLayout, calls []HandleCall, bug HandleBug) *Handle {
	h := &Handle{ranks: n, layout: layout, bug: bug, programs: make([][]phase, n), cells: map[string]int{}}
	for rank := range n {
		var rows [][]bool
		came := 0 // the dispatch that the rows are of
		for i, c := range calls {
			b := handleBuilder{h: h, me: rank, call: i + 1, kept: i > 0 && calls[i-1].Combine && h.keeps(calls[i-1]), freed: i > 0 && calls[i-1].Combine && h.frees(calls[i-1])}
			if !c.Combine {
				again := c.Rows == nil
				if !again {
					rows = c.Rows
				}
				came = b.call
				h.programs[rank] = append(h.programs[rank], b.dispatch(rows, again)...)
			} else {
				h.programs[rank] = append(h.programs[rank], b.combine(c, rows, came)...)
			}
		}
	}
	return h
}

func (h *Handle) byToken() bool { return h.layout == ByRank || h.layout == Compact }

// frees reports whether a combine's beginning says that the output may be written, keeps whether it ends before peers have read its rows.
func (h *Handle) frees(c HandleCall) bool {
	return !h.byToken() || h.layout == ByRank && (c.Release || h.bug == FreeTooSoon)
}
func (h *Handle) keeps(c HandleCall) bool {
	return !h.byToken() || c.Release || h.bug == InPlaceNotAwaited
}

func (h *Handle) cell(format string, args ...any) int {
	name := fmt.Sprintf(format, args...)
	c, ok := h.cells[name]
	if !ok {
		c = len(h.cells)
		h.cells[name] = c
	}
	return c
}

// Start implements System.
func (h *Handle) Start() []uint64 {
	s := make([]uint64, len(h.cells)+h.ranks)
	for rank := range h.ranks {
		h.skip(s, rank)
	}
	return s
}

func (h *Handle) where(s []uint64, rank int) (at int, pcs [2]int) {
	v := s[len(h.cells)+rank]
	return int(v & 0xff), [2]int{int(v >> 8 & 0xff), int(v >> 16 & 0xff)}
}

// skip goes to the next phase with something left to do.
func (h *Handle) skip(s []uint64, rank int) {
	at, pcs := h.where(s, rank)
	for at < len(h.programs[rank]) && pcs[0] == len(h.programs[rank][at][0]) && pcs[1] == len(h.programs[rank][at][1]) {
		at, pcs = at+1, [2]int{}
	}
	s[len(h.cells)+rank] = uint64(at) | uint64(pcs[0])<<8 | uint64(pcs[1])<<16
}

// next is what a thread of a rank does next, nil for nothing.
func (h *Handle) next(s []uint64, rank, thread int) *deed {
	at, pcs := h.where(s, rank)
	if at == len(h.programs[rank]) || pcs[thread] == len(h.programs[rank][at][thread]) {
		return nil
	}
	return &h.programs[rank][at][thread][pcs[thread]]
}

func (d *deed) ready(s []uint64) bool {
	switch d.kind {
	case deedAwait:
		return s[d.cell] >= d.val
	case deedLine:
		return s[d.cell]>>1 >= d.val
	case deedEqual:
		return s[d.cell] == d.val
	case deedRoom:
		return s[d.cell] >= d.val || d.other >= 0 && s[d.other] == d.before
	}
	return true
}

// Moves implements System.
func (h *Handle) Moves(s []uint64, moves []Move) []Move {
	for rank := range h.ranks {
		for thread := range 2 {
			if d := h.next(s, rank, thread); d != nil && d.ready(s) {
				moves = append(moves, Move(2*rank+thread))
			}
		}
	}
	return moves
}

// Apply implements System.
func (h *Handle) Apply(s []uint64, m Move) error {
	rank, thread := int(m/2), int(m%2)
	d := h.next(s, rank, thread)
	s[len(h.cells)+rank] += 1 << (8 + 8*thread)
	h.skip(s, rank)
	switch {
	case d.kind == deedStore:
		s[d.cell] = d.val
	case d.kind == deedLine && s[d.cell]>>1 != d.val:
		return fmt.Errorf("%w: rank %d, %s: by what it says of call %d", ErrData, rank, d.what, s[d.cell]>>1)
	case d.kind == deedExpect && s[d.cell] != d.val:
		return fmt.Errorf("%w: rank %d, %s: of call %d, not %d", ErrData, rank, d.what, s[d.cell], d.val)
	}
	return nil
}

// Describe implements System.
func (h *Handle) Describe(s []uint64, m Move) Step {
	return Step{Rank: int(m / 2), Action: h.next(s, int(m/2), int(m%2)).what}
}

// End implements System: every rank must be through.
func (h *Handle) End(s []uint64) error {
	var waits []string
	for rank := range h.ranks {
		for thread := range 2 {
			if d := h.next(s, rank, thread); d != nil {
				waits = append(waits, fmt.Sprintf("rank %d is stuck before %q", rank, d.what))
			}
		}
	}
	if waits != nil {
		return fmt.Errorf("%w: %s", ErrDeadlock, strings.Join(waits, "; "))
	}
	return nil
}
