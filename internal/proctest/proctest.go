// Package proctest runs the test binary again, as processes that play named parts of a test.
//
// TestMain names the parts, and a test starts processes that play them:
//
//	func TestMain(m *testing.M) {
//		proctest.Play(proctest.Parts{"rank": rank})
//		os.Exit(m.Run())
//	}
//
//	ps := proctest.Ranks(t, 4, addr, proctest.Spec{Part: "rank"})
//	ps[2].Signal(syscall.SIGKILL)
//
// A process that runs longer than its deadline fails the test: it prints its goroutines and is killed. None outlives its test.
package proctest

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Parts are what processes of a test binary can be, by name. A part gets the arguments of its process and returns the exit code.
type Parts map[string]func(args []string) int

const (
	partVar = "SWITCHYARD_TEST_PART"
	again   = "the test again"
	idle    = "nothing" // a process that ends at once
)

// As is the environment variable, with its value, that makes a process of the test binary play a part.
func As(part string) string { return partVar + "=" + part }

// Again reports whether this process runs one test again, for a Spec without a part.
func Again() bool {
	if os.Getenv(partVar) != again {
		return false
	}
	tell()
	return true
}

// Play plays the part that this process was started for, and ends the process. It returns in the process of the tests, and in one that
// runs a test again.
func Play(parts Parts) {
	name := os.Getenv(partVar)
	if name == "" || name == again {
		return
	}
	if name == idle {
		os.Exit(0)
	}
	tell()
	play, ok := parts[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "proctest: no part %q\n", name)
		os.Exit(2)
	}
	os.Exit(play(os.Args[1:]))
}

// Spec describes a process.
type Spec struct {
	// Part is what the process plays, with Args. An empty one runs the calling test again, in which Again reports true.
	Part string
	Args []string
	// Env is added to the environment.
	Env []string
	// Via is a program and its first arguments that runs the process: it gets the command line of the process as further arguments.
	Via []string
	// Stdout takes the standard output, which is not collected then.
	Stdout *os.File
	// Delays gets those of the process, too.
	Delays *Delays
	// Within is the deadline, counted from the start; the default is 5 minutes, which is long for a busy machine.
	Within time.Duration
}

const (
	defaultWithin = 5 * time.Minute
	lastWords     = 2 * time.Second  // from SIGQUIT, at which a Go program prints its goroutines, to SIGKILL
	leftOpen      = 10 * time.Second // how long others may hold the output of a process that has ended
)

// Process is a process that a test has started. Line, Output, Signal, Tell and Wait may be called from any goroutine, the others from that of the test.
type Process struct {
	// Rank is the number that Rank and Ranks gave.
	Rank int

	t     testing.TB
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{}
	shown bool // an error of Failures holds the output

	mu       sync.Mutex
	news     sync.Cond // of what follows
	out, err bytes.Buffer
	told     int // bytes of out that Line has returned
	over     bool
}

// Start starts a process, which ends with the test at the latest.
func Start(t testing.TB, s Spec) *Process {
	t.Helper()
	return start(t, 0, s)
}

func start(t testing.TB, rank int, s Spec) *Process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	line, part := append([]string{self}, s.Args...), s.Part
	if part == "" {
		part = again
		line = append([]string{self, "-test.run", only(t.Name()), "-test.count=1", fmt.Sprint("-test.short=", testing.Short())}, s.Args...)
	}
	line = append(s.Via[:len(s.Via):len(s.Via)], line...)
	p := &Process{Rank: rank, t: t, cmd: exec.Command(line[0], line[1:]...), ended: make(chan struct{})}
	p.news.L = &p.mu
	p.cmd.Env = append(os.Environ(), As(part), fmt.Sprint(latenessVar, "=", lateness()))
	if os.Getenv("GORACE") == "" {
		p.cmd.Env = append(p.cmd.Env, "GORACE=atexit_sleep_ms=0") // the race detector has a program wait for a second at its end
	}
	p.cmd.Env = append(p.cmd.Env, s.Env...)
	var tells *os.File
	if s.Delays != nil {
		pipe, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		go s.Delays.hear(pipe)
		tells = w
		p.cmd.Env = append(p.cmd.Env, delaysVar+"=1")
		p.cmd.ExtraFiles = []*os.File{tells} // delaysFD
	}
	p.cmd.SysProcAttr = endsWithTest()
	p.cmd.WaitDelay = leftOpen
	p.cmd.Stdout, p.cmd.Stderr = stream{p, &p.out}, stream{p, &p.err}
	if s.Stdout != nil {
		p.cmd.Stdout = s.Stdout
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	began := make(chan error)
	go func() {
		runtime.LockOSThread() // the kernel takes the end of the thread that started the process for that of the test
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		if tells != nil {
			_ = tells.Close() // the process has it
		}
		began <- err
		if err != nil {
			return
		}
		_ = p.cmd.Wait() // ProcessState says how it ended
		p.mu.Lock()
		p.over = true
		p.mu.Unlock()
		p.news.Broadcast()
		close(p.ended)
	}()
	if err := <-began; err != nil {
		t.Fatal(err)
	}
	within := s.Within
	if within == 0 {
		within = defaultWithin
	}
	guarded := make(chan struct{})
	go func() {
		defer close(guarded)
		p.guard(within)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error means that it has ended
		<-guarded
		if out, err := p.Output(); t.Failed() && !p.shown && out+err != "" {
			t.Logf("%v printed:\n%s%s", p, out, err)
		}
	})
	return p
}

// only is a pattern that matches one test.
func only(name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}

// guard waits for the end of the process. A process that runs longer than within fails the test and is killed.
func (p *Process) guard(within time.Duration) {
	late := time.NewTimer(within)
	defer late.Stop()
	select {
	case <-p.ended:
		return
	case <-late.C:
	}
	p.t.Errorf("%v still runs after %v", p, within)
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	select {
	case <-p.ended:
	case <-time.After(lastWords):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// Rank starts rank r of n, which meet at addr: comm.FromEnv describes their group there.
func Rank(t testing.TB, r, n int, addr string, s Spec) *Process {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	s.Env = append([]string{"RANK=" + strconv.Itoa(r), "WORLD_SIZE=" + strconv.Itoa(n), "LOCAL_RANK=" + strconv.Itoa(r),
		"MASTER_ADDR=" + host, "SWITCHYARD_PORT=" + port}, s.Env...)
	return start(t, r, s)
}

// Ranks starts all ranks of a group.
func Ranks(t testing.TB, n int, addr string, s Spec) []*Process {
	t.Helper()
	ps := make([]*Process, n)
	for r := range ps {
		ps[r] = Rank(t, r, n, addr, s)
	}
	return ps
}

// Failures waits for all processes. The error of one that did not end with code 0 holds what it has printed; that of others is nil.
func Failures(ps []*Process) []error {
	errs := make([]error, len(ps))
	for i, p := range ps {
		if code := p.Wait(); code != 0 {
			out, err := p.Output()
			p.shown = true
			errs[i] = fmt.Errorf("rank %d: %v\n%s%s", p.Rank, p.State(), out, err)
		}
	}
	return errs
}

// String is like "process 1234, rank 2".
func (p *Process) String() string { return fmt.Sprintf("process %d, rank %d", p.Pid(), p.Rank) }

// Pid is the process's number.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Signal sends a signal. A process that has ended does not get it.
func (p *Process) Signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// Tell writes a line to the process's standard input.
func (p *Process) Tell(line string) { _, _ = io.WriteString(p.stdin, line+"\n") }

// CloseInput ends the standard input.
func (p *Process) CloseInput() { _ = p.stdin.Close() }

// Wait waits for the end and returns the exit code, -1 of a process that a signal has ended.
func (p *Process) Wait() int { return p.State().ExitCode() }

// State waits for the end and says how the process ended.
func (p *Process) State() *os.ProcessState {
	<-p.ended
	return p.cmd.ProcessState
}

// Output is what the process has printed so far.
func (p *Process) Output() (stdout, stderr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String(), p.err.String()
}

// Line is the next line of standard output, for which it waits; ok is false at the end.
func (p *Process) Line() (line string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		rest := p.out.Bytes()[p.told:]
		switch end := bytes.IndexByte(rest, '\n'); {
		case end >= 0:
			p.told += end + 1
			return string(rest[:end]), true
		case p.over:
			p.told += len(rest)
			return string(rest), len(rest) > 0
		}
		p.news.Wait()
	}
}

// Saw waits until standard output matches a pattern, and ends the test when the process ends without.
func (p *Process) Saw(pattern string) {
	p.t.Helper()
	p.await(&p.out, pattern)
}

// Wrote is Saw for standard error.
func (p *Process) Wrote(pattern string) {
	p.t.Helper()
	p.await(&p.err, pattern)
}

func (p *Process) await(b *bytes.Buffer, pattern string) {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	p.mu.Lock()
	found := re.Match(b.Bytes())
	for !found && !p.over {
		p.news.Wait()
		found = re.Match(b.Bytes())
	}
	p.mu.Unlock()
	if !found {
		p.t.Fatalf("%v has ended and not printed %q", p, pattern)
	}
}

// stream collects one output of a process.
type stream struct {
	p *Process
	b *bytes.Buffer
}

func (s stream) Write(b []byte) (int, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.news.Broadcast()
	return s.b.Write(b)
}
