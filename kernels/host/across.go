package host

import (
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A call sends a bundle to each other host: to the rank of equal local rank there, and all ranks of that host read it in that rank's
// segment. A bundle has a head for each of them, which says how much its sender sends and how much it expects itself: so both ranks of a
// pair know of a disagreement from this call, and it costs nothing. Behind the heads are the small messages. The next but one call of the
// sender writes over a bundle. Before that it has heard from all readers in the call between, so they are through with it.
//
// A larger message goes straight to its rank: to its place in the output, which the receiver's head names, or through a ring of slots in the
// receiver's segment. One that its receiver does not want is taken out of the ring and dropped.
//
// Puts are counted on for ever. The rail counts bundles, chunks in place and chunks in the ring in words of the receiver. The receiver
// gives slots back in halves of the ring, by puts without bytes, which the rail counts in a word of the sender.

// across is what a communicator has for ranks of other hosts.
type across struct {
	hostRanks
	bounds  *kernels.ExchangeBounds
	offset  int64
	block   ExchangeBlock // of this host, between the lines and the slots
	peers   []remote
	bundles []bundle // by host
	refused bool     // this rank refuses its splits of this call
	shared  bool     // large messages of this call take turns with those of other ranks of this host
	to      []int    // index in peers by rank, -1 for ranks of this host
}

// remote is a rank of another host.
type remote struct {
	rank, host int

	sent   uint64 // chunks into the ring,
	placed uint64 // and into its output
	taken  uint64 // of its chunks, out of the ring,
	landed uint64 // and in the output of this rank, before this call
	gave   uint64 // puts that give slots back

	out    []byte // of this call
	in     []byte
	pushed int64
	size   int64    // of the message that comes, -1 before its head has
	way    wayCross // in which it comes,
	goes   wayCross // and this rank's message goes
	place  int64    // in the receiver's output
	done   int64    // how much of the message that comes has been taken
	heard  time.Time
}

// wayCross is how a message gets to another host.
type wayCross uint8

const (
	bundled wayCross = iota
	ringed
	inPlace
	dropped // through the ring, and nobody wants it
)

// putBytes is how much of a message one put brings to its place.
const putBytes = 256 << 10

// The words of a rank's line in a segment: how many of its bundles, chunks in place and chunks in the ring are here, and how many puts for
// slots. Behind them are those of Engine.rest.
const (
	bundlesWord = 8 * iota
	placedWord
	chunksWord
	slotsWord
)

func newAcross(c *kernels.ExchangeBounds, offset int64) *across {
	a := &across{hostRanks: newHostRanks(c.Hosts), bounds: c, offset: offset}
	inner := *c
	inner.Size = a.perHost
	a.block = ExchangeBlock{&inner, offset + int64(len(a.others))*kernels.LineBytes}
	return a
}

// line is a word of rank from in the segments of a host.
func (a *across) line(host, from int, word int64) int64 {
	return a.offset + a.number(host, from)*kernels.LineBytes + word
}

// slots is where the rings begin.
func (a *across) slots() int64 { return a.block.Offset + a.block.Bytes() }

// slot is where chunk k of rank from lands on a host.
func (a *across) slot(host, from int, k uint64) int64 {
	slots := uint64(a.bounds.Slots)
	return a.slots() + (a.number(host, from)*int64(slots)+int64(k%slots))*a.bounds.SlotBytes
}

// gives is how many slots one put gives back.
func (a *across) gives() uint64 { return uint64(max(1, a.bounds.Slots/2)) }

func (a *across) layout() kernels.Layout {
	slots := int64(len(a.others)*a.bounds.Slots) * a.bounds.SlotBytes
	bundles := int64(len(a.of)-1) * 2 * a.bundleBytes()
	return kernels.Layout{Bytes: a.slots() + slots + bundles - a.offset, Zero: a.block.Offset + a.block.ControlBytes() - a.offset}
}

func (a *across) open(e *Engine) {
	a.hostRanks.open(e)
	a.to, a.bundles = make([]int, a.bounds.Size), make([]bundle, len(a.of))
	for r := range a.to {
		a.to[r] = -1
	}
	for _, r := range a.others {
		a.to[r] = len(a.peers)
		a.peers = append(a.peers, remote{rank: r, host: a.hosts.Host[r]})
	}
}

// index is the number of a rank in the space, -1 where it is on another host.
func (f *exchanges) index(rank int) int {
	if f.across == nil {
		return rank
	}
	return f.across.at[rank]
}

// begin starts the call. refused are this rank's splits if it refuses them: then it sends nothing but that, and takes nothing.
func (a *across) begin(x *exchange, refused *kernels.SplitsError) error {
	r, now := x.a.Routes, time.Now()
	a.refused, a.shared = refused != nil, false
	for i := range a.peers {
		p := &a.peers[i]
		p.out, p.in, p.pushed, p.size, p.way, p.goes, p.place, p.done, p.heard = nil, nil, 0, -1, bundled, bundled, 0, 0, now
		if refused == nil {
			p.out = x.a.Src.Mem[r.SendOffsets[p.rank]:][:r.SendBytes[p.rank]]
			p.in = x.a.Dst.Mem[r.RecvOffsets[p.rank]:][:r.RecvBytes[p.rank]]
			a.shared = a.shared || a.perHost > 1 && max(r.SendBytes[p.rank], r.RecvBytes[p.rank]) > a.bounds.BundleBytes
		}
	}
	if a.shared {
		a.hosts.Rail.Resume()
	}
	for _, rank := range r.Order {
		if slices.Contains(a.railPeers, int(rank)) {
			if err := a.send(x, a.hosts.Host[rank], refused); err != nil {
				return err
			}
		}
	}
	return nil
}

// pass sends what there is room for and takes what has come. It reports whether that is anything.
func (a *across) pass(x *exchange) (moved bool, err error) {
	for i := range a.peers {
		p := &a.peers[i]
		read, err := a.read(x, p)
		if err != nil {
			return false, err
		}
		pushed, err := a.push(x, p)
		if err != nil {
			return false, err
		}
		took, err := a.take(x, p)
		if err != nil {
			return false, err
		}
		if read || pushed || took {
			moved, p.heard = true, time.Now()
		}
	}
	return moved, nil
}

// ended reports whether the rank has done its part.
func (p *remote) ended() bool {
	return p.size >= 0 && p.done == p.size && p.pushed == int64(len(p.out))
}

// late is the rank that has been silent for longest, of those that have not done their part; nil if all have.
func (a *across) late() (late *remote) {
	for i := range a.peers {
		if p := &a.peers[i]; !p.ended() && (late == nil || p.heard.Before(late.heard)) {
			late = p
		}
	}
	return late
}

// finish goes on until all have done their parts, and the memory that was sent is free.
func (a *across) finish(x *exchange) error {
	now := time.Now()
	for i := range a.peers {
		a.peers[i].heard = now // this rank has waited for others
	}
	for {
		moved, err := a.pass(x)
		if err != nil {
			return err
		}
		late := a.late()
		if late == nil {
			return x.w.flush(a.hosts.Rail)
		}
		if moved {
			x.w.busy()
		} else {
			x.w.absent = late.size < 0 // nothing of its part of the call has come
			if err := x.w.idleAcross(late.rank, late.heard, a.rail()); err != nil {
				return err
			}
		}
	}
}

// rail is the rail if this rank sleeps on that: something that it waits for comes by it, and nothing hangs in the meantime on what other ranks
// of its host bring. Elsewhere it is nil.
func (a *across) rail() rails.Rail {
	for i := range a.peers {
		if p := &a.peers[i]; !a.shared && !p.ended() && (p.size >= 0 || slices.Contains(a.railPeers, p.rank)) {
			return a.hosts.Rail
		}
	}
	return nil
}

// put sends bytes to a place of a rank.
func (a *across) put(x *exchange, rank int, place int64, src []byte, word int64) error {
	return x.w.putAcross(a.hosts.Rail, rank, place, src, a.line(a.hosts.Host[rank], a.hosts.Rank, word))
}

// push sends chunks while there is room for them. It sends none before the receiver has said where to.
func (a *across) push(x *exchange, p *remote) (moved bool, err error) {
	me, all := a.hosts.Rank, int64(len(p.out))
	if p.size < 0 {
		return false, nil
	}
	if p.goes == inPlace {
		for ; p.pushed < all; moved = true {
			chunk := p.out[p.pushed:min(p.pushed+putBytes, all)]
			if err := a.put(x, p.rank, p.place+p.pushed, chunk, placedWord); err != nil {
				return false, err
			}
			p.pushed += int64(len(chunk))
			p.placed++
		}
		return moved, nil
	}
	room := x.e.word(x.e.space.Rank, a.line(a.host, p.rank, slotsWord)).Load()*a.gives() + uint64(a.bounds.Slots)
	for ; p.pushed < all && p.sent < room; moved = true {
		chunk := p.out[p.pushed:min(p.pushed+a.bounds.SlotBytes, all)]
		if err := a.put(x, p.rank, a.slot(p.host, me, p.sent), chunk, chunksWord); err != nil {
			return false, err
		}
		p.pushed += int64(len(chunk))
		p.sent++
	}
	return moved, nil
}

// take takes in what has come of the rank's message.
func (a *across) take(x *exchange, p *remote) (moved bool, err error) {
	e, me := x.e, x.e.space.Rank
	switch {
	case p.size < 0 || p.done == p.size:
		return false, nil
	case p.way == inPlace:
		n := int64(e.word(me, a.line(a.host, p.rank, placedWord)).Load() - p.landed)
		if moved = min(n*putBytes, p.size) > p.done; moved {
			x.w.moved(min(n*putBytes, p.size) - p.done)
			p.done = min(n*putBytes, p.size)
		}
		if p.done == p.size {
			p.landed += uint64(n)
		}
		return moved, nil
	}
	landed := e.word(me, a.line(a.host, p.rank, chunksWord)).Load()
	for p.taken < landed && p.done < p.size {
		chunk := e.space.Range(me, a.slot(a.host, p.rank, p.taken), a.bounds.SlotBytes)
		n := min(a.bounds.SlotBytes, p.size-p.done)
		if p.way != dropped {
			x.copy(p.in[p.done:p.done+n], chunk[:n])
		}
		p.done += n
		p.taken++
		moved = true
		if p.taken%a.gives() == 0 {
			p.gave++
			if err := a.put(x, p.rank, 0, nil, slotsWord); err != nil {
				return false, err
			}
		}
	}
	return moved, nil
}

// rest returns when all that was put here has landed.
func (a *across) rest(e *Engine) error {
	h := a.hosts
	counts := make([]restCount, len(a.peers))
	for i := range a.peers {
		p := &a.peers[i]
		counts[i] = restCount{p.rank, a.line(p.host, h.Rank, 0), a.line(a.host, p.rank, 0), []uint64{a.sentTo(p.rank), p.placed, p.sent, p.gave}}
	}
	over, err := e.rest(h.Rail, counts)
	if over {
		h.Rail.Forget(a.offset, a.block.Offset)
	}
	return err
}
