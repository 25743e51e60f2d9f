package host

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/kernels"
)

// record writes 64-bit numbers into the beginning of b.
func record(b []byte, numbers ...uint64) []byte {
	for i, n := range numbers {
		binary.LittleEndian.PutUint64(b[8*i:], n)
	}
	return b[:8*len(numbers)]
}

// number is the i-th of a record that has landed at a place of this rank.
func (f *farPair) number(at int64, i int) uint64 {
	return f.e.word(f.e.space.Rank, at+int64(8*i)).Load()
}

func (f *farPair) failing() *failedWait { return &f.failed }

func (f *farPair) alone() rails.Rail {
	if f.a.active.Load() > 1 { // another launch may do what one waits for
		return nil
	}
	return f.rail
}

func (f *farPair) where(x *messaging) string {
	return fmt.Sprintf(" after %v: on host %d", x.a.Timeout, f.host)
}

func (f *farPair) send(x *messaging, i int) bool {
	h := &x.ends[i]
	f.mu.Lock()
	moved, err := f.progressFor(x)
	if err == nil {
		var did bool
		did, err = f.sendOn(x, i)
		moved = moved || did
	}
	f.mu.Unlock()
	if err != nil {
		f.withdraw(x, h, x.w.fail(f, err))
	}
	return moved || err != nil
}

// sendOn is send where the pair is locked.
func (f *farPair) sendOn(x *messaging, i int) (moved bool, err error) {
	h := &x.ends[i]
	o := h.out
	switch {
	case o == nil && x.overtakes(i):
	case o == nil:
		return f.post(x, h)
	case o.over:
		o.awaited, o.told = false, true
		return h.finish(f.ended(x, h)), nil
	case o.pushed == o.bytes || o.back:
		o.awaited, o.src, o.told = false, nil, o.back
		return h.finish(f.ended(x, h)), nil
	case !o.granted:
		return f.park(x, h), nil
	}
	return false, nil
}

// progressFor is progress on behalf of a launch. f is locked.
func (f *farPair) progressFor(x *messaging) (moved bool, err error) {
	moved, err = f.progress()
	if moved {
		x.w.moved(f.bytes)
		f.bytes = 0
		if f.a.active.Load() > 1 {
			x.e.ring(x.e.space.Rank)
		}
	}
	return moved, err
}

// ended is the error of a message whose receiver has said how it ended.
func (f *farPair) ended(x *messaging, h *end) error {
	switch o := h.out; {
	case o.phase == disagreed:
		return f.mismatch(o)
	case o.back || o.phase == withdrawn:
		return &comm.PeerError{Rank: f.rank, Op: x.a.Operation(), Err: fmt.Errorf("%w: on host %d: it has given up (%s)", comm.ErrTimeout, f.host, h)}
	}
	return nil
}

func (f *farPair) mismatch(o *sending) error {
	return o.extent.mismatch(f.a.hosts.Rank, f.rank, o.number, o.tag, o.expected)
}

// post puts a message into a free box. The pair is locked.
func (f *farPair) post(x *messaging, h *end) (bool, error) {
	a, box := f.a, -1
	for k := range f.boxes {
		switch o := f.boxes[k]; {
		case o == nil:
		case !o.over || o.awaited:
			continue
		case o.phase == disagreed && !o.told:
			o.told = true
			return h.finish(f.mismatch(o)), nil
		}
		if first := int(f.puts[postsWord] % uint64(a.c.Boxes)); box < 0 || k == first {
			box = k
		}
	}
	if box < 0 {
		return false, nil
	}
	n := h.m.Buffer.Bytes
	if f.records[box] == nil {
		f.records[box] = make([]byte, a.boxBytes())
	}
	o := &sending{number: f.puts[postsWord] + 1, tag: h.m.Tag, bytes: n, extent: extentOf(h.m.Buffer.Bytes, h.m.Buffer.Elements)}
	bytes := record(f.records[box], o.number, o.tag, uint64(o.extent))
	if n <= a.c.EagerBytes {
		copy(f.records[box][kernels.LineBytes:], h.m.Buffer.Mem)
		bytes = f.records[box][:kernels.LineBytes+n]
		o.pushed = n
	} else {
		o.src, o.awaited = h.m.Buffer.Mem, true
	}
	if err := f.put(f.there+a.boxesAt()+int64(box)*a.boxBytes(), bytes, postsWord); err != nil {
		return false, err
	}
	f.boxes[box] = o
	if x.w.moved(n); !o.awaited {
		return h.finish(nil), nil
	}
	h.out, h.stage = o, inBox
	return true, nil
}

// answers reads what the other rank has said of messages of this one. f is locked.
func (f *farPair) answers() {
	for n := f.count(repliedWord); f.answered < n; f.answered++ {
		at := f.here + f.a.answersAt() + int64(f.answered%uint64(answersEach*f.a.c.Boxes))*farRecord
		number, phase := f.number(at, 0), f.number(at, 1)
		f.steps++
		for _, o := range f.boxes {
			if o == nil || o.number != number {
				continue
			}
			switch phase {
			case claimed:
				o.granted = true
			case wantsStaging: // no longer
				o.refused = true
			default:
				o.over, o.phase, o.expected = true, phase, extent(f.number(at, 2))
				f.drop(o)
			}
		}
	}
}

// drop lets go of a copy whose message has ended. f is locked.
func (f *farPair) drop(o *sending) {
	if o.parked {
		o.parked, o.src = false, nil
		f.a.parked.Add(-o.bytes)
		f.a.aside.Add(-1)
	}
}

// push puts chunks of the message that the other rank wants, while there is room for them. They are copied, so that the message's memory is free
// whenever its sender gives up. f is locked.
func (f *farPair) push() error {
	for _, o := range f.boxes {
		if o == nil || o.over || o.back || !o.granted && !o.refused || o.pushed == o.bytes {
			continue
		}
		if o.refused {
			if err := f.takeBack(o); err != nil {
				return err
			}
			f.drop(o)
			f.steps++
			continue
		}
		if f.chunks == nil {
			f.chunks = make([]byte, farSlots*f.a.c.StagingBytes)
		}
		for room := f.count(creditsWord)*(farSlots/2) + farSlots; o.pushed < o.bytes && f.puts[pieceWord] < room; f.steps++ {
			k, n := f.puts[pieceWord]%farSlots, min(f.a.c.StagingBytes, o.bytes-o.pushed)
			chunk := f.chunks[int64(k)*f.a.c.StagingBytes:][:n]
			copy(chunk, o.src[o.pushed:])
			if err := f.put(f.a.slot(f.host, f.a.hosts.Rank, k), chunk, pieceWord); err != nil {
				return err
			}
			o.pushed += n
			o.chunks++
			f.bytes += n
		}
	}
	return nil
}

// takeBack tells the other rank that no more comes of a message. f is locked.
func (f *farPair) takeBack(o *sending) error {
	k := f.puts[withdrawnWord] % uint64(f.a.c.Boxes)
	o.back = true
	return f.put(f.there+f.a.withdrawnAt()+int64(k)*farRecord, record(f.backs[k], o.number, o.chunks), withdrawnWord)
}

// park copies a message aside when its receiver is late; then its sender is done. The pair is locked.
func (f *farPair) park(x *messaging, h *end) bool {
	o, a, n := h.out, f.a, h.out.bytes
	if x.since.IsZero() {
		x.since = time.Now()
		return false
	}
	if time.Since(x.since) < max(x.f.patience, time.Duration(n/copySpeed)) {
		return false
	}
	if a.parked.Add(n) > a.c.ParkBytes {
		a.parked.Add(-n)
		return false
	}
	aside := make([]byte, n)
	x.w.copy(aside, o.src, false)
	o.src, o.parked, o.awaited = aside, true, false
	a.aside.Add(1)
	a.call() // an answer that has come meanwhile
	return h.finish(nil)
}

// withdraw takes a message back. Its user has the source again when it returns.
func (f *farPair) withdraw(_ *messaging, h *end, why error) {
	o := h.out
	if o == nil {
		h.finish(why)
		return
	}
	f.mu.Lock()
	_ = f.hear()
	if !o.over && !o.back && o.pushed < o.bytes {
		_ = f.takeBack(o) // else nothing reaches that rank any more
	}
	o.awaited, o.told, o.src = false, true, nil
	f.mu.Unlock()
	h.finish(why)
}
