package vec

import (
	"fmt"
	"unsafe"
)

// Op is how two elements become one. An average is a Sum with a divisor.
//
// Min and Max take the new element x over the old one where it is less (greater) or not a number: a NaN once met stays,
// and of equal zeros the first stays.
type Op uint8

const (
	Sum Op = iota
	Min
	Max
	Prod
)

// String is the operator's name.
func (op Op) String() string {
	if op > Prod {
		return fmt.Sprintf("Op(%d)", uint8(op))
	}
	return [...]string{"sum", "min", "max", "prod"}[op]
}

// block is how many elements are kept on the stack between two steps: small enough for the first-level cache.
const block = 1024

func ptr[T any](x []T) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(x)) }

// whole is how many of n elements make whole vectors of the given width: none without a vector unit.
func whole(n, width int) int {
	if cpu < avx2 {
		return 0
	}
	return n &^ (width - 1)
}

// Load widens src into acc, exactly.
func Load[T Float](acc []float32, src []T) {
	sameLen("Load", len(acc), len(src))
	for len(acc) > 0 {
		n := min(len(acc), chunk)
		load(acc[:n], src[:n])
		acc, src = acc[n:], src[n:]
	}
}

func load[T Float](acc []float32, src []T) {
	k := kindOf[T]()
	if k == kindFloat32 {
		copy(acc, any(src).([]float32))
		return
	}
	i := whole(len(acc), 8)
	if i > 0 {
		loadAsm(k, ptr(acc), ptr(src), i)
	}
	if i < len(acc) {
		loadGo(acc[i:], src[i:])
	}
}

func loadGo[T Float](acc []float32, src []T) {
	switch s := any(src).(type) {
	case []float32:
		copy(acc, s)
	case []Float16:
		for i, v := range s {
			acc[i] = v.Float32()
		}
	case []BFloat16:
		for i, v := range s {
			acc[i] = v.Float32()
		}
	case []Float8E4M3:
		for i, v := range s {
			acc[i] = v.Float32()
		}
	case []Float8E5M2:
		for i, v := range s {
			acc[i] = v.Float32()
		}
	}
}

// Store narrows acc into dst, each element divided by div first if div is above 1 and rounded to nearest, ties to even.
// How a type treats what it cannot hold is said at its conversion.
func Store[T Float](dst []T, acc []float32, div int) {
	sameLen("Store", len(dst), len(acc))
	d := float32(max(div, 1))
	for len(dst) > 0 {
		n := min(len(dst), chunk)
		store(dst[:n], acc[:n], d)
		dst, acc = dst[n:], acc[n:]
	}
}

func store[T Float](dst []T, acc []float32, div float32) {
	k := kindOf[T]()
	i := whole(len(dst), 8)
	switch {
	case k == kindFloat32 && div == 1:
		copy(any(dst).([]float32), acc)
		return
	case i > 0 && k == kindFloat32:
		rows := [1][]float32{acc}
		rowsAsm(Sum, ptr(dst), unsafe.Pointer(&rows), 1, 0, i, div)
	case i > 0:
		storeAsm(k, ptr(dst), ptr(acc), i, div)
	}
	if i < len(dst) {
		storeGo(dst[i:], acc[i:], div)
	}
}

func storeGo[T Float](dst []T, acc []float32, div float32) {
	acc = acc[:len(dst)]
	switch d := any(dst).(type) {
	case []float32:
		for i, v := range acc {
			d[i] = v / div
		}
	case []Float16:
		for i, v := range acc {
			d[i] = ToFloat16(v / div)
		}
	case []BFloat16:
		for i, v := range acc {
			d[i] = ToBFloat16(v / div)
		}
	case []Float8E4M3:
		for i, v := range acc {
			d[i] = ToFloat8E4M3(v / div)
		}
	case []Float8E5M2:
		for i, v := range acc {
			d[i] = ToFloat8E5M2(v / div)
		}
	}
}

// Accumulate folds src, widened to float32, into acc.
func Accumulate[T Float](acc []float32, src []T, op Op) {
	sameLen("Accumulate", len(acc), len(src))
	op.check("Accumulate")
	for len(acc) > 0 {
		n := min(len(acc), chunk)
		accumulate(acc[:n], src[:n], op)
		acc, src = acc[n:], src[n:]
	}
}

func (op Op) check(name string) {
	if op > Prod {
		panic(fmt.Sprintf("vec: %s with %v", name, op))
	}
}

func accumulate[T Float](acc []float32, src []T, op Op) {
	i := whole(len(acc), 8)
	if i > 0 {
		accumulateAsm(kindOf[T](), op, ptr(acc), ptr(src), i)
	}
	if i < len(acc) {
		accumulateGo(acc[i:], src[i:], op)
	}
}

func accumulateGo[T Float](acc []float32, src []T, op Op) {
	if s, ok := any(src).([]float32); ok {
		reduceGo(acc, s, op)
		return
	}
	var buf [block]float32
	for len(acc) > 0 {
		n := min(len(acc), block)
		loadGo(buf[:n], src[:n])
		reduceGo(acc[:n], buf[:n], op)
		acc, src = acc[n:], src[n:]
	}
}

// reduce folds src into dst, in their own type: dst = dst op src. Integers wrap.
func reduce[T Wide](dst, src []T, op Op) {
	var zero T
	i := whole(len(dst), 32/int(unsafe.Sizeof(zero)))
	if i > 0 {
		reduceAsm(kindOf[T](), op, ptr(dst), ptr(src), i)
	}
	if i < len(dst) {
		reduceGo(dst[i:], src[i:], op)
	}
}

func reduceGo[T float32 | Wide](dst, src []T, op Op) {
	src = src[:len(dst)]
	switch op {
	case Sum:
		for i, v := range src {
			dst[i] += v
		}
	case Min:
		for i, v := range src {
			if v < dst[i] || v != v {
				dst[i] = v
			}
		}
	case Max:
		for i, v := range src {
			if v > dst[i] || v != v {
				dst[i] = v
			}
		}
	case Prod:
		for i, v := range src {
			dst[i] *= v
		}
	}
}

// divide divides by div, integers towards zero.
func divide[T Wide](dst []T, div int) {
	switch d := any(dst).(type) {
	case []float64:
		for i := range d {
			d[i] /= float64(div)
		}
	case []int64:
		for i := range d {
			d[i] /= int64(div)
		}
	case []int32:
		for i := range d {
			d[i] = int32(int64(d[i]) / int64(div))
		}
	case []uint8:
		for i := range d {
			d[i] = uint8(int(d[i]) / div)
		}
	}
}

// ReduceRows computes dst = rows[0] op rows[1] op ..., folded in that order, and divides by div if it is above 1. It
// reads each row once and writes dst once; float types are folded and divided in float32 and rounded once. The result
// depends on nothing but the values and the order of the rows: it is the same bits on every machine (but for the bits
// of a NaN that a Sum or Prod makes).
//
// An integer average divides the wrapped sum towards zero, as NCCL does.
//
// All rows are as long as dst. dst may be the same memory as a row; other overlap is not allowed. It panics if there is
// no row.
func ReduceRows[T Element](dst []T, rows [][]T, op Op, div int) {
	if len(rows) == 0 {
		panic("vec: ReduceRows without a row")
	}
	for _, r := range rows {
		sameLen("ReduceRows", len(dst), len(r))
	}
	op.check("ReduceRows")
	switch d := any(dst).(type) {
	case []float32:
		rowsFloat32(d, any(rows).([][]float32), op, float32(max(div, 1)))
	case []Float16:
		rowsNarrow(d, any(rows).([][]Float16), op, float32(max(div, 1)))
	case []BFloat16:
		rowsNarrow(d, any(rows).([][]BFloat16), op, float32(max(div, 1)))
	case []Float8E4M3:
		rowsNarrow(d, any(rows).([][]Float8E4M3), op, float32(max(div, 1)))
	case []Float8E5M2:
		rowsNarrow(d, any(rows).([][]Float8E5M2), op, float32(max(div, 1)))
	case []float64:
		rowsWide(d, any(rows).([][]float64), op, div)
	case []int64:
		rowsWide(d, any(rows).([][]int64), op, div)
	case []int32:
		rowsWide(d, any(rows).([][]int32), op, div)
	case []uint8:
		rowsWide(d, any(rows).([][]uint8), op, div)
	}
}

func rowsFloat32(dst []float32, rows [][]float32, op Op, div float32) {
	i := 0
	for end := whole(len(dst), 8); i < end; {
		n := min(end-i, chunk)
		rowsAsm(op, ptr(dst[i:]), ptr(rows), len(rows), 4*i, n, div)
		i += n
	}
	if i < len(dst) {
		rowsFloat32Go(dst, rows, i, op, div)
	}
}

func rowsFloat32Go(dst []float32, rows [][]float32, i int, op Op, div float32) {
	var acc [block]float32
	for i < len(dst) {
		n := min(len(dst)-i, block)
		copy(acc[:n], rows[0][i:])
		for _, r := range rows[1:] {
			reduceGo(acc[:n], r[i:i+n], op)
		}
		storeGo(dst[i:i+n], acc[:n], div)
		i += n
	}
}

func rowsNarrow[T Float](dst []T, rows [][]T, op Op, div float32) {
	i := 0
	if k := kindOf[T](); cpu >= avx512 && (k == kindFloat16 || k == kindBFloat16) {
		for end := len(dst) &^ 15; i < end; {
			n := min(end-i, chunk)
			halfRowsAsm(k, op, ptr(dst[i:]), ptr(rows), len(rows), 2*i, n, div)
			i += n
		}
	}
	if i < len(dst) {
		rowsBlocks(dst, rows, i, op, div)
	}
}

// rowsBlocks does the elements from i on, a block at a time.
func rowsBlocks[T Float](dst []T, rows [][]T, i int, op Op, div float32) {
	var acc [block]float32
	for i < len(dst) {
		n := min(len(dst)-i, block)
		load(acc[:n], rows[0][i:i+n])
		for _, r := range rows[1:] {
			accumulate(acc[:n], r[i:i+n], op)
		}
		store(dst[i:i+n], acc[:n], div)
		i += n
	}
}

func rowsWide[T Wide](dst []T, rows [][]T, op Op, div int) {
	var acc [block]T
	for i := 0; i < len(dst); {
		n := min(len(dst)-i, block)
		copy(acc[:n], rows[0][i:i+n])
		for _, r := range rows[1:] {
			reduce(acc[:n], r[i:i+n], op)
		}
		if div > 1 {
			divide(acc[:n], div)
		}
		copy(dst[i:i+n], acc[:n])
		i += n
	}
}

// WeightedSum computes dst = w[0]*rows[0] + w[1]*rows[1] + ..., in that order from zero, in float32, each product
// rounded before its sum. It reads each row once and writes dst once. Without rows dst is cleared.
//
// All rows are as long as dst. dst may be the same memory as a row; other overlap is not allowed.
func WeightedSum[D, S Float](dst []D, rows [][]S, w []float32) {
	if len(rows) != len(w) {
		panic(fmt.Sprintf("vec: WeightedSum of %d rows with %d weights", len(rows), len(w)))
	}
	for _, r := range rows {
		sameLen("WeightedSum", len(dst), len(r))
	}
	if len(rows) == 0 {
		clear(dst)
		return
	}
	if d, ok := any(dst).([]float32); ok {
		weighted(d, rows, w, 0)
		return
	}
	weightedNarrow(dst, rows, w)
}

// weighted does the elements of all rows that start at off.
func weighted[S Float](dst []float32, rows [][]S, w []float32, off int) {
	i := 0
	var zero S
	for end := whole(len(dst), 8); i < end; {
		n := min(end-i, chunk)
		weightedAsm(kindOf[S](), ptr(dst[i:]), ptr(rows), ptr(w), len(rows), (off+i)*int(unsafe.Sizeof(zero)), n)
		i += n
	}
	if i < len(dst) {
		weightedGo(dst[i:], rows, w, off+i)
	}
}

func weightedGo[S Float](dst []float32, rows [][]S, w []float32, off int) {
	var acc, x [block]float32
	for len(dst) > 0 {
		n := min(len(dst), block)
		clear(acc[:n])
		for r, row := range rows {
			loadGo(x[:n], row[off:off+n])
			for i, v := range x[:n] {
				acc[i] += float32(w[r] * v)
			}
		}
		copy(dst, acc[:n])
		dst, off = dst[n:], off+n
	}
}

func weightedNarrow[D, S Float](dst []D, rows [][]S, w []float32) {
	var acc [block]float32
	for i := 0; i < len(dst); {
		n := min(len(dst)-i, block)
		weighted(acc[:n], rows, w, i)
		store(dst[i:i+n], acc[:n], 1)
		i += n
	}
}
