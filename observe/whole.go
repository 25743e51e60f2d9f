package observe

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// whole writes a file that is not there in part, with permissions. A process that ends meanwhile leaves nothing, where the file system has files
// without a name.
func whole(path string, perm os.FileMode, write func(io.Writer) error) error {
	dir := filepath.Dir(path)
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, uint32(perm))
	if err != nil {
		return wholeByName(path, perm, write)
	}
	f := os.NewFile(uintptr(fd), path)
	defer func() { _ = f.Close() }()
	if err := write(f); err != nil {
		return err
	}
	link := func(name string) error {
		return unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, name, unix.AT_SYMLINK_FOLLOW)
	}
	if link(path) == nil {
		return nil
	}
	// A link does not replace a file, and a name does.
	next := filepath.Join(dir, fmt.Sprintf(".switchyard-%d-%s", os.Getpid(), filepath.Base(path)))
	for {
		switch err := link(next); {
		case errors.Is(err, unix.EEXIST): // of a process of that number, whose host went down
			if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		case err != nil:
			return wholeByName(path, perm, write)
		default:
			return os.Rename(next, path)
		}
	}
}

// wholeByName is whole where every file has a name.
func wholeByName(path string, perm os.FileMode, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".switchyard-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // it is gone, once it has its name
	if err := errors.Join(write(f), f.Chmod(perm), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
