package observe

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A process that ends while it writes a file leaves nothing, and a file that is there is replaced at once.
func TestAFileIsThereAsAWhole(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "switchyard-rank0.jsonl")
	if fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY, 0o600); err != nil {
		t.Skipf("this file system has no files without a name: %v", err)
	} else {
		require.NoError(t, unix.Close(fd))
	}
	for _, text := range []string{"first", "second"} {
		was, _ := os.ReadFile(path) // it may not be there
		require.NoError(t, whole(path, 0o644, func(w io.Writer) error {
			_, err := io.WriteString(w, text)
			entries, rerr := os.ReadDir(dir)
			require.NoError(t, rerr)
			require.Len(t, entries, min(1, len(was)), "nothing else has a name")
			now, _ := os.ReadFile(path)
			require.Equal(t, was, now)
			return err
		}))
		now, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, text, string(now))
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o644), info.Mode())
	}
	full := errors.New("the disk is full")
	require.ErrorIs(t, whole(path, 0o600, func(io.Writer) error { return full }), full)
	require.ErrorIs(t, wholeByName(path, 0o600, func(io.Writer) error { return full }), full)
	require.NoError(t, wholeByName(path, 0o600, func(w io.Writer) error { _, err := io.WriteString(w, "third"); return err }))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.ErrorIs(t, whole(filepath.Join(dir, "missing", "x"), 0o600, func(io.Writer) error { return nil }), os.ErrNotExist)
}
