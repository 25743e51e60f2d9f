package explore

import (
	"fmt"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels/host"
)

// The state: the cells, then for each rank its counters, the progress of its halves, the places of its credits and its
// pending stores.

// pendingMax is how many plain stores of a rank can wait to become visible.
const pendingMax = 12

const (
	stagePre = iota
	stageHalves
	stagePost
	stageQuit
)

// local is a rank's first two words, unpacked.
type local struct {
	call, stage, pc int
	current         int  // half that is in the middle of an action, -1 for none
	returned        bool // the user has the buffers back
	quit            bool // after giving up
	at              [8]uint8
}

func (p *Protocol) base(rank int) int { return len(p.names) + rank*p.width }

func (p *Protocol) load(s []uint64, rank int) (l local) {
	v := s[p.base(rank)]
	l.call, l.stage, l.pc, l.current = int(v&0xff), int(v>>8&0xff), int(v>>16&0xff), int(v>>24&0xff)-1
	l.returned, l.quit = v>>32&1 != 0, v>>33 != 0
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
	if l.quit {
		v |= 1 << 33
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

// A move names a rank and a half, main for the parts before and after the halves, quit, or drain plus the index of a pending
// store.
const (
	main  = 0xff
	quit  = 0xfe
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
		case stageQuit:
			if p.ready(s, rank, &pr.quit[l.pc]) {
				moves = append(moves, move(rank, main))
			}
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
		if p.o.Quits && rank == 0 && l.current < 0 {
			moves = append(moves, move(rank, quit))
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
	if what == quit {
		l.stage, l.pc = stageQuit, 0
		p.save(s, rank, l)
		return nil
	}
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
	case l.stage == stageQuit:
		return pr.quit, l.pc
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
		total := p.cells[place{rank, p.names[o.to].off - host.LineLen + host.LineTotal}]
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
	case opPull:
		s[o.to] = o.val
		if from := p.load(s, o.from); from.quit || from.returned || from.call != l.call {
			s[o.to] = junk
		}
	case opQuit:
		l.quit, l.returned, l.call = true, true, len(p.w.Calls)
		for _, c := range p.output[rank] {
			s[c] = poison
		}
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
	if what == quit {
		return Step{rank, fmt.Sprintf("call %d: is about to give up", l.call+1)}
	}
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
	gone := false
	for rank := range p.ranks {
		l := p.load(s, rank)
		gone = gone || l.quit
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
	if waits != nil && !gone {
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
