package main

import (
	"fmt"
	"strings"
)

func (g *gen) wideLoops() {
	type wide struct {
		name    string
		size    int
		combine func(op string, x, acc, tmp int)
	}
	int64s := func(op string, x, acc, tmp int) {
		switch op {
		case "Sum":
			g.f("VPADDQ Y%d, Y%d, Y%d", x, acc, acc)
		case "Min":
			g.f("VPCMPGTQ Y%d, Y%d, Y%d", x, acc, tmp) // acc > x
			g.f("VBLENDVPD Y%d, Y%d, Y%d, Y%d", tmp, x, acc, acc)
		case "Max":
			g.f("VPCMPGTQ Y%d, Y%d, Y%d", acc, x, tmp) // x > acc
			g.f("VBLENDVPD Y%d, Y%d, Y%d, Y%d", tmp, x, acc, acc)
		case "Prod": // low*low + (low*high + high*low) << 32
			g.f("VPSRLQ $32, Y%d, Y14", x)
			g.f("VPMULUDQ Y14, Y%d, Y14", acc)
			g.f("VPSRLQ $32, Y%d, Y15", acc)
			g.f("VPMULUDQ Y15, Y%d, Y15", x)
			g.f("VPADDQ Y14, Y15, Y15")
			g.f("VPSLLQ $32, Y15, Y15")
			g.f("VPMULUDQ Y%d, Y%d, Y%d", x, acc, acc)
			g.f("VPADDQ Y15, Y%d, Y%d", acc, acc)
		}
	}
	int32s := func(op string, x, acc, _ int) {
		g.f("%s Y%d, Y%d, Y%d", map[string]string{"Sum": "VPADDD", "Min": "VPMINSD", "Max": "VPMAXSD", "Prod": "VPMULLD"}[op], x, acc, acc)
	}
	uint8s := func(op string, x, acc, tmp int) {
		if op != "Prod" {
			g.f("%s Y%d, Y%d, Y%d", map[string]string{"Sum": "VPADDB", "Min": "VPMINUB", "Max": "VPMAXUB"}[op], x, acc, acc)
			return
		}
		// Odd bytes by their own product, even bytes by the low half of the word's.
		g.f("VPSRLW $8, Y%d, Y14", x)
		g.f("VPSRLW $8, Y%d, Y15", acc)
		g.f("VPMULLW Y14, Y15, Y15")
		g.f("VPSLLW $8, Y15, Y15")
		g.f("VPMULLW Y%d, Y%d, Y%d", x, acc, acc)
		g.f("VPAND Y13, Y%d, Y%d", acc, acc)
		g.f("VPOR Y15, Y%d, Y%d", acc, acc)
	}
	for _, t := range []wide{
		{"Float64", 8, func(op string, x, acc, tmp int) { g.combine(op, "PD", x, acc, tmp) }},
		{"Int64", 8, int64s},
		{"Int32", 4, int32s},
		{"Uint8", 1, uint8s},
	} {
		for _, op := range ops {
			g.text("is dst = "+strings.ToLower(op)+" of dst and src.", "reduce"+op+t.name+"AVX2", "dst unsafe.Pointer, src unsafe.Pointer, n int")
			if t.name == "Uint8" && op == "Prod" {
				g.constant(0x00ff00ff, 13)
			}
			g.arg("dst", "DI")
			g.arg("src", "SI")
			g.arg("n", "CX")
			g.loop(32/t.size, 4, map[string]int{"DI": t.size, "SI": t.size}, func(u int) {
				g.f("VMOVDQU %d(SI), Y%d", 32*u, u)
				g.f("VMOVDQU %d(DI), Y%d", 32*u, 4+u)
				t.combine(op, u, 4+u, 8+u)
				g.f("VMOVDQU Y%d, %d(DI)", 4+u, 32*u)
			})
			g.ret()
		}
	}
}

// switches writes the Go functions that choose a loop by element type and operation. A table of functions would do the
// same, but the compiler has to assume that what goes through one escapes to the heap.
func (g *gen) switches() {
	w := func(format string, a ...any) { fmt.Fprintf(&g.stubs, format+"\n", a...) }
	w("\nfunc rowsAsm(op Op, dst, rows unsafe.Pointer, nrows, off, n int, div float32) {\nswitch op {")
	for _, op := range ops {
		w("case %s: rows%sAVX2(dst, rows, nrows, off, n, div)", op, op)
	}
	w("}\n}")
	w("\nfunc halfRowsAsm(k kind, op Op, dst, rows unsafe.Pointer, nrows, off, n int, div float32) {\nswitch k {")
	for _, t := range []string{"Float16", "BFloat16"} {
		w("case kind%s:\nswitch op {", t)
		for _, op := range ops {
			w("case %s: rows%s%sAVX512(dst, rows, nrows, off, n, div)", op, op, t)
		}
		w("}")
	}
	w("}\n}")
	w("\nfunc weightedAsm(k kind, dst, rows, w unsafe.Pointer, nrows, off, n int) {\nswitch k {")
	for _, e := range elements() {
		w("case kind%s: weighted%sAVX2(dst, rows, w, nrows, off, n)", e.name, e.name)
	}
	w("}\n}")
	w("\nfunc loadAsm(k kind, dst, src unsafe.Pointer, n int) {\nswitch k {")
	for _, e := range elements()[1:] {
		w("case kind%s: load%sAVX2(dst, src, n)", e.name, e.name)
	}
	w("}\n}")
	w("\nfunc storeAsm(k kind, dst, src unsafe.Pointer, n int, div float32) {\nswitch k {")
	for _, e := range elements()[1:] {
		w("case kind%s: store%sAVX2(dst, src, n, div)", e.name, e.name)
	}
	w("}\n}")
	w("\nfunc accumulateAsm(k kind, op Op, acc, src unsafe.Pointer, n int) {\nswitch k {")
	for _, e := range elements() {
		w("case kind%s:\nswitch op {", e.name)
		for _, op := range ops {
			w("case %s: acc%s%sAVX2(acc, src, n)", op, op, e.name)
		}
		w("}")
	}
	w("}\n}")
	w("\nfunc reduceAsm(k kind, op Op, dst, src unsafe.Pointer, n int) {\nswitch k {")
	for _, t := range []string{"Float64", "Int64", "Int32", "Uint8"} {
		w("case kind%s:\nswitch op {", t)
		for _, op := range ops {
			w("case %s: reduce%s%sAVX2(dst, src, n)", op, op, t)
		}
		w("}")
	}
	w("}\n}")
}
