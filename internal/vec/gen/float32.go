package main

import "strings"

func (g *gen) float32Loops() {
	g.text("is dst = w*x.", "scaleAVX2", "dst unsafe.Pointer, x unsafe.Pointer, n int, w float32")
	g.arg("dst", "DI")
	g.arg("x", "SI")
	g.arg("n", "CX")
	g.arg("w", "Y15")
	g.loop(8, 4, map[string]int{"DI": 4, "SI": 4}, func(u int) {
		g.f("VMULPS %d(SI), Y15, Y%d", 32*u, u)
		g.f("VMOVUPS Y%d, %d(DI)", u, 32*u)
	})
	g.ret()

	for _, op := range []string{"add", "mul"} {
		g.text("is dst = a "+op+" b.", op+"AVX2", "dst unsafe.Pointer, a unsafe.Pointer, b unsafe.Pointer, n int")
		g.arg("dst", "DI")
		g.arg("a", "SI")
		g.arg("b", "DX")
		g.arg("n", "CX")
		g.loop(8, 4, map[string]int{"DI": 4, "SI": 4, "DX": 4}, func(u int) {
			g.f("VMOVUPS %d(SI), Y%d", 32*u, u)
			g.f("V%sPS %d(DX), Y%d, Y%d", strings.ToUpper(op), 32*u, u, u)
			g.f("VMOVUPS Y%d, %d(DI)", u, 32*u)
		})
		g.ret()
	}
}

// ---- element types narrower than float32 ----
