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
	m       *kernels.DispatchBounds
	block   dispatchBlock
	handles []routing
}

func newDispatches(m *kernels.DispatchBounds, offset int64) *dispatches {
	return &dispatches{m: m, block: newDispatchBlock(m, offset)}
}

func (*dispatches) defaults() {}

func (f *dispatches) layout() kernels.Layout { return f.block.layout() }

// open makes room for the routing of each handle.
func (f *dispatches) open(*Engine) {
	m := f.m
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
}

func (*dispatches) ready(*Engine) kernels.Traits { return kernels.Traits{} }

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
	if r, ok := op.(*kernels.Results); ok {
		f.copyResults(r)
		return nil
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
	e     *Engine
	m     *kernels.DispatchBounds
	block *dispatchBlock
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
	sums    sums

	f32  gatherer[float32]
	f16  gatherer[vec.Float16]
	bf16 gatherer[vec.BFloat16]
}

// enter begins a launch.
func (m *dispatching) enter(p *port, f *dispatches, op kernels.Operation) {
	c := callIn(op)
	m.e, m.m, m.block, m.call = p.e, f.m, &f.block, c
	m.r, m.h = &f.handles[c.Handle], &f.m.Handles[c.Handle]
	if c.Routing.State.Bytes > 0 && c.Phase&kernels.Send != 0 {
		m.recall(c.Routing.State.Mem)
	}
	m.w.begin(p, m, p.call(op, m.block.epoch(), m.r.epoch), c.Timeout)
}

// sizes is not known in words: what a rank gets of a peer is what they tell each other.
func (m *dispatching) sizes(int) string { return "" }

func (m *dispatching) put() {
	m.w.leave()
	m.e, m.m, m.block, m.call, m.r, m.h = nil, nil, nil, nil, nil, nil
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

// notice is what a rank tells the others of a call.
type notice struct {
	call, read, write         uint64
	readWeights, writeWeights uint64
	handle, flags             uint64
}

// begin counts the call.
func (m *dispatching) begin() {
	m.r.epoch = m.e.count(m.block.epoch())
	m.w.call.epoch = m.r.epoch
}

// meet sends a notice to all ranks and takes in theirs. arrived, when set, is told of each as it comes. failed is an error that
// every rank has; nothing moves then.
func (m *dispatching) meet(n notice, arrived func(src int)) (failed, err error) {
	e, me, size := m.e, m.e.space.Rank, m.e.space.Size
	n.handle = uint64(m.call.Handle)
	m.r.notices = sized(m.r.notices, size)
	m.r.notices[me] = n
	line, notices := m.block.notice(m.r.epoch, me), lines{&m.w, m.block.notice(m.r.epoch, 0)}
	for i := 1; i < size; i++ {
		p := e.peer(i)
		for _, w := range [...]struct {
			at    int64
			value uint64
		}{
			{noticeCall, n.call}, {noticeRead, n.read}, {noticeWrite, n.write}, {noticeReadWeights, n.readWeights},
			{noticeWriteWeights, n.writeWeights}, {noticeHandle, n.handle}, {noticeFlags, n.flags},
		} {
			e.word(p, line+w.at).Store(w.value)
		}
		notices.signal(p)
	}
	err = m.await(notices, func(src int) {
		at := m.block.notice(m.r.epoch, src)
		m.r.notices[src] = notice{
			call: e.word(me, at+noticeCall).Load(), read: e.word(me, at+noticeRead).Load(), write: e.word(me, at+noticeWrite).Load(),
			readWeights: e.word(me, at+noticeReadWeights).Load(), writeWeights: e.word(me, at+noticeWriteWeights).Load(),
			handle: e.word(me, at+noticeHandle).Load(), flags: e.word(me, at+noticeFlags).Load(),
		}
		if arrived != nil {
			arrived(src)
		}
	})
	if err != nil {
		return nil, err
	}
	return m.verdict(), nil
}

// verdict is an error when the notices do not fit together. All ranks come to the same.
func (m *dispatching) verdict() error {
	first := m.r.notices[0].call
	for r, n := range m.r.notices {
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
		if n.call != first {
			return &kernels.OrderError{Call: m.r.epoch, Rank: r, First: first, Here: n.call}
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

// peer is the handle that rank p uses in this call.
func (m *dispatching) peer(p int) *kernels.DispatchHandle { return &m.m.Handles[m.r.notices[p].handle] }

// finish tells all ranks that this one is through with their segments, and waits until all are through with its own.
func (m *dispatching) finish() error {
	for i := 1; i < m.e.space.Size; i++ {
		p := m.e.peer(i)
		m.done(m.peer(p)).signal(p)
	}
	return m.await(m.done(m.h), nil)
}

// done is the row of done lines of a handle.
func (m *dispatching) done(h *kernels.DispatchHandle) lines { return lines{&m.w, m.block.done(h, 0)} }

// await waits for a line of every peer, and counts for how long. arrived, if set, is called for each as it comes.
func (m *dispatching) await(l lines, arrived func(src int)) error {
	return l.awaitAll(func(p int) {
		if m.w.polls > 0 {
			m.waited(p, time.Since(m.w.since))
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
