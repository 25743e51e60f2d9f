package cuda

import (
	"sync"

	"github.com/switchyard-moe/switchyard/internal/env"
)

// profiled opens the profiler that runs this process, when SWITCHYARD_NVTX asks for ranges, and says whether there is one.
var profiled = sync.OnceValue(func() bool {
	path, err := env.Profiler()
	return err == nil && path != "" && openProfiler(path)
})

// Range is a stretch of time that a profiler shows by name, next to those of others that use NVTX. The zero Range is none.
type Range struct{ id uint64 }

// StartRange begins a range, "switchyard: " and then the name; names of more than 115 bytes are cut. Its payload is a number of bytes, and it
// has none where bytes is negative. Where SWITCHYARD_NVTX is not 1, no profiler runs, or the build has no cgo, it does nothing, in 3 ns
// (BenchmarkRangeOff).
func StartRange(name string, bytes int64) Range {
	if !profiled() {
		return Range{}
	}
	return Range{rangeStart(name, bytes)}
}

// End ends the range, on whatever thread.
func (r Range) End() {
	if r != (Range{}) {
		rangeEnd(r.id)
	}
}
