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

// Dot returns the sum of a*b. The order of summation depends on the length and on the machine's vector unit only.
func Dot(a, b []float32) float32 {
	sameLen("Dot", len(a), len(b))
	var sum float32
	for len(a) > 0 {
		n := min(len(a), chunk)
		part, i := dotAsm(a[:n], b[:n])
		if i == 0 {
			part, i = dotGo(a[:n], b[:n])
		}
		for ; i < n; i++ {
			part += a[i] * b[i]
		}
		sum += part
		a, b = a[n:], b[n:]
	}
	return sum
}

// dotGo sums in four chains, for speed and against rounding.
func dotGo(a, b []float32) (float32, int) {
	var s [4]float32
	i := 0
	for ; i+4 <= len(a); i += 4 {
		x, y := a[i:i+4:i+4], b[i:i+4:i+4]
		s[0] += x[0] * y[0]
		s[1] += x[1] * y[1]
		s[2] += x[2] * y[2]
		s[3] += x[3] * y[3]
	}
	return (s[0] + s[1]) + (s[2] + s[3]), i
}
