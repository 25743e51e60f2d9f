package fingerprint

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard"
)

func files(pairs ...string) fstest.MapFS {
	all := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return all
}

func TestBuildsAreToldApart(t *testing.T) {
	require.Regexp(t, `^`+switchyard.Version+` \(build [0-9a-f]{12}\)$`, Of(files("a.go", "1", "b.go", "2")))
	require.Equal(t, Of(files("a.go", "1", "b.go", "2")), Of(files("b.go", "2", "a.go", "1")))
	seen := map[string]bool{}
	for _, other := range []fstest.MapFS{
		files("a.go", "1", "b.go", "2"),
		files("a.go", "1", "b.go", "3"),
		files("a.go", "1", "c.go", "2"),
		files("a.go", "12", "b.go", ""),
		files("a.go", "1"),
	} {
		seen[Of(other)] = true
	}
	seen[Of(files("x.fatbin", "1"), files("a.go", "1"))] = true
	require.Len(t, seen, 6)
}
