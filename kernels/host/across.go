package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A message to a rank of another host goes straight to it, over the rail, through a ring of slots in the receiver's segment. Its first chunk
// begins with a head, which says how much the sender sends and how much it expects itself: so both ranks of a pair know of a
// disagreement from this call, and it costs nothing. A message that its receiver does not want is taken out of the ring and dropped.
//
// Chunks are counted on for ever. The rail counts them in a word of the receiver, and the receiver gives slots back in halves of the ring, by
// puts without bytes, which the rail counts in a word of the sender.

// across is what a communicator has for ranks of other hosts.
type across struct {
	bounds *kernels.ExchangeBounds
	offset int64
	block  ExchangeBlock // of this host, between the lines and the slots
	peers  []remote
	to     []int // index in peers by rank, -1 for ranks of this host
	at     []int // by rank: its number in the space, -1 for ranks of other hosts
}

// remote is a rank of another host.
type remote struct {
	rank   int
	sent   uint64 // chunks
	taken  uint64 // of its chunks, out of the ring
	gave   uint64 // puts that give slots back
	first  []byte // a message's first chunk
	out    []byte // of this call
	in     []byte
	pushed int64
	begun  bool  // the head is on its way
	ended  bool  // and all the rest
	size   int64 // of the message that comes, -1 before its head has
	drop   bool  // it is not wanted
	done   int64 // how much of it has been taken
}

// The words of a head.
const (
	headEpoch    = 0
	headSent     = 8
	headExpected = 16
	headRefused  = 24 // bytes, offset, limit and part of splits that are refused
	headBytes    = 64
	// firstBytes is the most of a message that goes with its head. It is copied once more for that.
	firstBytes = 16 << 10
)

// The lines of a rank in a segment: the count of its chunks here, that of its puts for slots, and where it says how many there were.
const (
	chunksLine = iota
	slotsLine
	restLine
	linesPerRank
)

func (a *across) line(rank, which int) int64 {
	return a.offset + int64(rank*linesPerRank+which)*kernels.LineBytes
}

// slot is where chunk k of a rank lands.
func (a *across) slot(rank int, k uint64) int64 {
	slots := uint64(a.bounds.Slots)
	return a.block.Offset + a.block.Bytes() + (int64(rank)*int64(slots)+int64(k%slots))*a.bounds.SlotBytes
}

// gives is how many slots one put gives back.
func (a *across) gives() uint64 { return uint64(max(1, a.bounds.Slots/2)) }

func newAcross(c *kernels.ExchangeBounds, offset int64) *across {
	a, inner := &across{bounds: c, offset: offset}, *c
	inner.Size = len(c.Hosts.Ranks)
	a.block = ExchangeBlock{&inner, a.line(c.Size, 0)}
	return a
}

func (a *across) layout() kernels.Layout {
	return kernels.Layout{Bytes: a.slot(a.bounds.Size, 0) - a.offset, Zero: a.block.Offset + a.block.ControlBytes() - a.offset}
}

func (a *across) open(e *Engine) {
	a.at, a.to = make([]int, a.bounds.Size), make([]int, a.bounds.Size)
	for r := range a.at {
		a.at[r], a.to[r] = -1, -1
	}
	for p := range e.space.Size {
		a.at[e.space.Name(p)] = p
	}
	for r, p := range a.at {
		if p < 0 {
			a.to[r] = len(a.peers)
			a.peers = append(a.peers, remote{rank: r, first: make([]byte, headBytes+min(firstBytes, a.bounds.SlotBytes-headBytes))})
		}
	}
}

// index is the number of a rank in the space, -1 where it is on another host.
func (f *exchanges) index(rank int) int {
	if f.across == nil {
		return rank
	}
	return f.across.at[rank]
}

// begin starts the call. refused are this rank's splits if it refuses them: then it sends and takes nothing.
func (a *across) begin(x *exchange, refused *kernels.SplitsError) error {
	r := x.a.Routes
	for _, rank := range r.Order {
		if a.to[rank] < 0 {
			continue
		}
		p := &a.peers[a.to[rank]]
		p.pushed, p.begun, p.ended, p.size, p.drop, p.done = 0, false, false, -1, refused != nil, 0
		head := p.first[:headBytes]
		clear(head)
		if p.out, p.in = nil, nil; refused == nil {
			p.out = x.a.Src.Mem[r.SendOffsets[rank]:][:r.SendBytes[rank]]
			p.in = x.a.Dst.Mem[r.RecvOffsets[rank]:][:r.RecvBytes[rank]]
			binary.LittleEndian.PutUint64(head[headSent:], uint64(len(p.out)))
		} else {
			part := uint64(refused.Peer) << 32
			if refused.Send {
				part |= 1
			}
			binary.LittleEndian.PutUint64(head[headSent:], ^uint64(0))
			for i, v := range [...]uint64{uint64(refused.Bytes), uint64(refused.Offset), uint64(refused.Limit), part} {
				binary.LittleEndian.PutUint64(head[headRefused+8*i:], v)
			}
		}
		binary.LittleEndian.PutUint64(head[headEpoch:], x.epoch)
		binary.LittleEndian.PutUint64(head[headExpected:], uint64(len(p.in)))
		if _, err := a.push(x, p); err != nil {
			return err
		}
	}
	return nil
}

// pass sends what there is room for and takes what has come. It reports whether that is anything.
func (a *across) pass(x *exchange) (moved bool, err error) {
	for i := range a.peers {
		p := &a.peers[i]
		pushed, err := a.push(x, p)
		if err != nil {
			return false, err
		}
		took, err := a.take(x, p)
		if err != nil {
			return false, err
		}
		moved = moved || pushed || took
	}
	return moved, nil
}

// late is the first rank that has not done its part, -1 if all have.
func (a *across) late() int {
	for i := range a.peers {
		if p := &a.peers[i]; !p.ended || p.size < 0 || p.done < p.size {
			return p.rank
		}
	}
	return -1
}

// finish goes on until all have done their parts, and the memory that was sent is free.
func (a *across) finish(x *exchange) error {
	for {
		moved, err := a.pass(x)
		if err != nil {
			return err
		}
		late := a.late()
		if late < 0 {
			return a.flush(x)
		}
		if moved {
			x.w.busy()
		} else if err := x.w.idleAcross(late); err != nil {
			return err
		}
	}
}

// flush returns when the memory that was sent is free.
func (a *across) flush(x *exchange) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), x.a.Timeout, comm.ErrTimeout)
	defer cancel()
	err := a.bounds.Hosts.Rail.Flush(ctx)
	switch {
	case errors.Is(err, comm.ErrAborted):
		return x.w.fail(x.e.space.Rank, comm.ErrAborted)
	case err != nil:
		return fmt.Errorf("kernels: alltoallv: between hosts: %w", err)
	}
	return nil
}

// push sends chunks while there are slots for them.
func (a *across) push(x *exchange, p *remote) (moved bool, err error) {
	e, me := x.e, a.bounds.Hosts.Rank
	room := e.word(e.space.Rank, a.line(p.rank, slotsLine)).Load()*a.gives() + uint64(a.bounds.Slots)
	for !p.ended && p.sent < room {
		var chunk []byte
		if !p.begun {
			n := copy(p.first[headBytes:], p.out)
			chunk, p.pushed, p.begun = p.first[:headBytes+n], int64(n), true
		} else {
			chunk = p.out[p.pushed:min(p.pushed+a.bounds.SlotBytes, int64(len(p.out)))]
			p.pushed += int64(len(chunk))
		}
		if err := a.bounds.Hosts.Rail.Put(p.rank, a.slot(me, p.sent), chunk, a.line(me, chunksLine)); err != nil {
			return false, x.w.failAcross(p.rank, err)
		}
		x.w.moved(int64(len(chunk)))
		p.sent++
		p.ended, moved = p.pushed == int64(len(p.out)), true
	}
	return moved, nil
}

// take takes the chunks of this call out of the ring.
func (a *across) take(x *exchange, p *remote) (moved bool, err error) {
	e, me := x.e, a.bounds.Hosts.Rank
	landed := e.word(e.space.Rank, a.line(p.rank, chunksLine)).Load()
	for p.taken < landed && (p.size < 0 || p.done < p.size) {
		chunk := e.space.Range(e.space.Rank, a.slot(p.rank, p.taken), a.bounds.SlotBytes)
		if p.size < 0 {
			if err := a.head(x, p, chunk); err != nil {
				return false, err
			}
			chunk = chunk[headBytes:len(p.first)]
		}
		n := min(int64(len(chunk)), p.size-p.done)
		if !p.drop {
			x.copy(p.in[p.done:p.done+n], chunk[:n])
		}
		p.done += n
		p.taken++
		moved = true
		if p.taken%a.gives() == 0 {
			p.gave++
			if err := a.bounds.Hosts.Rail.Put(p.rank, 0, nil, a.line(me, slotsLine)); err != nil {
				return false, x.w.failAcross(p.rank, err)
			}
		}
	}
	return moved, nil
}

// head reads a message's head, and compares sizes. The error is that of a rank in another call.
func (a *across) head(x *exchange, p *remote, chunk []byte) error {
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(chunk[at:]) }
	me := a.bounds.Hosts.Rank
	if epoch := word(headEpoch); epoch != x.epoch {
		return x.w.failAcross(p.rank, fmt.Errorf("%w: it makes call %d, this is call %d", comm.ErrOutOfStep, epoch, x.epoch))
	}
	sent, expected := word(headSent), word(headExpected)
	if sent == math.MaxUint64 {
		part := word(headRefused + 24)
		x.failed = &kernels.SplitsError{Rank: p.rank, Peer: int(part >> 32), Send: part&1 != 0, Bytes: int64(word(headRefused)),
			Offset: int64(word(headRefused + 8)), Limit: int64(word(headRefused + 16)), Epoch: x.epoch}
		p.size, p.drop = 0, true
		return nil
	}
	if p.size = int64(sent); p.drop { // this rank has refused its splits
		return nil
	}
	var refused *kernels.SplitsError
	if errors.As(x.failed, &refused) {
		p.drop = sent != uint64(len(p.in))
		return nil
	}
	if expected != uint64(len(p.out)) {
		x.failed = &kernels.CountMismatchError{Src: me, Dst: p.rank, Sent: uint64(len(p.out)), Expected: expected, Epoch: x.epoch}
	}
	if sent != uint64(len(p.in)) {
		p.drop = true
		x.failed = &kernels.CountMismatchError{Src: p.rank, Dst: me, Sent: sent, Expected: uint64(len(p.in)), Epoch: x.epoch}
	}
	return nil
}

// restFor bounds the wait for what is still under way when a communicator closes.
const restFor = 10 * time.Second

// rest returns when all that was put here has landed, after which the memory may be given back. All ranks' launches have ended, also those
// that have failed. Each rank tells the others how many puts there were.
func (a *across) rest(e *Engine) error {
	me, rail := a.bounds.Hosts.Rank, a.bounds.Hosts.Rail
	for i := range a.peers {
		p := &a.peers[i]
		counts := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(p.first[:0], p.sent), p.gave)
		if err := rail.Put(p.rank, a.line(me, restLine)+8, counts, a.line(me, restLine)); err != nil {
			return fmt.Errorf("kernels: rank %d: %w", p.rank, err)
		}
	}
	end := time.Now().Add(restFor)
	for i := range a.peers {
		p := &a.peers[i]
		word := func(which int, at int64) uint64 { return e.word(e.space.Rank, a.line(p.rank, which)+at).Load() }
		for word(restLine, 0) == 0 || word(chunksLine, 0) < word(restLine, 8) || word(slotsLine, 0) < word(restLine, 16) {
			if e.abort.Load() != 0 {
				return nil // nothing lands any more
			}
			if time.Now().After(end) {
				return &comm.PeerError{Rank: p.rank, Op: "close", Err: comm.ErrTimeout}
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), end, comm.ErrTimeout)
	defer cancel()
	if err := rail.Flush(ctx); err != nil {
		return err
	}
	rail.Forget(a.offset, a.block.Offset)
	return nil
}

// idleAcross waits a little for a rank of another host. It sleeps at once: what brings the bytes needs a core, and rings.
func (w *waiter) idleAcross(rank int) error {
	w.polls++
	w.rank = rank
	if w.polls == 1 {
		w.since, w.told, w.looks = time.Now(), 0, false
	}
	waited := time.Since(w.since)
	switch {
	case w.over():
		return w.failAcross(rank, comm.ErrAborted)
	case waited > w.timeout:
		return w.failAcross(rank, fmt.Errorf("%w after %v: it is on another host", comm.ErrTimeout, w.timeout))
	}
	if log := w.e.space.Log; waited >= w.told+w.e.tellEvery && log != nil {
		w.told = waited
		log.Info("waiting", "rank", w.e.space.Name(w.e.space.Rank), "for", rank, "call", fmt.Sprintf("%d, %v", w.call.epoch, w.call.op),
			"waited", waited.Round(time.Second), "timeout", w.timeout)
	}
	w.port.waits.show(w)
	if !w.entered {
		w.entered = true
		w.doorbell = w.e.enter(&w.sleeper)
		return nil // the caller looks once more
	}
	w.e.sleep(&w.sleeper, w.doorbell, min(sleepFor, w.timeout-waited+time.Microsecond))
	w.doorbell = w.e.doorbell.Load()
	return nil
}

// failAcross is the error of a wait for a rank of another host, or of a put to it.
func (w *waiter) failAcross(rank int, err error) error {
	if errors.Is(err, comm.ErrAborted) {
		return w.fail(w.e.space.Rank, comm.ErrAborted)
	}
	return &comm.PeerError{Rank: rank, Op: w.call.op.String(), Epoch: w.call.epoch, Err: err}
}
