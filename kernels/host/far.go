package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// far is a rank of another host, as one communicator has it. It puts bytes into segments of this host, and the rail counts them in words of its
// line, for ever. This rank has a line there. A put for all ranks of a host goes to the segment of the one with the sender's place.
//
// A rank that moves bytes is alive, though this one may hear nothing of it for long. So every line begins with a word for empty puts, by which
// its rank says that it moves bytes, or a rank of its host that it waits for (waiter.say). It does not repeat what ranks of other hosts say:
// two that wait for each other would go on for ever.
type far struct {
	who
	e           *Engine
	rail        rails.Rail
	here, there int64      // its line in segments of this host, and this rank's in those of its host
	mu          sync.Mutex // where several launches put at a time
	puts        []uint64   // of this rank, by word
	landed      uint64     // how many of its puts had landed here when it was heard
	heard       time.Time
}

const (
	// movesWord is the first word of every line.
	movesWord = 0
	// sayEvery is the least time between two such puts to a rank.
	sayEvery = 100 * time.Millisecond
)

func (f *far) id() who { return f.who }

// mark is behind those of the ranks of this host.
func (f *far) mark() int { return len(f.e.peers) + f.rank }

// looks: this rank sleeps at once, since what brings the bytes needs a core.
func (f *far) looks(*waiter) (looks, yields bool) { return false, false }

func (f *far) goesOn() bool { return false } // nothing lands any more

func (f *far) begun(*waiter) bool { return true }

func (f *far) elsewhere(*waiter) error { return nil }

// silence counts from the last put that has landed here, the beginning of the wait, or where one is for several ranks from waiter.from.
func (f *far) silence(w *waiter, waited time.Duration) time.Duration {
	f.hear()
	return f.since(w, waited, f.heard)
}

// since is the silence of a rank that was heard last at a time.
func (f *far) since(w *waiter, waited time.Duration, heard time.Time) time.Duration {
	if !w.from.IsZero() {
		waited = time.Since(w.from)
	}
	return min(waited, time.Since(heard))
}

// hear looks whether anything has landed since it looked last.
func (f *far) hear() {
	n := uint64(0)
	for word := range f.puts {
		if n += f.count(word); f.place != f.e.space.Rank {
			n += f.atGate(word).Load()
		}
	}
	if n != f.landed {
		f.landed, f.heard = n, time.Now()
	}
}

func (f *far) late(w *waiter) error {
	w.leaves(f.mark(), gaveUpBit)
	return &lateError{f.rank, fmt.Errorf("%w after %v%s: on host %d: %s", comm.ErrTimeout, w.timeout, w.sizes(f.rank), f.host, f.doing(w))}
}

func (f *far) doing(w *waiter) string {
	if text := w.with.doing(f.rank); text != "" {
		return text
	}
	return fmt.Sprintf("nothing more has come of rank %d", f.rank)
}

// word counts its puts to this rank that name a word, and atGate those to its gate, the rank of this host with its place.
func (f *far) word(word int) *atomic.Uint64 {
	return f.e.word(f.e.space.Rank, f.here+8*int64(word))
}

func (f *far) atGate(word int) *atomic.Uint64 { return f.e.word(f.place, f.here+8*int64(word)) }

// count is how many of its puts to this rank have come that name a word.
func (f *far) count(word int) uint64 {
	n := f.word(word).Load()
	f.e.order(f.e.space.Rank)
	return n
}

// put sends bytes to a place of the rank, and has a word there count that. They must not change before a flush.
func (f *far) put(place int64, bytes []byte, word int) error {
	if err := f.rail.Put(f.rank, place, bytes, f.there+8*int64(word)); err != nil {
		return err
	}
	f.puts[word]++
	return nil
}

// put is far.put in a call.
func (w *waiter) put(f *far, place int64, bytes []byte, word int) error {
	if err := f.put(place, bytes, word); err != nil {
		return w.fail(f, err)
	}
	w.moved(int64(len(bytes)))
	return nil
}

// crosses has the call's ranks of other hosts hear that bytes move.
func (w *waiter) crosses(fars []*far) { w.fars, w.said = fars, time.Now() }

// say tells ranks of other hosts that this one moves bytes, or one of its host that it waits for.
func (w *waiter) say() {
	if len(w.fars) == 0 || time.Since(w.said) < sayEvery {
		return
	}
	w.said = time.Now()
	for _, f := range w.fars {
		if f.mu.TryLock() { // else another launch puts, or this one
			_ = f.put(0, nil, movesWord) // the call's own puts have the errors
			f.mu.Unlock()
		}
	}
}

// flush returns when the memory that was sent to other hosts is free.
func (w *waiter) flush() error {
	if len(w.fars) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), w.timeout, comm.ErrTimeout)
	defer cancel()
	err := w.fars[0].rail.Flush(ctx)
	switch {
	case errors.Is(err, comm.ErrAborted):
		return w.fail(w.e.near(w.e.space.Rank), comm.ErrAborted)
	case err != nil:
		return fmt.Errorf("kernels: %v: between hosts: %w", w.call.op, err)
	}
	return nil
}

// restFor bounds the wait for what is still under way when a communicator closes.
const restFor = 10 * time.Second

// rest returns when all that was put here has landed, after which the memory may be given back. All ranks' launches have ended, also those
// that have failed. Each rank tells the others how many puts there were, behind the words of its line: a word says that the rest is there, and
// then come the numbers. All lines lie between two places, where another communicator begins anew. It is not over if the group fails: then
// nothing lands any more.
func (n *hostRanks) rest(e *Engine, from, to int64) (over bool, err error) {
	for _, f := range n.fars {
		var bytes []byte
		for _, n := range f.puts {
			bytes = binary.LittleEndian.AppendUint64(bytes, n)
		}
		behind := f.there + 8*int64(len(f.puts))
		if err := f.rail.Put(f.rank, behind+8, bytes, behind); err != nil {
			return false, fmt.Errorf("kernels: rank %d: %w", f.rank, err)
		}
	}
	end := time.Now().Add(restFor)
	for _, f := range n.fars {
		for !f.rested() {
			if e.abort.Load() != 0 {
				return false, nil
			}
			if time.Now().After(end) {
				return false, &comm.PeerError{Rank: f.rank, Op: "close", Err: comm.ErrTimeout}
			}
			shm.Sleep(20 * time.Microsecond)
		}
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), end, comm.ErrTimeout)
	defer cancel()
	if err = n.hosts.Rail.Flush(ctx); err == nil {
		n.hosts.Rail.Forget(from, to)
	}
	return err == nil, err
}

// rested reports whether all puts of the rank have landed, of which it has said how many they are.
func (f *far) rested() bool {
	n := len(f.puts)
	if f.word(n).Load() == 0 {
		return false
	}
	for i := range n {
		if f.word(i).Load() < f.word(n+1+i).Load() {
			return false
		}
	}
	return true
}
