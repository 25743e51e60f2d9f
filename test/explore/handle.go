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

// handleBuilder makes the phases of one rank in one call.
type handleBuilder struct {
	h           *Handle
	me, call    int
	kept, freed bool // by the call before
	deeds       []deed
}

func (b *handleBuilder) add(d deed, format string, args ...any) {
	d.what = fmt.Sprintf("call %d: ", b.call) + fmt.Sprintf(format, args...)
	b.deeds = append(b.deeds, d)
}

func (b *handleBuilder) done() []deed {
	d := b.deeds
	b.deeds = nil
	return d
}

// each does something for every peer.
func (b *handleBuilder) each(f func(p int)) {
	for i := 1; i < b.h.ranks; i++ {
		f((b.me + i) % b.h.ranks)
	}
}

func (b *handleBuilder) begin(at, of, call int) int {
	if b.h.bug == OneBegin {
		call = 0
	}
	return b.h.cell("begin of rank %d at rank %d, %d", of, at, call&1)
}
func (b *handleBuilder) doneWord(at, of, call int) int {
	return b.h.cell("done word of rank %d at rank %d, %d", of, at, call&1)
}

// parity is 1 for odd calls, where even and odd ones have places of their own.
func (b *handleBuilder) parity() int {
	if b.h.bug == OnePlace || b.h.layout == Compact {
		return 0
	}
	return b.call & 1
}
func (b *handleBuilder) number(at, of int) int {
	return b.h.cell("number of rank %d at rank %d, %d", of, at, b.parity())
}
func (b *handleBuilder) packets(at, of int) int {
	return b.h.cell("packets of rank %d at rank %d, %d", of, at, b.parity())
}
func (b *handleBuilder) made(at, of int) int {
	return b.h.cell("made word of rank %d at rank %d", of, at)
}
func (b *handleBuilder) sums(of, dst int) int {
	return b.h.cell("partial sums of rank %d for rank %d", of, dst)
}

// rows is where those of src lie at dst.
func (b *handleBuilder) rows(rows [][]bool, dst, src int) int {
	at := src
	if b.h.layout == Compact {
		at = 0
		for s := range src {
			if rows[s][dst] {
				at++
			}
		}
	}
	return b.h.cell("rows %d at rank %d", at, dst)
}

// told is what a line of beginnings or a done word says: the number of the call, and whether the output is free.
func told(call int, frees bool) uint64 {
	v := uint64(call) << 1
	if frees {
		v |= 1
	}
	return v
}

// awaitDone waits for a done word and reads what it says.
func (b *handleBuilder) awaitDone(p, call int, format string, args ...any) {
	b.add(deed{kind: deedLine, cell: b.doneWord(b.me, p, call), val: uint64(call)}, format, args...)
}

func (b *handleBuilder) tellBegin(frees bool) {
	b.each(func(p int) {
		b.add(deed{kind: deedStore, cell: b.begin(p, b.me, b.call), val: told(b.call, frees)}, "tells rank %d that it begins", p)
	})
}

// cross is a call with packets from src to dst where goes says so. A new dispatch tells numbers, too.
func (b *handleBuilder) cross(goes func(src, dst int) bool, numbers bool) []phase {
	e := uint64(b.call)
	b.tellBegin(false)
	b.each(func(p int) {
		if numbers {
			b.add(deed{kind: deedStore, cell: b.number(p, b.me), val: e}, "tells rank %d how many rows come", p)
		}
		if goes(b.me, p) {
			b.add(deed{kind: deedStore, cell: b.packets(p, b.me), val: e}, "sends rows to rank %d", p)
		}
	})
	sends := b.done()
	b.each(func(p int) {
		if b.h.bug != BeginNotAwaited {
			b.add(deed{kind: deedLine, cell: b.begin(b.me, p, b.call), val: e}, "sees that rank %d has begun", p)
		}
	})
	begins := b.done()
	b.each(func(p int) {
		if numbers {
			b.add(deed{kind: deedEqual, cell: b.number(b.me, p), val: e}, "sees how many rows come from rank %d", p)
		}
		if goes(p, b.me) {
			b.add(deed{kind: deedEqual, cell: b.packets(b.me, p), val: e}, "sees the rows of rank %d", p)
			b.add(deed{kind: deedExpect, cell: b.packets(b.me, p), val: e}, "uses the rows of rank %d", p)
		}
	})
	return []phase{{sends}, {b.done(), begins}}
}

func (b *handleBuilder) dispatch(rows [][]bool, again bool) []phase {
	h, e := b.h, uint64(b.call)
	if h.layout == Packets {
		return b.cross(func(src, dst int) bool { return rows[src][dst] }, !again)
	}
	b.tellBegin(false)
	if h.bug != RoomNotAwaited {
		b.each(func(p int) {
			d := deed{kind: deedRoom, cell: b.begin(b.me, p, b.call), val: told(b.call, false), other: -1}
			if b.freed {
				d.other, d.before = b.begin(b.me, p, b.call-1), told(b.call-1, true)
			}
			b.add(d, "sees room at rank %d", p)
		})
	}
	tell := func() {
		b.each(func(p int) {
			b.add(deed{kind: deedStore, cell: b.number(p, b.me), val: e}, "tells rank %d how many rows come", p)
		})
	}
	await := func() {
		b.each(func(p int) {
			d := deed{kind: deedEqual, cell: b.number(b.me, p), val: e}
			if h.bug == AnyNumber {
				d = deed{kind: deedAwait, cell: d.cell, val: 1}
			}
			b.add(d, "sees how many rows come from rank %d", p)
			b.add(deed{kind: deedExpect, cell: b.number(b.me, p), val: e}, "reads how many rows come from rank %d", p)
		})
	}
	if h.layout == Compact && !again { // whose rows lie behind those of other ranks
		tell()
		await()
	}
	write := func(p int) {
		if rows[b.me][p] {
			b.add(deed{kind: deedStore, cell: b.rows(rows, p, b.me), val: e}, "writes rows to rank %d", p)
		}
	}
	b.each(func(p int) {
		if h.bug != DoneBeforeRowsOfHandle {
			write(p)
		}
	})
	if h.layout != Compact && !again {
		tell()
	}
	b.each(func(p int) {
		b.add(deed{kind: deedStore, cell: b.doneWord(p, b.me, b.call), val: told(b.call, false)}, "tells rank %d that they are there", p)
		if h.bug == DoneBeforeRowsOfHandle {
			write(p)
		}
	})
	sends := b.done()
	if h.layout != Compact && !again {
		await()
	}
	b.each(func(p int) {
		b.awaitDone(p, b.call, "sees that the rows of rank %d are there", p)
		if rows[p][b.me] {
			b.add(deed{kind: deedExpect, cell: b.rows(rows, b.me, p), val: e}, "uses the rows of rank %d", p)
		}
	})
	takes := b.done()
	if h.layout == ByExpertBeside {
		return []phase{{sends, takes}}
	}
	return []phase{{sends}, {takes}}
}

func (b *handleBuilder) combine(c HandleCall, rows [][]bool, came int) []phase {
	h, e := b.h, uint64(b.call)
	if h.layout == Packets {
		return b.cross(func(src, dst int) bool { return rows[dst][src] }, false)
	}
	var phases []phase
	source := func(rank, dst int) int { // of what a rank's peer dst reads
		if h.byToken() {
			return b.rows(rows, rank, dst)
		}
		return b.sums(rank, dst)
	}
	if !h.byToken() && b.kept && h.bug != StagingNotAwaited {
		b.each(func(p int) {
			b.awaitDone(p, b.call-1, "sees that rank %d has read the last partial sums", p)
		})
	}
	phases = append(phases, phase{b.done()})
	b.each(func(p int) {
		if !rows[p][b.me] {
			return
		}
		if h.byToken() { // what experts make, in place
			b.add(deed{kind: deedStore, cell: source(b.me, p), val: e}, "makes the rows for rank %d", p)
			return
		}
		b.add(deed{kind: deedExpect, cell: b.rows(rows, b.me, p), val: uint64(came)}, "reads the weights beside the rows of rank %d", p)
		b.add(deed{kind: deedStore, cell: source(b.me, p), val: e}, "makes partial sums for rank %d", p)
		if h.layout == ByExpertBeside {
			b.add(deed{kind: deedStore, cell: b.made(p, b.me), val: e}, "tells rank %d that they are made", p)
		}
	})
	makes := b.done()
	b.tellBegin(h.frees(c))
	b.each(func(p int) {
		b.add(deed{kind: deedLine, cell: b.begin(b.me, p, b.call), val: e}, "sees that rank %d has begun", p)
	})
	b.each(func(p int) {
		if !rows[b.me][p] {
			return
		}
		if h.layout == ByExpertBeside && h.bug != MadeNotAwaited {
			b.add(deed{kind: deedAwait, cell: b.made(b.me, p), val: e}, "sees that rank %d has made its partial sums", p)
		}
		b.add(deed{kind: deedExpect, cell: source(p, b.me), val: e}, "reads the rows of rank %d", p)
	})
	b.each(func(p int) {
		b.add(deed{kind: deedStore, cell: b.doneWord(p, b.me, b.call), val: told(b.call, false)}, "tells rank %d that it has read them", p)
	})
	if !h.keeps(c) {
		b.each(func(p int) {
			b.awaitDone(p, b.call, "sees that rank %d has read its rows", p)
		})
	}
	reads := b.done()
	if h.layout == ByExpertBeside {
		phases = append(phases, phase{makes, reads})
	} else {
		phases = append(phases, phase{makes}, phase{reads})
	}
	if h.byToken() && !c.Release { // the rows are the user's again
		b.each(func(p int) {
			if rows[p][b.me] {
				b.add(deed{kind: deedStore, cell: source(b.me, p), val: 0}, "overwrites the rows for rank %d", p)
			}
		})
		phases = append(phases, phase{b.done()})
	}
	return phases
}

// The state: the cells, then for each rank its phase and how far its threads are.

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
