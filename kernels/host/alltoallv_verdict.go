package host

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

func (x *exchange) sizes(rank int) string {
	if x.a.Barrier {
		return ""
	}
	return fmt.Sprintf("%d bytes from it and %d to it", x.a.Routes.RecvBytes[rank], x.a.Routes.SendBytes[rank])
}

// readSplits puts the splits in memory in the place of the launch's. It returns what does not fit.
func (x *exchange) readSplits() *kernels.SplitsError {
	a, r, n := x.a, &x.routes, x.f.bounds.Size
	order := *a.Routes
	table := shm.View[int64](a.Splits.Mem)
	for i, v := range [...]*[]int64{&r.SendBytes, &r.SendOffsets, &r.RecvBytes, &r.RecvOffsets} {
		*v = append((*v)[:0], table[i*n:][:n]...)
	}
	order.SendBytes, order.SendOffsets, order.RecvBytes, order.RecvOffsets = r.SendBytes, r.SendOffsets, r.RecvBytes, r.RecvOffsets
	*r = order
	me := x.e.space.Name(x.e.space.Rank)
	r.RecvBytes[me] = r.SendBytes[me]
	x.own = *a
	x.own.Routes = r
	x.a = &x.own
	for _, d := range [...]struct {
		send           bool
		bytes, offsets []int64
		limit          int64
	}{{true, r.SendBytes, r.SendOffsets, a.Src.Bytes}, {false, r.RecvBytes, r.RecvOffsets, a.Dst.Bytes}} {
		for p, bytes := range d.bytes {
			if off := d.offsets[p]; bytes < 0 || off < 0 || off > d.limit-bytes {
				return &kernels.SplitsError{Rank: me, Peer: p, Send: d.send, Bytes: bytes, Offset: off, Limit: d.limit, Epoch: x.epoch}
			}
		}
	}
	return nil
}

// refuse tells all peers of this host of splits that do not fit, in the place of a message and of a credit. The call is over when each has sent
// its message or, if it waited for a credit, answered: then what was written here may be written over by the next call.
func (x *exchange) refuse(why *kernels.SplitsError) {
	me := x.e.space.Rank
	part := uint64(why.Peer) << 32
	if why.Send {
		part |= 1
	}
	for _, r := range x.a.Routes.Order {
		p := x.f.places[r]
		if p < 0 {
			continue
		}
		line := x.c.Signal(x.epoch, me) + lineRefused
		for i, v := range [...]uint64{uint64(why.Bytes), uint64(why.Offset), uint64(why.Limit), part} {
			x.e.word(p, line+8*int64(i)).Store(v)
		}
		h := half{peer: p, extent: refused, seq: x.e.word(p, x.c.Signal(x.epoch, me))}
		x.signal(&h, kernels.LastSeq(x.epoch))
		x.postCredit(&h, 1, 0, refused)
		x.recvs = append(x.recvs, half{peer: p, chunk: 1, refuse: true, seq: x.e.word(me, x.c.Signal(x.epoch, p))})
	}
	x.window = len(x.recvs)
	x.open()
}

// refusal is what a peer has said of splits that it refuses.
func (x *exchange) refusal(peer int) *kernels.SplitsError {
	word := func(i int64) uint64 {
		return x.e.word(x.e.space.Rank, x.c.Signal(x.epoch, peer)+lineRefused+8*i).Load()
	}
	part := word(3)
	return &kernels.SplitsError{Rank: x.e.space.Name(peer), Peer: int(part >> 32), Send: part&1 != 0, Bytes: int64(word(0)), Offset: int64(word(1)), Limit: int64(word(2)), Epoch: x.epoch}
}

// disagree is the error of a message of one extent between ranks of the space that is expected as another.
func (x *exchange) disagree(src, dst int, sent, expected extent, epoch uint64) *kernels.CountMismatchError {
	return sent.miscounted(x.e.space.Name(src), x.e.space.Name(dst), expected, epoch)
}

func (x extent) miscounted(src, dst int, expected extent, epoch uint64) *kernels.CountMismatchError {
	return &kernels.CountMismatchError{Src: src, Dst: dst, Sent: uint64(x.bytes()), Expected: uint64(expected.bytes()), Epoch: epoch,
		SentElements: x.elements(), ExpectedElements: expected.elements()}
}

// mismatch ends a receive whose sender has another extent in mind, or has refused its splits. A sender that waits for a credit is refused, and has to
// say that it knows before this rank may go on to a call whose credits would overwrite the refusal.
func (x *exchange) mismatch(h *half, sent extent) {
	if sent == refused {
		x.failed, h.chunk = x.refusal(h.peer), 0
		return
	}
	x.failed = x.disagree(h.peer, x.e.space.Rank, sent, h.extent, x.epoch)
	if x.c.Mode(sent.bytes()) == kernels.CreditMode {
		h.refuse = true
		x.postCredit(h, 1, 0, refused)
		return
	}
	h.chunk = 0
	line := x.c.Complaint(x.e.space.Rank)
	x.e.word(h.peer, line+complaintSent).Store(uint64(sent))
	x.e.word(h.peer, line+complaintExpected).Store(uint64(h.extent))
	x.e.word(h.peer, line).Store(x.epoch)
	x.e.word(h.peer, x.c.Complaints()).Add(1)
	x.e.ring(h.peer)
}

// outcome is what this rank and its receivers make of the call. A sender that needed no credit is through before its receiver
// has looked, and learns of a complaint at the end of the next call at the latest: the receiver has signalled in that after it
// complained. One call tells of one; there is an error for each call, and not more.
func (x *exchange) outcome() error {
	f, me := x.f, x.e.space.Rank
	if x.failed != nil {
		f.mismatched = x.epoch
		return x.failed
	}
	n := x.e.word(me, x.c.Complaints()).Load()
	if n == f.complaints {
		return nil
	}
	if f.heard == nil {
		f.heard = make([]uint64, x.c.Size)
	}
	var first *kernels.CountMismatchError
	more, at := false, 0 // first's receiver
	for d := range x.c.Size {
		line := x.c.Complaint(d)
		epoch := x.e.word(me, line).Load()
		switch {
		case epoch <= f.heard[d]:
		case epoch == f.mismatched:
			f.heard[d] = epoch
		case first != nil && first.Epoch <= epoch:
			more = true
		default:
			more, at = more || first != nil, d
			first = x.disagree(me, d, extent(x.e.word(me, line+complaintSent).Load()), extent(x.e.word(me, line+complaintExpected).Load()), epoch)
		}
	}
	if !more {
		f.complaints = n
	}
	if first == nil {
		return nil
	}
	f.heard[at], f.mismatched = first.Epoch, first.Epoch
	return first
}

// lookForMismatch finds messages that arrived in another mode than their receiver waits for.
func (x *exchange) lookForMismatch() {
	me, c := x.e.space.Rank, x.c
	for i := x.rHead; i < x.rOpen; i++ {
		h := &x.recvs[i]
		if h.chunk == 0 || h.refuse {
			continue
		}
		if c.PacketBytes > 0 && h.mode != kernels.PacketMode {
			if head := x.e.word(me, c.Packet(x.epoch, h.peer)).Load(); head>>32 == PacketFlag(x.epoch) {
				x.mismatch(h, extentOfPacket(uint64(uint32(head))))
				continue
			}
		}
		if h.seq.Load() >= kernels.Seq(x.epoch, 0) {
			if sent := extent(x.e.word(me, c.Signal(x.epoch, h.peer)+LineTotal).Load()); !sent.fits(h.extent) {
				x.mismatch(h, sent)
			}
		}
	}
}
