package host

import (
	"fmt"
	"runtime"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// A sender waits for its receiver for as long as a copy takes, at least leastPatience, before it copies a message aside.
const (
	leastPatience = time.Millisecond
	copySpeed     = 4 // bytes a nanosecond
)

func (pr *pair) send(x *messaging, i int) bool {
	h := &x.ends[i]
	switch h.stage {
	case unposted:
		return !x.overtakes(i) && pr.post(h)
	case inStaging:
		return pr.fill(x, h)
	}
	switch state := h.state.Load(); state & phaseMask {
	case wantsStaging:
		return pr.fill(x, h)
	case offered:
		return pr.park(x, h, state)
	case withdrawn, taken, disagreed:
		return pr.ended(x, h, state)
	}
	return false
}

// overtakes reports whether a message would overtake one to the same rank that found no box.
func (x *messaging) overtakes(i int) bool {
	for j := range x.ends[:i] {
		if o := &x.ends[j]; !o.m.Receive && o.with == x.ends[i].with && o.stage == unposted {
			return true
		}
	}
	return false
}

// post puts a message into a free box.
func (pr *pair) post(h *end) bool {
	e, f, c := pr.e, pr.f, &pr.f.c
	me, peer := e.space.Rank, pr.place
	pr.out.Lock()
	defer pr.out.Unlock()
	if err := pr.complaint(); err != nil {
		return h.finish(err)
	}
	box := -1
	for k := range pr.boxes {
		k = (k + int(pr.posted%uint64(c.Boxes))) % c.Boxes
		if o := &pr.boxes[k]; o.free(e.word(peer, c.Box(me, k)+boxState).Load()) {
			box = k
			break
		}
	}
	if box < 0 {
		return false
	}
	o, at, n := &pr.boxes[box], c.Box(me, box), h.m.Buffer.Bytes
	f.forget(o)
	pr.posted++
	h.box, h.number, h.state = box, pr.posted, e.word(peer, at+boxState)
	o.number, o.told, o.owned = pr.posted, false, n > c.EagerBytes
	source := uint64(0)
	e.at(puttingData, peer)
	if n <= c.EagerBytes {
		copy(e.space.Range(peer, c.Payload(me, box), n), h.m.Buffer.Mem)
	} else if source = uint64(shm.Addr(h.m.Buffer.Mem)); h.m.Buffer.Reach {
		source = inSegment | uint64(h.m.Buffer.Place)
	}
	e.word(peer, at+boxTag).Store(h.m.Tag)
	e.word(peer, at+boxExtent).Store(uint64(extentOf(h.m.Buffer.Bytes, h.m.Buffer.Elements)))
	e.word(peer, at+boxSource).Store(source)
	e.order(me)
	e.at(signalling, peer)
	h.state.Store(stateOf(h.number, offered))
	e.word(peer, c.Posted(me)).Store(h.number)
	e.ring(peer)
	if o.owned {
		h.stage = inBox
		return true
	}
	return h.finish(nil)
}

// free reports whether a box in this state can have another message. The pair is locked.
func (o *outgoing) free(state uint64) bool {
	phase := state & phaseMask
	return o.number == 0 || !o.owned && phase >= withdrawn && (phase != disagreed || o.told)
}

// forget lets go of what was copied aside for the last message of a box. The pair is locked.
func (f *transfers) forget(o *outgoing) {
	f.parked.Add(-int64(len(o.aside)))
	o.aside = nil
}

// clear lets go of all that was copied aside for the rank, which will not look for it any more.
func (pr *pair) clear() {
	pr.out.Lock()
	defer pr.out.Unlock()
	for k := range pr.boxes {
		pr.f.forget(&pr.boxes[k])
	}
}

// reap lets go of all copies whose messages have ended.
func (f *transfers) reap(e *Engine) {
	for p := range f.pairs {
		pr := &f.pairs[p]
		pr.out.Lock()
		for k := range pr.boxes {
			if o := &pr.boxes[k]; o.aside != nil && e.word(p, f.c.Box(e.space.Rank, k)+boxState).Load()&phaseMask >= withdrawn {
				f.forget(o)
			}
		}
		pr.out.Unlock()
	}
}

// complaint is a disagreement on a message whose sender was done with it. Each is told once. The pair is locked.
func (pr *pair) complaint() error {
	e, f, peer, me := pr.e, pr.f, pr.place, pr.e.space.Rank
	if e.word(me, f.c.Complaints(peer)).Load() == pr.complain {
		return nil
	}
	for k := range pr.boxes {
		o, at := &pr.boxes[k], f.c.Box(me, k)
		if o.owned || o.told || e.word(peer, at+boxState).Load() != stateOf(o.number, disagreed) {
			continue
		}
		o.told = true
		pr.complain++
		return f.disagreement(e, me, peer, k, o.number)
	}
	return nil
}

// disagreement is the error of a message of which the ranks have different extents.
func (f *transfers) disagreement(e *Engine, src, dst, box int, number uint64) error {
	at := f.c.Box(src, box)
	sent, expected := extent(e.word(dst, at+boxExtent).Load()), extent(e.word(dst, at+boxExpected).Load())
	return sent.mismatch(e.space.Name(src), e.space.Name(dst), number, e.word(dst, at+boxTag).Load(), expected)
}

// ended takes note of the end of a message that this rank has waited for.
func (pr *pair) ended(x *messaging, h *end, state uint64) bool {
	var err error
	switch state & phaseMask {
	case disagreed:
		err = pr.f.disagreement(pr.e, pr.e.space.Rank, pr.place, h.box, h.number)
	case withdrawn:
		err = &comm.PeerError{Rank: pr.rank, Op: x.a.Operation(), Err: fmt.Errorf("%w: it has given up (%s)", comm.ErrTimeout, h)}
	}
	pr.out.Lock()
	pr.boxes[h.box].owned, pr.boxes[h.box].told = false, true
	if state&phaseMask == disagreed {
		pr.complain++
	}
	if pr.staging == h {
		pr.staging = nil
	}
	pr.out.Unlock()
	return h.finish(err)
}

// park copies a message aside when its receiver is late, if that could read it there: then its sender is done.
func (pr *pair) park(x *messaging, h *end, state uint64) bool {
	e, f, n := pr.e, pr.f, h.m.Buffer.Bytes
	if x.since.IsZero() {
		x.since = time.Now()
		return false
	}
	if f.patience > 0 && (x.w.polls%spinsPerLook != 0 && !x.w.entered || time.Since(x.since) < max(f.patience, time.Duration(n/copySpeed))) ||
		e.word(pr.place, f.c.Wanted(e.space.Rank)+wantedReads).Load() == 0 {
		return false
	}
	f.reap(e)
	if f.parked.Add(n) > f.c.ParkBytes || !h.state.CompareAndSwap(state, stateOf(h.number, held)) {
		f.parked.Add(-n)
		return false
	}
	aside := make([]byte, n)
	x.w.copy(aside, h.m.Buffer.Mem, false)
	e.word(pr.place, f.c.Box(e.space.Rank, h.box)+boxSource).Store(uint64(shm.Addr(aside)))
	e.order(e.space.Rank)
	pr.out.Lock()
	pr.boxes[h.box].aside, pr.boxes[h.box].owned = aside, false
	pr.out.Unlock()
	e.at(signalling, pr.place)
	h.state.Store(stateOf(h.number, offeredAgain))
	e.ring(pr.place)
	return h.finish(nil)
}

// fill copies chunks to staging, while it is this message's turn.
func (pr *pair) fill(x *messaging, h *end) (moved bool) {
	e, c := pr.e, &pr.f.c
	me, peer := e.space.Rank, pr.place
	line := c.Staging(me)
	owner, filled, drained := e.word(peer, line+stagingOwner), e.word(peer, line+stagingFilled), e.word(peer, line+stagingDrained)
	if h.stage == inBox {
		pr.out.Lock()
		free := pr.staging == nil
		if free {
			pr.staging = h
			pr.turns++
			h.turn = pr.turns
		}
		pr.out.Unlock()
		if !free {
			return false
		}
		h.stage = inStaging
		filled.Store(h.turn << chunkBits)
		owner.Store(h.number)
		moved = true
	}
	for h.moved < h.m.Buffer.Bytes {
		if h.chunk >= 2 && drained.Load() < h.turn<<chunkBits|(h.chunk-1) {
			break
		}
		n := min(c.StagingBytes, h.m.Buffer.Bytes-h.moved)
		x.w.copy(e.space.Range(peer, c.Buffer(me, h.chunk), n), h.m.Buffer.Mem[h.moved:h.moved+n], false)
		h.moved += n
		h.chunk++
		e.at(signalling, peer)
		filled.Store(h.turn<<chunkBits | h.chunk)
		e.ring(peer)
		moved = true
	}
	if state := h.state.Load(); state&phaseMask >= withdrawn {
		return pr.ended(x, h, state)
	}
	return moved
}

// withdraw takes a message back. Its user has the source again when it returns: in one process, where reading what its owner has freed could
// be fatal, it waits for a receiver that is in the middle of a copy.
func (pr *pair) withdraw(x *messaging, h *end, why error) {
	if h.stage == unposted {
		h.finish(why)
		return
	}
	for {
		state := h.state.Load()
		switch phase := state & phaseMask; {
		case phase >= withdrawn:
			pr.ended(x, h, state)
			return
		case phase == claimed && pr.e.bells != nil:
			if pr.e.pause(pr.place) != nil {
				runtime.Gosched()
			}
			continue
		}
		pr.e.at(withdrawing, pr.place)
		if h.state.CompareAndSwap(state, stateOf(h.number, withdrawn)) {
			pr.ended(x, h, stateOf(h.number, withdrawn))
			h.err = why
			return
		}
	}
}
