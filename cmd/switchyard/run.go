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
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/loopback"
)

// forwarded are the signals that go on to the ranks.
func forwarded() []os.Signal {
	return []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2}
}

// What a shell answers for a program that does not exist or cannot be run.
const (
	exitNotRunnable = 126
	exitNotFound    = 127
)

func run(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("switchyard run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: switchyard run -n RANKS [FLAGS] PROGRAM [ARGUMENT...]")
		flags.PrintDefaults()
	}
	n := flags.Int("n", 0, "how many `ranks` to start")
	port := flags.Int("port", 0, "MASTER_PORT of the ranks, which meet on the `port` behind it; 0: one that is free")
	prefix := flags.Bool("prefix", true, "begin every line that a rank prints with its number")
	grace := flags.Duration("grace", 5*time.Second, "how long ranks may take to end once one has failed")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	switch {
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
		fmt.Fprintf(stderr, "switchyard run: %v\n", err)
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
	ranks          []*exec.Cmd
}

// ended is a rank's end.
type ended struct {
	rank int
	err  error
}

func (w *world) run() int {
	// The system ends a child when the thread that made it ends, so that must be a thread that stays.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded()...)
	defer signal.Stop(signals)

	ends := make(chan ended, w.n)
	code, alive, stops := 0, 0, 0
	var kill <-chan time.Time
	fail := func(c int, format string, args ...any) {
		if code != 0 {
			return
		}
		code = c
		w.stderr.say("switchyard: "+format+"\n", args...)
		if alive > 0 {
			w.signal(syscall.SIGTERM)
			kill = time.After(w.grace)
		}
	}
	for rank := range w.n {
		if err := w.start(rank, ends); err != nil {
			fail(exitNotRunnable, "rank %d does not start: %v", rank, err)
			break
		}
		alive++
	}
	for alive > 0 {
		select {
		case e := <-ends:
			alive--
			w.ranks[e.rank] = nil
			if e.err == nil {
				continue
			}
			others := ""
			if alive > 0 {
				others = "; ending the others"
			}
			c, how := exit(e.err)
			fail(c, "rank %d %s%s", e.rank, how, others)
		case s := <-signals:
			if s == syscall.SIGINT || s == syscall.SIGTERM {
				if stops++; stops == 3 {
					s = syscall.SIGKILL
				}
			}
			w.signal(s.(syscall.Signal))
		case <-kill:
			kill = nil
			w.stderr.say("switchyard: %d of %d ranks are still there after %v; killing them\n", alive, w.n, w.grace)
			w.signal(syscall.SIGKILL)
		}
	}
	return code
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
	var copies sync.WaitGroup
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
		copies.Go(func() {
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
		copies.Wait()
		ends <- ended{rank, err}
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
