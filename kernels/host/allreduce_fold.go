package host

import (
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// fold combines elements of one type, given as bytes of any alignment. Partial results are of the type's own size or, for
// floats of 16 and 8 bits, float32.
type fold interface {
	// rows combines bytes lo to hi of the rows, in order, into dst, which may be one of them.
	rows(dst []byte, rows [][]byte, lo, hi int64, op kernels.ReduceOp, ranks int)
	// start makes src a partial result.
	start(partial, src []byte)
	// step is partial = in op src.
	step(partial, in, src []byte, op kernels.ReduceOp)
	// end is dst = in op src, no longer partial. dst may be src.
	end(dst, in, src []byte, op kernels.ReduceOp, ranks int)
	// join combines partial results, in order, into dst, no longer partial.
	join(dst []byte, partials [][]byte, op kernels.ReduceOp, ranks int)
}

// folds keeps the fold of every type that was needed, with its scratch.
type folds [kernels.Float8E5M2 + 1]fold

func (f *folds) of(d kernels.DType) fold {
	if f[d] == nil {
		f[d] = newFold(d)
	}
	return f[d]
}

func newFold(d kernels.DType) fold {
	switch d {
	case kernels.Uint8:
		return new(ownFold[uint8])
	case kernels.Int32:
		return new(ownFold[int32])
	case kernels.Int64:
		return new(ownFold[int64])
	case kernels.Float64:
		return new(ownFold[float64])
	case kernels.Float16:
		return new(wideFold[vec.Float16])
	case kernels.BFloat16:
		return new(wideFold[vec.BFloat16])
	case kernels.Float8E4M3:
		return new(wideFold[vec.Float8E4M3])
	case kernels.Float8E5M2:
		return new(wideFold[vec.Float8E5M2])
	default:
		return new(ownFold[float32])
	}
}

// vecOp splits an operator into what package vec knows: an average is a sum with a divisor.
func vecOp(op kernels.ReduceOp, ranks int) (vec.Op, int) {
	switch op {
	case kernels.Avg:
		return vec.Sum, ranks
	case kernels.Min:
		return vec.Min, 1
	case kernels.Max:
		return vec.Max, 1
	case kernels.Prod:
		return vec.Prod, 1
	default:
		return vec.Sum, 1
	}
}

// rowFold holds the rows of one call of package vec.
type rowFold[T vec.Element] struct{ views [][]T }

func (f *rowFold[T]) rows(dst []byte, rows [][]byte, lo, hi int64, op kernels.ReduceOp, ranks int) {
	f.views = f.views[:0]
	for _, r := range rows {
		f.views = append(f.views, shm.View[T](r[lo:hi]))
	}
	o, div := vecOp(op, ranks)
	vec.ReduceRows(shm.View[T](dst), f.views, o, div)
	clear(f.views)
}

// ownFold is for types that are reduced in themselves.
type ownFold[T vec.Wide | float32] struct {
	rowFold[T]
	pair [2][]byte
}

func (f *ownFold[T]) start(partial, src []byte) { copy(partial, src) }

func (f *ownFold[T]) step(partial, in, src []byte, op kernels.ReduceOp) {
	f.end(partial[:len(src)], in, src, op, 1)
}

func (f *ownFold[T]) end(dst, in, src []byte, op kernels.ReduceOp, ranks int) {
	f.pair = [2][]byte{in, src}
	f.rows(dst, f.pair[:], 0, int64(len(src)), op, ranks)
	f.pair = [2][]byte{}
}

func (f *ownFold[T]) join(dst []byte, partials [][]byte, op kernels.ReduceOp, ranks int) {
	f.rows(dst, partials, 0, int64(len(dst)), op, ranks)
}

// wideFold is for types that are reduced in float32.
type wideFold[T vec.Float] struct {
	rowFold[T]
	acc [1024]float32
}

func (f *wideFold[T]) start(partial, src []byte) {
	in := shm.View[T](src)
	vec.Load(shm.View[float32](partial)[:len(in)], in)
}

func (f *wideFold[T]) step(partial, in, src []byte, op kernels.ReduceOp) {
	v := shm.View[T](src)
	acc := shm.View[float32](partial)[:len(v)]
	copy(acc, shm.View[float32](in))
	o, _ := vecOp(op, 1)
	vec.Accumulate(acc, v, o)
}

func (f *wideFold[T]) end(dst, in, src []byte, op kernels.ReduceOp, ranks int) {
	o, div := vecOp(op, ranks)
	to, from, partial := shm.View[T](dst), shm.View[T](src), shm.View[float32](in)
	for len(to) > 0 {
		n := min(len(to), len(f.acc))
		acc := f.acc[:n]
		copy(acc, partial)
		vec.Accumulate(acc, from[:n], o)
		vec.Store(to[:n], acc, div)
		to, from, partial = to[n:], from[n:], partial[n:]
	}
}

func (f *wideFold[T]) join(dst []byte, partials [][]byte, op kernels.ReduceOp, ranks int) {
	o, div := vecOp(op, ranks)
	to := shm.View[T](dst)
	for at := 0; at < len(to); at += len(f.acc) {
		n := min(len(f.acc), len(to)-at)
		acc := f.acc[:n]
		for i, p := range partials {
			row := shm.View[float32](p)[at : at+n]
			if i == 0 {
				copy(acc, row)
			} else {
				vec.Accumulate(acc, row, o)
			}
		}
		vec.Store(to[at:at+n], acc, div)
	}
}
