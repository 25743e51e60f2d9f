//go:build !amd64

package shm

const canStream = false

func stream(dst, src []byte) { copy(dst, src) }

// pause has nothing to say to the core here; callers bound their spinning by time.
func pause(int) {}
