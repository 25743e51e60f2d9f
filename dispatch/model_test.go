package dispatch_test

import (
	"math"
	"slices"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// The model: what a dispatcher does, computed plainly on all ranks' data. Numbers are compared bit for bit.

// batch is the input of all ranks.
type batch struct {
	o       dispatch.Options
	n       int
	idx     [][]int64   // [tokens, TopK] of each rank
	weights [][]float32 // nil: none are given
	x       [][]float32 // what DType can hold
	scales  [][]uint32  // of tokens of float8
	dy      [][]float32 // what CombineDType can hold
	given   [][]float32 // [tokens, TopK]: weights for a combine
	bias    [2][][]float32
	hosts   [][]int // their ranks, where there are several
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
		if format != dispatch.Float32Scales {
			fraction, exponent := math.Frexp(float64(scale))
			if fraction == 0.5 {
				exponent--
			}
			scale, factor = float32(math.Ldexp(1, exponent)), float32(math.Ldexp(1, -exponent))
		}
		bits := math.Float32bits(scale)
		if format != dispatch.UE8M0Scales {
			words = append(words, bits)
		} else if i%4 == 0 {
			words = append(words, bits>>23)
		} else {
			words[i/4] |= bits >> 23 << (8 * (i % 4))
		}
		for _, v := range part {
			q = append(q, vec.ToFloat8E4M3(v*factor).Float32())
		}
	}
	return q, words
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
	return b.crossed(sum)
}

// crossed is a sum as it is when it has crossed.
func (b *batch) crossed(sum []float32) []float32 {
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
	for _, bias := range bias {
		for i, v := range bias {
			y[i] += v
		}
	}
	if b.hosts == nil {
		for r := range b.n {
			for i, v := range b.partial(r, src, token, weight, row) {
				y[i] += v
			}
		}
	}
	for _, ranks := range b.hosts { // each host's sum, and then the sum of hosts
		sum, there := make([]float32, b.o.Hidden), false
		for _, r := range ranks {
			for i, v := range b.partial(r, src, token, weight, row) {
				sum[i] += v
				there = true
			}
		}
		if there {
			for i, v := range b.crossed(sum) {
				y[i] += v
			}
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

// bytes is the input of a rank as memory holds it.
func (b *batch) bytes(me int) (x, experts, weights, scales []byte) {
	experts = shm.Bytes(b.idx[me])
	if b.o.IndexType != kernels.Int64 {
		idx := make([]int32, len(b.idx[me]))
		for i, e := range b.idx[me] {
			idx[i] = int32(e)
		}
		experts = shm.Bytes(idx)
	}
	return narrow(b.dtype(), b.x[me]), experts, shm.Bytes(b.weights[me]), shm.Bytes(b.scales[me])
}

// dMade is a gradient of a row that an expert got.
func (b *batch) dMade(rank int, q routed) []float32 {
	d := make([]float32, b.o.Hidden)
	for i, v := range b.row(b.dy, q.src, q.token) {
		d[i] = v * (1 + float32(rank)/8 + float32(q.choice)/16)
	}
	return round(b.sumType(), d)
}
