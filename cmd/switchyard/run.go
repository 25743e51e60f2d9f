package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// forwarded are the signals that go on to the ranks. Under nohup, SIGHUP is not one.
func forwarded() []os.Signal {
	all := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}
	if !signal.Ignored(syscall.SIGHUP) {
		all = append(all, syscall.SIGHUP)
	}
	return all
}

const (
	// How long ranks that were told to end may take before we say for whom we wait.
	patience = time.Second
	// How long killed ranks may take to end, and their last output to be read, once we were told to end.
	afterKill = 3 * time.Second
)

// What a shell answers for a program that does not exist or cannot be run.
const (
	exitNotRunnable = 126
	exitNotFound    = 127
)

const signalsHelp = `
The first rank that fails ends all: the others get SIGTERM. SIGINT (Ctrl-C),
SIGTERM, SIGHUP and SIGQUIT are passed on. In both cases, ranks that are left
after the time of -grace are killed. A second SIGINT kills them at once. The
exit code is that of the first rank that failed, or 128 and the number of the
signal if ranks had to be killed after it.
`

func run(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: switchyard run -n RANKS [FLAGS] PROGRAM [ARGUMENT...]")
		flags.PrintDefaults()
		fmt.Fprint(stderr, signalsHelp)
	}
	n := flags.Int("n", 0, "how many `ranks` to start")
	port := flags.Int("port", 0, "MASTER_PORT of the ranks, which meet on the `port` behind it;\n0: one that is free")
	prefix := flags.Bool("prefix", true, "begin every line that a rank prints with its number")
	grace := flags.Duration("grace", 5*time.Second, "how long ranks may take to end once one has failed,\nor a signal told them to; then they are killed")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	missing := true
	flags.Visit(func(f *flag.Flag) { missing = missing && f.Name != "n" })
	switch {
	case missing:
		fmt.Fprintln(stderr, "switchyard run: -n is missing: how many ranks? For example: switchyard run -n 4 ./worker")
		return 2
	case *n < 1:
		fmt.Fprintf(stderr, "switchyard run: -n %d: how many ranks? At least 1\n", *n)
		return 2
	case *port < 0 || *port > maxPort:
		fmt.Fprintf(stderr, "switchyard run: -port %d, want 1 to %d\n", *port, maxPort)
		return 2
	case flags.NArg() == 0:
		fmt.Fprintln(stderr, "switchyard run: which program? It comes behind the flags: switchyard run -n 4 ./worker")
		return 2
	}
	path, err := exec.LookPath(flags.Arg(0))
	if err != nil {
		fmt.Fprintf(stderr, "switchyard run: %v%s\n", err, here(flags.Arg(0)))
		if errors.Is(err, os.ErrPermission) {
			return exitNotRunnable
		}
		return exitNotFound
	}
	if *port == 0 {
		if *port, err = freePort(); err != nil {
			fmt.Fprintf(stderr, "switchyard run: a free port: %v\n", err)
			return 1
		}
	}
	w := &world{n: *n, host: loopback.Host(), port: *port, prefix: *prefix, grace: *grace, path: path, args: flags.Args(), secret: env.Secret(),
		stdout: &lines{to: stdout}, stderr: &lines{to: stderr}}
	if w.secret == "" {
		w.secret = rand.Text()
	}
	return w.run()
}

// here asks whether the program of that name in this directory was meant, if there is one.
func here(name string) string {
	if _, err := exec.LookPath("./" + name); err != nil || filepath.Base(name) != name {
		return ""
	}
	return "; did you mean ./" + name + "?"
}

// freePort finds a port for a store that a program may have beside Switchyard, torch's for one. It may be taken again before the
// ranks get to it. Switchyard's own needs no such luck: the ranks meet at an address of their own.
func freePort() (int, error) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return min(l.Addr().(*net.TCPAddr).Port, maxPort), nil
}

// maxPort leaves room for the port behind it.
const maxPort = 65534

// world is the ranks of one program.
type world struct {
	n, port        int
	host           string
	prefix         bool
	grace          time.Duration
	path, secret   string
	args           []string // the program's name first
	stdout, stderr *lines
	ranks          []*exec.Cmd // nil: has ended
	copies         sync.WaitGroup
	said           chan struct{} // is closed when what we had to say so far is written

	alive, code          int
	told                 syscall.Signal   // the first that told us to end, or 0
	remind, late, giveUp <-chan time.Time // when it is time to say for whom we wait, to kill, and to wait no more
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
			w.fail(exitNotRunnable, nil, "rank %d does not start: %v", rank, err)
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
				w.fail(c, e.printed, "rank %d %s", e.rank, how)
			}
		case s := <-signals:
			w.receive(s.(syscall.Signal))
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

// fail notes the first failure, and ends the other ranks unless a signal has told them to end already.
func (w *world) fail(code int, printed <-chan struct{}, format string, args ...any) {
	if w.code != 0 {
		return
	}
	w.code = code
	if w.alive > 0 && w.told == 0 {
		w.signal(syscall.SIGTERM)
		w.late = time.After(w.grace)
		format += "; ending the others"
	}
	w.say(printed, format, args...)
}

// receive passes a signal on. The first that tells us to end begins the time of -grace. Ctrl-C after it ends that time.
func (w *world) receive(s syscall.Signal) {
	switch {
	case s == syscall.SIGUSR1 || s == syscall.SIGUSR2:
	case w.told == 0:
		w.told, w.remind = s, time.After(patience)
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
	w.remind, w.late = nil, nil
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
			left = append(left, strconv.Itoa(rank))
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
	local, size := strconv.Itoa(rank), strconv.Itoa(w.n)
	c.Env = append(os.Environ(), "RANK="+local, "WORLD_SIZE="+size, "LOCAL_RANK="+local, "LOCAL_WORLD_SIZE="+size,
		"MASTER_ADDR="+w.host, "MASTER_PORT="+strconv.Itoa(w.port), "SWITCHYARD_PORT="+strconv.Itoa(w.port+1), "SWITCHYARD_SECRET="+w.secret)
	prefix := ""
	if w.prefix {
		prefix = fmt.Sprintf("[%*d] ", len(strconv.Itoa(w.n-1)), rank)
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
				w.stderr.say("switchyard: rank %d has ended, and what it left behind prints on: the rest is not shown\n", rank)
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

// source is our end of a rank's pipe. A deadline that is over says that the rank has ended. What it has started and left behind may
// hold the pipe, and that must keep nobody. So from then on source ends when it has found the pipe empty for some time, or has read
// very much. The time in which a slow reader keeps us from reading does not count: nothing is lost by it.
type source struct {
	*os.File
	over         bool
	empty, bytes int // since the rank ended: how often the pipe was empty, and what was read
}

const (
	emptyWait  = 10 * time.Millisecond
	emptyMost  = 20
	behindMost = 4 << 20
)

func (s *source) Read(p []byte) (int, error) {
	if !s.over {
		n, err := s.File.Read(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		s.over = true
		if err := s.SetReadDeadline(time.Time{}); err != nil {
			return 0, err
		}
	}
	pipe, err := s.SyscallConn()
	if err != nil {
		return 0, err
	}
	for s.bytes < behindMost {
		n, failed := 0, error(nil)
		// It does not wait for more.
		if err := pipe.Read(func(fd uintptr) bool { n, failed = syscall.Read(int(fd), p); return true }); err != nil {
			return 0, err
		}
		switch {
		case n > 0:
			s.bytes += n
			return n, nil
		case failed == nil || s.empty == emptyMost:
			return 0, io.EOF
		}
		s.empty++
		time.Sleep(emptyWait)
	}
	return 0, io.EOF
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

// lines is where ranks print, a line at a time.
type lines struct {
	mu sync.Mutex
	to io.Writer
}

func (l *lines) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.to, format, args...)
}

// copy prints what comes from r until it ends. A line that is longer than the buffer comes in pieces.
func (l *lines) copy(prefix string, r io.Reader) {
	const longest = 64 << 10
	from := bufio.NewReaderSize(r, longest)
	for {
		line, err := from.ReadSlice('\n')
		if len(line) > 0 {
			if !bytes.HasSuffix(line, []byte{'\n'}) {
				line = append(line[:len(line):len(line)], '\n')
			}
			l.mu.Lock()
			_, _ = io.WriteString(l.to, prefix)
			_, _ = l.to.Write(line)
			l.mu.Unlock()
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}
