// Package rollcall tests the worked example of docs/adding-a-kernel-family.md: in a copy of the sources its files and lines make a family on
// both engines, whose tests pass. The example is in testdata, in the folders of the module, and its lines are in testdata/edits.txt.
package rollcall

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The bounds of the example: a newcomer's work is worth keeping small.
const (
	mostFiles = 14
	mostEdits = 3
	mostLines = 400
)

// edit is a line that is put before the one that begins with anchor, which is the only one in the file.
type edit struct{ file, line, anchor string }

func edits(t *testing.T) (all []edit) {
	t.Helper()
	b, err := os.ReadFile("testdata/edits.txt")
	require.NoError(t, err)
	for record := range strings.SplitSeq(strings.TrimSuffix(string(b), "\n"), "\n\n") {
		lines := strings.Split(record, "\n")
		require.Len(t, lines, 3, record)
		all = append(all, edit{lines[0], lines[1], lines[2]})
	}
	return all
}

// example is the files of the example, from the root of the module.
func example(t *testing.T) (names []string) {
	t.Helper()
	for _, folder := range []string{"testdata/kernels", "testdata/rollcall"} {
		require.NoError(t, filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				names = append(names, strings.TrimPrefix(path, "testdata/"))
			}
			return err
		}))
	}
	return names
}

func TestTheExampleIsSmall(t *testing.T) {
	names, lines := example(t), 0
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		require.NoError(t, err)
		lines += strings.Count(string(b), "\n")
	}
	require.LessOrEqual(t, len(names), mostFiles)
	require.LessOrEqual(t, len(edits(t)), mostEdits)
	require.LessOrEqual(t, lines, mostLines)
	page, err := os.ReadFile("../../docs/adding-a-kernel-family.md")
	require.NoError(t, err)
	for _, name := range names {
		require.Contains(t, string(page), " test/rollcall/testdata/"+name+"\n", "the page shows every file")
	}
	for _, e := range edits(t) {
		require.Contains(t, string(page), "`"+strings.TrimSpace(e.line)+"`", "the page has every line")
	}
}

func TestTheExampleMakesAFamily(t *testing.T) {
	const root = "../.."
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Skipf("needs the sources: %v", err)
	}
	dir := t.TempDir()
	tracked := exec.Command("git", "ls-files", "-z")
	tracked.Dir = root
	out, err := tracked.Output()
	if err != nil {
		t.Skipf("needs the repository: %v", err)
	}
	put := func(from, to string) {
		b, err := os.ReadFile(from)
		require.NoError(t, err)
		to = filepath.Join(dir, to)
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
		require.NoError(t, os.WriteFile(to, b, 0o644))
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if _, err := os.Stat(filepath.Join(root, name)); err == nil && !strings.HasPrefix(name, "test/rollcall/") {
			put(filepath.Join(root, name), name)
		}
	}
	for _, name := range example(t) {
		require.NoFileExists(t, filepath.Join(dir, name))
		put(filepath.Join("testdata", name), name)
	}
	for _, e := range edits(t) {
		name := filepath.Join(dir, e.file)
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		lines := strings.Split(string(b), "\n")
		at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, e.anchor) })
		require.GreaterOrEqual(t, at, 0, "%s has no line %q", e.file, e.anchor)
		require.NoError(t, os.WriteFile(name, []byte(strings.Join(slices.Insert(lines, at, e.line), "\n")), 0o644))
	}
	commands := []string{
		"go run ./kernels/cuda/internal/genlayout",
		"go vet ./kernels/... ./rollcall",
		"go test ./kernels/host -run RollCall|Names",
		"go test ./kernels/cuda -run AnyOrder/rollcall|BugsOfRollCalls|CompilerLays",
		"go test ./rollcall",
		"go test ./test/imports -run Floors",
	}
	if testing.Short() {
		commands = commands[:2] // an interface of the engines that has changed
	}
	for _, command := range commands {
		words := strings.Fields(command)
		c := exec.Command(words[0], words[1:]...)
		c.Dir = dir
		c.Env = append(os.Environ(), "GOFLAGS=-trimpath") // what no example changes is built once, in any folder
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s: %s", command, out)
	}
}
