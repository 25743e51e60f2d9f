package nn

// Matrix products of float32, on one core. Most of the time of a training step goes into them, so on amd64 the innermost loop is in
// assembly (matmul_amd64.s); everywhere else it is Go.

// MatMul computes C = A B for row-major matrices: C is m x n, A is m x k, B is k x n.
func MatMul(c, a, b []float32, m, n, k int) {
	product{m: m, n: n, k: k, rsa: k, csa: 1, rsb: n, csb: 1}.run(c, a, b)
}

// MatMulTA is MatMul with A given transposed, as k x m: C = Aᵀ B. It is the gradient of a weight.
func MatMulTA(c, a, b []float32, m, n, k int) {
	product{m: m, n: n, k: k, rsa: 1, csa: m, rsb: n, csb: 1}.run(c, a, b)
}

// MatMulTB is MatMul with B given transposed, as n x k: C = A Bᵀ, or C += A Bᵀ if add is set. It is the gradient of an input.
func MatMulTB(c, a, b []float32, m, n, k int, add bool) {
	product{m: m, n: n, k: k, rsa: k, csa: 1, rsb: 1, csb: k, add: add}.run(c, a, b)
}

// product is a matrix product by strides: A(i, p) is at i*rsa + p*csa, B(p, j) at p*rsb + j*csb.
//
// Each element of C is one chain of multiply-adds over k, from first to last. So a row of C does not depend on how many other rows
// there are, and one rank and many compute alike.
type product struct {
	m, n, k            int
	rsa, csa, rsb, csb int
	add                bool
}

const (
	depth    = 256 // of a panel of B, so that it fits the first-level cache
	maxRows  = 12  // of a tile
	maxCols  = 32
	goCols   = 4   // of a panel, where Go does the work
	manyRows = 504 // of A that stay in the second-level cache while the panels of B pass by; a multiple of every tile's rows
)

func (g product) run(c, a, b []float32) {
	rows, cols := tileShape()
	g.tiled(c, a, b, rows, cols)
}

// tiled is run with tiles of a shape that this processor has, or with Go alone for 0 x 0.
func (g product) tiled(c, a, b []float32, rows, cols int) {
	if g.m == 0 || g.n == 0 {
		return
	}
	if g.k == 0 && !g.add {
		clear(c[:g.m*g.n])
	}
	c, a, b = c[:g.m*g.n], a[:g.m*g.k], b[:g.k*g.n]
	if rows == 0 {
		cols = goCols
	}
	var buf [depth * maxCols]float32
	var last [maxRows * depth]float32
	for i := 0; i < g.m; i += manyRows {
		m := min(manyRows, g.m-i)
		for p := 0; p < g.k; p += depth {
			kb := min(depth, g.k-p)
			panel := buf[:kb*cols]
			if rows > 0 {
				g.lastRows(last[:], a, i+m-m%rows, m%rows, p, kb)
			}
			for j := 0; j < g.n; j += cols {
				g.pack(panel, b, p, j, cols)
				if rows == 0 {
					g.plain(c, a, panel, i, m, p, j)
				} else {
					g.tiles(c, a, last[:], panel, i, m, p, j, rows, cols)
				}
			}
		}
	}
}

// lastRows copies h rows of A from row i and column p, for a tile that has fewer rows than others.
func (g product) lastRows(last, a []float32, i, h, p, kb int) {
	for r := range h {
		row := last[r*kb:][:kb]
		for q := range row {
			row[q] = a[(i+r)*g.rsa+(p+q)*g.csa]
		}
	}
}

// pack copies columns j to j+cols of B, from row p on, to a dense panel, with zeros past the last column.
func (g product) pack(panel, b []float32, p, j, cols int) {
	w := min(cols, g.n-j)
	if w < cols {
		clear(panel)
	}
	if g.csb == 1 {
		for at := p*g.rsb + j; len(panel) > 0; at += g.rsb {
			copy(panel[:w], b[at:at+w])
			panel = panel[cols:]
		}
		return
	}
	kb, x := len(panel)/cols, 0
	row := func(x int) []float32 { return b[(j+x)*g.csb+p:][:kb] } // rsb is 1
	for ; x+4 <= w; x += 4 {
		b0, b1, b2, b3 := row(x), row(x+1), row(x+2), row(x+3)
		for q, v := range b0 {
			to := panel[q*cols+x:][:4:4]
			to[0], to[1], to[2], to[3] = v, b1[q], b2[q], b3[q]
		}
	}
	for ; x < w; x++ {
		for q, v := range row(x) {
			panel[q*cols+x] = v
		}
	}
}

// tiles computes rows i to i+m of the panel's columns, tile by tile. A tile that is larger than what is left works on copies.
func (g product) tiles(c, a, last, panel []float32, i, m, p, j, rows, cols int) {
	kb, w := len(panel)/cols, min(cols, g.n-j)
	add := g.add || p > 0
	for end := i + m; i < end; i += rows {
		h := min(rows, end-i)
		from, rsa, csa := &last[0], kb, 1
		if h == rows {
			from, rsa, csa = &a[i*g.rsa+p*g.csa], g.rsa, g.csa
			if w == cols {
				tile(cols, &c[i*g.n+j], from, &panel[0], kb, g.n, rsa, csa, add)
				continue
			}
		}
		g.edge(c, from, panel, i, h, w, j, kb, rsa, csa, cols, add)
	}
}

// edge computes h rows and w columns of a tile.
func (g product) edge(c []float32, from *float32, panel []float32, i, h, w, j, kb, rsa, csa, cols int, add bool) {
	var part [maxRows * maxCols]float32
	if add {
		for r := range h {
			copy(part[r*cols:][:w], c[(i+r)*g.n+j:])
		}
	}
	tile(cols, &part[0], from, &panel[0], kb, cols, rsa, csa, add)
	for r := range h {
		copy(c[(i+r)*g.n+j:][:w], part[r*cols:])
	}
}

// plain is tiles in Go: two rows of A at a time against four columns. A last single row goes through the same code twice.
func (g product) plain(c, a, panel []float32, i, m, p, j int) {
	w := min(goCols, g.n-j)
	for end := i + m; i < end; i += 2 {
		i1 := min(i+1, end-1)
		c0, c1 := c[i*g.n+j:][:w], c[i1*g.n+j:][:w]
		var x, y [goCols]float32
		if g.add || p > 0 {
			copy(x[:], c0)
			copy(y[:], c1)
		}
		at, at1 := i*g.rsa+p*g.csa, i1*g.rsa+p*g.csa
		x0, x1, x2, x3 := x[0], x[1], x[2], x[3]
		y0, y1, y2, y3 := y[0], y[1], y[2], y[3]
		for rows := panel; len(rows) >= goCols; rows = rows[goCols:] {
			u, v := a[at], a[at1]
			b0, b1, b2, b3 := rows[0], rows[1], rows[2], rows[3]
			x0 += u * b0
			x1 += u * b1
			x2 += u * b2
			x3 += u * b3
			y0 += v * b0
			y1 += v * b1
			y2 += v * b2
			y3 += v * b3
			at, at1 = at+g.csa, at1+g.csa
		}
		x, y = [goCols]float32{x0, x1, x2, x3}, [goCols]float32{y0, y1, y2, y3}
		copy(c0, x[:])
		copy(c1, y[:])
	}
}
