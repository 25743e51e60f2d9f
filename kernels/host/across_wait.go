package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
)

// idleAcross waits a little for a rank of another host, which has last been heard of at a time. It sleeps at once, since what brings the bytes
// needs a core: on the rail, or without one until something rings.
func (w *waiter) idleAcross(rank int, heard time.Time, rail rails.Rail) error {
	w.polls++
	w.rank = rank
	if w.polls == 1 {
		w.since, w.told, w.looks = time.Now(), 0, false
	}
	waited, silent := time.Since(w.since), time.Since(heard)
	switch {
	case w.over():
		if err := w.aborted(); err != nil {
			return w.failAcross(rank, err)
		}
		return nil
	case silent > w.timeout && !w.prolonged(silent):
		if w.again() {
			return nil
		}
		w.leaves(len(w.e.peers)+rank, gaveUpBit)
		return w.failAcross(rank, fmt.Errorf("%w after %v: it is on another host", comm.ErrTimeout, w.timeout))
	}
	if log := w.e.space.Log; waited >= w.told+w.e.tellEvery && log != nil {
		w.told = waited
		log.Info("waiting", "rank", w.e.space.Name(w.e.space.Rank), "for", rank, "call", fmt.Sprintf("%d, %v", w.call.epoch, w.call.op),
			"waited", waited.Round(time.Second), "timeout", w.timeout)
	}
	w.await(len(w.e.peers) + rank)
	w.port.waits.show(w)
	most := w.most(silent)
	if rail != nil {
		rail.Wait(most)
		return nil
	}
	if !w.entered {
		w.entered = true
		w.doorbell = w.e.enter(&w.sleeper)
		return nil // the caller looks once more
	}
	w.e.sleep(&w.sleeper, w.doorbell, most)
	w.doorbell = w.e.doorbell.Load()
	return nil
}

// failAcross is the error of a wait for a rank of another host, or of a put to it. A connection that has failed says nothing of who is lost:
// the rank at its other end may be well, and have given this one or a third one up. The group knows, or hears of it.
func (w *waiter) failAcross(rank int, err error) error {
	if errors.Is(err, comm.ErrPeerLost) {
		for end := time.Now().Add(min(lostGrace, w.timeout)); !w.over() && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		if w.over() {
			err = comm.ErrAborted
		}
	}
	if errors.Is(err, comm.ErrAborted) {
		return w.fail(w.e.space.Rank, comm.ErrAborted)
	}
	return &comm.PeerError{Rank: rank, Op: w.call.op.String(), Epoch: w.call.epoch, Err: err}
}

// putAcross sends bytes to a place of a rank of another host, and has a word there count that. They must not change before a flush.
func (w *waiter) putAcross(rail rails.Rail, rank int, place int64, bytes []byte, word int64) error {
	if err := rail.Put(rank, place, bytes, word); err != nil {
		return w.failAcross(rank, err)
	}
	w.moved(int64(len(bytes)))
	return nil
}

// untilAcross waits for a word that counts the puts of a rank of another host.
func (w *waiter) untilAcross(rank int, word *atomic.Uint64, count uint64) error {
	began := time.Now()
	for word.Load() < count {
		if err := w.idleAcross(rank, began, nil); err != nil {
			return err
		}
	}
	w.busy()
	return nil
}

// flush returns when the memory that was sent is free.
func (w *waiter) flush(rail rails.Rail) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), w.timeout, comm.ErrTimeout)
	defer cancel()
	err := rail.Flush(ctx)
	switch {
	case errors.Is(err, comm.ErrAborted):
		return w.fail(w.e.space.Rank, comm.ErrAborted)
	case err != nil:
		return fmt.Errorf("kernels: %v: between hosts: %w", w.call.op, err)
	}
	return nil
}

// restFor bounds the wait for what is still under way when a communicator closes.
const restFor = 10 * time.Second

// restCount says how many puts of this rank a rank of another host gets, by the word that counts them. Words follow each other in a line,
// there and, for the puts of that rank, here; behind them are one that says that the rest is there, and then how many there were of each.
type restCount struct {
	rank        int
	there, here int64 // offsets of lines
	puts        []uint64
}

// rest returns when all that was put here has landed, after which the memory may be given back. All ranks' launches have ended, also those
// that have failed. Each rank tells the others how many puts there were. It is not over if the group fails: then nothing lands any more.
func (e *Engine) rest(rail rails.Rail, counts []restCount) (over bool, err error) {
	for _, c := range counts {
		var bytes []byte
		for _, n := range c.puts {
			bytes = binary.LittleEndian.AppendUint64(bytes, n)
		}
		behind := c.there + 8*int64(len(c.puts))
		if err := rail.Put(c.rank, behind+8, bytes, behind); err != nil {
			return false, fmt.Errorf("kernels: rank %d: %w", c.rank, err)
		}
	}
	end := time.Now().Add(restFor)
	for _, c := range counts {
		n := int64(len(c.puts))
		word := func(i int64) uint64 { return e.word(e.space.Rank, c.here+8*i).Load() }
		landed := func() bool {
			if word(n) == 0 {
				return false
			}
			for i := range n {
				if word(i) < word(n+1+i) {
					return false
				}
			}
			return true
		}
		for !landed() {
			if e.abort.Load() != 0 {
				return false, nil
			}
			if time.Now().After(end) {
				return false, &comm.PeerError{Rank: c.rank, Op: "close", Err: comm.ErrTimeout}
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), end, comm.ErrTimeout)
	defer cancel()
	err = rail.Flush(ctx)
	return err == nil, err
}
