package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The example is made of public packages only: a copy of it builds in a module of its own that requires this one.
func TestACopyBuildsInAnotherModule(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the go command")
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command")
	}
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	read := func(name string) string {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		return string(b)
	}
	// The new module needs what this one needs, and this one. So nothing has to be fetched.
	mod := read(filepath.Join(root, "go.mod"))
	name := regexp.MustCompile(`(?m)^module (\S+)$`).FindStringSubmatch(mod)[1]
	mod = strings.Replace(mod, "module "+name, "module example.com/copy", 1)
	mod += "\nrequire " + name + " v0.0.0\n\nreplace " + name + " => " + root + "\n"

	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("go.mod", mod)
	write("go.sum", read(filepath.Join(root, "go.sum")))
	require.NoError(t, filepath.WalkDir(".", func(path string, e os.DirEntry, err error) error {
		switch {
		case err != nil || strings.HasSuffix(path, "_test.go") || filepath.Ext(path) == ".py":
		case e.IsDir():
			err = os.MkdirAll(filepath.Join(dir, path), 0o755)
		default:
			write(path, strings.ReplaceAll(read(path), name+"/examples/moe/", "example.com/copy/"))
		}
		return err
	}))
	cmd := exec.Command(tool, "build", "-o", filepath.Join(dir, "moe"), ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	out, err = exec.Command(filepath.Join(dir, "moe"), "-help").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "usage: moe")
}
