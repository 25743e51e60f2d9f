package main

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func noise(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	normal(v, 1, r)
	return v
}

// Every shape around the edges of tiles and panels, against the definition in float64.
func TestMatMul(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	rows, cols := tileShape()
	t.Logf("tile %d x %d", rows, cols)
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
				check("matMul", nil, func(c []float32) { matMul(c, a, b, m, n, k) })
				check("matMulTA", nil, func(c []float32) { matMulTA(c, at, b, m, n, k) })
				check("matMulTB", nil, func(c []float32) { matMulTB(c, a, bt, m, n, k, false) })
				check("matMulTB, add", before, func(c []float32) { matMulTB(c, a, bt, m, n, k, true) })
				// What Go does where there is no assembly.
				check("plain", nil, func(c []float32) {
					g := product{m: m, n: n, k: k, rsa: k, csa: 1, rsb: n, csb: 1}
					clear(c)
					panel := make([]float32, goCols*depth)
					for p := 0; p < k; p += depth {
						for j := 0; j < n; j += goCols {
							part := panel[:goCols*min(depth, k-p)]
							g.pack(part, b, p, j, goCols)
							g.plain(c, a, part, 0, m, p, j)
						}
					}
				})
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
	matMul(all, a, b, m, n, k)
	for i := range m {
		matMul(one, a[i*k:], b, 1, n, k)
		require.Equal(t, all[i*n:(i+1)*n], one)
	}
}

func BenchmarkMatMul(b *testing.B) {
	r := rand.New(rand.NewPCG(5, 6))
	const m, n, k = 256, 256, 128 // the first product of an expert, with its mean number of tokens
	x, w, y := noise(r, m*k), noise(r, k*n), noise(r, m*n)
	g, dx := noise(r, k*n), noise(r, m*k)
	for name, f := range map[string]func(){
		"AB":  func() { matMul(y, x, w, m, n, k) },
		"AtB": func() { matMulTA(g, x, y, k, n, m) },
		"ABt": func() { matMulTB(dx, y, w, m, k, n, false) },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				f()
			}
			b.ReportMetric(2*m*n*k*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}
