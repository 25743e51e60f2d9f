package host

import (
	"math"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// quantized is a row of float8 with its scales. Its fields are scratch.
type quantized struct {
	wide, scaled []float32
	row, scales  []byte
}

const (
	maxFloat8 = 448  // of Float8E4M3
	leastMax  = 1e-4 // the largest magnitude of a block is taken for no less
)

// scaleOf is the scale of a block, what its elements are multiplied by, and the biased exponent that stands for the scale where
// it is a power of two. It is the rule of kernels.Scales.
func scaleOf(x []float32, format kernels.ScaleFormat) (scale, factor float32, exponent uint32) {
	most := max(math.Float32bits(leastMax), mostBits(x))
	scale = math.Float32frombits(most) / maxFloat8
	if format == kernels.Float32Scales {
		return scale, maxFloat8 / math.Float32frombits(most), 0
	}
	b := math.Float32bits(scale)
	exponent = b >> 23
	if b&(1<<23-1) != 0 {
		exponent++
	}
	if exponent >= 255 {
		return float32(math.NaN()), 0, 255
	}
	return math.Float32frombits(exponent << 23), math.Float32frombits((254 - exponent) << 23), exponent
}

// mostBits is the bits of the largest magnitude. A NaN is above all.
func mostBits(x []float32) uint32 {
	var a, b, c, d uint32 // four chains, for speed
	for len(x) >= 4 {
		q := x[:4:4]
		a, b = max(a, math.Float32bits(q[0])&^(1<<31)), max(b, math.Float32bits(q[1])&^(1<<31))
		c, d = max(c, math.Float32bits(q[2])&^(1<<31)), max(d, math.Float32bits(q[3])&^(1<<31))
		x = x[4:]
	}
	for _, v := range x {
		a = max(a, math.Float32bits(v)&^(1<<31))
	}
	return max(a, b, c, d)
}

// quantize makes a row of a token. The result is good until the next call.
func (q *quantized) quantize(m *kernels.DispatchBounds, token []byte) (row, scales []byte) {
	q.wide, q.scaled = sized(q.wide, m.Hidden), sized(q.scaled, m.Hidden)
	switch m.TokenType {
	case kernels.Float16:
		vec.Load(q.wide, shm.View[vec.Float16](token))
	case kernels.BFloat16:
		vec.Load(q.wide, shm.View[vec.BFloat16](token))
	default:
		vec.Load(q.wide, shm.View[float32](token))
	}
	q.row, q.scales = sized(q.row, m.Hidden), sized(q.scales, 4*m.ScaleWords())
	clear(q.scales)
	words := shm.View[uint32](q.scales)
	for i := 0; i*m.Scales.Block < m.Hidden; i++ {
		lo, hi := i*m.Scales.Block, min((i+1)*m.Scales.Block, m.Hidden)
		scale, factor, exponent := scaleOf(q.wide[lo:hi], m.Scales.Format)
		if m.Scales.Format == kernels.UE8M0Scales {
			words[i/4] |= exponent << (8 * (i % 4))
		} else {
			words[i] = math.Float32bits(scale)
		}
		vec.Scale(q.scaled[lo:hi], q.wide[lo:hi], factor)
	}
	vec.Store(shm.View[vec.Float8E4M3](q.row), q.scaled, 1)
	return q.row, q.scales
}

// partialBlock is how many elements of a partial sum have one scale.
const partialBlock = 128

// narrow writes a sum as it crosses to another host: float8, and behind them scales, all from multiples of 4 bytes on. It changes the sum.
func (q *quantized) narrow(sum []float32, to []byte) {
	scales := shm.View[float32](to[kernels.AlignUp(int64(len(sum)), 4):])
	for i := 0; len(sum) > 0; i++ {
		block := sum[:min(partialBlock, len(sum))]
		scale, factor, _ := scaleOf(block, kernels.Float32Scales)
		vec.Scale(block, block, factor)
		vec.Store(shm.View[vec.Float8E4M3](to[:len(block)]), block, 1)
		scales[i], sum, to = scale, sum[len(block):], to[len(block):]
	}
}

// widen is the inverse of narrow: what roundTrip makes of the sum.
func (q *quantized) widen(sum []float32, from []byte) {
	scales := shm.View[float32](from[kernels.AlignUp(int64(len(sum)), 4):])
	for i := 0; len(sum) > 0; i++ {
		block := sum[:min(partialBlock, len(sum))]
		vec.Load(block, shm.View[vec.Float8E4M3](from[:len(block)]))
		vec.Scale(block, block, scales[i])
		sum, from = sum[len(block):], from[len(block):]
	}
}

// roundTrip turns a partial sum into what is left of it after it has crossed as float8.
func (q *quantized) roundTrip(sum []float32) {
	q.row = sized(q.row, partialBlock)
	for len(sum) > 0 {
		block := sum[:min(partialBlock, len(sum))]
		scale, factor, _ := scaleOf(block, kernels.Float32Scales)
		narrow := shm.View[vec.Float8E4M3](q.row[:len(block)])
		vec.Scale(block, block, factor)
		vec.Store(narrow, block, 1)
		vec.Load(block, narrow)
		vec.Scale(block, block, scale)
		sum = sum[len(block):]
	}
}
