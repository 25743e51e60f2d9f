//go:build amd64 && !purego

package vec

// The functions named ...Asm do as many elements from the front as make whole vectors and return that number.

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
