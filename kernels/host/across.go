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

// across is the side of a call with the ranks of other hosts.
type across struct {
	hostRanks
	bounds  *kernels.ExchangeBounds
	offset  int64
	block   ExchangeBlock // of this host, between the lines and the slots
	peers   []remote      // the ranks of other hosts, in their order
	bundles [][]byte      // by host, of this call
	refused bool          // this rank refuses its splits of this call
	shared  bool          // large messages of this call take turns with those of other ranks of this host
	waits   bool          // this rank waits for other hosts alone
}

// remote is a rank of another host, in a call.
type remote struct {
	far
	taken  uint64 // of its chunks, out of the ring,
	landed uint64 // and in the output of this rank, before this call

	out    []byte // of this call
	in     []byte
	pushed int64
	size   int64    // of the message that comes, -1 before its head has
	way    wayCross // in which it comes,
	goes   wayCross // and this rank's message goes
	at     int64    // in the receiver's output
	done   int64    // how much of the message that comes has been taken
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
// slots.
const (
	bundlesWord = movesWord + 1 + iota
	placedWord
	chunksWord
	slotsWord
	exchangeWords
)

func newAcross(c *kernels.ExchangeBounds, offset int64) *across {
	a := &across{hostRanks: newHostRanks(c.Hosts), bounds: c, offset: offset}
	inner := *c
	inner.Size = a.perHost
	a.block = ExchangeBlock{&inner, offset + int64(len(a.others))*kernels.LineBytes}
	return a
}

// line is that of rank from in the segments of a host.
func (a *across) line(host, from int) int64 {
	return a.offset + a.number(host, from)*kernels.LineBytes
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
	a.bundles = make([][]byte, len(a.of))
	a.peers = make([]remote, len(a.others))
	for i := range a.peers {
		a.openFar(&a.peers[i].far, e, exchangeWords, a.line)
	}
	e.ringMates()
}

func (a *across) begin(x *exchange, refused *kernels.SplitsError) error {
	r := x.a.Routes
	a.refused, a.shared, a.waits = refused != nil, false, false
	x.w.asleep, x.w.from = true, time.Now()
	x.w.crosses(a.fars)
	for i := range a.peers {
		p := &a.peers[i]
		rank := p.rank
		p.out, p.in, p.pushed, p.size, p.way, p.goes, p.at, p.done = nil, nil, 0, -1, bundled, bundled, 0, 0
		if refused == nil {
			p.out = x.a.Src.Mem[r.SendOffsets[rank]:][:r.SendBytes[rank]]
			p.in = x.a.Dst.Mem[r.RecvOffsets[rank]:][:r.RecvBytes[rank]]
			a.shared = a.shared || a.perHost > 1 && max(r.SendBytes[rank], r.RecvBytes[rank]) > a.bounds.BundleBytes
		}
	}
	if a.shared {
		a.hosts.Rail.Resume()
	}
	for _, rank := range r.Order {
		if slices.Contains(a.railPeers, int(rank)) {
			if err := a.send(x, a.ranks[rank].host, refused); err != nil {
				return err
			}
		}
	}
	return nil
}

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
		moved = moved || read || pushed || took
	}
	return moved, nil
}

// ended reports whether the rank has done its part.
func (p *remote) ended() bool {
	return p.size >= 0 && p.done == p.size && p.pushed == int64(len(p.out))
}

// begun: something of its part of the call has come.
func (p *remote) begun(*waiter) bool { return p.size >= 0 }

// late is the rank that has been silent for longest.
func (a *across) late(x *exchange) peer {
	var late *remote
	for i := range a.peers {
		if p := &a.peers[i]; !p.ended() {
			if p.hear(); late == nil || p.heard.Before(late.heard) {
				late = p
			}
		}
	}
	if late == nil {
		return nil
	}
	if !a.waits { // until now for ranks of this host
		a.waits, x.w.from = true, time.Now()
	}
	x.w.rail = a.rail()
	return late
}

// rail is the rail if this rank sleeps on that: something that it waits for comes by it, and nothing hangs in the meantime on what other ranks
// of its host bring. Elsewhere it is nil.
func (a *across) rail() rails.Rail {
	for i := range a.peers {
		if p := &a.peers[i]; !a.shared && !p.ended() && (p.size >= 0 || p.place == a.me.place) {
			return a.hosts.Rail
		}
	}
	return nil
}

// push sends chunks while there is room for them. It sends none before the receiver has said where to.
func (a *across) push(x *exchange, p *remote) (moved bool, err error) {
	all := int64(len(p.out))
	if p.size < 0 {
		return false, nil
	}
	if p.goes == inPlace {
		for ; p.pushed < all; moved = true {
			chunk := p.out[p.pushed:min(p.pushed+putBytes, all)]
			if err := x.w.put(&p.far, p.at+p.pushed, chunk, placedWord); err != nil {
				return false, err
			}
			p.pushed += int64(len(chunk))
		}
		return moved, nil
	}
	room := p.count(slotsWord)*a.gives() + uint64(a.bounds.Slots)
	for ; p.pushed < all && p.puts[chunksWord] < room; moved = true {
		chunk := p.out[p.pushed:min(p.pushed+a.bounds.SlotBytes, all)]
		if err := x.w.put(&p.far, a.slot(p.host, a.me.rank, p.puts[chunksWord]), chunk, chunksWord); err != nil {
			return false, err
		}
		p.pushed += int64(len(chunk))
	}
	return moved, nil
}

// take takes in what has come of the rank's message.
func (a *across) take(x *exchange, p *remote) (moved bool, err error) {
	switch {
	case p.size < 0 || p.done == p.size:
		return false, nil
	case p.way == inPlace:
		n := int64(p.count(placedWord) - p.landed)
		if moved = min(n*putBytes, p.size) > p.done; moved {
			x.w.moved(min(n*putBytes, p.size) - p.done)
			p.done = min(n*putBytes, p.size)
		}
		if p.done == p.size {
			p.landed += uint64(n)
		}
		return moved, nil
	}
	landed := p.count(chunksWord)
	for p.taken < landed && p.done < p.size {
		chunk := x.e.space.Range(a.me.place, a.slot(a.me.host, p.rank, p.taken), a.bounds.SlotBytes)
		n := min(a.bounds.SlotBytes, p.size-p.done)
		if p.way != dropped {
			x.copy(p.in[p.done:p.done+n], chunk[:n])
		}
		p.done += n
		p.taken++
		moved = true
		if p.taken%a.gives() == 0 {
			if err := x.w.put(&p.far, 0, nil, slotsWord); err != nil {
				return false, err
			}
		}
	}
	return moved, nil
}
