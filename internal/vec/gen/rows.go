package main

import (
	"fmt"
	"strings"
)

// element is how a type of at most 32 bits gets into a Y register of float32 and back.
type element struct {
	name   string
	size   int
	consts func(g *gen)                                   // loads what load needs into Y9 to Y13
	load   func(g *gen, mem func(o int) string, u, y int) // loads the 8 elements of vector u at mem into Yy; spoils Y14
}

func elements() []element {
	return []element{
		{"Float32", 4, nil, func(g *gen, mem func(int) string, u, y int) {
			g.f("VMOVUPS %s, Y%d", mem(32*u), y)
		}},
		{"Float16", 2, nil, func(g *gen, mem func(int) string, u, y int) {
			g.f("VCVTPH2PS %s, Y%d", mem(16*u), y)
		}},
		{"BFloat16", 2, nil, func(g *gen, mem func(int) string, u, y int) {
			g.f("VPMOVZXWD %s, Y%d", mem(16*u), y)
			g.f("VPSLLD $16, Y%d, Y%d", y, y)
		}},
		// e4m3 is a float16 with 8 taken from the exponent, but for its NaN, which reads as 480.
		{"Float8E4M3", 1, func(g *gen) {
			g.constant(0x43800000, 9)  // 256
			g.constant(0x43f00000, 10) // 480
			g.constant(0x7fffffff, 11)
			g.constant(0x7f800000, 12)
			g.constant(0xbf80bf80, 13) // the sign and the seven bits, in place
		}, func(g *gen, mem func(int) string, u, y int) {
			g.f("VPMOVSXBW %s, X%d", mem(8*u), y)
			g.f("VPSLLW $7, X%d, X%d", y, y)
			g.f("VPAND X13, X%d, X%d", y, y)
			g.f("VCVTPH2PS X%d, Y%d", y, y)
			g.f("VMULPS Y9, Y%d, Y%d", y, y)
			g.f("VANDPS Y11, Y%d, Y14", y)
			g.f("VCMPPS $0, Y10, Y14, Y14")
			g.f("VANDPS Y12, Y14, Y14")
			g.f("VORPS Y14, Y%d, Y%d", y, y)
		}},
		// e5m2 is the upper half of a float16.
		{"Float8E5M2", 1, nil, func(g *gen, mem func(int) string, u, y int) {
			g.f("VPMOVZXBW %s, X%d", mem(8*u), y)
			g.f("VPSLLW $8, X%d, X%d", y, y)
			g.f("VCVTPH2PS X%d, Y%d", y, y)
		}},
	}
}

func at(reg string) func(int) string {
	return func(o int) string { return fmt.Sprintf("%d(%s)", o, reg) }
}

var ops = []string{"Sum", "Min", "Max", "Prod"}

// combine folds x into acc, lanes of p (PS or PD). A minimum takes x where it is less or not a number, and so keeps a
// NaN it has and takes one that comes.
func (g *gen) combine(op, p string, x, acc, tmp int) {
	switch op {
	case "Sum":
		g.f("VADD%s Y%d, Y%d, Y%d", p, x, acc, acc)
	case "Prod":
		g.f("VMUL%s Y%d, Y%d, Y%d", p, x, acc, acc)
	default:
		g.f("VCMP%s $3, Y%d, Y%d, Y%d", p, x, x, tmp)
		g.f("V%s%s Y%d, Y%d, Y%d", strings.ToUpper(op), p, acc, x, acc)
		g.f("VBLENDV%s Y%d, Y%d, Y%d, Y%d", p, tmp, x, acc, acc)
	}
}

// rowLoops are one pass over several rows. A row is found at rows + 24*i, as the first word of a slice.
func (g *gen) rowLoops() {
	// nest runs begin, then each row from first on, then end, on 4 vectors at a time and then on 1.
	nest := func(size int, first bool, begin, row, end func(n int)) {
		for _, n := range []int{4, 1} {
			g.l("group%d", n)
			g.f("CMPQ CX, $%d", 8*n)
			g.f("JLT end%d", n)
			g.f("MOVQ rows+%d(FP), BX", g.args["rows"])
			g.f("MOVQ nrows+%d(FP), R9", g.args["nrows"])
			begin(n)
			if first {
				g.f("JMP next%d", n)
			}
			g.l("row%d", n)
			g.f("MOVQ (BX), SI")
			g.f("ADDQ R10, SI")
			row(n)
			if first {
				g.l("next%d", n)
			}
			g.f("ADDQ $24, BX")
			g.f("DECQ R9")
			g.f("JNZ row%d", n)
			end(n)
			for u := range n {
				g.f("VMOVUPS Y%d, %d(DI)", u, 32*u)
			}
			g.f("ADDQ $%d, DI", 32*n)
			g.f("ADDQ $%d, R10", size*8*n)
			g.f("SUBQ $%d, CX", 8*n)
			g.f("JMP group%d", n)
			g.l("end%d", n)
		}
	}
	for _, op := range ops {
		g.text("is dst = "+strings.ToLower(op)+" of the rows, in order, over div. There is a row.", "rows"+op+"AVX2", "dst unsafe.Pointer, rows unsafe.Pointer, nrows int, off int, n int, div float32")
		g.arg("dst", "DI")
		g.arg("off", "R10")
		g.arg("n", "CX")
		g.arg("div", "Y15")
		g.f("MOVL div+%d(FP), R11", g.args["div"])
		g.f("SUBL $0x3f800000, R11") // 1.0
		nest(4, true, func(n int) {
			g.f("MOVQ (BX), SI")
			g.f("ADDQ R10, SI")
			for u := range n {
				g.f("VMOVUPS %d(SI), Y%d", 32*u, u)
			}
		}, func(n int) {
			for u := range n {
				g.f("VMOVUPS %d(SI), Y%d", 32*u, 4+u)
				g.combine(op, "PS", 4+u, u, 8+u)
			}
		}, func(n int) {
			g.f("TESTL R11, R11")
			g.f("JZ whole%d", n)
			for u := range n {
				g.f("VDIVPS Y15, Y%d, Y%d", u, u)
			}
			g.l("whole%d", n)
		})
		g.ret()
	}
	for _, e := range elements() {
		g.text("is dst = sum of w[i]*rows[i], in order, from zero. There is a row.", "weighted"+e.name+"AVX2", "dst unsafe.Pointer, rows unsafe.Pointer, w unsafe.Pointer, nrows int, off int, n int")
		if e.consts != nil {
			e.consts(g)
		}
		g.arg("dst", "DI")
		g.arg("off", "R10")
		g.arg("n", "CX")
		nest(e.size, false, func(n int) {
			g.f("MOVQ w+%d(FP), R8", g.args["w"])
			for u := range n {
				g.f("VXORPS Y%d, Y%d, Y%d", u, u, u)
			}
		}, func(n int) {
			g.f("VBROADCASTSS (R8), Y15")
			g.f("ADDQ $4, R8")
			for u := range n {
				e.load(g, at("SI"), u, 4+u)
				g.f("VMULPS Y15, Y%d, Y%d", 4+u, 4+u)
				g.f("VADDPS Y%d, Y%d, Y%d", 4+u, u, u)
			}
		}, func(int) {})
		g.ret()
	}
}
