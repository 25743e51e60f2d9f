package emulated_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
)

// What the same sources make is compiled once, by whoever comes first. A compiler that fails leaves nothing.
func TestTheSameIsCompiledOnce(t *testing.T) {
	cache, dir := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	runs, compiler, source := filepath.Join(dir, "runs"), filepath.Join(dir, "compiler"), filepath.Join(dir, "source.cpp")
	t.Setenv("CXX", compiler)
	// Called as "compiler -o TO FLAG SOURCE".
	script := "#!/bin/sh\n[ \"$1\" != --version ] || exit 0\necho >>" + runs + "\ncp \"$4\" \"$2\"\n! grep -q wrong \"$4\"\n"
	require.NoError(t, os.WriteFile(compiler, []byte(script), 0o777))
	write := func(text string) { require.NoError(t, os.WriteFile(source, []byte(text), 0o666)) }
	compile := func(what, flag string) (string, error) {
		return emulated.Compile(dir, what, []string{source}, []string{flag}, []string{source})
	}
	ran := func() int {
		b, err := os.ReadFile(runs)
		require.NoError(t, err)
		return strings.Count(string(b), "\n")
	}

	write("first")
	var all sync.WaitGroup
	var paths [8]string
	var errs [8]error
	for i := range paths {
		all.Go(func() { paths[i], errs[i] = compile("a program", "-O1") })
	}
	all.Wait()
	for i, path := range paths {
		require.NoError(t, errs[i])
		require.Equal(t, paths[0], path)
	}
	require.Equal(t, 1, ran())
	b, err := os.ReadFile(paths[0])
	require.NoError(t, err)
	require.Equal(t, "first", string(b))

	for i, differs := range []func() (string, error){
		func() (string, error) { return compile("a program", "-O2") },
		func() (string, error) { return compile("another", "-O1") },
		func() (string, error) { write("second"); return compile("a program", "-O1") },
	} {
		path, err := differs()
		require.NoError(t, err)
		require.NotEqual(t, paths[0], path)
		require.Equal(t, i+2, ran())
	}
	write("wrong")
	for i := range 2 {
		_, err = compile("a program", "-O1")
		require.ErrorContains(t, err, "exit status 1")
		require.Equal(t, i+5, ran())
	}

	// What nobody has used for a day goes when something else is made.
	long := time.Now().Add(-25 * time.Hour)
	require.NoError(t, os.Chtimes(paths[0], long, long))
	write("third")
	_, err = compile("a program", "-O1")
	require.NoError(t, err)
	require.NoFileExists(t, paths[0])

	// Where nothing can be kept, the caller has the file.
	t.Setenv("XDG_CACHE_HOME", source)
	path, err := compile("a program", "-O1")
	require.NoError(t, err)
	require.Equal(t, dir, filepath.Dir(path))
}
