package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"
)

// task is what a process is started for.
type task struct {
	ID, Rank, Size int // of the start; Late has neither
	Full           int // ranks of a group of full size
	Calls          int // after this number in a group it says what it holds, as at the first
	Late           bool
	Spare          bool // it is told when to begin
	GPU            int  // -1: none
	Addr           string
	Only           string // the kind of its calls, "" for all
	Seed           uint64
}

// replace starts a process that takes the place of a lost one. On GPUs it is a spare one, which has begun to start before.
func (s *soak) replace() error {
	if s.GPUs == 0 {
		_, err := s.start(task{Late: true, GPU: -1})
		return err
	}
	w := s.spare
	on := make([]int, s.GPUs)
	for _, v := range s.workers {
		if v.harm == none {
			on[v.gpu]++
		}
	}
	w.gpu, w.heard = slices.Index(on, slices.Min(on)), time.Now()
	s.workers[w.id] = w
	if _, err := fmt.Fprintf(w.stdin, "begin %d\n", w.gpu); err != nil {
		return err
	}
	return s.keepSpare()
}

func (s *soak) keepSpare() (err error) {
	s.spare, err = s.start(task{Late: true, Spare: true})
	return err
}

// start starts a process.
func (s *soak) start(t task) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	t.ID, t.Addr, t.Seed, t.Full, t.Calls, t.Only = s.next, s.addr, s.rng.Uint64(), s.Ranks, s.Calls, s.Only
	s.next++
	spec, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	w := &worker{id: t.ID, gpu: t.GPU, cmd: exec.Command(self), heard: time.Now()}
	w.cmd.Env = append(os.Environ(), workerEnv+"="+string(spec))
	w.cmd.Stderr = os.Stderr
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := w.cmd.Start(); err != nil {
		return nil, err
	}
	if !t.Spare {
		s.workers[w.id] = w
	}
	go func() {
		for in := bufio.NewScanner(out); in.Scan(); {
			m := new(word)
			if err := json.Unmarshal(in.Bytes(), m); err != nil {
				m = &word{Say: "bad", Text: fmt.Sprintf("malformed: %q", in.Text())}
			}
			s.said <- line{w, m}
		}
		w.cmd.Wait()
		s.said <- line{w, nil}
	}()
	return w, nil
}

// hurt does something to a process.
func (s *soak) hurt(w *worker) {
	what := s.Harm
	if what == "" {
		n := s.rng.IntN(100)
		what = []string{"kill", "stop", "blink", "hang", "abort"}[min(n/60+n/80+n/90+n/95, 4)]
	}
	if !w.whole {
		what = "kill" // it is not in a group that could be told
	}
	s.show(w, &word{Say: "HARM", Text: what})
	switch what {
	case "kill":
		if s.done.Kills++; !w.whole {
			s.done.KillsInJoin++
		}
		w.harm, w.harmed = killed, time.Now()
		w.cmd.Process.Kill()
	case "stop":
		s.done.Stops++
		w.harm, w.harmed = stopped, time.Now()
		w.cmd.Process.Signal(syscall.SIGSTOP)
	case "blink":
		s.done.ShortStops++
		w.cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(shortStop)
		w.cmd.Process.Signal(syscall.SIGCONT)
	case "hang":
		s.done.Hangs++
		w.harm, w.harmed, w.woken = hung, time.Now(), true
		io.WriteString(w.stdin, "hang\n")
	default:
		s.done.Aborts++
		w.harm, w.harmed = aborted, time.Now()
		io.WriteString(w.stdin, "abort\n")
	}
}
