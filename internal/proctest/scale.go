package proctest

import (
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// Scaled is how long a test should give what takes at most d on an idle machine: d times how late this one is, as measured once, and
// more under the race detector. The processes of a test have its factor. It is for bounds that are no promise, such as a deadline that only one
// of several ranks is to miss.
func Scaled(d time.Duration) time.Duration { return time.Duration(float64(d) * lateness()) }

const (
	nap        = 10 * time.Millisecond
	naps       = 5
	mostLate   = 10 // times
	raceFactor = 3
	// latenessVar has the factor of the test that started this process: ranks that measured it themselves would give each other different times.
	latenessVar = "SWITCHYARD_TEST_LATENESS"
)

// lateness is at least 1: how long a short sleep and a yield take here, over how long the sleep should.
var lateness = sync.OnceValue(func() float64 {
	if factor, err := strconv.ParseFloat(os.Getenv(latenessVar), 64); err == nil {
		return factor
	}
	worst := time.Duration(0)
	for range naps {
		start := time.Now()
		time.Sleep(nap)
		runtime.Gosched()
		worst = max(worst, time.Since(start))
	}
	factor := min(float64(worst)/float64(nap), mostLate)
	if Race {
		factor *= raceFactor
	}
	return max(factor, 1)
})
