package comm

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func countFDs(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

func requireFDs(t testing.TB, want int) {
	t.Helper()
	require.Eventually(t, func() bool { return countFDs(t) <= want }, 30*time.Second, 5*time.Millisecond,
		"descriptors have leaked")
}

func isCloexec(fd int) (bool, error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return flags&unix.FD_CLOEXEC != 0, err
}

// commGoroutines returns the stacks of goroutines that run code of this package
// outside of tests.
func commGoroutines() []string {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	var out []string
	for _, s := range strings.Split(string(buf), "\n\n") {
		if strings.Contains(s, "switchyard/observe.serve(") { // the process's own, until it ends
			continue
		}
		if strings.Contains(s, "switchyard/comm.") && !strings.Contains(s, "_test.go") {
			out = append(out, s)
		}
	}
	return out
}

func requireNoGoroutines(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		left := commGoroutines()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("goroutines have leaked:\n%s", strings.Join(left, "\n\n"))
		}
		time.Sleep(5 * time.Millisecond)
	}
}
