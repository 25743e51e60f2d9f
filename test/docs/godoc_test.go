package docs

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// `go doc ./kernels` begins with what the documentation of the packages for users takes from it, by links.
func TestKernelsBeginWithWhatCallersUse(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	_, text, found := strings.Cut(read(t, "kernels/doc.go"), "// # For callers\n")
	require.True(t, found)
	callers, engines, found := strings.Cut(text, "// # For engines\n")
	require.True(t, found)
	require.Contains(t, engines, "[Engine]")
	declared := names(t, root+"/kernels")
	for _, m := range regexp.MustCompile(`\[(\w+)\]`).FindAllStringSubmatch(callers, -1) {
		require.True(t, declared[m[1]], "kernels/doc.go: there is no %s", m[1])
	}
	var used int
	for _, p := range []string{"alltoallv", "allreduce", "dispatch", "p2p"} {
		c := exec.Command("go", "doc", "-all", "./"+p)
		c.Dir = root
		out, err := c.Output()
		require.NoError(t, err)
		// Constants that a package has under a name of its own are used by that one.
		own := regexp.MustCompile(`(?m)^\t\w+ += kernels\.\w+$`).ReplaceAllString(string(out), "")
		for _, m := range regexp.MustCompile(`\bkernels\.([A-Z]\w*)`).FindAllStringSubmatch(own, -1) {
			require.Contains(t, callers, "["+m[1]+"]", "kernels/doc.go, For callers: package %s takes it", p)
			used++
		}
	}
	require.NotZero(t, used)
}
