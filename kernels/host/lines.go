package host

import (
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/kernels"
)

// lines is a row of lines in a control block, one for each rank. A rank writes its own line in the segments of its peers, and reads theirs in
// its own segment. A line says how many calls its writer has signalled.
type lines struct {
	w     *waiter
	first int64 // offset of rank 0's line
}

// signal tells peer that this rank has come here in w's call. A peer that has awaited it sees what this rank has written before.
func (l lines) signal(peer int) {
	e := l.w.e
	e.signal(peer, e.word(peer, l.first+int64(e.space.Rank)*kernels.LineBytes), kernels.LastSeq(l.w.call.epoch))
}

// awaitAll returns when all peers have signalled. arrived, if set, is called for each as it comes.
func (l lines) awaitAll(arrived func(peer int)) error {
	w, e := l.w, l.w.e
	w.waiting = w.waiting[:0]
	for i := 1; i < e.space.Size; i++ {
		w.waiting = append(w.waiting, int32(e.peer(i)))
	}
	for len(w.waiting) > 0 {
		left := w.waiting[:0]
		for _, p := range w.waiting {
			line := e.word(e.space.Rank, l.first+int64(p)*kernels.LineBytes)
			if line.Load() < kernels.LastSeq(w.call.epoch) {
				if w.masks == nil || !w.masks.without(int(p)) || line.Load() >= kernels.LastSeq(w.call.epoch) {
					left = append(left, p)
				} else {
					w.masks.lost |= 1 << p
				}
			} else if arrived != nil {
				arrived(int(p))
			}
		}
		moved := len(left) < len(w.waiting)
		w.waiting = left
		if moved {
			w.busy()
			continue
		}
		if w.masks != nil {
			if err := w.masks.unmasked(); err != nil {
				return err
			}
		}
		late := e.near(int(left[0]))
		if err := w.idle(late); err != nil {
			return w.fail(late, err)
		}
	}
	return nil
}

// signal stores seq in a word at peer, and wakes the peer.
func (e *Engine) signal(peer int, word *atomic.Uint64, seq uint64) {
	e.at(signalling, peer)
	word.Store(seq)
	e.ring(peer)
}

// until waits for peer to bring a word to seq.
func (w *waiter) until(peer peer, word *atomic.Uint64, seq uint64) error {
	for word.Load() < seq {
		if err := w.idle(peer); err != nil {
			return w.fail(peer, err)
		}
	}
	w.busy()
	return nil
}

// count begins a call: it is the new value of the word in this rank's segment that counts the communicator's calls.
func (e *Engine) count(at int64) uint64 { return e.word(e.space.Rank, at).Add(1) }

// peer is the rank i after this one.
func (e *Engine) peer(i int) int { return (e.space.Rank + i) % e.space.Size }
