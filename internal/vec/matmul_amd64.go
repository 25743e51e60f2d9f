//go:build amd64 && !purego

package vec

import "unsafe"

// A block of A is blockRows x blockK floats, which the second-level cache holds. A panel of B is blockK x 32 floats at
// most, which the first-level cache holds beside the rows of A in work.
const (
	blockRows = 240 // a multiple of the tile heights 12 and 6
	blockK    = 256
	fewRows   = 12 // with no more rows than this a copy of B costs more than it saves
)

// asm runs the product on vectors of the given level; it reports false if there are none.
func (g product) asm(lv level, c, a, b []float32) bool {
	if lv < avx2 {
		return false
	}
	if g.m <= fewRows && !g.transB && (lv >= avx512 || g.n%16 == 0) {
		g.direct(lv, c, a, b)
	} else {
		g.packed(lv, c, a, b)
	}
	return true
}

// direct reads B where it is.
func (g product) direct(lv level, c, a, b []float32) {
	nr := lv.columns()
	for p := 0; p < g.k; p += blockK {
		kb := min(blockK, g.k-p)
		for j := 0; j < g.n; j += nr {
			g.tiles(lv, c, a, unsafe.Pointer(&b[p*g.ldb+j]), g.ldb, 0, g.m, p, kb, j)
		}
	}
}

// packed copies B to a dense panel at a time.
func (g product) packed(lv level, c, a, b []float32) {
	var buf [blockK*32 + 16]float32
	// Panels start on a cache line; a stack that moves later makes this slower, not wrong.
	skip := int(-uintptr(unsafe.Pointer(&buf)) % 64 / 4)
	panel := buf[skip : skip+blockK*32]
	nr := lv.columns()
	for i := 0; i < g.m; i += blockRows {
		for p := 0; p < g.k; p += blockK {
			kb := min(blockK, g.k-p)
			for j := 0; j < g.n; j += nr {
				g.pack(panel, b, p, kb, j, nr)
				g.tiles(lv, c, a, unsafe.Pointer(&panel[0]), nr, i, min(blockRows, g.m-i), p, kb, j)
			}
		}
	}
}

// pack copies rows p to p+kb, columns j to j+nr of B, with zeros past the last column.
func (g product) pack(panel, b []float32, p, kb, j, nr int) {
	w := min(nr, g.n-j)
	if w < nr {
		clear(panel[:kb*nr])
	}
	switch {
	case !g.transB && w == nr:
		packAVX2(unsafe.Pointer(&panel[0]), unsafe.Pointer(&b[p*g.ldb+j]), kb, nr, 4*g.ldb)
	case !g.transB:
		for q := range kb {
			copy(panel[q*nr:q*nr+w], b[(p+q)*g.ldb+j:])
		}
	default:
		q8, w8 := kb&^7, w&^7
		for x := 0; x < w8 && q8 > 0; x += 8 {
			transposeAVX2(unsafe.Pointer(&panel[x]), unsafe.Pointer(&b[(j+x)*g.ldb+p]), q8, 4*nr, 4*g.ldb)
		}
		for x := range w {
			q := q8
			if x >= w8 {
				q = 0
			}
			for ; q < kb; q++ {
				panel[q*nr+x] = b[(j+x)*g.ldb+p+q]
			}
		}
	}
}

// tiles computes rows i to i+rows of one panel's columns, over p to p+kb.
func (g product) tiles(lv level, c, a []float32, panel unsafe.Pointer, ldb, i, rows, p, kb, j int) {
	zero := 0
	if p == 0 && !g.add {
		zero = 1
	}
	w := min(lv.columns(), g.n-j)
	ldc, rsa, csa, ldb := 4*g.n, 4*g.rsa, 4*g.csa, 4*ldb
	if lv >= avx512 {
		mask := uint32(1)<<w - 1
		for end := i + rows; i < end; {
			ci, ai := unsafe.Pointer(&c[i*g.n+j]), unsafe.Pointer(&a[i*g.rsa+p*g.csa])
			switch left := end - i; {
			case left >= 12:
				tileAVX512x12(ci, ai, panel, kb, ldc, rsa, csa, ldb, zero, mask)
				i += 12
			case left >= 8:
				tileAVX512x8(ci, ai, panel, kb, ldc, rsa, csa, ldb, zero, mask)
				i += 8
			case left >= 4:
				tileAVX512x4(ci, ai, panel, kb, ldc, rsa, csa, ldb, zero, mask)
				i += 4
			case left >= 2:
				tileAVX512x2(ci, ai, panel, kb, ldc, rsa, csa, ldb, zero, mask)
				i += 2
			default:
				tileAVX512x1(ci, ai, panel, kb, ldc, rsa, csa, ldb, zero, mask)
				i++
			}
		}
		return
	}
	var edge [6 * 16]float32 // stands in for C where the panel is wider
	for end := i + rows; i < end; {
		h := 1
		switch left := end - i; {
		case left >= 6:
			h = 6
		case left >= 4:
			h = 4
		case left >= 2:
			h = 2
		}
		ci, ld := unsafe.Pointer(&c[i*g.n+j]), ldc
		if w < 16 {
			ci, ld = unsafe.Pointer(&edge[0]), 64
			for r := range h {
				copy(edge[r*16:r*16+w], c[(i+r)*g.n+j:])
			}
		}
		ai := unsafe.Pointer(&a[i*g.rsa+p*g.csa])
		switch h {
		case 6:
			tileAVX2x6(ci, ai, panel, kb, ld, rsa, csa, ldb, zero)
		case 4:
			tileAVX2x4(ci, ai, panel, kb, ld, rsa, csa, ldb, zero)
		case 2:
			tileAVX2x2(ci, ai, panel, kb, ld, rsa, csa, ldb, zero)
		default:
			tileAVX2x1(ci, ai, panel, kb, ld, rsa, csa, ldb, zero)
		}
		if w < 16 {
			for r := range h {
				copy(c[(i+r)*g.n+j:(i+r)*g.n+j+w], edge[r*16:])
			}
		}
		i += h
	}
}
