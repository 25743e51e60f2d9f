package host

import (
	"cmp"
	"encoding/binary"

	"github.com/switchyard-moe/switchyard/kernels"
)

// On several hosts a call goes piece by piece. Each rank puts its input of a piece into staging in its segment, where its mates, the ranks of
// its host, read it. A rank reduces one slice of the piece over its mates, in float32 where elements are narrower, and puts that partial
// result to the ranks of its local rank on other hosts: its *rail peers*. Each of them combines the hosts' partial results in the order of
// hosts, so all have the same bits, and its mates take the slice from its staging. In a gather, pieces of slices cross as they are.
//
// Staging has two halves, which pieces take in turns, across calls. A rank that begins piece g has heard of all mates in piece g-1, so these
// are through with g-2. It puts piece g to a rail peer when it has that one's piece g-1, which the peer has sent when its own mates had begun
// g-1. So nothing is written that somebody still reads, and nobody answers for that. Each rank puts once a piece to each rail peer, if only
// an empty put.
//
// All ranks tell all others first what they call.

// A piece has at most this much of a slice, as a partial result: mostPiece where the staging of all slices then takes no more than pieceStaging, and
// else half as much again and again, down to leastPiece. In each piece ranks wait for each other three times, so larger ones are faster.
const (
	mostPiece    = 1 << 20
	leastPiece   = 256 << 10
	pieceStaging = 16 << 20
)

// The words of a mate's line: the last call that it has told of, and the last pieces of which its input and its part of the result are there.
const (
	toldWord = 8 * iota
	inputWord
	resultWord
)

// The words of the line of a rank of another host: how many calls it has told of, and how many pieces are here.
const (
	callsWord = movesWord + 1 + iota
	piecesWord
	reduceWords
)

// reductionsAcross are the launches of one communicator on several hosts. It is a family.
type reductionsAcross struct {
	common
	plain
	hostRanks
	counted
	c      *kernels.ReduceBounds
	piece  int64 // bytes
	calls  uint64
	pieces uint64

	// Of a call.
	a       *kernels.Reduction
	folds   folds
	fold    fold
	notice  []byte
	partial [][]byte // by host
	rows    [][]byte
}

func newReductionsAcross(c *kernels.ReduceBounds, offset int64) family {
	x := &reductionsAcross{hostRanks: newHostRanks(c.Hosts), c: c, counted: counted{offset: offset}, piece: mostPiece}
	for x.piece > leastPiece && 2*x.half() > pieceStaging {
		x.piece /= 2
	}
	return x
}

func (x *reductionsAcross) mateLine(mate int) int64 {
	return x.offset + int64(1+mate)*kernels.LineBytes
}

func (x *reductionsAcross) otherLine(rank int) int64 {
	return x.mateLine(x.perHost) + int64(rank)*kernels.LineBytes
}

// told is where a rank says what it calls.
func (x *reductionsAcross) told(epoch uint64, rank int) int64 {
	return x.otherLine(x.c.Size) + (int64(epoch&1)*int64(x.c.Size)+int64(rank))*kernels.LineBytes
}

// input is a rank's part of the input in a piece, partials are those of hosts, and result is this rank's part of what comes of it.
func (x *reductionsAcross) input(piece uint64, slice int) int64 {
	return x.told(0, 2*x.c.Size) + int64(piece&1)*x.half() + int64(slice)*x.piece
}

func (x *reductionsAcross) half() int64 { return int64(x.c.Size+len(x.of)+1) * x.piece }

func (x *reductionsAcross) partials(piece uint64, host int) int64 {
	return x.input(piece, x.c.Size+host)
}

func (x *reductionsAcross) result(piece uint64) int64 { return x.partials(piece, len(x.of)) }

func (x *reductionsAcross) defaults() { reduceDefaults(x.c) }

func (x *reductionsAcross) run(p *port, op kernels.Operation) error { return x.do(p, op, x) }

func (x *reductionsAcross) layout() kernels.Layout {
	return kernels.Layout{Bytes: x.input(0, 0) + 2*x.half() - x.offset, Zero: x.told(0, 0) - x.offset}
}

func (x *reductionsAcross) open(e *Engine) {
	x.openFars(e, reduceWords, func(_, from int) int64 { return x.otherLine(from) })
	x.partial = make([][]byte, len(x.of))
}

func (x *reductionsAcross) sizes(int) string { return x.a.Call.String() }

func (x *reductionsAcross) call(op kernels.Operation) error {
	x.a = op.(*kernels.Reduction)
	x.w.crosses(x.fars)
	x.hosts.Rail.Resume() // this rank does not sleep on it
	mismatch, err := x.meet(x.epoch)
	if err != nil || mismatch != nil {
		return cmp.Or(err, mismatch)
	}
	call := &x.a.Call
	if call.Collective.Reduces() {
		x.fold = x.folds.of(call.DType)
	}
	switch call.Collective {
	case kernels.AllReduce:
		return x.allReduce()
	case kernels.ReduceScatter:
		return x.reduceScatter()
	}
	return x.gather()
}

// meet tells all ranks what this one calls, and compares.
func (x *reductionsAcross) meet(epoch uint64) (mismatch, err error) {
	e, h, c := x.e, x.hosts, &x.a.Call
	if err := x.w.flush(); err != nil { // of the call before
		return nil, err
	}
	all := agreed{h.Rank, *c}
	x.notice = sized(x.notice, 24)
	for i, v := range [...]uint64{c.Word(), uint64(c.Count), c.Shape} {
		binary.LittleEndian.PutUint64(x.notice[8*i:], v)
	}
	x.calls++
	for _, f := range x.fars {
		if err := x.w.put(f, x.told(epoch, h.Rank), x.notice, callsWord); err != nil {
			return nil, err
		}
	}
	for i := 1; i < e.space.Size; i++ {
		q := e.peer(i)
		copy(e.space.Range(q, x.told(epoch, h.Rank), 24), x.notice)
		e.signal(q, e.word(q, x.mateLine(e.space.Rank)+toldWord), epoch)
	}
	for r := range x.ranks {
		if r == h.Rank {
			continue
		}
		word, count := e.word(e.space.Rank, x.mateLine(x.ranks[r].place)+toldWord), epoch
		if x.place(r) < 0 {
			word, count = x.far(r).word(callsWord), x.calls
		}
		if err := x.w.until(x.peer(e, r), word, count); err != nil {
			return nil, err
		}
		theirs := kernels.ReduceCall{}
		bytes := e.space.Range(e.space.Rank, x.told(epoch, r), 24)
		theirs.SetWord(binary.LittleEndian.Uint64(bytes))
		theirs.Count, theirs.Shape = int64(binary.LittleEndian.Uint64(bytes[8:])), binary.LittleEndian.Uint64(bytes[16:])
		if mismatch == nil {
			mismatch = all.with(h.Rank, c, r, &theirs, epoch)
		}
	}
	return mismatch, nil
}

// begin begins a piece: the memory of puts of earlier ones is free.
func (x *reductionsAcross) begin() error {
	x.pieces++
	return x.w.flush()
}

// mates tells the mates that this rank has come somewhere, and waits until they have.
func (x *reductionsAcross) mates(word int64) error {
	e := x.e
	for i := 1; i < e.space.Size; i++ {
		q := e.peer(i)
		e.signal(q, e.word(q, x.mateLine(e.space.Rank)+word), x.pieces)
	}
	for i := 1; i < e.space.Size; i++ {
		q := e.peer(i)
		if err := x.w.until(e.near(q), e.word(e.space.Rank, x.mateLine(q)+word), x.pieces); err != nil {
			return err
		}
	}
	return nil
}

// send puts bytesFor each rail peer where that one has those of this host.
func (x *reductionsAcross) send(bytesFor func(peer int) []byte) error {
	for i := range x.railPeers { // hosts begin with different ones
		p := x.railPeers[(i+x.me.host)%len(x.railPeers)]
		if err := x.w.put(x.far(p), x.partials(x.pieces, x.me.host), bytesFor(p), piecesWord); err != nil {
			return err
		}
	}
	return nil
}

// receive waits until the piece of all rail peers is here.
func (x *reductionsAcross) receive() error {
	for _, p := range x.railPeers {
		f := x.far(p)
		if err := x.w.until(f, f.word(piecesWord), x.pieces); err != nil {
			return err
		}
	}
	return nil
}

// reduce makes the partial result, for a host, of a slice of n elements in the staging of all mates.
func (x *reductionsAcross) reduce(host, slice int, off, n int64) []byte {
	d, e := x.a.Call.DType, x.e
	x.partial[host] = sized(x.partial[host], int(n*d.PartialSize()))
	to := x.partial[host]
	for q := range e.space.Size {
		from := e.space.Range(q, x.input(x.pieces, slice)+off*d.Size(), n*d.Size())
		if q == 0 {
			x.fold.start(to, from)
		} else {
			x.fold.step(to, to, from, x.a.Call.Op)
		}
	}
	return to
}

// join combines the partial results of all hosts. own is that of this one.
func (x *reductionsAcross) join(dst, own []byte) {
	x.rows = x.rows[:0]
	for host := range x.of {
		if host == x.me.host {
			x.rows = append(x.rows, own)
		} else {
			x.rows = append(x.rows, x.e.space.Range(x.e.space.Rank, x.partials(x.pieces, host), int64(len(own))))
		}
	}
	x.fold.join(dst, x.rows, x.a.Call.Op, x.c.Size)
	x.w.moved(int64(len(dst)))
}

// perPiece is how many elements of a slice a piece has.
func (x *reductionsAcross) perPiece() int64 {
	d := x.a.Call.DType
	return x.piece / max(d.Size(), d.PartialSize())
}

func (x *reductionsAcross) allReduce() error {
	a, es, ranks := x.a, x.a.Call.DType.Size(), int64(x.perHost)
	e, per, me := x.e, x.perPiece(), x.e.space.Rank
	for lo := int64(0); lo < a.Call.Count; lo += per * ranks {
		n := min(per*ranks, a.Call.Count-lo)
		grain := max(64/es, 1)
		each := min(((n+ranks-1)/ranks+grain-1)/grain*grain, per)
		part := func(q int) (from, to int64) { return min(int64(q)*each, n), min(int64(q+1)*each, n) }
		if err := x.begin(); err != nil {
			return err
		}
		// Slices lie one behind the other: a piece is one copy.
		copy(e.space.Range(me, x.input(x.pieces, 0), n*es), a.Src.Mem[lo*es:][:n*es])
		if err := x.mates(inputWord); err != nil {
			return err
		}
		from, to := part(me)
		own := x.reduce(x.me.host, 0, from, to-from)
		if err := x.send(func(int) []byte { return own }); err != nil {
			return err
		}
		if err := x.receive(); err != nil {
			return err
		}
		x.join(e.space.Range(me, x.result(x.pieces), (to-from)*es), own)
		if err := x.mates(resultWord); err != nil {
			return err
		}
		for q := range e.space.Size {
			from, to := part(q)
			copy(a.Dst.Mem[(lo+from)*es:], e.space.Range(q, x.result(x.pieces), (to-from)*es))
		}
	}
	return nil
}

// within is how much of a rank's slice is in the piece that begins at element lo of all slices.
func (x *reductionsAcross) within(rank int, lo, per int64) int64 {
	_, n := x.a.Slice(rank)
	return max(0, min(per, n-lo))
}

func (x *reductionsAcross) reduceScatter() error {
	a, es, per := x.a, x.a.Call.DType.Size(), x.perPiece()
	me := x.hosts.Rank
	for lo := int64(0); lo < a.Longest(); lo += per {
		if err := x.begin(); err != nil {
			return err
		}
		for r := range x.c.Size {
			at, _ := a.Slice(r)
			n := x.within(r, lo, per)
			copy(x.e.space.Range(x.e.space.Rank, x.input(x.pieces, r), n*es), a.Src.Mem[min(at+lo, a.Call.Count)*es:][:n*es])
		}
		if err := x.mates(inputWord); err != nil {
			return err
		}
		err := x.send(func(p int) []byte { return x.reduce(x.ranks[p].host, p, 0, x.within(p, lo, per)) })
		if err != nil {
			return err
		}
		n := x.within(me, lo, per)
		own := x.reduce(x.me.host, me, 0, n)
		if err := x.receive(); err != nil {
			return err
		}
		if n > 0 {
			x.join(a.Dst.Mem[lo*es:][:n*es], own)
		}
	}
	return nil
}

// gather is an all-gather, or a broadcast: then one slice is everything.
func (x *reductionsAcross) gather() error {
	a, e, es := x.a, x.e, x.a.Call.DType.Size()
	me, per := x.hosts.Rank, x.perPiece()
	for lo := int64(0); lo < a.Longest(); lo += per {
		if err := x.begin(); err != nil {
			return err
		}
		own := e.space.Range(e.space.Rank, x.input(x.pieces, 0), x.within(me, lo, per)*es)
		if len(own) > 0 {
			copy(own, a.Src.Mem[lo*es:])
		}
		if err := x.mates(inputWord); err != nil {
			return err
		}
		if err := x.send(func(int) []byte { return own }); err != nil {
			return err
		}
		if err := x.receive(); err != nil {
			return err
		}
		if err := x.mates(resultWord); err != nil {
			return err
		}
		for host, ranks := range x.of {
			for _, r := range ranks {
				n := x.within(r, lo, per) * es
				if n == 0 {
					continue
				}
				mate, from := x.ranks[r].place, x.partials(x.pieces, host)
				if host == x.me.host {
					from = x.input(x.pieces, 0)
				}
				at, _ := a.Slice(r)
				copy(a.Dst.Mem[(at+lo)*es:], e.space.Range(mate, from, n))
				x.w.moved(n)
			}
		}
	}
	return nil
}

// rest returns when all that was put here has landed.
func (x *reductionsAcross) rest(e *Engine) error {
	_, err := x.hostRanks.rest(e, x.otherLine(0), x.otherLine(x.c.Size))
	return err
}
