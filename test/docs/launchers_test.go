package docs

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/env"
)

// The page of launchers shows the table by which they are read.
func TestLaunchersAreThoseOfTheTable(t *testing.T) {
	code := func(names ...string) string {
		var all []string
		for _, name := range names {
			if name != "" {
				all = append(all, "`"+name+"`")
			}
		}
		return cmp.Or(strings.Join(all, ", "), "-")
	}
	var commands, variables []string
	for _, l := range env.Launchers() {
		host := append([]string{l.Host}, l.More...)
		commands = append(commands, fmt.Sprintf("| %s | `%s` | `%s` |", l.Name, l.Command, l.ID))
		variables = append(variables, fmt.Sprintf("| %s | %s | %s | %s | %s |", l.Name, code(l.Rank, l.Size), code(append(l.LocalRank, l.LocalSize...)...),
			code(append(host, l.Port)...), code(append(l.Job, l.HostJob...)...)))
	}
	const name = "docs/launchers.md"
	page := read(t, name)
	for _, c := range []struct {
		head string
		rows []string
	}{
		{"| launcher | a command that starts 4 ranks of a Go program | `SWITCHYARD_LAUNCHER` |", commands},
		{"| launcher | rank, size | on this host | rank 0's host | tells starts of a job apart |", variables},
	} {
		_, stands := table(t, page, c.head)
		fresh := strings.Join(c.rows, "\n")
		if !*update {
			require.Equal(t, fresh, stands, "make docs writes the table")
			continue
		}
		_, rest, _ := strings.Cut(page, c.head+"\n")
		ruler, _, _ := strings.Cut(rest, "\n")
		was := c.head + "\n" + ruler + "\n" + stands
		page = strings.Replace(page, was, c.head+"\n"+ruler+"\n"+fresh, 1)
	}
	if *update {
		require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(page), 0o644))
	}
}
