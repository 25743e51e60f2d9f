package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/internal/loopback"
)

const maskedEnv = "SOAK_MASKED"

// maskSoak has processes of one group killed one after the other, and fresh ones come in their places, until one is left, and again with a fresh
// group: the others go on with masks, in the same group.
type maskSoak struct {
	options
	groups, deaths, calls, whole int
	delays                       []time.Duration // from a kill to the end of the call in which a survivor learned of it
	comings                      []time.Duration // from the start of a fresh process to the end of its first round
}

// maskTask is what a process is started for.
type maskTask struct {
	Rank, Size int
	Addr       string
	Fresh      bool // it comes in the place of a rank that was killed
}

// maskWord is a line of a process.
type maskWord struct {
	Say   string // ready, lost, bye, bad
	Rank  int    // lost: who
	At    int64  // lost: when the call ended, of the clock in nanoseconds
	Calls int
	Whole int // bye: rounds in which every token came back from all of its experts that had a copy left, with a rank lost
	Text  string
}

// maskProcess is a rank.
type maskProcess struct {
	rank   int
	cmd    *exec.Cmd
	in     io.WriteCloser
	killed bool
}

type maskLine struct {
	of   *maskProcess
	word *maskWord // nil at the end
}

func (s *maskSoak) run(ctx context.Context, draw func(n int) int) error {
	for s.deaths < s.Kills {
		if err := s.group(ctx, draw); err != nil {
			return fmt.Errorf("group %d: %w", s.groups, err)
		}
		s.groups++
	}
	return nil
}

// maskGroup is the life of one group.
type maskGroup struct {
	*maskSoak
	draw    func(n int) int
	said    chan maskLine
	all     []*maskProcess // that run
	alive   []*maskProcess // of these, those that were not killed
	dead    []int
	last    int // who was killed last
	when    time.Time
	started time.Time // the last fresh process
	waits   int       // how many ranks are still to be ready, or to have lost the last
	asked   bool      // the last rank to end
}

func (s *maskSoak) group(ctx context.Context, draw func(n int) int) error {
	g := &maskGroup{maskSoak: s, draw: draw, said: make(chan maskLine, 100), waits: s.Ranks, last: -1}
	defer g.end()
	addr := loopback.Addr()
	for r := range s.Ranks {
		if err := g.start(maskTask{Rank: r, Size: s.Ranks, Addr: addr}); err != nil {
			return err
		}
	}
	silence := time.NewTimer(patience)
	defer silence.Stop()
	var next <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-silence.C:
			return fmt.Errorf("nothing was said for %v, %d ranks were to tell that they have lost rank %d, or are in", patience, g.waits, g.last)
		case <-next:
			next = nil
			if err := g.next(); err != nil {
				return err
			}
		case l := <-g.said:
			silence.Reset(patience)
			if over, err := g.hear(l); over || err != nil {
				return err
			}
			if g.waits > 0 || next != nil || g.asked {
				continue
			}
			next = time.After(time.Duration(draw(int(maskPause))))
		}
	}
}

// start starts a process.
func (g *maskGroup) start(task maskTask) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	spec, err := json.Marshal(task)
	if err != nil {
		return err
	}
	p := &maskProcess{rank: task.Rank, cmd: exec.Command(self)}
	p.cmd.Env, p.cmd.Stderr = append(os.Environ(), maskedEnv+"="+string(spec)), os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	g.all, g.alive = append(g.all, p), append(g.alive, p)
	go func() {
		for in := bufio.NewScanner(out); in.Scan(); {
			m := new(maskWord)
			if err := json.Unmarshal(in.Bytes(), m); err != nil {
				m = &maskWord{Say: "bad", Text: fmt.Sprintf("malformed: %q", in.Text())}
			}
			g.said <- maskLine{p, m}
		}
		p.cmd.Wait()
		g.said <- maskLine{p, nil}
	}()
	return nil
}

// end kills what runs.
func (g *maskGroup) end() {
	for _, p := range g.all {
		p.cmd.Process.Kill()
	}
	for len(g.all) > 0 {
		if l := <-g.said; l.word == nil {
			g.ended(l.of)
		}
	}
}

func (g *maskGroup) ended(p *maskProcess) {
	g.all = slices.DeleteFunc(g.all, func(q *maskProcess) bool { return q == p })
}

// next is what happens next: a fresh process comes, another one is killed, or the last one ends.
func (g *maskGroup) next() error {
	if len(g.dead) > 0 && g.deaths < g.Kills && g.draw(2) == 0 {
		i, at := g.draw(len(g.dead)), loopback.Addr()
		rank := g.dead[i]
		g.dead = slices.Delete(g.dead, i, i+1)
		fmt.Fprintln(g.alive[g.draw(len(g.alive))].in, "replace", rank, at)
		g.waits, g.started = 1, time.Now()
		return g.start(maskTask{Rank: rank, Size: g.Ranks, Addr: at, Fresh: true})
	}
	if len(g.alive) == 1 {
		g.asked = true
		fmt.Fprintln(g.alive[0].in, "quit")
		return nil
	}
	i := g.draw(len(g.alive))
	p := g.alive[i]
	g.alive = slices.Delete(g.alive, i, i+1)
	g.dead = append(g.dead, p.rank)
	p.killed, g.last, g.when, g.waits = true, p.rank, time.Now(), len(g.alive)
	g.deaths++
	return p.cmd.Process.Kill()
}

// hear takes what a process says. over says that the group has ended.
func (g *maskGroup) hear(l maskLine) (over bool, err error) {
	if l.word == nil {
		g.ended(l.of)
		if l.of.killed || g.asked {
			return g.asked && !l.of.killed, nil
		}
		return false, fmt.Errorf("rank %d has ended: %v", l.of.rank, l.of.cmd.ProcessState)
	}
	switch m := l.word; m.Say {
	case "bad":
		return false, fmt.Errorf("rank %d: %s", l.of.rank, m.Text)
	case "bye":
		g.calls, g.whole = g.calls+m.Calls, g.whole+m.Whole
		return false, nil
	case "lost":
		if l.of.killed {
			return false, nil // it had said so before
		}
		if m.Rank != g.last {
			return false, fmt.Errorf("rank %d has lost rank %d, and rank %d was killed last", l.of.rank, m.Rank, g.last)
		}
		g.delays = append(g.delays, time.Unix(0, m.At).Sub(g.when))
	case "ready":
		if !g.started.IsZero() {
			g.comings = append(g.comings, time.Since(g.started))
		}
	}
	g.waits--
	return false, nil
}

// maskPause is how long ranks are left in peace at most.
const maskPause = 30 * time.Millisecond

func (s *maskSoak) report() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d processes of %d groups were killed, seed %d; survivors learned of it %d times", s.deaths, s.groups, s.Seed, len(s.delays))
	if n := len(s.delays); n > 0 {
		slices.Sort(s.delays)
		late := n - func() int { i, _ := slices.BinarySearch(s.delays, 50*time.Millisecond); return i }()
		fmt.Fprintf(&b, ", and their call had ended after %v in the median and %v at most: %d after 50 ms or later",
			s.delays[n/2].Round(10*time.Microsecond), s.delays[n-1].Round(10*time.Microsecond), late)
	}
	if n := len(s.comings); n > 0 {
		slices.Sort(s.comings)
		fmt.Fprintf(&b, "\n%d fresh processes came in the places of killed ones, and had made their first round %v after their start in the median and %v at most",
			n, s.comings[n/2].Round(time.Millisecond), s.comings[n-1].Round(time.Millisecond))
	}
	fmt.Fprintf(&b, "\nthe last ranks made %d calls, and checked %d rounds with a rank lost whose tokens came back from every expert that had a copy", s.calls, s.whole)
	return b.String()
}
