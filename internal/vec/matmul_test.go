package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

func levels() []level {
	ls := []level{plain}
	for lv := avx2; lv <= cpu; lv++ {
		ls = append(ls, lv)
	}
	return ls
}

// products are the three forms of one product.
func products(m, n, k int, add bool) map[string]product {
	return map[string]product{
		"AB":  {m: m, n: n, k: k, rsa: k, csa: 1, ldb: n, add: add},
		"AtB": {m: m, n: n, k: k, rsa: 1, csa: m, ldb: n, add: add},
		"ABt": {m: m, n: n, k: k, rsa: k, csa: 1, ldb: k, transB: true, add: add},
	}
}

func TestMatMulAgainstFloat64(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	sizes := [][3]int{{1, 1, 1}, {1, 8, 17}, {2, 3, 5}, {3, 16, 8}, {5, 33, 9}, {6, 16, 256}, {7, 31, 257}, {11, 32, 64},
		{12, 48, 40}, {13, 15, 300}, {23, 65, 130}, {240, 17, 19}, {241, 40, 33}, {253, 7, 512}, {16, 256, 1}, {4, 4, 0}}
	for _, s := range sizes {
		m, n, k := s[0], s[1], s[2]
		a, b, c0 := random(r, m*k+3)[3:], random(r, k*n+1)[1:], random(r, m*n+5)[5:]
		for _, add := range []bool{false, true} {
			for form, g := range products(m, n, k, add) {
				var first []float32
				for _, lv := range levels() {
					c := append([]float32(nil), c0...)
					c = append(c, 42) // a guard
					if k == 0 {
						g.run(c[:m*n], a, b)
					} else if !g.asm(lv, c[:m*n], a, b) {
						g.plain(c[:m*n], a, b)
					}
					name := fmt.Sprintf("%s %v add=%v level=%d", form, s, add, lv)
					require.Equal(t, float32(42), c[m*n], name)
					for i := range m {
						for j := range n {
							want, size := 0.0, 0.0
							if add {
								want = float64(c0[i*n+j])
							}
							for p := range k {
								bi := p*g.ldb + j
								if g.transB {
									bi = j*g.ldb + p
								}
								x := float64(a[i*g.rsa+p*g.csa]) * float64(b[bi])
								want += x
								size += math.Abs(x)
							}
							require.InDelta(t, want, float64(c[i*n+j]), 1e-6*(1+size), "%s at %d,%d", name, i, j)
						}
					}
					if lv == avx2 {
						first = c
					} else if lv == avx512 {
						require.Equal(t, first, c, "both vector widths give the same bits: %s", name)
					}
				}
			}
		}
	}
}

func TestMatMulRowsDoNotDependOnOtherRows(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	const m, n, k = 61, 72, 300
	a, b := random(r, m*k), random(r, k*n)
	at := make([]float32, m*k)
	for i := range m {
		for p := range k {
			at[p*m+i] = a[i*k+p]
		}
	}
	whole, part := make([]float32, m*n), make([]float32, m*n)
	for _, lv := range levels() {
		for form, g := range products(m, n, k, false) {
			x := a
			if form == "AtB" {
				x = at
			}
			run := func(g product, c, x []float32) {
				if !g.asm(lv, c, x, b) {
					g.plain(c, x, b)
				}
			}
			run(g, whole, x)
			for lo := 0; lo < m; {
				h := min(1+r.IntN(20), m-lo)
				g := g
				g.m = h
				run(g, part[lo*n:], x[lo*g.rsa:])
				lo += h
			}
			require.Equal(t, whole, part, "%s at level %d", form, lv)
		}
	}
}

func TestMatMulPanicsOnShortSlices(t *testing.T) {
	x := make([]float32, 11)
	require.PanicsWithValue(t, "vec: MatMul of m 3, n 4, k 1 with slices of 11, 11 and 11", func() { MatMul(x, x, x, 3, 4, 1, false) })
	require.Panics(t, func() { MatMulTA(x, x, x, 1, 1, 12, false) })
	require.Panics(t, func() { MatMulTB(x, x, x, 1, 1, -1, false) })
}

func BenchmarkMatMul(b *testing.B) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, s := range [][3]int{{256, 256, 256}, {1, 256, 256}, {16, 512, 128}, {64, 512, 128}, {1024, 512, 128}, {512, 8, 128}, {512, 512, 512}, {2048, 1024, 1024}} {
		m, n, k := s[0], s[1], s[2]
		x, y, z := random(r, m*k), random(r, k*n), make([]float32, m*n)
		for _, form := range []string{"AB", "AtB", "ABt"} {
			g := products(m, n, k, false)[form]
			for _, lv := range levels() {
				if lv == plain && m*n*k > 1<<24 || form != "AB" && lv == avx2 {
					continue
				}
				b.Run(fmt.Sprintf("%s/%dx%dx%d/level%d", form, m, n, k, lv), func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						if !g.asm(lv, z, x, y) {
							g.plain(z, x, y)
						}
					}
					b.ReportMetric(2*float64(m)*float64(n)*float64(k)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				})
			}
		}
	}
}
