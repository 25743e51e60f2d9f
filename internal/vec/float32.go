package vec

import "fmt"

// Chunk is how many elements one assembly call takes at most: a goroutine inside one cannot be stopped for garbage
// collection, so it comes back now and then.
const chunk = 1 << 16

func sameLen(name string, n int, others ...int) {
	for _, m := range others {
		if m != n {
			panic(fmt.Sprintf("vec: %s with slices of %d and %d", name, n, m))
		}
	}
}

// Scale computes dst = w*x.
func Scale(dst, x []float32, w float32) {
	sameLen("Scale", len(dst), len(x))
	for len(dst) > 0 {
		n := min(len(dst), chunk)
		i := scaleAsm(dst[:n], x[:n], w)
		for ; i < n; i++ {
			dst[i] = w * x[i]
		}
		dst, x = dst[n:], x[n:]
	}
}

// Add computes dst = a + b.
func Add(dst, a, b []float32) {
	sameLen("Add", len(dst), len(a), len(b))
	for len(dst) > 0 {
		n := min(len(dst), chunk)
		i := addAsm(dst[:n], a[:n], b[:n])
		for ; i < n; i++ {
			dst[i] = a[i] + b[i]
		}
		dst, a, b = dst[n:], a[n:], b[n:]
	}
}

// Mul computes dst = a * b, element by element.
func Mul(dst, a, b []float32) {
	sameLen("Mul", len(dst), len(a), len(b))
	for len(dst) > 0 {
		n := min(len(dst), chunk)
		i := mulAsm(dst[:n], a[:n], b[:n])
		for ; i < n; i++ {
			dst[i] = a[i] * b[i]
		}
		dst, a, b = dst[n:], a[n:], b[n:]
	}
}
