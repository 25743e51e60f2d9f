package shm

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Core is the number of the processor that the caller runs on.
func Core() int {
	var core uint32
	unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&core)), 0, 0)
	return int(core)
}

// Cores lists the processors that the caller may run on.
func Cores() []int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	var cores []int
	for c := range len(set) * 64 {
		if set.IsSet(c) {
			cores = append(cores, c)
		}
	}
	return cores
}

// MoveTo moves the calling thread to a processor and leaves it free to be moved again.
func MoveTo(core int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil {
		return
	}
	one.Set(core)
	if unix.SchedSetaffinity(0, &one) == nil {
		_ = unix.SchedSetaffinity(0, &all)
	}
}
