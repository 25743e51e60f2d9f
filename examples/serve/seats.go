package main

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// answerTimeout is how long the front waits for answers. Calls of ranks have shorter timeouts, so a rank without an answer is stopped.
const answerTimeout = 45 * time.Second

// seat is the front's end of a rank, which is a goroutine or a process.
type seat struct {
	number  int    // of all that were ever started
	pid     int    // 0 for a goroutine
	host    int    // 0 for the front's
	ip      string // of another host
	local   int    // which of those that started together on its host
	rank    int    // in the group
	gpu     int    // of a server on GPUs
	experts []int
	waited  []time.Duration // for each rank, in this group
	heard   int             // replies of a fresh rank: 1 that it runs, 2 that it has read the model
	orders  *gob.Encoder
	replies chan reply // closed when the rank has ended
	kill    func()
	ended   chan struct{}
	why     error // how it ended
}

// sit starts a rank. It reads and writes gobs: orders and replies.
func sit(number int, process bool, changed func()) (*seat, error) {
	s := newSeat(number)
	var from io.Reader
	var wait func() error
	if process {
		cmd, to, out, err := startRank()
		if err != nil {
			return nil, err
		}
		from, s.pid, s.orders = out, cmd.Process.Pid, gob.NewEncoder(to)
		s.kill = func() { _ = cmd.Process.Kill() } // an error means that it has ended
		wait = cmd.Wait
	} else {
		r := new(rank)
		orders, to := io.Pipe()
		back, replies := io.Pipe()
		from, s.orders = back, gob.NewEncoder(to)
		over := make(chan error, 1)
		s.kill = func() {
			r.kill()
			_ = orders.CloseWithError(errKilled)
			_ = back.CloseWithError(errKilled)
		}
		go func() {
			err := r.run(orders, replies)
			_ = orders.CloseWithError(io.EOF)
			_ = replies.Close()
			over <- err
		}()
		wait = func() error { return <-over }
	}
	go s.listen(from, wait, changed)
	return s, nil
}

func newSeat(number int) *seat {
	return &seat{number: number, rank: -1, replies: make(chan reply, 1), ended: make(chan struct{})}
}

// startRank starts a process that is a rank. It reads orders from its standard input, and writes replies to its standard output.
func startRank() (cmd *exec.Cmd, orders io.WriteCloser, replies io.Reader, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, nil, err
	}
	cmd = exec.Command(self, "-rank")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C in a terminal comes to the front alone
	if orders, err = cmd.StdinPipe(); err != nil {
		return nil, nil, nil, err
	}
	if replies, err = cmd.StdoutPipe(); err != nil {
		return nil, nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, nil, fmt.Errorf("start a rank: %w", err)
	}
	return cmd, orders, replies, nil
}

// listen takes the replies of a rank until it ends, and how it has ended.
func (s *seat) listen(from io.Reader, wait func() error, changed func()) {
	in := gob.NewDecoder(from)
	for {
		var a reply
		if err := in.Decode(&a); err != nil {
			break
		}
		s.replies <- a
		changed()
	}
	s.why = wait()
	close(s.ended)
	close(s.replies)
	changed()
}

var errKilled = errors.New("killed")

// gone says whether the rank has ended.
func (s *seat) gone() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// stopped says whether the rank's process is stopped, as by SIGSTOP.
func (s *seat) stopped() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.pid))
	if err != nil || s.host > 0 {
		return false // a goroutine, or ended, or of another host, where its process cannot be seen
	}
	name := bytes.LastIndexByte(stat, ')') // which may hold anything
	return bytes.HasPrefix(stat[name+1:], []byte(" T"))
}

// answered is what one rank said. ok is false if it has ended.
type answered struct {
	reply
	ok bool
}

func (a answered) failed() bool { return !a.ok || a.Error != "" }

// ask gives each rank its order and waits for all answers. It kills a rank that another one reports as lost, and one whose answer comes more
// than lag after that of another one: it may have done its part for the others before it was stopped, and then none of them waits for it.
// After an error ranks get more time, in which they find out that others are silent. A rank whose process is stopped is killed when lag has
// passed since the order, also where all are stopped and none answers; the front looks once in every lag. So every rank answers or ends.
func ask(seats []*seat, lag time.Duration, orders func(i int) *order) []answered {
	type one struct {
		at int
		answered
	}
	all, got := make([]answered, len(seats)), make(chan one, len(seats))
	for i, s := range seats {
		o := orders(i)
		go func() {
			if err := s.orders.Encode(o); err != nil {
				s.kill()
			}
			a, ok := <-s.replies
			got <- one{i, answered{a, ok}}
		}()
	}
	late := time.NewTimer(answerTimeout)
	if len(seats) == 1 { // which waits for nobody
		late.Reset(3 * lag)
	}
	defer late.Stop()
	stopped := time.NewTicker(lag)
	defer stopped.Stop()
	inTime, ended := false, false // a rank has answered; one has ended or failed
	done := make([]bool, len(seats))
	for left := len(seats); left > 0; {
		var o one
		select {
		case o = <-got:
			left--
		case <-late.C:
			for i, s := range seats {
				if !done[i] {
					s.kill()
				}
			}
			continue
		case <-stopped.C:
			for i, s := range seats {
				if !done[i] && s.stopped() {
					s.kill()
				}
			}
			continue
		}
		done[o.at], all[o.at] = true, o.answered
		switch {
		case !o.failed() && !inTime:
			late.Reset(lag)
			inTime = true
		case !ended && !inTime:
			late.Reset(3 * lag)
			ended = true
		}
		if !o.ok || !o.failed() || o.Lost < 0 {
			continue
		}
		for i, s := range seats {
			if s.rank == o.Lost && !done[i] {
				s.kill()
			}
		}
	}
	return all
}

// sameOrder is an order for all ranks.
func sameOrder(o *order) func(int) *order { return func(int) *order { return o } }
