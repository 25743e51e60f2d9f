package explore

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels"
)

// What a protocol can be found guilty of.
var (
	ErrDeadlock = errors.New("deadlock")
	ErrData     = errors.New("wrong data in an output")
	ErrLate     = errors.New("write to an output that the user has back")
	ErrWild     = errors.New("write outside every message")
	ErrCredit   = errors.New("a credit that was not meant")
	ErrCount    = errors.New("a count mismatch that is none")
	ErrAhead    = errors.New("a rank two calls ahead")
)

// Options say what Protocol explores.
type Options struct {
	Bug Bug
	// Relaxed lets plain stores (data, packet words, the fields of a line) become visible later and in any order, until
	// the rank's next release store. Otherwise memory is sequentially consistent.
	Relaxed bool
	// Concurrent has every rank serve each half of each pair on a thread of its own, as the blocks of a GPU do. Otherwise
	// a rank is one thread that serves whatever half is ready, in every order, and ends an action before the next one.
	Concurrent bool
	// Lines makes writing or reading a whole line one action; the data stay apart. It is for larger worlds.
	Lines bool
}

// Protocol is the exchange protocol of kernels as a System.
//
// A message consists of units of 4 bytes, each put and copied by an action of its own and with a value unique to call,
// source, destination and place. Outputs are poisoned before the first call and after each check; a check is an action
// that may come any time after the call. The user overwrites the source as soon as the call returns.
type Protocol struct {
	w     *Workload
	o     Options
	ranks int
	// Memory: the words of all segments that the programs use.
	cells  map[place]int32
	names  []place
	output [][]int32 // by rank: the cells of its outputs in all calls
	calls  [][]program
	width  int // of a rank's part of the state
}

type place struct {
	rank int
	off  int64
}

// unit is the size of what a rank puts with one action.
const unit = 4

const (
	poison = 0xbad0bad0 // in outputs before they are written
	junk   = 0x0ddba115 // in sources after the call
)

// value is unit i of a message.
func value(call, src, dst, i int) uint64 {
	return 1<<31 | uint64(call)<<24 | uint64(src)<<16 | uint64(dst)<<8 | uint64(i)
}

type opKind uint8

const (
	opStore  opKind = iota // cell = val
	opPut                  // cell = val, data from the source
	opAwait                // blocks until cell >= val, or == val
	opCredit               // the place of the next puts = cell, when the lengths at aux match
	opExpect               // cell must be val
	opTake                 // blocks until the packet word in cell has flag val, then to = its data
	opCopy                 // to = cell
	opBegin                // enters the call
	opCheck                // the user looks at the output
)

// op is one atomic action, or a part of one.
type op struct {
	kind    opKind
	equal   bool // opAwait
	plain   bool // stores: may become visible later
	granted bool // opPut: cell is relative to the place of the credit of this thread
	fused   bool // happens together with the op before it
	cell    int32
	to      int32
	val     uint64
	aux     [2]uint64 // opCredit: bytes of the chunk and of the message that the sender expects
	from    int       // opCredit and granted puts: the receiver
	off     int64     // granted puts: bytes after the place
	what    string
}

// program is one call of one rank: pre, then the halves in any order, then the return to the user, then post.
type program struct {
	pre, post []op
	// sends are in the order of the routes, recvs in the reverse order. A receive may run when fewer than window receives
	// come between it and the first one that is not done.
	sends, recvs [][]op
	window       int
	want         map[int32]uint64 // outputs that are not poison
}

func (p *program) half(i int) []op {
	if i < len(p.sends) {
		return p.sends[i]
	}
	return p.recvs[i-len(p.sends)]
}

// NewProtocol derives the programs of a workload's ranks.
func NewProtocol(w *Workload, o Options) *Protocol {
	p := &Protocol{w: w, o: o, ranks: w.Channels.Size, cells: map[place]int32{}}
	p.output = make([][]int32, p.ranks)
	for rank := range p.ranks {
		for _, c := range w.Calls {
			for src, n := range c.Routes[rank].RecvBytes {
				for i := int64(0); i < n && src != rank; i += unit {
					p.output[rank] = append(p.output[rank], p.cell(rank, c.Output[rank]+c.Routes[rank].RecvOffsets[src]+i))
				}
			}
		}
		slices.Sort(p.output[rank])
		p.output[rank] = slices.Compact(p.output[rank])
	}
	for rank := range p.ranks {
		var calls []program
		met := 0
		for call := range w.Calls {
			b := builder{p: p, me: rank, call: call}
			calls = append(calls, b.build(&met))
		}
		p.calls = append(p.calls, calls)
	}
	p.width = 2 + (p.ranks - 1)
	if o.Relaxed {
		p.width += pendingMax
	}
	return p
}

func (p *Protocol) cell(rank int, off int64) int32 {
	at := place{rank, off}
	c, ok := p.cells[at]
	if !ok {
		c = int32(len(p.names))
		p.cells[at] = c
		p.names = append(p.names, at)
	}
	return c
}

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

func (b *builder) flag() uint64 { return kernels.PacketFlag(b.epoch()) }

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
	pr := program{window: r.Window, want: map[int32]uint64{}}
	var pre []op
	b.add(op{kind: opBegin}, "begins")
	b.meet(met)
	pre = b.done()
	for i, src := range r.ReverseOrder {
		credits, body := b.recv(int(src))
		if i < r.Window && !b.p.o.Concurrent {
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
		n, at := min(r.RecvBytes[src]-asked, w.Channels.SlotBytes), w.Channels.Slot(src, k)
		if c.inPlace(dst) {
			n, at = r.RecvBytes[src]-asked, c.Output[dst]+r.RecvOffsets[src]+asked
			if r.ChunkBytes > 0 {
				n = min(n, r.ChunkBytes)
			}
		}
		places, lens = append(places, at), append(lens, n)
		asked += n
	}
	return places, lens
}

// line writes the fields of a line and then its sequence number.
func (b *builder) line(peer int, at int64, fields []int64, values []uint64, seq uint64, seqFirst, plain bool, name string) {
	lines := b.p.o.Lines
	store := func(off int64, v uint64, plain, fused bool, what string) {
		b.add(op{kind: opStore, cell: b.p.cell(peer, at+off), val: v, plain: plain, fused: fused}, "%s: %s", name, what)
	}
	if seqFirst {
		store(kernels.LineSeq, seq, plain, false, "sequence number "+seqName(seq))
	}
	for i, f := range fields {
		store(f, values[i], true, lines && i > 0, [...]string{kernels.LineTotal / 8: "bytes in all", kernels.LineOffset / 8: "place", kernels.LineLen / 8: "bytes here"}[f/8]+fmt.Sprintf(" %d", values[i]))
	}
	if !seqFirst {
		store(kernels.LineSeq, seq, plain, lines, "sequence number "+seqName(seq))
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
	at, name := b.p.w.Channels.Signal(b.parity(OneSignalLine), b.me), fmt.Sprintf("signal to rank %d", dst)
	if bug == TwoStateSemaphore {
		at, seq = b.p.w.Channels.Signal(0, b.me), 1
	}
	b.line(dst, at, []int64{kernels.LineTotal}, []uint64{uint64(total)}, seq, bug == SignalBeforeTotal, bug == PlainSignal, name)
}

// await waits for a signal of src.
func (b *builder) await(src int, total int64, seq uint64) {
	bug := b.p.o.Bug
	at := b.p.w.Channels.Signal(b.parity(OneSignalLine), src)
	if bug == TwoStateSemaphore {
		at = b.p.w.Channels.Signal(0, src)
		b.add(op{kind: opAwait, cell: b.p.cell(b.me, at), equal: true, val: 1}, "sees the semaphore of rank %d", src)
		b.add(op{kind: opStore, cell: b.p.cell(b.me, at), val: 0, fused: true}, "and clears it")
		return
	}
	b.add(op{kind: opAwait, cell: b.p.cell(b.me, at+kernels.LineSeq), val: seq}, "sees signal %s of rank %d", seqName(seq), src)
	b.add(op{kind: opExpect, cell: b.p.cell(b.me, at+kernels.LineTotal), val: uint64(total), fused: b.p.o.Lines}, "reads that rank %d sends %d bytes", src, total)
}

// grant posts the credit of chunk k, from 1.
func (b *builder) grant(src, k int, places, lens []int64) {
	r := b.p.w.Calls[b.call].Routes[b.me]
	b.line(src, b.p.w.Channels.Credit(b.me, k), []int64{kernels.LineOffset, kernels.LineLen, kernels.LineTotal},
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
	switch w.Channels.Mode(total) {
	case kernels.PacketMode:
		at := w.Channels.Packet(b.parity(OnePacketBuffer), src)
		b.add(op{kind: opAwait, cell: b.p.cell(b.me, at), equal: true, val: b.flag()<<32 | uint64(total)}, "sees a packet of %d bytes of rank %d", total, src)
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opTake, cell: b.p.cell(b.me, at+8+2*i), val: b.flag(), to: out(i)}, "takes word %d of the packet of rank %d", i/unit, src)
		}
		return nil, b.done()
	case kernels.EagerMode:
		b.await(src, total, kernels.Seq(b.epoch(), 1))
		at := w.Channels.Eager(b.parity(OneEagerBuffer), src)
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opCopy, cell: b.p.cell(b.me, at+i), to: out(i)}, "copies unit %d of rank %d out of eager staging", i/unit, src)
		}
		return nil, b.done()
	}
	places, lens := b.chunks(b.call, src, b.me)
	slots := w.Channels.Slots
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
	switch w.Channels.Mode(total) {
	case kernels.PacketMode:
		at, flag := w.Channels.Packet(b.parity(OnePacketBuffer), b.me), b.flag()<<32
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opPut, plain: true, cell: b.p.cell(dst, at+8+2*i), val: flag | val(i)}, "packet to rank %d: word %d", dst, i/unit)
		}
		b.add(op{kind: opStore, plain: true, cell: b.p.cell(dst, at), val: flag | uint64(total)}, "packet to rank %d: header", dst)
		return b.done(), nil
	case kernels.EagerMode:
		if bug == SignalBeforeData {
			b.signal(dst, total, kernels.LastSeq(b.epoch()))
		}
		at := w.Channels.Eager(b.parity(OneEagerBuffer), b.me)
		for i := int64(0); i < total; i += unit {
			b.add(op{kind: opPut, plain: true, cell: b.p.cell(dst, at+i), val: val(i)}, "puts unit %d into eager staging of rank %d", i/unit, dst)
		}
		if bug != SignalBeforeData {
			b.signal(dst, total, kernels.LastSeq(b.epoch()))
		}
		return b.done(), nil
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
			line := w.Channels.Credit(dst, k)
			b.add(op{kind: opAwait, equal: true, cell: b.p.cell(b.me, line+kernels.LineSeq), val: kernels.Seq(b.epoch(), k)}, "sees credit %d of rank %d", k, dst)
			b.add(op{kind: opCredit, cell: b.p.cell(b.me, line+kernels.LineOffset), to: b.p.cell(b.me, line+kernels.LineLen),
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

// The state: the cells, then for each rank its counters, the progress of its halves, the places of its credits and its
// pending stores.

// pendingMax is how many plain stores of a rank can wait to become visible.
const pendingMax = 12

const (
	stagePre = iota
	stageHalves
	stagePost
)

// local is a rank's first two words, unpacked.
type local struct {
	call, stage, pc int
	current         int  // half that is in the middle of an action, -1 for none
	returned        bool // the user has the buffers back
	at              [8]uint8
}

func (p *Protocol) base(rank int) int { return len(p.names) + rank*p.width }

func (p *Protocol) load(s []uint64, rank int) (l local) {
	v := s[p.base(rank)]
	l.call, l.stage, l.pc, l.current, l.returned = int(v&0xff), int(v>>8&0xff), int(v>>16&0xff), int(v>>24&0xff)-1, v>>32 != 0
	for i, v := 0, s[p.base(rank)+1]; i < len(l.at); i, v = i+1, v>>8 {
		l.at[i] = uint8(v)
	}
	return l
}

func (p *Protocol) save(s []uint64, rank int, l local) {
	v := uint64(l.call) | uint64(l.stage)<<8 | uint64(l.pc)<<16 | uint64(l.current+1)<<24
	if l.returned {
		v |= 1 << 32
	}
	s[p.base(rank)] = v
	v = 0
	for i := len(l.at) - 1; i >= 0; i-- {
		v = v<<8 | uint64(l.at[i])
	}
	s[p.base(rank)+1] = v
}

func (p *Protocol) pending(s []uint64, rank int) []uint64 {
	if !p.o.Relaxed {
		return nil
	}
	end := p.base(rank) + p.width
	return s[end-pendingMax : end]
}

// Start implements System.
func (p *Protocol) Start() []uint64 {
	s := make([]uint64, len(p.names)+p.ranks*p.width)
	for rank, cells := range p.output {
		for _, c := range cells {
			s[c] = poison
		}
		p.save(s, rank, local{current: -1, returned: true})
	}
	return s
}

// A move names a rank and a half, main for the parts before and after the halves, or drain plus the index of a pending store.
const (
	main  = 0xff
	drain = 0x100
)

func move(rank, what int) Move { return Move(rank<<16 | what) }

func (m Move) parts() (rank, what int) { return int(m >> 16), int(m & 0xffff) }

// Moves implements System.
func (p *Protocol) Moves(s []uint64, moves []Move) []Move {
	for rank := range p.ranks {
		for i, v := range p.pending(s, rank) {
			if v != 0 {
				moves = append(moves, move(rank, drain+i))
			}
		}
		l := p.load(s, rank)
		if l.call == len(p.w.Calls) {
			continue
		}
		pr := &p.calls[rank][l.call]
		switch l.stage {
		case stagePre:
			if p.ready(s, rank, &pr.pre[l.pc]) {
				moves = append(moves, move(rank, main))
			}
			continue
		case stagePost:
			moves = append(moves, move(rank, main))
			continue
		}
		if l.current >= 0 {
			o := &pr.half(l.current)[l.at[l.current]]
			if p.ready(s, rank, o) {
				moves = append(moves, move(rank, l.current))
				continue
			}
			if o.kind != opTake {
				continue // it waits for its own stores
			}
		}
		for i := range len(pr.sends) + len(pr.recvs) {
			if h := pr.half(i); int(l.at[i]) < len(h) && p.inWindow(pr, &l, i) && p.ready(s, rank, &h[l.at[i]]) {
				moves = append(moves, move(rank, i))
			}
		}
	}
	return moves
}

// inWindow reports whether half i may run: the window begins at the first half of its direction that is not done. Sends
// have none, their receivers' credits pace them.
func (p *Protocol) inWindow(pr *program, l *local, i int) bool {
	head := 0
	if i >= len(pr.sends) {
		head = len(pr.sends)
	} else if p.o.Bug != WindowOnSends {
		return true
	}
	for head < i && int(l.at[head]) == len(pr.half(head)) {
		head++
	}
	return i < head+pr.window
}

// ready reports whether the op can happen now.
func (p *Protocol) ready(s []uint64, rank int, o *op) bool {
	switch o.kind {
	case opAwait:
		if o.equal {
			return s[o.cell] == o.val
		}
		return s[o.cell] >= o.val
	case opTake:
		return s[o.cell]>>32 == o.val
	case opStore, opPut:
		if !o.plain {
			for _, v := range p.pending(s, rank) {
				if v != 0 {
					return false // a release comes after them
				}
			}
		}
	}
	return true
}

// Apply implements System.
func (p *Protocol) Apply(s []uint64, m Move) error {
	rank, what := m.parts()
	if what >= drain {
		list := p.pending(s, rank)
		v := list[what-drain]
		copy(list[what-drain:], list[what-drain+1:])
		list[pendingMax-1] = 0
		s[v>>52-1] = v << 12 >> 12
		return nil
	}
	l := p.load(s, rank)
	pr := &p.calls[rank][l.call]
	ops, pc := p.where(pr, &l, what)
	for first := true; first || pc < len(ops) && ops[pc].fused; first = false {
		if err := p.do(s, rank, &l, &ops[pc], what); err != nil {
			return fmt.Errorf("rank %d, %s: %w", rank, ops[pc].what, err)
		}
		pc++
	}
	if what == main {
		l.pc = pc
	} else {
		l.at[what], l.current = uint8(pc), -1
		if pc < len(ops) && ops[pc].kind != opAwait && !p.o.Concurrent {
			l.current = what
		}
	}
	p.advance(pr, &l)
	p.save(s, rank, l)
	return nil
}

func (p *Protocol) where(pr *program, l *local, what int) ([]op, int) {
	switch {
	case what != main:
		return pr.half(what), int(l.at[what])
	case l.stage == stagePre:
		return pr.pre, l.pc
	default:
		return pr.post, l.pc
	}
}

// advance moves a rank to the next stage, or call, when this one is done.
func (p *Protocol) advance(pr *program, l *local) {
	if l.stage == stagePre && l.pc == len(pr.pre) {
		l.stage, l.pc = stageHalves, 0
	}
	if l.stage == stageHalves {
		left := [2]int{}
		for i := range len(pr.sends) + len(pr.recvs) {
			if int(l.at[i]) < len(pr.half(i)) {
				if i < len(pr.sends) {
					left[0]++
				} else {
					left[1]++
				}
			}
		}
		if left[1] == 0 && (left[0] == 0 || p.o.Bug == ReturnBeforeSends) {
			l.returned = true
		}
		if left[0]+left[1] == 0 {
			l.stage, l.at, l.current = stagePost, [8]uint8{}, -1
		}
	}
	if l.stage == stagePost && l.pc == len(pr.post) {
		l.stage, l.pc = stagePre, 0
		l.call++
	}
}

// do is the effect of one op.
func (p *Protocol) do(s []uint64, rank int, l *local, o *op, half int) error {
	switch o.kind {
	case opBegin:
		for _, c := range p.output[rank] {
			if s[c] != poison {
				return fmt.Errorf("%w: %s is %s", ErrLate, p.name(c), valueName(s[c]))
			}
		}
		for other := range p.ranks {
			if to := p.load(s, other); p.o.Bug == NoBug && to.call+1 < l.call {
				return fmt.Errorf("%w: rank %d is in call %d", ErrAhead, other, to.call+1)
			}
		}
		l.returned = false
	case opCheck:
		pr := &p.calls[rank][l.call]
		for _, c := range p.output[rank] {
			want, ok := pr.want[c]
			if !ok {
				want = poison
			}
			if s[c] != want {
				return fmt.Errorf("%w: %s is %s, want %s", ErrData, p.name(c), valueName(s[c]), valueName(want))
			}
			s[c] = poison
		}
	case opStore:
		return p.store(s, rank, o.cell, o.val, o.plain)
	case opPut:
		v, cell := o.val, o.cell
		if l.returned {
			v = v>>32<<32 | junk
		}
		if o.granted {
			at := place{o.from, int64(s[p.base(rank)+2+half]) + o.off}
			c, ok := p.cells[at]
			if !ok {
				return fmt.Errorf("%w: at offset %d of rank %d", ErrWild, at.off, at.rank)
			}
			cell = c
		}
		return p.store(s, rank, cell, v, o.plain)
	case opCredit:
		total := p.cells[place{rank, p.names[o.to].off - kernels.LineLen + kernels.LineTotal}]
		if s[o.to] != o.aux[0] || s[total] != o.aux[1] {
			return fmt.Errorf("%w: %d of %d bytes, want %d of %d", ErrCredit, s[o.to], s[total], o.aux[0], o.aux[1])
		}
		s[p.base(rank)+2+half] = s[o.cell]
	case opExpect:
		if s[o.cell] != o.val {
			return fmt.Errorf("%w: %d", ErrCount, s[o.cell])
		}
	case opTake:
		s[o.to] = s[o.cell] << 32 >> 32
	case opCopy:
		s[o.to] = s[o.cell]
	}
	return nil
}

// store writes a word, at once or whenever it drains.
func (p *Protocol) store(s []uint64, rank int, cell int32, v uint64, plain bool) error {
	list := p.pending(s, rank)
	if list == nil || !plain {
		s[cell] = v
		return nil
	}
	// Entries are sorted, since the order in which they wait means nothing. A second store to a word makes the first
	// one visible: the stores of one thread to one word keep their order.
	i := 0
	for ; i < pendingMax && list[i] != 0 && int32(list[i]>>52) <= cell+1; i++ {
		if int32(list[i]>>52) == cell+1 {
			s[cell] = list[i] << 12 >> 12
			list[i] = uint64(cell+1)<<52 | v
			return nil
		}
	}
	if list[pendingMax-1] != 0 {
		return fmt.Errorf("more than %d pending stores", pendingMax)
	}
	copy(list[i+1:], list[i:pendingMax-1])
	list[i] = uint64(cell+1)<<52 | v
	return nil
}

// Describe implements System.
func (p *Protocol) Describe(s []uint64, m Move) Step {
	rank, what := m.parts()
	if what >= drain {
		v := p.pending(s, rank)[what-drain]
		return Step{rank, fmt.Sprintf("(its store to %s becomes visible)", p.name(int32(v>>52-1)))}
	}
	l := p.load(s, rank)
	ops, pc := p.where(&p.calls[rank][l.call], &l, what)
	text := ops[pc].what
	for pc++; pc < len(ops) && ops[pc].fused; pc++ {
		text += ", " + strings.TrimPrefix(ops[pc].what, fmt.Sprintf("call %d: ", l.call+1))
	}
	return Step{rank, text}
}

// End implements System: a state in which nothing moves is good when all ranks have finished all calls and nobody has
// written to an output since.
func (p *Protocol) End(s []uint64) error {
	var waits []string
	for rank := range p.ranks {
		l := p.load(s, rank)
		if l.call == len(p.w.Calls) {
			for _, c := range p.output[rank] {
				if s[c] != poison {
					return fmt.Errorf("%w: %s is %s", ErrLate, p.name(c), valueName(s[c]))
				}
			}
			continue
		}
		pr := &p.calls[rank][l.call]
		stuck := func(o *op) { waits = append(waits, fmt.Sprintf("rank %d is stuck before %q", rank, o.what)) }
		if l.stage == stagePre {
			stuck(&pr.pre[l.pc])
			continue
		}
		for i := range len(pr.sends) + len(pr.recvs) {
			if h := pr.half(i); p.inWindow(pr, &l, i) && int(l.at[i]) < len(h) {
				stuck(&h[l.at[i]])
			}
		}
	}
	if waits != nil {
		return fmt.Errorf("%w: %s", ErrDeadlock, strings.Join(waits, "; "))
	}
	return nil
}

func (p *Protocol) name(c int32) string {
	return fmt.Sprintf("offset %d of rank %d", p.names[c].off, p.names[c].rank)
}

func valueName(v uint64) string {
	switch {
	case v == poison:
		return "poison"
	case v == junk:
		return "what the user wrote after the call"
	case v>>31 == 1:
		return fmt.Sprintf("unit %d of call %d from rank %d to rank %d", v&0xff, v>>24&0x7f+1, v>>16&0xff, v>>8&0xff)
	}
	return fmt.Sprint(v)
}
