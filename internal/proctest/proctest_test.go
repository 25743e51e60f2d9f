package proctest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest/netns"
)

func TestMain(m *testing.M) {
	Play(Parts{"echo": echo, "sleeper": sleeper, "starter": starter, "scale": scale})
	os.Exit(m.Run())
}

// echo prints its arguments and its rank, and then each line of its input, until the input ends.
func echo(args []string) int {
	fmt.Println("arguments", args, "rank", os.Getenv("RANK"), os.Getenv("WORLD_SIZE"), os.Getenv("MASTER_ADDR"), os.Getenv("SWITCHYARD_PORT"))
	fmt.Fprintln(os.Stderr, "complaint")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		fmt.Println(in.Text())
	}
	fmt.Print("the end")
	return len(args)
}

// scale prints how long an hour is.
func scale([]string) int {
	fmt.Print(int64(Scaled(time.Hour)))
	return 0
}

func sleeper([]string) int {
	time.Sleep(time.Hour)
	return 0
}

// record is a testing.TB that records failures, and runs what is left to its end.
type record struct {
	testing.TB
	failures []string
	after    []func()
}

func (r *record) Helper()          {}
func (r *record) Cleanup(f func()) { r.after = append(r.after, f) }
func (r *record) Failed() bool     { return len(r.failures) > 0 }
func (r *record) Logf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}
func (r *record) Errorf(format string, args ...any) { r.Logf(format, args...) }

func TestRanksPlayAPart(t *testing.T) {
	ps := Ranks(t, 2, "127.0.0.9:123", Spec{Part: "echo", Args: []string{"a", "b"}})
	for r, p := range ps {
		line, ok := p.Line()
		require.True(t, ok)
		require.Equal(t, fmt.Sprintf("arguments [a b] rank %d 2 127.0.0.9 123", r), line)
		p.Wrote("(?m)^complaint$")
		p.Tell("more")
		p.Saw("(?m)^more$")
		p.CloseInput()
		require.Equal(t, 2, p.Wait())
		line, _ = p.Line()
		require.Equal(t, "more", line)
		line, ok = p.Line()
		require.True(t, ok)
		require.Equal(t, "the end", line, "a line without an end")
		_, ok = p.Line()
		require.False(t, ok)
	}
	errs := Failures(ps)
	require.Len(t, errs, 2)
	require.ErrorContains(t, errs[1], "rank 1: exit status 2\narguments [a b] rank 1")
	require.ErrorContains(t, errs[1], "complaint\n")
}

func TestATestRunsAgain(t *testing.T) {
	if Again() {
		fmt.Println("here I am, of", os.Getenv("OF"), "short:", testing.Short())
		return
	}
	p := Start(t, Spec{Env: []string{"OF=a test"}})
	p.Saw(fmt.Sprint("here I am, of a test short: ", testing.Short(), "\n"))
	require.Zero(t, p.Wait())
	t.Run("in part (of it)", func(t *testing.T) {
		p := Start(t, Spec{Env: []string{"OF=a part"}})
		require.Zero(t, p.Wait())
		out, _ := p.Output()
		require.Contains(t, out, "here I am, of a part", "the test runs, which stops before the part")
	})
}

func TestAnotherProgramRunsTheProcess(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	p := Start(t, Spec{Part: "echo", Args: []string{"x"}, Via: []string{"sh", "-c", `exec "$0" "$@" y`}, Stdout: w})
	require.NoError(t, w.Close())
	p.CloseInput()
	require.Equal(t, 2, p.Wait())
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Contains(t, string(text), "arguments [x y]")
	out, _ := p.Output()
	require.Empty(t, out)
}

// A process that takes too long prints its goroutines, is killed, and fails the test.
func TestDeadline(t *testing.T) {
	r := &record{TB: t}
	begin := time.Now()
	p := Start(r, Spec{Part: "sleeper", Within: 300 * time.Millisecond})
	require.NotZero(t, p.Wait())
	require.Less(t, time.Since(begin), lastWords+time.Minute)
	for _, f := range r.after {
		f()
	}
	all := strings.Join(r.failures, "\n")
	require.Contains(t, all, "still runs after 300ms")
	require.Contains(t, all, "proctest.sleeper")
}

// A deadline may pass before Rank returns: what it prints of the process is complete by then.
func TestDeadlineOfARankThatStarts(t *testing.T) {
	r := &record{TB: t}
	require.NotZero(t, Rank(r, 2, 3, "127.0.0.9:123", Spec{Part: "sleeper", Within: time.Nanosecond}).Wait())
	for _, f := range r.after {
		f()
	}
	require.Contains(t, strings.Join(r.failures, "\n"), "rank 2 still runs after 1ns")
}

// A process that is still there at the end of its test is killed, without a word.
func TestNoneOutlivesItsTest(t *testing.T) {
	r := &record{TB: t}
	p := Start(r, Spec{Part: "sleeper"})
	for _, f := range r.after {
		f()
	}
	require.Equal(t, -1, p.Wait())
	require.Equal(t, syscall.SIGKILL, p.State().Sys().(syscall.WaitStatus).Signal())
	require.Empty(t, r.failures)
}

func TestAPartThatIsNotThere(t *testing.T) {
	p := Start(t, Spec{Part: "nobody"})
	require.Equal(t, 2, p.Wait())
	_, errs := p.Output()
	require.Equal(t, "proctest: no part \"nobody\"\n", errs)
}

// starter makes namespaces and starts a process in one, prints the numbers of their processes, and sleeps.
func starter([]string) int {
	net, err := netns.New(1)
	if err != nil {
		fmt.Println("unavailable:", err)
		return 0
	}
	defer net.Close()
	t := &record{}
	p := Start(t, Spec{Part: "sleeper", Via: net.Spaces[0].Via})
	pids := append(net.Pids(), p.Pid())
	space := func(pid int) string {
		link, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		return link
	}
	for space(pids[2]) != space(pids[1]) {
		time.Sleep(time.Millisecond)
	}
	p.Signal(syscall.SIGSTOP)
	fmt.Println(pids)
	return sleeper(nil)
}

// A test that is killed leaves no process, not even a stopped one, and no namespace.
func TestNothingIsLeftOfAKilledTest(t *testing.T) {
	p := Start(t, Spec{Part: "starter"})
	line, ok := p.Line()
	if strings.HasPrefix(line, "unavailable:") {
		t.Skip(line)
	}
	require.True(t, ok)
	pids := strings.Fields(strings.Trim(line, "[]"))
	require.Len(t, pids, 3)
	links := map[string]bool{}
	for _, pid := range pids {
		link, err := os.Readlink("/proc/" + pid + "/ns/net")
		require.NoError(t, err)
		links[link] = true
	}
	require.Len(t, links, 2)
	p.Signal(syscall.SIGKILL)
	require.Eventually(t, func() bool {
		all, err := filepath.Glob("/proc/[0-9]*/ns/net")
		require.NoError(t, err)
		return !slices.ContainsFunc(all, func(path string) bool {
			link, _ := os.Readlink(path) // it may have ended
			return links[link]
		})
	}, time.Minute, 10*time.Millisecond)
}

// What a machine lacks skips a test, and is an error where continuous integration says that the machine has it.
func TestWhatIsMissingSkipsOrFails(t *testing.T) {
	for has, failed := range map[string]bool{"": false, "other": false, "ucx,a spoon": true} {
		t.Run(has, func(t *testing.T) {
			if Again() {
				Missing(t, "a spoon", "there is none")
				return
			}
			p := Start(t, Spec{Env: []string{"SWITCHYARD_CI_HAS=" + has}, Args: []string{"-test.v"}})
			require.Equal(t, failed, p.Wait() != 0)
			out, _ := p.Output()
			if failed {
				require.Contains(t, out, "a spoon is missing, and SWITCHYARD_CI_HAS has it: there is none")
			} else {
				require.Contains(t, out, "needs a spoon: there is none")
			}
		})
	}
}

func TestScaledIsNeverShorter(t *testing.T) {
	require.GreaterOrEqual(t, Scaled(time.Second), time.Second)
	require.LessOrEqual(t, Scaled(time.Second), mostLate*raceFactor*time.Second)
	require.Equal(t, Scaled(time.Second), Scaled(time.Second), "measured once")
	p := Start(t, Spec{Part: "scale"})
	require.Zero(t, p.Wait())
	out, _ := p.Output()
	require.Equal(t, fmt.Sprint(int64(Scaled(time.Hour))), out, "in a process of this test")
}

// What a machine adds to a span does not count, whether it lies in it, over its ends, or outside, and once where several processes are late.
func TestDelaysDoNotCount(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	d := &Delays{due: at(9000), all: []delay{{at(0), at(100)}, {at(990), at(1010)}, {at(1500), at(1700)}, {at(1800), at(1800)}, {at(2950), at(3100)},
		{at(4000), at(5000)}, {at(1550), at(1600)}, {at(1650), at(1710)}}}
	require.Equal(t, (2000-10-210-50)*time.Millisecond, d.took(at(1000), at(3000)))
	d = &Delays{due: at(1900)} // it has not run yet
	require.Equal(t, 900*time.Millisecond, d.took(at(1000), at(2000)))
	require.Equal(t, 800*time.Millisecond, d.took(at(1000), at(1800)))

	d = NoteDelays(t)
	begin := time.Now()
	d.mu.Lock() // it is late, by this
	time.Sleep(10 * nap)
	d.mu.Unlock()
	end := time.Now()
	require.LessOrEqual(t, d.took(begin, end), end.Sub(begin)-5*nap)
	d.InTime(t, begin, end, end.Sub(begin)-5*nap+1, "it")
	failed := &record{TB: t}
	d.InTime(failed, begin, end, nap/2, "it")
	require.Len(t, failed.failures, 1)
	require.Contains(t, failed.failures[0], "and 5ms are allowed")
}

// A process tells when it was kept waiting, as one that is stopped is.
func TestProcessesTellTheirDelays(t *testing.T) {
	d := &Delays{due: time.Now().Add(time.Hour)} // this process does not note its own
	p := Start(t, Spec{Part: "echo", Delays: d})
	p.Tell("it runs")
	p.Saw("it runs")
	begin := time.Now()
	p.Signal(syscall.SIGSTOP)
	time.Sleep(time.Second)
	p.Signal(syscall.SIGCONT)
	end := time.Now()
	require.Eventually(t, func() bool { return d.took(begin, end) < end.Sub(begin)-time.Second/2 }, time.Minute, time.Millisecond)
}
