package host

import (
	"errors"
	"fmt"
	"structs"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// headBytes is the size of a head, which a bundle has for each rank of the host that it goes to.
const headBytes = 64

// head is that of a message.
type head struct {
	_        structs.HostLayout
	Epoch    uint64
	Sent     extent
	Expected extent
	At       int64 // where the message is in the bundle, 0 if it is elsewhere
	Place    int64 // where the message that is expected may be put, plus 1; 0 is in the ring
	_        [3]uint64
}

// refusal is that of a rank that refuses its splits, as head.Sent says by being refused.
type refusal struct {
	_                    structs.HostLayout
	Epoch                uint64
	Sent                 extent
	Bytes, Offset, Limit int64
	Peer, Send           int32
	_                    [2]uint64
}

// bundleBytes is the most a bundle has.
func (a *across) bundleBytes() int64 {
	return kernels.AlignUp(int64(a.perHost)*(headBytes+kernels.AlignUp(a.bounds.BundleBytes, headBytes)), kernels.LineBytes)
}

// bundleAt is where the bundle of a rank lands on a host, in the segment of the rank of equal local rank.
func (a *across) bundleAt(host, from int, epoch uint64) int64 {
	slots := int64(len(a.others)*a.bounds.Slots) * a.bounds.SlotBytes
	return a.slots() + slots + (a.number(host, from)/int64(a.perHost)*2+int64(epoch%2))*a.bundleBytes()
}

// send sends a host its bundle. Small messages are on their way then.
func (a *across) send(x *exchange, host int, why *kernels.SplitsError) error {
	ranks := a.of[host]
	if a.bundles[host] == nil {
		a.bundles[host] = make([]byte, a.bundleBytes())
	}
	b, end := a.bundles[host], int64(len(ranks)*headBytes)
	clear(b[:end])
	for i, rank := range ranks {
		p := &a.peers[a.index(rank)]
		bytes := b[i*headBytes:][:headBytes]
		if why != nil {
			h := shm.Of[refusal](bytes)
			h.Epoch, h.Sent, h.Bytes, h.Offset, h.Limit, h.Peer = x.epoch, refused, why.Bytes, why.Offset, why.Limit, int32(why.Peer)
			if why.Send {
				h.Send = 1
			}
			continue
		}
		h, n := shm.Of[head](bytes), int64(len(p.out))
		h.Epoch, h.Sent, h.Expected = x.epoch, p.sends(x), p.expects(x)
		if at := x.a.Dst.Place + x.a.Routes.RecvOffsets[rank]; x.inPlace() && at+int64(len(p.in)) <= a.hosts.Limit {
			h.Place = at + 1
		}
		if n > 0 && n <= a.bounds.BundleBytes {
			h.At = end
			copy(b[end:], p.out)
			p.pushed = n
			end += kernels.AlignUp(n, headBytes)
		}
	}
	return x.w.put(a.far(ranks[a.me.place]), a.bundleAt(host, a.me.rank, x.epoch), b[:end], bundlesWord)
}

// read reads the rank's head once its bundle is there, and the message if it is in it. The error is that of a rank in another call.
func (a *across) read(x *exchange, p *remote) (moved bool, err error) {
	if p.size >= 0 || p.atGate(bundlesWord).Load() < x.epoch {
		return false, nil
	}
	rank := p.rank
	from := x.e.space.Range(p.place, a.bundleAt(a.me.host, rank, x.epoch), a.bundleBytes())
	bytes := from[a.me.place*headBytes:][:headBytes]
	h := shm.Of[head](bytes)
	if h.Epoch != x.epoch {
		return false, x.w.fail(p, fmt.Errorf("%w: it makes call %d, this is call %d", comm.ErrOutOfStep, h.Epoch, x.epoch))
	}
	if h.Sent == refused {
		why := shm.Of[refusal](bytes)
		x.failed = &kernels.SplitsError{Rank: rank, Peer: int(why.Peer), Send: why.Send != 0, Bytes: why.Bytes, Offset: why.Offset, Limit: why.Limit, Epoch: x.epoch}
		p.size, p.pushed = 0, int64(len(p.out)) // it takes nothing
		return true, nil
	}
	if a.refused {
		p.size = 0 // the sender sees that, and sends nothing more
		return true, nil
	}
	p.size = h.Sent.bytes()
	wanted := a.compare(x, p, h.Sent, h.Expected)
	switch {
	case h.At > 0:
		if wanted {
			x.copy(p.in, from[h.At:][:p.size])
		}
		p.done = p.size
	case !wanted:
		p.way = dropped
	case x.inPlace() && x.a.Dst.Place+x.a.Routes.RecvOffsets[rank]+p.size <= a.hosts.Limit:
		p.way = inPlace
	default:
		p.way = ringed
	}
	if p.goes = ringed; h.Place > 0 && p.sends(x).fits(h.Expected) {
		p.goes, p.at = inPlace, h.Place-1
	}
	return true, nil
}

// sends and expects are the extents of the messages to the rank and from it.
func (p *remote) sends(x *exchange) extent   { return extentOf(int64(len(p.out)), x.a.Src.Elements) }
func (p *remote) expects(x *exchange) extent { return extentOf(int64(len(p.in)), x.a.Dst.Elements) }

// compare compares what a head says with what this rank makes of the pair, and reports whether the message that comes is wanted.
func (a *across) compare(x *exchange, p *remote, sent, expected extent) (wanted bool) {
	rank, wanted := p.rank, sent.fits(p.expects(x))
	var refused *kernels.SplitsError
	if errors.As(x.failed, &refused) {
		return wanted
	}
	if out := p.sends(x); !out.fits(expected) {
		x.failed = out.miscounted(a.me.rank, rank, expected, x.epoch)
	}
	if !wanted {
		x.failed = sent.miscounted(rank, a.me.rank, p.expects(x), x.epoch)
	}
	return wanted
}
