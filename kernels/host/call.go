package host

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// call is one call of one communicator, as peers can tell it.
type call struct {
	op    opcode
	at    int64  // offset of the word that counts the communicator's calls: its place is the communicator's name
	epoch uint64 // 0 where the ranks do not count their calls alike
}

// A call's word is its communicator's offset in lines, the low bits of its epoch and its operation. It is never 0, because no control block
// lies at 0. Offsets of 8 TiB fit.
const (
	epochBits = 16
	epochMask = 1<<epochBits - 1
)

func (c call) word() uint64 {
	return uint64(c.at/kernels.LineBytes)<<(epochBits+opcodeBits) | c.epoch&epochMask<<opcodeBits | uint64(c.op)
}

// callOf is the call that a peer's word tells of, ok if there is one that is not of w's communicator. The high bits of its epoch are those of
// the nearest call of this rank; ahead is how many calls of this rank come before it, negative if it has made more.
func (w *waiter) callOf(word uint64) (c call, ahead int, ok bool) {
	e := w.e
	c = call{op: opcode(word & (1<<opcodeBits - 1)), at: int64(word>>(epochBits+opcodeBits)) * kernels.LineBytes}
	if word == 0 || c.at == w.call.at || c.at+8 > e.space.Stride {
		return c, 0, false
	}
	made := e.word(e.space.Rank, c.at).Load()
	ahead = int(int16(word>>opcodeBits - made))
	c.epoch = made + uint64(ahead)
	return c, ahead, true
}

// elsewhereFor is how long a peer waits in another call before that is held for a mistake: threads that make calls of
// several communicators side by side may be that far apart.
const (
	elsewhereFor = 2 * time.Second
	// elsewhereGrace is how long a rank that has found that stays in its call: the peer finds it too, before it is served by the next.
	elsewhereGrace = 200 * time.Millisecond
)

// elsewhere looks whether peer, which has not begun this call, waits in one that this rank has not begun: then each waits
// for the other. The word of where this rank waits stays, for the peer to see.
func (w *waiter) elsewhere(peer int) error {
	e := w.e
	w.behind(peer)
	if w.call.epoch == 0 { // a transfer between two ranks: the peer may make it on another thread
		return nil
	}
	if err := w.control(peer); err != nil {
		return err
	}
	word := e.peers[peer].waiting.Load()
	c, ahead, ok := w.callOf(word)
	if !ok || ahead <= 0 || e.word(peer, w.call.at).Load() >= w.call.epoch {
		w.other = 0
		return nil
	}
	if word != w.other {
		w.other, w.seen = word, time.Now()
		return nil
	}
	if time.Since(w.seen) < min(elsewhereFor, w.timeout/2) {
		return nil
	}
	w.entered = false
	e.leave(&w.sleeper)
	e.misses(peer, c, w.call)
	time.Sleep(elsewhereGrace)
	return fmt.Errorf("%w: rank %d waits in %v, call %d of that kind, which this rank has not made; this is %v, call %d of its kind",
		comm.ErrOutOfStep, e.space.Name(peer), c.op, c.epoch, w.call.op, w.call.epoch)
}

// behind fails the group when peer has left it and what this rank waits for has not come a while after. Where masks end waits, the caller may
// know better.
func (w *waiter) behind(peer int) {
	switch left := w.e.space.Left; {
	case left == nil || w.masks != nil || !left(peer):
		w.gone = 0
	case w.gone == 0:
		w.gone = max(time.Since(w.since), 1)
	case time.Since(w.since)-w.gone > newsGrace:
		w.e.space.ReportLeft(peer)
	}
}

// control looks whether peer waits on the control plane for this rank, in one call all the time. Another thread of this rank may be on its way
// there, so that is held for a mistake only when half of the timeout is over.
func (w *waiter) control(peer int) error {
	waited := time.Since(w.since)
	if waited < w.timeout/4 {
		return nil
	}
	call, seq := w.e.space.Instead(peer)
	if seq != w.meets {
		w.meets, w.meetsFrom = seq, waited
	}
	if seq == 0 || waited < w.timeout/2 || waited-w.meetsFrom < w.timeout/8 {
		return nil
	}
	return fmt.Errorf("%w: rank %d waits in %s, which this rank has not made; this is %v, call %d of its kind", comm.ErrOutOfStep, w.e.space.Name(peer), call, w.call.op, w.call.epoch)
}

// fail is the error of a wait for peer that has ended without success. It names that peer, or the one that this peer waits for itself, or the
// reason for which the group gave up.
func (w *waiter) fail(peer peer, err error) error {
	op, epoch := w.call.op.String(), w.call.epoch
	if errors.Is(err, comm.ErrPeerLost) && w.hears() {
		err = comm.ErrAborted
	}
	if absent := w.e.absent(w.call.at, epoch); absent != nil {
		w.port.absent.Store(&absent)
	}
	if errors.Is(err, comm.ErrAborted) {
		w.leaves(peer.mark(), failedBit)
		if why := w.e.why(); why != nil {
			if err := w.hearsay(why); err != nil {
				return err
			}
			err = why
		}
		return fmt.Errorf("kernels: %s call %d: %w", op, epoch, err)
	}
	rank := peer.id().rank
	if l, ok := err.(*lateError); ok {
		rank = l.rank
	}
	return &comm.PeerError{Rank: rank, Op: op, Epoch: epoch, Err: err}
}

// hears reports whether the group fails in a while. A connection to another host that has failed says nothing of who is lost: the rank at its
// other end may be well, and have given this one or a third one up. The group knows, or hears of it.
func (w *waiter) hears() bool {
	for end := time.Now().Add(min(lostGrace, w.timeout)); !w.over() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	return w.over()
}

// hearsay is the error of a call that ends since the group has lost a rank of this host which had given up its own wait, and then ended: whom
// that one blamed is to blame. It is nil where the group has failed for another reason.
func (w *waiter) hearsay(why error) error {
	e := w.e
	var gone *comm.PeerError
	if !errors.As(why, &gone) {
		return nil
	}
	for p := range e.peers {
		to, failed := e.awaits(p)
		if e.space.Name(p) != gone.Rank || p == e.space.Rank || failed != gaveUpBit {
			continue
		}
		rank := to - len(e.peers)
		if rank < 0 {
			rank = e.space.Name(to)
		}
		return &comm.PeerError{Rank: rank, Op: w.call.op.String(), Epoch: w.call.epoch,
			Err: fmt.Errorf("%w on rank %d, which waited for it and has ended: %w", comm.ErrTimeout, gone.Rank, why)}
	}
	return nil
}

// spares reports whether a wait for peer goes on although the group has failed: another rank is lost, which may have done its part in this
// call before, and peer is about to do its own. It does not last long.
func (w *waiter) spares(peer peer) bool {
	if w.port.leaving.Load() || w.e.why == nil {
		return false
	}
	if w.lostAt.IsZero() {
		w.lostAt = time.Now()
		var lost *comm.PeerError
		why := w.e.why()
		w.lost = errors.As(why, &lost) && errors.Is(why, comm.ErrPeerLost) && lost.Rank != w.e.space.Name(w.e.space.Rank)
		if w.lost {
			w.lostRank = lost.Rank
		}
	}
	return w.lost && w.lostRank != peer.id().rank && peer.goesOn() && time.Since(w.lostAt) < newsGrace
}

// await tells the others of this host for whom this rank waits. The word stays when the wait fails.
func (w *waiter) await(peer peer) {
	own := w.e.near(w.e.space.Rank)
	if word := uint32(peer.mark()) + 1; word != w.awaits {
		w.awaits = word
		own.awaited.Store(word)
	}
	own.passes.Add(1)
}

// awaits is for whom a rank of this host waits, as its word says, -1 for nobody, and by which bits that wait has failed.
func (e *Engine) awaits(p int) (peer int, failed uint32) {
	word := e.peers[p].awaited.Load()
	return int(word&(failedBit-1)) - 1, word & (gaveUpBit | failedBit)
}

// leaves has the word of this rank say that its wait for the rank with a mark has failed.
func (w *waiter) leaves(mark int, how uint32) {
	w.e.near(w.e.space.Rank).awaited.Store(uint32(mark) + 1 | how)
}

// beyond is the rank of another host for which a rank of the space waits.
func (e *Engine) beyond(peer int) (rank int, waits bool) {
	to, _ := e.awaits(peer)
	rank = to - len(e.peers)
	return rank, e.space.Ranks != nil && rank >= 0
}

// lateError is the error of a wait for a rank of the group that may not be the one that was waited for.
type lateError struct {
	rank int
	error
}

func (e *lateError) Unwrap() error { return e.error }

// culprit follows from a peer who waits for whom. A rank that was stopped in a wait of its own says that it waits, though
// it could go on, so the way may lead in a circle, or back to this rank: then one that is not seen to run is to blame, among those the one that
// has made the fewest calls of the communicator whose counter lies at an offset, among those the one that most ranks wait for, among those the
// first on the way, or where that leads back to this rank the last.
func (e *Engine) culprit(peer int, at int64) int {
	me := e.space.Rank
	waitFor := make([]int, len(e.peers)) // by rank, -1: for nobody
	count := make([]int, len(e.peers))   // how many wait for a rank
	for p := range e.peers {
		waitFor[p], _ = e.awaits(p)
		if p == me {
			waitFor[p] = peer
		}
		if q := waitFor[p]; q >= len(e.peers) || q == p {
			waitFor[p] = -1
		} else if q >= 0 {
			count[q]++
		}
	}
	var way []int
	on := make([]int, len(e.peers)) // place on the way, from 1
	for p := peer; ; p = waitFor[p] {
		way = append(way, p)
		on[p] = len(way)
		switch next := waitFor[p]; {
		case next < 0:
			return p
		case next == me: // this rank runs
			if silent := e.silent(way); len(silent) < len(way) {
				return silent[len(silent)-1]
			}
			return p
		case on[next] > 0:
			silent := e.silent(way[on[next]-1:])
			worst := silent[0]
			for _, q := range silent {
				begun, least := e.word(q, at).Load(), e.word(worst, at).Load()
				if begun < least || begun == least && count[q] > count[worst] {
					worst = q
				}
			}
			return worst
		}
	}
}

// silent are those of some ranks that neither go on with a wait nor have given one up in a while, in their order: all of them if each does.
// A rank that waits looks every few milliseconds, where it gets a core.
func (e *Engine) silent(ranks []int) []int {
	seen := make([]uint32, len(e.peers))
	for _, p := range ranks {
		seen[p] = e.peers[p].passes.Load()
	}
	rest := slices.Clone(ranks)
	for end := time.Now().Add(newsGrace); ; time.Sleep(time.Millisecond) {
		over := time.Now().After(end) // before the last look
		rest = slices.DeleteFunc(rest, func(p int) bool {
			_, failed := e.awaits(p)
			return failed != 0 || e.peers[p].passes.Load() != seen[p]
		})
		switch {
		case len(rest) == 0:
			return ranks
		case len(rest) == 1 || over:
			return rest
		}
	}
}
