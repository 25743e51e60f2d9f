package memory

import (
	"fmt"
	"math"
	"reflect"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// The floating-point types that Go lacks, by their bits. The method Float32() float32 of each is the number: ToBFloat16(f).Float32().
type (
	// Float16 is IEEE 754 binary16.
	Float16 = vec.Float16
	// BFloat16 is the upper half of a float32.
	BFloat16 = vec.BFloat16
	// Float8E4M3 has four bits of exponent, three of mantissa and no infinity; its greatest value is 448.
	Float8E4M3 = vec.Float8E4M3
	// Float8E5M2 has five bits of exponent and two of mantissa.
	Float8E5M2 = vec.Float8E5M2
)

// ToFloat16 rounds to the nearest Float16, ties to even; larger numbers become infinity.
func ToFloat16(f float32) Float16 { return vec.ToFloat16(f) }

// ToBFloat16 rounds to the nearest BFloat16, ties to even.
func ToBFloat16(f float32) BFloat16 { return vec.ToBFloat16(f) }

// Element is what typed memory consists of.
type Element interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~uint32 | ~int32 | ~uint64 | ~int64 | ~float32 | ~float64
}

func elementsOf[T Element]() kernels.Elements {
	switch any(*new(T)).(type) {
	case Float16:
		return kernels.ElementsOf(kernels.Float16, false)
	case BFloat16:
		return kernels.ElementsOf(kernels.BFloat16, false)
	case Float8E4M3:
		return kernels.ElementsOf(kernels.Float8E4M3, false)
	case Float8E5M2:
		return kernels.ElementsOf(kernels.Float8E5M2, false)
	}
	switch kind := reflect.TypeFor[T]().Kind(); kind {
	case reflect.Int8:
		return kernels.SignedBytes
	case reflect.Int16, reflect.Uint16:
		return kernels.ShortElements
	case reflect.Int32, reflect.Uint32:
		return kernels.ElementsOf(kernels.Int32, kind == reflect.Uint32)
	case reflect.Int64, reflect.Uint64:
		return kernels.ElementsOf(kernels.Int64, kind == reflect.Uint64)
	case reflect.Float32:
		return kernels.ElementsOf(kernels.Float32, false)
	case reflect.Float64:
		return kernels.ElementsOf(kernels.Float64, false)
	}
	return kernels.AnyElements
}

// unlike reports whether numbers of e cannot be read as those of o: both are known, longer than a byte, and differ in size.
func unlike(e, o kernels.Elements) bool { return e.Size() > 1 && o.Size() > 1 && e.Size() != o.Size() }

// As is v with its elements known to be T, as those of Wrap are. A slice of it has the same elements.
func As[T Element](v View) View {
	v.elem = elementsOf[T]()
	return v
}

// Element names the elements of v, such as "int64"; "bytes" if they are not known.
func (v View) Element() string { return v.elem.String() }

// Holds reports whether v may consist of elements of type t. Integers of 16 bits may be of any type of that size, and unknown memory of
// any type.
func (v View) Holds(t kernels.DType) bool {
	switch e := v.elem; {
	case e.Size() == 0:
		return true
	case e == kernels.ShortElements:
		return e.Size() == t.Size()
	default:
		return e.DType() == t
	}
}

// Orders is Holds, and false for integers of the other sign than those of t, which compare otherwise: int8, uint32 and uint64.
func (v View) Orders(t kernels.DType) bool {
	return v.Holds(t) && !(v.elem.Signed() && (t == kernels.Uint8 || t == kernels.Int32 || t == kernels.Int64))
}

// Alike reports whether v and o may consist of the same elements. See kernels.Elements.Alike.
func (v View) Alike(o View) bool { return v.elem.Alike(o.elem) }

// Whole reports whether n bytes are a whole number of the elements of v, which of unknown elements any are.
func (v View) Whole(n int64) bool { return n%max(v.elem.Size(), 1) == 0 }

// Of is the memory of v as a slice of T, in the machine's byte order; it shares v's bytes and ends where v ends. For memory
// of a GPU it is nil, like Bytes. Like a slice expression out of range, it panics if the bytes are not a whole number of T or
// do not begin at a multiple of its size, and if the elements of v are known to be of another size.
func Of[T Element](v View) []T {
	b := v.Bytes()
	size := shm.SizeOf[T]()
	if unlike(v.elem, elementsOf[T]()) {
		panic(fmt.Sprintf("memory: a view of %v, which have %d bytes, is not made of %T, which have %d bytes", v.elem, v.elem.Size(), *new(T), size))
	}
	if len(b)%size != 0 || shm.Addr(b)%uintptr(size) != 0 {
		panic(fmt.Sprintf("memory: a view of %d bytes at address %#x is not made of %T, which have %d bytes", len(b), shm.Addr(b), *new(T), size))
	}
	return shm.View[T](b)[: len(b)/size : len(b)/size]
}

// Wrap is a view of the elements of s, which is Go memory and stays alive with the view. See Host.
func Wrap[T Element](s []T) View { return As[T](Host(shm.Bytes(s))) }

// Matrix is rows of equal length, one after the other, such as tokens by their hidden size. It is a small value; copies share
// the elements. The zero Matrix has no rows.
type Matrix[T Element] struct {
	rows, cols int
	data       []T // nil on a GPU
	view       View
	buffer     *Buffer // of AllocMatrix
}

// NewMatrix is a matrix of zeros in Go memory. It panics when a size is negative, or when 64 bits do not hold that many bytes.
func NewMatrix[T Element](rows, cols int) Matrix[T] {
	if rows < 0 || cols < 0 || cols > 0 && rows > math.MaxInt/shm.SizeOf[T]()/cols {
		panic(fmt.Sprintf("memory: a matrix of %d rows of %d", rows, cols))
	}
	data := make([]T, rows*cols)
	return Matrix[T]{rows: rows, cols: cols, data: data, view: Wrap(data)}
}

// AllocMatrix is a matrix in the heap's pool, where peers write in place. It is Heap.Alloc: every rank makes the same calls
// with the same sizes in the same order, the content is undefined, and Free gives it back.
func AllocMatrix[T Element](h *Heap, rows, cols int) (Matrix[T], error) {
	size := int64(shm.SizeOf[T]())
	if rows < 0 || cols < 0 || cols > 0 && int64(rows) > math.MaxInt64/size/int64(cols) {
		return Matrix[T]{}, fmt.Errorf("memory: allocate a matrix of %d rows of %d: %w", rows, cols, ErrInvalid)
	}
	b, err := h.Alloc(int64(rows) * int64(cols) * size)
	if err != nil {
		return Matrix[T]{}, err
	}
	return Matrix[T]{rows: rows, cols: cols, data: Of[T](b.View()), view: As[T](b.View()), buffer: b}, nil
}

// MatrixOf is v as rows of cols elements each, sharing v's memory. A length that is not a whole number of rows, an address
// that is not a multiple of T's size, and elements that are known to be of another size are an ErrInvalid.
func MatrixOf[T Element](v View, cols int) (Matrix[T], error) {
	size := int64(shm.SizeOf[T]())
	if unlike(v.elem, elementsOf[T]()) {
		return Matrix[T]{}, fmt.Errorf("memory: a view of %v, which have %d bytes, has no rows of %T, which have %d: %w", v.elem, v.elem.Size(), *new(T), size, ErrInvalid)
	}
	if cols < 1 || int64(cols) > math.MaxInt64/size || v.Len()%(int64(cols)*size) != 0 || v.Ptr()%uintptr(size) != 0 {
		return Matrix[T]{}, fmt.Errorf("memory: %d bytes at address %#x are not rows of %d %T: %w", v.Len(), v.Ptr(), cols, *new(T), ErrInvalid)
	}
	return Matrix[T]{rows: int(v.Len() / (int64(cols) * size)), cols: cols, data: Of[T](v), view: As[T](v)}, nil
}

// Rows is the number of rows.
func (m Matrix[T]) Rows() int { return m.rows }

// Cols is the number of elements of a row.
func (m Matrix[T]) Cols() int { return m.cols }

// View is the memory, for the calls that move it.
func (m Matrix[T]) View() View { return m.view }

// Data is all elements, row after row; nil for memory of a GPU.
func (m Matrix[T]) Data() []T { return m.data }

// Row is row i, which shares the matrix's memory. It panics when i is out of range, and for memory of a GPU.
func (m Matrix[T]) Row(i int) []T {
	return m.data[i*m.cols : (i+1)*m.cols : (i+1)*m.cols]
}

// Slice is rows lo up to hi, which share the matrix's memory. Like a slice expression it panics if they are not in m.
func (m Matrix[T]) Slice(lo, hi int) Matrix[T] {
	if lo < 0 || hi < lo || hi > m.rows {
		panic(fmt.Sprintf("memory: rows %d to %d of a matrix of %d rows", lo, hi, m.rows))
	}
	row := int64(m.cols) * int64(shm.SizeOf[T]())
	s := Matrix[T]{rows: hi - lo, cols: m.cols, view: m.view.Slice(int64(lo)*row, int64(hi-lo)*row)}
	if m.data != nil {
		s.data = m.data[lo*m.cols : hi*m.cols : hi*m.cols]
	}
	return s
}

// Free gives a matrix of AllocMatrix back to the pool, by the rules of Buffer.Free. For other matrices, also slices of that one,
// it is an ErrInvalid.
func (m Matrix[T]) Free() error {
	if m.buffer == nil {
		return fmt.Errorf("memory: free a matrix that AllocMatrix did not make: %w", ErrInvalid)
	}
	return m.buffer.Free()
}
