package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/observe"
)

// program is the program in a process of its own.
type program struct {
	*proctest.Process
	t   *testing.T
	url string
}

// startProgram starts a server whose ranks are processes.
func startProgram(t *testing.T, args ...string) program {
	args = append([]string{"-procs", "-addr", "127.0.0.1:0", "-model", modelFile(t)}, args...)
	p := program{Process: proctest.Start(t, proctest.Spec{Part: "serve", Args: args}), t: t}
	p.Saw(`msg=ready`)
	out, _ := p.Output()
	p.url = regexp.MustCompile(`at=(\S+)`).FindStringSubmatch(out)[1]
	return p
}

func (p program) health() (c condition) {
	r, err := http.Get(p.url + "/healthz")
	require.NoError(p.t, err)
	defer r.Body.Close()
	require.NoError(p.t, json.NewDecoder(r.Body).Decode(&c))
	return c
}

func (p program) until(ok func(c condition) bool) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return ok(p.health()) }, 2*time.Minute, 10*time.Millisecond)
}

// gone waits until processes have ended.
func gone(t *testing.T, ranks []at) {
	for _, r := range ranks {
		require.Eventually(t, func() bool {
			stat, err := os.ReadFile("/proc/" + strconv.Itoa(r.Process) + "/stat")
			return err != nil || strings.Contains(string(stat), ") Z ") // dead, if not buried
		}, time.Minute, 5*time.Millisecond, "process %d", r.Process)
	}
}

// Under load a rank is killed and another one stopped. All requests are answered, fresh ranks come, and the server stops in good order.
func TestLoadWhileRanksAreKilled(t *testing.T) {
	p := startProgram(t, "-ranks", "3", "-peer-timeout", proctest.Scaled(2*time.Second).String())
	ctx, stop := context.WithCancel(t.Context())
	var out strings.Builder
	ended := make(chan error, 1)
	go func() { ended <- load(ctx, p.url, 20, 40, &out) }()
	p.until(func(c condition) bool { return c.Tokens > 500 })
	for i, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		var before condition
		p.until(func(c condition) bool { before = c; return len(c.Ranks) == 3 })
		require.NoError(t, syscall.Kill(before.Ranks[1+i].Process, signal))
		// On a busy machine a rank that lives may be late too.
		p.until(func(c condition) bool {
			return c.Fresh > before.Fresh && len(c.Ranks) == 3 && c.Tokens > before.Tokens+500
		})
		gone(t, before.Ranks[1+i:2+i])
	}
	stop()
	require.NoError(t, <-ended, "%s", &out)
	require.Regexp(t, `(?s)^20 clients, \d+\.\d s: \d+ answers, \d+ tokens, \d+ tokens a second
first token   p50 \d+\.\d ms, p99 \d+\.\d ms
whole answer  p50 \d+\.\d ms, p99 \d+\.\d ms
refused 0, failed 0
$`, out.String())
	ranks := p.health().Ranks
	p.Signal(syscall.SIGTERM)
	require.Zero(t, p.Wait())
	gone(t, ranks)
}

// Requests that are under way when a process is killed get the answers that they would have had: no byte is missing, and none is there twice.
func TestRequestsOutliveTheirProcesses(t *testing.T) {
	const tokens = 600
	calm := startServer(t, "-ranks", "1")
	want, _, wait := calm.crowd(24, tokens, false)
	wait()
	require.NoError(t, calm.end())
	p := startProgram(t, "-ranks", "3")
	got, refused, wait := (&server{url: p.url, t: t}).crowd(24, tokens, true)
	var before condition
	p.until(func(c condition) bool { before = c; return c.Running > 0 && c.Tokens > 100 })
	require.NoError(t, syscall.Kill(before.Ranks[1].Process, syscall.SIGKILL))
	wait()
	require.Equal(t, make([]string, 24), refused)
	require.Equal(t, want, got)
	p.until(func(c condition) bool { return len(c.Ranks) == 3 && c.Lost > 0 && c.Fresh > 0 })
	p.Signal(syscall.SIGTERM)
	require.Zero(t, p.Wait())
}

// All ranks are stopped at once, so that none says that another is silent: the front sees it.
func TestAllRanksAreStopped(t *testing.T) {
	timeout := proctest.Scaled(time.Second)
	p := startProgram(t, "-ranks", "2", "-peer-timeout", timeout.String())
	ctx, stop := context.WithCancel(t.Context())
	var out strings.Builder
	ended := make(chan error, 1)
	go func() { ended <- load(ctx, p.url, 10, 40, &out) }()
	var before condition
	p.until(func(c condition) bool { before = c; return c.Tokens > 200 })
	began := time.Now()
	for _, r := range before.Ranks {
		require.NoError(t, syscall.Kill(r.Process, syscall.SIGSTOP))
	}
	p.until(func(c condition) bool { return c.State == ready && c.Lost >= 2 && c.Tokens > before.Tokens+200 })
	require.Less(t, time.Since(began), max(answerTimeout/2, 10*timeout)) // who does not look at them kills them after answerTimeout
	stop()
	require.NoError(t, <-ended, "%s", &out)
	p.Signal(syscall.SIGTERM)
	require.Zero(t, p.Wait())
}

// Ranks are killed and stopped at any time: while others heal, while fresh ones come, and all that are left. No request fails.
func TestRanksAreKilledAtAnyTime(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s")
	}
	p := startProgram(t, "-ranks", "4", "-peer-timeout", proctest.Scaled(1500*time.Millisecond).String())
	ctx, stop := context.WithCancel(t.Context())
	var out strings.Builder
	ended := make(chan error, 1)
	go func() { ended <- load(ctx, p.url, 20, 40, &out) }()
	random := rand.New(rand.NewPCG(1, 2))
	for range 30 {
		time.Sleep(time.Duration(10+random.IntN(800)) * time.Millisecond)
		for _, r := range p.health().Ranks {
			if random.IntN(3) == 0 {
				_ = syscall.Kill(r.Process, []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP}[random.IntN(2)])
			}
		}
	}
	p.until(func(c condition) bool { return c.State == ready && len(c.Ranks) == 4 })
	c := p.health()
	stop()
	require.NoError(t, <-ended, "%s", &out)
	t.Logf("%d ranks were lost, %d came one by one\n%s", c.Lost, c.Fresh, &out)
	p.Signal(syscall.SIGTERM)
	require.Zero(t, p.Wait())
}

// /healthz shows which rank the others wait for.
func TestSlowRankIsSeen(t *testing.T) {
	p := startProgram(t, "-ranks", "3", "-peer-timeout", "10s")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- load(ctx, p.url, 5, 40, io.Discard) }()
	p.until(func(c condition) bool {
		return c.Tokens > 200 && len(c.Ranks[0].Waited) == 3 && len(c.Ranks[1].Waited) == 3
	})
	before := p.health().Ranks
	slow := before[2].Process
	for seen, end := false, time.Now().Add(time.Minute); !seen; {
		c := p.health()
		more := func(rank, peer int) float64 { return c.Ranks[rank].Waited[peer] - before[rank].Waited[peer] }
		seen = more(0, 2) > more(0, 1)+0.5 && more(1, 2) > more(1, 0)+0.5
		require.True(t, time.Now().Before(end), "%+v, before %+v", c, before)
		// Some stops come between two steps, where the front waits and no rank does.
		require.NoError(t, syscall.Kill(slow, syscall.SIGSTOP))
		time.Sleep(200 * time.Millisecond)
		require.NoError(t, syscall.Kill(slow, syscall.SIGCONT))
		time.Sleep(20 * time.Millisecond)
	}
	stop()
	require.NoError(t, <-ended)
	require.Zero(t, p.health().Lost)
}

// Metrics, the table and the page have the ranks of all processes, and of this one where they are goroutines.
func TestWhatRanksDoIsShown(t *testing.T) {
	p, s := startProgram(t, "-ranks", "2"), startServer(t, "-ranks", "2")
	for _, url := range []string{p.url, s.url} {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		ended := make(chan error, 1)
		go func() { ended <- load(ctx, url, 2, 10, io.Discard) }()
		program{t: t, url: url}.until(func(c condition) bool { return c.Tokens > 100 })
		stop()
		require.NoError(t, <-ended)
		metrics := got(t, url+"/metrics")
		for _, rank := range []string{"0", "1"} {
			require.Regexp(t, `(?m)^switchyard_\w*calls\w*\{[^}]*operation="combine"[^}]*\}`, metrics)
			require.Contains(t, metrics, `rank="`+rank+`"`)
		}
		for accepts, is := range map[string]string{"application/openmetrics-text;version=1.0.0": "application/openmetrics-text; version=1.0.0; charset=utf-8", "text/plain": "text/plain; version=0.0.4; charset=utf-8"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/metrics", nil)
			require.NoError(t, err)
			req.Header.Set("Accept", accepts)
			r, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			require.NoError(t, r.Body.Close())
			require.Equal(t, is, r.Header.Get("Content-Type"))
		}
		require.Regexp(t, `(?m)^RANK +PROCESS +CALLS .*\n0 +\d+ .*\n1 +\d+ `, got(t, url+"/status"))
		require.Contains(t, got(t, url+"/ranks/"), "<title>Switchyard</title>")
		var state observe.State
		require.NoError(t, json.Unmarshal([]byte(got(t, url+"/ranks/state")), &state))
		require.Len(t, state.Ranks, 2)
	}
}

// A process that is stopped is named while the others wait for it.
func TestAStoppedRankIsShown(t *testing.T) {
	p := startProgram(t, "-ranks", "2", "-peer-timeout", "30s")
	stopped := p.health().Ranks[1].Process
	require.NoError(t, syscall.Kill(stopped, syscall.SIGSTOP))
	defer func() { _ = syscall.Kill(stopped, syscall.SIGCONT) }()
	want, deadline := fmt.Sprintf("rank 1, process %d, does not answer", stopped), time.Now().Add(time.Minute)
	for said := ""; !strings.Contains(said, want); said = got(t, p.url+"/status") { // its threads stop one after another
		require.True(t, time.Now().Before(deadline), said)
	}
}

func got(t *testing.T, url string) string {
	t.Helper()
	r, err := http.Get(url)
	require.NoError(t, err)
	defer r.Body.Close()
	require.Equal(t, http.StatusOK, r.StatusCode, url)
	b, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return string(b)
}

// Ranks end with the front, however it ends.
func TestRanksDoNotOutliveTheFront(t *testing.T) {
	p := startProgram(t, "-ranks", "2")
	ranks := p.health().Ranks
	require.Len(t, ranks, 2)
	p.Signal(syscall.SIGKILL)
	gone(t, ranks)
}

func TestExitCodes(t *testing.T) {
	run := func(args ...string) (int, string) {
		p := proctest.Start(t, proctest.Spec{Part: "serve", Args: args})
		code := p.Wait()
		_, errs := p.Output()
		return code, errs
	}
	for args, want := range map[string]string{
		"-ranks 0":     "-ranks is 0",
		"-frobnicate":  "not defined",
		"go":           `unexpected argument "go"`,
		"-tokens 9999": "-tokens is 9999, want 1 to 4096",
	} {
		code, errs := run(strings.Fields(args)...)
		require.Equal(t, 2, code, args)
		require.Contains(t, errs, want)
	}
	code, errs := run("-addr", "127.0.0.1:0", "-model", "/no/such/model")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "/no/such/model: no such file")
	code, errs = run("-load", "2", "-for", "300ms", "-url", "http://127.0.0.1:1")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "connection refused")
	_, errs = run("-load", "1", "-for", "300ms", "-addr", "127.0.0.1:1")
	require.Contains(t, errs, "127.0.0.1:1/v1/completions")
}

// The program trains where it is given no model.
func TestServerTrains(t *testing.T) {
	p := program{t: t, Process: proctest.Start(t, proctest.Spec{Part: "serve", Args: []string{"-addr", "127.0.0.1:0", "-steps", "3", "-text", poem(t), "-ranks", "2"}})}
	p.Saw(`trained for \d+ s on .*poem.txt: loss`)
	p.Saw(`msg=ready`)
	p.Signal(syscall.SIGINT)
	require.Zero(t, p.Wait())
}
