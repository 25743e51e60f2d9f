package dispatch_test

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// The reference: one rank that sees all tokens and all experts and does everything in plain loops.

// batch is the input of one dispatch on all ranks, with what is expected of it.
type batch struct {
	o       dispatch.Options
	idx     [][]int32   // by rank, [tokens, top-k]
	weights [][]float32 // by rank, [tokens, top-k]
	x, dy   [][]float32 // by rank, [tokens, hidden], representable in the data type
}

// routed is one row of an expert.
type routed struct{ src, token, choice int }

// narrow encodes values as rows of the type.
func narrow(d kernels.DType, v []float32) []byte {
	b := make([]byte, int64(len(v))*d.Size())
	switch d {
	case kernels.Float16:
		vec.Store(shm.View[vec.Float16](b), v, 1)
	case kernels.BFloat16:
		vec.Store(shm.View[vec.BFloat16](b), v, 1)
	default:
		copy(shm.View[float32](b), v)
	}
	return b
}

// wide decodes rows of the type.
func wide(d kernels.DType, b []byte) []float32 {
	v := make([]float32, int64(len(b))/d.Size())
	switch d {
	case kernels.Float16:
		vec.Load(v, shm.View[vec.Float16](b))
	case kernels.BFloat16:
		vec.Load(v, shm.View[vec.BFloat16](b))
	default:
		copy(v, shm.View[float32](b))
	}
	return v
}

func round(d kernels.DType, v []float32) []float32 { return wide(d, narrow(d, v)) }

func randomFloats(rng *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(rng.NormFloat64())
	}
	return v
}

// randomBatch makes an input for n ranks. skew sends everything to few experts.
func randomBatch(rng *rand.Rand, o dispatch.Options, n int, skew bool) *batch {
	b := &batch{o: o}
	for range n {
		tokens := rng.IntN(o.MaxTokens + 1)
		if rng.IntN(4) == 0 {
			tokens = 0
		}
		var idx []int32
		for range tokens {
			choices := rng.Perm(o.Experts)[:o.TopK]
			if skew {
				slices.Sort(choices)
				choices[0] = 0
			}
			for _, e := range choices {
				if rng.IntN(5) == 0 || slices.Contains(idx[len(idx)/o.TopK*o.TopK:], int32(e)) {
					e = -1
				}
				idx = append(idx, int32(e))
			}
		}
		b.idx = append(b.idx, idx)
		b.weights = append(b.weights, randomFloats(rng, len(idx)))
		b.x = append(b.x, round(o.DType, randomFloats(rng, tokens*o.Hidden)))
		b.dy = append(b.dy, round(o.DType, randomFloats(rng, tokens*o.Hidden)))
	}
	return b
}

// rowsOf lists the rows that an expert gets on a rank, in order.
func (b *batch) rowsOf(rank, expert int) []routed {
	var rows []routed
	for src := range b.idx {
		for i, e := range b.idx[src] {
			if t := i / b.o.TopK; int(e) == expert && b.o.Placement.Rank(src, t, expert) == rank {
				rows = append(rows, routed{src, t, i % b.o.TopK})
			}
		}
	}
	return rows
}

func (b *batch) row(v [][]float32, src, token int) []float32 {
	return v[src][token*b.o.Hidden : (token+1)*b.o.Hidden]
}

// expert is what the experts of the tests compute: its derivative is 1 + e/8.
func (b *batch) expert(e int, x []float32) []float32 {
	y := make([]float32, len(x))
	for i := range y {
		y[i] = x[i]*(1+float32(e)/8) + float32(e)/4
	}
	return round(b.o.DType, y)
}

func (b *batch) expertGrad(e int, dy []float32) []float32 {
	dx := make([]float32, len(dy))
	for i := range dx {
		dx[i] = dy[i] * (1 + float32(e)/8)
	}
	return round(b.o.DType, dx)
}

// sum adds row(k, expert) over the choices of a token, in the order that Combine promises.
func (b *batch) sum(ranks, src, token int, row func(k, expert int) (float32, []float32)) []float32 {
	y := make([]float32, b.o.Hidden)
	for r := range ranks {
		part := make([]float32, b.o.Hidden)
		for k, e := range b.idx[src][token*b.o.TopK : (token+1)*b.o.TopK] {
			if e >= 0 && b.o.Placement.Rank(src, token, int(e)) == r {
				w, v := row(k, int(e))
				for i := range part {
					part[i] += float32(w * v[i])
				}
			}
		}
		for i := range y {
			y[i] += part[i]
		}
	}
	return round(b.o.DType, y)
}

func (b *batch) weight(src, token, k int) float32 { return b.weights[src][token*b.o.TopK+k] }

// dRow is the gradient of the expert's output for one row.
func (b *batch) dRow(q routed) []float32 {
	d := make([]float32, b.o.Hidden)
	for i, v := range b.row(b.dy, q.src, q.token) {
		d[i] = b.weight(q.src, q.token, q.choice) * v
	}
	return round(b.o.DType, d)
}

func (b *batch) y(ranks, src, token int) []float32 {
	return b.sum(ranks, src, token, func(k, e int) (float32, []float32) {
		return b.weight(src, token, k), b.expert(e, b.row(b.x, src, token))
	})
}

func (b *batch) dx(ranks, src, token int) []float32 {
	return b.sum(ranks, src, token, func(k, e int) (float32, []float32) {
		return 1, b.expertGrad(e, b.dRow(routed{src, token, k}))
	})
}

// dWeight is computed in double precision.
func (b *batch) dWeight(src, token, k int) (float64, float64) {
	e := int(b.idx[src][token*b.o.TopK+k])
	if e < 0 {
		return 0, 0
	}
	var sum, size float64
	dy := b.row(b.dy, src, token)
	for i, v := range b.expert(e, b.row(b.x, src, token)) {
		sum += float64(v) * float64(dy[i])
		size += math.Abs(float64(v) * float64(dy[i]))
	}
	return sum, size
}

// side is one rank's part in a batch.
type side struct {
	r *rank
	b *batch
	d *dispatch.Dispatcher
	h *dispatch.Handle
}

func (s *side) view(v []float32) memory.View { return memory.Host(narrow(s.b.o.DType, v)) }

func (s *side) me() int { return s.r.Group.Rank() }

func (s *side) dispatch(st device.Stream) {
	var err error
	s.h, err = s.d.Dispatch(st, s.view(s.b.x[s.me()]), s.b.idx[s.me()], s.b.weights[s.me()])
	require.NoError(s.r, err)
	if st != nil {
		require.NoError(s.r, st.Synchronize())
	}
}

// eachSlot calls f with every local expert, the rows it should have, and where they begin; then it checks that what
// lies between is zero.
func (s *side) eachSlot(rows []float32, f func(i, expert int, want []routed, first int)) {
	hidden := s.b.o.Hidden
	used := make([]bool, s.h.NumRows())
	for i, e := range s.h.LocalExperts() {
		want, first := s.b.rowsOf(s.me(), e), int(s.h.Offsets()[i])
		require.EqualValues(s.r, len(want), s.h.Counts()[i], "rows of expert %d", e)
		for j := range want {
			used[first+j] = true
		}
		f(i, e, want, first)
	}
	for j, u := range used {
		if !u {
			require.Equal(s.r, make([]float32, hidden), rows[j*hidden:(j+1)*hidden], "padding row %d", j)
		}
	}
}

// checkRows compares the output of the dispatch.
func (s *side) checkRows() {
	o, hidden := &s.b.o, s.b.o.Hidden
	require.Equal(s.r, o.Placement.Local(s.me()), s.h.LocalExperts())
	rows := wide(o.DType, s.h.Rows().Bytes())
	require.Len(s.r, rows, s.h.NumRows()*hidden)
	next := 0
	s.eachSlot(rows, func(i, e int, want []routed, first int) {
		if o.Layout == dispatch.Padded {
			require.Equal(s.r, i*o.Capacity, first)
		} else {
			require.Equal(s.r, next, first)
			next += (len(want) + o.Align - 1) / o.Align * o.Align
		}
		for j, q := range want {
			require.Equal(s.r, s.b.row(s.b.x, q.src, q.token), rows[(first+j)*hidden:][:hidden], "expert %d row %d is %+v", e, j, q)
		}
	})
	if o.Layout == dispatch.Flat {
		require.Equal(s.r, next, s.h.NumRows())
	}
}

// experts runs the experts on rows; the rows' padding becomes NaN, which nobody may read.
func (s *side) experts(f func(e int, x []float32) []float32, rows []float32) []float32 {
	hidden := s.b.o.Hidden
	out := make([]float32, len(rows))
	for i := range out {
		out[i] = float32(math.NaN())
	}
	for i, e := range s.h.LocalExperts() {
		for j := s.h.Offsets()[i]; j < s.h.Offsets()[i]+s.h.Counts()[i]; j++ {
			copy(out[int(j)*hidden:][:hidden], f(e, rows[int(j)*hidden:][:hidden]))
		}
	}
	return out
}

// combine checks Combine of the experts' output in rows.
func (s *side) combine(st device.Stream, rows memory.View) {
	n := s.r.Group.Size()
	y := memory.Host(narrow(s.b.o.DType, nans(len(s.b.x[s.me()]))))
	require.NoError(s.r, s.d.Combine(st, y, rows, s.h))
	if st != nil {
		require.NoError(s.r, st.Synchronize())
	}
	got := wide(s.b.o.DType, y.Bytes())
	for t := range s.h.Tokens() {
		require.Equal(s.r, s.b.y(n, s.me(), t), got[t*s.b.o.Hidden:][:s.b.o.Hidden], "token %d of rank %d", t, s.me())
	}
}

// combineBackward checks both gradients.
func (s *side) combineBackward(st device.Stream, dRows, rows memory.View) {
	o, hidden := &s.b.o, s.b.o.Hidden
	dw := nans(len(s.b.idx[s.me()]))
	require.NoError(s.r, s.d.CombineBackward(st, dRows, dw, s.view(s.b.dy[s.me()]), rows, s.h))
	if st != nil {
		require.NoError(s.r, st.Synchronize())
	}
	got := wide(o.DType, dRows.Bytes())
	s.eachSlot(got, func(i, e int, want []routed, first int) {
		for j, q := range want {
			require.Equal(s.r, s.b.dRow(q), got[(first+j)*hidden:][:hidden], "gradient of expert %d row %d, %+v", e, j, q)
		}
	})
	for i, v := range dw {
		want, size := s.b.dWeight(s.me(), i/o.TopK, i%o.TopK)
		require.InDelta(s.r, want, float64(v), 1e-5*size, "gradient of weight %d", i)
	}
}

// dispatchBackward checks the gradient of x.
func (s *side) dispatchBackward(st device.Stream, dRows memory.View) {
	n := s.r.Group.Size()
	dx := memory.Host(narrow(s.b.o.DType, nans(len(s.b.x[s.me()]))))
	require.NoError(s.r, s.d.DispatchBackward(st, dx, dRows, s.h))
	if st != nil {
		require.NoError(s.r, st.Synchronize())
	}
	got := wide(s.b.o.DType, dx.Bytes())
	for t := range s.h.Tokens() {
		require.Equal(s.r, s.b.dx(n, s.me(), t), got[t*s.b.o.Hidden:][:s.b.o.Hidden], "gradient of token %d of rank %d", t, s.me())
	}
}

func nans(n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(math.NaN())
	}
	return v
}

// randomOptions draws a dispatcher for n ranks. What it returns has every default filled in.
func randomOptions(rng *rand.Rand, n int) dispatch.Options {
	o := dispatch.Options{
		Experts: 1 + rng.IntN(12), Hidden: []int{1, 3, 8, 33, 64}[rng.IntN(5)], MaxTokens: 1 + rng.IntN(40),
		DType: []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Float16}[rng.IntN(3)], Handles: 2,
	}
	o.TopK = 1 + rng.IntN(min(o.Experts, 5))
	if o.Layout = dispatch.Layout(rng.IntN(2)); o.Layout == dispatch.Flat {
		o.Align = []int{1, 2, 8, 16}[rng.IntN(4)]
	} else {
		o.Capacity = n * o.MaxTokens
	}
	switch rng.IntN(3) {
	case 0:
		o.Placement = dispatch.Contiguous(o.Experts, n)
	case 1: // anywhere
		o.Placement = &dispatch.Placement{}
		for range o.Experts {
			o.Placement.Ranks = append(o.Placement.Ranks, []int{rng.IntN(n)})
		}
	default: // some experts more than once
		o.Placement = &dispatch.Placement{}
		for range o.Experts {
			o.Placement.Ranks = append(o.Placement.Ranks, rng.Perm(n)[:1+rng.IntN(n)])
		}
	}
	return o
}

// randomWorlds runs dispatchers drawn from the seeds [seed, seed+count) on the ranks of r's group.
func randomWorlds(r *rank, seed uint64, count int) {
	n := r.Group.Size()
	stream, err := device.Host().NewStream()
	require.NoError(r, err)
	for i := range uint64(count) {
		rng := rand.New(rand.NewPCG(seed+i, 0))                          // the same on all ranks
		own := rand.New(rand.NewPCG(seed+i, uint64(r.Group.Rank())+100)) // this rank's
		o := randomOptions(rng, n)
		d, err := dispatch.New(r.Ctx, r.Heap, o)
		require.NoError(r, err)
		size := int64(d.MaxRows()) * int64(o.Hidden) * o.DType.Size()
		var symmetric [2]*memory.Buffer
		for i := range symmetric {
			symmetric[i], err = r.Heap.Alloc(size)
			if err != nil {
				require.NoError(r, r.Heap.Grow(r.Ctx, size))
				symmetric[i], err = r.Heap.Alloc(size)
			}
			require.NoError(r, err)
		}
		place := func(s *side, which int, rows []float32) memory.View {
			b := narrow(o.DType, rows)
			switch own.IntN(3) {
			case 0:
				return memory.Host(b)
			case 1:
				v := symmetric[which].View().Slice(0, int64(len(b)))
				copy(v.Bytes(), b)
				return v
			default:
				v := s.h.Rows()
				if which > 0 {
					v = symmetric[which].View().Slice(0, int64(len(b)))
				}
				copy(v.Bytes(), b)
				return v
			}
		}
		for round := range 3 {
			var st device.Stream
			if own.IntN(2) == 0 {
				st = stream
			}
			sides := make([]*side, 2)
			for i := range sides {
				sides[i] = &side{r: r, d: d, b: randomBatch(rng, o, n, round == 1)}
				sides[i].dispatch(st)
			}
			if rng.IntN(2) == 0 {
				slices.Reverse(sides)
			}
			for _, s := range sides {
				s.checkRows()
				rows := s.experts(s.b.expert, wide(o.DType, s.h.Rows().Bytes()))
				view := place(s, 0, rows)
				s.combine(st, view)
				dRows := place(s, 1, rows)
				if own.IntN(4) == 0 {
					dRows = view
				}
				s.combineBackward(st, dRows, view)
				s.dispatchBackward(st, place(s, 0, s.experts(s.b.expertGrad, wide(o.DType, dRows.Bytes()))))
			}
			if own.IntN(2) == 0 {
				slices.Reverse(sides) // ranks may release in different orders
			}
			for _, s := range sides {
				s.h.Release()
			}
		}
		require.NoError(r, d.Close(r.Ctx))
		for _, b := range symmetric {
			require.NoError(r, b.Free())
		}
	}
	require.NoError(r, stream.Close())
}
