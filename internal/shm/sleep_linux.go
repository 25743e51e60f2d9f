package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

// Sleep has the thread sleep, for less than a millisecond too. time.Sleep leaves that to the scheduler, which waits for at least a millisecond
// where it has nothing else to do.
func Sleep(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	for unix.Nanosleep(&t, &t) == unix.EINTR {
	}
}
