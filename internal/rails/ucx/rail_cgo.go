//go:build cgo && linux

package ucx

/*
#cgo LDFLAGS: -ldl
#cgo noescape swu_put
#cgo nocallback swu_put
#cgo nocallback swu_progress
#cgo nocallback swu_arm
#include "swucx.h"
*/
import "C"

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
)

// Rail is one rank's end. One goroutine of it sleeps on the worker's event descriptor, and rings once something has landed. A rank that waits
// for nothing but the rail sleeps there itself, which saves two changes of threads a put.
type Rail struct {
	cfg     rails.Config
	address []byte

	efd         int32
	port        int
	guard       guard
	quit        func() // ends UCX, for Close
	bell        int    // a semaphore: something has landed, or the rail is over, while a rank slept
	interrupted atomic.Bool
	ended       chan struct{} // the goroutine has
	told        atomic.Bool   // peers may connect
	waited      atomic.Bool   // a rank has slept on the descriptor since the goroutine looked
	paused      atomic.Bool   // the goroutine leaves the rail to such ranks
	back        chan struct{} // the goroutine is wanted back

	mu       sync.Mutex
	grace    time.Duration // for connections to stand, in Close: settleGrace, less the time that Meet has waited
	cutGrace time.Duration // for UCX to end in Close, once its connections have been cut
	r        *C.swu_rail   // nil after Close
	closed   bool
	landed   uint64 // puts that have been rung for
	seen     uint64 // of these, before the last Wait returned
	theirs   []int  // ports of the ranks that it has connected with
	asleep   int    // ranks that sleep, and have not been woken
	pins     runtime.Pinner
	pinned   bool
}

// Open opens a window.
func (r *Rail) Open(off, n int64) error {
	if off < 0 || n < 0 || off > int64(len(r.cfg.Segment))-n {
		return comm.Invalid("ucx", "a window of %d bytes at %d of a segment of %d", n, off, len(r.cfg.Segment))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("ucx: %w", comm.ErrClosed)
	}
	if C.swu_window(r.r, C.int64_t(off), C.int64_t(n)) != 0 {
		return fmt.Errorf("ucx: %w: too many windows", comm.ErrOutOfMemory)
	}
	return nil
}

// Put sends one active message. It does what there is to do, so something else may land.
func (r *Rail) Put(peer int, place int64, src []byte, signal int64) error {
	landed, err := r.put(peer, place, src, signal)
	if landed {
		r.cfg.Ring()
	}
	return err
}

func (r *Rail) put(peer int, place int64, src []byte, signal int64) (landed bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.usable(peer); err != nil {
		return false, err
	}
	if how := C.swu_failed(r.r, C.uint32_t(peer)); how != nil {
		err := fmt.Errorf("%w: its connection has failed: %s", comm.ErrPeerLost, C.GoString(how))
		return false, fmt.Errorf("ucx: put: %w", &comm.PeerError{Rank: peer, Err: err})
	}
	if len(src) > 0 { // it is read after the call
		r.pins.Pin(unsafe.SliceData(src))
		r.pinned = true
	}
	var why [256]byte
	if C.swu_put(r.r, C.uint32_t(peer), C.int64_t(place), unsafe.Pointer(unsafe.SliceData(src)), C.int64_t(len(src)), C.int64_t(signal),
		(*C.char)(unsafe.Pointer(&why[0])), C.size_t(len(why))) != 0 {
		return false, fmt.Errorf("ucx: put to rank %d: %s", peer, text(why[:]))
	}
	_, landed = r.progress()
	if r.counts().sending > 0 {
		C.swu_wake(r.r) // the goroutine may sleep, and has to go on with it
	}
	return landed, nil
}

// Forget drops the numbers of puts.
func (r *Rail) Forget(from, to int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		C.swu_forget(r.r, C.int64_t(from), C.int64_t(to))
	}
}

// counts are those of now. Memory that nothing reads any more is let go. The caller holds mu.
func (r *Rail) counts() C.swu_counts {
	var c C.swu_counts
	C.swu_counted(r.r, &c)
	if c.sending == 0 && r.pinned {
		r.pins.Unpin()
		r.pinned = false
	}
	return c
}

// meetPoll is how long Meet sleeps between two looks.
const meetPoll = 200 * time.Microsecond

// flushPoll is how long Flush sleeps between two looks, after it has done what there was to do at once.
const flushPoll = 20 * time.Microsecond

// Flush waits until nothing is read any more.
func (r *Rail) Flush(ctx context.Context) error {
	for {
		over := ctx.Err() != nil // before the last look
		r.mu.Lock()
		switch {
		case !r.closed && r.counts().sending == 0: // perhaps before an interruption
			r.mu.Unlock()
			return nil
		case r.closed || r.interrupted.Load():
			err := r.usable(-1)
			r.mu.Unlock()
			return err
		}
		r.mu.Unlock()
		if over {
			return fmt.Errorf("ucx: flush: %w", context.Cause(ctx))
		}
		if !r.Progress() {
			select {
			case <-ctx.Done():
			case <-time.After(flushPoll):
			}
		}
	}
}

// Left is that of now: Wait, and the rail's own goroutine, go on with puts.
func (r *Rail) Left() (begun, left uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.interrupted.Load() {
		return 0, 0, r.usable(-1)
	}
	c := r.counts()
	return uint64(c.begun), uint64(c.left), nil
}

// Progress does nothing while another goroutine does it.
func (r *Rail) Progress() bool {
	if !r.mu.TryLock() {
		return false
	}
	_, landed := r.progress()
	r.mu.Unlock()
	if landed {
		r.cfg.Ring()
	}
	return landed
}

// progress does what there is to do. The caller holds mu, and rings after it if something has landed. A rank that sleeps is woken: the event
// that it sleeps on has been taken.
func (r *Rail) progress() (busy, landed bool) {
	if r.closed || r.interrupted.Load() {
		return false, false
	}
	busy = C.swu_progress(r.r) > 0
	c := r.counts()
	landed = uint64(c.landed) != r.landed
	r.landed = uint64(c.landed)
	if landed {
		r.rouse()
	}
	return busy, landed
}

// rouse wakes the ranks that sleep. The caller holds mu.
func (r *Rail) rouse() {
	if r.asleep > 0 {
		_, _ = unix.Write(r.bell, binary.NativeEndian.AppendUint64(nil, uint64(r.asleep)))
		r.asleep = 0
	}
}

// turn does what there is to do, and rings. If there was nothing the caller may sleep on the event, but for a rank that has not seen what others
// have landed since its last Wait; it counts as asleep then. over says that the rail is.
func (r *Rail) turn(rank bool) (sleep, over bool) {
	r.mu.Lock()
	busy, landed := r.progress()
	over = r.closed || r.interrupted.Load()
	if sleep = !over && !busy && !landed && (!rank || r.seen == r.landed) && C.swu_arm(r.r) == 0; sleep && rank {
		r.asleep++
	}
	if rank {
		r.seen = r.landed
	}
	r.mu.Unlock()
	if landed {
		r.cfg.Ring()
	}
	return sleep, over
}

// away is how long the goroutine leaves the rail to ranks that wait.
const away = time.Millisecond

// attend sees to the rail, until Interrupt or Close.
func (r *Rail) attend() {
	defer close(r.ended)
	timer := time.NewTimer(away)
	defer timer.Stop()
	for {
		sleep, over := r.turn(false)
		if over {
			return
		}
		if sleep {
			_, _ = unix.Ppoll([]unix.PollFd{{Fd: r.efd, Events: unix.POLLIN}}, nil, nil) // whatever ends it, there is a look
		}
		r.paused.Store(true)
		for r.waited.Swap(false) {
			timer.Reset(away)
			select {
			case <-r.back:
			case <-timer.C:
			}
		}
		r.paused.Store(false)
	}
}

// Wait does what the goroutine does. That, or a Put, may take the event that ends its sleep, and land what came with it: then the bell does.
func (r *Rail) Wait(d time.Duration) {
	r.waited.Store(true)
	if sleep, _ := r.turn(true); !sleep {
		return
	}
	until := unix.NsecToTimespec(int64(d))
	_, _ = unix.Ppoll([]unix.PollFd{{Fd: r.efd, Events: unix.POLLIN}, {Fd: int32(r.bell), Events: unix.POLLIN}}, &until, nil)
	r.mu.Lock()
	switch {
	case r.asleep > 0:
		r.asleep--
	case r.r != nil: // else the bell is closed
		var ring [8]byte
		_, _ = unix.Read(r.bell, ring[:])
	}
	_, landed := r.progress()
	r.seen = r.landed
	r.mu.Unlock()
	if landed {
		r.cfg.Ring()
	}
}

// Resume ends the goroutine's pause.
func (r *Rail) Resume() {
	if r.waited.Store(false); r.paused.Load() {
		select {
		case r.back <- struct{}{}:
		default:
		}
	}
}

// Refused is the receiver's count.
func (r *Rail) Refused() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0
	}
	return int64(r.counts().refused)
}

// Interrupt ends the goroutine. Bytes land in calls of UCX only, of which there are none until Close.
func (r *Rail) Interrupt() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed && !r.interrupted.Swap(true) {
		C.swu_wake(r.r)
		r.rouse()
		r.Resume()
	}
}

// Close ends the goroutine, then the connections by force, and the worker.
func (r *Rail) Close() error {
	r.mu.Lock()
	was := r.closed
	r.closed = true
	if !was {
		C.swu_wake(r.r)
		r.rouse()
		r.Resume()
	}
	r.mu.Unlock()
	<-r.ended
	if was {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	own := r.r
	r.r = nil
	stands := C.swu_settle(own, C.int64_t(r.grace)) != 0
	if told := r.told.Load(); !stands || told && len(r.theirs) == 0 && r.cfg.Size > 1 {
		// Connections are being made, perhaps, and UCX 1.13.1 aborts the process that ends then. So it stays: bytes land in calls of UCX
		// only, of which there are no more. The memory that it reads stays pinned.
		seal(r.port, r.theirs, r.guard)
		err := unix.Close(r.bell)
		if !stands {
			err = errors.Join(errors.New("ucx: close: a connection has not come about, and UCX keeps its memory"), err)
		}
		return err
	}
	ended := make(chan struct{})
	go func() {
		r.quit()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(closeGrace):
		cut(r.port, r.theirs)
		select {
		case <-ended:
		case <-time.After(r.cutGrace):
			// The memory that it reads stays pinned.
			return errors.Join(fmt.Errorf("ucx: close: UCX has not ended in %v, and goes on", closeGrace+r.cutGrace), unix.Close(r.bell))
		}
	}
	r.pins.Unpin()
	return unix.Close(r.bell)
}

// settleGrace is how long connections have to stand before a rail is closed, where it is closed while they are made.
const settleGrace = time.Second

// closeGrace is how long UCX has to end by itself before its connections are cut: over a link that is down it may try for ever to write its
// last words. cutGrace is how long it has then, when it waits for nobody: a process that gets no processor may need it.
const (
	closeGrace = time.Second
	cutGrace   = 15 * time.Second
)
