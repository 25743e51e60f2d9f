package host

import (
	"github.com/switchyard-moe/switchyard/kernels"
)

// signal tells the receiver of h how far the message is.
func (x *exchange) signal(h *half, seq uint64) {
	line := x.c.Signal(x.epoch, x.e.space.Rank)
	x.e.word(h.peer, line+LineTotal).Store(uint64(h.extent))
	x.e.signal(h.peer, h.seq, seq)
}

// begin does what a send can do without its receiver: whole messages of the modes without credit, an announcement of
// the others.
func (x *exchange) begin(h *half) {
	c := x.c
	switch h.mode {
	case kernels.PacketMode:
		x.sendPacket(h)
	case kernels.EagerMode:
		x.e.at(puttingData, h.peer)
		copy(x.e.space.Range(h.peer, c.Eager(x.epoch, x.e.space.Rank), h.total), h.buf)
		x.signal(h, kernels.LastSeq(x.epoch))
	default:
		x.offer(h)
		return
	}
	h.done = h.total
	h.chunk = 0
}

// sendPacket writes a header word with the extent and then 4 bytes a word, each with the flag of the epoch.
func (x *exchange) sendPacket(h *half) {
	n := (h.total + 3) / 4
	at := x.c.Packet(x.epoch, x.e.space.Rank)
	flag := PacketFlag(x.epoch) << 32
	x.e.at(puttingData, h.peer)
	for i := range n {
		var v uint64
		for j := range min(4, h.total-4*i) {
			v |= uint64(h.buf[4*i+j]) << (8 * j)
		}
		x.e.word(h.peer, at+8+8*i).Store(v | flag)
	}
	x.e.signal(h.peer, x.e.word(h.peer, at), h.extent.packet()|flag)
}

// pushSends sends every chunk that has a credit. The window is the receivers' business: were senders to keep to one as
// well, ranks with different orders could wait for each other in a circle.
func (x *exchange) pushSends() bool {
	moved := false
	for i := x.sHead; i < len(x.sends); i++ {
		h := &x.sends[i]
		for h.chunk > 0 && x.sendChunk(h) {
			moved = true
		}
	}
	for x.sHead < len(x.sends) && x.sends[x.sHead].chunk == 0 {
		x.sHead++
		moved = true
	}
	return moved
}

// sendChunk sends the next chunk if its credit is there. It reports whether the message has got further.
func (x *exchange) sendChunk(h *half) bool {
	me := x.e.space.Rank
	line := x.c.Credit(h.peer, h.chunk)
	if x.e.word(me, line+LineSeq).Load() != kernels.Seq(x.epoch, h.chunk) {
		return x.taken(h)
	}
	n := x.e.word(me, line+LineLen).Load()
	if expected := extent(x.e.word(me, line+LineTotal).Load()); n == refused || !h.extent.fits(expected) {
		if expected == refused {
			x.failed = x.refusal(h.peer)
		} else {
			x.failed = x.disagree(me, h.peer, h.extent, expected, x.epoch)
		}
		x.signal(h, kernels.LastSeq(x.epoch))
		h.chunk = 0
		return true
	}
	at := int64(x.e.word(me, line+LineOffset).Load())
	x.e.at(puttingData, h.peer)
	dst, src := x.e.space.Range(h.peer, at, int64(n)), h.buf[h.done:h.done+int64(n)]
	if x.c.Staging(at) {
		copy(dst, src) // its reader is next, and finds it in a cache
		x.w.moved(int64(n))
	} else {
		x.copy(dst, src)
	}
	h.done += int64(n)
	x.signal(h, kernels.Seq(x.epoch, h.chunk))
	h.chunk++
	if h.done == h.total {
		h.chunk = 0
	}
	return true
}
