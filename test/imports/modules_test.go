package imports

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// others are modules within this one, and what only they may depend on: who exchanges rows takes no protobuf.
var others = []string{"observe/prom", "observe/otel"}

var theirs = []string{"google.golang.org/", "github.com/prometheus/", "go.opentelemetry.io/"}

func TestTheLibraryNeedsNothingOfTheModules(t *testing.T) {
	for _, path := range goList(t, "-deps", "-test", "./...") {
		for _, of := range theirs {
			require.False(t, strings.HasPrefix(path, of), "%s is needed by a package or a test", path)
		}
	}
	for _, path := range goList(t, "-m", "all") {
		for _, of := range theirs {
			require.False(t, strings.HasPrefix(path, of), "%s is in go.mod, or in that of a module there", path)
		}
	}
}

// The modules stand on what any program may import, and CI tests each of them: the Makefile lists them.
func TestModulesImportNoInternalPackage(t *testing.T) {
	root := filepath.Join("..", "..")
	var found []string
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.Name() == "go.mod" && filepath.Dir(path) != root:
			folder, err := filepath.Rel(root, filepath.Dir(path))
			found = append(found, filepath.ToSlash(folder))
			return err
		}
		return nil
	}))
	require.ElementsMatch(t, others, found)
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	require.NoError(t, err)
	require.Contains(t, string(makefile), "\nMODULES := "+strings.Join(others, " ")+"\n")
	for _, m := range others {
		files, err := filepath.Glob(filepath.Join(root, m, "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
			require.NoError(t, err)
			for _, i := range f.Imports {
				path, err := strconv.Unquote(i.Path.Value)
				require.NoError(t, err)
				if to, ours := inside(path); ours {
					require.NotContains(t, to, "internal", "%s", file)
				}
			}
		}
	}
}
