package proctest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	Play(Parts{"echo": echo, "sleeper": sleeper})
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
		fmt.Println("here I am, of", os.Getenv("OF"))
		return
	}
	p := Start(t, Spec{Env: []string{"OF=a test"}})
	p.Saw("here I am, of a test")
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
	require.Less(t, time.Since(begin), lastWords+20*time.Second)
	for _, f := range r.after {
		f()
	}
	all := strings.Join(r.failures, "\n")
	require.Contains(t, all, "still runs after 300ms")
	require.Contains(t, all, "proctest.sleeper")
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
