package host

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// exchanges are the launches of one communicator. It is a family.
type exchanges struct {
	c       ExchangeBlock
	nonce   *shm.Nonce // by which peers know this rank's memory
	sources []source   // by rank

	complaints uint64   // how many of this rank's receivers' it has taken in
	heard      []uint64 // by rank: the call of the last
	mismatched uint64   // the last call for which this rank has returned that sizes differ
}

// source is where a port finds a peer's memory outside its segment.
type source struct {
	readable bool        // this rank may read it
	memory   shm.Process // which is there, in another process
}

// The defaults of exchanges. Slots are smaller where they would exceed their bound together.
const (
	defaultPacketBytes  = 128
	defaultEagerBytes   = 1 << 10
	defaultSlots        = 4
	defaultStagingBytes = 32 << 20
	maxSlotBytes        = 256 << 10
)

func newExchanges(c *kernels.ExchangeBounds, offset int64) *exchanges {
	return &exchanges{c: ExchangeBlock{c, offset}}
}

func (f *exchanges) defaults() {
	c := f.c.ExchangeBounds
	c.PacketBytes, c.EagerBytes = kernels.Default(c.PacketBytes, defaultPacketBytes), kernels.Default(c.EagerBytes, defaultEagerBytes)
	c.DefaultSlots(defaultSlots, defaultStagingBytes, maxSlotBytes, c.Size)
}

func (f *exchanges) layout() kernels.Layout {
	return kernels.Layout{Bytes: f.c.Bytes(), Zero: f.c.ControlBytes()}
}

func (f *exchanges) open(e *Engine) { f.show(e) }

func (f *exchanges) ready(e *Engine) kernels.Traits {
	err := f.look(e)
	return kernels.Traits{Pulls: err == nil, Slow: err}
}

func (f *exchanges) run(p *port, op kernels.Operation) error {
	x := exchangeScratch.Get().(*exchange)
	err := x.run(p, f, op.(*kernels.AllToAllV))
	x.reset()
	exchangeScratch.Put(x)
	return err
}

// pollsPerLook is how many idle passes go by between two looks for messages that nobody expects.
const pollsPerLook = 32

// exchangeScratch keeps the scratch of kernels between launches.
var exchangeScratch = sync.Pool{New: func() any { return new(exchange) }}

// half is one direction of one pair during a call.
type half struct {
	peer   int
	mode   kernels.Mode
	buf    []byte // the message in the user's buffer
	total  int64
	done   int64  // bytes moved so far
	chunk  int    // number of the next chunk to send or to receive, from 1
	grants int    // receive: number of the next chunk to grant
	asked  int64  // receive: bytes granted so far
	refuse bool   // receive: the sender has been refused and has yet to acknowledge
	pull   bool   // receive: this rank reads the message in its sender's memory
	taken  uint64 // send: how far the receiver has read it there
	seq    *atomic.Uint64
}

// exchange is one call of the kernel on one rank: two lists of halves, served window by window until both are done.
type exchange struct {
	e      *Engine
	f      *exchanges
	c      *ExchangeBlock
	a      *kernels.AllToAllV
	window int
	epoch  uint64
	w      waiter
	sends  []half
	recvs  []half
	sHead  int // first send that is not done
	rHead  int
	rOpen  int  // receives that have been opened (credits posted)
	stream bool // too large for the caches
	failed error
	own    kernels.AllToAllV // of a launch with splits in memory: what they make of it
	routes kernels.Routes
}

func (x *exchange) reset() {
	x.w.leave()
	clear(x.sends)
	clear(x.recvs)
	x.sends, x.recvs = x.sends[:0], x.recvs[:0]
	x.e, x.f, x.c, x.a, x.failed = nil, nil, nil, nil, nil
	x.own = kernels.AllToAllV{}
	x.sHead, x.rHead, x.rOpen = 0, 0, 0
}

func (x *exchange) sizes(peer int) string {
	if x.a.Barrier {
		return ""
	}
	return fmt.Sprintf("%d bytes from it and %d to it", x.a.Routes.RecvBytes[peer], x.a.Routes.SendBytes[peer])
}

func (x *exchange) run(p *port, f *exchanges, a *kernels.AllToAllV) error {
	e, c := p.e, &f.c
	x.e, x.f, x.c, x.a = e, f, c, a
	me := e.space.Rank
	x.epoch = e.count(c.Epoch())
	var refused *kernels.SplitsError
	if a.Splits.Bytes > 0 {
		refused = x.readSplits()
		a = x.a
	}
	r := a.Routes
	if x.window = a.Schedule.Window; x.window <= 0 {
		x.window = c.Size
	}
	x.w.begin(p, x, p.call(a, c.Epoch(), x.epoch), a.Timeout)
	if refused != nil {
		return x.refuse(refused)
	}
	var all int64
	for _, n := range r.SendBytes {
		all += n
	}
	x.stream = all >= e.cacheBytes

	for _, p := range r.ReverseOrder {
		n := r.RecvBytes[p]
		x.recvs = append(x.recvs, half{peer: int(p), mode: c.Mode(n), total: n, chunk: 1, grants: 1,
			buf: a.Dst.Mem[r.RecvOffsets[p] : r.RecvOffsets[p]+n], seq: e.word(me, c.Signal(x.epoch, int(p)))})
	}
	x.open()
	for _, p := range r.Order {
		n := r.SendBytes[p]
		x.sends = append(x.sends, half{peer: int(p), mode: c.Mode(n), total: n, chunk: 1,
			buf: a.Src.Mem[r.SendOffsets[p] : r.SendOffsets[p]+n], seq: e.word(int(p), c.Signal(x.epoch, me))})
		x.begin(&x.sends[len(x.sends)-1])
	}
	if n := r.SendBytes[me]; n > 0 {
		src, dst := a.Src.Mem[r.SendOffsets[me]:][:n], a.Dst.Mem[r.RecvOffsets[me]:][:n]
		if shm.Addr(src) != shm.Addr(dst) {
			x.copy(dst, src)
		}
	}
	for {
		moved := x.pushSends()
		if x.pullRecvs() {
			moved = true
		}
		if x.sHead == len(x.sends) && x.rHead == len(x.recvs) {
			return x.outcome()
		}
		if moved {
			x.w.busy()
			continue
		}
		late := x.late()
		if err := x.w.idle(late); err != nil {
			x.withdraw()
			return x.w.fail(late, err)
		}
		if x.w.polls%pollsPerLook == 0 {
			x.lookForMismatch()
		}
	}
}

// readSplits puts the splits in memory in the place of the launch's. It returns what does not fit.
func (x *exchange) readSplits() *kernels.SplitsError {
	a, r, n := x.a, &x.routes, x.c.Size
	order := *a.Routes
	table := shm.View[int64](a.Splits.Mem)
	for i, v := range [...]*[]int64{&r.SendBytes, &r.SendOffsets, &r.RecvBytes, &r.RecvOffsets} {
		*v = append((*v)[:0], table[i*n:][:n]...)
	}
	order.SendBytes, order.SendOffsets, order.RecvBytes, order.RecvOffsets = r.SendBytes, r.SendOffsets, r.RecvBytes, r.RecvOffsets
	*r = order
	me := x.e.space.Rank
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

// refuse tells all peers of splits that do not fit, in the place of a message and of a credit. It returns when each has sent its message
// or, if it waited for a credit, answered: then what was written here may be written over by the next call.
func (x *exchange) refuse(why *kernels.SplitsError) error {
	me := x.e.space.Rank
	part := uint64(why.Peer) << 32
	if why.Send {
		part |= 1
	}
	order := x.a.Routes.Order
	for _, p := range order {
		line := x.c.Signal(x.epoch, me) + lineRefused
		for i, v := range [...]uint64{uint64(why.Bytes), uint64(why.Offset), uint64(why.Limit), part} {
			x.e.word(int(p), line+8*int64(i)).Store(v)
		}
		h := half{peer: int(p), total: -1, seq: x.e.word(int(p), x.c.Signal(x.epoch, me))} // the total is refused
		x.signal(&h, kernels.LastSeq(x.epoch))
		x.postCredit(&h, 1, 0, refused)
	}
	for len(order) > 0 {
		p := int(order[0])
		if x.e.word(me, x.c.Signal(x.epoch, p)).Load() >= kernels.LastSeq(x.epoch) ||
			x.c.PacketBytes > 0 && x.e.word(me, x.c.Packet(x.epoch, p)).Load()>>32 == PacketFlag(x.epoch) {
			order = order[1:]
			x.w.busy()
		} else if err := x.w.idle(p); err != nil {
			return x.w.fail(p, err)
		}
	}
	return why
}

// refusal is what a peer has said of splits that it refuses.
func (x *exchange) refusal(peer int) *kernels.SplitsError {
	word := func(i int64) uint64 {
		return x.e.word(x.e.space.Rank, x.c.Signal(x.epoch, peer)+lineRefused+8*i).Load()
	}
	part := word(3)
	return &kernels.SplitsError{Rank: peer, Peer: int(part >> 32), Send: part&1 != 0, Bytes: int64(word(0)), Offset: int64(word(1)), Limit: int64(word(2)), Epoch: x.epoch}
}

// streamFrom is the length from which a fence for one copy around the caches does not matter.
const streamFrom = 32 << 10

// copy moves bytes through the caches, or around them when the exchange as a whole does not fit.
func (x *exchange) copy(dst, src []byte) {
	stream := x.stream && len(src) >= streamFrom
	for len(src) > 0 {
		n := min(len(src), movedBytes)
		if stream {
			shm.CopyStream(dst, src[:n])
		} else {
			copy(dst, src[:n])
		}
		x.w.moved(int64(n))
		dst, src = dst[n:], src[n:]
		if len(src) > 0 {
			x.e.at(copying, x.e.space.Rank)
		}
	}
	if stream {
		shm.Fence()
	}
}

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
		at = x.a.Dst.Place + r.RecvOffsets[h.peer] + h.asked
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
	x.e.word(h.peer, line+LineTotal).Store(uint64(h.total))
	x.e.word(h.peer, line+LineSeq).Store(kernels.Seq(x.epoch, k))
	x.e.ring(h.peer)
}

// signal tells the receiver of h how far the message is.
func (x *exchange) signal(h *half, seq uint64) {
	line := x.c.Signal(x.epoch, x.e.space.Rank)
	x.e.word(h.peer, line+LineTotal).Store(uint64(h.total))
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

// sendPacket writes a header word with the length and then 4 bytes a word, each with the flag of the epoch.
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
	x.e.signal(h.peer, x.e.word(h.peer, at), uint64(h.total)|flag)
}

// recvPacket reports whether the whole packet is there, and stores it.
func (x *exchange) recvPacket(h *half) bool {
	at := x.c.Packet(x.epoch, h.peer)
	me, flag := x.e.space.Rank, PacketFlag(x.epoch)
	head := x.e.word(me, at).Load()
	if head>>32 != flag {
		return false
	}
	if int64(uint32(head)) != h.total {
		x.mismatch(h, uint64(uint32(head)))
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
	if total := x.e.word(me, line+LineTotal).Load(); n == refused || int64(total) != h.total {
		if total == refused {
			x.failed = x.refusal(h.peer)
		} else {
			x.failed = &kernels.CountMismatchError{Src: me, Dst: h.peer, Sent: uint64(h.total), Expected: total, Epoch: x.epoch}
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
		if h.seq.Load() < kernels.LastSeq(x.epoch) {
			return false
		}
		h.chunk = 0
		return true
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
	if total := x.e.word(me, c.Signal(x.epoch, h.peer)+LineTotal).Load(); int64(total) != h.total {
		x.mismatch(h, total)
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

// mismatch ends a receive whose sender has another size in mind, or has refused its splits. A sender that waits for a credit is refused, and has to
// say that it knows before this rank may go on to a call whose credits would overwrite the refusal.
func (x *exchange) mismatch(h *half, sent uint64) {
	if sent == refused {
		x.failed, h.chunk = x.refusal(h.peer), 0
		return
	}
	x.failed = &kernels.CountMismatchError{Src: h.peer, Dst: x.e.space.Rank, Sent: sent, Expected: uint64(h.total), Epoch: x.epoch}
	if x.c.Mode(int64(sent)) == kernels.CreditMode {
		h.refuse = true
		x.postCredit(h, 1, 0, refused)
		return
	}
	h.chunk = 0
	line := x.c.Complaint(x.e.space.Rank)
	x.e.word(h.peer, line+complaintSent).Store(sent)
	x.e.word(h.peer, line+complaintExpected).Store(uint64(h.total))
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
	more := false
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
			more = more || first != nil
			first = &kernels.CountMismatchError{Src: me, Dst: d, Sent: x.e.word(me, line+complaintSent).Load(),
				Expected: x.e.word(me, line+complaintExpected).Load(), Epoch: epoch}
		}
	}
	if !more {
		f.complaints = n
	}
	if first == nil {
		return nil
	}
	f.heard[first.Dst], f.mismatched = first.Epoch, first.Epoch
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
				x.mismatch(h, uint64(uint32(head)))
				continue
			}
		}
		if h.seq.Load() >= kernels.Seq(x.epoch, 0) {
			if total := x.e.word(me, c.Signal(x.epoch, h.peer)+LineTotal).Load(); int64(total) != h.total {
				x.mismatch(h, total)
			}
		}
	}
}

// late is the first peer that has not done its part.
func (x *exchange) late() int {
	for i := x.rHead; i < len(x.recvs); i++ {
		if x.recvs[i].chunk > 0 {
			return x.recvs[i].peer
		}
	}
	if x.sHead < len(x.sends) {
		return x.sends[x.sHead].peer
	}
	return x.e.space.Rank
}
