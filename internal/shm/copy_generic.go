//go:build !amd64

package shm

// CanStream says that CopyStream goes around the caches here.
const CanStream = false

func streamBlocks(_, _ *byte, _ int) {}

func fence() {}

// pause has nothing to say to the core here; callers bound their spinning by time.
func pause(int) {}
