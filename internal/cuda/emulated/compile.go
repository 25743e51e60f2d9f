package emulated

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Compiler names the C++ compiler: CXX, or the first of c++, g++ and clang++. Without one the error is exec.ErrNotFound.
func Compiler() (string, error) {
	if compiler := os.Getenv("CXX"); compiler != "" {
		return compiler, nil
	}
	for _, name := range []string{"c++", "g++", "clang++"} {
		if _, err := exec.LookPath(name); err == nil {
			return name, nil
		}
	}
	return "", exec.ErrNotFound
}

// Compile has the C++ compiler make a file with flags and paths, which name sources and where headers are, and says where the file is. It is
// kept in the user's cache folder, and taken from there when the compiler, what is made, the flags and all sources in inputs, files and folders,
// are the same again, wherever they are: packages whose tests need the same compile it once, also when they need it at the same time. Where
// nothing can be kept, the file is in dir, which is the caller's. Without a compiler the error is exec.ErrNotFound.
func Compile(dir, what string, inputs, flags, paths []string) (string, error) {
	compiler, err := Compiler()
	if err != nil {
		return "", err
	}
	key, err := keyOf(compiler, what, inputs, flags)
	if err != nil {
		return "", err
	}
	build := func(to string) error {
		ctx, cancel := context.WithTimeout(context.Background(), compileTimeout)
		defer cancel()
		args := append(append([]string{"-o", to}, flags...), paths...)
		if out, err := exec.CommandContext(ctx, compiler, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w\n%s", compiler, strings.Join(args, " "), err, out)
		}
		return nil
	}
	if cache, err := os.UserCacheDir(); err == nil {
		if path, err := kept(filepath.Join(cache, "switchyard-emulated"), key, build); err == nil || !errors.Is(err, errNotKept) {
			return path, err
		}
	}
	path := filepath.Join(dir, key)
	return path, build(path)
}

var errNotKept = errors.New("emulated: nothing can be kept")

const (
	compileTimeout = 10 * time.Minute
	unusedFor      = 24 * time.Hour // then a file is removed
)

// keyOf names what the compiler makes of inputs.
func keyOf(compiler, what string, inputs, flags []string) (string, error) {
	version, err := exec.Command(compiler, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", compiler, err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %q\n", compiler, version, what, flags)
	for i, root := range inputs {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			switch filepath.Ext(path) {
			case ".cu", ".cuh", ".h", ".cpp":
			default:
				return nil
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			info, err := f.Stat()
			if err != nil {
				return err
			}
			fmt.Fprintf(h, "%d %q %d\n", i, name, info.Size())
			_, err = io.Copy(h, f)
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// kept is the file of that key in folder, which build makes where it is not there. One process makes it while others that need it wait. No
// process of Go's writes it, so that none that it forks has it open while another runs it.
func kept(folder, key string, build func(to string) error) (string, error) {
	dir := filepath.Join(folder, key)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", errNotKept
	}
	lock, err := os.Open(dir)
	if err != nil {
		return "", errNotKept
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil { // until it is made, or compileTimeout
		return "", errNotKept
	}
	made := filepath.Join(dir, "made")
	now := time.Now()
	if os.Chtimes(made, now, now) == nil {
		return made, nil
	}
	parts, err := os.MkdirTemp(dir, "") // a compiler whose process of Go's was killed may still write to another one
	if err != nil {
		return "", errNotKept
	}
	defer os.RemoveAll(parts)
	part := filepath.Join(parts, "part")
	if err := build(part); err != nil {
		return "", err
	}
	if err := os.Rename(part, made); err != nil {
		return "", errNotKept
	}
	all, err := filepath.Glob(filepath.Join(folder, "*", "made"))
	for _, old := range all {
		if info, err := os.Stat(old); err == nil && now.Sub(info.ModTime()) > unusedFor {
			_ = os.RemoveAll(filepath.Dir(old)) // what stays does no harm
		}
	}
	return made, err
}
