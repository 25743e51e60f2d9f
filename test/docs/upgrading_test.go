package docs

import (
	"os/exec"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
)

// The first row of the table of releases is this one's, and the others have what their sources say.
func TestReleasesHaveTheirProtocol(t *testing.T) {
	row := func(release string, text func(file string) string) []string {
		all := []string{release}
		for _, at := range [][2]string{
			{"comm/handshake.go", `protocolVersion = (\d+)`},
			{"bindings/python/abi/abi.go", `abiVersion = (\d+)`},
		} {
			m := regexp.MustCompile(at[1]).FindStringSubmatch(text(at[0]))
			require.NotNil(t, m, at[0])
			all = append(all, m[1])
		}
		return all
	}
	rows, _ := table(t, read(t, "docs/upgrading.md"), "| release | protocol of a join | Python ABI |")
	require.Equal(t, row(switchyard.Version, func(file string) string { return read(t, file) }), rows[0])
	commits := map[string]string{"0.1.0": "de160bb511"}
	require.Len(t, rows, 1+len(commits))
	for _, r := range rows[1:] {
		commit := commits[r[0]]
		require.NotEmpty(t, commit, "the commit of %s", r[0])
		if exec.Command("git", "-C", root, "cat-file", "-e", commit).Run() != nil {
			t.Skipf("commit %s is not in this clone", commit)
		}
		require.Equal(t, r, row(r[0], func(file string) string {
			out, err := exec.Command("git", "-C", root, "show", commit+":"+file).Output()
			require.NoError(t, err, file)
			return string(out)
		}))
	}
}
