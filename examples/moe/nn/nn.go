// Package nn is the arithmetic of the model, on one core: matrix products, layers with their backward, and an optimizer.
package nn

import (
	"math"
	"math/rand/v2"
)

// Matrices are row-major slices of float32. Every layer keeps what its backward needs from its last forward; backward
// overwrites gradients, it does not add to them, unless it says so.

// Tensor is a weight and its gradient.
type Tensor struct{ W, G []float32 }

// Slab holds the weights that one optimizer updates, in one piece each: weights W, gradients G, and Adam's two moments M and V. A slab of
// weights alone has none of the others. The zero Slab has no memory and counts only.
type Slab struct {
	W, G, M, V []float32
	n          int // handed out so far
}

// Take hands the next n parameters out. A Slab without memory counts only.
func (s *Slab) Take(n int) Tensor {
	lo := s.n
	s.n += n
	if s.W == nil {
		return Tensor{}
	}
	if s.G == nil {
		return Tensor{W: s.W[lo:s.n:s.n]}
	}
	return Tensor{s.W[lo:s.n:s.n], s.G[lo:s.n:s.n]}
}

// Taken is how many parameters were handed out.
func (s *Slab) Taken() int { return s.n }

// NewSlab makes a Slab whose gradients live in g.
func NewSlab(g []float32) *Slab {
	n := len(g)
	return &Slab{W: make([]float32, n), G: g, M: make([]float32, n), V: make([]float32, n)}
}

// WeightsAlone makes a Slab of n weights that are not trained.
func WeightsAlone(n int) *Slab { return &Slab{W: make([]float32, n)} }

// Normal fills a weight with random numbers of the given standard deviation.
func Normal(w []float32, std float64, r *rand.Rand) {
	for i := range w {
		w[i] = float32(std * r.NormFloat64())
	}
}

// Fill fills a weight with one number.
func Fill(w []float32, v float32) {
	for i := range w {
		w[i] = v
	}
}

// Grow returns a slice of n elements, reusing the memory of s if it can. The contents are arbitrary.
func Grow(s []float32, n int) []float32 {
	if cap(s) < n {
		return make([]float32, n, n+n/4)
	}
	return s[:n]
}

// Linear is y = x w + b, from in to out features. b is empty for a layer without bias.
type Linear struct {
	In, Out int
	W, B    Tensor
	x       []float32 // of the last forward
}

// TakeLinear takes a layer out of a slab.
func TakeLinear(s *Slab, in, out int, bias bool) Linear {
	l := Linear{In: in, Out: out, W: s.Take(in * out)}
	if bias {
		l.B = s.Take(out)
	}
	return l
}

// Forward computes rows of y from rows of x. Backward reads x again.
func (l *Linear) Forward(y, x []float32, rows int) {
	l.x = x
	MatMul(y, x, l.W.W, rows, l.Out, l.In)
	for r := range rows {
		if len(l.B.W) > 0 {
			Add(y[r*l.Out:(r+1)*l.Out], l.B.W)
		}
	}
}

// Backward turns dy into dx, which it overwrites or, if add is set, adds to.
func (l *Linear) Backward(dx, dy []float32, rows int, add bool) {
	MatMulTA(l.W.G, l.x, dy, l.In, l.Out, rows)
	clear(l.B.G)
	for r := range rows {
		if len(l.B.G) > 0 {
			Add(l.B.G, dy[r*l.Out:(r+1)*l.Out])
		}
	}
	MatMulTB(dx, dy, l.W.W, rows, l.In, l.Out, add)
}

// Norm is RMS normalization: y = gain * u with u = x / rms(x), row by row.
type Norm struct {
	Gain  Tensor
	width int
	u     []float32 // a copy, because x changes after the layer has read it
	scale []float32 // 1/rms of every row
}

// TakeNorm takes a layer out of a slab.
func TakeNorm(s *Slab, width int) Norm {
	return Norm{Gain: s.Take(width), width: width}
}

const normEps = 1e-5

// Forward computes rows of y from rows of x.
func (l *Norm) Forward(y, x []float32, rows int) {
	l.u, l.scale = Grow(l.u, rows*l.width), Grow(l.scale, rows)
	gain := l.Gain.W[:l.width]
	for r := range rows {
		lo, hi := r*l.width, (r+1)*l.width
		x, u, y := x[lo:hi], l.u[lo:hi], y[lo:hi]
		s := float32(1 / math.Sqrt(float64(dot(x, x))/float64(l.width)+normEps))
		l.scale[r] = s
		for i, g := range gain {
			u[i] = s * x[i]
			y[i] = g * u[i]
		}
	}
}

// Backward adds the gradient of x to dx.
func (l *Norm) Backward(dx, dy []float32, rows int) {
	clear(l.Gain.G)
	gain, dgain := l.Gain.W[:l.width], l.Gain.G[:l.width]
	for r := range rows {
		lo, hi := r*l.width, (r+1)*l.width
		dx, dy, u, s := dx[lo:hi], dy[lo:hi], l.u[lo:hi], l.scale[r]
		// dx = scale * (du - u * mean(u * du)), where du = gain * dy.
		var sum float32
		for i, g := range gain {
			d := dy[i] * u[i]
			dgain[i] += d
			sum += g * d
		}
		mean := sum / float32(l.width)
		for i, g := range gain {
			dx[i] += s * (g*dy[i] - u[i]*mean)
		}
	}
}

// ReLU2 computes y = max(x, 0)², an activation that needs no exponential, and leaves max(x, 0) in x for backward.
func ReLU2(y, x []float32) {
	y = y[:len(x)]
	for i, v := range x {
		v = max(v, 0)
		x[i], y[i] = v, v*v
	}
}

// ReLU2Backward turns d, the gradient of ReLU2's y, into that of its x, of which ReLU2 has left the positive part.
func ReLU2Backward(d, x []float32) {
	d = d[:len(x)]
	for i, v := range x {
		d[i] *= 2 * v
	}
}

// Softmax turns logits into probabilities and returns ln(sum(exp(x))): the cross-entropy of class i is that less its logit.
func Softmax(x []float32) float32 {
	top := x[0]
	for _, v := range x {
		top = max(top, v)
	}
	var sum float32
	for i, v := range x {
		v = exp(v - top)
		x[i] = v
		sum += v
	}
	scale := 1 / sum
	for i := range x {
		x[i] *= scale
	}
	return top + float32(math.Log(float64(sum)))
}

// SoftmaxBackward turns d, the gradient of probabilities p, into that of the logits: p * (d - sum(p * d)).
func SoftmaxBackward(d, p []float32) {
	sum := dot(p, d)
	for i, v := range p {
		d[i] = v * (d[i] - sum)
	}
}

// exp is the exponential of a number that is not positive, right to about 2 units in the last place.
func exp(x float32) float32 {
	if x < -87 {
		return 0 // less than a float32 holds well
	}
	// x = n ln 2 + r, with the logarithm in two parts so that r is exact, and a polynomial for exp(r).
	n := int32(x*(1/math.Ln2) - 0.5)
	r := x - float32(n)*0.693359375 + float32(n)*2.12194440e-4
	p := float32(1.0 / 5040)
	p = p*r + 1.0/720
	p = p*r + 1.0/120
	p = p*r + 1.0/24
	p = p*r + 1.0/6
	p = p*r + 1.0/2
	p = p*r + 1
	p = p*r + 1
	return p * math.Float32frombits(uint32(n+127)<<23)
}

// dot is the sum of a*b, in four chains for speed.
func dot(a, b []float32) float32 {
	b = b[:len(a)]
	var s0, s1, s2, s3 float32
	i := 0
	for ; i+4 <= len(a); i += 4 {
		x, y := a[i:i+4:i+4], b[i:i+4:i+4]
		s0 += x[0] * y[0]
		s1 += x[1] * y[1]
		s2 += x[2] * y[2]
		s3 += x[3] * y[3]
	}
	for ; i < len(a); i++ {
		s0 += a[i] * b[i]
	}
	return (s0 + s1) + (s2 + s3)
}

// Add computes dst += x.
func Add(dst, x []float32) {
	dst = dst[:len(x)]
	for i, v := range x {
		dst[i] += v
	}
}

// Adam is the numbers of one step of the optimizer. The assembly reads them in this order.
type Adam struct {
	keep1, new1, keep2, new2 float32 // how the two moments are mixed
	rate, scale, eps         float32 // with the correction of young moments in them
}

// NewAdam is step t, counted from 1.
func NewAdam(t int, rate float64) *Adam {
	const beta1, beta2, eps = 0.9, 0.95, 1e-8
	return &Adam{
		keep1: beta1, new1: 1 - beta1, keep2: beta2, new2: 1 - beta2,
		rate: float32(rate / (1 - math.Pow(beta1, float64(t)))), scale: float32(1 / (1 - math.Pow(beta2, float64(t)))), eps: eps,
	}
}

// Apply updates weights by their gradients.
func (k *Adam) Apply(s *Slab) {
	w, m, v, g := s.W, s.M, s.V, s.G
	for len(w) > 0 {
		n := adamVector(w, m, v, g, k)
		if n == 0 {
			n = len(w)
			for i, d := range g {
				m[i] = float32(k.keep1*m[i]) + float32(k.new1*d)
				v[i] = float32(k.keep2*v[i]) + float32(k.new2*float32(d*d))
				w[i] -= float32(k.rate*m[i]) / (float32(math.Sqrt(float64(float32(k.scale*v[i])))) + k.eps)
			}
		}
		w, m, v, g = w[n:], m[n:], v[n:], g[n:]
	}
}
