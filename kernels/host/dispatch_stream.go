package host

import "github.com/switchyard-moe/switchyard/internal/shm"

// streamRowFrom is the length of rows from which shm.CopyStream gains.
const streamRowFrom = 1 << 10

// streams reports whether a kernel that writes n rows of the size should do it around the caches. Rows that fit the
// caches stay in them, where their reader finds them.
func (e *Engine) streams(n int, size int64) bool {
	return shm.CanStream && size >= streamRowFrom && int64(n)*size > e.cacheBytes
}
