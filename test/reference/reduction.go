// Package reference says what Switchyard's operations make, by the plainest means, for tests and benchmarks.
package reference

import (
	"encoding/binary"
	"math"

	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Reduced is what the ranks' values of an element make, combined in the order of ranks in float64.
func Reduced(op kernels.ReduceOp, ranks int, value func(rank int) float64) float64 {
	acc := value(0)
	for p := 1; p < ranks; p++ {
		switch v := value(p); op {
		case kernels.Min:
			acc = min(acc, v)
		case kernels.Max:
			acc = max(acc, v)
		case kernels.Prod:
			acc *= v
		default:
			acc += v
		}
	}
	if op == kernels.Avg {
		acc /= float64(ranks)
	}
	return acc
}

// Put stores v as element i of type dt, rounded as the type does.
func Put(b []byte, dt kernels.DType, i int64, v float64) {
	le := binary.LittleEndian
	p := b[i*dt.Size():]
	switch dt {
	case kernels.Uint8:
		p[0] = byte(int64(v))
	case kernels.Int32:
		le.PutUint32(p, uint32(int64(v)))
	case kernels.Int64:
		le.PutUint64(p, uint64(int64(v)))
	case kernels.Float16:
		le.PutUint16(p, uint16(vec.ToFloat16(float32(v))))
	case kernels.BFloat16:
		le.PutUint16(p, uint16(vec.ToBFloat16(float32(v))))
	case kernels.Float32:
		le.PutUint32(p, math.Float32bits(float32(v)))
	case kernels.Float64:
		le.PutUint64(p, math.Float64bits(v))
	case kernels.Float8E4M3:
		p[0] = byte(vec.ToFloat8E4M3(float32(v)))
	case kernels.Float8E5M2:
		p[0] = byte(vec.ToFloat8E5M2(float32(v)))
	}
}

// Get is element i as a float64, exactly.
func Get(b []byte, dt kernels.DType, i int64) float64 {
	le := binary.LittleEndian
	p := b[i*dt.Size():]
	switch dt {
	case kernels.Uint8:
		return float64(p[0])
	case kernels.Int32:
		return float64(int32(le.Uint32(p)))
	case kernels.Int64:
		return float64(int64(le.Uint64(p)))
	case kernels.Float16:
		return float64(vec.Float16(le.Uint16(p)).Float32())
	case kernels.BFloat16:
		return float64(vec.BFloat16(le.Uint16(p)).Float32())
	case kernels.Float32:
		return float64(math.Float32frombits(le.Uint32(p)))
	case kernels.Float64:
		return math.Float64frombits(le.Uint64(p))
	case kernels.Float8E4M3:
		return float64(vec.Float8E4M3(p[0]).Float32())
	default:
		return float64(vec.Float8E5M2(p[0]).Float32())
	}
}
