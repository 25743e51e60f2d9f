// Package docs tests the pages that users read: their code is code of this repository, their commands run, their links
// lead somewhere, and their figures were measured.
//
// Code in a page names where it comes from, in the line that begins it:
//
//	```go examples/worker/main.go#step     the declaration step of that file (#model.step for a method, several by commas)
//	```go examples/quickstart/main.go      the whole file; the same for python and cpp
//
// go test ./test/docs -update writes the code into the pages anew.
//
// Commands are blocks of sh. They run in a copy of the repository, the blocks of a page one after the other. A word behind sh
// says why one does not: gpu needs GPUs, ci is what continuous integration runs by itself or for an earlier page, released needs a published
// release.
package docs

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the code that pages show into them anew")

const root = "../.."

// notOurs says that a folder is none of the repository's, such as an environment of Python, which may change at any time.
func notOurs(path string, d os.DirEntry) bool {
	return d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".")
}

// pages are the pages for users, with the README first.
func pages(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	names := []string{"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
	for _, f := range found {
		names = append(names, "docs/"+filepath.Base(f))
	}
	return names
}

// everyPage is the pages for users and those of which other tests, or none, run the code: the Python package's runs its own.
func everyPage(t *testing.T) []string {
	t.Helper()
	return append(pages(t), "ARCHITECTURE.md", "bindings/python/README.md")
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)
	return string(b)
}

var fence = regexp.MustCompile("(?ms)^```([^\n]*)\n(.*?)^```$")

// block is one piece of code in a page.
type block struct{ language, rest, text string }

func blocks(t *testing.T, name string) []block {
	t.Helper()
	var all []block
	for _, m := range fence.FindAllStringSubmatch(read(t, name), -1) {
		language, rest, _ := strings.Cut(m[1], " ")
		all = append(all, block{language, rest, m[2]})
	}
	return all
}

func TestBlocksAreOfKnownKinds(t *testing.T) {
	for _, name := range pages(t) {
		for _, b := range blocks(t, name) {
			switch b.language {
			case "sh":
				require.Contains(t, []string{"", "gpu", "ci", "released"}, b.rest, name)
			case "go", "python", "cpp":
				require.NotEmpty(t, b.rest, "%s: code without the file that it is from:\n%s", name, b.text)
			case "text":
			default:
				t.Errorf("%s: a block of %q", name, b.language)
			}
		}
		require.NotRegexp(t, `(?m)\n\n    \S`, fence.ReplaceAllString(read(t, name), ""), "%s: an indented block, of which nobody knows what it is", name)
	}
}

// Code in the pages is code of the repository, which the compiler and the other tests see.
func TestCodeIsTheRepositorys(t *testing.T) {
	for _, name := range pages(t) {
		page := read(t, name)
		fresh := fence.ReplaceAllStringFunc(page, func(whole string) string {
			m := fence.FindStringSubmatch(whole)
			language, from, _ := strings.Cut(m[1], " ")
			if !slices.Contains([]string{"go", "python", "cpp"}, language) {
				return whole
			}
			file, declarations, part := strings.Cut(from, "#")
			text := read(t, file)
			if part {
				text = excerpt(t, file, text, strings.Split(declarations, ","))
			}
			return "```" + m[1] + "\n" + text + "```"
		})
		if *update {
			require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(fresh), 0o644))
			continue
		}
		require.Equal(t, fresh, page, "%s: go test ./test/docs -update writes the code anew", name)
	}
}

// excerpt is some top-level declarations of a Go file, with their comments, as they stand there.
func excerpt(t *testing.T, file, source string, names []string) string {
	t.Helper()
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, source, parser.ParseComments)
	require.NoError(t, err)
	at := map[string]string{}
	for _, d := range parsed.Decls {
		from, to := d.Pos(), d.End()
		var doc *ast.CommentGroup
		var called []string
		switch d := d.(type) {
		case *ast.FuncDecl:
			doc = d.Doc
			called = append(called, receiver(d)+d.Name.Name)
		case *ast.GenDecl:
			doc = d.Doc
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					called = append(called, s.Name.Name)
				case *ast.ValueSpec:
					called = append(called, s.Names[0].Name)
				}
			}
		}
		if doc != nil {
			from = doc.Pos()
		}
		for _, c := range called {
			at[c] = source[set.Position(from).Offset:set.Position(to).Offset]
		}
	}
	var parts []string
	for _, n := range names {
		require.Contains(t, at, n, file)
		parts = append(parts, at[n])
	}
	return strings.Join(parts, "\n\n") + "\n"
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// published is how a page that leaves the repository, as the Python package's does, names files of it.
var published = regexp.MustCompile(`^https://github\.com/switchyard-moe/switchyard/(?:blob|tree)/main/`)

// Links lead to files and headings that are there.
func TestLinks(t *testing.T) {
	for _, name := range everyPage(t) {
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(read(t, name), ""), -1) {
			from, to := filepath.Dir(name), m[1]
			if at := published.FindString(to); at != "" {
				from, to = ".", strings.TrimPrefix(to, at)
			}
			if strings.Contains(to, "://") {
				continue
			}
			path, heading, _ := strings.Cut(to, "#")
			target := name
			if path != "" {
				target = filepath.Join(from, path)
			}
			info, err := os.Stat(filepath.Join(root, target))
			require.NoError(t, err, "%s: %s", name, m[1])
			if heading != "" && !info.IsDir() {
				require.Contains(t, headings(read(t, target)), heading, "%s: %s", name, m[1])
			}
		}
	}
}

// headings are the anchors of a page, made as GitHub makes them.
func headings(page string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		text := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		all = append(all, strings.ReplaceAll(text, " ", "-"))
	}
	return all
}

// Lines are of a length that people and diffs can read. Tables and code are as wide as they must be.
func TestLinesAreShort(t *testing.T) {
	for _, name := range everyPage(t) {
		var long []string
		for line := range strings.Lines(fence.ReplaceAllString(read(t, name), "")) {
			if !strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "<!--") && utf8.RuneCountInString(line) > 141 {
				long = append(long, line)
			}
		}
		require.Empty(t, long, name)
	}
}

// The command that CONTRIBUTING has for machines with GPUs names all packages whose tests want one.
func TestContributingNamesTheTestsOnGPUs(t *testing.T) {
	var command string
	for _, b := range blocks(t, "CONTRIBUTING.md") {
		if b.language == "sh" && b.rest == "gpu" && strings.HasPrefix(b.text, "go test ") {
			command = b.text
		}
	}
	named := strings.Fields(command)
	wants := regexp.MustCompile(`\bCUDACount\(|\bdevice\.CUDA\(|needs a GPU`)
	found := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && notOurs(path, d) {
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, "_test.go") || filepath.Dir(path) == "." {
			return err
		}
		text, err := os.ReadFile(path)
		from, _ := filepath.Rel(root, filepath.Dir(path))
		if err == nil && from != "test/docs" && wants.Match(text) {
			require.Contains(t, named, "./"+from, "%s wants a GPU", path)
			found++
		}
		return err
	}))
	require.Greater(t, found, 5)
}

// Packages of which the README says so have examples that run.
func TestPackagesHaveExamples(t *testing.T) {
	page := read(t, "README.md")
	require.Contains(t, page, "The packages from `stack` to `device` have examples that `go test` runs.")
	listed := regexp.MustCompile("(?m)^\\| \\[`(\\w+)`\\]").FindAllStringSubmatch(page, -1)
	require.Equal(t, "stack", listed[0][1])
	require.Equal(t, "device", listed[len(listed)-1][1])
	for _, m := range listed {
		files, err := filepath.Glob(filepath.Join(root, m[1], "*_test.go"))
		require.NoError(t, err)
		runs := slices.ContainsFunc(files, func(f string) bool {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			return regexp.MustCompile(`(?ms)^func Example\w*\(\) \{\n.*?^\t// (Unordered output|Output):`).Match(text)
		})
		require.True(t, runs, "%s has no example that runs", m[1])
	}
}

// The glossary defines the words that it is there for, and pages link to it.
func TestGlossary(t *testing.T) {
	page := read(t, "docs/glossary.md")
	for _, word := range []string{"credit", "staging", "packet", "in place", "epoch", "stripe"} {
		require.Regexp(t, `(?mi)^\*\*`+word+`\b`, page)
	}
	for _, name := range pages(t) {
		if name == "docs/glossary.md" || name == "SECURITY.md" || name == "CHANGELOG.md" {
			continue
		}
		require.Contains(t, read(t, name), "glossary.md", name)
	}
	var words []string
	for _, m := range regexp.MustCompile(`(?m)^\*\*(.+?)\*\*`).FindAllStringSubmatch(page, -1) {
		words = append(words, strings.ToLower(m[1]))
	}
	require.True(t, slices.IsSorted(words), "in the order of the alphabet: %q", words)
}

// Figures of the tables of README and docs/figures.md stand on the pages of measurements that are linked above them.
func TestFiguresWereMeasured(t *testing.T) {
	_, section, ok := strings.Cut(read(t, "README.md"), "\n## How fast\n")
	require.True(t, ok)
	section, _, _ = strings.Cut(section, "\n## ")
	require.Greater(t, measured(t, "", section), 10)
	figures := 0
	for _, part := range strings.Split(read(t, "docs/figures.md"), "\n## ") {
		figures += measured(t, "docs/", part)
	}
	require.Greater(t, figures, 70)
}

// measured counts the times in the tables of a section, and looks each up on the pages of measurements that the section links.
func measured(t *testing.T, dir, section string) (times int) {
	var pages strings.Builder
	for _, m := range link.FindAllStringSubmatch(section, -1) {
		if page := dir + m[1]; strings.HasPrefix(page, "docs/measured/") {
			pages.WriteString(read(t, page))
		}
	}
	for line := range strings.Lines(section) {
		for _, m := range regexp.MustCompile(`\| ([\d.]+) us `).FindAllStringSubmatch(line, -1) {
			require.Regexp(t, `\b`+regexp.QuoteMeta(m[1])+`\b`, pages.String(), "%s us is on no page of measurements that is linked next to it", m[1])
			times++
		}
	}
	return times
}

// The committed pictures are what the program draws.
func TestPictures(t *testing.T) {
	dir := t.TempDir()
	const hosts = "docs/measured/2026-11-23-hosts-2-cores.md"
	for _, folder := range []string{"images", "measured"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "docs", folder), 0o755))
	}
	for _, page := range []string{"docs/figures.md", hosts} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, page), []byte(read(t, page)), 0o644))
	}
	program := filepath.Join(dir, "pictures")
	out, err := exec.Command("go", "build", "-o", program, "./pictures").CombinedOutput()
	require.NoError(t, err, string(out))
	cmd := exec.Command(program)
	cmd.Dir = dir
	out, err = cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	drawn, err := filepath.Glob(filepath.Join(dir, "docs", "images", "*.svg"))
	require.NoError(t, err)
	require.NotEmpty(t, drawn)
	for _, f := range drawn {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		name := "docs/images/" + filepath.Base(f)
		require.Equal(t, string(b), read(t, name), "%s: go run ./test/docs/pictures", name)
		page, link := "README.md", name
		if filepath.Base(f) == "worlds.svg" {
			page, link = hosts, "../images/worlds.svg"
		}
		require.Contains(t, read(t, page), "("+link+")")
	}
}

// What pages mention of this module's packages is there: names like comm.Join, and fields and methods like memory.Options.SegmentBytes.
func TestNamesExist(t *testing.T) {
	exported := map[string]map[string]bool{}
	for _, p := range []string{"comm", "memory", "device", "dispatch", "alltoallv", "allreduce", "kernels", "rebalance"} {
		exported[p] = names(t, filepath.Join(root, p))
	}
	mention := regexp.MustCompile(`\b(comm|memory|device|dispatch|alltoallv|allreduce|kernels|rebalance)\.([A-Z]\w*)((?:\.|\{)([A-Z]\w*))?`)
	for _, page := range everyPage(t) {
		for _, m := range mention.FindAllStringSubmatch(fence.ReplaceAllString(read(t, page), ""), -1) {
			if page == "ARCHITECTURE.md" && m[0] == "kernels.RollCall" {
				continue // which its guide makes up
			}
			require.True(t, exported[m[1]][m[2]], "%s: there is no %s.%s", page, m[1], m[2])
			if m[4] != "" {
				require.True(t, exported[m[1]][m[2]+"."+m[4]], "%s: there is no %s.%s.%s", page, m[1], m[2], m[4])
			}
		}
	}
}

// names are the exported names of a package: Name, and Type.Field or Type.Method.
func names(t *testing.T, dir string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	all := map[string]bool{}
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), f, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range parsed.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				all[receiver(d)+d.Name.Name] = true
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						all[s.Name.Name] = true
						if st, ok := s.Type.(*ast.StructType); ok {
							for _, field := range st.Fields.List {
								for _, n := range field.Names {
									all[s.Name.Name+"."+n.Name] = true
								}
							}
						}
					case *ast.ValueSpec:
						for _, n := range s.Names {
							all[n.Name] = true
						}
					}
				}
			}
		}
	}
	return all
}

// receiver is the type of a method and a dot, nothing for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	kind := d.Recv.List[0].Type
	for {
		switch k := kind.(type) {
		case *ast.StarExpr:
			kind = k.X
		case *ast.IndexExpr:
			kind = k.X
		case *ast.Ident:
			return k.Name + "."
		default:
			return ""
		}
	}
}
