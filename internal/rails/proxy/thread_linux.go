package proxy

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/shm"
)

// exactSleep has this thread sleep no longer than it asks for: the kernel else adds 50 us, to wake threads together.
func exactSleep() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) }

func sleep(d time.Duration) {
	exactSleep()
	shm.Sleep(d)
}
