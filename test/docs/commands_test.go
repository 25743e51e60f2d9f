package docs

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// Every command of every page runs, or says why it does not. The folder of one page is gone before the next one begins, and so are the
// processes that its commands have started: one that outlives its page fails the test.
func TestCommands(t *testing.T) {
	ci := read(t, ".ci/run") + read(t, ".ci/full") + read(t, "Makefile") // and what pages run
	tree := filepath.Join(t.TempDir(), "repository")                     // of all pages, so that Go builds a package for the first one only
	for _, name := range pages(t) {
		var script strings.Builder
		for _, b := range blocks(t, name) {
			switch {
			case b.language == "sh" && b.rest == "":
				script.WriteString(b.text)
				ci += b.text
			case b.language == "sh" && b.rest == "ci":
				for line := range strings.Lines(b.text) {
					line, _, _ = strings.Cut(line, "  #")
					if line = strings.TrimSpace(line); !partOfTheSuite(t, ci, line) {
						require.True(t, strings.Contains(ci, line), "%s says that continuous integration runs %s", name, line)
					}
				}
			}
		}
		if script.Len() == 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			if testing.Short() {
				t.Skip("builds and runs programs")
			}
			proctest.Need(t, "bash")
			if strings.Contains(script.String(), "curl ") {
				proctest.Need(t, "curl")
			}
			copyRepository(t, tree)
			out, err := runPage(t, tree, script.String(), 15*time.Minute)
			require.NoError(t, err, out)
		})
	}
}

var server = regexp.MustCompile(`(?m)^bin/serve `)

// runPage runs the commands of a page. The server of the page has an address of its own, for other runs on this machine. What the commands have
// left running is killed, and is an error.
func runPage(t *testing.T, dir, script string, within time.Duration) (output string, err error) {
	t.Helper()
	address := loopback.Host() + ":8080"
	script = server.ReplaceAllString(strings.ReplaceAll(script, "localhost:8080", address), "bin/serve -addr "+address+" ")
	mark := "SWITCHYARD_TEST_PAGE=" + rand.Text()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euxo", "pipefail", "-c", script)
	cmd.Dir, cmd.WaitDelay = dir, 5*time.Second
	cmd.Env = append(os.Environ(), mark)
	out, err := cmd.CombinedOutput()
	if left := killMarked(t, mark); err == nil && len(left) > 0 {
		err = fmt.Errorf("these live on: %s", left)
	}
	return string(out), err
}

// killMarked kills all processes with a variable in their environment, and returns their command lines. It looks until it has found none twice:
// a process that becomes another program has no environment for a moment.
func killMarked(t *testing.T, mark string) (killed []string) {
	t.Helper()
	for none := 0; none < 2; time.Sleep(20 * time.Millisecond) {
		none++
		all, err := filepath.Glob("/proc/[0-9]*/environ")
		require.NoError(t, err)
		for _, path := range all {
			environ, err := os.ReadFile(path)
			if err != nil || !slices.Contains(strings.Split(string(environ), "\x00"), mark) {
				continue // ended, or of another user
			}
			line, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			require.NoError(t, err)
			if syscall.Kill(pid, syscall.SIGKILL) == nil {
				none = 0
				if text := strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " ")); !slices.Contains(killed, text) {
					killed = append(killed, text)
				}
			}
		}
	}
	return killed
}

// A page whose commands fail, or take too long, leaves no process behind, and neither does one that only forgets one.
func TestCommandsLeaveNoProcess(t *testing.T) {
	proctest.Need(t, "bash")
	for name, page := range map[string]struct {
		script, err string
		within      time.Duration
	}{
		"fails":      {"sleep 1000 & setsid sleep 1001 & false", "exit status 1", time.Minute},
		"takes long": {"setsid sleep 1002 & until false; do sleep 1; done", "signal: killed", time.Second},
		"forgets":    {"setsid sleep 1003 >/dev/null 2>&1 &", "these live on: [", time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			out, err := runPage(t, dir, page.script, page.within)
			require.ErrorContains(t, err, page.err, out)
			all, err := filepath.Glob("/proc/[0-9]*/cwd")
			require.NoError(t, err)
			for _, link := range all {
				to, _ := os.Readlink(link)
				require.NotEqual(t, dir, to, link)
			}
		})
	}
}

var suite = regexp.MustCompile(`^go test(?: -short)?((?: \./[\w/]+)+)(?: -run (\w+))?$`)

// partOfTheSuite reports whether a command runs tests that go test ./... runs too, and requires that there are such tests.
func partOfTheSuite(t *testing.T, ci, command string) bool {
	t.Helper()
	m := suite.FindStringSubmatch(command)
	if m == nil || !strings.Contains(ci, "go test ./...") {
		return false
	}
	named := regexp.MustCompile(`(?m)^func Test` + strings.TrimPrefix(m[2], "Test"))
	for folder := range strings.FieldsSeq(m[1]) {
		files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
		require.NoError(t, err)
		require.True(t, slices.ContainsFunc(files, func(f string) bool {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			return named.Match(text)
		}), "%s: %s has no such test", command, folder)
	}
	return true
}

// copyRepository makes dir what a commit of everything here would hold.
func copyRepository(t *testing.T, dir string) {
	t.Helper()
	require.NoError(t, os.RemoveAll(dir))
	list := exec.Command("git", "ls-files", "-co", "--exclude-standard", "-z")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Skipf("not a git repository: %v", err)
	}
	for name := range bytes.SplitSeq(bytes.TrimRight(out, "\x00"), []byte{0}) {
		from, to := filepath.Join(root, string(name)), filepath.Join(dir, string(name))
		info, err := os.Lstat(from)
		if err != nil || !info.Mode().IsRegular() {
			continue // deleted, or a link
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
		b, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, b, info.Mode().Perm()))
	}
}
