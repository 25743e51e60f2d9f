package proxy

import (
	"time"

	"golang.org/x/sys/unix"
)

// exactSleep has this thread sleep no longer than it asks for: the kernel else adds 50 us, to wake threads together.
func exactSleep() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) }

// sleep has the thread sleep. time.Sleep has the scheduler do that, which is less exact.
func sleep(d time.Duration) {
	exactSleep()
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early
}
