package host

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// dispatches are the launches of one dispatcher. It is a family.
type dispatches struct {
	common
	m       *kernels.DispatchBounds
	block   dispatchBlock
	handles []routing
	beyond  *beyond // nil on one host
}

func newDispatches(m *kernels.DispatchBounds, offset int64) *dispatches {
	f := &dispatches{m: m, block: newDispatchBlock(m, offset)}
	if m.Hosts != nil {
		f.beyond = newBeyond(m.Hosts)
	}
	return f
}

func (f *dispatches) layout() kernels.Layout { return f.block.layout(f.m) }

// open makes room for the routing of each handle.
func (f *dispatches) open(e *Engine) {
	m := f.m
	if f.beyond != nil {
		f.beyond.open(e, f.block.beyondLine)
	}
	f.handles = make([]routing, len(m.Handles))
	rankOf := make([]int32, 0, m.Slots())
	for r := range m.Ranks {
		for range m.Local(r) {
			rankOf = append(rankOf, int32(r))
		}
	}
	for i := range f.handles {
		f.handles[i].init(m, rankOf)
	}
	if f.beyond != nil {
		f.beyond.handles = f.handles
	}
}

// callIn is what all operations of the family have.
func callIn(op kernels.Operation) *kernels.DispatchCall {
	switch a := op.(type) {
	case *kernels.Dispatch:
		return &a.DispatchCall
	case *kernels.Combine:
		return &a.DispatchCall
	case *kernels.CombineBackward:
		return &a.DispatchCall
	}
	return nil
}

func (f *dispatches) run(p *port, op kernels.Operation) error {
	switch a := op.(type) {
	case *kernels.Results:
		f.copyResults(a)
		return nil
	case *kernels.Expand:
		return expandRows(a)
	case *kernels.Fold:
		return foldRows(a)
	}
	m := dispatchScratch.Get().(*dispatching)
	m.enter(p, f, op)
	err := m.run(op)
	m.put()
	return err
}

// run does the halves of a call that the launch asks for.
func (m *dispatching) run(op kernels.Operation) (err error) {
	sends, receives := m.call.Phase&kernels.Send != 0, m.call.Phase&kernels.Receive != 0
	switch a := op.(type) {
	case *kernels.Dispatch:
		if sends {
			err = m.send(a)
		}
		if err == nil && receives {
			err = m.receive(a)
		}
		if err != nil && a.Op == kernels.OpDispatch {
			m.r.err = err
		}
	case *kernels.Combine:
		if sends {
			err = m.show(a)
		}
		if err == nil && receives {
			err = m.gather(a)
		}
	case *kernels.CombineBackward:
		err = m.gradients(a)
	}
	return err
}

// dispatchScratch keeps the scratch of kernels between launches.
var dispatchScratch = sync.Pool{New: func() any { return new(dispatching) }}

// dispatching is a launch (see dispatchBlock) as one rank goes through it.
type dispatching struct {
	plain
	e     *Engine
	m     *kernels.DispatchBounds
	block *dispatchBlock
	b     *beyond // nil on one host
	call  *kernels.DispatchCall
	r     *routing
	h     *kernels.DispatchHandle
	w     waiter

	counts  []int32  // [ranks, slots + ranks], of a dispatch
	base    []int64  // the first row of this rank in every slot, or on every rank
	outlets []outlet // by rank
	token   quantized
	idle    []int32 // tokens whose rows are not ready yet
	open    []bool  // [ranks, groups] whose rows are ready
	landed  []int32 // by slot, not told yet
	wrote   []int64 // bytes by rank
	// With Masks: the wait is for rows, the ranks that it went on without, and the rows that present lists.
	rowsComing bool
	lost       uint64
	here       []routedRow
	sums       sums

	f32  gatherer[float32]
	f16  gatherer[vec.Float16]
	bf16 gatherer[vec.BFloat16]
}

// enter begins a launch.
func (m *dispatching) enter(p *port, f *dispatches, op kernels.Operation) {
	c := callIn(op)
	m.e, m.m, m.block, m.b, m.call = p.e, f.m, &f.block, f.beyond, c
	m.r, m.h = &f.handles[c.Handle], &f.m.Handles[c.Handle]
	if c.Routing.State.Bytes > 0 && c.Phase&kernels.Send != 0 {
		m.recall(c.Routing.State.Mem)
	}
	m.rowsComing, m.lost = false, 0
	m.w.begin(p, m, p.call(op, m.block.epoch(), m.r.epoch), c.Timeout)
	if m.b != nil {
		m.w.crosses(m.b.fars)
	}
	if m.w.masks = nil; f.m.Masks {
		m.w.masks = m
	}
}

// sizes is not known in words: what a rank gets of a peer is what they tell each other.
func (m *dispatching) sizes(int) string { return "" }

func (m *dispatching) put() {
	m.w.leave()
	m.e, m.m, m.block, m.b, m.call, m.r, m.h = nil, nil, nil, nil, nil, nil, nil
	clear(m.outlets)
	dispatchScratch.Put(m)
}

// sized is v with length n and undefined content.
func sized[T any](v []T, n int) []T {
	if cap(v) < n {
		return make([]T, n)
	}
	return v[:n]
}

// notice is what a rank tells the others of a call: the kernels.CallWord, where in its segment rows and weights may be read and written, and
// its handle.
type notice struct {
	call, read, write         uint64
	readWeights, writeWeights uint64
	handle, flags             uint64
}

// words are the numbers of a notice as they travel, behind LineSeq.
func (n *notice) words() [noticeWords]uint64 {
	return [...]uint64{n.call, n.read, n.write, n.readWeights, n.writeWeights, n.handle, n.flags}
}

// term is the writer's, with Masks.
func (n notice) term() uint64 { return n.flags >> flagTerm }

// noticeOf is the inverse: word i is at byte 8*i of a line.
func noticeOf(word func(at int64) uint64) notice {
	return notice{
		call: word(8), read: word(16), write: word(24), readWeights: word(32), writeWeights: word(40), handle: word(48), flags: word(56),
	}
}

// begin counts the call. It takes first what other hosts have sent in earlier ones: they write to the same place now.
func (m *dispatching) begin() error {
	if err := m.unmasked(); err != nil {
		return err
	}
	if m.b != nil {
		m.b.hosts.Rail.Resume() // what comes concerns all ranks of this host, which it wakes
		if err := m.settle(); err != nil {
			return err
		}
	}
	m.r.epoch = m.e.count(m.block.epoch())
	m.w.call.epoch = m.r.epoch
	m.r.cast, m.rowsComing, m.lost = ^uint64(0), false, 0
	return nil
}

// meet sends a notice to all ranks and takes in theirs. counts has the counts of all ranks in a dispatch, in which own ones are there
// already; those of the others are written. failed is an error that every rank has; nothing moves then.
func (m *dispatching) meet(n notice, counts []int32) (failed, err error) {
	e, me := m.e, m.e.space.Rank
	n.handle = uint64(m.call.Handle)
	if m.m.Masks {
		n.flags |= e.word(me, m.block.term()).Load() << flagTerm
	}
	m.r.notices = sized(m.r.notices, m.m.Ranks)
	m.r.notices[m.m.Rank] = n
	each := len(m.r.counts)
	if m.b != nil {
		if err := m.tellBeyond(n, counts); err != nil {
			return nil, err
		}
	}
	line, notices := m.block.notice(m.r.epoch, me), lines{&m.w, m.block.notice(m.r.epoch, 0)}
	for i := 1; i < e.space.Size; i++ {
		p := e.peer(i)
		for i, v := range n.words() {
			e.word(p, line+8*int64(i+1)).Store(v)
		}
		notices.signal(p)
	}
	take := func(peer, in int) {
		at, src := m.block.notice(m.r.epoch, peer), m.name(peer)
		m.r.notices[src] = noticeOf(func(word int64) uint64 { return e.word(in, at+word).Load() })
		if counts != nil {
			copy(counts[src*each:][:each], m.countsOf(in, src))
		}
	}
	if m.m.Masks {
		if err = m.await(notices, nil); err == nil {
			m.lost = 0
			err = m.decide(take)
		}
	} else {
		err = m.await(notices, func(peer int) { take(peer, me) })
	}
	if err == nil && m.b != nil {
		err = m.hearBeyond(counts)
	}
	if err != nil {
		return nil, err
	}
	return m.verdict(), nil
}

// name is the number in the group of a rank of the space, which this host's have.
func (m *dispatching) name(peer int) int { return m.e.space.Name(peer) }

// at is the number in the space of a rank of the group, -1 for those of other hosts.
func (m *dispatching) at(rank int) int {
	if m.b == nil {
		return rank
	}
	return m.b.place(rank)
}

// verdict is an error when the notices do not fit together. All ranks come to the same.
func (m *dispatching) verdict() error {
	for _, n := range m.r.notices {
		if kernels.CalledOp(n.call) == kernels.OpMake {
			mine := m.r.notices[m.m.Rank].call
			if kernels.CalledOp(mine) == kernels.OpRefused {
				mine = m.m.CallWord(m.call.Op, 0, m.r.call)
			}
			return m.m.Shared.Making(m.r.epoch, mine)
		}
	}
	first := m.r.notices[0].call
	for r := 1; r < m.m.Ranks && !m.in(r-1); r++ {
		first = m.r.notices[r].call
	}
	for r, n := range m.r.notices {
		if !m.in(r) {
			continue
		}
		if kernels.CalledOp(n.call) != kernels.OpRefused {
			continue
		}
		if n.call>>8 == refusedIndex {
			return &kernels.IndexError{
				Call: m.r.epoch, Rank: r, Token: int(n.read), Choice: int(n.readWeights), Expert: int64(n.write), Experts: m.m.Experts,
			}
		}
		return &kernels.ShortError{Call: m.r.epoch, Rank: r, Have: int64(n.read), Need: int64(n.write)}
	}
	for r, n := range m.r.notices {
		if n.call != first && m.in(r) {
			return m.m.Disorder(m.r.epoch, r, first, n.call)
		}
	}
	asked := uint64(0)
	for _, n := range m.r.notices {
		asked |= n.flags & flagAsks
	}
	for r, n := range m.r.notices {
		if asked != 0 && n.flags&flagHasNone != 0 {
			return &kernels.ShortError{Call: m.r.epoch, Rank: r, Need: int64(n.writeWeights)}
		}
	}
	return nil
}

// peer is the handle that rank p of the group uses in this call.
func (m *dispatching) peer(p int) *kernels.DispatchHandle { return &m.m.Handles[m.r.notices[p].handle] }

// finish tells all ranks that this one is through with their segments, and waits until all are through with its own.
func (m *dispatching) finish() error {
	if err := m.unmasked(); err != nil { // the others may have gone on, and what this rank has read be of a later call
		return err
	}
	for i := 1; i < m.e.space.Size; i++ {
		p := m.e.peer(i)
		m.done(m.peer(m.name(p))).signal(p)
	}
	return m.await(m.done(m.h), nil)
}

// done is the row of done lines of a handle.
func (m *dispatching) done(h *kernels.DispatchHandle) lines { return lines{&m.w, m.block.done(h, 0)} }

// await waits for a line of every peer, and counts for how long. arrived, if set, is called for each as it comes.
func (m *dispatching) await(l lines, arrived func(src int)) error {
	return l.awaitAll(func(p int) {
		if m.w.polls > 0 {
			m.waited(m.name(p), time.Since(m.w.since))
		}
		if arrived != nil {
			arrived(p)
		}
	})
}

// The counters, see kernels.DispatchBounds.CounterWords.

func (m *dispatching) counter(i int) *atomic.Uint64 { return shm.Word(m.m.Counters.Mem, 8*int64(i)) }

func (m *dispatching) sent(p int, bytes int64) { m.counter(m.m.Experts + p).Add(uint64(bytes)) }

func (m *dispatching) waited(p int, d time.Duration) {
	m.counter(m.m.Experts + m.m.Ranks + p).Add(uint64(d.Nanoseconds()))
}
