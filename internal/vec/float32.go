package vec

import (
	"fmt"
	"math"
)

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

// Axpy computes dst += w*x, the product rounded before the sum.
func Axpy(dst, x []float32, w float32) {
	sameLen("Axpy", len(dst), len(x))
	for len(dst) > 0 {
		n := min(len(dst), chunk)
		i := axpyAsm(dst[:n], x[:n], w)
		for ; i < n; i++ {
			dst[i] += float32(w * x[i])
		}
		dst, x = dst[n:], x[n:]
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

// SumSquares returns the sum of x*x, as Dot does.
func SumSquares(x []float32) float32 { return Dot(x, x) }

// Softmax computes dst = exp(x)/sum(exp(x)) and returns ln(sum(exp(x))), so that the cross-entropy of class i is the
// result less x[i]. An element of minus infinity becomes 0; a NaN anywhere, or nothing above minus infinity, makes all
// of dst NaN. The result for an empty row is minus infinity.
func Softmax(dst, x []float32) float32 {
	sameLen("Softmax", len(dst), len(x))
	if len(x) == 0 {
		return float32(math.Inf(-1))
	}
	top, i := maxAsm(x)
	if i == 0 {
		top = x[0]
	}
	for ; i < len(x); i++ {
		if x[i] > top {
			top = x[i]
		}
	}
	sum, i := expSumAsm(dst, x, top)
	for ; i < len(x); i++ {
		dst[i] = float32(math.Exp(float64(x[i] - top)))
		sum += dst[i]
	}
	Scale(dst, dst, 1/sum)
	return top + float32(math.Log(float64(sum)))
}

// SoftmaxGrad computes dx = y*(dy - sum(y*dy)), the gradient of y = Softmax(x).
func SoftmaxGrad(dx, y, dy []float32) {
	sameLen("SoftmaxGrad", len(dx), len(y), len(dy))
	d := Dot(y, dy)
	for i, v := range y {
		dx[i] = v * (dy[i] - d)
	}
}

// SiLU computes dst = x*sigmoid(x).
func SiLU(dst, x []float32) {
	sameLen("SiLU", len(dst), len(x))
	for len(dst) > 0 {
		n := min(len(dst), chunk)
		i := siluAsm(dst[:n], x[:n])
		for ; i < n; i++ {
			dst[i] = x[i] * sigmoid(x[i])
		}
		dst, x = dst[n:], x[n:]
	}
}

// SiLUGrad computes dx = dy times the derivative of SiLU at x.
func SiLUGrad(dx, x, dy []float32) {
	sameLen("SiLUGrad", len(dx), len(x), len(dy))
	for len(dx) > 0 {
		n := min(len(dx), chunk)
		i := siluGradAsm(dx[:n], x[:n], dy[:n])
		for ; i < n; i++ {
			s := sigmoid(x[i])
			dx[i] = dy[i] * s * (1 + x[i]*(1-s))
		}
		dx, x, dy = dx[n:], x[n:], dy[n:]
	}
}

func sigmoid(x float32) float32 { return float32(1 / (1 + math.Exp(-float64(x)))) }

// AdamStep is the numbers of one step of Adam with decoupled weight decay.
type AdamStep struct {
	beta1, rest1, beta2, rest2, correct1, correct2, eps, rate, decay float32
}

// NewAdamStep returns step t, counted from 1. Typical values: rate 1e-3, beta1 0.9, beta2 0.95, eps 1e-8, decay 0 to 0.1.
func NewAdamStep(t int, rate, beta1, beta2, eps, decay float64) AdamStep {
	return AdamStep{
		beta1: float32(beta1), rest1: float32(1 - beta1), beta2: float32(beta2), rest2: float32(1 - beta2),
		correct1: float32(1 - math.Pow(beta1, float64(t))), correct2: float32(1 - math.Pow(beta2, float64(t))),
		eps: float32(eps), rate: float32(rate), decay: float32(decay),
	}
}

// Apply updates the parameters p and their moments m and v, both zero before the first step, by the gradient grad. The
// four slices must not overlap.
func (k AdamStep) Apply(p, m, v, grad []float32) {
	sameLen("AdamStep.Apply", len(p), len(m), len(v), len(grad))
	for len(p) > 0 {
		n := min(len(p), chunk)
		i := adamAsm(p[:n], m[:n], v[:n], grad[:n], &k)
		for ; i < n; i++ {
			d := grad[i]
			m[i] = float32(k.beta1*m[i]) + float32(k.rest1*d)
			v[i] = float32(k.beta2*v[i]) + float32(k.rest2*float32(d*d))
			step := m[i]/k.correct1/(float32(math.Sqrt(float64(v[i]/k.correct2)))+k.eps) + float32(k.decay*p[i])
			p[i] -= float32(k.rate * step)
		}
		p, m, v, grad = p[n:], m[n:], v[n:], grad[n:]
	}
}
