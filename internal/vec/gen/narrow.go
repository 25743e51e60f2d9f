package main

import "strings"

func (g *gen) narrowLoops() {
	for _, e := range elements() {
		if e.name != "Float32" {
			g.text("is dst = float32(src).", "load"+e.name+"AVX2", "dst unsafe.Pointer, src unsafe.Pointer, n int")
			if e.consts != nil {
				e.consts(g)
			}
			g.arg("dst", "DI")
			g.arg("src", "SI")
			g.arg("n", "CX")
			g.loop(8, 4, map[string]int{"DI": 4, "SI": e.size}, func(u int) {
				e.load(g, at("SI"), u, u)
				g.f("VMOVUPS Y%d, %d(DI)", u, 32*u)
			})
			g.ret()
		}
		for _, op := range ops {
			g.text("is acc = "+strings.ToLower(op)+" of acc and float32(src).", "acc"+op+e.name+"AVX2", "acc unsafe.Pointer, src unsafe.Pointer, n int")
			if e.consts != nil {
				e.consts(g)
			}
			g.arg("acc", "DI")
			g.arg("src", "SI")
			g.arg("n", "CX")
			g.loop(8, 4, map[string]int{"DI": 4, "SI": e.size}, func(u int) {
				e.load(g, at("SI"), u, u)
				g.f("VMOVUPS %d(DI), Y%d", 32*u, 4+u)
				g.combine(op, "PS", u, 4+u, 15)
				g.f("VMOVUPS Y%d, %d(DI)", 4+u, 32*u)
			})
			g.ret()
		}
	}

	// The stores: Y0 holds the eight values, Y1 to Y3 are free.
	type store struct {
		name   string
		size   int
		consts func()
		store  func(o int)
	}
	// narrow leaves the low halves of the eight lanes of Y0, all of which fit, in X0.
	halves := func() {
		g.f("VEXTRACTI128 $1, Y0, X1")
		g.f("VPACKUSDW X1, X0, X0")
	}
	// tiny rounds a float8: values in Y0 below least are rounded by adding magic, whose last place is the smallest float8;
	// the others by their own bits; those from top up become over. Bits of Y0 without the sign are in Y0, the sign in Y1.
	tiny := func(shift int) func(int) {
		return func(o int) {
			g.f("VPAND Y4, Y0, Y1")  // sign
			g.f("VPXOR Y1, Y0, Y0")  // magnitude
			g.f("VADDPS Y5, Y0, Y2") // small: + magic
			g.f("VPSUBD Y5, Y2, Y2")
			g.f("VPSLLD $%d, Y0, Y3", 31-shift) // normal: round half to even
			g.f("VPSRLD $31, Y3, Y3")
			g.f("VPADDD Y6, Y3, Y3")
			g.f("VPADDD Y0, Y3, Y3")
			g.f("VPSRLD $%d, Y3, Y3", shift)
			g.f("VPCMPGTD Y0, Y7, Y8") // least > magnitude
			g.f("VPBLENDVB Y8, Y2, Y3, Y3")
			g.f("VPCMPGTD Y9, Y0, Y8") // magnitude > top - 1
			g.f("VPBLENDVB Y8, Y10, Y3, Y3")
			g.f("VPCMPGTD Y11, Y0, Y8") // magnitude > infinity
			g.f("VPBLENDVB Y8, Y12, Y3, Y3")
			g.f("VPSRLD $24, Y1, Y1")
			g.f("VPOR Y1, Y3, Y0")
			halves()
			g.f("VPACKUSWB X0, X0, X0")
			g.f("VMOVQ X0, %d(DI)", 8*o)
		}
	}
	for _, s := range []store{
		{"Float16", 2, func() {}, func(o int) {
			g.f("VCVTPS2PH $0, Y0, %d(DI)", 16*o)
		}},
		{"BFloat16", 2, func() {
			g.constant(0x7fff, 4)
			g.constant(0x7fc0, 5)
		}, func(o int) {
			g.f("VCMPPS $3, Y0, Y0, Y2")
			g.f("VPSLLD $15, Y0, Y1")
			g.f("VPSRLD $31, Y1, Y1")
			g.f("VPADDD Y4, Y1, Y1")
			g.f("VPADDD Y1, Y0, Y0")
			g.f("VPSRLD $16, Y0, Y0")
			g.f("VPBLENDVB Y2, Y5, Y0, Y0")
			halves()
			g.f("VMOVDQU X0, %d(DI)", 16*o)
		}},
		{"Float8E4M3", 1, func() {
			g.constant(0x80000000, 4)
			g.constant(141<<23, 5)                     // 2^14: its last place is 2^-9
			g.constant((0x7ffff-120<<23)&(1<<32-1), 6) // half a place less one, and the exponent's new bias
			g.constant(121<<23, 7)                     // 2^-6
			g.constant(1087<<20-1, 9)                  // below 480
			g.constant(0x7f, 10)
			g.constant(0x7f800000, 11)
			g.constant(0x7f, 12)
		}, tiny(20)},
		{"Float8E5M2", 1, func() {
			g.constant(0x80000000, 4)
			g.constant(134<<23, 5) // 2^7: its last place is 2^-16
			g.constant((0xfffff-112<<23)&(1<<32-1), 6)
			g.constant(113<<23, 7)   // 2^-14
			g.constant(143<<23-1, 9) // below 65536
			g.constant(0x7c, 10)
			g.constant(0x7f800000, 11)
			g.constant(0x7f, 12)
		}, tiny(21)},
	} {
		g.text("is dst = "+s.name+"(src/div), rounded to nearest even.", "store"+s.name+"AVX2", "dst unsafe.Pointer, src unsafe.Pointer, n int, div float32")
		s.consts()
		g.arg("dst", "DI")
		g.arg("src", "SI")
		g.arg("n", "CX")
		g.arg("div", "Y15")
		g.f("MOVL div+%d(FP), R11", g.args["div"])
		g.f("SUBL $0x3f800000, R11") // 1.0
		label := 0
		g.loop(8, 2, map[string]int{"DI": s.size, "SI": 4}, func(u int) {
			g.f("VMOVUPS %d(SI), Y0", 32*u)
			g.f("TESTL R11, R11")
			g.f("JZ whole%d", label)
			g.f("VDIVPS Y15, Y0, Y0")
			g.l("whole%d", label)
			label++
			s.store(u)
		})
		g.ret()
	}
}
