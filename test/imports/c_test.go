package imports

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The C of a package that uses cgo on Linux alone is left out elsewhere: go refuses C files of a package without cgo. A formatter that puts a
// space into the line makes it a comment like any other.
func TestCFilesHaveABuildConstraint(t *testing.T) {
	for _, folder := range []string{"internal/cuda", "internal/rails/ucx"} {
		files, err := filepath.Glob(filepath.Join("..", "..", folder, "*.c"))
		require.NoError(t, err)
		require.NotEmpty(t, files, folder)
		for _, file := range files {
			b, err := os.ReadFile(file)
			require.NoError(t, err)
			head, _, _ := bytes.Cut(b, []byte("\n\n"))
			require.Contains(t, "\n"+string(head)+"\n", "\n//go:build cgo && linux\n", file)
		}
	}
}
