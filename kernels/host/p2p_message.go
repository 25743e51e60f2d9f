package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A message goes from a box of its sender at its receiver (PointBlock). A small one is copied there, and its sender is done. Of a larger one
// the box says where it lies, and its receiver reads it there: in the heap, in the same process, or with process_vm_readv, in one copy. Where
// it may not, the sender copies chunks to staging. So nobody but a rank itself writes its user's memory, and all that ranks share lies in the
// heap, which stays mapped whatever becomes of a process.
//
// Receives look at boxes for the least number with their tag. Those of one tag take turns in the order in which they began.
//
// A sender of a large message whose receiver is late copies it aside, and is done too. So ranks that all send first come to their receives.

// pair is what this rank keeps of one peer.
type pair struct {
	memory   shm.Process
	readable bool

	out      sync.Mutex // for the messages of this rank:
	posted   uint64     // number of the last one
	boxes    []outgoing
	staging  *end // the one that fills staging
	turns    uint64
	complain uint64 // complaints that have been told

	in      sync.Mutex // for the messages of the peer:
	pending []*end     // receives that have claimed none, the oldest first
	gone    uint64     // all messages up to this number have been claimed or withdrawn
	changed atomic.Uint64
}

// outgoing is one box, as its sender knows it.
type outgoing struct {
	number uint64 // of the message in it, 0 before the first
	owned  bool   // a launch waits for its end
	told   bool   // of an end that no launch has waited for
	aside  []byte // the message, when it was copied
}

// stage is how far a message is, on this rank.
type stage uint8

const (
	unposted stage = iota // or not claimed yet
	inBox                 // posted
	inStaging
	ended
)

// messaging is one launch of the kernel on one rank.
type messaging struct {
	f     *transfers
	e     *Engine
	a     *kernels.Messages
	w     waiter
	ends  []end
	begun bool
	since time.Time // of the first look that found nothing to do
}

// end is this rank's end of one message during a launch.
type end struct {
	m      *kernels.Message
	want   int // kernels.AnyRank, elsewhere, or the number of the peer in the space
	peer   int // number in the space; kernels.AnyRank until a receive from any rank has claimed a message
	rank   int // that of the peer in the group; kernels.AnyRank until then
	stage  stage
	box    int
	number uint64
	state  *atomic.Uint64
	err    error
	seen   look
	others []look // in the place of seen, by rank, of a receive from any
	// Staging: the turn, and how many chunks and bytes have been moved.
	turn, chunk uint64
	moved       int64
	// A peer on another host, and the message in a box there, or the one that comes.
	far    *farPair
	out    *sending
	in     *incoming
	wanted bool // the peer has been told
	listed bool // a receive from any rank is among those that wait
}

// look is what a receive has seen of a peer's messages when it found none for itself. It looks again when that has changed.
type look struct{ posted, changed uint64 }

// never is the look of a receive that has not looked yet.
var never = look{posted: ^uint64(0)}

func (x *messaging) run(p *port, f *transfers, a *kernels.Messages) error {
	x.f, x.e, x.a = f, p.e, a
	defer x.reset()
	e := x.e
	e.count(f.c.Calls())
	x.w.begin(p, x, p.call(a, f.c.Calls(), 0), a.Timeout)
	for i := range a.List {
		m := &a.List[i]
		peer, far := f.index(m.Peer)
		x.ends = append(x.ends, end{m: m, want: peer, peer: peer, rank: m.Peer, far: far, seen: never})
	}
	if f.across != nil {
		x.w.from = time.Now()
		x.w.crosses(f.across.fars)
		f.across.active.Add(1)
		defer f.across.active.Add(-1)
	}
	e.order(e.space.Rank)
	for i := range x.ends {
		if h := &x.ends[i]; h.m.Receive {
			x.enlist(h, false)
		}
	}
	for {
		moved, waits, posted := false, (*end)(nil), true
		for i := range x.ends {
			h := &x.ends[i]
			if h.stage == ended {
				continue
			}
			if h.m.Receive {
				moved = x.receive(h) || moved
			} else {
				moved = x.send(i) || moved
			}
			if h.stage != ended && waits == nil {
				waits = h
			}
			posted = posted && (h.m.Receive || h.stage != unposted)
		}
		if posted && !x.begun {
			if x.begun = true; a.Begun != nil {
				a.Begun()
			}
		}
		switch {
		case waits == nil:
			e.order(e.space.Rank)
			if slices.ContainsFunc(x.ends, func(h end) bool { return h.m.Receive && h.turn > 0 }) {
				a.Noted().Stage(flight.StagedUnreadable)
			}
			return x.outcome()
		case moved:
			x.since = time.Time{}
			x.w.busy()
			continue
		}
		if failed := x.failed(waits); failed != nil && failed.late(&a.Turn) {
			x.leave(waits, failed.error())
			continue
		}
		if err := x.idle(waits); err != nil {
			x.giveUp(waits, err)
			e.order(e.space.Rank)
			return x.outcome()
		}
	}
}

// failed is the wait for h's peer that has failed, nil for a message of any rank.
func (x *messaging) failed(h *end) *failedWait {
	switch {
	case h.rank == kernels.AnyRank:
		return nil
	case h.far != nil:
		return &h.far.failed
	}
	return &x.f.failed[h.peer]
}

// idle waits a little for h, or for anything else.
func (x *messaging) idle(h *end) error {
	x.w.rail = nil
	if h.far != nil && h.far.a.active.Load() == 1 && !slices.ContainsFunc(x.ends, func(h end) bool { return h.far == nil && h.stage != ended }) {
		x.w.rail = h.far.rail // nothing else may do what this rank waits for
	}
	return x.w.idle(x.peer(h))
}

// peer is whom an end waits for, or one of them.
func (x *messaging) peer(h *end) peer {
	switch {
	case h.far != nil:
		return h.far
	case h.peer != kernels.AnyRank:
		return x.e.near(h.peer)
	case x.f.across != nil:
		return anybody{x.f.across.pairs[0]}
	}
	return x.e.near((x.e.space.Rank + 1) % x.f.c.Size)
}

func (x *messaging) reset() {
	x.w.leave()
	clear(x.ends)
	x.ends = x.ends[:0]
	x.f, x.e, x.a, x.since, x.begun = nil, nil, nil, time.Time{}, false
}

// outcome is the errors of all messages, each once.
func (x *messaging) outcome() error {
	var errs []error
	for i := range x.ends {
		if err := x.ends[i].err; err != nil && !slices.Contains(errs, err) {
			errs = append(errs, err)
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// finish ends a message.
func (h *end) finish(err error) bool {
	h.stage, h.err = ended, err
	return true
}

// giveUp ends all messages when the wait for one has failed.
func (x *messaging) giveUp(first *end, err error) {
	why := x.w.fail(x.peer(first), err)
	for i := range x.ends {
		h := &x.ends[i]
		if h.stage == ended {
			continue
		}
		own := why
		if errors.Is(err, comm.ErrTimeout) {
			switch where := x.where(h); {
			case h.rank == kernels.AnyRank:
				own = fmt.Errorf("kernels: %s: %w (%s): %s", x.a.Operation(), comm.ErrTimeout, h, x.instead(h))
			case h != first || h.far != nil:
				own = &comm.PeerError{Rank: h.rank, Op: x.a.Operation(), Err: fmt.Errorf("%w%s (%s): %s", comm.ErrTimeout, where, h, x.instead(h))}
			}
		}
		if failed := x.failed(h); failed != nil {
			failed.fail(&x.a.Turn, own)
		}
		x.leave(h, own)
	}
}

// where says on which host the peer of a message is, if on another.
func (x *messaging) where(h *end) string {
	if h.far == nil {
		return ""
	}
	return fmt.Sprintf(" after %v: on host %d", x.a.Timeout, h.far.host)
}

// leave ends a message that this rank does not wait for any longer.
func (x *messaging) leave(h *end, why error) {
	switch {
	case h.m.Receive:
		x.forget(h, why)
	case h.far != nil:
		x.withdrawFar(h, why)
	default:
		x.withdraw(h, why)
	}
}

// String is what the message is.
func (h *end) String() string {
	way := "to"
	if h.m.Receive {
		way = "from"
	}
	if h.rank == kernels.AnyRank {
		return fmt.Sprintf("tag %d, %d bytes %s any rank", h.m.Tag, h.m.Buffer.Bytes, way)
	}
	return fmt.Sprintf("tag %d, %d bytes %s rank %d", h.m.Tag, h.m.Buffer.Bytes, way, h.rank)
}

// first is the message that the launch waits for, of those with a rank if there is one.
func (x *messaging) first(rank int) (found *end) {
	for i := range x.ends {
		if h := &x.ends[i]; h.stage != ended && (found == nil || h.rank == rank && found.m.Peer != rank) {
			found = h
		}
	}
	return found
}

func (x *messaging) sizes(rank int) string {
	if h := x.first(rank); h != nil {
		return h.String()
	}
	return ""
}

func (x *messaging) doing(rank int) string {
	if h := x.first(rank); h != nil && h.rank == rank {
		return x.instead(h)
	}
	return fmt.Sprintf("rank %d is busy, stopped, or makes other calls", rank)
}

// instead says what the peer of a message does instead.
func (x *messaging) instead(h *end) string {
	if h.far != nil {
		return x.insteadFar(h)
	}
	if h.rank == kernels.AnyRank {
		var list []string
		for p := range x.f.c.Size {
			if p != x.e.space.Rank && len(x.f.left(x.e, p, x.e.space.Rank)) > 0 {
				list = append(list, x.f.unreceived(x.e, p, x.e.space.Rank))
			}
		}
		if a := x.f.across; a != nil {
			for _, f := range a.pairs {
				f.mu.Lock()
				if left := f.unclaimed(); len(left) > 0 {
					list = append(list, unreceivedOf(f.rank, a.hosts.Rank, left))
				}
				f.mu.Unlock()
			}
		}
		if len(list) == 0 {
			return fmt.Sprintf("no rank has sent a message that rank %d has not received", x.e.space.Name(x.e.space.Rank))
		}
		return strings.Join(list[:min(len(list), mostNamed)], "; ")
	}
	if h.m.Receive {
		return x.f.unreceived(x.e, h.peer, x.e.space.Rank)
	}
	return x.f.wants(x.e, h.peer)
}

// wants says which message of this rank a peer waits for.
func (f *transfers) wants(e *Engine, peer int) string {
	at := f.c.Wanted(e.space.Rank)
	tag, bytes, name := e.word(peer, at+wantedTag).Load(), e.word(peer, at+wantedBytes).Load(), e.space.Name(peer)
	switch {
	case e.word(peer, at+wantedCount).Load() != 0:
		return fmt.Sprintf("rank %d waits for tag %d, %d bytes", name, tag, bytes)
	case tag|bytes != 0:
		return fmt.Sprintf("rank %d waits for no message of this rank; the last was tag %d, %d bytes", name, tag, bytes)
	}
	return fmt.Sprintf("rank %d waits for no message of this rank", name)
}

// mostNamed bounds the messages that an error lists.
const mostNamed = 4

// unreceived says which messages from src wait at dst.
func (f *transfers) unreceived(e *Engine, src, dst int) string {
	return unreceivedOf(e.space.Name(src), e.space.Name(dst), f.left(e, src, dst))
}

// left is the messages from src that wait at dst, in words.
func (f *transfers) left(e *Engine, src, dst int) (list []string) {
	for box := range f.c.Boxes {
		at, back := f.c.Box(src, box), ""
		switch phase := e.word(dst, at+boxState).Load() & phaseMask; {
		case phase == withdrawn:
			back = " (taken back)"
		case phase < offered || phase > offeredAgain:
			continue
		}
		list = append(list, fmt.Sprintf("tag %d, %d bytes%s", e.word(dst, at+boxTag).Load(), extent(e.word(dst, at+boxExtent).Load()).bytes(), back))
	}
	return list
}

// rest is the messages of this rank, and to it, that nobody has received and that no launch waits for. All launches of all ranks have
// ended.
func (f *transfers) rest(e *Engine) error {
	var errs []error
	if f.across != nil {
		errs = append(errs, f.across.rest(e))
	}
	me := e.space.Rank
	for p := range f.pairs {
		if p == me {
			continue
		}
		for _, way := range [2][2]int{{me, p}, {p, me}} {
			src, dst := way[0], way[1]
			if e.word(dst, f.c.Posted(src)).Load() == 0 {
				continue
			}
			for box := range f.c.Boxes {
				if phase := e.word(dst, f.c.Box(src, box)+boxState).Load() & phaseMask; phase < offered || phase > offeredAgain {
					continue
				}
				wanted := ""
				if src == me {
					wanted = "; " + f.wants(e, dst)
				}
				errs = append(errs, &comm.PeerError{Rank: e.space.Name(p), Op: "close", Err: fmt.Errorf("%w: %s%s", comm.ErrMismatch, f.unreceived(e, src, dst), wanted)})
				break
			}
		}
	}
	return errors.Join(errs...)
}
