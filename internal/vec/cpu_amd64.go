//go:build amd64 && !purego

package vec

import xcpu "golang.org/x/sys/cpu"

// cpu is what this machine offers. GODEBUG=cpu.avx2=off takes it away.
var cpu = detect()

func detect() level {
	x := &xcpu.X86
	switch {
	case !x.HasAVX2 || !x.HasFMA || !x.HasF16C:
		return plain
	case !x.HasAVX512F || !x.HasAVX512DQ || !x.HasAVX512BW || !x.HasAVX512VL:
		return avx2
	}
	return avx512
}
