package shm

import (
	"sync/atomic"
	"unsafe"
)

// pointer turns an address of memory outside the Go heap into a pointer. The double indirection keeps vet's check of
// uintptr conversions for the places where it can be right.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// Word is the 64-bit word at byte off of b, for atomic use by several threads or processes. off must be a multiple of 8
// and the word must lie inside b.
func Word(b []byte, off int64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b[off : off+8]))) // no load of b, not even under the race detector
}

// Word32 is the 32-bit word at byte off of b, a multiple of 4.
func Word32(b []byte, off int64) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(b[off : off+4])))
}

// Number is what View and Bytes reinterpret.
type Number interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~uint32 | ~int32 | ~uint64 | ~int64 | ~float32 | ~float64
}

// SizeOf is how many bytes a T has.
func SizeOf[T Number]() int { return int(unsafe.Sizeof(*new(T))) }

// View reads b as numbers of type T in the machine's byte order; a tail shorter than one number is left out.
func View[T Number](b []byte) []T {
	var z T
	n := len(b) / int(unsafe.Sizeof(z))
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

// Of is the T at the beginning of b, which has its size at least and is aligned as it is. A T has no pointers.
func Of[T any](b []byte) *T {
	var z T
	return (*T)(unsafe.Pointer(unsafe.SliceData(b[:unsafe.Sizeof(z)])))
}

// Bytes reads numbers as the bytes they are made of.
func Bytes[T Number](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(z)))
}

// Addr is the address of b's first byte, 0 for an empty slice without backing.
func Addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// At makes a slice of n bytes of memory outside the Go heap, such as a tensor that a C caller owns. The caller keeps the
// memory alive while the slice is used.
func At(addr uintptr, n int64) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(pointer(addr)), n)
}
