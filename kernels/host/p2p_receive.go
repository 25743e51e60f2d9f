package host

import (
	"encoding/binary"
	"slices"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

// from calls f for every partner whose messages a receive may take.
func (x *messaging) from(h *end, f func(p partner)) {
	if !h.any() {
		f(h.with)
		return
	}
	for _, p := range x.f.partners {
		f(p)
	}
}

// enlist puts a receive behind those that wait for the same partners, or before them: into the lists of all but one, where it is already.
func (x *messaging) enlist(h *end, first bool, but partner) {
	if h.any() {
		h.others = slices.Repeat([]look{never}, x.f.c.Size)
	}
	x.from(h, func(p partner) {
		if p != but {
			p.enlist(h, first)
		}
	})
	h.listed = true
}

// delist takes a receive out of the lists of all its partners but one.
func (x *messaging) delist(h *end, but partner) {
	x.from(h, func(p partner) {
		if p != but {
			p.delist(h)
		}
	})
	h.listed = false
}

func (pr *pair) enlist(h *end, first bool) {
	pr.in.Lock()
	defer pr.in.Unlock()
	pr.pending = listed(pr.pending, h, first)
}

// listed is a list with a receive at its end, or before all others.
func listed(list []*end, h *end, first bool) []*end {
	if first {
		return slices.Insert(list, 0, h)
	}
	return append(list, h)
}

func (pr *pair) delist(h *end) {
	pr.in.Lock()
	defer pr.in.Unlock()
	pr.strike(h)
}

// strike is delist where the pair is locked.
func (pr *pair) strike(h *end) {
	if i := slices.Index(pr.pending, h); i >= 0 {
		pr.pending = slices.Delete(pr.pending, i, i+1)
	}
	pr.changed.Add(1)
	pr.e.word(pr.e.space.Rank, pr.f.c.Wanted(pr.place)+wantedCount).Store(uint64(len(pr.pending)))
}

// sight is what h has seen of the messages of the pair's rank.
func (pr *pair) sight(h *end) *look {
	if h.others != nil {
		return &h.others[pr.place]
	}
	return &h.seen
}

// want tells the rank what this one waits for. The pair is locked.
func (pr *pair) want(h *end) {
	at, me := pr.f.c.Wanted(pr.place), pr.e.space.Rank
	if *pr.sight(h) == never {
		pr.e.word(me, at+wantedTag).Store(h.m.Tag)
		pr.e.word(me, at+wantedBytes).Store(uint64(h.m.Buffer.Bytes))
	}
	pr.e.word(me, at+wantedCount).Store(uint64(len(pr.pending)))
}

// receive takes a message to this rank further. It reports whether it has done anything.
func (x *messaging) receive(h *end) (moved bool) {
	if h.with != nil {
		return h.with.receive(x, h)
	}
	n := len(x.f.partners)
	first := int(x.f.next.Load()) // no rank is preferred
	for k := range n {
		at := (first + k) % n
		moved = x.f.partners[at].receive(x, h) || moved
		if h.with != nil || h.stage == ended {
			x.f.next.Store(int32((at + 1) % n))
			return true
		}
	}
	return moved
}

func (pr *pair) receive(x *messaging, h *end) bool {
	if h.stage == inStaging {
		return pr.drain(x, h)
	}
	e := pr.e
	now := look{e.word(e.space.Rank, pr.f.c.Posted(pr.place)).Load(), pr.changed.Load()}
	if now == *pr.sight(h) || !pr.claim(h, now) {
		return false
	}
	if h.stage == unposted { // a message was lost to its sender
		return true
	}
	x.delist(h, pr)
	if h.stage != inBox {
		return true
	}
	e.order(pr.place)
	return pr.read(x, h)
}

// claim looks for the message of h, and claims it or refuses its extent. It reports whether it has found one.
func (pr *pair) claim(h *end, now look) bool {
	e, c, me, peer := pr.e, &pr.f.c, pr.e.space.Rank, pr.place
	pr.in.Lock()
	defer pr.in.Unlock()
	for _, o := range pr.pending {
		if o == h {
			break
		}
		if o.m.Tag == h.m.Tag { // it came first
			pr.want(h)
			*pr.sight(h) = now
			return false
		}
	}
	box, state, held := pr.find(h, now.posted)
	if box < 0 {
		pr.want(h)
		if !held {
			*pr.sight(h) = now
		}
		return false
	}
	at := c.Box(peer, box)
	word, number, to := e.word(me, at+boxState), state>>phaseBits, uint64(claimed)
	if own := extentOf(h.m.Buffer.Bytes, h.m.Buffer.Elements); !extent(e.word(me, at+boxExtent).Load()).fits(own) {
		e.word(me, at+boxExpected).Store(uint64(own))
		to = disagreed
	}
	e.at(postingCredit, peer)
	if !word.CompareAndSwap(state, stateOf(number, to)) {
		return true // its sender has been faster: look again
	}
	if number == pr.gone+1 {
		pr.gone++
	}
	pr.strike(h)
	h.with, h.box, h.number, h.state, h.stage = pr, box, number, word, inBox
	if to == claimed {
		return true
	}
	err := pr.f.disagreement(e, peer, me, box, number)
	e.word(peer, c.Complaints(me)).Add(1)
	e.ring(peer)
	return h.finish(err)
}

// find is the box with the least number that has the tag of h, -1 if there is none. held says that its sender is about to offer it again. The
// pair is locked.
func (pr *pair) find(h *end, last uint64) (box int, state uint64, isHeld bool) {
	e, c, me, peer := pr.e, &pr.f.c, pr.e.space.Rank, pr.place
	if last == pr.gone {
		return -1, 0, false
	}
	// Most often the next message is the one, where its sender looks for room first.
	box = int(pr.gone % uint64(c.Boxes))
	at := c.Box(peer, box)
	if state = e.word(me, at+boxState).Load(); state == stateOf(pr.gone+1, offered) && e.word(me, at+boxTag).Load() == h.m.Tag {
		return box, state, false
	}
	box = -1
	least := last + 1 // of the messages that are there, of any tag
	for k := range c.Boxes {
		at := c.Box(peer, k)
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
func (pr *pair) read(x *messaging, h *end) bool {
	e, c, me, peer := pr.e, &pr.f.c, pr.e.space.Rank, pr.place
	at, dst := c.Box(peer, h.box), h.m.Buffer.Mem
	source := e.word(me, at+boxSource).Load()
	e.at(takingData, peer)
	switch {
	case source == 0:
		copy(dst, e.space.Range(me, c.Payload(peer, h.box), int64(len(dst))))
	case source&inSegment != 0:
		x.w.copy(dst, e.space.Range(peer, int64(source&^inSegment), int64(len(dst))), int64(len(dst)) >= e.cacheBytes)
	case !pr.pull(x, h, uintptr(source)):
		e.at(signalling, peer)
		if !h.state.CompareAndSwap(stateOf(h.number, claimed), stateOf(h.number, wantsStaging)) {
			return x.again(h)
		}
		h.stage = inStaging
		e.ring(peer)
		return true
	}
	e.order(peer)
	return pr.take(x, h, claimed)
}

// pull reads a message in its sender's memory. It fails where that cannot be read.
func (pr *pair) pull(x *messaging, h *end, source uintptr) bool {
	e, dst := pr.e, h.m.Buffer.Mem
	if !pr.readable {
		return false
	}
	if e.bells != nil {
		x.w.copy(dst, shm.At(source, int64(len(dst))), int64(len(dst)) >= e.cacheBytes)
		return true
	}
	for at := int64(0); at < int64(len(dst)); at += e.pullBytes {
		part := dst[at:min(at+e.pullBytes, int64(len(dst)))]
		if pr.memory.Read(part, source+uintptr(at)) != nil {
			return false
		}
		x.w.moved(int64(len(part)))
	}
	return true
}

// take ends a message that has been copied, if its sender has not withdrawn it meanwhile.
func (pr *pair) take(x *messaging, h *end, from uint64) bool {
	pr.e.at(signalling, pr.place)
	if !h.state.CompareAndSwap(stateOf(h.number, from), stateOf(h.number, taken)) {
		return x.again(h)
	}
	pr.e.ring(pr.place)
	return x.took(h)
}

// took ends a receive that has its message.
func (x *messaging) took(h *end) bool {
	if h.m.From != nil {
		*h.m.From = h.rank()
	}
	if h.m.Source.Bytes > 0 {
		binary.NativeEndian.PutUint64(h.m.Source.Mem, uint64(h.rank()))
	}
	return h.finish(nil)
}

// again has h wait for another message, before the receives that came later.
func (x *messaging) again(h *end) bool {
	x.lose(h)
	x.enlist(h, true, nil)
	return true
}

// lose has h forget the message that it had claimed.
func (x *messaging) lose(h *end) {
	h.in, h.stage, h.moved, h.chunk, h.turn, h.seen = nil, unposted, 0, 0, 0, never
	h.with = x.f.partner(h.m.Peer)
}

// drain copies chunks out of staging.
func (pr *pair) drain(x *messaging, h *end) (moved bool) {
	e, c, me, peer := pr.e, &pr.f.c, pr.e.space.Rank, pr.place
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
		return pr.take(x, h, wantsStaging)
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
	if h.with != nil {
		h.with.giveBack(x, h)
	}
	if h.listed {
		x.delist(h, nil)
	}
	h.finish(why)
}

func (pr *pair) giveBack(_ *messaging, h *end) {
	if h.stage == inStaging {
		h.state.CompareAndSwap(stateOf(h.number, wantsStaging), stateOf(h.number, withdrawn))
		pr.e.ring(pr.place)
	}
}
