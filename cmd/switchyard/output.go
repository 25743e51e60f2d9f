package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

// source is our end of a rank's pipe. A deadline that is over says that the rank has ended. A process that it has started and left behind may
// hold the pipe, and must keep nobody. So from then on source ends when it has found the pipe empty for some time, or has read
// very much. The time in which a slow reader keeps us from reading does not count: nothing is lost by it.
type source struct {
	*os.File
	over         bool
	empty, bytes int // since the rank ended: how often the pipe was empty, and what was read
}

func (s *source) Read(p []byte) (int, error) {
	if !s.over {
		n, err := s.File.Read(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		s.over = true
		if err := s.SetReadDeadline(time.Time{}); err != nil {
			return 0, err
		}
	}
	pipe, err := s.SyscallConn()
	if err != nil {
		return 0, err
	}
	for s.bytes < behindMost {
		n, failed := 0, error(nil)
		// It does not wait for more.
		if err := pipe.Read(func(fd uintptr) bool { n, failed = syscall.Read(int(fd), p); return true }); err != nil {
			return 0, err
		}
		switch {
		case n > 0:
			s.bytes += n
			return n, nil
		case failed == nil || s.empty == emptyMost:
			return 0, io.EOF
		}
		s.empty++
		time.Sleep(emptyWait)
	}
	return 0, io.EOF
}

// lines is where ranks print, a line at a time.
type lines struct {
	mu sync.Mutex
	to io.Writer
}

func (l *lines) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.to, format, args...)
}

// copy prints what comes from r until it ends. A line that is longer than the buffer comes in pieces.
func (l *lines) copy(prefix string, r io.Reader) {
	const longest = 64 << 10
	from := bufio.NewReaderSize(r, longest)
	for {
		line, err := from.ReadSlice('\n')
		if len(line) > 0 {
			if !bytes.HasSuffix(line, []byte{'\n'}) {
				line = append(line[:len(line):len(line)], '\n')
			}
			l.mu.Lock()
			_, _ = io.WriteString(l.to, prefix)
			_, _ = l.to.Write(line)
			l.mu.Unlock()
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}
