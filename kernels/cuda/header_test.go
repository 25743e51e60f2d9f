package cuda_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// words compiles a program of testdata/include with the header that others include, of which a text is another one.
func words(t *testing.T, old, fresh string) *exec.Cmd {
	t.Helper()
	header, err := os.ReadFile("include/switchyard_device.cuh")
	if err != nil {
		t.Skip("the sources are not next to the test binary")
	}
	compiler, err := exec.LookPath("c++")
	if err != nil {
		t.Skip("needs a C++ compiler")
	}
	dir := t.TempDir()
	require.Contains(t, string(header), old)
	text := strings.ReplaceAll(string(header), old, fresh)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "switchyard_device.cuh"), []byte(text), 0o666))
	program := filepath.Join(dir, "words")
	out, err := exec.Command(compiler, "-O1", "-std=c++17", "-Wall", "-Werror", "-pthread", "-fsanitize=thread", "-I"+dir, "-o", program,
		"testdata/include/words.cpp").CombinedOutput()
	if err != nil && strings.Contains(string(out), "tsan") {
		t.Skip("needs a compiler with a race detector")
	}
	require.NoError(t, err, "%s", out)
	return exec.Command(program)
}

func TestRowsAreThereWhenTheirWordSaysSo(t *testing.T) {
	out, err := words(t, "__ATOMIC_ACQUIRE", "__ATOMIC_ACQUIRE").CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestARaceDetectorMissesTheOrderOfWords(t *testing.T) {
	for _, order := range []string{"__ATOMIC_ACQUIRE", "__ATOMIC_RELEASE"} {
		out, err := words(t, order, "__ATOMIC_RELAXED").CombinedOutput()
		require.Error(t, err, "without %s", order)
		require.Contains(t, string(out), "data race", "without %s", order)
	}
}
