package dispatch_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// The model: what a dispatcher does, computed plainly on all ranks' data. Numbers are compared bit for bit.

// batch is the input of all ranks.
type batch struct {
	o       dispatch.Options
	n       int
	idx     [][]int64   // [tokens, TopK] of each rank
	weights [][]float32 // nil: none are given
	x       [][]float32 // what DType can hold
	scales  [][]uint32  // beside tokens of float8
	dy      [][]float32 // what CombineDType can hold
	given   [][]float32 // [tokens, TopK]: weights for a combine
	bias    [2][][]float32
}

// routed is one row. In a token-major layout its choice is -1.
type routed struct{ src, token, choice int }

// narrow encodes values as rows of the type.
func narrow(d kernels.DType, v []float32) []byte {
	b := make([]byte, int64(len(v))*d.Size())
	switch d {
	case kernels.Float16:
		vec.Store(shm.View[vec.Float16](b), v, 1)
	case kernels.BFloat16:
		vec.Store(shm.View[vec.BFloat16](b), v, 1)
	case kernels.Float8E4M3:
		vec.Store(shm.View[vec.Float8E4M3](b), v, 1)
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
	case kernels.Float8E4M3:
		vec.Load(v, shm.View[vec.Float8E4M3](b))
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

func nans(n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(math.NaN())
	}
	return v
}

// Types of what the options say, with their defaults.

func (b *batch) dtype() kernels.DType {
	if b.o.DType == 0 {
		return kernels.Float32
	}
	return b.o.DType
}

func (b *batch) rowType() kernels.DType {
	if b.o.Quantize {
		return kernels.Float8E4M3
	}
	return b.dtype()
}

func (b *batch) sumType() kernels.DType {
	switch {
	case b.o.CombineDType != 0:
		return b.o.CombineDType
	case b.dtype() == kernels.Float8E4M3:
		return kernels.BFloat16
	}
	return b.dtype()
}

func (b *batch) byToken() bool {
	return b.o.Layout == dispatch.TokenMajor || b.o.Layout == dispatch.RankPadded
}

// zeroPadding reports whether padding is zero.
func (b *batch) zeroPadding() bool {
	return b.o.Layout == dispatch.Flat || b.o.Layout == dispatch.Padded
}

func (b *batch) placement() *dispatch.Placement {
	if b.o.Placement == nil {
		return dispatch.Contiguous(b.o.Experts, b.n)
	}
	return b.o.Placement
}

// scaleWords is how many 32-bit words the scales of a row take.
func (b *batch) scaleWords() int {
	if b.rowType() != kernels.Float8E4M3 {
		return 0
	}
	n := (b.o.Hidden + b.block() - 1) / b.block()
	if b.o.ScaleFormat == dispatch.UE8M0Scales {
		n = (n + 3) / 4
	}
	return n
}

func (b *batch) block() int {
	if b.o.ScalePerToken {
		return b.o.Hidden
	}
	return 128
}

// scale is number i of a row's scales.
func (b *batch) scale(words []uint32, i int) float32 {
	if b.o.ScaleFormat == dispatch.UE8M0Scales {
		return float32(math.Ldexp(1, int(words[i/4]>>(8*(i%4))&0xff)-127))
	}
	return math.Float32frombits(words[i])
}

// quantize is the rule of the package's documentation.
func quantize(x []float32, block int, format dispatch.ScaleFormat) (q []float32, words []uint32) {
	for i := 0; i*block < len(x); i++ {
		part := x[i*block : min((i+1)*block, len(x))]
		most := float32(1e-4)
		for _, v := range part {
			most = max(most, float32(math.Abs(float64(v))))
		}
		scale, factor := most/448, 448/most
		if format == dispatch.UE8M0Scales {
			fraction, exponent := math.Frexp(float64(scale))
			if fraction == 0.5 {
				exponent--
			}
			factor = float32(math.Ldexp(1, -exponent))
			if i%4 == 0 {
				words = append(words, 0)
			}
			words[i/4] |= uint32(exponent+127) << (8 * (i % 4))
		} else {
			words = append(words, math.Float32bits(scale))
		}
		for _, v := range part {
			q = append(q, vec.ToFloat8E4M3(v*factor).Float32())
		}
	}
	return q, words
}

// randomBatch makes an input. skew sends everything to few experts.
func randomBatch(rng *rand.Rand, o dispatch.Options, n int, skew bool) *batch {
	o.Align = max(o.Align, 1)
	if o.Layout == dispatch.Padded && o.Capacity == 0 {
		o.Capacity = n * o.MaxTokens
	}
	b := &batch{o: o, n: n}
	weighted := rng.IntN(4) > 0
	for range n {
		tokens := rng.IntN(o.MaxTokens + 1)
		if rng.IntN(4) == 0 {
			tokens = 0
		}
		var idx []int64
		for range tokens {
			choices := make([]int, o.TopK)
			for k, e := range rng.Perm(max(o.Experts, o.TopK))[:o.TopK] {
				choices[k] = e % o.Experts
			}
			if o.TopK > 1 && rng.IntN(6) == 0 && (o.Layout == dispatch.Flat || b.byToken()) {
				choices[rng.IntN(o.TopK)] = choices[0] // twice
			}
			if skew {
				slices.Sort(choices)
				choices[0] = 0
			}
			for k, e := range choices {
				if rng.IntN(5) == 0 || (o.Layout == dispatch.Padded || o.Layout == dispatch.Slab) && slices.Contains(choices[:k], e) {
					e = -1
				}
				idx = append(idx, int64(e))
			}
		}
		b.idx = append(b.idx, idx)
		if weighted {
			b.weights = append(b.weights, randomFloats(rng, len(idx)))
		} else {
			b.weights = append(b.weights, nil)
		}
		x := randomFloats(rng, tokens*o.Hidden)
		for i := range x {
			if i%7 == 0 {
				x[i] *= 100
			}
		}
		var scales []uint32
		if b.dtype() == kernels.Float8E4M3 {
			var all []float32
			for t := range tokens {
				q, words := quantize(x[t*o.Hidden:(t+1)*o.Hidden], b.block(), o.ScaleFormat)
				all, scales = append(all, q...), append(scales, words...)
			}
			x = all
		}
		b.x, b.scales = append(b.x, round(b.dtype(), x)), append(b.scales, scales)
		b.dy = append(b.dy, round(b.sumType(), randomFloats(rng, tokens*o.Hidden)))
		b.given = append(b.given, randomFloats(rng, len(idx)))
		for i := range b.bias {
			b.bias[i] = append(b.bias[i], round(b.sumType(), randomFloats(rng, tokens*o.Hidden)))
		}
	}
	return b
}

func (b *batch) tokens(src int) int { return len(b.idx[src]) / b.o.TopK }

func (b *batch) row(v [][]float32, src, token int) []float32 {
	return v[src][token*b.o.Hidden : (token+1)*b.o.Hidden]
}

// choices lists the choices of a token that go to a rank, ascending.
func (b *batch) choices(rank, src, token int) (ks []int) {
	for k, e := range b.idx[src][token*b.o.TopK : (token+1)*b.o.TopK] {
		if e >= 0 && b.placement().Rank(src, token, int(e)) == rank {
			ks = append(ks, k)
		}
	}
	return ks
}

func (b *batch) expertOf(q routed) int { return int(b.idx[q.src][q.token*b.o.TopK+q.choice]) }

// groups lists the rows of a rank: by local expert, or by source rank in a token-major layout.
func (b *batch) groups(rank int) [][]routed {
	local := b.placement().Local(rank)
	groups := make([][]routed, len(local))
	if b.byToken() {
		groups = make([][]routed, b.n)
	}
	for src := range b.n {
		for t := range b.tokens(src) {
			ks := b.choices(rank, src, t)
			if b.byToken() {
				if len(ks) > 0 {
					groups[src] = append(groups[src], routed{src, t, -1})
				}
				continue
			}
			for _, k := range ks {
				q := routed{src, t, k}
				i, _ := slices.BinarySearch(local, b.expertOf(q))
				groups[i] = append(groups[i], q)
			}
		}
	}
	return groups
}

// sent is a row as it should arrive.
func (b *batch) sent(q routed) (row []byte, scales []uint32) {
	x := b.row(b.x, q.src, q.token)
	if b.o.Quantize {
		x, scales = quantize(x, b.block(), b.o.ScaleFormat)
	} else if words := b.scaleWords(); words > 0 {
		scales = b.scales[q.src][q.token*words : (q.token+1)*words]
	}
	return narrow(b.rowType(), x), scales
}

// input is what an expert makes of a row that has arrived.
func (b *batch) input(q routed) []float32 {
	row, scales := b.sent(q)
	x := wide(b.rowType(), row)
	for i := range x {
		if len(scales) > 0 {
			x[i] *= b.scale(scales, i/b.block())
		}
	}
	return x
}

func (b *batch) weight(q routed) float32 {
	if b.weights[q.src] == nil {
		return 1
	}
	return b.weights[q.src][q.token*b.o.TopK+q.choice]
}

func (b *batch) givenWeight(q routed) float32 { return b.given[q.src][q.token*b.o.TopK+q.choice] }

// expert is what the experts of the tests compute: its derivative is 1 + e/8.
func (b *batch) expert(e int, x []float32) []float32 {
	y := make([]float32, len(x))
	for i := range y {
		y[i] = float32(x[i]*(1+float32(e)/8)) + float32(e)/4
	}
	return round(b.sumType(), y)
}

// made is the row that a rank gives to a combine. In a token-major layout it is what its experts made, weighted.
func (b *batch) made(rank int, q routed) []float32 {
	if !b.byToken() {
		return b.expert(b.expertOf(q), b.input(q))
	}
	sum := make([]float32, b.o.Hidden)
	for _, k := range b.choices(rank, q.src, q.token) {
		c := routed{q.src, q.token, k}
		for i, v := range b.expert(b.expertOf(c), b.input(q)) {
			sum[i] += float32(b.weight(c) * v)
		}
	}
	return round(b.sumType(), sum)
}

// partial is what crosses of a token's rows on one rank, nil where there are none.
func (b *batch) partial(rank, src, token int, weight func(routed) float32, row func(rank int, q routed) []float32) []float32 {
	ks := b.choices(rank, src, token)
	if len(ks) == 0 {
		return nil
	}
	sum := make([]float32, b.o.Hidden)
	if b.byToken() {
		copy(sum, row(rank, routed{src, token, -1}))
	} else {
		for _, k := range ks {
			q := routed{src, token, k}
			for i, v := range row(rank, q) {
				sum[i] += float32(weight(q) * v)
			}
		}
	}
	if !b.o.Float8Combine {
		return round(b.sumType(), sum)
	}
	q, words := quantize(sum, 128, dispatch.Float32Scales)
	for i := range q {
		q[i] *= math.Float32frombits(words[i/128])
	}
	return q
}

// combined is the result of a combine for one token.
func (b *batch) combined(src, token int, weight func(routed) float32, row func(int, routed) []float32, bias ...[]float32) []float32 {
	y := make([]float32, b.o.Hidden)
	for r := range b.n {
		for i, v := range b.partial(r, src, token, weight, row) {
			y[i] += v
		}
	}
	for _, bias := range bias {
		for i, v := range bias {
			y[i] += v
		}
	}
	return round(b.sumType(), y)
}

// dRow is the gradient of a combine for one row.
func (b *batch) dRow(q routed, weight func(routed) float32) []float32 {
	d := make([]float32, b.o.Hidden)
	w := float32(1)
	if !b.byToken() {
		w = weight(q)
	}
	for i, v := range b.row(b.dy, q.src, q.token) {
		d[i] = w * v
	}
	return round(b.sumType(), d)
}

// dot is the inner product in the order that package kernels promises.
func dot(x, y []float32) float32 {
	var chain [kernels.DotChains]float32
	for i := range x {
		chain[i%len(chain)] += float32(x[i] * y[i])
	}
	for _, step := range []int{4, 2, 1, 128, 64, 32, 16, 8} {
		var next [kernels.DotChains]float32
		for j := range chain {
			next[j] = chain[j]
			if j+step < len(chain) {
				next[j] += chain[j+step]
			}
		}
		chain = next
	}
	return chain[0]
}

func one(routed) float32 { return 1 }

// side is one rank's part in a batch.
type side struct {
	r      *rank
	b      *batch
	d      *dispatch.Dispatcher
	h      *dispatch.Handle
	halves bool // use them
	// between runs between the halves of a call.
	between func()
}

func (s *side) me() int { return s.r.Group.Rank() }

func (s *side) view(v []float32) memory.View { return memory.Host(narrow(s.b.sumType(), v)) }

func (s *side) sync(st device.Stream) {
	if st != nil {
		require.NoError(s.r, st.Synchronize())
	}
}

func (s *side) half() {
	if s.between != nil {
		s.between()
	}
}

// tokens is this rank's input.
func (s *side) tokens() dispatch.Tokens {
	b, me := s.b, s.me()
	t := dispatch.Tokens{X: memory.Host(narrow(b.dtype(), b.x[me])), Experts: numbers(b.idx[me]), Weights: numbers(b.weights[me])}
	if b.o.IndexType != kernels.Int64 {
		idx := make([]int32, len(b.idx[me]))
		for i, e := range b.idx[me] {
			idx[i] = int32(e)
		}
		t.Experts = numbers(idx)
	}
	t.Scales = numbers(b.scales[me])
	return t
}

func (s *side) dispatch(st device.Stream) {
	var err error
	if s.halves {
		s.h, err = s.d.DispatchSend(st, s.tokens())
		require.NoError(s.r, err)
		s.half()
		err = s.d.DispatchReceive(st, s.h)
	} else {
		s.h, err = s.d.Dispatch(st, s.tokens())
	}
	require.NoError(s.r, err)
	s.sync(st)
}

// redispatch sends what next has, the same ways.
func (s *side) redispatch(st device.Stream, next *batch) {
	s.b = next
	t := s.tokens()
	if s.halves {
		require.NoError(s.r, s.d.RedispatchSend(st, s.h, t.X, t.Scales))
		s.half()
		require.NoError(s.r, s.d.DispatchReceive(st, s.h))
	} else {
		require.NoError(s.r, s.d.Redispatch(st, s.h, t.X, t.Scales))
	}
	s.sync(st)
}

// place finds the first row of each group, and the length of the output.
func (s *side) place(groups [][]routed) (first []int, length int) {
	o := &s.b.o
	for _, g := range groups {
		if o.Layout == dispatch.Flat {
			length = (length + o.Align - 1) / o.Align * o.Align
		}
		first = append(first, length)
		switch o.Layout {
		case dispatch.Padded:
			length += o.Capacity
		case dispatch.Slab:
			length += s.b.n * o.MaxTokens
		case dispatch.RankPadded:
			length += o.MaxTokens
		default:
			length += len(g)
		}
	}
	if o.Layout == dispatch.Flat {
		length = (length + o.Align - 1) / o.Align * o.Align
	}
	return first, length
}

// eachRow calls f with every row that this rank should have, and padding with those that have to be zero.
func (s *side) eachRow(f func(at int, q routed), padding func(at int)) {
	groups := s.b.groups(s.me())
	first, length := s.place(groups)
	used := make([]bool, length)
	for i, g := range groups {
		for j, q := range g {
			used[first[i]+j] = true
			f(first[i]+j, q)
		}
	}
	for at, u := range used {
		if !u && s.b.zeroPadding() {
			padding(at)
		}
	}
}

// scalesOf reads the scales of a row of the output.
func (s *side) scalesOf(at int) []uint32 {
	words, all := s.b.scaleWords(), shm.View[uint32](s.h.Scales().Bytes())
	if words == 0 {
		return nil
	}
	if !s.b.o.ScaleColumns {
		return all[at*words : (at+1)*words]
	}
	rows := s.d.MaxRows()
	switch s.b.o.Layout {
	case dispatch.Padded:
		rows = s.b.o.Capacity
	case dispatch.Slab:
		rows = s.b.n * s.b.o.MaxTokens
	}
	group, i := at/rows, at%rows
	var scales []uint32
	for w := range words {
		scales = append(scales, all[(group*words+w)*rows+i])
	}
	return scales
}

// checkRows compares everything in the handle.
func (s *side) checkRows() {
	b, o, me := s.b, &s.b.o, s.me()
	groups := b.groups(me)
	first, length := s.place(groups)
	local := b.placement().Local(me)
	require.Equal(s.r, local, append([]int(nil), s.h.LocalExperts()...))
	counts, offsets, from := make([]int32, len(local)), make([]int32, 0, len(first)+1), make([]int32, b.n)
	for _, at := range first {
		offsets = append(offsets, int32(at))
	}
	offsets = append(offsets, int32(length))
	for _, g := range groups {
		for _, q := range g {
			from[q.src]++
		}
	}
	for src := range b.n {
		for t := range b.tokens(src) {
			for _, k := range b.choices(me, src, t) {
				i, _ := slices.BinarySearch(local, b.expertOf(routed{src, t, k}))
				counts[i]++
			}
		}
	}
	int32s := func(v memory.View) []int32 { return shm.View[int32](v.Bytes()) }
	require.Equal(s.r, counts, append([]int32{}, int32s(s.h.Counts())...), "counts")
	require.Equal(s.r, offsets, int32s(s.h.Offsets()), "offsets")
	require.Equal(s.r, from, int32s(s.h.RankCounts()), "rank counts")
	if o.HostCounts {
		c := s.r.counts(s.h)
		require.Equal(s.r, length, c.Rows)
		require.Equal(s.r, counts, append([]int32{}, c.Counts...))
		require.Equal(s.r, offsets, c.Offsets)
		require.Equal(s.r, from, c.RankCounts)
	}
	if o.Landed {
		require.Equal(s.r, counts, append([]int32{}, int32s(s.h.Landed())...), "landed")
	}
	require.Equal(s.r, o.Sources, s.h.Sources().Len() > 0)
	require.Equal(s.r, o.RowWeights || b.byToken(), s.h.Weights().Len() > 0)
	size := o.Hidden * int(b.rowType().Size())
	rows, sources, weights := s.h.Rows().Bytes(), int32s(s.h.Sources()), shm.View[float32](s.h.Weights().Bytes())
	indices := shm.View[int64](s.h.Indices().Bytes())
	s.eachRow(func(at int, q routed) {
		row, scales := b.sent(q)
		require.Equal(s.r, row, rows[at*size:][:size], "row %d is %+v", at, q)
		require.Equal(s.r, scales, s.scalesOf(at), "scales of row %d, %+v", at, q)
		if o.Sources {
			require.Equal(s.r, []int32{int32(q.src), int32(q.token)}, sources[2*at:2*at+2], "source of row %d", at)
		}
		if !b.byToken() {
			if o.RowWeights {
				require.Equal(s.r, b.weight(q), weights[at], "weight of row %d", at)
			}
			return
		}
		wantIndices, wantWeights := make([]int64, o.TopK), make([]float32, o.TopK)
		for k := range wantIndices {
			wantIndices[k] = -1
		}
		for _, k := range b.choices(me, q.src, q.token) {
			c := routed{q.src, q.token, k}
			i, _ := slices.BinarySearch(local, b.expertOf(c))
			wantIndices[k], wantWeights[k] = int64(i), b.weight(c)
		}
		require.Equal(s.r, wantIndices, indices[at*o.TopK:][:o.TopK], "indices of row %d", at)
		require.Equal(s.r, wantWeights, weights[at*o.TopK:][:o.TopK], "weights of row %d", at)
	}, func(at int) {
		require.Equal(s.r, make([]byte, size), rows[at*size:][:size], "padding row %d", at)
		if o.Sources {
			require.Equal(s.r, []int32{-1, -1}, sources[2*at:2*at+2], "source of padding row %d", at)
		}
		if o.RowWeights {
			require.Zero(s.r, weights[at], "weight of padding row %d", at)
		}
		for _, v := range s.scalesOf(at) {
			require.Zero(s.r, v, "scale of padding row %d", at)
		}
	})
}

// made is what this rank gives to a combine; the rows' padding is NaN, which nobody may read.
func (s *side) made(row func(q routed) []float32) []float32 {
	_, length := s.place(s.b.groups(s.me()))
	hidden := s.b.o.Hidden
	out := nans(length * hidden)
	s.eachRow(func(at int, q routed) { copy(out[at*hidden:], row(q)) }, func(int) {})
	return out
}

// beside is float32 beside the rows of this rank, per each.
func (s *side) beside(of func(q routed) float32) []float32 {
	_, length := s.place(s.b.groups(s.me()))
	per := 1
	if s.b.byToken() {
		per = s.b.o.TopK
	}
	out := nans(length * per)
	s.eachRow(func(at int, q routed) {
		if per == 1 && !s.b.byToken() {
			out[at] = of(q)
			return
		}
		for _, k := range s.b.choices(s.me(), q.src, q.token) {
			out[at*per+k] = of(routed{q.src, q.token, k})
		}
	}, func(int) {})
	return out
}

func (s *side) ownMade() []float32 {
	return s.made(func(q routed) []float32 { return s.b.made(s.me(), q) })
}

// combineWith says how side.combine calls.
type combineWith struct {
	weighting   dispatch.Weighting
	sums, ready bool
	biases      int
}

// weight is what the options make rows be weighted with.
func (b *batch) weighting(c combineWith) func(routed) float32 {
	switch c.weighting {
	case dispatch.Unweighted:
		return one
	case dispatch.GivenWeights:
		return b.givenWeight
	}
	return b.weight
}

// combine checks Combine of the experts' output in rows.
func (s *side) combine(st device.Stream, rows memory.View, c combineWith) {
	b, me, hidden := s.b, s.me(), s.b.o.Hidden
	o := dispatch.CombineOptions{Weighting: c.weighting}
	sums := nans(len(b.idx[me]))
	if c.weighting == dispatch.GivenWeights || c.sums {
		o.Weights = numbers(s.beside(b.givenWeight))
	}
	if c.sums {
		o.SumWeights = numbers(sums)
	}
	for i := range c.biases {
		o.Bias[i] = s.view(b.bias[i][me])
	}
	marked := make(chan struct{})
	close(marked)
	if c.ready {
		marked = make(chan struct{})
		o.Ready = s.mark(marked)
	}
	y := s.view(nans(len(b.dy[me])))
	if s.halves {
		require.NoError(s.r, s.d.CombineSend(st, y, rows, s.h, o))
		s.half()
		require.NoError(s.r, s.d.CombineReceive(st, s.h))
	} else {
		require.NoError(s.r, s.d.Combine(st, y, rows, s.h, o))
	}
	s.sync(st)
	<-marked
	got := wide(b.sumType(), y.Bytes())
	for t := range b.tokens(me) {
		var bias [][]float32
		for i := range c.biases {
			bias = append(bias, b.row(b.bias[i], me, t))
		}
		require.Equal(s.r, b.combined(me, t, b.weighting(c), b.made, bias...), got[t*hidden:][:hidden], "%+v of token %d of rank %d", c, t, me)
	}
	if c.sums {
		for i, w := range sums {
			want := b.given[me][i]
			if b.idx[me][i] < 0 {
				want = 0
			}
			require.Equal(s.r, want, w, "sum of weights %d", i)
		}
	}
}

// mark marks the groups of this rank as done one by one.
func (s *side) mark(done chan struct{}) memory.View {
	groups := s.b.groups(s.me())
	words := make([]uint32, len(groups))
	go func() {
		defer close(done)
		for i := len(groups) - 1; i >= 0; i-- {
			for range groups[i] {
				atomic.AddUint32(&words[i], 1)
			}
		}
	}()
	return numbers(words)
}

// combineBackward checks both gradients.
func (s *side) combineBackward(st device.Stream, dRows, rows memory.View, c combineWith) {
	b, o, hidden, me := s.b, &s.b.o, s.b.o.Hidden, s.me()
	co := dispatch.CombineOptions{Weighting: c.weighting}
	given := c.weighting == dispatch.GivenWeights
	var dw []float32
	switch {
	case c.weighting == dispatch.Unweighted || b.byToken():
	case given:
		co.Weights = numbers(s.beside(b.givenWeight))
		dw = nans(int(co.Weights.Len() / 4))
	default:
		dw = nans(len(b.idx[me]))
	}
	if (c.weighting == dispatch.Unweighted || b.byToken()) && c.sums {
		rows = none // nobody needs them
	}
	require.NoError(s.r, s.d.CombineBackward(st, dRows, numbers(dw), s.view(b.dy[me]), rows, s.h, co))
	s.sync(st)
	got := wide(b.sumType(), dRows.Bytes())
	s.eachRow(func(at int, q routed) {
		require.Equal(s.r, b.dRow(q, b.weighting(c)), got[at*hidden:][:hidden], "gradient of row %d, %+v", at, q)
		if given && len(dw) > 0 {
			require.Equal(s.r, dot(b.made(me, q), b.row(b.dy, q.src, q.token)), dw[at], "gradient of the weight of row %d", at)
		}
	}, func(at int) {
		require.Equal(s.r, make([]float32, hidden), got[at*hidden:][:hidden], "padding row %d", at)
	})
	if given || len(dw) == 0 {
		return
	}
	for i, v := range dw {
		want := float32(0)
		if q := (routed{me, i / o.TopK, i % o.TopK}); b.expertOf(q) >= 0 {
			want = dot(b.made(b.placement().Rank(me, q.token, b.expertOf(q)), q), b.row(b.dy, me, q.token))
		}
		require.Equal(s.r, want, v, "gradient of weight %d", i)
	}
}

// dMade is a gradient of a row that an expert got.
func (b *batch) dMade(rank int, q routed) []float32 {
	d := make([]float32, b.o.Hidden)
	for i, v := range b.row(b.dy, q.src, q.token) {
		d[i] = v * (1 + float32(rank)/8 + float32(q.choice)/16)
	}
	return round(b.sumType(), d)
}

// dispatchBackward checks the gradients of x and of the weights.
func (s *side) dispatchBackward(st device.Stream, dRows memory.View, weights bool) {
	b, hidden, me := s.b, s.b.o.Hidden, s.me()
	dx, dw := s.view(nans(len(b.dy[me]))), nans(len(b.idx[me]))
	var dWeights, dRowWeights memory.View
	if weights {
		dWeights, dRowWeights = numbers(dw), numbers(s.beside(b.givenWeight))
	}
	require.NoError(s.r, s.d.DispatchBackward(st, dx, dWeights, dRows, dRowWeights, s.h))
	s.sync(st)
	got := wide(b.sumType(), dx.Bytes())
	for t := range b.tokens(me) {
		require.Equal(s.r, b.combined(me, t, one, b.dMade), got[t*hidden:][:hidden], "gradient of token %d of rank %d", t, me)
	}
	if weights {
		for i, w := range dw {
			want := b.given[me][i]
			if b.idx[me][i] < 0 {
				want = 0
			}
			require.Equal(s.r, want, w, "gradient of weight %d", i)
		}
	}
}

var layouts = []dispatch.Layout{dispatch.Flat, dispatch.Padded, dispatch.Slab, dispatch.TokenMajor, dispatch.RankPadded}

// randomOptions draws a dispatcher for n ranks.
func randomOptions(rng *rand.Rand, n int) dispatch.Options {
	wideTypes := []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Float16}
	o := dispatch.Options{
		Experts: 1 + rng.IntN(12), TopK: 1 + rng.IntN(5), Hidden: []int{1, 3, 8, 33, 64, 130, 300}[rng.IntN(7)], MaxTokens: 1 + rng.IntN(24),
		DType: wideTypes[rng.IntN(3)], Layout: layouts[rng.IntN(len(layouts))], Handles: 2, HostCounts: rng.IntN(2) == 0, LowLatency: rng.IntN(4) == 0,
	}
	if rng.IntN(2) == 0 {
		o.IndexType = kernels.Int64
	}
	switch rng.IntN(3) {
	case 0:
		o.DType = kernels.Float8E4M3
		o.CombineDType = wideTypes[rng.IntN(3)]
	case 1:
		o.Quantize = true
	}
	if o.Quantize || o.DType == kernels.Float8E4M3 {
		o.ScalePerToken, o.ScaleColumns = rng.IntN(4) == 0, rng.IntN(2) == 0
		o.ScaleFormat = dispatch.ScaleFormat(rng.IntN(2))
	} else if rng.IntN(4) == 0 {
		o.CombineDType = wideTypes[rng.IntN(3)]
	}
	o.Float8Combine, o.Sources, o.RowWeights = rng.IntN(4) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0
	switch o.Layout {
	case dispatch.Flat:
		o.Align = []int{1, 2, 8, 16}[rng.IntN(4)]
	case dispatch.Padded:
		o.Capacity = n * o.MaxTokens
	}
	o.Landed = !o.Layout.ByToken() && rng.IntN(2) == 0
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
	stream, err := device.Host().NewStream()
	require.NoError(r, err)
	for i := range uint64(count) {
		rng := rand.New(rand.NewPCG(seed+i, 0))
		o := randomOptions(rng, r.Group.Size())
		require.NoError(r, r.Group.Barrier(r.Ctx))
		randomWorld(r, o, rng, rand.New(rand.NewPCG(seed+i, uint64(r.Group.Rank())+100)), stream)
	}
	require.NoError(r, stream.Close())
}

// randomWorld runs a dispatcher with random inputs and calls. rng is the same on all ranks, own is this rank's.
func randomWorld(r *rank, o dispatch.Options, rng, own *rand.Rand, stream device.Stream) {
	n := r.Group.Size()
	d, err := dispatch.New(r.Ctx, r.Heap, o)
	require.NoError(r, err, "%+v", o)
	size := int64(d.MaxRows()) * int64(o.Hidden) * (&batch{o: o}).sumType().Size()
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
		b := narrow(s.b.sumType(), rows)
		v := symmetric[which].View()
		switch own.IntN(3) {
		case 0:
			return memory.Host(b)
		case 1:
			if which == 0 && s.h.Rows().Len() >= int64(len(b)) {
				v = s.h.Rows()
			}
		}
		v = v.Slice(0, int64(len(b)))
		copy(v.Bytes(), b)
		return v
	}
	for round := range 3 {
		var st device.Stream
		if own.IntN(2) == 0 {
			st = stream
		}
		sides := make([]*side, 2)
		halves := rng.IntN(2) == 0
		for i := range sides {
			sides[i] = &side{r: r, d: d, b: randomBatch(rng, o, n, round == 1), halves: halves}
			sides[i].dispatch(st)
		}
		if rng.IntN(2) == 0 {
			slices.Reverse(sides)
		}
		for _, s := range sides {
			s.checkRows()
			if rng.IntN(3) == 0 {
				next := *s.b
				other := randomBatch(rng, o, n, false)
				for src := range next.x {
					next.x[src] = append(other.x[src], next.x[src]...)[:len(next.x[src])]
					next.scales[src] = append(other.scales[src], next.scales[src]...)[:len(next.scales[src])]
				}
				s.redispatch(st, &next)
				s.checkRows()
			}
			c := combineWith{weighting: dispatch.Weighting(rng.IntN(3)), sums: rng.IntN(3) == 0, ready: rng.IntN(4) == 0, biases: rng.IntN(3)}
			if s.b.byToken() {
				c.weighting = 0
			}
			rows := s.ownMade()
			view := place(s, 0, rows)
			s.combine(st, view, c)
			dRows := place(s, 1, rows)
			if own.IntN(4) == 0 {
				dRows = view
			}
			s.combineBackward(st, dRows, view, c)
			s.dispatchBackward(st, place(s, 0, s.made(func(q routed) []float32 { return s.b.dMade(s.me(), q) })), rng.IntN(2) == 0)
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

func TestRandomWorlds(t *testing.T) {
	for n := 1; n <= 9; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			local(t, n, func(r *rank) { randomWorlds(r, uint64(1000*n), 8) })
		})
	}
}

func TestRandomWorldsAcrossProcesses(t *testing.T) {
	processes(t, 3, func(r *rank) { randomWorlds(r, 1, 6) })
}
