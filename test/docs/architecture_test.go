package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// table is the rows of the page's table with this head, as cells, and the text of all rows.
func table(t *testing.T, page, head string) (rows [][]string, text string) {
	t.Helper()
	_, text, ok := strings.Cut(page, "\n"+head+"\n")
	require.True(t, ok, "no table %q", head)
	_, text, _ = strings.Cut(text, "\n")
	text, _, _ = strings.Cut(text, "\n\n")
	for line := range strings.Lines(text) {
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(line, "| \n"), " | ") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		rows = append(rows, cells)
	}
	return rows, text
}

// Every file and every name of the table of ARCHITECTURE.md exists: the k-th name is one that the k-th file declares, or the only file.
func TestWhereThingsAre(t *testing.T) {
	rows, _ := table(t, read(t, "ARCHITECTURE.md"), "| behaviour | file | name |")
	quoted := regexp.MustCompile("`([^`]+)`")
	require.Greater(t, len(rows), 20)
	for _, row := range rows {
		require.Len(t, row, 3, row)
		files, names := quoted.FindAllStringSubmatch(row[1], -1), quoted.FindAllStringSubmatch(row[2], -1)
		require.NotEmpty(t, names, row)
		require.True(t, len(files) == 1 || len(files) == len(names), "%q: %d files, %d names", row, len(files), len(names))
		for i, name := range names {
			file := files[min(i, len(files)-1)][1]
			require.Contains(t, declarations(t, file), name[1], "%s declares no such thing", file)
		}
	}
}

// declarations are the names that a file declares: functions, types, and Type.Method in Go; functions of the device and structs in CUDA C++;
// functions and classes in Python.
func declarations(t *testing.T, file string) (names []string) {
	t.Helper()
	text := read(t, file)
	if filepath.Ext(file) == ".py" {
		for _, m := range regexp.MustCompile(`(?m)^(?:class|def) (\w+)`).FindAllStringSubmatch(text, -1) {
			names = append(names, m[1])
		}
		return names
	}
	if filepath.Ext(file) != ".go" {
		for _, m := range regexp.MustCompile(`(?m)^\t?__device__ [^(\n]*?(\w+)\(|^(?:template <.*> )?struct (\w+)`).FindAllStringSubmatch(text, -1) {
			names = append(names, m[1]+m[2])
		}
		return names
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, d := range parsed.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names = append(names, receiver(d)+d.Name.Name)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if s, ok := s.(*ast.TypeSpec); ok {
					names = append(names, s.Name.Name)
				}
			}
		}
	}
	return names
}

// The floors of ARCHITECTURE.md are those of test/imports, in the words of its comments.
func TestFloorsAreThoseOfTheTest(t *testing.T) {
	source := read(t, "test/imports/imports_test.go")
	_, list, ok := strings.Cut(source, "\nvar floors = [][]string{\n")
	require.True(t, ok)
	list, _, _ = strings.Cut(list, "\n}\n")
	var lines []string
	for line := range strings.Lines(list) {
		m := regexp.MustCompile(`^\t\{(.+)\}, +// (.+)\n?$`).FindStringSubmatch(line)
		require.NotNil(t, m, "a floor has a line of its own, with a comment: %s", line)
		lines = append(lines, fmt.Sprintf("| %s | %s |\n", strings.ReplaceAll(strings.ReplaceAll(m[1], `"."`, "the root"), `"`, "`"), m[2]))
	}
	slices.Reverse(lines)
	page := read(t, "ARCHITECTURE.md")
	_, stands := table(t, page, "| floors, top first | what they are |")
	fresh := strings.TrimSuffix(strings.Join(lines, ""), "\n")
	if *update {
		head := "| floors, top first | what they are |\n|---|---|\n"
		require.NoError(t, os.WriteFile(filepath.Join(root, "ARCHITECTURE.md"), []byte(strings.Replace(page, head+stands, head+fresh, 1)), 0o644))
		return
	}
	require.Equal(t, fresh, stands, "make docs writes the floors")
}
