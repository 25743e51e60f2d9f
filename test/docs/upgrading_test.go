package docs

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
)

// The first row of the table of releases is this one's.
func TestReleasesHaveTheirProtocol(t *testing.T) {
	number := func(file, pattern string) string {
		m := regexp.MustCompile(pattern).FindStringSubmatch(read(t, file))
		require.NotNil(t, m, file)
		return m[1]
	}
	rows, _ := table(t, read(t, "docs/upgrading.md"), "| release | protocol of a join | Python ABI |")
	require.Equal(t, []string{switchyard.Version, number("comm/handshake.go", `protocolVersion = (\d+)`), number("bindings/python/abi/abi.go", `abiVersion = (\d+)`)}, rows[0])
}
