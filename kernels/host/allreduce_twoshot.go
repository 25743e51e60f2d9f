package host

import "github.com/switchyard-moe/switchyard/kernels"

// foldBytes is how much is reduced before it is handed on: little enough to be in the core's first cache then.
const foldBytes = 32 << 10

// twoShot reduces this rank's slice chunk by chunk and hands the result to all.
//
// Chunk k of a peer's slice goes through four steps on this rank. It is offered: the input is in the peer's staging, or
// can be read in place, and the peer may write the result or keep it for us; the entry line says so. The peer reduces it,
// and tells by its progress line. We fetch the result, if the peer could not write it into our output. Then chunk
// k + Slots may be offered in its place. Chunks of our own slice are reduced when all peers have offered them.
func (x *reducing) twoShot() error {
	a := x.a
	pushes := a.Call.Collective.Reduces() && !a.Src.Reach
	fetches := a.Call.Collective.Gathers() && !a.Dst.Reach
	src, dst := int64(-1), int64(-1)
	if a.Call.Collective.Reduces() {
		src = a.Src.PlaceOr(-1)
	}
	if a.Call.Collective.Gathers() {
		dst = a.Dst.PlaceOr(-1)
	}
	for i := range x.links {
		l := &x.links[i]
		_, n := a.Slice(l.peer)
		l.chunks = int(a.Chunks(n))
		switch {
		case !pushes && !fetches:
			l.sent = l.chunks
			x.enter(l, src, dst, kernels.LastSeq(x.epoch))
		case pushes:
			l.sent = min(l.chunks, 1)
			x.push(l)
			x.enter(l, src, dst, kernels.Seq(x.epoch, l.sent))
		default:
			l.sent = min(l.chunks, x.c.Slots)
			x.enter(l, src, dst, kernels.Seq(x.epoch, l.sent))
		}
	}
	_, n := a.Slice(x.me)
	x.mine = int(a.Chunks(n))
	for {
		moved := x.meet()
		if x.met == len(x.links) {
			if x.mismatch != nil {
				return x.mismatch
			}
			if x.reduced < x.mine && x.offered(x.reduced+1) {
				x.reduced++
				x.reduceChunk(x.reduced)
				x.tell(x.reduced)
				moved = true
			}
		}
		left := x.mine - x.reduced
		for i := range x.links {
			l := &x.links[i]
			if x.met == len(x.links) && x.take(l, fetches) {
				moved = true
			}
			if l.sent < min(l.chunks, l.taken+x.c.Slots) {
				l.sent++
				if pushes {
					x.push(l)
				}
				x.e.signal(l.peer, l.myEntry, kernels.Seq(x.epoch, l.sent))
				moved = true
			}
			left += l.chunks - l.taken
		}
		if left == 0 && x.met == len(x.links) {
			return nil
		}
		if err := x.pace(moved); err != nil {
			return err
		}
	}
}

// span is chunk k of a slice of n elements.
func (x *reducing) span(k int, n int64) (lo, hi int64) {
	per := x.a.ChunkElements()
	return int64(k-1) * per, min(int64(k)*per, n)
}

// push copies chunk l.sent of the peer's slice into its staging.
func (x *reducing) push(l *link) {
	if l.sent == 0 {
		return
	}
	_, n := x.a.Slice(l.peer)
	lo, hi := x.span(l.sent, n)
	data := x.input(l.peer, lo, hi)
	x.e.at(puttingData, l.peer)
	copy(x.e.space.Range(l.peer, x.c.Slot(x.me, l.sent), int64(len(data))), data)
}

// offered reports whether all peers have offered chunk k of this rank's slice.
func (x *reducing) offered(k int) bool {
	want := kernels.Seq(x.epoch, k)
	all := true
	for i := range x.links {
		if l := &x.links[i]; l.open < want {
			l.open = l.entry.Load()
			all = all && l.open >= want
		}
	}
	return all
}

// reduceChunk reduces chunk k of this rank's slice and hands the result on.
func (x *reducing) reduceChunk(k int) {
	a, c := x.a, x.c
	_, n := a.Slice(x.me)
	lo, hi := x.span(k, n)
	es := a.Call.DType.Size()
	bytes := (hi - lo) * es
	x.targets = x.targets[:0]
	fetched := false
	for i := range x.links {
		l := &x.links[i]
		switch {
		case !a.Call.Collective.Reduces():
		case l.src >= 0:
			x.rows[l.peer] = x.theirs(l.peer, l.src, lo, hi)
		default:
			x.rows[l.peer] = x.e.space.Range(x.me, c.Slot(l.peer, k), bytes)
		}
		switch {
		case !a.Call.Collective.Gathers():
		case l.dst >= 0:
			x.targets = append(x.targets, x.theirs(l.peer, l.dst, lo, hi))
		default:
			fetched = true
		}
	}
	if fetched {
		x.targets = append(x.targets, x.e.space.Range(x.me, c.Result(k), bytes))
	}
	x.rows[x.me] = x.input(x.me, lo, hi)
	out := x.output(x.me, lo, hi)
	for at := int64(0); at < bytes; {
		to := min(at+foldBytes, bytes)
		x.e.at(takingData, x.me)
		if a.Call.Collective.Reduces() {
			x.fold.rows(out[at:to], x.rows, at, to, a.Call.Op, c.Size)
		} else {
			move(out[at:to], x.rows[x.me][at:to])
		}
		x.e.at(puttingData, x.me)
		for _, t := range x.targets {
			copy(t[at:to], out[at:to])
		}
		at = to
	}
}

// tell says that chunk k of this rank's slice is reduced. A peer that needs no staging waits for the last chunk only.
func (x *reducing) tell(k int) {
	c := x.a.Call.Collective
	for i := range x.links {
		l := &x.links[i]
		if k == x.mine || c.Reduces() && l.src < 0 || c.Gathers() && l.dst < 0 {
			x.e.signal(l.peer, l.myProgress, kernels.Seq(x.epoch, k))
		}
	}
}

// take notes, and fetches, the chunks of a peer's slice that it has reduced.
func (x *reducing) take(l *link, fetch bool) bool {
	moved := false
	if l.taken == l.chunks {
		return false
	}
	for seq := l.progress.Load(); l.taken < l.chunks && seq >= kernels.Seq(x.epoch, l.taken+1); moved = true {
		l.taken++
		if fetch {
			_, n := x.a.Slice(l.peer)
			lo, hi := x.span(l.taken, n)
			to := x.output(l.peer, lo, hi)
			x.e.at(takingData, l.peer)
			copy(to, x.e.space.Range(l.peer, x.c.Result(l.taken), int64(len(to))))
		}
	}
	return moved
}
