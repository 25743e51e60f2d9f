// Package imports tests what packages of Switchyard may depend on.
package imports

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/switchyard-moe/switchyard"

// goList runs go list from the root of the module.
func goList(t *testing.T, args ...string) []string {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = filepath.Join("..", "..")
	if _, err := os.Stat(filepath.Join(cmd.Dir, "go.mod")); err != nil {
		t.Skipf("needs the sources: %v", err)
	}
	watch(t, cmd.Dir)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// watch looks at every source, so that go test does not take a result from its cache that they have outdated.
func watch(t *testing.T, root string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(name, "."):
			return filepath.SkipDir
		case strings.HasSuffix(name, ".go"):
			_, err = os.Stat(path)
		}
		return err
	}))
}

// A c-shared object with go-nvml in it does not load: its symbols are not resolved. Only programs may import it.
func TestNothingDependsOnNVML(t *testing.T) {
	const report = module + "/device/nvml"
	for _, line := range goList(t, "-e", "-f", "{{.ImportPath}} {{.Name}} {{join .Deps \" \"}}", "./...") {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] == report {
			continue
		}
		path, name, deps := words[0], words[1], words[2:]
		bindings := strings.HasPrefix(path, module+"/bindings/")
		if name == "main" && !bindings {
			continue // a program may want the report
		}
		for _, d := range deps {
			require.False(t, d == report || strings.HasPrefix(d, "github.com/NVIDIA/"), "%s depends on %s", path, d)
		}
	}
}

// cgo lives in the driver bindings, the C ABI and the report.
func TestCgoIsInFewPackages(t *testing.T) {
	allowed := []string{module + "/internal/cuda", module + "/internal/cuda/layout", module + "/device/nvml"}
	for _, line := range goList(t, "-e", "-f", "{{if .CgoFiles}}{{.ImportPath}}{{end}}", "./...") {
		if line == "" || strings.HasPrefix(line, module+"/bindings/") {
			continue
		}
		require.True(t, slices.Contains(allowed, line), "%s uses cgo", line)
	}
}
