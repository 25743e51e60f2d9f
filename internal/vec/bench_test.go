package vec

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// sizes fit the first-level cache, the second, and neither.
var sizes = []int{4 << 10, 64 << 10, 4 << 20}

// loop runs f at each level and counts the bytes of its operands.
func loop(b *testing.B, name string, bytes int, f func()) {
	for _, lv := range levels() {
		b.Run(fmt.Sprintf("%s/level%d", name, lv), func(b *testing.B) {
			at(lv, func() {
				b.SetBytes(int64(bytes))
				for b.Loop() {
					f()
				}
			})
		})
	}
}

// normal is random numbers that T holds well: subnormals take the processor longer.
func normal[T Element](r *rand.Rand, n int) []T {
	x := convert[T](r, n)
	switch d := any(x).(type) {
	case []float32:
		storeGo(d, random(r, n), 1)
	case []Float16:
		storeGo(d, random(r, n), 1)
	case []BFloat16:
		storeGo(d, random(r, n), 1)
	case []Float8E4M3:
		storeGo(d, random(r, n), 1)
	case []Float8E5M2:
		storeGo(d, random(r, n), 1)
	case []float64:
		for i := range d {
			d[i] = r.NormFloat64()
		}
	}
	return x
}

func benchRows[T Element](b *testing.B, op Op, div int) {
	r := rand.New(rand.NewPCG(23, 24))
	var zero T
	for _, bytes := range sizes {
		n := bytes / int(unsafe.Sizeof(zero))
		rows := make([][]T, 4)
		for i := range rows {
			rows[i] = normal[T](r, n)
		}
		dst := make([]T, n)
		loop(b, fmt.Sprintf("%T/%v/%d", zero, op, bytes), 5*bytes, func() { ReduceRows(dst, rows, op, div) })
	}
}

// BenchmarkReduceRows folds 4 rows of so many bytes; its bytes are the rows' and the result's.
func BenchmarkReduceRows(b *testing.B) {
	benchRows[float32](b, Sum, 1)
	benchRows[float32](b, Sum, 4)
	benchRows[float32](b, Min, 1)
	benchRows[BFloat16](b, Sum, 1)
	benchRows[BFloat16](b, Sum, 4)
	benchRows[Float16](b, Sum, 1)
	benchRows[Float8E4M3](b, Sum, 1)
	benchRows[Float8E5M2](b, Sum, 1)
	benchRows[float64](b, Sum, 1)
	benchRows[int64](b, Sum, 1)
	benchRows[int64](b, Prod, 1)
	benchRows[int32](b, Sum, 1)
	benchRows[uint8](b, Sum, 1)
}

// BenchmarkWeightedSum is a combine: rows of 1024 floats, two for each token, in no order.
func BenchmarkWeightedSum(b *testing.B) {
	r := rand.New(rand.NewPCG(25, 26))
	const tokens, hidden = 4096, 1024
	in, out, order := random(r, 2*tokens*hidden), make([]float32, tokens*hidden), r.Perm(2*tokens)
	half := normal[BFloat16](r, 2*tokens*hidden)
	row := func(i int) int { return order[i] * hidden }
	loop(b, "float32", 12*tokens*hidden, func() {
		for i := range tokens {
			p, q := row(2*i), row(2*i+1)
			WeightedSum(out[i*hidden:(i+1)*hidden], [][]float32{in[p : p+hidden], in[q : q+hidden]}, []float32{0.3, 0.7})
		}
	})
	loop(b, "bfloat16", 8*tokens*hidden, func() {
		for i := range tokens {
			p, q := row(2*i), row(2*i+1)
			WeightedSum(out[i*hidden:(i+1)*hidden], [][]BFloat16{half[p : p+hidden], half[q : q+hidden]}, []float32{0.3, 0.7})
		}
	})
	loop(b, "copy", 8*tokens*hidden, func() { copy(out, in[:tokens*hidden]) })
}
