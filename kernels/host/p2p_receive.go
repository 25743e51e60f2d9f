package host

import (
	"slices"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// each calls f for every peer whose messages a receive may take.
func (x *messaging) each(h *end, f func(p int, pr *pair)) {
	for p := range x.f.pairs {
		if p == h.want || h.m.Peer == kernels.AnyRank && p != x.e.space.Rank {
			f(p, &x.f.pairs[p])
		}
	}
}

// eachFar calls f for every rank of other hosts whose messages a receive may take, locked.
func (x *messaging) eachFar(h *end, f func(p *farPair)) {
	if x.f.across == nil {
		return
	}
	for _, p := range x.f.across.pairs {
		if h.m.Peer == kernels.AnyRank || p == h.far {
			p.mu.Lock()
			f(p)
			p.mu.Unlock()
		}
	}
}

// enlist puts a receive behind those that wait for the same peers, or before them.
func (x *messaging) enlist(h *end, first bool) {
	if h.m.Peer == kernels.AnyRank {
		h.others, h.listed = slices.Repeat([]look{never}, x.f.c.Size), true
	}
	x.eachFar(h, func(f *farPair) {
		at := 0
		if !first {
			at = len(f.pending)
		}
		f.pending = slices.Insert(f.pending, at, h)
	})
	x.each(h, func(_ int, pr *pair) {
		at := 0
		pr.in.Lock()
		if !first {
			at = len(pr.pending)
		}
		pr.pending = slices.Insert(pr.pending, at, h)
		pr.in.Unlock()
	})
}

// sight is what h has seen of the messages of the peer that it looks at.
func (h *end) sight() *look {
	if h.others != nil {
		return &h.others[h.peer]
	}
	return &h.seen
}

// want tells the peer what this rank waits for. The pair is locked.
func (x *messaging) want(h *end) {
	pr, at, me := &x.f.pairs[h.peer], x.f.c.Wanted(h.peer), x.e.space.Rank
	if *h.sight() == never {
		x.e.word(me, at+wantedTag).Store(h.m.Tag)
		x.e.word(me, at+wantedBytes).Store(uint64(h.m.Buffer.Bytes))
	}
	x.e.word(me, at+wantedCount).Store(uint64(len(pr.pending)))
}

// delist takes a receive out again, of those that wait for p. The pair is locked.
func (x *messaging) delist(h *end, p int) {
	pr := &x.f.pairs[p]
	if i := slices.Index(pr.pending, h); i >= 0 {
		pr.pending = slices.Delete(pr.pending, i, i+1)
	}
	pr.changed.Add(1)
	x.e.word(x.e.space.Rank, x.f.c.Wanted(p)+wantedCount).Store(uint64(len(pr.pending)))
}

// delistAll takes a receive out of the lists of all its peers but one.
func (x *messaging) delistAll(h *end, but int) {
	x.each(h, func(p int, pr *pair) {
		if p != but {
			pr.in.Lock()
			x.delist(h, p)
			pr.in.Unlock()
		}
	})
	x.eachFar(h, func(f *farPair) {
		f.pending = slices.DeleteFunc(f.pending, func(o *end) bool { return o == h })
	})
	h.listed = false
}

// receive takes a message to this rank further. It reports whether it has done anything.
func (x *messaging) receive(h *end) bool {
	switch {
	case h.far != nil:
		return x.receiveFar(h, h.far)
	case h.stage == inStaging:
		return x.drain(h)
	case h.m.Peer != kernels.AnyRank:
		return x.look(h)
	}
	me, n := x.e.space.Rank, x.f.c.Size
	since := int(x.f.took.Load()) // no rank is preferred
	for k := range n {
		if h.peer = (since + 1 + k) % n; h.peer != me && x.look(h) {
			if h.stage == unposted { // a message was lost to its sender
				h.peer = kernels.AnyRank
			} else {
				h.rank = x.e.space.Name(h.peer)
			}
			return true
		}
	}
	h.peer = kernels.AnyRank
	if a := x.f.across; a != nil {
		for _, f := range a.pairs {
			if x.receiveFar(h, f) && (h.stage != unposted || h.far != nil) {
				return true
			}
		}
	}
	return false
}

// look is receive with the peer of h.
func (x *messaging) look(h *end) bool {
	e, c, pr := x.e, &x.f.c, &x.f.pairs[h.peer]
	now := look{e.word(e.space.Rank, c.Posted(h.peer)).Load(), pr.changed.Load()}
	if now == *h.sight() {
		return false
	}
	if !x.claim(h, now) {
		return false
	}
	if h.m.Peer == kernels.AnyRank && h.stage != unposted {
		x.f.took.Store(int32(h.peer))
		x.delistAll(h, h.peer)
	}
	if h.stage != inBox {
		return true
	}
	e.order(h.peer)
	return x.read(h)
}

// claim looks for the message of h, and claims it or refuses its extent. It reports whether it has found one.
func (x *messaging) claim(h *end, now look) bool {
	e, c, me, pr := x.e, &x.f.c, x.e.space.Rank, &x.f.pairs[h.peer]
	pr.in.Lock()
	defer pr.in.Unlock()
	for _, o := range pr.pending {
		if o == h {
			break
		}
		if o.m.Tag == h.m.Tag { // it came first
			x.want(h)
			*h.sight() = now
			return false
		}
	}
	box, state, held := x.find(h, now.posted)
	if box < 0 {
		x.want(h)
		if !held {
			*h.sight() = now
		}
		return false
	}
	at := c.Box(h.peer, box)
	word, number, to := e.word(me, at+boxState), state>>phaseBits, uint64(claimed)
	if own := extentOf(&h.m.Buffer); !extent(e.word(me, at+boxExtent).Load()).fits(own) {
		e.word(me, at+boxExpected).Store(uint64(own))
		to = disagreed
	}
	e.at(postingCredit, h.peer)
	if !word.CompareAndSwap(state, stateOf(number, to)) {
		return true // its sender has been faster: look again
	}
	if number == pr.gone+1 {
		pr.gone++
	}
	x.delist(h, h.peer)
	h.box, h.number, h.state, h.stage = box, number, word, inBox
	if to == claimed {
		return true
	}
	err := x.f.disagreement(e, h.peer, me, box, number)
	e.word(h.peer, c.Complaints(me)).Add(1)
	e.ring(h.peer)
	return h.finish(err)
}

// find is the box with the least number that has the tag of h, -1 if there is none. held says that its sender is about to offer it again. The
// pair is locked.
func (x *messaging) find(h *end, last uint64) (box int, state uint64, isHeld bool) {
	e, c, me, pr := x.e, &x.f.c, x.e.space.Rank, &x.f.pairs[h.peer]
	if last == pr.gone {
		return -1, 0, false
	}
	// Most often the next message is the one, where its sender looks for room first.
	box = int(pr.gone % uint64(c.Boxes))
	at := c.Box(h.peer, box)
	if state = e.word(me, at+boxState).Load(); state == stateOf(pr.gone+1, offered) && e.word(me, at+boxTag).Load() == h.m.Tag {
		return box, state, false
	}
	box = -1
	least := last + 1 // of the messages that are there, of any tag
	for k := range c.Boxes {
		at := c.Box(h.peer, k)
		s := e.word(me, at+boxState).Load()
		if phase := s & phaseMask; phase < offered || phase > offeredAgain {
			continue
		}
		number := s >> phaseBits
		least = min(least, number)
		// A message behind the last one may have come after this look has passed the box of one before it.
		if number <= last && e.word(me, at+boxTag).Load() == h.m.Tag && (box < 0 || number < state>>phaseBits) {
			box, state = k, s
		}
	}
	pr.gone = max(pr.gone, least-1)
	if box >= 0 && state&phaseMask == held {
		return -1, 0, true
	}
	return box, state, false
}

// read copies a message that h has claimed.
func (x *messaging) read(h *end) bool {
	e, c, me, peer := x.e, &x.f.c, x.e.space.Rank, h.peer
	at, dst := c.Box(peer, h.box), h.m.Buffer.Mem
	source := e.word(me, at+boxSource).Load()
	e.at(takingData, peer)
	switch {
	case source == 0:
		copy(dst, e.space.Range(me, c.Payload(peer, h.box), int64(len(dst))))
	case source&inSegment != 0:
		x.w.copy(dst, e.space.Range(peer, int64(source&^inSegment), int64(len(dst))), int64(len(dst)) >= e.cacheBytes)
	case !x.pull(h, uintptr(source)):
		e.at(signalling, peer)
		if !h.state.CompareAndSwap(stateOf(h.number, claimed), stateOf(h.number, wantsStaging)) {
			return x.again(h)
		}
		h.stage = inStaging
		e.ring(peer)
		return true
	}
	e.order(peer)
	return x.take(h, claimed)
}

// pull reads a message in its sender's memory. It fails where that cannot be read.
func (x *messaging) pull(h *end, source uintptr) bool {
	pr, dst := &x.f.pairs[h.peer], h.m.Buffer.Mem
	if !pr.readable {
		return false
	}
	if x.e.bells != nil {
		x.w.copy(dst, shm.At(source, int64(len(dst))), int64(len(dst)) >= x.e.cacheBytes)
		return true
	}
	for at := int64(0); at < int64(len(dst)); at += x.e.pullBytes {
		part := dst[at:min(at+x.e.pullBytes, int64(len(dst)))]
		if pr.memory.Read(part, source+uintptr(at)) != nil {
			return false
		}
		x.w.moved(int64(len(part)))
	}
	return true
}

// take ends a message that has been copied, if its sender has not withdrawn it meanwhile.
func (x *messaging) take(h *end, from uint64) bool {
	x.e.at(signalling, h.peer)
	if !h.state.CompareAndSwap(stateOf(h.number, from), stateOf(h.number, taken)) {
		return x.again(h)
	}
	x.e.ring(h.peer)
	if h.m.From != nil {
		*h.m.From = x.e.space.Name(h.peer)
	}
	return h.finish(nil)
}

// again has h wait for another message, before the receives that came later.
func (x *messaging) again(h *end) bool {
	h.stage, h.moved, h.chunk, h.turn, h.seen = unposted, 0, 0, 0, never
	h.peer, h.rank = h.want, h.m.Peer
	x.enlist(h, true)
	return true
}

// drain copies chunks out of staging.
func (x *messaging) drain(h *end) (moved bool) {
	e, c, me, peer := x.e, &x.f.c, x.e.space.Rank, h.peer
	line := c.Staging(peer)
	if h.state.Load() != stateOf(h.number, wantsStaging) {
		return x.again(h)
	}
	if e.word(me, line+stagingOwner).Load() != h.number {
		return false
	}
	filled := e.word(me, line+stagingFilled).Load()
	if h.turn == 0 {
		h.turn = filled >> chunkBits
	}
	for dst := h.m.Buffer.Mem; h.moved < int64(len(dst)) && filled > h.turn<<chunkBits|h.chunk; moved = true {
		n := min(c.StagingBytes, int64(len(dst))-h.moved)
		e.at(takingData, peer)
		x.w.copy(dst[h.moved:h.moved+n], e.space.Range(me, c.Buffer(peer, h.chunk), n), false)
		h.moved += n
		h.chunk++
		e.at(signalling, peer)
		raise(e.word(me, line+stagingDrained), h.turn<<chunkBits|h.chunk)
		e.ring(peer)
	}
	if h.moved == int64(len(h.m.Buffer.Mem)) {
		return x.take(h, wantsStaging)
	}
	return moved
}

// raise stores v in a word that has less. A receive that has lost its message meanwhile may come late.
func raise(word *atomic.Uint64, v uint64) {
	for {
		had := word.Load()
		if had >= v || word.CompareAndSwap(had, v) {
			return
		}
	}
}

// forget ends a receive that this rank does not wait for any longer.
func (x *messaging) forget(h *end, why error) {
	if h.far != nil {
		x.forgetFar(h, why)
		return
	}
	if h.stage == inStaging {
		h.state.CompareAndSwap(stateOf(h.number, wantsStaging), stateOf(h.number, withdrawn))
		x.e.ring(h.peer)
	}
	x.delistAll(h, kernels.AnyRank)
	h.finish(why)
}
