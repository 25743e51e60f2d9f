//go:build amd64 && !purego

package vec

import "unsafe"

// The functions named ...Asm do as many elements from the front as make whole vectors and return that number.

func dotAsm(a, b []float32) (sum float32, n int) {
	if n = whole(len(a), 8); n > 0 {
		dotAVX2(unsafe.Pointer(&sum), ptr(a), ptr(b), n)
	}
	return sum, n
}
