package host

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Combine launches the kernel that brings rows back to their tokens on s, or runs it at once when s is nil. Every rank
// of the heap must launch its part. On a stream the error is the stream's.
func (e *Engine) Combine(s device.Stream, a *kernels.Combine) error {
	return e.bare.launch(s, (*combine)(a))
}

type combine kernels.Combine

func (a *combine) run(p *port) error {
	e, m := p.e, meetings.Get().(*meeting)
	err := m.combine(e, (*kernels.Combine)(a))
	m.put()
	if a.Done != nil {
		a.Done(err)
	}
	return err
}

// CombineBackward launches the kernel for the gradients of Combine on s, or runs it at once when s is nil. Every rank of
// the heap must launch its part. On a stream the error is the stream's.
func (e *Engine) CombineBackward(s device.Stream, a *kernels.CombineBackward) error {
	return e.bare.launch(s, (*combineBackward)(a))
}

type combineBackward kernels.CombineBackward

func (a *combineBackward) run(p *port) error {
	e, m := p.e, meetings.Get().(*meeting)
	err := m.combineBackward(e, (*kernels.CombineBackward)(a))
	m.put()
	if a.Done != nil {
		a.Done(err)
	}
	return err
}

// undone is the error of a call on a dispatch that failed. Every rank has it, so none begins the call.
func undone(op kernels.MoEOp, r *kernels.Routing) error {
	if r.Err == nil {
		return nil
	}
	return fmt.Errorf("kernels: %v: its dispatch failed: %w", op, r.Err)
}

// open sends the notices of a call that uses the routing r, and waits for those of the others. short is the length of a
// buffer that is too small for the rows, or negative. failed is an error that every rank has; the call then moves
// nothing but has to be finished.
func (m *meeting) open(x *kernels.Experts, r *kernels.Routing, short, read, write int64) (failed, err error) {
	call := kernels.CallWord(m.op, r.Call)
	if short >= 0 {
		call, read, write = kernels.CallWord(kernels.RefusedOp, r.Call), short, r.OutRows*x.RowBytes()
	}
	m.notify(call, read, write)
	if err := m.await(m.lanes.Notice(0), m.noticed); err != nil {
		return nil, err
	}
	return m.verdict(), nil
}

// shortest is the length of the first buffer that is too small for the rows, -1 when none is.
func shortest(x *kernels.Experts, r *kernels.Routing, bufs ...[]byte) int64 {
	for _, b := range bufs {
		if int64(len(b)) < r.OutRows*x.RowBytes() {
			return int64(len(b))
		}
	}
	return -1
}

// copyRows copies the rows of all experts, without their padding.
func copyRows(x *kernels.Experts, r *kernels.Routing, dst, src []byte) {
	size := x.RowBytes()
	for i, first := range r.SlotFirst {
		copy(dst[first*size:][:r.SlotRows[i]*size], src[first*size:][:r.SlotRows[i]*size])
	}
}

func (m *meeting) combine(e *Engine, a *kernels.Combine) error {
	x, r := a.Experts, a.Routing
	if err := undone(a.Op, r); err != nil {
		return err
	}
	m.begin(e, a.Lanes, a.Op, a.Timeout)
	short := shortest(x, r, a.Rows)
	if short < 0 && a.Staged {
		copyRows(x, r, e.space.Range(e.space.Rank, a.RowsAt, r.OutRows*x.RowBytes()), a.Rows)
	}
	failed, err := m.open(x, r, short, a.RowsAt, 0)
	if err != nil {
		return err
	}
	if failed == nil {
		switch x.DType {
		case kernels.Float16:
			m.f16.combine(m, a)
		case kernels.BFloat16:
			m.bf16.combine(m, a)
		default:
			m.f32.combine(m, a)
		}
	}
	if err := m.finish(); err != nil {
		return err
	}
	return failed
}

func (m *meeting) combineBackward(e *Engine, a *kernels.CombineBackward) error {
	x, r := a.Experts, a.Routing
	if err := undone(kernels.CombineBackwardOp, r); err != nil {
		return err
	}
	m.begin(e, a.Lanes, kernels.CombineBackwardOp, a.Timeout)
	bytes := r.OutRows * x.RowBytes()
	short := shortest(x, r, a.Rows, a.DRows)
	if short < 0 && a.RowsStaged {
		copyRows(x, r, e.space.Range(e.space.Rank, a.RowsAt, bytes), a.Rows)
	}
	failed, err := m.open(x, r, short, a.RowsAt, a.DRowsAt)
	if err != nil {
		return err
	}
	if failed == nil {
		clear(a.DWeights) // of masked choices
		switch x.DType {
		case kernels.Float16:
			m.f16.spread(m, a)
		case kernels.BFloat16:
			m.bf16.spread(m, a)
		default:
			m.f32.spread(m, a)
		}
		clearPadding(x, r, a.DRows)
	}
	if err := m.finish(); err != nil {
		return err
	}
	if failed == nil && a.DRowsStaged {
		copyRows(x, r, a.DRows, e.space.Range(e.space.Rank, a.DRowsAt, bytes))
	}
	return failed
}

// gatherer works on rows of one type. Its fields are scratch.
type gatherer[T float32 | vec.Float16 | vec.BFloat16] struct {
	m       *meeting
	size    int64 // bytes of a row
	rows    [][]T
	weights []float32
	// For tokens that have several rows on a rank: that rank's sum, as a row of weight 1.
	sums    [][]float32
	ones    []float32
	backing []float32
	// stream says that results are made in out and then written around the caches.
	stream bool
	out    []T
}

// begin prepares for writing n rows.
func (g *gatherer[T]) begin(m *meeting, x *kernels.Experts, n int) {
	g.m, g.size = m, x.RowBytes()
	g.out = sized(g.out, x.Hidden)
	g.backing = sized(g.backing, 2*x.Hidden)
	g.stream = m.e.streams(n, g.size)
}

// end makes what was written visible to whom this rank signals, and lets go of it.
func (g *gatherer[T]) end() {
	if g.stream {
		shm.Fence()
	}
	clear(g.rows)
	g.m = nil
}

// bytes are those of row i of the rows that rank p shows at off.
func (g *gatherer[T]) bytes(p int32, off uint64, i int32) []byte {
	return g.m.e.space.Range(int(p), int64(off)+int64(i)*g.size, g.size)
}

// write stores the weighted sum of rows in dst.
func write[T, S float32 | vec.Float16 | vec.BFloat16](g *gatherer[T], dst []byte, rows [][]S, weights []float32) {
	if g.stream {
		vec.WeightedSum(g.out, rows, weights)
		shm.CopyStream(dst, shm.Bytes(g.out))
	} else {
		vec.WeightedSum(shm.View[T](dst), rows, weights)
	}
}

// combine sums the rows of every token.
func (g *gatherer[T]) combine(m *meeting, a *kernels.Combine) {
	r := a.Routing
	g.begin(m, a.Experts, r.Tokens())
	for t := range r.Tokens() {
		g.rows, g.weights = g.rows[:0], g.weights[:0]
		rows := r.Rows[r.First[t]:r.First[t+1]]
		nested := false // a rank after the first has several rows
		for i := range rows {
			row := &rows[i]
			w := row.Weight
			if a.Op == kernels.DispatchBackwardOp {
				w = 1
			}
			g.rows, g.weights = append(g.rows, shm.View[T](g.bytes(row.Rank, m.read[row.Rank], row.Row))), append(g.weights, w)
			nested = nested || i > 0 && row.Rank == rows[i-1].Rank && row.Rank != rows[0].Rank
		}
		y := a.Y[int64(t)*g.size:][:g.size]
		if nested {
			g.sumRanks(rows)
			write(g, y, g.sums, g.ones)
		} else {
			write(g, y, g.rows, g.weights)
		}
	}
	g.end()
}

// sumRanks sums the rows of each rank. Where only the first rank has several rows the sum of all rows has the same bits
// as the sum of these sums.
func (g *gatherer[T]) sumRanks(rows []kernels.RoutedRow) {
	hidden := len(g.out)
	g.sums, g.ones = g.sums[:0], g.ones[:0]
	g.backing = sized(g.backing, len(rows)*hidden)
	for i := 0; i < len(rows); {
		end := i + 1
		for end < len(rows) && rows[end].Rank == rows[i].Rank {
			end++
		}
		sum := g.backing[len(g.sums)*hidden:][:hidden]
		vec.WeightedSum(sum, g.rows[i:end], g.weights[i:end])
		g.sums, g.ones = append(g.sums, sum), append(g.ones, 1)
		i = end
	}
}

// spread writes the gradient of every row to its rank, and computes those of the weights.
func (g *gatherer[T]) spread(m *meeting, a *kernels.CombineBackward) {
	r := a.Routing
	g.begin(m, a.Experts, len(r.Rows))
	choices := len(a.DWeights) / max(r.Tokens(), 1)
	g.rows, g.weights = append(g.rows[:0], nil), append(g.weights[:0], 0)
	for t := range r.Tokens() {
		dy := shm.View[T](a.DY[int64(t)*g.size:][:g.size])
		wide := widen(dy, g.backing[:len(dy)])
		g.rows[0] = dy
		for i := r.First[t]; i < r.First[t+1]; i++ {
			row := &r.Rows[i]
			y := shm.View[T](g.bytes(row.Rank, m.read[row.Rank], row.Row))
			a.DWeights[t*choices+int(row.Choice)] = vec.Dot(widen(y, g.backing[len(dy):][:len(dy)]), wide)
			g.weights[0] = row.Weight
			write(g, g.bytes(row.Rank, m.write[row.Rank], row.Row), g.rows, g.weights)
		}
	}
	g.end()
}

// widen is row in float32: itself, or in buf.
func widen[T float32 | vec.Float16 | vec.BFloat16](row []T, buf []float32) []float32 {
	if f, ok := any(row).([]float32); ok {
		return f
	}
	vec.Load(buf, row)
	return buf
}
