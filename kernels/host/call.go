package host

import (
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// call is one call of one communicator, as peers can tell it.
type call struct {
	op    opcode
	at    int64 // offset of the word that counts the communicator's calls: its place is the communicator's name
	epoch uint64
}

// opcode names an operation in a word.
type opcode uint8

const (
	opAllToAllV   opcode = 1
	opReduceFirst opcode = 2 // less one, plus the kernels.Collective
	opMoEFirst    opcode = 5 // plus the kernels.MoEOp
)

func (o opcode) String() string {
	switch {
	case o >= opMoEFirst:
		return kernels.MoEOp(o - opMoEFirst).String()
	case o >= opReduceFirst:
		return kernels.Collective(o - opReduceFirst + 1).String()
	}
	return "alltoallv"
}

// A call's word is its communicator's offset in lines, the low bits of its epoch and its operation. It is never 0.
const (
	epochShift  = 4
	offsetShift = 24
	epochMask   = 1<<(offsetShift-epochShift) - 1
)

func (c call) word() uint64 {
	return uint64(c.at/kernels.LineBytes)<<offsetShift | c.epoch&epochMask<<epochShift | uint64(c.op)
}

// callOf is the call that a word tells of. Its epoch is not whole.
func callOf(word uint64) call {
	return call{op: opcode(word & (1<<epochShift - 1)), at: int64(word>>offsetShift) * kernels.LineBytes, epoch: word >> epochShift & epochMask}
}

// elsewhereFor is how long a peer waits in another call before that is held for a mistake: threads that make calls of
// several communicators side by side may be that far apart.
const elsewhereFor = 2 * time.Second

// elsewhere looks whether peer, which has not begun this call, waits in one that this rank has not begun: then each waits
// for the other. The word of where this rank waits stays, for the peer to see.
func (w *waiter) elsewhere(peer int) error {
	e := w.e
	word := e.peers[peer].waiting.Load()
	c := callOf(word)
	if word == 0 || c.at == w.call.at || c.at+8 > e.space.Stride || e.word(peer, w.call.at).Load() >= w.call.epoch {
		w.other = 0
		return nil
	}
	if ahead := (c.epoch - e.word(e.space.Rank, c.at).Load()) & epochMask; ahead == 0 || ahead > epochMask/2 {
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
	return fmt.Errorf("%w: rank %d waits in call %d of another communicator, %v, which this rank has not made; this is call %d, %v",
		comm.ErrMismatch, peer, c.epoch, c.op, w.call.epoch, w.call.op)
}

// doing says what can be seen of a peer that has not come.
func (w *waiter) doing(peer int) string {
	e := w.e
	begun := e.word(peer, w.call.at).Load()
	at := ""
	if c := callOf(e.peers[peer].waiting.Load()); c.op != 0 && c.at != w.call.at {
		at = fmt.Sprintf(" and waits in call %d of another communicator, %v", c.epoch, c.op)
	}
	if begun < w.call.epoch {
		return fmt.Sprintf("rank %d has made %d calls%s; this is call %d, %v (it is busy, stopped, or makes other calls)",
			peer, begun, at, w.call.epoch, w.call.op)
	}
	return fmt.Sprintf("rank %d has begun call %d, %v, and not come further (it waits for another rank, or is stopped)", peer, w.call.epoch, w.call.op)
}
