package explore

import (
	"fmt"
)

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
