package shm

import "golang.org/x/sys/cpu"

// CanStream says that CopyStream goes around the caches here.
var CanStream = cpu.X86.HasAVX2

// streamBlocks copies n bytes, a positive multiple of 256, to dst, which is aligned to 64.
//
//go:noescape
func streamBlocks(dst, src *byte, n int)

//go:noescape
func fence()

//go:noescape
func pause(n int)
