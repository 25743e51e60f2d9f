package comm

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// lacksFiles is err with the limit that it comes from, where this rank has no descriptor left.
func lacksFiles(rank int, err error) error {
	var files unix.Rlimit
	switch {
	case errors.Is(err, unix.EMFILE) && unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil:
		return fmt.Errorf("rank %d may have %d files open and no more (ulimit -n): %w", rank, files.Cur, err)
	case errors.Is(err, unix.ENFILE):
		return fmt.Errorf("the machine of rank %d has no room for more open files (fs.file-max): %w", rank, err)
	}
	return err
}

// shortage is from when to when a rank that joins has had no descriptor for a connection. It gets one now and then, for which that of a process is
// closed which may have been a rank.
type shortage struct{ from, to time.Time }

// lasts is the error of a rank that has had none, again and again, for filesGrace. It is nil before, and where err is another one.
func (s *shortage) lasts(rank int, err error) error {
	if !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) {
		return nil
	}
	now := time.Now()
	if now.Sub(s.to) > filesGrace {
		s.from = now
	}
	if s.to = now; now.Sub(s.from) < filesGrace {
		return nil
	}
	return lacksFiles(rank, err)
}
