package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
)

// quiet are folders whose errors no user of the library sees: programs, tests, generators, doubles.
var quiet = regexp.MustCompile(`^(?:bindings|cmd|examples|test|dist|docs)(?:/|$)|/(?:testdata|emulated|double|railtest|gen\w+)(?:/|$)|^(?:kernels/cuda/)?internal/(?:fatbin|genfatbin|genlayout|layout|curve|loopback|proctest|worldtest)(?:/|$)`)

// errorTexts are the texts of all errors that the packages make, as "package: text", sorted. A verb of a format is "…".
func errorTexts(t *testing.T) []string {
	t.Helper()
	seen := map[string]bool{}
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		folder, _ := filepath.Rel(root, path)
		if !d.IsDir() {
			return nil
		}
		if folder != "." && strings.HasPrefix(d.Name(), ".") || quiet.MatchString(folder) {
			return filepath.SkipDir
		}
		files, err := filepath.Glob(filepath.Join(path, "*.go"))
		for _, f := range files {
			if !strings.HasSuffix(f, "_test.go") {
				for _, text := range textsOf(t, f) {
					seen[text] = true
				}
			}
		}
		return err
	}))
	var all []string
	for text := range seen {
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}

var verb = regexp.MustCompile(`%[-+# 0]*\d*(?:\.\d+)?[a-zA-Z]`)

// textsOf are the texts of the errors that a file makes: the formats of fmt.Errorf, errors.New and of functions that take a format and
// return an error. Packages that say in words what a peer does make further texts, of three words or more: formats of fmt.Sprintf, strings
// that are returned, details of failures. Names that a value gives itself (String) and log lines are none.
func textsOf(t *testing.T, file string) (all []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	folder, _ := filepath.Rel(root, filepath.Dir(file))
	name := parsed.Name.Name
	if folder == "kernels/host" || strings.HasPrefix(folder, "kernels/cuda") { // engines speak for it
		name = "kernels"
	}
	keep := func(e ast.Expr, words int) bool {
		text, ok := literal(e)
		text = strings.TrimSpace(strings.TrimPrefix(verb.ReplaceAllString(text, "…"), name+": "))
		if ok = ok && len(word.FindAllString(text, -1)) >= words; ok {
			all = append(all, name+": "+text)
		}
		return ok
	}
	parts := func(list ...ast.Expr) {
		for _, e := range list {
			if worded.MatchString(folder) {
				keep(e, 3)
			}
		}
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			return n.Name.Name != "String"
		case *ast.CallExpr:
			switch called := exprName(n.Fun); {
			case makes.MatchString(called):
				at := 0
				if strings.HasSuffix(called, "Invalid") { // which has the package's name first
					at = 1
				}
				keep(n.Args[at], 1)
			case logs.MatchString(called):
				return false
			case called == "fmt.Sprintf" || called == "fmt.Fprintf" || called == "refuse":
				parts(n.Args...)
			}
		case *ast.ReturnStmt:
			parts(n.Results...)
		case *ast.KeyValueExpr:
			if field := exprName(n.Key); field == "detail" || field == "text" {
				parts(n.Value)
			}
		}
		return true
	})
	return all
}

var (
	word   = regexp.MustCompile(`[A-Za-z]{2,}`)
	worded = regexp.MustCompile(`^(?:comm|memory|kernels(?:/host|/cuda)?|internal/(?:agree|cuda))$`)
	makes  = regexp.MustCompile(`^(?:fmt\.Errorf|errors\.New|comm\.Invalid|Invalid|invalid|mismatched)$`)
	logs   = regexp.MustCompile(`\.(?:Debug|Info|Warn|Error|Log|logWaiting)$`)
)

func exprName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return exprName(e.X) + "." + e.Sel.Name
	}
	return ""
}

// literal is a string, or a sum of strings.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return s, err == nil
	case *ast.BinaryExpr:
		a, x := literal(e.X)
		b, y := literal(e.Y)
		return a + b, x && y
	}
	return "", false
}

// trouble is a part of the page of troubles: what it is called, its cause and its cure, and the texts that name it.
var trouble = regexp.MustCompile("(?s)^### ([^\n]+)\n\n\\*\\*Cause\\.\\*\\* (.+)\n\n\\*\\*Cure\\.\\*\\* (.+)\n\n```text\n(.*)```\n$")

const (
	troubles = "docs/troubleshooting.md"
	unsorted = "\n### Not sorted yet\n\n```text\n"
)

// Every error text is on the page of troubles once, under a trouble with cause and cure, and the page has no other.
func TestTroubleshootingHasEveryErrorText(t *testing.T) {
	texts := errorTexts(t)
	require.Greater(t, len(texts), 500)
	page := read(t, troubles)
	if *update {
		page = sortTexts(page, texts)
		require.NoError(t, os.WriteFile(filepath.Join(root, troubles), []byte(page), 0o644))
	}
	require.False(t, strings.Contains(page, unsorted), "move each of these texts under the trouble that it names, or add a trouble")
	var listed []string
	for i, part := range strings.Split(page, "\n### ") {
		if i == 0 {
			continue
		}
		part, _, _ = strings.Cut("### "+part, "\n## ")
		m := trouble.FindStringSubmatch(strings.TrimRight(part, "\n") + "\n")
		require.NotNil(t, m, "a trouble has a cause, a cure and its texts: %.80q", part)
		lines := strings.Split(strings.TrimSuffix(m[4], "\n"), "\n")
		require.True(t, slices.IsSorted(lines), m[1])
		listed = append(listed, lines...)
	}
	slices.Sort(listed)
	for i := range listed[1:] {
		require.NotEqual(t, listed[i], listed[i+1], "on the page twice")
	}
	missing := slices.DeleteFunc(slices.Clone(texts), func(s string) bool { _, ok := slices.BinarySearch(listed, s); return ok })
	stale := slices.DeleteFunc(listed, func(s string) bool { _, ok := slices.BinarySearch(texts, s); return ok })
	const how = `go test ./test/docs -run Troubleshooting -update takes stale texts off the page and puts new ones at its end, to be sorted by hand`
	require.Empty(t, missing, "%s lacks texts: %s", troubles, how)
	require.Empty(t, stale, "%s has texts that no package makes: %s", troubles, how)
}

// sortTexts takes stale texts off the page, sorts the lists, and puts new texts at the end.
func sortTexts(page string, texts []string) string {
	page, _, _ = strings.Cut(page, unsorted)
	missing := slices.Clone(texts)
	lists := regexp.MustCompile("(?s)(\\*\\*Cure\\.[^`]*(?:`[^`]+`[^`]*)*\n\n```text\n)(.*?)```")
	page = lists.ReplaceAllStringFunc(page, func(whole string) string {
		m := lists.FindStringSubmatch(whole)
		lines := slices.DeleteFunc(strings.Split(m[2], "\n"), func(s string) bool { _, ok := slices.BinarySearch(texts, s); return !ok })
		slices.Sort(lines)
		missing = slices.DeleteFunc(missing, func(s string) bool { return slices.Contains(lines, s) })
		return m[1] + strings.Join(append(lines, "```"), "\n")
	})
	if len(missing) > 0 {
		page += unsorted + strings.Join(missing, "\n") + "\n```\n"
	}
	return page
}

// Errors that calls really return are found on the page by their words.
func TestTroubleshootingFindsErrors(t *testing.T) {
	page := read(t, troubles)
	_, join := comm.Join(t.Context(), comm.Config{Rank: 3, Size: 2})
	_, local := comm.Local(0)
	_, balance := dispatch.Balance([]float64{1, 2}, dispatch.BalanceOptions{Ranks: 2, Slots: 1, Nodes: 2, Groups: 1})
	for _, err := range []error{join, local, balance, &kernels.IndexError{Expert: 9, Experts: 8}, comm.ErrOutOfStep} {
		require.Error(t, err)
		found := false
		for line := range strings.Lines(page) {
			if _, text, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && len(word.FindAllString(text, -1)) > 1 {
				text = strings.ReplaceAll(regexp.QuoteMeta(text), "…", ".+")
				found = found || regexp.MustCompile(text+"$").MatchString(err.Error())
			}
		}
		require.True(t, found, err.Error())
	}
}
