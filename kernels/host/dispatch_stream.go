package host

import "github.com/switchyard-moe/switchyard/internal/shm"

// streamRowFrom is the length of rows from which streamRow gains.
const streamRowFrom = 1 << 10

// streams reports whether a kernel that writes n rows of the size should do it around the caches. What fits them is
// better left where its reader finds it.
func (e *Engine) streams(n int, size int64) bool {
	return canStream && size >= streamRowFrom && int64(n)*size > e.cacheBytes
}

// streamRow copies src to dst with stores that go around the caches and are not ordered before a fence. Between rows of
// a few KiB fences would take half of the time.
func streamRow(dst, src []byte) {
	head := min(int(-shm.Addr(dst)&63), len(src))
	body := (len(src) - head) &^ 255
	copy(dst[:head], src)
	if body > 0 {
		streamBlocks(&dst[head], &src[head], body)
	}
	copy(dst[head+body:], src[head+body:])
}
