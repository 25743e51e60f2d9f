package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
)

// The test binary is also the command, and a program that the command runs.
func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{
		"command": func([]string) int { main(); return 0 },
		"worker":  worker,
	})
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // such tests mostly wait, so there may be more of them than cores
		panic(err)
	}
	os.Exit(m.Run())
}

// worker is a rank that meets the others.
func worker([]string) int {
	conf, err := comm.FromEnv()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	g, err := comm.Join(context.Background(), conf)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer g.Close()
	all, err := g.AllGather(context.Background(), []byte{byte('a' + g.Rank())})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Printf("rank %d of %d met %s, secret %d\n", g.Rank(), g.Size(), bytes.Join(all, nil), len(conf.Secret))
	return 0
}

// theCommand starts the command.
func theCommand(t *testing.T, args ...string) *proctest.Process {
	t.Helper()
	return start(t, proctest.Spec{Args: args})
}

func start(t *testing.T, s proctest.Spec) *proctest.Process {
	t.Helper()
	s.Part, s.Env = "command", append([]string{"SWITCHYARD_SECRET="}, s.Env...)
	return proctest.Start(t, s)
}

// sh runs a shell script as every rank.
func sh(t *testing.T, n int, script string) (code int, stdout, stderr string) {
	t.Helper()
	begin := time.Now()
	p := theCommand(t, "run", "-n", strconv.Itoa(n), "sh", "-c", script)
	code = p.Wait()
	require.Less(t, time.Since(begin), time.Minute)
	stdout, stderr = p.Output()
	return code, stdout, stderr
}

func sorted(s string) []string {
	l := strings.Split(strings.TrimSuffix(s, "\n"), "\n")
	slices.Sort(l)
	return l
}

func TestRanksMeet(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	p := theCommand(t, "run", "-n", "3", "env", proctest.As("worker"), self)
	code := p.Wait()
	out, errs := p.Output()
	require.Zero(t, code, errs)
	require.Equal(t, []string{"[0] rank 0 of 3 met abc, secret 26", "[1] rank 1 of 3 met abc, secret 26", "[2] rank 2 of 3 met abc, secret 26"}, sorted(out))
}

func TestVariables(t *testing.T) {
	code, out, errs := sh(t, 2, `echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $((SWITCHYARD_PORT - MASTER_PORT)) $MASTER_ADDR`)
	require.Zero(t, code, errs)
	require.Regexp(t, `^\[0\] 0 2 0 2 1 127\.(.*)\n\[1\] 1 2 1 2 1 127\.(.*)$`, strings.Join(sorted(out), "\n"))
	m := regexp.MustCompile(`127\.\S+`).FindAllString(out, -1)
	require.Equal(t, m[0], m[1], "one place to meet, and one of their own")

	// In a task of Slurm, ranks are this command's.
	self, err := os.Executable()
	require.NoError(t, err)
	inner := theCommand(t, "run", "-n", "2", "env", "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=1", proctest.As("worker"), self)
	require.Zero(t, inner.Wait())
	out, _ = inner.Output()
	require.Equal(t, []string{"[0] rank 0 of 2 met ab, secret 26", "[1] rank 1 of 2 met ab, secret 26"}, sorted(out))

	p := start(t, proctest.Spec{Env: []string{"SWITCHYARD_SECRET=mine", "RANK=9"},
		Args: []string{"run", "-n", "1", "-port", "4000", "-prefix=false", "sh", "-c", "echo $MASTER_PORT $SWITCHYARD_PORT $SWITCHYARD_SECRET"}})
	require.Zero(t, p.Wait())
	out, _ = p.Output()
	require.Equal(t, "4000 4001 mine\n", out)
}

func TestOutput(t *testing.T) {
	code, out, errs := sh(t, 11, `if [ $RANK = 3 ]; then printf 'one\n\ntwo'; printf problem >&2; fi`)
	require.Zero(t, code)
	require.Equal(t, "[ 3] one\n[ 3] \n[ 3] two\n", out, "standard output, and an end for the last line")
	require.Equal(t, "[ 3] problem\n", errs, "standard error")

	code, out, _ = sh(t, 1, `head -c 200000 /dev/zero | tr '\0' x; echo; echo end`)
	require.Zero(t, code)
	require.Equal(t, 200_000, strings.Count(out, "x"), "nothing of a long line is lost")
	require.True(t, strings.HasSuffix(out, "x\n[0] end\n"))

	// Lines of many ranks do not mix.
	code, out, _ = sh(t, 8, `for i in $(seq 200); do echo $RANK$RANK$RANK$RANK; done`)
	require.Zero(t, code)
	require.Len(t, regexp.MustCompile(`(?m)^\[(0] 0000|1] 1111|2] 2222|3] 3333|4] 4444|5] 5555|6] 6666|7] 7777)$`).FindAllString(out, -1), 1600)
}

// slowly reads what a command prints, but nothing in the first second.
func slowly(t *testing.T, script string) string {
	t.Helper()
	out, in, err := os.Pipe()
	require.NoError(t, err)
	p := start(t, proctest.Spec{Stdout: in, Args: []string{"run", "-n", "2", "sh", "-c", script}})
	require.NoError(t, in.Close())
	time.Sleep(time.Second)
	text, err := io.ReadAll(out)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	_, errs := p.Output()
	require.Zero(t, p.Wait(), errs)
	return string(text)
}

func TestASlowReaderLosesNothing(t *testing.T) {
	t.Parallel() // it only waits
	begin := time.Now()
	out := slowly(t, `seq 20000`)
	require.Equal(t, 40_000, strings.Count(out, "\n"))
	require.Equal(t, 2, strings.Count(out, "] 20000\n"))

	// Nor what a program still has to print that its rank leaves behind.
	require.Equal(t, 40_000, strings.Count(slowly(t, `seq 20000 & sleep 0.3`), "\n"))
	require.Less(t, time.Since(begin), time.Minute)
}

// What a rank leaves behind keeps nobody, whether it is silent, prints from time to time, or prints all the time.
func TestLeftBehind(t *testing.T) {
	run := func(left string) (errs string) {
		code, out, errs := sh(t, 2, `timeout 30 sh -c '`+left+`' & echo done`)
		require.Zero(t, code)
		require.Contains(t, out, "[0] done\n", left)
		require.Contains(t, out, "[1] done\n", left)
		return errs
	}
	const printsOn = "has ended, and what it left behind prints on"
	for _, left := range []string{`sleep 30`, `while sleep 0.05; do echo more; done`} {
		require.NotContains(t, run(left), printsOn)
	}
	// On a busy machine a program that prints all the time can be silent for a while.
	told := false
	for range 10 {
		told = told || strings.Contains(run(`yes `+strings.Repeat("more", 100)), printsOn)
	}
	require.True(t, told)
}

func TestFirstFailureEndsAll(t *testing.T) {
	code, _, errs := sh(t, 3, `if [ $RANK = 1 ]; then exit 7; fi; sleep 100`)
	require.Equal(t, 7, code)
	require.Equal(t, "switchyard: rank 1 exited with code 7; ending the others\n", errs)

	code, _, errs = sh(t, 2, `if [ $RANK = 1 ]; then kill -SEGV $$; fi; sleep 100`)
	require.Equal(t, 128+11, code)
	require.Contains(t, errs, "switchyard: rank 1 was ended by signal 11 (segmentation fault); ending the others\n")

	// A rank that does not want to end.
	begin := time.Now()
	deaf := filepath.Join(t.TempDir(), "deaf")
	p := theCommand(t, "run", "-n", "2", "-grace", "300ms", "sh", "-c",
		`trap '' TERM; if [ $RANK = 0 ]; then until [ -e `+deaf+` ]; do sleep 0.01; done; exit 9; fi; : >`+deaf+`; sleep 100 & wait; wait`)
	require.Equal(t, 9, p.Wait())
	_, errs = p.Output()
	require.Contains(t, errs, "1 of 2 ranks (1) are still there after 300ms; killing them")
	require.Less(t, time.Since(begin), time.Minute)
}

// started runs a command with two ranks, and returns when both have come to $READY in the script.
func started(t *testing.T, grace, script string) *proctest.Process {
	t.Helper()
	dir := t.TempDir()
	p := theCommand(t, "run", "-n", "2", "-grace", grace, "sh", "-c", strings.ReplaceAll(script, "$READY", ": >"+dir+"/$RANK"))
	for _, r := range []string{"0", "1"} {
		appears(t, filepath.Join(dir, r))
	}
	return p
}

// appears waits for a file.
func appears(t *testing.T, name string) {
	t.Helper()
	require.Eventually(t, func() bool { return os.Remove(name) == nil }, time.Minute, time.Millisecond)
}

// requireEnd waits for a command that ends soon.
func requireEnd(t *testing.T, p *proctest.Process, code int) (stdout, stderr string) {
	t.Helper()
	begin := time.Now()
	got := p.Wait()
	stdout, stderr = p.Output()
	require.Equal(t, code, got, stderr)
	require.Less(t, time.Since(begin), time.Minute)
	return stdout, stderr
}

func TestSignalsArePassedOn(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1} {
		if s == syscall.SIGHUP && signal.Ignored(s) { // these tests run under nohup
			continue
		}
		p := started(t, "5s", `trap 'echo got; exit 0' INT TERM HUP QUIT USR1; $READY; while :; do sleep 0.05; done`)
		p.Signal(s)
		out, _ := requireEnd(t, p, 0)
		require.Equal(t, []string{"[0] got", "[1] got"}, sorted(out))
	}

	// A rank that fails then makes nobody hurry: the other is not signalled again.
	p := started(t, "30s", `trap 'echo got; if [ $RANK = 0 ]; then exit 3; fi; end=1' TERM; end=
		$READY; while [ -z $end ]; do sleep 0.05; done; for i in 1 2 3 4 5; do sleep 0.1; done`)
	p.Signal(syscall.SIGTERM)
	out, errs := requireEnd(t, p, 3)
	require.Equal(t, []string{"[0] got", "[1] got"}, sorted(out))
	require.Contains(t, errs, "switchyard: rank 0 exited with code 3\n")

	// Under nohup a hangup ends nobody.
	p = start(t, proctest.Spec{Via: []string{"sh", "-c", `trap '' HUP; exec "$0" run -n 1 sh -c 'kill -HUP $PPID; sleep 0.3; echo still here'`}})
	out, _ = requireEnd(t, p, 0)
	require.Equal(t, "[0] still here\n", out)
}

func TestRanksThatDoNotEndAreKilled(t *testing.T) {
	t.Parallel() // it only waits
	for _, c := range []struct {
		signal syscall.Signal
		script string
	}{
		{syscall.SIGTERM, `trap '' TERM; $READY; sleep 100`},
		{syscall.SIGINT, `trap '' INT; $READY; sleep 100`},
		{syscall.SIGHUP, `trap '' HUP; $READY; sleep 100`},
		{syscall.SIGQUIT, `trap '' QUIT; $READY; sleep 100`},
		{syscall.SIGTERM, `(until grep -q "^State:.T" /proc/$$/status; do sleep 0.01; done; $READY) & kill -STOP $$`},
	} {
		t.Run(unix.SignalName(c.signal), func(t *testing.T) {
			t.Parallel()
			if c.signal == syscall.SIGHUP && signal.Ignored(c.signal) {
				t.Skip("hangups are ignored here, as under nohup")
			}
			p := started(t, "3s", c.script)
			p.Signal(c.signal)
			_, errs := requireEnd(t, p, 128+int(c.signal))
			require.Equal(t, "switchyard: "+unix.SignalName(c.signal)+" was passed on; 2 of 2 ranks (0, 1) have not ended; "+
				"they are killed within 3s, and at once by a further SIGINT (Ctrl-C)\n"+
				"switchyard: 2 of 2 ranks (0, 1) are still there after 3s; killing them\n", errs)
		})
	}

	// The code of a rank that fails itself is the command's.
	p := started(t, "500ms", `if [ $RANK = 0 ]; then trap 'exit 3' TERM; else trap '' TERM; fi; $READY; while :; do sleep 0.05; done`)
	p.Signal(syscall.SIGTERM)
	_, errs := requireEnd(t, p, 3)
	require.Contains(t, errs, "switchyard: rank 0 exited with code 3\n")
	require.Contains(t, errs, "switchyard: 1 of 2 ranks (1) are still there after 500ms; killing them\n")
}

func TestSecondInterruptKills(t *testing.T) {
	t.Parallel() // it only waits
	for _, first := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		p := started(t, "1h", `trap 'echo got' INT TERM; $READY; while :; do sleep 0.05; done`)
		p.Signal(first)
		p.Saw(`got\n(.*\n)*.*got\n`) // two signals that a process has not taken yet may become one, or change places
		p.Signal(syscall.SIGINT)
		_, errs := requireEnd(t, p, 128+int(first))
		require.Contains(t, errs, "switchyard: 2 of 2 ranks (0, 1) are still there at a further SIGINT; killing them\n")
	}
}

// A command that was told to end does not wait for ever for a reader, whether its ranks have ended or have to be killed.
func TestNobodyReads(t *testing.T) {
	t.Parallel() // it only waits
	for _, script := range []string{`$READY; seq 100000`, `trap '' TERM; $READY; seq 100000`} {
		nobody, stdout, err := os.Pipe()
		require.NoError(t, err)
		dir := t.TempDir()
		p := start(t, proctest.Spec{Stdout: stdout, Args: []string{"run", "-n", "1", "-grace", "1200ms", "sh", "-c", strings.ReplaceAll(script, "$READY", ": >"+dir+"/0")}})
		appears(t, filepath.Join(dir, "0"))
		require.Eventually(t, func() bool { // the pipe is full, of 64 KiB
			n, err := unix.IoctlGetInt(int(nobody.Fd()), unix.TIOCINQ)
			return err == nil && n > 60<<10
		}, time.Minute, time.Millisecond)
		p.Signal(syscall.SIGTERM)
		_, errs := requireEnd(t, p, 128+int(syscall.SIGTERM))
		require.Contains(t, errs, "what the ranks printed last is lost: nobody reads it\n")
		require.NoError(t, nobody.Close())
		require.NoError(t, stdout.Close())
	}
}

func TestRanksEndWithTheLauncher(t *testing.T) {
	dir := t.TempDir()
	p := theCommand(t, "run", "-n", "2", "sh", "-c", `echo $$ >`+dir+`/$RANK.new; mv `+dir+`/$RANK.new `+dir+`/$RANK; while :; do sleep 0.05; done`)
	var pids []int
	for _, r := range []string{"0", "1"} {
		var text []byte
		require.Eventually(t, func() (ok bool) {
			var err error
			text, err = os.ReadFile(filepath.Join(dir, r))
			return err == nil
		}, time.Minute, time.Millisecond)
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		require.NoError(t, err)
		pids = append(pids, pid)
	}
	p.Signal(syscall.SIGKILL)
	p.Wait()
	for _, pid := range pids {
		require.Eventually(t, func() bool { return !runs(pid) }, time.Minute, 10*time.Millisecond)
	}
}

// runs reports whether a process is there and not just waiting to be reaped.
// Runs on two hosts, each started by itself, make one world.
func TestRanksOfSeveralHostsMeet(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	spaces := proctest.Namespaces(t, 2)
	var nodes []*proctest.Process
	for i, s := range spaces {
		nodes = append(nodes, start(t, proctest.Spec{Via: s.Via, Env: []string{"SWITCHYARD_SECRET=mine"}, Args: []string{"run", "-nodes", "2", "-node", strconv.Itoa(i),
			"-addr", spaces[0].IP + ":29500", "-n", "2", "env", proctest.As("worker"), self}}))
	}
	for i, want := range [][]string{{"[0] rank 0 of 4 met abcd, secret 4", "[1] rank 1 of 4 met abcd, secret 4"},
		{"[2] rank 2 of 4 met abcd, secret 4", "[3] rank 3 of 4 met abcd, secret 4"}} {
		code := nodes[i].Wait()
		out, errs := nodes[i].Output()
		require.Zero(t, code, errs)
		require.Equal(t, want, sorted(out))
	}
}

// examples/moe trains on two hosts of two ranks, and one rank computes the same losses.
func TestTrainingOnTwoHosts(t *testing.T) {
	worldtest.NeedUCX(t)
	dir := t.TempDir()
	program, text := filepath.Join(dir, "moe"), filepath.Join(dir, "text")
	out, err := exec.Command("go", "build", "-o", program, "../../examples/moe").CombinedOutput()
	require.NoError(t, err, "%s", out)
	line := "a rose is a rose is a rose, and the train on the rails is never the train of the rail\n"
	require.NoError(t, os.WriteFile(text, []byte(strings.Repeat(line, 400)), 0o644))
	spaces := proctest.Namespaces(t, 2)
	var nodes []*proctest.Process
	for i, s := range spaces {
		nodes = append(nodes, start(t, proctest.Spec{Via: s.Via, Env: []string{"SWITCHYARD_SECRET=mine"}, Args: []string{"run", "-nodes", "2", "-node", strconv.Itoa(i),
			"-addr", spaces[0].IP + ":29500", "-n", "2", program, "-join", "-check", "-text", text,
			"-layers", "2", "-hidden", "16", "-inner", "16", "-embed", "8", "-batch", "61"}}))
	}
	for _, p := range nodes {
		code := p.Wait()
		out, errs := p.Output()
		require.Zero(t, code, "%s%s", out, errs)
		require.Equal(t, p == nodes[0], strings.Contains(out, "check: ok"), out)
	}
}

// The ranks of a start on several hosts have an id that another start does not have, so its ranks cannot join by mistake.
func TestStartsOnSeveralHostsHaveTheirOwnID(t *testing.T) {
	spaces := proctest.Namespaces(t, 2)
	var ids []string
	for range 2 {
		var nodes []*proctest.Process
		for i, s := range spaces {
			nodes = append(nodes, start(t, proctest.Spec{Via: s.Via, Env: []string{"SWITCHYARD_SECRET=mine"}, Args: []string{"run", "-nodes", "2", "-node", strconv.Itoa(i),
				"-addr", spaces[0].IP + ":29500", "-n", "1", "-prefix=false", "printenv", "SWITCHYARD_RUN_ID"}}))
		}
		for _, p := range nodes {
			code := p.Wait()
			out, errs := p.Output()
			require.Zero(t, code, errs)
			ids = append(ids, strings.TrimSpace(out))
		}
	}
	require.Equal(t, ids[0], ids[1])
	require.Equal(t, ids[2], ids[3])
	require.NotEqual(t, ids[0], ids[2])
}

func runs(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(stat, []byte(") Z "))
}

func TestCommandLines(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	require.NoError(t, os.WriteFile(plain, []byte("text"), 0o600))
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("my-worker", []byte("#!/bin/sh\n"), 0o700))
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"", 2, "usage: switchyard COMMAND"},
		{"fly", 2, `there is no command "fly"`},
		{"run", 2, "-n is missing: how many ranks?"},
		{"run bin/worker", 2, "-n is missing: how many ranks?"},
		{"run -n 0 sh", 2, "-n 0: how many ranks? At least 1"},
		{"run -n 99999 sh", 2, "-n 99999 on 1 hosts: at most 4096 ranks in all"},
		{"run -n 3000 -nodes 2 -addr host:29500 sh", 2, "-n 3000 on 2 hosts: at most 4096 ranks in all"},
		{"run -n 2", 2, "which program?"},
		{"run -n x sh", 2, `switchyard run: invalid value "x" for flag -n: parse error; -h lists the flags` + "\n"},
		{"status -every x", 2, `switchyard status: invalid value "x" for flag -every: parse error; -h lists the flags` + "\n"},
		{"run -n 2 -port 65535 sh", 2, "-port 65535, want 1 to 65534"},
		{"run -n 2 -nodes 2 sh", 2, `-addr "", want HOST:PORT of node 0`},
		{"run -n 2 -nodes 2 -addr host sh", 2, `-addr "host", want HOST:PORT of node 0`},
		{"run -n 2 -nodes 2 -addr host:65535 sh", 2, "a port of 1 to 65534"},
		{"run -n 2 -nodes 2 -node 2 -addr host:29500 sh", 2, "-node 2 of -nodes 2"},
		{"run -n 2 -nodes 2 -port 7 -addr host:29500 sh", 2, "-port 7 with -addr host:29500"},
		{"run -n 2 -nodes 2 -addr host:29500 sh", 2, "need one SWITCHYARD_SECRET"},
		{"run -n 2 ./not-there", exitNotFound, "not-there"},
		{"run -n 2 not-there", exitNotFound, "not found in $PATH\n"},
		{"run -n 2 my-worker", exitNotFound, "not found in $PATH; did you mean ./my-worker?\n"},
		{"run -n 2 " + plain, exitNotRunnable, "permission denied"},
		{"run -h", 0, "-grace"},
		{"run -h", 0, "SIGINT"},
		{"env -x", 2, "flag provided but not defined"},
		{"env more", 2, "is too much"},
		{"version foo", 2, `["foo"] is too much`},
	} {
		var out, errs bytes.Buffer
		require.Equal(t, c.code, command(strings.Fields(c.args), &out, &errs), c.args)
		require.Contains(t, errs.String(), c.says, c.args)
		if strings.HasSuffix(c.says, "-h lists the flags\n") {
			require.Equal(t, c.says, errs.String(), "nothing else is said")
		}
		require.Empty(t, out.String(), c.args)
	}
}

func TestHelpIsNotTooWide(t *testing.T) {
	for _, args := range []string{"help", "run -h", "env -h", "doctor -h"} {
		var text bytes.Buffer
		command(strings.Fields(args), &text, &text)
		require.NotEmpty(t, text.String())
		for line := range strings.Lines(text.String()) {
			require.LessOrEqual(t, len(strings.ReplaceAll(line, "\t", "        "))-1, 80, line)
		}
	}
}

func TestVersion(t *testing.T) {
	var out bytes.Buffer
	require.Zero(t, command([]string{"version"}, &out, nil))
	require.Regexp(t, `^switchyard `+regexp.QuoteMeta(switchyard.Version)+` \(go1\.`, out.String())
	changes, err := os.ReadFile("../../CHANGELOG.md")
	require.NoError(t, err)
	require.Contains(t, string(changes), "\n## "+switchyard.Version+" ", "the changelog knows the version")
}

// One version for Go and Python.
func TestPythonHasTheSameVersion(t *testing.T) {
	source, err := os.ReadFile("../../bindings/python/src/switchyard/_version.py")
	require.NoError(t, err)
	m := regexp.MustCompile(`(?m)^__version__ = "(.*)"$`).FindSubmatch(source)
	require.NotNil(t, m)
	require.Equal(t, switchyard.Version, string(m[1]))
}

func TestEnv(t *testing.T) {
	t.Setenv("SWITCHYARD_SECRET", "do not print this")
	t.Setenv("SWITCHYARD_PORT", "1234")
	var out bytes.Buffer
	require.Zero(t, command([]string{"env"}, &out, nil))
	require.NotContains(t, out.String(), "do not print")
	require.Regexp(t, `SWITCHYARD_SECRET +\(set\) `, out.String())
	require.Regexp(t, `SWITCHYARD_PORT +1234 `, out.String())
	require.Regexp(t, `RANK +- `, out.String())
	require.NotContains(t, out.String(), "SLURM_PROCID")
	t.Setenv("SLURM_PROCID", "3")
	require.Zero(t, command([]string{"env"}, &out, nil))
	require.Regexp(t, `SLURM_PROCID +3 `, out.String())
	require.Contains(t, out.String(), "Slurm: this rank's number.")
	require.NotContains(t, out.String(), "OMPI_COMM_WORLD_RANK")
}

// The list fits a terminal of any width that has room for the names, and 80 columns where it goes elsewhere. Nothing of it is lost.
func TestEnvFitsTheTerminal(t *testing.T) {
	path := strings.Repeat("/a/long/path of a library", 10)
	t.Setenv("NVTX_INJECTION64_PATH", path)
	require.Equal(t, 80, columns(new(bytes.Buffer)))
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	defer file.Close()
	require.Equal(t, 80, columns(file))
	for width := 34; width < 250; width++ {
		text := list(env.Variables(), width)
		for line := range strings.Lines(text) {
			require.LessOrEqual(t, utf8.RuneCountInString(line)-1, width, line)
		}
		bare := strings.Join(strings.Fields(text), "")
		for _, v := range env.Variables() {
			require.Contains(t, bare, strings.Join(strings.Fields(v.Meaning), ""))
			require.Contains(t, bare, strings.Join(strings.Fields(v.Default), ""))
		}
		require.Contains(t, bare, strings.Join(strings.Fields(path), ""))
	}
}

func TestFold(t *testing.T) {
	require.Equal(t, []string{"aaa bb", "cc"}, fold("aaa bb  cc", 6))
	require.Equal(t, []string{"aaa", "bbbbbb", "b c"}, fold("aaa bbbbbbb c", 6))
	require.Equal(t, []string{""}, fold("", 6))
}

// The page is what the command prints.
func TestEnvironmentPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/environment.md")
	require.NoError(t, err)
	var out bytes.Buffer
	require.Zero(t, command([]string{"env", "-markdown"}, &out, nil))
	require.Equal(t, out.String(), string(page), "run: go run ./cmd/switchyard env -markdown >docs/environment.md")
}
