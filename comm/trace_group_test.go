package comm

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestGroupTraces runs a group that has joined, of 3 ranks if "group" does not say
// otherwise, as the first command: group size=4. With perhost=2 it is on hosts of
// 2 ranks, which are connected as by Join. The others are
//
//	shrink RANK...     these ranks call Shrink: timeout=, without= (a rank to leave out)
//	settle RANK=OUTCOME...  these ranks agree whether a joint action, such as Admit, has failed: ok or failed
//	barrier RANK...    these ranks call Barrier: timeout=
//	abort RANK         it calls Abort
//	left A>B           A reports that B has left
//	kill, close RANK   its process ends, or it closes its end
//	hold A>B           what A says to B stays on its way, until "release A>B"
//	wait DURATION
func TestGroupTraces(t *testing.T) {
	runTraces(t, "group", func(t *testing.T, tr *tracer) tracedWorld {
		tr.failuresFirst = true
		return &traceGroup{t: t, tr: tr, links: map[string]*traceLink{}}
	})
}

type traceGroup struct {
	t     *testing.T
	tr    *tracer
	gs    []*Group
	links map[string]*traceLink
	wg    sync.WaitGroup
}

func (w *traceGroup) open(size, perHost int) {
	gs, err := Local(size, LocalOptions{PerHost: perHost})
	require.NoError(w.t, err)
	w.gs = gs
	for i, g := range gs {
		if g.n.hosts != nil {
			g.n.hosts.relayed = true
		}
		for j, l := range g.n.links {
			if l != nil && g.n.hosts != nil && !g.n.hosts.direct(i, j) {
				g.n.links[j] = nil
			} else if l != nil {
				link := &traceLink{link: l, w: w, from: i, to: j, out: make(chan func(), 100)}
				go link.carry()
				w.links[link.arrow()] = link
				g.n.links[j] = link
			}
		}
		g.n.addRelays()
	}
}

func (w *traceGroup) do(c command) {
	if w.gs == nil {
		size, perHost := 3, 0
		if c.name == "group" {
			var err error
			size, err = strconv.Atoi(c.options["size"])
			require.NoError(w.t, err)
			perHost, _ = strconv.Atoi(c.options["perhost"])
		}
		w.open(size, perHost)
	}
	switch c.name {
	case "group":
		return
	case "hold", "release":
		for _, arrow := range c.args {
			w.links[strings.ReplaceAll(arrow, ">", " > ")].hold(c.name == "hold")
		}
		return
	case "wait":
		d, err := time.ParseDuration(c.args[0])
		require.NoError(w.t, err)
		time.Sleep(d + odd)
		return
	case "settle":
		for r, outcome := range c.options {
			rank, err := strconv.Atoi(r)
			require.NoError(w.t, err)
			w.call(rank, time.Minute, func(ctx context.Context, g *Group) (string, error) {
				failed, err := g.settle(ctx, outcome == "failed")
				return map[bool]string{false: "settled: it has succeeded", true: "settled: it has failed"}[failed], err
			})
		}
		return
	}
	if c.name == "left" {
		from, of, _ := strings.Cut(c.args[0], ">")
		rank, err := strconv.Atoi(from)
		require.NoError(w.t, err)
		culprit, err := strconv.Atoi(of)
		require.NoError(w.t, err)
		w.call(rank, time.Minute, func(_ context.Context, g *Group) (string, error) {
			g.ReportLeft(culprit)
			return "", g.Err()
		})
		return
	}
	timeout := c.duration(w.t, "timeout", time.Minute)
	for _, arg := range c.args {
		rank, err := strconv.Atoi(arg)
		require.NoError(w.t, err)
		switch c.name {
		case "shrink":
			var leaveOut []int
			if out, err := strconv.Atoi(c.options["without"]); err == nil {
				leaveOut = append(leaveOut, out)
			}
			w.call(rank, timeout, func(ctx context.Context, g *Group) (string, error) {
				next, err := g.Shrink(ctx, leaveOut...)
				if err != nil {
					return "", err
				}
				return fmt.Sprintf("goes on as %s, with ranks %v of before", next, next.members), nil
			})
		case "barrier":
			w.call(rank, timeout, func(ctx context.Context, g *Group) (string, error) { return "barrier is complete", g.Barrier(ctx) })
		case "abort":
			w.call(rank, timeout, func(_ context.Context, g *Group) (string, error) {
				g.Abort(errors.New("out of memory"))
				return "has aborted", nil
			})
		case "kill":
			w.gs[rank].Kill()
		case "close":
			require.NoError(w.t, w.gs[rank].Close())
		default:
			w.t.Fatalf("no command %q", c.name)
		}
	}
}

// call has a rank make a call, whose outcome is a line of the trace.
func (w *traceGroup) call(rank int, timeout time.Duration, f func(context.Context, *Group) (string, error)) {
	g := w.gs[rank]
	w.wg.Go(func() {
		ctx, cancel := context.WithTimeoutCause(context.Background(), timeout, fmt.Errorf("%w after %v", ErrTimeout, timeout))
		defer cancel()
		text, err := f(ctx, g)
		if err != nil {
			text = "error: " + err.Error()
		}
		w.tr.add(strconv.Itoa(rank), "%s", text)
	})
}

func (w *traceGroup) status() string { return "" }

func (w *traceGroup) end() {
	for _, l := range w.links {
		l.hold(false)
	}
	for _, g := range w.gs {
		g.Kill()
	}
	w.wg.Wait()
	time.Sleep(time.Second) // what is on its way arrives
	for _, l := range w.links {
		close(l.out)
	}
}

// traceLink is a link within the process whose words take 1 ms, and are in the trace.
type traceLink struct {
	link
	w        *traceGroup
	from, to int

	mu    sync.Mutex
	held  bool
	ended bool
	queue []message   // that stay on their way
	out   chan func() // what arrives at the other end, in order
}

// carry takes what was sent to the other end, 1 ms after it was sent.
func (l *traceLink) carry() {
	for arrive := range l.out {
		arrive()
	}
}

// later has f happen in 1 ms, after what was sent before. The caller holds mu.
func (l *traceLink) later(f func()) {
	due := time.Now().Add(time.Millisecond)
	l.out <- func() {
		time.Sleep(time.Until(due))
		f()
	}
}

func (l *traceLink) arrow() string { return fmt.Sprintf("%d > %d", l.from, l.to) }

func (l *traceLink) send(m message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	text := l.w.describe(m)
	if l.held {
		text += " (stays on its way)"
		l.queue = append(l.queue, m)
	} else {
		l.later(func() { l.link.send(m) })
	}
	l.w.tr.add(l.arrow(), "%s", text)
}

func (l *traceLink) hold(held bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = held
	if !held {
		for _, m := range l.queue {
			l.later(func() { l.link.send(m) })
		}
		l.queue = nil
	}
}

func (l *traceLink) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		l.ended = true
		l.w.tr.add(l.arrow(), "the connection ends")
		l.later(l.link.cut)
	}
}

// describe puts a message into words.
func (w *traceGroup) describe(m message) string {
	set := func() string {
		var out []int
		s := rankSet(m.data)
		for r := range w.gs {
			if s.has(r) {
				out = append(out, r)
			}
		}
		return fmt.Sprint(out)
	}
	switch m.kind {
	case kindData:
		return fmt.Sprintf("%v, call %d", m.op, m.seq)
	case kindFail:
		return fmt.Sprintf("failed: rank %d: %v", m.fail.culprit, reason{m.fail})
	case kindLeave:
		return "has closed its end"
	case kindBye:
		return "goodbye"
	case kindShrink:
		text := fmt.Sprintf("round %d: without %s", m.seq, set())
		if m.decided {
			text = "decided: without " + set()
		}
		if rankSet(m.data).has(len(w.gs)) {
			text += ", it has failed"
		}
		return text
	case kindRelay:
		inner, err := unrelayed(m.data)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprintf("from %d for %d: %s", m.data[0], m.data[4], w.describe(inner))
	case kindLost:
		return fmt.Sprintf("is lost: rank %d: %v", m.fail.culprit, reason{m.fail})
	case kindAsk:
		return "whom do you wait for?"
	case kindAnswer:
		return "I wait for " + set()
	}
	return fmt.Sprintf("kind %d", m.kind)
}
