package host

import "golang.org/x/sys/cpu"

var canStream = cpu.X86.HasAVX2

// streamBlocks copies n bytes, a positive multiple of 256, to dst, which is aligned to 64.
//
//go:noescape
func streamBlocks(dst, src *byte, n int)

// fence orders what streamRow has stored before later stores.
//
//go:noescape
func fence()
