package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// bundle is what this rank sends to a host in a call.
type bundle struct {
	out  []byte // of this call
	sent uint64
}

// The words of a head.
const (
	headEpoch    = 0
	headSent     = 8
	headExpected = 16
	headAt       = 24 // where the message is in the bundle, 0 if it is elsewhere
	headPlace    = 32 // where the message that is expected may be put, plus 1; 0 is in the ring
	headRefused  = 24 // of a rank that refuses its splits: bytes, offset, limit and part of them
	headBytes    = 64
)

// bundleBytes is the most a bundle has.
func (a *across) bundleBytes() int64 {
	return kernels.AlignUp(int64(a.perHost)*(headBytes+kernels.AlignUp(a.bounds.BundleBytes, headBytes)), kernels.LineBytes)
}

// bundleAt is where the bundle of a rank lands on a host, in the segment of the rank of equal local rank.
func (a *across) bundleAt(host, from int, epoch uint64) int64 {
	slots := int64(len(a.others)*a.bounds.Slots) * a.bounds.SlotBytes
	return a.slots() + slots + (a.number(host, from)/int64(a.perHost)*2+int64(epoch%2))*a.bundleBytes()
}

// sentTo is the number of bundles that have been put to a rank.
func (a *across) sentTo(rank int) uint64 {
	if slices.Contains(a.railPeers, rank) {
		return a.bundles[a.hosts.Host[rank]].sent
	}
	return 0
}

// send sends a host its bundle. Small messages are on their way then.
func (a *across) send(x *exchange, host int, refused *kernels.SplitsError) error {
	h, b, ranks := a.hosts, &a.bundles[host], a.of[host]
	if b.out == nil {
		b.out = make([]byte, a.bundleBytes())
	}
	clear(b.out[:len(ranks)*headBytes])
	end := int64(len(ranks) * headBytes)
	for i, rank := range ranks {
		p := &a.peers[a.to[rank]]
		head := b.out[i*headBytes:][:headBytes]
		put := func(at int, v uint64) { binary.LittleEndian.PutUint64(head[at:], v) }
		put(headEpoch, x.epoch)
		if refused != nil {
			part := uint64(refused.Peer) << 32
			if refused.Send {
				part |= 1
			}
			put(headSent, math.MaxUint64)
			for i, v := range [...]uint64{uint64(refused.Bytes), uint64(refused.Offset), uint64(refused.Limit), part} {
				put(headRefused+8*i, v)
			}
			continue
		}
		n := int64(len(p.out))
		put(headSent, uint64(n))
		put(headExpected, uint64(len(p.in)))
		if at := x.a.Dst.Place + x.a.Routes.RecvOffsets[rank]; x.inPlace() && at+int64(len(p.in)) <= h.Limit {
			put(headPlace, uint64(at+1))
		}
		if n > 0 && n <= a.bounds.BundleBytes {
			put(headAt, uint64(end))
			copy(b.out[end:], p.out)
			p.pushed = n
			end += kernels.AlignUp(n, headBytes)
		}
	}
	b.sent++
	return a.put(x, ranks[a.local], a.bundleAt(host, h.Rank, x.epoch), b.out[:end], bundlesWord)
}

// read reads the rank's head once its bundle is there, and the message if it is in it. The error is that of a rank in another call.
func (a *across) read(x *exchange, p *remote) (moved bool, err error) {
	if p.size >= 0 {
		return false, nil
	}
	h, gate := a.hosts, a.mate(p.rank) // whose segment it is in
	if x.e.word(gate, a.line(a.host, p.rank, bundlesWord)).Load() < x.epoch {
		return false, nil
	}
	from := x.e.space.Range(gate, a.bundleAt(a.host, p.rank, x.epoch), a.bundleBytes())
	head := from[a.local*headBytes:][:headBytes]
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(head[at:]) }
	if epoch := word(headEpoch); epoch != x.epoch {
		return false, x.w.failAcross(p.rank, fmt.Errorf("%w: it makes call %d, this is call %d", comm.ErrOutOfStep, epoch, x.epoch))
	}
	if word(headSent) == math.MaxUint64 {
		part := word(headRefused + 24)
		x.failed = &kernels.SplitsError{Rank: p.rank, Peer: int(part >> 32), Send: part&1 != 0, Bytes: int64(word(headRefused)),
			Offset: int64(word(headRefused + 8)), Limit: int64(word(headRefused + 16)), Epoch: x.epoch}
		p.size, p.pushed = 0, int64(len(p.out)) // it takes nothing
		return true, nil
	}
	if a.refused {
		p.size = 0 // the sender sees that, and sends nothing more
		return true, nil
	}
	p.size = int64(word(headSent))
	wanted := a.compare(x, p, word(headSent), word(headExpected))
	at, place := int64(word(headAt)), int64(word(headPlace))-1
	switch {
	case at > 0:
		if wanted {
			x.copy(p.in, from[at:][:p.size])
		}
		p.done = p.size
	case !wanted:
		p.way = dropped
	case x.inPlace() && x.a.Dst.Place+x.a.Routes.RecvOffsets[p.rank]+p.size <= h.Limit:
		p.way = inPlace
	default:
		p.way = ringed
	}
	if p.goes = ringed; place >= 0 && word(headExpected) == uint64(len(p.out)) {
		p.goes, p.place = inPlace, place
	}
	return true, nil
}

// compare compares what a head says with what this rank makes of the pair, and reports whether the message that comes is wanted.
func (a *across) compare(x *exchange, p *remote, sent, expected uint64) (wanted bool) {
	me, wanted := a.hosts.Rank, sent == uint64(len(p.in))
	var refused *kernels.SplitsError
	if errors.As(x.failed, &refused) {
		return wanted
	}
	if expected != uint64(len(p.out)) {
		x.failed = &kernels.CountMismatchError{Src: me, Dst: p.rank, Sent: uint64(len(p.out)), Expected: expected, Epoch: x.epoch}
	}
	if !wanted {
		x.failed = &kernels.CountMismatchError{Src: p.rank, Dst: me, Sent: sent, Expected: uint64(len(p.in)), Epoch: x.epoch}
	}
	return wanted
}
