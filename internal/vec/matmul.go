package vec

import "fmt"

// MatMul computes C = A B, or C += A B if add is set, for row-major float32: C is m x n, A is m x k, B is k x n.
//
// Each element of C is one chain of multiply-adds over k, from first to last, starting at zero or at C. So a row of C
// does not depend on how many other rows the call has, nor on which they are. With FMA instructions (amd64 with AVX2)
// each step rounds once, whatever the vector width.
//
// C must not overlap A or B. It panics if a slice is shorter than its matrix.
func MatMul(c, a, b []float32, m, n, k int, add bool) {
	matrices("MatMul", c, a, b, m, n, k)
	product{m: m, n: n, k: k, rsa: k, csa: 1, ldb: n, add: add}.run(c, a, b)
}

// MatMulTA is MatMul with A given transposed, as k x m: C = Aᵀ B. It is the gradient of a weight.
func MatMulTA(c, a, b []float32, m, n, k int, add bool) {
	matrices("MatMulTA", c, a, b, m, n, k)
	product{m: m, n: n, k: k, rsa: 1, csa: m, ldb: n, add: add}.run(c, a, b)
}

// MatMulTB is MatMul with B given transposed, as n x k: C = A Bᵀ. It is the gradient of an input.
func MatMulTB(c, a, b []float32, m, n, k int, add bool) {
	matrices("MatMulTB", c, a, b, m, n, k)
	product{m: m, n: n, k: k, rsa: k, csa: 1, ldb: k, transB: true, add: add}.run(c, a, b)
}

func matrices(name string, c, a, b []float32, m, n, k int) {
	if m < 0 || n < 0 || k < 0 || len(c) < m*n || len(a) < m*k || len(b) < k*n {
		panic(fmt.Sprintf("vec: %s of m %d, n %d, k %d with slices of %d, %d and %d", name, m, n, k, len(c), len(a), len(b)))
	}
}

// product is a matrix product by strides, in elements. A(i, p) is at i*rsa + p*csa, B(p, j) at p*ldb + j, or at
// j*ldb + p if transB.
type product struct {
	m, n, k       int
	rsa, csa, ldb int
	transB, add   bool
}

func (g product) run(c, a, b []float32) {
	if g.m == 0 || g.n == 0 {
		return
	}
	if g.k == 0 {
		if !g.add {
			clear(c[:g.m*g.n])
		}
		return
	}
	if !g.asm(cpu, c, a, b) {
		g.plain(c, a, b)
	}
}

// plain does four columns of B at a time, copied so that their rows are dense, against two rows of A. A last single
// row goes through the same code twice, and so comes out as it would in a pair.
func (g product) plain(c, a, b []float32) {
	const depth = 256
	var panel [4 * depth]float32
	for p := 0; p < g.k; p += depth {
		rows := panel[:4*min(depth, g.k-p)]
		for j := 0; j < g.n; j += 4 {
			w := min(4, g.n-j)
			g.packPlain(rows, b, p, j, w)
			for i := 0; i < g.m; i += 2 {
				i1 := min(i+1, g.m-1)
				c0, c1 := c[i*g.n+j:][:w], c[i1*g.n+j:][:w]
				var x, y [4]float32
				if g.add || p > 0 {
					copy(x[:], c0)
					copy(y[:], c1)
				}
				g.pair(&x, &y, a, i*g.rsa+p*g.csa, i1*g.rsa+p*g.csa, rows)
				copy(c0, x[:])
				copy(c1, y[:])
			}
		}
	}
}

// packPlain copies w columns of B from row p and column j, with zeros up to the fourth.
func (g product) packPlain(rows, b []float32, p, j, w int) {
	sp, sj := g.ldb, 1
	if g.transB {
		sp, sj = 1, g.ldb
	}
	for x := range 4 {
		at := p*sp + (j+x)*sj
		for q := x; q < len(rows); q += 4 {
			if x >= w {
				rows[q] = 0
				continue
			}
			rows[q] = b[at]
			at += sp
		}
	}
}

// pair adds to x and y the products of two rows of A, at i and i1, and the packed columns.
func (g product) pair(x, y *[4]float32, a []float32, i, i1 int, rows []float32) {
	x0, x1, x2, x3 := x[0], x[1], x[2], x[3]
	y0, y1, y2, y3 := y[0], y[1], y[2], y[3]
	for len(rows) >= 4 {
		u, v := a[i], a[i1]
		b0, b1, b2, b3 := rows[0], rows[1], rows[2], rows[3]
		x0 += u * b0
		x1 += u * b1
		x2 += u * b2
		x3 += u * b3
		y0 += v * b0
		y1 += v * b1
		y2 += v * b2
		y3 += v * b3
		i, i1, rows = i+g.csa, i1+g.csa, rows[4:]
	}
	*x, *y = [4]float32{x0, x1, x2, x3}, [4]float32{y0, y1, y2, y3}
}
