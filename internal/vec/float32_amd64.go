//go:build amd64 && !purego

package vec

import "unsafe"

// The functions named ...Asm do as many elements from the front as make whole vectors and return that number.

func axpyAsm(dst, x []float32, w float32) int {
	n := whole(len(dst), 8)
	if n > 0 {
		axpyAVX2(ptr(dst), ptr(x), n, w)
	}
	return n
}

func scaleAsm(dst, x []float32, w float32) int {
	n := whole(len(dst), 8)
	if n > 0 {
		scaleAVX2(ptr(dst), ptr(x), n, w)
	}
	return n
}

func addAsm(dst, a, b []float32) int {
	n := whole(len(dst), 8)
	if n > 0 {
		addAVX2(ptr(dst), ptr(a), ptr(b), n)
	}
	return n
}

func mulAsm(dst, a, b []float32) int {
	n := whole(len(dst), 8)
	if n > 0 {
		mulAVX2(ptr(dst), ptr(a), ptr(b), n)
	}
	return n
}

func dotAsm(a, b []float32) (sum float32, n int) {
	if n = whole(len(a), 8); n > 0 {
		dotAVX2(unsafe.Pointer(&sum), ptr(a), ptr(b), n)
	}
	return sum, n
}

func maxAsm(x []float32) (top float32, n int) {
	if n = whole(len(x), 8); n > 0 {
		maxAVX2(unsafe.Pointer(&top), ptr(x), n)
	}
	return top, n
}

func expSumAsm(dst, x []float32, shift float32) (sum float32, n int) {
	if n = whole(len(x), 8); n > 0 {
		var s [8]float32
		expSumAVX2(ptr(dst), ptr(x), n, unsafe.Pointer(&shift), unsafe.Pointer(&s))
		sum = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
	}
	return sum, n
}

func siluAsm(dst, x []float32) int {
	n := whole(len(dst), 8)
	if n > 0 {
		siluAVX2(ptr(dst), ptr(x), n)
	}
	return n
}

func siluGradAsm(dx, x, dy []float32) int {
	n := whole(len(dx), 8)
	if n > 0 {
		siluGradAVX2(ptr(dx), ptr(x), ptr(dy), n)
	}
	return n
}

func adamAsm(p, m, v, grad []float32, k *AdamStep) int {
	n := whole(len(p), 8)
	if n > 0 {
		adamAVX2(ptr(p), ptr(m), ptr(v), ptr(grad), n, unsafe.Pointer(k))
	}
	return n
}
