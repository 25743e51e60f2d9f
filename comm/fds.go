package comm

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// dupFDs duplicates file descriptors, close on exec: all or none.
func dupFDs(fds []int) ([]int, error) {
	if len(fds) == 0 {
		return nil, nil
	}
	out := make([]int, 0, len(fds))
	for _, fd := range fds {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeFDs(out)
			return nil, fmt.Errorf("duplicate descriptor %d: %w", fd, err)
		}
		out = append(out, d)
	}
	return out, nil
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
