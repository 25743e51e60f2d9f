package host

import (
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Dispatch launches the kernel that sends tokens to their experts on s, or runs it at once when s is nil. Every rank of
// the heap must launch its part. On a stream the error is the stream's.
func (e *Engine) Dispatch(s device.Stream, a *Dispatch) error {
	return e.bare.launch(s, (*dispatch)(a))
}

type dispatch Dispatch

func (a *dispatch) run(p *port) error {
	e, m := p.e, meetings.Get().(*meeting)
	err := m.dispatch(e, (*Dispatch)(a))
	m.put()
	a.Routing.Err = err
	if a.Done != nil {
		a.Done(err)
	}
	return err
}

// meetings keeps the scratch of kernels between launches.
var meetings = sync.Pool{New: func() any { return new(meeting) }}

// meeting is a call in two phases (see Lanes) as one rank goes through it.
type meeting struct {
	e       *Engine
	lanes   *Lanes
	op      kernels.MoEOp
	epoch   uint64
	w       waiter
	waiting []int32 // peers whose line is not there yet

	// What the notices say, by rank.
	calls, read, write []uint64
	counts             []int32 // [ranks, slots], of a dispatch

	// Scratch of dispatch: the first row of this rank in every slot, and twins listed for each rank.
	base  []int64
	twins []int32

	f32  gatherer[float32]
	f16  gatherer[vec.Float16]
	bf16 gatherer[vec.BFloat16]
}

func (m *meeting) put() {
	m.w.leave()
	m.e, m.lanes = nil, nil
	meetings.Put(m)
}

// sized is v with length n and undefined content.
func sized[T any](v []T, n int) []T {
	if cap(v) < n {
		return make([]T, n)
	}
	return v[:n]
}

func (m *meeting) sizes(int) string { return "" }

// begin counts the call.
func (m *meeting) begin(e *Engine, l *Lanes, op kernels.MoEOp, timeout time.Duration) {
	m.e, m.lanes, m.op = e, l, op
	count := e.word(e.space.Rank, l.Epoch())
	m.epoch = count.Load() + 1
	count.Store(m.epoch)
	m.w.begin(e, m, call{opMoEFirst + opcode(op), l.Epoch(), m.epoch}, timeout)
	n := e.space.Size
	m.calls, m.read, m.write = sized(m.calls, n), sized(m.read, n), sized(m.write, n)
}

// notify writes this rank's notice to all ranks.
func (m *meeting) notify(call uint64, read, write int64) {
	e, me := m.e, m.e.space.Rank
	m.calls[me], m.read[me], m.write[me] = call, uint64(read), uint64(write)
	line := m.lanes.Notice(me)
	for i := 1; i < e.space.Size; i++ {
		p := (me + i) % e.space.Size
		e.word(p, line+NoticeCall).Store(call)
		e.word(p, line+NoticeRead).Store(uint64(read))
		e.word(p, line+NoticeWrite).Store(uint64(write))
		m.post(p, line)
	}
}

// noticed takes in the notice of src.
func (m *meeting) noticed(src int) {
	e, me, line := m.e, m.e.space.Rank, m.lanes.Notice(src)
	m.calls[src] = e.word(me, line+NoticeCall).Load()
	m.read[src] = e.word(me, line+NoticeRead).Load()
	m.write[src] = e.word(me, line+NoticeWrite).Load()
}

// finish tells all ranks that this one is through with their segments, and waits until all are through with its own.
func (m *meeting) finish() error {
	e, me := m.e, m.e.space.Rank
	for i := 1; i < e.space.Size; i++ {
		m.post((me+i)%e.space.Size, m.lanes.Done(me))
	}
	return m.await(m.lanes.Done(0), nil)
}

// post publishes a line that this rank has written to p.
func (m *meeting) post(p int, line int64) {
	m.e.word(p, line+kernels.LineSeq).Store(kernels.LastSeq(m.epoch))
	m.e.ring(p)
}

// await returns when every peer has written its line of this call, the first of which is given. arrived, when set, is
// told of each as it comes.
func (m *meeting) await(first int64, arrived func(src int)) error {
	e, n := m.e, m.e.space.Size
	m.waiting = m.waiting[:0]
	for i := 1; i < n; i++ {
		m.waiting = append(m.waiting, int32((e.space.Rank+i)%n))
	}
	for len(m.waiting) > 0 {
		left := m.waiting[:0]
		for _, p := range m.waiting {
			if e.word(e.space.Rank, first+int64(p)*kernels.LineBytes+kernels.LineSeq).Load() < kernels.LastSeq(m.epoch) {
				left = append(left, p)
			} else if arrived != nil {
				arrived(int(p))
			}
		}
		moved := len(left) < len(m.waiting)
		m.waiting = left
		if moved {
			m.w.busy()
		} else if err := m.w.idle(int(m.waiting[0])); err != nil {
			return e.fail(int(m.waiting[0]), m.op.String(), m.epoch, err)
		}
	}
	return nil
}

// verdict is an error when the notices do not fit together. All ranks come to the same.
func (m *meeting) verdict() error {
	for r, c := range m.calls {
		if kernels.MoEOp(c&0xff) == kernels.RefusedOp {
			return &kernels.ShortError{Call: m.epoch, Rank: r, Have: int64(m.read[r]), Need: int64(m.write[r])}
		}
	}
	for r, c := range m.calls {
		if c != m.calls[0] {
			return &kernels.OrderError{Call: m.epoch, Rank: r, First: m.calls[0], Here: c}
		}
	}
	return nil
}

func (m *meeting) dispatch(e *Engine, a *Dispatch) error {
	m.begin(e, a.Lanes, kernels.DispatchOp, a.Timeout)
	me, n, r, slots := e.space.Rank, e.space.Size, a.Routing, a.Lanes.Slots
	r.Call = m.epoch

	m.twins = sized(m.twins, n)
	clear(m.twins)
	m.counts = sized(m.counts, n*slots)
	copy(m.counts[me*slots:], r.Counts)
	for p := range n {
		if p != me {
			copy(m.countsFrom(p, me), r.Counts)
		}
	}
	m.notify(kernels.CallWord(kernels.DispatchOp, m.epoch), 0, a.Out)
	err := m.await(a.Lanes.Notice(0), func(src int) {
		m.noticed(src)
		copy(m.counts[src*slots:(src+1)*slots], m.countsFrom(me, src))
	})
	if err != nil {
		return err
	}
	failed := m.verdict()
	if failed == nil {
		failed = m.place(a)
	}
	if failed == nil {
		m.scatter(a)
	} else {
		clear(r.SlotRows)
		clear(r.SlotFirst)
		r.OutRows = 0
	}
	for p := range n {
		if p != me {
			e.word(p, a.Lanes.Done(me)+DoneTwins).Store(uint64(m.twins[p]))
			m.post(p, a.Lanes.Done(me))
		}
	}
	if failed == nil {
		clearPadding(a.Experts, r, e.space.Range(me, a.Out, r.OutRows*a.Experts.RowBytes()))
	}
	err = m.await(a.Lanes.Done(0), func(src int) { m.makeTwins(a, src) })
	if failed != nil && err == nil {
		err = failed
	}
	return err
}

// countsFrom is where src tells rank p its counts.
func (m *meeting) countsFrom(p, src int) []int32 {
	return shm.View[int32](m.e.space.Range(p, m.lanes.Counts(src), 4*int64(m.lanes.Slots)))
}

// place computes from the counts of all ranks where every row goes. The error is the same on all of them.
func (m *meeting) place(a *Dispatch) error {
	me, n, x, r := m.e.space.Rank, m.e.space.Size, a.Experts, a.Routing
	slots := a.Lanes.Slots
	m.base = sized(m.base, slots)
	for p := range n {
		at := int64(0)
		for s := int(x.First[p]); s < int(x.First[p+1]); s++ {
			first := at
			for src := range n {
				if src == me {
					m.base[s] = at
				}
				at += int64(m.counts[src*slots+s])
			}
			rows := at - first
			if x.Capacity > 0 && rows > x.Capacity {
				return &kernels.OverflowError{Call: m.epoch, Rank: p, Expert: int(x.Expert[s]), Rows: rows, Limit: x.Capacity}
			}
			if p == me {
				i := s - int(x.First[me])
				r.SlotFirst[i], r.SlotRows[i] = first, rows
			}
			at = first + x.Span(rows)
		}
		if at > x.Rows {
			return &kernels.OverflowError{Call: m.epoch, Rank: p, Expert: -1, Rows: at, Limit: x.Rows}
		}
		if p == me {
			r.OutRows = at
		}
	}
	for src := range n {
		r.RecvRows[src] = 0
		for s := x.First[me]; s < x.First[me+1]; s++ {
			r.RecvRows[src] += int64(m.counts[src*slots+int(s)])
		}
	}
	return nil
}

// scatter writes every token to its first row on each of its ranks, and lists or makes the others.
func (m *meeting) scatter(a *Dispatch) {
	e, r, size := m.e, a.Routing, a.Experts.RowBytes()
	me := int32(e.space.Rank)
	stream := e.streams(len(r.Rows), size)
	for t := range r.Tokens() {
		x := a.X[int64(t)*size:][:size]
		rank, from := int32(-1), int32(0)
		for i := r.First[t]; i < r.First[t+1]; i++ {
			row := &r.Rows[i]
			row.Row += int32(m.base[row.Slot])
			if row.Rank == rank && rank != me {
				list := m.twinList(int(rank), int(me), int64(m.twins[rank])+1)
				list[2*m.twins[rank]], list[2*m.twins[rank]+1] = from, row.Row
				m.twins[rank]++
				continue
			}
			rank, from = row.Rank, row.Row
			if to := e.space.Range(int(rank), int64(m.write[rank])+int64(from)*size, size); stream {
				shm.CopyStream(to, x)
			} else {
				copy(to, x)
			}
		}
	}
	if stream {
		shm.Fence()
	}
}

// twinList is the first n entries of src's list on rank p.
func (m *meeting) twinList(p, src int, n int64) []int32 {
	return shm.View[int32](m.e.space.Range(p, m.lanes.TwinList(src), 8*n))
}

// makeTwins copies rows that src has sent to where else it wants them.
func (m *meeting) makeTwins(a *Dispatch, src int) {
	me, size := m.e.space.Rank, a.Experts.RowBytes()
	list := m.twinList(me, src, int64(m.e.word(me, a.Lanes.Done(src)+DoneTwins).Load()))
	for i := 0; i < len(list); i += 2 {
		from := m.e.space.Range(me, a.Out+int64(list[i])*size, size)
		copy(m.e.space.Range(me, a.Out+int64(list[i+1])*size, size), from)
	}
}

// clearPadding zeroes the rows of out that belong to no token.
func clearPadding(x *Experts, r *Routing, out []byte) {
	size := x.RowBytes()
	for i, first := range r.SlotFirst {
		clear(out[(first+r.SlotRows[i])*size : (first+x.Span(r.SlotRows[i]))*size])
	}
}
