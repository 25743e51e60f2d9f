package host

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Into memory outside the heap a message would be copied twice, into a slot of staging and out of it. So its receiver
// reads it where the sender has it, as the sender's first signal says: one copy, with copy in one process or out of the
// heap, with process_vm_readv out of another process.
//
// That the receiver reads, and the sender does not write, is for the sake of failures. Nobody but a rank itself ever
// writes its user's memory, so one that gives up can hand its output back at once, whatever its peers are about to do. A
// sender that gives up takes back its offer before its user has the source again: a receiver that still reads gets
// anything, looks at the offer once more, and takes nothing. In one process, where reading what its owner has freed could
// be fatal, the sender also waits for a reader that is in the middle of a piece; that is a copy, which ends by itself.
//
// A receiver that may not read, or finds that it cannot (memory of a driver, say), grants slots. It decides that for
// itself and for each message; the sender takes whichever answer comes.

const (
	// pullFromBytes is the length from which a process reads another's memory. With two ranks that pays from 8 KiB on (2.0 us
	// instead of 2.7), with four on two cores from 16 KiB (at 8 KiB 15 us instead of 12).
	pullFromBytes = 16 << 10
	// pullBytes is how much is read at once, between two looks at other peers. It is what the system reads in one go;
	// 1 MiB costs 6% of the speed with four processes on two cores.
	pullBytes = 4 << 20
	// inSegment marks a source that is an offset in the sender's segment, not an address in its memory.
	inSegment = 1 << 63
)

// show leaves word of where this rank's memory is in the control block.
func (f *exchanges) show(e *Engine) {
	space := &e.space
	f.sources = make([]source, space.Size)
	for r := range f.sources {
		f.sources[r].readable = e.bells != nil
	}
	f.nonce = shm.NewNonce()
	self := shm.Self(f.nonce)
	self.Write(space.Range(space.Rank, f.c.Card(), shm.CardBytes))
}

// look tries to read the memory of every peer. The error says of which it cannot; their messages go through staging.
func (f *exchanges) look(e *Engine) error {
	space := &e.space
	var errs []error
	for r := range f.sources {
		w := &f.sources[r]
		if w.readable || r == space.Rank {
			continue
		}
		w.memory = shm.ReadCard(space.Range(r, f.c.Card(), shm.CardBytes))
		err := w.memory.Probe()
		if w.readable = err == nil; err != nil {
			errs = append(errs, fmt.Errorf("rank %d: %w", space.Name(r), err))
		}
	}
	return errors.Join(errs...)
}

// pulls reports whether this rank will read the message of h in its sender's memory.
func (x *exchange) pulls(h *half) bool {
	return !x.a.Dst.Reach && !x.a.Schedule.Staged && h.total >= x.e.pullFrom && x.f.sources[h.peer].readable
}

// offer announces the message of h and says where it lies.
func (x *exchange) offer(h *half) {
	x.e.order(x.e.space.Rank)
	source := uint64(shm.Addr(h.buf))
	if x.a.Src.Reach && x.e.bells == nil {
		source = inSegment | uint64(x.a.Src.Place+x.a.Routes.SendOffsets[x.e.space.Name(h.peer)])
	}
	x.e.word(h.peer, x.c.Signal(x.epoch, x.e.space.Rank)+LineSource).Store(source)
	x.signal(h, kernels.Seq(x.epoch, 0))
}

// taken reports whether the receiver of h has read more of the message; chunk is 0 when it has read all of it.
func (x *exchange) taken(h *half) bool {
	seq := x.e.word(x.e.space.Rank, x.c.Taken(h.peer)).Load()
	if seq <= h.taken || seq < kernels.Seq(x.epoch, 1) {
		return false
	}
	h.taken = seq
	if seq == kernels.LastSeq(x.epoch) {
		x.e.order(x.e.space.Rank)
		h.done, h.chunk = h.total, 0
	}
	return true
}

// withdraw takes back what this rank has offered and nobody has taken. Its user may have the source then.
func (x *exchange) withdraw() {
	c, me := x.c, x.e.space.Rank
	for i := x.sHead; i < len(x.sends); i++ {
		h := &x.sends[i]
		if h.mode != kernels.CreditMode || h.chunk == 0 {
			continue
		}
		x.e.at(withdrawing, h.peer)
		x.e.word(h.peer, c.Signal(x.epoch, me)+LineSource).Store(0)
		for x.e.word(me, c.Reading(h.peer)).Load() != 0 {
			if x.e.pause(h.peer) != nil {
				break
			}
		}
	}
	x.e.order(me)
}

// pull reads the next piece of a message. It reports whether it has done anything.
func (x *exchange) pull(h *half) bool {
	c, me := x.c, x.e.space.Rank
	offer := x.e.word(me, c.Signal(x.epoch, h.peer)+LineSource)
	at := offer.Load()
	if at == 0 {
		return false // its sender has given up, and we shall
	}
	dst, from := h.buf[h.done:min(h.done+x.e.pullBytes, h.total)], at+uint64(h.done)
	switch {
	case x.e.bells != nil:
		reading := x.e.word(h.peer, c.Reading(me))
		reading.Store(1)
		if offer.Load() == 0 {
			reading.Store(0)
			return false
		}
		x.e.order(h.peer)
		x.e.at(takingData, h.peer)
		x.copy(dst, shm.At(uintptr(from), int64(len(dst))))
		x.e.order(h.peer)
		reading.Store(0)
	case at&inSegment != 0: // which stays mapped, whatever becomes of the sender
		x.e.at(takingData, h.peer)
		x.copy(dst, x.e.space.Range(h.peer, int64(from&^inSegment), int64(len(dst))))
	default:
		x.e.at(takingData, h.peer)
		if x.f.sources[h.peer].memory.Read(dst, uintptr(from)) != nil {
			h.pull, h.done = false, 0
			for x.grant(h) {
			}
			return true
		}
		x.w.moved(int64(len(dst)))
	}
	h.done += int64(len(dst))
	seq := kernels.Seq(x.epoch, int(min(1+h.done/x.e.pullBytes, kernels.MaxChunks)))
	if h.done == h.total {
		// Not a load: that could come before the reads above.
		if !offer.CompareAndSwap(at, at) {
			return false
		}
		h.chunk, seq = 0, kernels.LastSeq(x.epoch)
	}
	x.e.at(signalling, h.peer)
	x.e.word(h.peer, c.Taken(me)).Store(seq)
	x.e.ring(h.peer)
	return true
}

// order tells the race detector, in one process, that what the callers before have done with the source of rank p comes
// before what this one will.
func (e *Engine) order(p int) {
	if e.bells != nil {
		e.bells[p].order()
	}
}

// pause gives the core to others for a moment.
func (e *Engine) pause(peer int) error {
	if e.step != nil {
		return e.step(idlePass, peer)
	}
	e.yield()
	return nil
}
