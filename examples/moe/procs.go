package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/train"
)

// launch starts this program once for every rank and waits for all of them. The ranks find one another by the
// environment, the way torchrun would set it. If one fails the others learn it from the group and end too; what is left
// of them after a while is killed.
//
// Ranks tell their own errors, which are wrapped in errTold here. Silent says that rank 0 came to no report.
func launch(ctx context.Context, c config.Config, args []string, out io.Writer) (silent bool, err error) {
	self, err := os.Executable()
	if err != nil {
		return true, err
	}
	host, port := place()
	// Ranks get a signal when the thread that started them ends, so that they do not outlive this process. This goroutine
	// keeps its thread to the end.
	runtime.LockOSThread()

	type end struct {
		rank int
		err  error
	}
	ends := make(chan end, c.Ranks+1)
	cmds := make([]*exec.Cmd, 0, c.Ranks+1)
	kill := func(s os.Signal) {
		for _, cmd := range cmds {
			_ = cmd.Process.Signal(s) // an error means that it has ended already
		}
	}
	secret := rand.Text()
	start := func(r int, more ...string) error {
		cmd := exec.Command(self, append(args[:len(args):len(args)], append(more, "-join")...)...)
		cmd.Env = append(os.Environ(),
			"RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(c.Ranks),
			"LOCAL_RANK="+strconv.Itoa(r), "LOCAL_WORLD_SIZE="+strconv.Itoa(c.Ranks),
			"MASTER_ADDR="+host, "MASTER_PORT="+port, "SWITCHYARD_PORT="+port, "SWITCHYARD_SECRET="+secret)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		// A process group of its own: Ctrl-C in a terminal comes here, and from here to the ranks.
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
		if err := cmd.Start(); err != nil {
			kill(os.Kill)
			return fmt.Errorf("start rank %d: %w", r, err)
		}
		n := len(cmds)
		cmds = append(cmds, cmd)
		go func() { ends <- end{n, cmd.Wait()} }()
		return nil
	}
	for r := range c.Ranks {
		if ctx.Err() != nil {
			break
		}
		if err := start(r); err != nil {
			return true, err
		}
		fmt.Fprintf(out, "rank %d is process %d\n", r, cmds[r].Process.Pid)
	}

	if len(cmds) == 0 {
		return true, context.Cause(ctx)
	}
	var first error // or the first of a rank that was killed, which explains those of the others
	var killed bool
	stop, late := ctx.Done(), (<-chan time.Time)(nil)
	fresh := -1 // the process that takes the place of the one that is killed, while it runs
	for left := len(cmds); left > 0; {
		select {
		case <-stop:
			// The ranks end in good order, which takes as long as it takes. A second Ctrl-C ends this process and so them.
			kill(syscall.SIGTERM)
			stop = nil
		case <-late:
			kill(os.Kill)
		case e := <-ends:
			left--
			if c.Heals() && e.rank == c.KillRank && signaled(e.err) {
				if c.ReplaceAt > 0 && ctx.Err() == nil {
					if err := start(c.KillRank, "-late"); err != nil {
						return true, err
					}
					fresh = len(cmds) - 1
					left++
				}
				continue
			}
			unneeded := e.rank == fresh && left == 0
			if e.rank == fresh {
				fresh = -1
			}
			if left == 1 && fresh >= 0 && late == nil { // it may wait for ranks that have ended without it
				late = time.After(train.Grace)
			}
			if e.err == nil || unneeded {
				continue
			}
			silent = silent || e.rank == 0 && signaled(e.err)
			if late == nil {
				wait := train.Grace
				if ctx.Err() != nil {
					wait = train.GraceStop // rank 0 may still be writing
				}
				late = time.After(wait)
			}
			if s := signaled(e.err); first == nil || s && !killed {
				first = fmt.Errorf("rank %d, process %d: %w", e.rank, cmds[e.rank].Process.Pid, e.err)
				killed = s
			}
		}
	}
	if first != nil && !killed {
		return silent, fmt.Errorf("%w: %w", errTold, first) // by the ranks
	}
	return silent, first
}

// signaled says whether a process was ended by a signal.
func signaled(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled()
}

// place is where the ranks meet: a loopback address that nobody else is likely to use, one of 16 million, drawn at random. So no port
// need be probed for, which somebody else could take before it is used.
func place() (host, port string) {
	var b [3]byte
	_, _ = rand.Read(b[:]) // it does not fail
	return net.IPv4(127, 1+b[0]%254, b[1], b[2]).String(), "29552"
}
