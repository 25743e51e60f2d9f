package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/env"
)

// world is the ranks of one program.
type world struct {
	n, port        int
	first, size    int // the number of the first rank, and how many there are on all hosts
	host           string
	prefix         bool
	grace          time.Duration
	path, secret   string
	id             string   // tells this start from others
	args           []string // the program's name first
	stdout, stderr *lines
	ranks          []*exec.Cmd // nil: has ended
	copies         sync.WaitGroup
	said           chan struct{} // is closed when what we had to say so far is written

	alive, code int
	told        syscall.Signal // the first that told us to end, or 0
	// When it is time to end the others of a rank that failed, to say for whom we wait, to kill, and to wait no more.
	end, remind, late, giveUp <-chan time.Time
}

// ended is a rank's end.
type ended struct {
	rank    int
	err     error
	printed <-chan struct{} // is closed when its standard error is written
}

func (w *world) run() int {
	// The system ends a child when the thread that made it ends, so that must be a thread that stays.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded()...)
	defer signal.Stop(signals)

	ends := make(chan ended, w.n)
	for rank := range w.n {
		if err := w.start(rank, ends); err != nil {
			w.fail(exitNotRunnable, nil, "rank %d does not start: %v", w.first+rank, err)
			break
		}
		w.alive++
	}
	var done chan struct{} // is closed when all is printed
	for {
		if w.alive == 0 && done == nil {
			done = make(chan struct{})
			go func(said <-chan struct{}) {
				w.copies.Wait()
				if said != nil {
					<-said
				}
				close(done)
			}(w.said)
		}
		select {
		case e := <-ends:
			w.alive--
			w.ranks[e.rank] = nil
			if e.err != nil {
				c, how := exit(e.err)
				w.fail(c, e.printed, "rank %d %s", w.first+e.rank, how)
			}
		case s := <-signals:
			w.receive(s.(syscall.Signal))
		case <-w.end:
			w.end, w.late = nil, time.After(w.grace)
			w.signal(syscall.SIGTERM)
		case <-w.remind:
			if w.alive == 0 {
				w.say(nil, "all ranks have ended, but nobody reads what they printed; giving up within %v", w.grace)
			} else {
				w.say(nil, "%s was passed on; %s have not ended; they are killed within %v, and at once by a further SIGINT (Ctrl-C)",
					unix.SignalName(w.told), w.left(), w.grace)
			}
		case <-w.late:
			w.kill("after " + w.grace.String())
		case <-w.giveUp:
			if w.alive == 0 {
				w.say(nil, "what the ranks printed last is lost: nobody reads it")
			} else {
				w.say(nil, "%s have been killed and have not ended; waiting no more", w.left())
			}
			select {
			case <-w.said:
			case <-time.After(patience):
			}
			return w.code
		case <-done:
			return w.code
		}
	}
}

// fail notes the first failure, and ends the other ranks in a moment, unless a signal has told them to end already.
func (w *world) fail(code int, printed <-chan struct{}, format string, args ...any) {
	if w.code != 0 {
		return
	}
	w.code = code
	if w.alive > 0 && w.told == 0 {
		ends, hold, _ := env.MetricsHold() // ranks say what is wrong with it
		if env.Metrics() != "" {
			hold = ends
		}
		w.end = time.After(lastWords + hold)
		format += "; ending the others"
	}
	w.say(printed, format, args...)
}

// receive passes a signal on. The first that tells us to end begins the time of -grace. Ctrl-C after it ends that time.
func (w *world) receive(s syscall.Signal) {
	switch {
	case s == syscall.SIGUSR1 || s == syscall.SIGUSR2:
	case w.told == 0:
		w.told, w.end, w.remind = s, nil, time.After(patience)
		if w.late == nil {
			w.late = time.After(w.grace)
		}
	case s == syscall.SIGINT && w.giveUp == nil:
		w.kill("at a further SIGINT")
		return
	}
	w.signal(s)
}

// kill kills the ranks that are left. Where we were told to end, it is also the last that we wait for.
func (w *world) kill(when string) {
	w.end, w.remind, w.late = nil, nil, nil
	w.signal(syscall.SIGKILL)
	wait := time.Duration(0)
	if w.alive > 0 {
		wait = afterKill
		w.say(nil, "%s are still there %s; killing them", w.left(), when)
	}
	if w.told == 0 {
		return
	}
	w.giveUp = time.After(wait)
	if w.code == 0 {
		w.code = 128 + int(w.told)
	}
}

// left says which ranks have not ended.
func (w *world) left() string {
	var left []string
	for rank, c := range w.ranks {
		if c != nil {
			left = append(left, strconv.Itoa(w.first+rank))
		}
	}
	return fmt.Sprintf("%d of %d ranks (%s)", len(left), w.n, strings.Join(left, ", "))
}

// say prints a line on standard error, behind those before it and behind what closes after, if not nil. It does not wait for that:
// whoever reads may be slow.
func (w *world) say(after <-chan struct{}, format string, args ...any) {
	before, said := w.said, make(chan struct{})
	w.said = said
	go func() {
		if before != nil {
			<-before
		}
		if after != nil {
			<-after
		}
		w.stderr.say("switchyard: "+format+"\n", args...)
		close(said)
	}()
}

// start runs one rank. It has a process group of its own, so that a terminal's Ctrl-C reaches it once, through us, and a
// signal reaches what it has started.
func (w *world) start(rank int, ends chan<- ended) error {
	c := &exec.Cmd{Path: w.path, Args: w.args, SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	number, size := strconv.Itoa(w.first+rank), strconv.Itoa(w.size)
	local, here := strconv.Itoa(rank), strconv.Itoa(w.n)
	c.Env = append(os.Environ(), "SWITCHYARD_RANK="+number, "SWITCHYARD_WORLD_SIZE="+size, "SWITCHYARD_LOCAL_RANK="+local,
		"SWITCHYARD_LOCAL_WORLD_SIZE="+here, "SWITCHYARD_RUN_ID="+w.id,
		"RANK="+number, "WORLD_SIZE="+size, "LOCAL_RANK="+local, "LOCAL_WORLD_SIZE="+here,
		"MASTER_ADDR="+w.host, "MASTER_PORT="+strconv.Itoa(w.port), "SWITCHYARD_PORT="+strconv.Itoa(w.port+1), "SWITCHYARD_SECRET="+w.secret)
	prefix := ""
	if w.prefix {
		prefix = fmt.Sprintf("[%*d] ", len(strconv.Itoa(w.size-1)), w.first+rank)
	}
	var printed chan struct{} // standard error's, which is the last
	var theirs, ours []*os.File
	for _, p := range []struct {
		to  *io.Writer
		our *lines
	}{{&c.Stdout, w.stdout}, {&c.Stderr, w.stderr}} {
		read, write, err := os.Pipe()
		if err != nil {
			closeAll(theirs)
			return err
		}
		*p.to, theirs, ours = write, append(theirs, write), append(ours, read)
		copied := make(chan struct{})
		printed = copied
		w.copies.Go(func() {
			defer close(copied)
			from := &source{File: read}
			p.our.copy(prefix, from)
			if from.bytes >= behindMost {
				w.stderr.say("switchyard: rank %d has ended, and what it left behind prints on: the rest is not shown\n", w.first+rank)
			}
			_ = read.Close()
		})
	}
	err := c.Start()
	closeAll(theirs)
	if err != nil {
		return err
	}
	w.ranks = append(w.ranks, c)
	go func() {
		err := c.Wait()
		for _, f := range ours {
			_ = f.SetReadDeadline(time.Now()) // tells its source; it may have ended already
		}
		ends <- ended{rank, err, printed}
	}()
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// signal sends s to the ranks that run, and to what they have started.
func (w *world) signal(s syscall.Signal) {
	for _, c := range w.ranks {
		if c != nil {
			_ = syscall.Kill(-c.Process.Pid, s) // it may have ended just now
		}
	}
}

// exit is the exit code for a rank that ended with err, and how it ended in words.
func exit(err error) (int, string) {
	var e *exec.ExitError
	if !errors.As(err, &e) {
		return 1, err.Error()
	}
	if s := e.Sys().(syscall.WaitStatus); s.Signaled() {
		return 128 + int(s.Signal()), "was ended by signal " + strconv.Itoa(int(s.Signal())) + " (" + s.Signal().String() + ")"
	}
	return e.ExitCode(), "exited with code " + strconv.Itoa(e.ExitCode())
}
