package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
	"github.com/switchyard-moe/switchyard/stack"
)

const workerEnv = "SOAK_WORKER"

// rank is one process's part.
type rank struct {
	task
	cfg  comm.Config
	g    *comm.Group
	s    *stack.Stack
	desk *desk
	ids  []int // of the processes, by rank; -1 for those that have not said

	failed bool  // the last call did not come to its end here
	wrong  error // what must not be
	steps  int
	calls  int // in this group
	bytes  int64
	stats  time.Time
	held   []*memory.Buffer
	misfit bool // in the last exchange ranks disagreed,
	unsure bool // and this one may not know yet

	order atomic.Int32 // of the supervisor
	begin chan int     // a spare: on which GPU
}

const (
	orderHang int32 = 1 + iota
	orderAbort
	orderQuit
)

func say(m word) {
	b, err := json.Marshal(m)
	if err == nil {
		fmt.Println(string(b))
	}
}

// work is the life of a process.
func work(spec string) int {
	r := rank{begin: make(chan int, 1)}
	if err := json.Unmarshal([]byte(spec), &r.task); err != nil {
		say(word{Say: "bad", Text: err.Error()})
		return 1
	}
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			switch in.Text() {
			case "hang":
				r.order.Store(orderHang)
			case "abort":
				r.order.Store(orderAbort)
			case "quit":
				r.order.Store(orderQuit)
			default:
				var gpu int
				if n, _ := fmt.Sscanf(in.Text(), "begin %d", &gpu); n == 1 {
					r.begin <- gpu
				}
			}
		}
		os.Exit(0) // nobody is there any more
	}()
	log, err := env.Logger(os.Stderr)
	if err != nil {
		say(word{Say: "bad", Text: err.Error()})
		return 1
	}
	if r.Spare {
		if _, err := gpus(); err != nil { // which takes most of the time until a GPU can be used
			say(word{Say: "bad", Text: err.Error()})
			return 1
		}
		r.GPU = <-r.begin
	}
	if r.desk, err = openDesk(r.GPU); err != nil {
		say(word{Say: "bad", Text: err.Error()})
		return 1
	}
	r.cfg = comm.Config{Addr: r.Addr, Secret: []byte("soak"), Name: "soak", PeerTimeout: peerTimeout, JoinTimeout: 20 * time.Second, Logger: log}
	for {
		again, err := r.live()
		if err != nil {
			say(word{Say: "bad", Text: err.Error()})
			return 1
		}
		if !again {
			return 0
		}
	}
}

var errOut = errors.New("left out")

// live is one membership. again says that this rank has not got into a group, and tries once more.
func (r *rank) live() (again bool, err error) {
	ctx := context.Background()
	cfg := r.cfg
	if cfg.Late = r.Late; !r.Late {
		cfg.Rank, cfg.Size = r.Rank, r.Size
	}
	if r.g, err = comm.Join(ctx, cfg); err != nil {
		if r.order.Load() == orderQuit {
			say(word{Say: "bye"})
			return false, nil
		}
		if !r.Late && !errors.Is(err, comm.ErrPeerLost) {
			return false, fmt.Errorf("join: %w", err)
		}
		r.Late = true // whoever is left lets it in again
		time.Sleep(10 * time.Millisecond)
		return true, nil
	}
	r.unknown()
	open, cancel := context.WithTimeout(ctx, callTimeout*2)
	defer cancel()
	if r.s, err = stack.Open(open, r.g, r.desk.dev, r.options()); err != nil {
		if r.g.Err() == nil && !errors.Is(err, comm.ErrTimeout) {
			return false, fmt.Errorf("open: %w", err)
		}
		r.lost(err)
		r.g.Close()
		r.Late = true
		return true, nil
	}
	for {
		quit, err := r.step()
		if err == nil && !quit {
			continue
		}
		if errors.Is(err, errOut) {
			say(word{Say: "out", Text: err.Error()})
			return false, nil
		}
		if err != nil {
			return false, err
		}
		short, stop := context.WithTimeout(ctx, callTimeout)
		err = r.s.Close(short)
		stop()
		if err != nil && r.g.Err() == nil {
			return false, fmt.Errorf("close: %w", err)
		}
		r.g.Close()
		say(word{Say: "bye"})
		return false, nil
	}
}

func (r *rank) options() stack.Options {
	o := stack.Options{
		Heap:       memory.Options{SegmentBytes: 16 << 20},
		Exchanger:  &alltoallv.Options{Timeout: callTimeout},
		Reducer:    &allreduce.Options{Timeout: callTimeout},
		Dispatcher: &dispatch.Options{Experts: 12, TopK: 2, Hidden: hidden, MaxTokens: maxTokens, Timeout: callTimeout},
	}
	if !r.desk.onGPU() {
		o.Endpoint = &p2p.Options{Timeout: callTimeout}
	} else { // where packets are long by default, and staging is deep
		o.Heap.SegmentBytes = 96 << 20
		o.Exchanger.PacketBytes, o.Exchanger.StagingBytes = 16<<10, 16<<20
	}
	return o
}

func (r *rank) unknown() {
	r.ids = make([]int, r.g.Size())
	for i := range r.ids {
		r.ids[i] = -1
	}
	r.ids[r.g.Rank()] = r.ID
}

// control is what ranks tell each other before every call.
type control struct {
	ID     int
	Failed bool
	Quit   bool
	Seed   uint64
}

// step is one call with all ranks, or what follows from one that came to nothing.
func (r *rank) step() (quit bool, err error) {
	switch r.order.Load() {
	case orderHang:
		time.Sleep(hangFor)
		r.order.Store(0)
	case orderAbort:
		r.g.Abort(errors.New("as it was told"))
		say(word{Say: "out"})
		os.Exit(0)
	}
	mine, err := json.Marshal(control{r.ID, r.failed, r.order.Load() == orderQuit, rand.Uint64()})
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*callTimeout)
	defer cancel()
	all, err := r.g.AllGather(ctx, mine)
	if err != nil {
		return false, r.recover(err)
	}
	var seed uint64
	failed := false
	for p, b := range all {
		var c control
		if err := json.Unmarshal(b, &c); err != nil {
			return false, err
		}
		r.ids[p] = c.ID
		failed, quit = failed || c.Failed, quit || c.Quit
		if p == 0 {
			seed = c.Seed
		}
	}
	if quit {
		return true, nil
	}
	if failed {
		return false, r.recover(nil)
	}
	if r.g.Size() < r.Full {
		return false, r.grow()
	}
	if r.calls == 0 || r.calls == r.Calls || time.Since(r.stats) > 2*time.Second {
		r.tell()
	}
	r.steps++
	r.calls++
	err = r.call(seed)
	switch {
	case r.wrong != nil:
		return false, r.wrong
	case err == nil:
	case r.g.Err() != nil:
		return false, r.recover(err)
	case errors.Is(err, comm.ErrTimeout), errors.Is(err, comm.ErrMismatch), errors.Is(err, comm.ErrOutOfStep), errors.Is(err, context.DeadlineExceeded):
		r.failed = true // all learn it before the next call
	default:
		return false, fmt.Errorf("call %d: %w", r.steps, err)
	}
	return false, nil
}

// tell reports what this process holds.
func (r *rank) tell() {
	r.stats = time.Now()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := &usage{Goroutines: runtime.NumGoroutine(), HeapKB: int64(m.HeapAlloc >> 10), Steps: r.steps, Calls: r.calls, Bytes: r.bytes}
	if kb, err := r.desk.usedKB(); err == nil {
		u.DeviceKB = kb
	}
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		u.FDs = len(fds)
	}
	if maps, err := os.ReadFile("/proc/self/maps"); err == nil {
		u.Maps = strings.Count(string(maps), "\n")
	}
	if r.steps == 0 || r.g.Size() == r.Full {
		say(word{Say: "whole"})
	}
	say(word{Say: "stats", Usage: u})
}

// lost says who is to blame for an error. It returns the rank, -1 if the error names none.
func (r *rank) lost(err error) int {
	if gerr := r.g.Err(); gerr != nil {
		err = gerr
	}
	var pe *comm.PeerError
	who := -1
	if !errors.As(err, &pe) {
		say(word{Say: "lost", Who: who, Text: err.Error()})
		return -1
	}
	if pe.Rank >= 0 && pe.Rank < len(r.ids) {
		who = r.ids[pe.Rank]
	}
	say(word{Say: "lost", Who: who, Text: err.Error()})
	return pe.Rank
}

// recover goes on with those that are left. err is why, nil when a call has failed without anybody being lost.
func (r *rank) recover(err error) error {
	var leaveOut []int
	if err != nil {
		who := r.lost(err)
		if r.g.Err() == nil {
			if who < 0 {
				return fmt.Errorf("an error that names nobody: %w", err)
			}
			leaveOut = append(leaveOut, who) // it lives, but does not come
		}
		if who == r.g.Rank() {
			r.g.Close()
			return fmt.Errorf("%w: %w", errOut, err)
		}
	}
	r.held, r.misfit, r.unsure = nil, false, false
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		start := time.Now()
		next, err := r.g.Shrink(ctx, leaveOut...)
		cancel()
		if err != nil {
			var pe *comm.PeerError
			if errors.As(err, &pe) && pe.Rank == r.g.Rank() {
				r.lost(err)
				return fmt.Errorf("%w: %w", errOut, err)
			}
			return fmt.Errorf("shrink, after %v: %w", time.Since(start), err)
		}
		leaveOut = nil
		if ok, err := r.move(next); ok || err != nil {
			return err
		}
	}
}

// grow lets in those that are to replace the lost.
func (r *rank) grow() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	next, err := r.g.Admit(ctx, r.Full-r.g.Size(), r.cfg)
	if err != nil {
		if r.g.Err() != nil {
			return r.recover(err)
		}
		return nil // nobody has come, or it was lost again: the next step tries once more
	}
	r.held, r.misfit, r.unsure = nil, false, false
	if ok, err := r.move(next); ok || err != nil {
		return err
	}
	return r.recover(next.Err())
}

// move opens the stack on another group. ok says that it is there; if not, ranks of the new group have been lost.
func (r *rank) move(next *comm.Group) (ok bool, err error) {
	old, ids := r.g, r.ids
	r.g = next
	r.unknown()
	carry(ids, r.ids, old, next)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	s, err := r.s.Reopen(ctx, next)
	old.Close()
	if err != nil {
		if next.Err() == nil {
			return false, fmt.Errorf("reopen: %w", err)
		}
		r.lost(err)
		if pe, named := next.Err().(*comm.PeerError); named && pe.Rank == next.Rank() {
			return false, fmt.Errorf("%w: %w", errOut, err)
		}
		return false, nil
	}
	r.s, r.failed, r.calls = s, false, 0
	return true, nil
}

// carry keeps the names of those whose ranks in the new group are known: after Admit all keep theirs. After Shrink they
// are told in the next step.
func carry(from, to []int, old, next *comm.Group) {
	if next.Size() > old.Size() {
		copy(to, from)
	}
}

// mix makes a seed of a seed and numbers.
func mix(seed uint64, n ...int) uint64 {
	for _, v := range n {
		seed = (seed ^ uint64(v)) * 0x9e3779b97f4a7c15
		seed ^= seed >> 29
	}
	return seed
}

// fill writes what the seed says.
func fill(b []byte, seed uint64) {
	for len(b) >= 8 {
		seed = seed*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b, seed^seed>>32)
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(seed >> (8 * i))
	}
}
