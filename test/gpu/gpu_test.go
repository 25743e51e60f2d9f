// Package gpu tests what `make gpu` builds from this folder and what that runs on a machine with GPUs, without one.
package gpu

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const root = "../.."

// step is one of steps.json.
type step struct {
	Name    string   `json:"name"`
	Package string   `json:"package,omitempty"`
	Pytest  string   `json:"pytest,omitempty"`
	Files   []string `json:"files,omitempty"`
	Program []string `json:"program,omitempty"`
	Python  []string `json:"python,omitempty"`
	Folder  string   `json:"folder,omitempty"`
	Run     string   `json:"run,omitempty"`
	Short   bool     `json:"short,omitempty"`
	Under   string   `json:"under,omitempty"`
	GPUs    int      `json:"gpus,omitempty"` // the fewest: ranks that share one wait for each other under the tool
	Silence float64  `json:"silence,omitempty"`
	Beside  bool     `json:"beside,omitempty"`
	Seconds float64  `json:"seconds"`
}

func steps(t *testing.T) []step {
	t.Helper()
	b, err := os.ReadFile("steps.json")
	require.NoError(t, err)
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.DisallowUnknownFields()
	var all []step
	require.NoError(t, d.Decode(&all))
	return all
}

// Every package that CONTRIBUTING names for machines with GPUs has a step, and so has every file of tests in Python for GPUs.
func TestStepsNameAllTestsForGPUs(t *testing.T) {
	var have []string
	for _, s := range steps(t) {
		require.Positive(t, s.Seconds, s.Name)
		if s.Package != "" && s.Under == "" {
			have = append(have, "./"+s.Package)
		}
		for _, f := range s.Files {
			have = append(have, s.Pytest+"/"+f)
		}
	}
	page, err := os.ReadFile(filepath.Join(root, "CONTRIBUTING.md"))
	require.NoError(t, err)
	command := regexp.MustCompile(`(?m)^go test (\./internal/cuda .*)$`).FindStringSubmatch(string(page))
	require.NotNil(t, command, "the command for machines with GPUs")
	want := strings.Fields(command[1])
	for _, pattern := range []string{"bindings/python/tests/test_torch_cuda_*.py", "bindings/python/deep_ep/tests/test_cuda.py"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, f := range files {
			name, err := filepath.Rel(root, f)
			require.NoError(t, err)
			want = append(want, name)
		}
	}
	for _, w := range want {
		require.Contains(t, have, w)
	}
}

// Programs that speak as tests of Go do. FAILS, HANGS and CRASHES are tests of which that is true; a test that -test.skip names is left out.
const fake = `#!/bin/sh
for a in "$@"; do case $a in -test.skip=*) skip=$a ;; esac; done
for t in TESTS; do
	case $skip in *[\(\|]$t[\)\|]*) continue ;; esac
	echo "=== RUN   $t"
	echo "multicast $NCCL_NVLS_ENABLE$NVSHMEM_DISABLE_NVLS$TORCH_SYMM_MEM_DISABLE_MULTICAST"
	case $t in
	TestFails) echo "    a_test.go:7: wrong byte"; echo "--- FAIL: $t (0.01s)"; bad=1; continue ;;
	TestHangs) sleep 1000 ;;
	TestCrashes) echo "--- FAIL: $t (0.01s)"; echo "panic: no memory"; exit 2 ;;
	TestNeedsMore) echo "--- SKIP: $t (0.00s)"; continue ;;
	esac
	echo "--- PASS: $t (0.01s)"
done
if [ -n "$bad" ]; then echo FAIL; exit 1; fi
echo PASS
`

// play has run.py run steps of programs that are given by the names of their tests. It returns whether all went well, what it printed and its logs.
func play(t *testing.T, steps []step, tests map[string]string, args ...string) (bool, string, string) {
	t.Helper()
	folder := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(folder, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o777))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o777))
	}
	for _, name := range []string{"run.py", "progress.py"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		write(name, string(text))
	}
	about, err := json.Marshal(map[string]any{"commit": "abc1234", "steps": steps})
	require.NoError(t, err)
	write("files/steps.json", string(about))
	for name, names := range tests {
		write("files/bin/"+name+".test", strings.Replace(fake, "TESTS", names, 1))
		write("files/tree/"+name+"/testdata/a", "")
	}
	logs := filepath.Join(folder, "logs")
	c := exec.Command("python3", slices.Concat([]string{filepath.Join(folder, "run.py"), "--logs", logs}, args)...)
	out, err := c.CombinedOutput()
	if err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, 1, exit.ExitCode(), "%s", out)
	}
	var log strings.Builder
	files, globErr := filepath.Glob(filepath.Join(logs, "*.log"))
	require.NoError(t, globErr)
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		log.Write(text)
	}
	return err == nil, string(out), log.String()
}

func TestWhatPasses(t *testing.T) {
	good, out, log := play(t, []step{{Name: "one", Package: "one", Seconds: 60}}, map[string]string{"one": "TestA TestNeedsMore TestB"})
	require.True(t, good, out)
	require.Contains(t, out, "commit abc1234, ")
	require.Regexp(t, `(?m)^one +2 passed +1 skipped +0 failed +\d+ s$`, out)
	require.Regexp(t, `1 steps in \d+ s, all good\n$`, out)
	require.Equal(t, 3, strings.Count(log, "multicast 011\n"), "which no test can make:\n%s", log)
}

func TestWhatFails(t *testing.T) {
	all := []step{
		{Name: "fails", Package: "fails", Seconds: 60},
		{Name: "hangs", Package: "hangs", Silence: 1, Seconds: 60},
		{Name: "crashes", Package: "crashes", Seconds: 60},
		{Name: "good", Package: "good", Seconds: 60, Beside: true},
	}
	tests := map[string]string{"fails": "TestFails TestA", "hangs": "TestA TestHangs TestB", "crashes": "TestCrashes TestA TestB", "good": "TestA"}
	good, out, _ := play(t, all, tests)
	require.False(t, good)
	require.Regexp(t, `(?s)==== fails: TestFails\n.*a_test.go:7: wrong byte`, out)
	require.Regexp(t, `(?s)==== hangs: TestHangs\n.*it said nothing for \d+ s`, out)
	require.Regexp(t, `(?s)==== crashes: TestCrashes\n.*panic: no memory`, out)
	_, rows, _ := strings.Cut(out, "panic: no memory")
	for _, row := range []string{`fails +1 passed +0 skipped +1 failed`, `hangs +2 passed +0 skipped +1 failed`, `crashes +2 passed +0 skipped +1 failed`, `good +1 passed +0 skipped +0 failed`} {
		require.Regexp(t, `(?m)^`+row, rows, "a test that fails takes none of the others along")
	}
	require.Regexp(t, `4 steps in \d+ s, bad: fails, hangs, crashes\n$`, out)
}

// A step that is over before its tests, one without time and one of which nothing is there are no success.
func TestWhatDoesNotRun(t *testing.T) {
	all := []step{{Name: "slow", Package: "slow", Seconds: 2}, {Name: "other", Package: "other", Seconds: 60}}
	tests := map[string]string{"slow": "TestA TestHangs TestB", "other": "TestA"}
	began := time.Now()
	good, out, _ := play(t, all, tests)
	require.False(t, good)
	require.Less(t, time.Since(began), time.Minute)
	require.Regexp(t, `(?m)^slow +1 passed +0 skipped +1 failed +\d+ s  cut at its limit of 2 s$`, out)
	require.Regexp(t, `(?m)^other +1 passed`, out)
	good, out, _ = play(t, all, tests, "--seconds", "1")
	require.False(t, good)
	require.Regexp(t, `(?m)^other +0 passed +0 skipped +0 failed +0 s  not run: no time was left$`, out)
	good, out, _ = play(t, all, tests, "--only", "none")
	require.False(t, good, out)
	good, out, _ = play(t, []step{{Name: "empty", Package: "empty", Seconds: 60}}, map[string]string{"empty": ""})
	require.False(t, good)
	require.Regexp(t, `(?m)^empty +0 passed +0 skipped +0 failed +\d+ s  no test ran$`, out)
	good, out, _ = play(t, []step{{Name: "many", Package: "other", GPUs: 1 << 20, Seconds: 60}}, tests)
	require.False(t, good)
	require.Regexp(t, `(?m)^many +0 passed +0 skipped +0 failed +0 s  needs 1048576 GPUs$`, out)
	good, out, _ = play(t, []step{{Name: "sanitizer", Package: "other", Under: "memcheck", Seconds: 60}}, tests)
	if _, err := exec.LookPath("compute-sanitizer"); err != nil {
		require.False(t, good)
		require.Contains(t, out, "there is no compute-sanitizer")
	}
}

func TestPytest(t *testing.T) {
	if testing.Short() {
		t.Skip("waits until a test has been silent for 20 s")
	}
	if err := exec.Command("python3", "-c", "import pytest").Run(); err != nil {
		t.Skip("needs pytest")
	}
	file := "\nimport time\ndef test_good(): pass\ndef test_good_too(): pass\ndef test_bad(): assert 1 == 2, 'wrong'\n" +
		"def test_last(): pass\ndef test_hangs(): time.sleep(1000)\n"
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "test_it.py"), []byte(file), 0o666))
	good, out, _ := play(t, []step{{Name: "py", Pytest: folder, Files: []string{"test_it.py"}, Silence: 20, Seconds: 300}}, nil)
	require.False(t, good)
	require.Regexp(t, `(?m)^py +3 passed +0 skipped +2 failed`, out)
	require.Contains(t, out, "wrong")
	require.Regexp(t, `(?s)==== py: \S*test_it.py::test_hangs\n.*in test_hangs.*it said nothing for \d+ s`, out)
}
