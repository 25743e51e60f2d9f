package host

import (
	"fmt"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/kernels"
)

// posts reads the messages that the other rank has posted. f is locked.
func (f *farPair) posts() {
	for n := f.count(postsWord); f.seen < n; f.seen++ {
		for k := range f.a.c.Boxes { // most often it is the first
			box := (k + int(f.seen%uint64(f.a.c.Boxes))) % f.a.c.Boxes
			at := f.here + f.a.boxesAt() + int64(box)*f.a.boxBytes()
			if f.number(at, 0) == f.seen+1 {
				sent := extent(f.number(at, 2))
				f.arrived = append(f.arrived, &incoming{number: f.seen + 1, tag: f.number(at, 1), bytes: sent.bytes(), extent: sent, box: box, until: ^uint64(0)})
				f.back = nil
				f.steps++
				break
			}
		}
	}
}

// withdrawals reads which messages the other rank has taken back. f is locked.
func (f *farPair) withdrawals() error {
	for f.withdrawn < f.count(withdrawnWord) {
		at := f.here + f.a.withdrawnAt() + int64(f.withdrawn%uint64(f.a.c.Boxes))*farRecord
		number, chunks := f.number(at, 0), f.number(at, 1)
		if number > f.seen { // it lands later
			return nil
		}
		f.withdrawn++
		f.steps++
		same := func(m *incoming) bool { return m.number == number }
		if i := slices.IndexFunc(f.arrived, same); i >= 0 {
			f.back = f.arrived[i]
			f.arrived = slices.Delete(f.arrived, i, i+1)
			if err := f.answer(number, withdrawn, 0); err != nil {
				return err
			}
		}
		i := slices.IndexFunc(f.queue, same)
		switch {
		case i == 0 && f.granted:
			f.queue[0].until = chunks
		case i >= 0:
			f.queue[i].phase = withdrawn
			f.queue = slices.Delete(f.queue, i, i+1)
			if err := f.answer(number, withdrawn, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// answer tells the other rank what becomes of a message: claimed that this rank wants it, wantsStaging that it does not any longer, or its end.
// f is locked.
func (f *farPair) answer(number, phase, expected uint64) error {
	k := f.puts[repliedWord] % uint64(len(f.told))
	return f.put(f.there+f.a.answersAt()+int64(k)*farRecord, record(f.told[k], number, phase, expected), repliedWord)
}

// grant has the first of the claimed messages come. f is locked.
func (f *farPair) grant() error {
	if f.granted || len(f.queue) == 0 {
		return nil
	}
	f.granted = true
	f.steps++
	return f.answer(f.queue[0].number, claimed, 0)
}

// drain copies chunks out of the ring, or drops those that nobody wants any longer. f is locked.
func (f *farPair) drain() error {
	for f.granted {
		m, landed := f.queue[0], f.count(pieceWord)
		all := min(f.a.all(m.bytes), m.until)
		for ; f.taken < landed && m.chunks < all; f.steps++ {
			n := min(f.a.c.StagingBytes, m.bytes-m.done)
			if m.dst != nil {
				at := f.a.slot(f.a.me.host, f.rank, f.taken%farSlots)
				copy(m.dst[m.done:m.done+n], f.e.space.Range(f.e.space.Rank, at, n))
			}
			m.done += n
			m.chunks++
			f.bytes += n
			if f.taken++; f.taken%(farSlots/2) == 0 {
				if err := f.put(0, nil, creditsWord); err != nil {
					return err
				}
			}
		}
		if m.chunks < all {
			return nil
		}
		m.phase = withdrawn
		if m.done == m.bytes && m.dst != nil {
			m.phase = taken
		}
		f.queue, f.granted = slices.Delete(f.queue, 0, 1), false
		f.steps++
		if err := f.answer(m.number, m.phase, 0); err != nil {
			return err
		}
		if err := f.grant(); err != nil {
			return err
		}
	}
	return nil
}

func (f *farPair) receive(x *messaging, h *end) bool {
	f.mu.Lock()
	moved, err := f.progressFor(x)
	if err == nil {
		var did bool
		did, err = f.receiveOn(x, h)
		moved = moved || did
	}
	f.mu.Unlock()
	switch {
	case err != nil:
		x.forget(h, x.w.fail(f, err))
		return true
	case h.stage == unposted && !h.listed:
		x.enlist(h, true, f)
	case h.stage != unposted && h.listed:
		x.delist(h, f)
	}
	return moved
}

// receiveOn is receive where the pair is locked.
func (f *farPair) receiveOn(x *messaging, h *end) (moved bool, err error) {
	if h.in == nil {
		return f.claim(x, h)
	}
	switch h.in.phase {
	case taken:
		return x.took(h), nil
	case withdrawn: // its sender has given up
		x.lose(h)
		f.pending = listed(f.pending, h, true)
		return true, nil
	}
	return false, nil
}

func (f *farPair) enlist(h *end, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending = listed(f.pending, h, first)
}

func (f *farPair) delist(h *end) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.strike(h)
}

// strike is delist where the pair is locked.
func (f *farPair) strike(h *end) {
	f.pending = slices.DeleteFunc(f.pending, func(o *end) bool { return o == h })
}

// claim looks for the message of h, and claims it or refuses its extent. It reports whether it has found one. The pair is locked.
func (f *farPair) claim(x *messaging, h *end) (found bool, err error) {
	for _, o := range f.pending {
		if o == h {
			break
		}
		if o.m.Tag == h.m.Tag { // it came first
			return false, nil
		}
	}
	i := slices.IndexFunc(f.arrived, func(m *incoming) bool { return m.tag == h.m.Tag })
	if i < 0 {
		return false, f.want(x, h)
	}
	m, dst, own := f.arrived[i], h.m.Buffer.Mem, extentOf(h.m.Buffer.Bytes, h.m.Buffer.Elements)
	f.arrived = slices.Delete(f.arrived, i, i+1)
	f.strike(h)
	h.with = f
	f.steps++
	switch {
	case !m.extent.fits(own):
		if err := f.answer(m.number, disagreed, uint64(own)); err != nil {
			return false, err
		}
		return h.finish(m.extent.mismatch(f.rank, f.a.hosts.Rank, m.number, m.tag, own)), nil
	case m.bytes <= f.a.c.EagerBytes:
		copy(dst, f.e.space.Range(f.e.space.Rank, f.here+f.a.boxesAt()+int64(m.box)*f.a.boxBytes()+kernels.LineBytes, m.bytes))
		x.w.moved(m.bytes)
		if err := f.answer(m.number, taken, 0); err != nil {
			return false, err
		}
		return x.took(h), nil
	}
	m.h, m.dst = h, dst
	h.in, h.stage = m, inBox
	f.queue = append(f.queue, m)
	return true, f.grant()
}

// wantAfter is how long a receive waits before it tells the other rank what it waits for. That is for the error of a send with another tag.
const wantAfter = 50 * time.Millisecond

// want tells the other rank once. The pair is locked.
func (f *farPair) want(x *messaging, h *end) error {
	if h.wanted || time.Since(x.w.from) < wantAfter || h.any() {
		return nil
	}
	h.wanted = true
	return f.put(f.there+f.a.wantsAt(), record(make([]byte, farRecord), h.m.Tag, uint64(h.m.Buffer.Bytes)), wantsWord)
}

func (f *farPair) giveBack(_ *messaging, h *end) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := h.in; m != nil && m.phase == 0 {
		m.h, m.dst, h.in = nil, nil, nil
		switch i := slices.Index(f.queue, m); {
		case i == 0 && f.granted:
			_ = f.answer(m.number, wantsStaging, 0) // else nothing reaches that rank any more
		case i >= 0: // another receive may have it
			f.queue = slices.Delete(f.queue, i, i+1)
			at, _ := slices.BinarySearchFunc(f.arrived, m.number, func(m *incoming, n uint64) int { return int(m.number) - int(n) })
			f.arrived = slices.Insert(f.arrived, at, m)
		}
	}
}

func (f *farPair) unreceived() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unclaimed()
}

func (f *farPair) wanting() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.wants()
}

// wants says which message of this rank the other one waits for, as far as it has told.
func (f *farPair) wants() string {
	if f.count(wantsWord) == 0 {
		return fmt.Sprintf("rank %d waits for no message of this rank", f.rank)
	}
	at := f.here + f.a.wantsAt()
	return fmt.Sprintf("rank %d waits for tag %d, %d bytes, or did last", f.rank, f.number(at, 0), f.number(at, 1))
}
