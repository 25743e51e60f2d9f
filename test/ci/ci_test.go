// Package ci tests what the scripts of continuous integration promise: the last lines name what failed, and nothing of a run outlives it.
package ci

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// mark is the variable by which runs of these tests know their processes: other runs on this machine do not see them.
var mark = "SWITCHYARD_TEST_RUN_" + rand.Text()

// run prepares a run whose steps are those of a script.
func run(t *testing.T, steps string) *exec.Cmd {
	t.Helper()
	proctest.Need(t, "bash")
	proctest.Need(t, "python3")
	lib, err := filepath.Abs("../../.ci/lib.sh")
	require.NoError(t, err)
	script := filepath.Join(t.TempDir(), "run")
	require.NoError(t, os.WriteFile(script, []byte(". "+lib+"\n"+steps), 0o666))
	cmd := exec.Command("bash", script)
	cmd.Env = append(os.Environ(), "SWITCHYARD_CI_MARK="+mark)
	cmd.WaitDelay = time.Minute
	return cmd
}

const results = `<testsuites><testsuite>
<testcase classname="github.com/switchyard-moe/switchyard/a" name="TestBroken" time="1.5"><failure message="Failed">%s</failure></testcase>
<testcase classname="github.com/switchyard-moe/switchyard/a" name="TestNowAndThen" time="0.5"><failure message="Failed">once</failure></testcase>
<testcase classname="github.com/switchyard-moe/switchyard/a" name="TestNowAndThen" time="0.5"></testcase>
<testcase classname="github.com/switchyard-moe/switchyard/a" name="TestSkipped" time="0"><skipped message="=== RUN   TestSkipped&#xA;    a_test.go:1: needs the sea&#xA;--- SKIP: TestSkipped (0.00s)&#xA;"></skipped></testcase>
<testcase classname="tests" name="test_sky" time="0"><skipped message="('/home/tests/test_sky.py', 14, &quot;Skipped: could not import 'sky'&quot;)"></skipped></testcase>
</testsuite></testsuites>`

func TestTheEndNamesWhatFailed(t *testing.T) {
	var said strings.Builder
	for i := range 100 {
		fmt.Fprintln(&said, "line", i)
	}
	file := filepath.Join(t.TempDir(), "results.xml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, results, said.String()), 0o666))
	out, err := run(t, `
step "tests" 'cp `+file+` "$results/a.xml"; exit 3' || true
step "more tests" 'true'`).CombinedOutput()
	require.ErrorContains(t, err, "exit status 1", string(out))
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	end := strings.Join(lines[max(0, len(lines)-40):], "\n")
	require.Contains(t, end, "== more tests", "a step that fails does not stop the next one")
	require.Contains(t, end, "1.5 s  a TestBroken")
	require.Contains(t, end, "\nneeds the sea (1): a TestSkipped\n")
	require.Contains(t, end, "\ncould not import 'sky' (1): tests test_sky\n")
	require.Contains(t, end, "\nFLAKY a TestNowAndThen\n")
	require.Contains(t, end, "\n== FAILED: a TestBroken\nline 80\n")
	require.Contains(t, end, "\nline 99\n== FAILED: step tests\nfailing tests: a TestBroken")
	require.NotContains(t, end, "line 79")
}

func TestARunThatPassesSaysSo(t *testing.T) {
	out, err := run(t, `step "tests" 'true'`).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Regexp(t, `\n== done \(after \d+ s\)\n$`, string(out))
}

// A library is one that bears the name, not one whose name ends so.
func TestWhatAMachineHas(t *testing.T) {
	out, err := run(t, `
ldconfig() { printf '\tlibsea.so.1 (libc6,x86-64) => /lib/libsea.so.1\n'; }
there libsea && echo libsea is there
there sea || echo sea is not there`).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "libsea is there\nsea is not there\n")
}

// alive reports whether a process runs.
func alive(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(status), ") Z ")
}

// withVariable is the processes with a variable in their environment that begins so.
func withVariable(t *testing.T, begin string) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range all {
		environ, _ := os.ReadFile(path) // it may have ended
		if strings.HasPrefix(string(environ), begin) || strings.Contains(string(environ), "\x00"+begin) {
			found = append(found, path)
		}
	}
	return found
}

// started waits for the number of a process in a file.
func started(t *testing.T, file string) (pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		b, _ := os.ReadFile(file)
		var err error
		pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
		return err == nil && strings.HasSuffix(string(b), "\n")
	}, time.Minute, time.Millisecond)
	return pid
}

// What a step has left running ends with the run: when it passes, is interrupted or is killed.
func TestNothingOutlivesARun(t *testing.T) {
	for name, s := range map[string]syscall.Signal{"passes": 0, "interrupted": syscall.SIGTERM, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "pid")
			steps := "others() { step \"more\" 'sleep 1000'; step \"yet more\" 'sleep 1000'; }\nbeside others\n" +
				`step "leaves one" 'setsid sleep 1000 >/dev/null 2>&1 & echo $! >` + file + `'`
			if s != 0 {
				steps += "\n" + `step "takes long" 'sleep 1000'`
			}
			cmd := run(t, steps)
			require.NoError(t, cmd.Start())
			pid := started(t, file)
			if s != 0 {
				require.NoError(t, cmd.Process.Signal(s))
			}
			if err := cmd.Wait(); s == 0 {
				require.NoError(t, err)
			}
			require.Eventually(t, func() bool { return !alive(pid) }, time.Minute, 10*time.Millisecond)
			own := fmt.Sprintf("%s=%d.", mark, cmd.Process.Pid)
			require.Eventually(t, func() bool { return len(withVariable(t, own)) == 0 }, time.Minute, 10*time.Millisecond)
		})
	}
}

// A run does not begin while processes of an earlier one live, and names them.
func TestARunRefusesWhatIsLeftOfAnother(t *testing.T) {
	left := exec.Command("sleep", "1000")
	left.Env = append(os.Environ(), fmt.Sprintf("%s=%d.1", mark, os.Getpid()))
	require.NoError(t, left.Start())
	defer left.Wait()
	defer left.Process.Kill()
	out, err := run(t, `step "tests" 'true'`).CombinedOutput()
	require.ErrorContains(t, err, "exit status 1")
	require.Contains(t, string(out), fmt.Sprint(left.Process.Pid, " sleep 1000\n"))
	require.NotContains(t, string(out), "== tests")
}

// The full check does what every change must pass, and more, and no step of it twice.
func TestTheFullCheckMakesEachStepOnce(t *testing.T) {
	proctest.Need(t, "bash")
	proctest.Need(t, "python3")
	dir := filepath.Join(t.TempDir(), ".ci")
	require.NoError(t, os.CopyFS(dir, os.DirFS("../../.ci")))
	lib, err := os.ReadFile(filepath.Join(dir, "lib.sh"))
	require.NoError(t, err)
	told := "\nstep() { echo \"== $1\"; }\nbeside() { \"$1\"; }\njoined() { :; }\nhas() { :; }\ngo() { echo ./a; }\npython3() { :; }\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "lib.sh"), append(lib, told...), 0o666))
	steps := func(script string) (names []string) {
		cmd := exec.Command("bash", filepath.Join(dir, script))
		cmd.Env = append(os.Environ(), "SWITCHYARD_CI_MARK="+mark)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		for line := range strings.Lines(string(out)) {
			if name, ok := strings.CutPrefix(line, "== "); ok && !strings.HasPrefix(name, "done") && !strings.HasPrefix(name, "the ten slowest") {
				names = append(names, name)
			}
		}
		return names
	}
	run, full := steps("run"), steps("full")
	require.NotEmpty(t, run)
	require.Subset(t, full, run)
	slices.Sort(full)
	require.Greater(t, len(full), len(run))
	require.Equal(t, slices.Compact(slices.Clone(full)), full)
}
