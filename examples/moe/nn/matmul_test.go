package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func noise(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	Normal(v, 1, r)
	return v
}

// Every shape around the edges of tiles and panels, against the definition in float64.
func TestMatMul(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	rows, _ := tileShape()
	for _, m := range []int{0, 1, 2, 11, 12, 13, 37, manyRows + 1} {
		for _, n := range []int{1, 3, 8, 31, 32, 33, 70} {
			for _, k := range []int{0, 1, 7, depth, depth + 3} {
				a, b, before := noise(r, m*k), noise(r, k*n), noise(r, m*n)
				want := make([]float64, m*n)
				at, bt := make([]float32, m*k), make([]float32, k*n)
				for i := range m {
					for p := range k {
						at[p*m+i] = a[i*k+p]
						for j := range n {
							bt[j*k+p] = b[p*n+j]
							want[i*n+j] += float64(a[i*k+p]) * float64(b[p*n+j])
						}
					}
				}
				check := func(name string, plus []float32, f func(c []float32)) {
					c := append([]float32(nil), before...)
					f(c)
					for i := range c {
						w := want[i]
						if plus != nil {
							w += float64(plus[i])
						}
						if !(math.Abs(float64(c[i])-w) <= 2e-4) {
							require.Fail(t, name, "m %d n %d k %d: element %d is %v, want %v", m, n, k, i, c[i], w)
						}
					}
				}
				check("matMul", nil, func(c []float32) { MatMul(c, a, b, m, n, k) })
				check("matMulTA", nil, func(c []float32) { MatMulTA(c, at, b, m, n, k) })
				check("matMulTB", nil, func(c []float32) { MatMulTB(c, a, bt, m, n, k, false) })
				check("matMulTB, add", before, func(c []float32) { MatMulTB(c, a, bt, m, n, k, true) })
				// Tiles of other processors, and the loops in Go of those without assembly.
				for _, shape := range [][2]int{{0, 0}, {6, 16}} {
					if shape[0] > rows {
						continue
					}
					check(fmt.Sprint("tiles of ", shape), nil, func(c []float32) {
						product{m: m, n: n, k: k, rsa: k, csa: 1, rsb: n, csb: 1}.tiled(c, a, b, shape[0], shape[1])
					})
					check(fmt.Sprint("tiles, add ", shape), before, func(c []float32) {
						product{m: m, n: n, k: k, rsa: k, csa: 1, rsb: 1, csb: k, add: true}.tiled(c, a, bt, shape[0], shape[1])
					})
				}
			}
		}
	}
}

// A row is the same bits in whatever company: so one rank and many train alike.
func TestRowsOfAProductDoNotDependOnEachOther(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	const m, n, k = 29, 40, 300
	a, b := noise(r, m*k), noise(r, k*n)
	all, one := make([]float32, m*n), make([]float32, n)
	MatMul(all, a, b, m, n, k)
	for i := range m {
		MatMul(one, a[i*k:], b, 1, n, k)
		require.Equal(t, all[i*n:(i+1)*n], one)
	}
}

// The optimizer in assembly and in Go agree, and the step is the one of the definition.
func TestAdam(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	const n = 1<<16 + 21
	s := Slab{W: noise(r, n), G: noise(r, n), M: noise(r, n), V: noise(r, n)}
	for i, v := range s.V {
		s.V[i] = v * v
	}
	before := Slab{W: slices.Clone(s.W), M: slices.Clone(s.M), V: slices.Clone(s.V)}
	NewAdam(3, 1e-2).Apply(&s)
	for i, g := range s.G {
		m := 0.9*float64(before.M[i]) + 0.1*float64(g)
		v := 0.95*float64(before.V[i]) + 0.05*float64(g)*float64(g)
		w := float64(before.W[i]) - 1e-2*m/(1-math.Pow(0.9, 3))/(math.Sqrt(v/(1-math.Pow(0.95, 3)))+1e-8)
		require.InDelta(t, m, float64(s.M[i]), 1e-6)
		require.InDelta(t, v, float64(s.V[i]), 1e-5)
		require.InDelta(t, w, float64(s.W[i]), 1e-6+1e-5*math.Abs(w-float64(before.W[i])))
	}
}

func TestExpAndSoftmax(t *testing.T) {
	for x := float32(0); x > -87; x -= 0.01 {
		require.InEpsilon(t, math.Exp(float64(x)), float64(exp(x)), 4e-7, x)
	}
	require.Zero(t, exp(-1000))
	nan := float32(math.NaN())
	require.True(t, exp(nan) != exp(nan))
	p := []float32{1000, 1001, -1000}
	require.InDelta(t, 1001.3132617, float64(Softmax(p)), 1e-3)
	require.InDeltaSlice(t, []float32{0.26894142, 0.73105858, 0}, p, 1e-6)
	p[1] = nan
	require.True(t, math.IsNaN(float64(Softmax(p))))
}

func BenchmarkMatMul(b *testing.B) {
	r := rand.New(rand.NewPCG(5, 6))
	const m, n, k = 256, 256, 128 // the first product of an expert, with its mean number of tokens
	x, w, y := noise(r, m*k), noise(r, k*n), noise(r, m*n)
	g, dx := noise(r, k*n), noise(r, m*k)
	for name, f := range map[string]func(){
		"AB":  func() { MatMul(y, x, w, m, n, k) },
		"AtB": func() { MatMulTA(g, x, y, k, n, m) },
		"ABt": func() { MatMulTB(dx, y, w, m, k, n, false) },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				f()
			}
			b.ReportMetric(2*m*n*k*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}
