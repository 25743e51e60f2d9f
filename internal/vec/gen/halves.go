package main

import "strings"

// halfRows are rowLoops of 16-bit elements, all in registers. AVX-512 pays here: with AVX2 the conversions are slower
// than memory.
func (g *gen) halfRows() {
	for _, t := range []string{"Float16", "BFloat16"} {
		load := func(u, z int) {
			if t == "Float16" {
				g.f("VCVTPH2PS %d(SI), Z%d", 32*u, z)
			} else {
				g.f("VPMOVZXWD %d(SI), Z%d", 32*u, z)
				g.f("VPSLLD $16, Z%d, Z%d", z, z)
			}
		}
		store := func(u int) {
			if t == "Float16" {
				g.f("VCVTPS2PH $0, Z%d, %d(DI)", u, 32*u)
				return
			}
			g.f("VCMPPS $3, Z%d, Z%d, K1", u, u)
			g.f("VPSRLD $16, Z%d, Z%d", u, 4+u)
			g.f("VPANDD Z16, Z%d, Z%d", 4+u, 4+u)
			g.f("VPADDD Z17, Z%d, Z%d", 4+u, 4+u)
			g.f("VPADDD Z%d, Z%d, Z%d", u, 4+u, 4+u)
			g.f("VPSRLD $16, Z%d, Z%d", 4+u, 4+u)
			g.f("VMOVDQA32 Z18, K1, Z%d", 4+u)
			g.f("VPMOVDW Z%d, %d(DI)", 4+u, 32*u)
		}
		for _, op := range ops {
			g.text("is dst = "+strings.ToLower(op)+" of the rows, in order and in float32, over div. There is a row.", "rows"+op+t+"AVX512", "dst unsafe.Pointer, rows unsafe.Pointer, nrows int, off int, n int, div float32")
			for i, bits := range []uint32{1, 0x7fff, 0x7fc0} {
				g.f("MOVL $0x%x, AX", bits)
				g.f("VPBROADCASTD AX, Z%d", 16+i)
			}
			g.arg("dst", "DI")
			g.arg("off", "R10")
			g.arg("n", "CX")
			g.arg("div", "Z15")
			g.f("MOVL div+%d(FP), R11", g.args["div"])
			g.f("SUBL $0x3f800000, R11") // 1.0
			for _, n := range []int{4, 1} {
				g.l("group%d", n)
				g.f("CMPQ CX, $%d", 16*n)
				g.f("JLT end%d", n)
				g.f("MOVQ rows+%d(FP), BX", g.args["rows"])
				g.f("MOVQ nrows+%d(FP), R9", g.args["nrows"])
				g.f("MOVQ (BX), SI")
				g.f("ADDQ R10, SI")
				for u := range n {
					load(u, u)
				}
				g.f("JMP next%d", n)
				g.l("row%d", n)
				g.f("MOVQ (BX), SI")
				g.f("ADDQ R10, SI")
				for u := range n {
					load(u, 4+u)
					switch op {
					case "Sum":
						g.f("VADDPS Z%d, Z%d, Z%d", 4+u, u, u)
					case "Prod":
						g.f("VMULPS Z%d, Z%d, Z%d", 4+u, u, u)
					default:
						g.f("VCMPPS $3, Z%d, Z%d, K1", 4+u, 4+u)
						g.f("V%sPS Z%d, Z%d, Z%d", strings.ToUpper(op), u, 4+u, u)
						g.f("VMOVAPS Z%d, K1, Z%d", 4+u, u)
					}
				}
				g.l("next%d", n)
				g.f("ADDQ $24, BX")
				g.f("DECQ R9")
				g.f("JNZ row%d", n)
				g.f("TESTL R11, R11")
				g.f("JZ whole%d", n)
				for u := range n {
					g.f("VDIVPS Z15, Z%d, Z%d", u, u)
				}
				g.l("whole%d", n)
				for u := range n {
					store(u)
				}
				g.f("ADDQ $%d, DI", 32*n)
				g.f("ADDQ $%d, R10", 32*n)
				g.f("SUBQ $%d, CX", 16*n)
				g.f("JMP group%d", n)
				g.l("end%d", n)
			}
			g.ret()
		}
	}
}
