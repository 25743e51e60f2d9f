package shm

import "golang.org/x/sys/cpu"

var canStream = cpu.X86.HasAVX2

//go:noescape
func streamBlocks(dst, src *byte, n int)

//go:noescape
func pause(n int)

// stream copies with the destination aligned to 64 bytes; head and tail go through copy.
func stream(dst, src []byte) {
	head := int(-Addr(dst) & 63)
	copy(dst[:head], src[:head])
	dst, src = dst[head:], src[head:]
	body := len(src) &^ 255
	if body > 0 {
		streamBlocks(&dst[0], &src[0], body)
	}
	copy(dst[body:], src[body:])
}
