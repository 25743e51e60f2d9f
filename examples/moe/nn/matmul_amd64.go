//go:build amd64 && !purego

package nn

import "golang.org/x/sys/cpu"

// tileAVX512 and tileAVX2 compute a tile of C, 12 x 32 or 6 x 16: C = A B, or C += A B if add is set. B is dense, k x 32 or k x 16.
//
//go:noescape
func tileAVX512(c, a, b *float32, k, ldc, rsa, csa int, add bool)

//go:noescape
func tileAVX2(c, a, b *float32, k, ldc, rsa, csa int, add bool)

// adamAVX2 is Adam.apply for n weights, a positive multiple of 8.
//
//go:noescape
func adamAVX2(w, m, v, grad *float32, n int, k *Adam)

// tileShape is the tile of this processor, 0 x 0 if it has none. GODEBUG=cpu.avx2=off takes it away.
func tileShape() (rows, cols int) {
	x := &cpu.X86
	switch {
	case !x.HasAVX2 || !x.HasFMA:
		return 0, 0
	case !x.HasAVX512F:
		return 6, 16
	}
	return 12, 32
}

func tile(cols int, c, a, b *float32, k, ldc, rsa, csa int, add bool) {
	if cols == 32 {
		tileAVX512(c, a, b, k, ldc, rsa, csa, add)
	} else {
		tileAVX2(c, a, b, k, ldc, rsa, csa, add)
	}
}

// adamVector updates as many weights from the front as make whole vectors, at most a block, and returns that number. A block is
// short because the collector of garbage cannot stop a goroutine in assembly.
func adamVector(w, m, v, g []float32, k *Adam) int {
	n := min(len(w), 1<<16) &^ 7
	if rows, _ := tileShape(); n == 0 || rows == 0 {
		return 0
	}
	adamAVX2(&w[0], &m[0], &v[0], &g[0], n, k)
	return n
}
