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
	"github.com/switchyard-moe/switchyard/internal/rails"
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

// pair is what this rank keeps of one of its host.
type pair struct {
	*near
	f        *transfers
	failed   failedWait
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
	with   partner // nil until a receive from any rank has claimed a message
	stage  stage
	box    int
	number uint64
	state  *atomic.Uint64
	err    error
	seen   look
	others []look // in the place of seen, by the number of the peer in the space, of a receive from any
	listed bool   // a receive is among those that wait
	// Staging: the turn, and how many chunks and bytes have been moved.
	turn, chunk uint64
	moved       int64
	// With a partner on another host: the message in a box there, or the one that comes.
	out    *sending
	in     *incoming
	wanted bool // it has been told
}

// any reports whether a receive takes a message of any rank.
func (h *end) any() bool { return h.m.Peer == kernels.AnyRank }

// rank is the partner's, kernels.AnyRank as long as there is none.
func (h *end) rank() int {
	if h.with == nil {
		return kernels.AnyRank
	}
	return h.with.id().rank
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
		x.ends = append(x.ends, end{m: m, with: f.partner(m.Peer), seen: never})
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
			x.enlist(h, false, nil)
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
				moved = h.with.send(x, i) || moved
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
	if h.with == nil {
		return nil
	}
	return h.with.failing()
}

func (pr *pair) failing() *failedWait { return &pr.failed }

// idle waits a little for h, or for anything else.
func (x *messaging) idle(h *end) error {
	x.w.rail = x.alone()
	return x.w.idle(x.peer(h))
}

// alone is the rail on which a rank may sleep that waits for all that has not ended, nil if there is none.
func (x *messaging) alone() (rail rails.Rail) {
	for i := range x.ends {
		switch h := &x.ends[i]; {
		case h.stage == ended:
		case h.with == nil:
			return nil
		default:
			if rail = h.with.alone(); rail == nil {
				return nil
			}
		}
	}
	return rail
}

func (*pair) alone() rails.Rail { return nil }

// peer is whom an end waits for, or all that may send it something.
func (x *messaging) peer(h *end) peer {
	if h.with == nil {
		return anybody{x.f.anyone, x.f}
	}
	return h.with
}

// anybody is whichever rank a receive from any rank waits for: the silence is that of the one that was heard last.
type anybody struct {
	partner
	f *transfers
}

func (b anybody) silence(w *waiter, waited time.Duration) time.Duration {
	least := waited
	for _, p := range b.f.partners {
		least = min(least, p.silence(w, waited))
	}
	return least
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
			if h.with == nil {
				own = fmt.Errorf("kernels: %s: %w (%s): %s", x.a.Operation(), comm.ErrTimeout, h, x.instead(h))
			} else if where := h.with.where(x); h != first || where != "" {
				own = &comm.PeerError{Rank: h.rank(), Op: x.a.Operation(), Err: fmt.Errorf("%w%s (%s): %s", comm.ErrTimeout, where, h, x.instead(h))}
			}
		}
		if failed := x.failed(h); failed != nil {
			failed.fail(&x.a.Turn, own)
		}
		x.leave(h, own)
	}
}

func (*pair) where(*messaging) string { return "" }

// leave ends a message that this rank does not wait for any longer.
func (x *messaging) leave(h *end, why error) {
	if h.m.Receive {
		x.forget(h, why)
	} else {
		h.with.withdraw(x, h, why)
	}
}

// String is what the message is.
func (h *end) String() string {
	way := "to"
	if h.m.Receive {
		way = "from"
	}
	if h.with == nil {
		return fmt.Sprintf("tag %d, %d bytes %s any rank", h.m.Tag, h.m.Buffer.Bytes, way)
	}
	return fmt.Sprintf("tag %d, %d bytes %s rank %d", h.m.Tag, h.m.Buffer.Bytes, way, h.rank())
}

// first is the message that the launch waits for, of those with a rank if there is one.
func (x *messaging) first(rank int) (found *end) {
	for i := range x.ends {
		if h := &x.ends[i]; h.stage != ended && (found == nil || h.rank() == rank && found.m.Peer != rank) {
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
	if h := x.first(rank); h != nil && h.rank() == rank {
		return x.instead(h)
	}
	return fmt.Sprintf("rank %d is busy, stopped, or makes other calls", rank)
}

// instead says what the peer of a message does instead.
func (x *messaging) instead(h *end) string {
	me := x.e.space.Name(x.e.space.Rank)
	if h.with == nil {
		var list []string
		for _, p := range x.f.partners {
			if left := p.unreceived(); len(left) > 0 {
				list = append(list, unreceivedOf(p.id().rank, me, left))
			}
		}
		if len(list) == 0 {
			return fmt.Sprintf("no rank has sent a message that rank %d has not received", me)
		}
		return strings.Join(list[:min(len(list), mostNamed)], "; ")
	}
	if h.m.Receive {
		return unreceivedOf(h.rank(), me, h.with.unreceived())
	}
	return h.with.wanting()
}

func (pr *pair) unreceived() []string { return pr.f.left(pr.e, pr.place, pr.e.space.Rank) }

func (pr *pair) wanting() string { return pr.f.wants(pr.e, pr.place) }

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
		f.pairs[p].clear()
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
