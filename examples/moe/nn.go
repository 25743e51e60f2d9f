package main

import (
	"math"
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/internal/vec"
)

// Matrices are row-major slices of float32. Every layer keeps what its backward needs from its last forward; backward
// overwrites gradients, it does not add to them, unless it says so.

// tensor is a weight and its gradient.
type tensor struct{ w, g []float32 }

// slab holds the weights that one optimizer updates, in one piece each: weights, gradients, and Adam's two moments.
type slab struct {
	w, g, m, v []float32
	n          int // handed out so far
}

// take hands the next n parameters out. A slab without memory counts only.
func (s *slab) take(n int) tensor {
	lo := s.n
	s.n += n
	if s.w == nil {
		return tensor{}
	}
	return tensor{s.w[lo:s.n:s.n], s.g[lo:s.n:s.n]}
}

// newSlab makes a slab whose gradients live in g.
func newSlab(g []float32) *slab {
	n := len(g)
	return &slab{w: make([]float32, n), g: g, m: make([]float32, n), v: make([]float32, n)}
}

// normal fills a weight with random numbers of the given standard deviation.
func normal(w []float32, std float64, r *rand.Rand) {
	for i := range w {
		w[i] = float32(std * r.NormFloat64())
	}
}

func fill(w []float32, v float32) {
	for i := range w {
		w[i] = v
	}
}

// grow returns a slice of n elements, reusing the memory of s if it can. The contents are arbitrary.
func grow(s []float32, n int) []float32 {
	if cap(s) < n {
		return make([]float32, n, n+n/4)
	}
	return s[:n]
}

// linear is y = x w + b, from in to out features. b is empty for a layer without bias.
type linear struct {
	in, out int
	w, b    tensor
	x       []float32
}

func takeLinear(s *slab, in, out int, bias bool) linear {
	l := linear{in: in, out: out, w: s.take(in * out)}
	if bias {
		l.b = s.take(out)
	}
	return l
}

func (l *linear) forward(y, x []float32, rows int) {
	l.x = x
	vec.MatMul(y, x, l.w.w, rows, l.out, l.in, false)
	for r := range rows {
		if row := y[r*l.out : (r+1)*l.out]; len(l.b.w) > 0 {
			vec.Add(row, row, l.b.w)
		}
	}
}

// backward turns dy into dx, which it overwrites or, if add is set, adds to.
func (l *linear) backward(dx, dy []float32, rows int, add bool) {
	vec.MatMulTA(l.w.g, l.x, dy, l.in, l.out, rows, false)
	clear(l.b.g)
	for r := range rows {
		if len(l.b.g) > 0 {
			vec.Add(l.b.g, l.b.g, dy[r*l.out:(r+1)*l.out])
		}
	}
	vec.MatMulTB(dx, dy, l.w.w, rows, l.in, l.out, add)
}

// norm is RMS normalization: y = gain * u with u = x / rms(x), row by row.
type norm struct {
	width int
	gain  tensor
	u     []float32 // a copy, because x changes after the layer has read it
	scale []float32 // 1/rms of every row
	du    []float32
}

func takeNorm(s *slab, width int) norm {
	return norm{width: width, gain: s.take(width), du: make([]float32, width)}
}

const normEps = 1e-5

func (l *norm) forward(y, x []float32, rows int) {
	l.u, l.scale = grow(l.u, rows*l.width), grow(l.scale, rows)
	for r := range rows {
		lo, hi := r*l.width, (r+1)*l.width
		s := float32(1 / math.Sqrt(float64(vec.SumSquares(x[lo:hi]))/float64(l.width)+normEps))
		l.scale[r] = s
		vec.Scale(l.u[lo:hi], x[lo:hi], s)
		vec.Mul(y[lo:hi], l.u[lo:hi], l.gain.w)
	}
}

// backward adds the gradient of x to dx.
func (l *norm) backward(dx, dy []float32, rows int) {
	clear(l.gain.g)
	for r := range rows {
		lo, hi := r*l.width, (r+1)*l.width
		u, s := l.u[lo:hi], l.scale[r]
		vec.Mul(l.du, dy[lo:hi], u)
		vec.Add(l.gain.g, l.gain.g, l.du)
		// dx = scale * (du - u * mean(u * du)), where du = gain * dy.
		vec.Mul(l.du, dy[lo:hi], l.gain.w)
		mean := vec.Dot(l.du, u) / float32(l.width)
		vec.Axpy(dx[lo:hi], l.du, s)
		vec.Axpy(dx[lo:hi], u, -s*mean)
	}
}
