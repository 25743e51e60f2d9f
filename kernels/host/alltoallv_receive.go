package host

import (
	"github.com/switchyard-moe/switchyard/kernels"
)

// open posts the credits of the receives that have come into the window.
func (x *exchange) open() {
	for x.rOpen < len(x.recvs) && x.rOpen-x.rHead < x.window {
		h := &x.recvs[x.rOpen]
		x.rOpen++
		if h.mode != kernels.CreditMode {
			continue
		}
		if h.pull = x.pulls(h); h.pull {
			continue
		}
		for x.grant(h) {
		}
	}
}

// grant posts the next credit of a receive. It reports whether another may follow at once.
func (x *exchange) grant(h *half) bool {
	left := h.total - h.asked
	if left == 0 || h.grants-h.chunk >= x.c.Slots {
		return false
	}
	c, r, chunk := x.c, x.a.Routes, x.a.Schedule.ChunkBytes
	var at, n int64
	if x.inPlace() {
		n = left
		if chunk > 0 {
			n = min(n, chunk)
		}
		at = x.a.Dst.Place + r.RecvOffsets[x.e.space.Name(h.peer)] + h.asked
	} else {
		n = min(left, c.SlotBytes)
		at = c.Slot(h.peer, h.grants)
	}
	x.postCredit(h, h.grants, uint64(at), uint64(n))
	h.grants++
	h.asked += n
	return true
}

func (x *exchange) inPlace() bool { return x.a.Dst.Reach && !x.a.Schedule.Staged }

func (x *exchange) postCredit(h *half, k int, at, n uint64) {
	x.e.at(postingCredit, h.peer)
	line := x.c.Credit(x.e.space.Rank, k)
	x.e.word(h.peer, line+LineOffset).Store(at)
	x.e.word(h.peer, line+LineLen).Store(n)
	x.e.word(h.peer, line+LineTotal).Store(uint64(h.extent))
	x.e.word(h.peer, line+LineSeq).Store(kernels.Seq(x.epoch, k))
	x.e.ring(h.peer)
}

// recvPacket reports whether the whole packet is there, and stores it.
func (x *exchange) recvPacket(h *half) bool {
	at := x.c.Packet(x.epoch, h.peer)
	me, flag := x.e.space.Rank, PacketFlag(x.epoch)
	head := x.e.word(me, at).Load()
	if head>>32 != flag {
		return false
	}
	if sent := extentOfPacket(uint64(uint32(head))); !sent.fits(h.extent) {
		x.mismatch(h, sent)
		return true
	}
	x.e.at(takingData, h.peer)
	for i := h.done / 4; 4*i < h.total; i++ {
		v := x.e.word(me, at+8+8*i).Load()
		if v>>32 != flag {
			return false
		}
		n := min(4, h.total-4*i)
		for j := range n {
			h.buf[4*i+j] = byte(v >> (8 * j))
		}
		h.done += n
	}
	return true
}

// pullRecvs takes in what has arrived from the peers in the window.
func (x *exchange) pullRecvs() bool {
	moved := false
	for i := x.rHead; i < x.rOpen; i++ {
		if h := &x.recvs[i]; h.chunk > 0 && x.recv(h) {
			moved = true
		}
	}
	for x.rHead < x.rOpen && x.recvs[x.rHead].chunk == 0 {
		x.rHead++
		moved = true
	}
	x.open()
	return moved
}

// recv takes in what has arrived of one message; chunk is 0 when all of it has. It reports whether anything had.
func (x *exchange) recv(h *half) bool {
	if h.refuse {
		if h.seq.Load() >= kernels.LastSeq(x.epoch) || x.c.PacketBytes > 0 && x.e.word(x.e.space.Rank, x.c.Packet(x.epoch, h.peer)).Load()>>32 == PacketFlag(x.epoch) {
			h.chunk = 0
		}
		return h.chunk == 0
	}
	if h.mode == kernels.PacketMode {
		if !x.recvPacket(h) {
			return false
		}
		h.chunk = 0
		return true
	}
	seq, first := h.seq.Load(), 1
	if h.pull {
		first = 0
	}
	if seq < kernels.Seq(x.epoch, first) {
		return false
	}
	c, me := x.c, x.e.space.Rank
	if sent := extent(x.e.word(me, c.Signal(x.epoch, h.peer)+LineTotal).Load()); !sent.fits(h.extent) {
		x.mismatch(h, sent)
		return true
	}
	if h.mode == kernels.EagerMode {
		x.e.at(takingData, h.peer)
		copy(h.buf, x.e.space.Range(me, c.Eager(x.epoch, h.peer), h.total))
		h.chunk = 0
		return true
	}
	if h.pull {
		return x.pull(h)
	}
	moved := false
	for h.chunk < h.grants && seq >= kernels.Seq(x.epoch, h.chunk) {
		x.e.at(takingData, h.peer)
		n := min(h.total-h.done, c.SlotBytes)
		if x.inPlace() {
			n = h.total - h.done
			if chunk := x.a.Schedule.ChunkBytes; chunk > 0 {
				n = min(n, chunk)
			}
		} else {
			x.copy(h.buf[h.done:h.done+n], x.e.space.Range(me, c.Slot(h.peer, h.chunk), n))
		}
		h.done += n
		h.chunk++
		x.grant(h)
		moved = true
	}
	if h.done == h.total {
		h.chunk = 0
	}
	return moved
}
