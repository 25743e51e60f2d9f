package docs

import (
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

// hidden are phrases that hide the subject of a sentence, or a limit.
var hidden = regexp.MustCompile(`in vain|\b[Ll]ikewise\b|where there is none|\b[Bb]eside\b|\bso many\b|(?:^|[.:;!?] |\n\n)(?:Who|What)(?:ever)? [a-z][^.?]*(?:\.|$)`)

// plain are the folders of packages whose comments the test reads, and those of products whose tests it leaves out.
var (
	plain    = []string{"allreduce", "alltoallv", "device", "dispatch", "internal/communicator", "internal/curve", "internal/env", "memory", "rebalance", "stack"}
	products = []string{"bindings/python/abi", "bindings/python/core", "cmd/switchyard", "comm", "device/nvml", "internal/agree", "internal/cuda",
		"internal/platform", "internal/proctest", "internal/rails", "internal/rails/double", "internal/rails/railtest", "internal/rails/ucx", "internal/shm",
		"internal/vec", "internal/worldtest", "kernels", "kernels/cuda", "kernels/host", "p2p", "test/explore", "test/perf", "test/soak"}
)

// foreign are the sources in other languages whose comments the test reads, and what a comment is there: lines that begin alike, or a
// docstring of Python.
var foreign = map[string]*regexp.Regexp{
	"internal/cuda/*.[ch]":                  slashes,
	"internal/rails/ucx/*.[ch]":             slashes,
	"kernels/cuda/*.cu*":                    slashes,
	"kernels/cuda/*/*.cu*":                  slashes,
	"kernels/cuda/dispatch/*/*.cuh":         slashes,
	"kernels/cuda/include/*.cuh":            slashes,
	"kernels/cuda/testdata/emulate/*":       slashes,
	"bindings/python/*.py":                  hashes,
	"bindings/python/src/switchyard/*.py":   hashes,
	"bindings/python/src/switchyard/*/*.py": hashes,
	"bindings/python/deep_ep/src/*/*.py":    hashes,
	"bindings/python/deep_ep/src/*/*/*.py":  hashes,
}

var (
	slashes = regexp.MustCompile(`(?m)(?:^.*?//[^\n]*\n)(?:^[ \t]*//[^\n]*\n)*`)
	hashes  = regexp.MustCompile(`(?m)(?:^[^"'\n]*?#[^\n]*\n)(?:^[ \t]*#[^\n]*\n)*|"""[^"]*"""`)
	// marker is what begins a line of a comment, with the code before it.
	marker = regexp.MustCompile(`(?m)^.*?(?://|#|""") ?|"""$`)
)

// code and indented are text of a page that is not prose.
var (
	code     = regexp.MustCompile("`[^`]*`")
	indented = regexp.MustCompile(`\n\n(?:    [^\n]*\n)+`)
)

// paragraphs are those of a page, list items and table cells too, each on one line and without code.
func paragraphs(page string) []string {
	page = indented.ReplaceAllString(fence.ReplaceAllString(page, ""), "\n\n")
	page = regexp.MustCompile(`(?m)^(?:#+|\s*(?:[-*]|\d+\.)) |^\|| \| `).ReplaceAllString(page, "\n\n")
	var all []string
	for _, p := range regexp.MustCompile(`\n\s*\n`).Split(page, -1) {
		if p = strings.Join(strings.Fields(code.ReplaceAllString(p, "x")), " "); p != "" {
			all = append(all, p)
		}
	}
	return all
}

// Every sentence of a page says who does what, and limits are numbers.
func TestPagesArePlain(t *testing.T) {
	for _, name := range everyPage(t) {
		for _, p := range paragraphs(read(t, name)) {
			if m := hidden.FindString(p); m != "" {
				t.Errorf("%s: %q in %q", name, m, p)
			}
		}
	}
}

// So do comments.
func TestCommentsArePlain(t *testing.T) {
	for _, folder := range append(slices.Clone(plain), products...) {
		files, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files, folder)
		for _, f := range files {
			if slices.Contains(products, folder) && strings.HasSuffix(f, "_test.go") {
				continue
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), f, nil, parser.ParseComments|parser.SkipObjectResolution)
			require.NoError(t, err)
			for _, c := range parsed.Comments {
				for _, p := range paragraphs(comment(c)) {
					if m := hidden.FindString(p); m != "" {
						t.Errorf("%s: %q in %q", f, m, p)
					}
				}
			}
		}
	}
}

// So do those of kernels and of Python.
func TestCommentsOfOtherLanguagesArePlain(t *testing.T) {
	for pattern, comment := range foreign {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, f := range files {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			for _, c := range comment.FindAllString(string(text), -1) {
				for _, p := range paragraphs(marker.ReplaceAllString(c, "")) {
					if m := hidden.FindString(p); m != "" {
						t.Errorf("%s: %q in %q", f, m, p)
					}
				}
			}
		}
	}
}

func comment(c *ast.CommentGroup) string {
	return regexp.MustCompile(`(?m)^\t.*$`).ReplaceAllString(c.Text(), "")
}

// meanings are uses of words of the glossary in another meaning than theirs, by the word.
var meanings = map[string]*regexp.Regexp{
	"block":        regexp.MustCompile(`\bpairs? of blocks|\bblocks? (?:is |are )?(?:freed|allocated)|\bpool blocks?`),
	"place":        regexp.MustCompile(`\btakes? the place of|\bin its place\b|\bof equal place\b|\bplaces after\b`),
	"eager":        regexp.MustCompile(`(?i)\beager\b(?:[^* ]|\*? [^m])`),
	"communicator": regexp.MustCompile(`\bcommunicators? (?:is|are) a (?:group|rank)`),
	"handle":       regexp.MustCompile(`\bhandles? of (?:memory|a stream|the driver)|\bmemory handles?`),
	"part":         regexp.MustCompile(`\bpart of (?:the heap|one message|a message|a GPU|a row)\b`),
}

// The glossary defines each of its words once, and pages use these in its meaning. A slot alone is one of staging.
func TestWordsHaveOneMeaning(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\*\*(.+?)\*\*`).FindAllStringSubmatch(read(t, "docs/glossary.md"), -1) {
		word := strings.ToLower(m[1])
		require.False(t, seen[word], "%q has two definitions", word)
		seen[word] = true
	}
	slot := regexp.MustCompile(`(?i)(expert )?\bslots?\b`)
	for word := range meanings {
		require.True(t, seen[word], "the glossary does not define %q", word)
	}
	for _, name := range everyPage(t) {
		for _, p := range paragraphs(read(t, name)) {
			for word, other := range meanings {
				if m := other.FindString(p); m != "" {
					t.Errorf("%s: %q is not what the glossary says of %q: %q", name, m, word, p)
				}
			}
			for _, m := range slot.FindAllStringSubmatch(p, -1) {
				if m[1] == "" && !regexp.MustCompile(`staging|chunk|grants`).MatchString(p) {
					t.Errorf("%s: %q: a slot is one of staging, an expert has an expert slot: %q", name, m[0], p)
				}
			}
		}
	}
}
