package explore

import (
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// builder makes the program of one rank in one call.
type builder struct {
	p        *Protocol
	me, call int
	ops      []op
	prefix   string
}

func (b *builder) add(o op, format string, args ...any) {
	o.what = fmt.Sprintf("call %d: %s", b.call+1, b.prefix) + fmt.Sprintf(format, args...)
	b.ops = append(b.ops, o)
}

func (b *builder) done() []op {
	ops := b.ops
	b.ops, b.prefix = nil, ""
	return ops
}

// epoch of the call, as the words carry it.
func (b *builder) epoch() uint64 {
	e := uint64(b.call + 1)
	if b.p.o.Bug == TwoEpochs {
		e &= 1
	}
	return e
}

func (b *builder) flag() uint64 { return host.PacketFlag(b.epoch()) }

// parity selects among double buffers.
func (b *builder) parity(single Bug) uint64 {
	if b.p.o.Bug == single {
		return 0
	}
	return uint64(b.call + 1)
}

func (b *builder) build(met *int) program {
	c := &b.p.w.Calls[b.call]
	r := c.Routes[b.me]
	pr := program{window: c.Schedules[b.me].Window, want: map[int32]uint64{}}
	if pr.window == 0 {
		pr.window = b.p.ranks
	}
	var pre []op
	b.add(op{kind: opBegin}, "begins")
	b.meet(met)
	pre = b.done()
	for i, src := range r.ReverseOrder {
		credits, body := b.recv(int(src))
		if i < pr.window && !b.p.o.Concurrent {
			pre = append(pre, credits...)
			credits = nil
		}
		pr.recvs = append(pr.recvs, append(credits, body...))
		for k := range int(r.RecvBytes[src] / unit) {
			pr.want[b.p.cell(b.me, c.Output[b.me]+r.RecvOffsets[src]+int64(k)*unit)] = value(b.call, int(src), b.me, k)
		}
	}
	for _, dst := range r.Order {
		begin, body := b.send(int(dst))
		if b.p.o.Concurrent {
			body = append(begin, body...)
		} else {
			pre = append(pre, begin...)
		}
		pr.sends = append(pr.sends, body)
	}
	b.add(op{kind: opCheck}, "the user checks the output and poisons it")
	pr.pre, pr.post = pre, b.done()
	for _, dst := range r.Order {
		if b.pulled(int(dst), r.SendBytes[dst]) && b.p.o.Bug != KeepOffer {
			b.add(op{kind: opStore, cell: b.source(int(dst), b.me), val: 0}, "takes its offer to rank %d back", dst)
		}
	}
	b.add(op{kind: opQuit}, "gives up, and the user has the buffers back")
	pr.quit = b.done()
	return pr
}

// meet is the collective that CacheMissMeets hides behind a miss of the split cache.
func (b *builder) meet(met *int) {
	if b.p.o.Bug != CacheMissMeets {
		return
	}
	r := b.p.w.Calls[b.call].Routes[b.me]
	for _, c := range b.p.w.Calls[:b.call] {
		old := c.Routes[b.me]
		if slices.Equal(old.SendBytes, r.SendBytes) && slices.Equal(old.RecvBytes, r.RecvBytes) && slices.Equal(old.RecvOffsets, r.RecvOffsets) {
			return
		}
	}
	*met++
	desk := b.p.w.Outputs() + 1<<20
	b.prefix = "splits are not cached: "
	for _, p := range r.Order {
		b.add(op{kind: opStore, cell: b.p.cell(int(p), desk+int64(b.me)*8), val: uint64(*met), fused: b.p.o.Lines}, "tells rank %d", p)
	}
	for _, p := range r.Order {
		b.add(op{kind: opAwait, cell: b.p.cell(b.me, desk+int64(p)*8), val: uint64(*met)}, "waits to hear from rank %d", p)
	}
}

// chunks lists the chunks of the message from src to dst as its receiver grants them: place and bytes.
func (b *builder) chunks(call, src, dst int) (places, lens []int64) {
	w := b.p.w
	c := &w.Calls[call]
	r := c.Routes[dst]
	for asked, k := int64(0), 1; asked < r.RecvBytes[src]; k++ {
		n, at := min(r.RecvBytes[src]-asked, w.Block.SlotBytes), w.Block.Slot(src, k)
		if c.inPlace(dst) {
			n, at = r.RecvBytes[src]-asked, c.Output[dst]+r.RecvOffsets[src]+asked
			if chunk := c.Schedules[dst].ChunkBytes; chunk > 0 {
				n = min(n, chunk)
			}
		}
		places, lens = append(places, at), append(lens, n)
		asked += n
	}
	return places, lens
}

// pulled reports whether dst reads a message of n bytes where its sender has it.
func (b *builder) pulled(dst int, n int64) bool {
	w, c := b.p.w, &b.p.w.Calls[b.call]
	return b.p.o.Pull && w.Block.Mode(n) == kernels.CreditMode && !c.InPlace[dst] && !c.Schedules[dst].Staged
}

// source is the word in which src offers its message to dst.
func (b *builder) source(dst, src int) int32 {
	return b.p.cell(dst, b.p.w.Block.Signal(b.parity(OneSignalLine), src)+host.LineSource)
}

// read says that the message of src has been read, and awaitRead waits for that.
func (b *builder) read(src int) {
	at, seq := b.p.w.Block.Taken(b.me), kernels.LastSeq(b.epoch())
	if b.p.o.Bug == TakenAsCredit {
		at, seq = b.p.w.Block.Credit(b.me, 1)+host.LineSeq, kernels.Seq(b.epoch(), 1)
	}
	b.add(op{kind: opStore, cell: b.p.cell(src, at), val: seq}, "tells rank %d that it has read the message", src)
}

func (b *builder) awaitRead(dst int) {
	at, seq := b.p.w.Block.Taken(dst), kernels.LastSeq(b.epoch())
	if b.p.o.Bug == TakenAsCredit {
		at, seq = b.p.w.Block.Credit(dst, 1)+host.LineSeq, kernels.Seq(b.epoch(), 1)
	}
	b.add(op{kind: opAwait, equal: true, cell: b.p.cell(b.me, at), val: seq}, "sees that rank %d has read the message", dst)
}

// line writes the fields of a line and then its sequence number.
func (b *builder) line(peer int, at int64, fields []int64, values []uint64, seq uint64, seqFirst, plain bool, name string) {
	lines := b.p.o.Lines
	store := func(off int64, v uint64, plain, fused bool, what string) {
		b.add(op{kind: opStore, cell: b.p.cell(peer, at+off), val: v, plain: plain, fused: fused}, "%s: %s", name, what)
	}
	if seqFirst {
		store(host.LineSeq, seq, plain, false, "sequence number "+seqName(seq))
	}
	for i, f := range fields {
		store(f, values[i], true, lines && i > 0, [...]string{host.LineTotal / 8: "bytes in all", host.LineOffset / 8: "place", host.LineLen / 8: "bytes here"}[f/8]+fmt.Sprintf(" %d", values[i]))
	}
	if !seqFirst {
		store(host.LineSeq, seq, plain, lines, "sequence number "+seqName(seq))
	}
}

func seqName(seq uint64) string {
	const bits = 20
	if k := seq & (1<<bits - 1); k != 1<<bits-1 {
		return fmt.Sprintf("%d.%d", seq>>bits, k)
	}
	return fmt.Sprintf("%d.last", seq>>bits)
}

// signal tells dst how far the message is.
func (b *builder) signal(dst int, total int64, seq uint64) {
	bug := b.p.o.Bug
	at, name := b.p.w.Block.Signal(b.parity(OneSignalLine), b.me), fmt.Sprintf("signal to rank %d", dst)
	if bug == TwoStateSemaphore {
		at, seq = b.p.w.Block.Signal(0, b.me), 1
	}
	b.line(dst, at, []int64{host.LineTotal}, []uint64{uint64(total)}, seq, bug == SignalBeforeTotal, bug == PlainSignal, name)
}

// await waits for a signal of src.
func (b *builder) await(src int, total int64, seq uint64) {
	bug := b.p.o.Bug
	at := b.p.w.Block.Signal(b.parity(OneSignalLine), src)
	if bug == TwoStateSemaphore {
		at = b.p.w.Block.Signal(0, src)
		b.add(op{kind: opAwait, cell: b.p.cell(b.me, at), equal: true, val: 1}, "sees the semaphore of rank %d", src)
		b.add(op{kind: opStore, cell: b.p.cell(b.me, at), val: 0, fused: true}, "and clears it")
		return
	}
	b.add(op{kind: opAwait, cell: b.p.cell(b.me, at+host.LineSeq), val: seq}, "sees signal %s of rank %d", seqName(seq), src)
	b.add(op{kind: opExpect, cell: b.p.cell(b.me, at+host.LineTotal), val: uint64(total), fused: b.p.o.Lines}, "reads that rank %d sends %d bytes", src, total)
}

// grant posts the credit of chunk k, from 1.
func (b *builder) grant(src, k int, places, lens []int64) {
	r := b.p.w.Calls[b.call].Routes[b.me]
	b.line(src, b.p.w.Block.Credit(b.me, k), []int64{host.LineOffset, host.LineLen, host.LineTotal},
		[]uint64{uint64(places[k-1]), uint64(lens[k-1]), uint64(r.RecvBytes[src])}, kernels.Seq(b.epoch(), k),
		b.p.o.Bug == CreditBeforePlace, b.p.o.Bug == PlainCredit, fmt.Sprintf("credit %d to rank %d", k, src))
}

// recv is the receiving half of a pair: the credits that open it and the rest.
func (b *builder) recv(src int) (credits, body []op) {
	w, bug := b.p.w, b.p.o.Bug
	c := &w.Calls[b.call]
	r := c.Routes[b.me]
	total := r.RecvBytes[src]
	out := func(i int64) int32 { return b.p.cell(b.me, c.Output[b.me]+r.RecvOffsets[src]+i) }
	if total == 0 && bug == SkipZeroWait {
		return nil, nil
	}
	switch w.Block.Mode(total) {
	case kernels.PacketMode:
		at := w.Block.Packet(b.parity(OnePacketBuffer), src)
		b.add(op{kind: opAwait, cell: b.p.cell(b.me, at), equal: true, val: b.flag()<<32 | uint64(total)}, "sees a packet of %d bytes of rank %d", total, src)
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opTake, cell: b.p.cell(b.me, at+8+2*i), val: b.flag(), to: out(i)}, "takes word %d of the packet of rank %d", i/unit, src)
		}
		return nil, b.done()
	case kernels.EagerMode:
		b.await(src, total, kernels.Seq(b.epoch(), 1))
		at := w.Block.Eager(b.parity(OneEagerBuffer), src)
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opCopy, cell: b.p.cell(b.me, at+i), to: out(i)}, "copies unit %d of rank %d out of eager staging", i/unit, src)
		}
		return nil, b.done()
	}
	if b.pulled(b.me, total) {
		b.await(src, total, kernels.Seq(b.epoch(), 0))
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opPull, from: src, val: value(b.call, src, b.me, int(i/unit)), to: out(i)}, "reads unit %d in the source of rank %d", i/unit, src)
		}
		if bug != TakeWithoutLook {
			b.add(op{kind: opAwait, equal: true, cell: b.source(b.me, src), val: 1}, "sees that rank %d still offers it", src)
		}
		b.read(src)
		return nil, b.done()
	}
	places, lens := b.chunks(b.call, src, b.me)
	slots := w.Block.Slots
	for k := 1; k <= min(slots, len(places)); k++ {
		b.grant(src, k, places, lens)
	}
	credits = b.done()
	done := int64(0)
	for k := 1; k <= len(places); k++ {
		b.await(src, total, kernels.Seq(b.epoch(), k))
		again := k+slots <= len(places)
		if again && bug == GrantBeforeCopy {
			b.grant(src, k+slots, places, lens)
		}
		for i := int64(0); i < lens[k-1] && !c.inPlace(b.me); i += unit {
			b.add(op{kind: opCopy, cell: b.p.cell(b.me, places[k-1]+i), to: out(done + i)}, "copies unit %d of chunk %d of rank %d out of its slot", i/unit, k, src)
		}
		done += lens[k-1]
		if again && bug != GrantBeforeCopy {
			b.grant(src, k+slots, places, lens)
		}
	}
	return credits, b.done()
}

// send is the sending half of a pair: what needs no credit, and the rest.
func (b *builder) send(dst int) (begin, body []op) {
	w, bug := b.p.w, b.p.o.Bug
	r := w.Calls[b.call].Routes[b.me]
	total := r.SendBytes[dst]
	val := func(i int64) uint64 { return value(b.call, b.me, dst, int(i/unit)) }
	switch w.Block.Mode(total) {
	case kernels.PacketMode:
		at, flag := w.Block.Packet(b.parity(OnePacketBuffer), b.me), b.flag()<<32
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opPut, plain: true, cell: b.p.cell(dst, at+8+2*i), val: flag | val(i)}, "packet to rank %d: word %d", dst, i/unit)
		}
		b.add(op{kind: opStore, plain: true, cell: b.p.cell(dst, at), val: flag | uint64(total)}, "packet to rank %d: header", dst)
		return b.done(), nil
	case kernels.EagerMode:
		if bug == SignalBeforeData {
			b.signal(dst, total, kernels.LastSeq(b.epoch()))
		}
		at := w.Block.Eager(b.parity(OneEagerBuffer), b.me)
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opPut, plain: true, cell: b.p.cell(dst, at+i), val: val(i)}, "puts unit %d into eager staging of rank %d", i/unit, dst)
		}
		if bug != SignalBeforeData {
			b.signal(dst, total, kernels.LastSeq(b.epoch()))
		}
		return b.done(), nil
	}
	if b.pulled(dst, total) {
		b.add(op{kind: opStore, plain: true, cell: b.source(dst, b.me), val: 1}, "offers its source to rank %d", dst)
		b.signal(dst, total, kernels.Seq(b.epoch(), 0))
		begin = b.done()
		b.awaitRead(dst)
		return begin, b.done()
	}
	b.signal(dst, total, kernels.Seq(b.epoch(), 0))
	begin = b.done()
	places, lens := b.chunks(b.call, b.me, dst)
	known := bug == MissingCredit
	if bug == CacheKeepsPlace && b.call > 0 && slices.Equal(w.Calls[b.call-1].Routes[b.me].SendBytes, r.SendBytes) {
		known = true
		places, lens = b.chunks(b.call-1, b.me, dst)
	}
	done := int64(0)
	for k := 1; k <= len(places); k++ {
		if !known {
			line := w.Block.Credit(dst, k)
			b.add(op{kind: opAwait, equal: true, cell: b.p.cell(b.me, line+host.LineSeq), val: kernels.Seq(b.epoch(), k)}, "sees credit %d of rank %d", k, dst)
			b.add(op{kind: opCredit, cell: b.p.cell(b.me, line+host.LineOffset), to: b.p.cell(b.me, line+host.LineLen),
				aux: [2]uint64{uint64(lens[k-1]), uint64(total)}, from: dst, fused: b.p.o.Lines}, "reads the place in credit %d of rank %d", k, dst)
		}
		puts := func() {
			for i := int64(0); i < lens[k-1]; i += unit {
				o := op{kind: opPut, plain: true, from: dst, off: i, val: val(done + i), granted: !known}
				if known {
					o.cell = b.p.cell(dst, places[k-1]+i)
				} else {
					b.p.cell(dst, places[k-1]+i)
				}
				b.add(o, "puts unit %d of chunk %d to rank %d", i/unit, k, dst)
			}
		}
		if bug == SignalBeforeData {
			b.signal(dst, total, kernels.Seq(b.epoch(), k))
			puts()
		} else {
			puts()
			b.signal(dst, total, kernels.Seq(b.epoch(), k))
		}
		done += lens[k-1]
	}
	return begin, b.done()
}
