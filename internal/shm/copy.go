package shm

// streamBytes is the length from which CopyStream writes around the caches. A short copy is cheaper through them.
const streamBytes = 32 << 10

// CopyStream copies len(src) bytes to dst, which must be as long and must not overlap src, with stores that go around
// the caches. It is for data that does not fit them anyway: where source and destination do, copy is twice as fast. A
// fence at its end lets a later release store order it.
func CopyStream(dst, src []byte) {
	dst = dst[:len(src)]
	if len(src) < streamBytes || !canStream {
		copy(dst, src)
		return
	}
	stream(dst, src)
}

// Pause tells the core n times that it spins.
func Pause(n int) { pause(n) }
