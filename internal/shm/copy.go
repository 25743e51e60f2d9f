package shm

// CopyStream copies len(src) bytes to dst, which must be as long and must not overlap src, with stores that go around
// the caches where CanStream says so. It is for data that does not fit them anyway: where source and destination do, copy
// is twice as fast. A later release store is ordered behind the copy only by a Fence between them.
func CopyStream(dst, src []byte) {
	head := min(int(-Addr(dst)&63), len(src))
	body := (len(src) - head) &^ 255
	if !CanStream || body == 0 {
		copy(dst[:len(src)], src)
		return
	}
	copy(dst[:head], src)
	streamBlocks(&dst[head], &src[head], body)
	copy(dst[head+body:len(src)], src[head+body:])
}

// Fence orders what CopyStream has stored before later stores.
func Fence() { fence() }

// Pause tells the core n times that it spins.
func Pause(n int) { pause(n) }
