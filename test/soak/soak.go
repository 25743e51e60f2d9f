package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/internal/loopback"
)

type options struct {
	Minutes float64
	Kills   int // how many are enough; 0: never
	Ranks   int
	GPUs    int // 0: the ranks are on the host
	Seed    uint64
	Pause   time.Duration
	Calls   int // of every rank, before a rank is harmed in most cases
	Harm    string
	Only    string // the kind of calls, "" for all
	Verbose bool
}

// The times of the ranks' group. A stop is longer or much shorter than peerTimeout, a hang longer than what a call waits.
const (
	peerTimeout = 1500 * time.Millisecond
	callTimeout = 4 * time.Second
	shortStop   = 200 * time.Millisecond
	longStop    = 3 * peerTimeout
	hangFor     = 4 * callTimeout
	// patience is how long nothing may be heard of a process that is not meant to be silent.
	patience = 60 * time.Second
)

// soak starts the processes and does them harm.
type soak struct {
	options
	rng   *rand.Rand
	began time.Time

	addr    string
	said    chan line
	workers map[int]*worker
	spare   *worker // a process with nothing to do yet, on GPUs
	next    int     // id of the next process
	quiet   time.Time
	rash    bool // the next harm does not wait for calls, nor for all ranks

	done    tally
	slowest time.Duration // from a kill to the last survivor that has named it
	steps   map[int]int
	bytes   map[int]int64
}

// tally counts what was done.
type tally struct {
	Kills, Stops, ShortStops, Hangs, Aborts, KillsInJoin int
	Named, Replaced, Compared                            int
}

// worker is one process.
type worker struct {
	id     int
	gpu    int // -1: none
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	heard  time.Time
	whole  bool // it is in a group of full size,
	calls  int  // and the calls that it has made there
	harm   harm // what was done to it
	harmed time.Time
	woken  bool
	over   bool   // it has said its last word
	first  *usage // when it was in a group of full size for the first time, and warm
}

// harm is why a process is lost, or to be.
type harm string

const (
	none    harm = ""
	killed  harm = "killed"
	stopped harm = "stopped"
	hung    harm = "hung"
	aborted harm = "aborted"
)

// line is what a process says, nil at its end.
type line struct {
	from *worker
	word *word
}

// word is a line of a process.
type word struct {
	Say   string // ready, whole, lost, out, stats, bye, bad
	Who   int    // lost: the process that is named, -1 for one that is not known yet
	Text  string
	Usage *usage
}

// usage is what a process holds, and has done.
type usage struct {
	Goroutines, FDs, Maps int
	HeapKB, DeviceKB      int64
	Steps, Calls          int // all, and in this group
	Bytes                 int64
}

func (s *soak) run(ctx context.Context) error {
	s.addr, s.said, s.workers = loopback.Addr(), make(chan line, 1000), make(map[int]*worker)
	s.steps, s.bytes = make(map[int]int), make(map[int]int64)
	defer s.end()
	for r := range s.Ranks {
		t := task{Rank: r, Size: s.Ranks, GPU: -1}
		if s.GPUs > 0 {
			t.GPU = r % s.GPUs
		}
		if _, err := s.start(t); err != nil {
			return err
		}
	}
	if s.GPUs > 0 {
		if err := s.keepSpare(); err != nil {
			return err
		}
	}
	deadline := s.began.Add(time.Duration(s.Minutes * float64(time.Minute)))
	s.draw(time.Now())
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for time.Now().Before(deadline) && !(s.killedEnough() && s.sound()) {
		select {
		case <-ctx.Done():
			return nil
		case l := <-s.said:
			if err := s.hear(l); err != nil {
				return err
			}
		case <-tick.C:
			if err := s.look(); err != nil {
				return err
			}
		}
	}
	if err := s.finish(); err != nil {
		return err
	}
	if s.done.Kills < s.Kills {
		return fmt.Errorf("%d kills in %v minutes, want %d", s.done.Kills, s.Minutes, s.Kills)
	}
	return nil
}

func (s *soak) killedEnough() bool { return s.Kills > 0 && s.done.Kills >= s.Kills }

// sound reports whether all ranks are there, in a group of full size.
func (s *soak) sound() bool {
	for _, w := range s.workers {
		if w.harm != none || !w.whole {
			return false
		}
	}
	return len(s.workers) == s.Ranks
}

// draw says when the next harm is done.
func (s *soak) draw(now time.Time) {
	s.quiet = now
	if s.rash = s.rng.IntN(4) == 0; !s.rash {
		s.quiet = now.Add(time.Duration(s.rng.Int64N(int64(s.Pause) + 1)))
	}
}

// hear takes in what a process says.
func (s *soak) hear(l line) error {
	w, m := l.from, l.word
	w.heard = time.Now()
	if m == nil {
		if w.harm == none && !w.over {
			return fmt.Errorf("process %d has ended: %v", w.id, w.cmd.ProcessState)
		}
		delete(s.workers, w.id)
		return nil
	}
	s.show(w, m)
	switch m.Say {
	case "bad":
		return fmt.Errorf("process %d: %s", w.id, m.Text)
	case "whole":
		w.whole = true
		if w.harm == stopped && w.woken && time.Since(w.harmed) > longStop+2*peerTimeout {
			w.harm, w.woken = none, false // nobody was left to notice
		}
	case "lost":
		w.whole, w.calls = false, 0
		if m.Who < 0 {
			return nil
		}
		v := s.workers[m.Who]
		if v != nil && v.harm == none {
			return fmt.Errorf("process %d names %d, which nobody has harmed: %s", w.id, m.Who, m.Text)
		}
		s.done.Named++
		if v != nil && v.harm == killed && w.harm == none {
			s.slowest = max(s.slowest, time.Since(v.harmed))
		}
	case "out":
		if w.harm == none {
			return fmt.Errorf("process %d was left out, and nobody has harmed it: %s", w.id, m.Text)
		}
		w.over = true
	case "bye":
		w.over = true
	case "stats":
		s.steps[w.id], s.bytes[w.id], w.calls = m.Usage.Steps, m.Usage.Bytes, m.Usage.Calls
		if !w.whole || m.Usage.Steps < warmSteps {
			return nil
		}
		if w.first == nil {
			w.first = m.Usage
			return nil
		}
		s.done.Compared++
		return w.first.grown(w.id, m.Usage)
	}
	return nil
}

func (s *soak) show(w *worker, m *word) {
	if s.Verbose && m.Say != "stats" {
		fmt.Printf("%8.3f  %d  %s %d %s\n", time.Since(s.began).Seconds(), w.id, m.Say, m.Who, m.Text)
	}
}

// warmSteps is how many calls a process makes before what it holds is compared.
const warmSteps = 200

// grown is an error if u holds more than a process may come to hold by chance.
func (f *usage) grown(id int, u *usage) error {
	for _, v := range []struct {
		what       string
		was, is    int64
		difference int64
	}{
		{"goroutines", int64(f.Goroutines), int64(u.Goroutines), 20}, {"descriptors", int64(f.FDs), int64(u.FDs), 20},
		{"mappings", int64(f.Maps), int64(u.Maps), 200}, {"KiB of heap", f.HeapKB, u.HeapKB, 16 << 10},
		{"KiB of its GPU", f.DeviceKB, u.DeviceKB, 1 << 20},
	} {
		if v.is > v.was+v.difference {
			return fmt.Errorf("process %d has %d %s after %d calls, and had %d after %d", id, v.is, v.what, u.Steps, v.was, f.Steps)
		}
	}
	return nil
}

// look wakes who was stopped, watches for hangs, and does harm when it is time.
func (s *soak) look() error {
	now := time.Now()
	sound, whole, busy := 0, 0, 0
	for _, w := range s.workers {
		if w.harm == none && w.whole {
			whole++
			if w.calls >= s.Calls {
				busy++
			}
		}
	}
	for _, w := range s.workers {
		switch {
		case w.harm == stopped && !w.woken && now.Sub(w.harmed) > longStop:
			w.woken, w.heard = true, now
			w.cmd.Process.Signal(syscall.SIGCONT)
		case !w.whole && whole >= s.Ranks:
			w.heard = now // there is no room for it yet
		case (w.harm == none || w.woken) && now.Sub(w.heard) > patience:
			w.cmd.Process.Signal(syscall.SIGQUIT)
			time.Sleep(time.Second)
			return fmt.Errorf("process %d has said nothing for %v, harm: %q", w.id, patience, w.harm)
		}
		if w.harm == none {
			sound++
		}
	}
	for ; sound < s.Ranks; sound++ {
		if err := s.replace(); err != nil {
			return err
		}
		s.done.Replaced++
	}
	var alive []*worker
	for _, w := range s.workers {
		if w.harm == none {
			alive = append(alive, w)
		}
	}
	// One at a time is not enough, but two must be left that know each other.
	if s.killedEnough() || now.Before(s.quiet) || busy < s.Ranks && (!s.rash || whole < 3) {
		return nil
	}
	slices.SortFunc(alive, func(a, b *worker) int { return a.id - b.id })
	s.draw(now)
	s.hurt(alive[s.rng.IntN(len(alive))])
	return nil
}

// finish has all ranks end in good order.
func (s *soak) finish() error {
	asked := make(map[int]bool)
	for until := time.Now().Add(patience); time.Now().Before(until); {
		left := 0
		for id, w := range s.workers {
			if w.harm == stopped && !w.woken {
				w.woken = true
				w.cmd.Process.Signal(syscall.SIGCONT)
			}
			if w.harm == none {
				left++
				if !asked[id] {
					asked[id] = true
					io.WriteString(w.stdin, "quit\n")
				}
			}
		}
		if left == 0 {
			return nil
		}
		select {
		case l := <-s.said:
			if err := s.hear(l); err != nil {
				return err
			}
			if l.word == nil {
				continue
			}
		case <-time.After(100 * time.Millisecond):
		}
		// A newcomer that nobody will admit any more.
		whole := 0
		for _, w := range s.workers {
			if w.harm == none && w.whole {
				whole++
			}
		}
		if whole == 0 {
			for _, w := range s.workers {
				if w.harm == none && !w.whole {
					w.harm = killed
					w.cmd.Process.Kill()
				}
			}
		}
	}
	return errors.New("not all processes have come to an end")
}

func (s *soak) end() {
	all := slices.Collect(maps.Values(s.workers))
	if s.spare != nil {
		all = append(all, s.spare)
	}
	for _, w := range all {
		w.cmd.Process.Signal(syscall.SIGCONT)
		w.cmd.Process.Kill()
	}
}

func (s *soak) report() string {
	var b strings.Builder
	var steps int
	var bytes int64
	for id := range s.steps {
		steps = max(steps, s.steps[id])
		bytes += s.bytes[id]
	}
	fmt.Fprintf(&b, "%v, seed %d: %d kills (%d of them while joining), %d long stops, %d short stops, %d hangs, %d aborts\n",
		time.Since(s.began).Round(time.Second), s.Seed, s.done.Kills, s.done.KillsInJoin, s.done.Stops, s.done.ShortStops, s.done.Hangs, s.done.Aborts)
	fmt.Fprintf(&b, "losses were named %d times, the last survivor of a kill knew after %v at most; %d processes were started in the place of others\n",
		s.done.Named, s.slowest.Round(time.Millisecond), s.done.Replaced)
	fmt.Fprintf(&b, "what a process holds was compared with what it held before %d times\n", s.done.Compared)
	fmt.Fprintf(&b, "%.1f GB checked, byte by byte; the longest life was %d calls", float64(bytes)/1e9, steps)
	return b.String()
}
