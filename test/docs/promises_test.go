package docs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	promise      = regexp.MustCompile(`(?m)^\*\*([A-Z]\d+)\*\* `)
	claimingTest = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)(?:CUDA_)?([A-Z]\d+)_\w+)\(`)
	citation     = regexp.MustCompile(`\(([MXRF]\d+)(?:, ([MXRF]\d+))*\)`)
)

// Every promise of docs/promises.md has a test of its name and lists all of them, and no test claims a promise that the page lacks.
func TestPromisesHaveTests(t *testing.T) {
	const name = "docs/promises.md"
	page, claims := read(t, name), claimingTests(t)
	var listed []string
	fresh := regexp.MustCompile(`(?m)^\*\*([A-Z]\d+)\*\* [^\n]+(\n[^\n]+)*(\n\n- [^\n]+(\n[^\n]+)*)?`).ReplaceAllStringFunc(page, func(entry string) string {
		p := promise.FindStringSubmatch(entry)[1]
		listed = append(listed, p)
		require.NotEmpty(t, claims[p], "no test is called Test%s_...", p)
		sentence, _, _ := strings.Cut(entry, "\n\n")
		return sentence + "\n\n" + listOf(claims[p])
	})
	for p, tests := range claims {
		require.Contains(t, listed, p, "%s has no promise %s, which %v claims", name, p, tests)
	}
	if *update {
		require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(fresh), 0o644))
		return
	}
	require.Equal(t, fresh, page, "make docs writes the lists of tests")
}

// Pages cite only promises that exist.
func TestPromisesThatPagesCiteExist(t *testing.T) {
	listed := read(t, "docs/promises.md")
	cited := 0
	for _, page := range everyPage(t) {
		for _, m := range citation.FindAllString(read(t, page), -1) {
			for _, p := range strings.Split(strings.Trim(m, "()"), ", ") {
				require.Contains(t, listed, "**"+p+"** ", "%s cites %s", page, p)
				cited++
			}
		}
	}
	require.Greater(t, cited, 10)
}

// claimingTests are the tests that claim to hold a promise, as package and name, by the promise.
func claimingTests(t *testing.T) map[string][][2]string {
	t.Helper()
	claims := map[string][][2]string{}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && notOurs(path, d) {
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range claimingTest.FindAllStringSubmatch(string(text), -1) {
			in, _ := filepath.Rel(root, filepath.Dir(path))
			claims[m[2]] = append(claims[m[2]], [2]string{in, m[1]})
		}
		return err
	}))
	for _, tests := range claims {
		slices.SortFunc(tests, func(a, b [2]string) int { return strings.Compare(a[0]+" "+a[1], b[0]+" "+b[1]) })
	}
	return claims
}

// listOf is the entry of a page for these tests: an item for each package, in lines that are not too long.
func listOf(tests [][2]string) string {
	var items []string
	for len(tests) > 0 {
		in := tests[0][0]
		n := slices.IndexFunc(tests, func(t [2]string) bool { return t[0] != in })
		if n < 0 {
			n = len(tests)
		}
		text, line := "", fmt.Sprintf("- [%s](../%s):", in, in)
		for i, t := range tests[:n] {
			word := " `" + t[1] + "`"
			if i < n-1 {
				word += ","
			}
			if len(line)+len(word) > 139 {
				text, line = text+line+"\n", " "
			}
			line += word
		}
		items, tests = append(items, text+line), tests[n:]
	}
	return strings.Join(items, "\n")
}
