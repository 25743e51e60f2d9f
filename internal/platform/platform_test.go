package platform

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A build of the whole module for another system says one thing.
func TestOtherSystems(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the standard library for another system")
	}
	cmd := exec.Command("go", "build", "./...")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "GOOS=darwin", "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	var said []string
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, "# ") && !strings.HasPrefix(line, "go: downloading ") {
			said = append(said, line)
		}
	}
	require.Len(t, said, 1, string(out))
	require.Contains(t, said[0], "switchyard_runs_on_linux_only_because_")
}
