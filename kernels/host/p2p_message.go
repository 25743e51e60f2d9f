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
	since time.Time // of the first look that found nothing to do
}

// end is this rank's end of one message during a launch.
type end struct {
	m      *kernels.Message
	stage  stage
	box    int
	number uint64
	state  *atomic.Uint64
	err    error
	// A receive that has found nothing looks again when one of these has changed.
	seenPosted, seenChanged uint64
	// Staging: the turn, and how many chunks and bytes have been moved.
	turn, chunk uint64
	moved       int64
}

func (x *messaging) run(p *port, f *transfers, a *kernels.Messages) error {
	x.f, x.e, x.a = f, p.e, a
	defer x.reset()
	e := x.e
	e.count(f.c.Calls())
	x.w.begin(p, x, p.call(a, f.c.Calls(), 0), a.Timeout)
	for i := range a.List {
		x.ends = append(x.ends, end{m: &a.List[i], seenPosted: ^uint64(0)})
	}
	e.order(e.space.Rank)
	for i := range x.ends {
		if h := &x.ends[i]; h.m.Receive {
			x.enlist(h)
		}
	}
	for {
		moved, waits := false, (*end)(nil)
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
		}
		switch {
		case waits == nil:
			e.order(e.space.Rank)
			return x.outcome()
		case moved:
			x.since = time.Time{}
			x.w.busy()
			continue
		case f.late(waits.m.Peer, &a.Turn):
			x.leave(waits, &comm.PeerError{Rank: waits.m.Peer, Op: a.Operation(), Err: kernels.ErrFailed})
			continue
		}
		if err := x.w.idle(waits.m.Peer); err != nil {
			x.giveUp(waits, err)
			e.order(e.space.Rank)
			return x.outcome()
		}
	}
}

func (x *messaging) reset() {
	x.w.leave()
	clear(x.ends)
	x.ends = x.ends[:0]
	x.f, x.e, x.a, x.since = nil, nil, nil, time.Time{}
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
	why := x.w.fail(first.m.Peer, err)
	for i := range x.ends {
		h := &x.ends[i]
		if h.stage == ended {
			continue
		}
		x.f.gaveUp(h.m.Peer, &x.a.Turn)
		own := why
		if h != first && errors.Is(err, comm.ErrTimeout) {
			own = &comm.PeerError{Rank: h.m.Peer, Op: x.a.Operation(), Err: fmt.Errorf("%w (%s): %s", comm.ErrTimeout, h, x.seen(h))}
		}
		x.leave(h, own)
	}
}

// leave ends a message that this rank does not wait for any longer.
func (x *messaging) leave(h *end, why error) {
	if h.m.Receive {
		x.forget(h, why)
	} else {
		x.withdraw(h, why)
	}
}

// String is what the message is.
func (h *end) String() string {
	way := "to"
	if h.m.Receive {
		way = "from"
	}
	return fmt.Sprintf("tag %d, %d bytes %s rank %d", h.m.Tag, h.m.Buffer.Bytes, way, h.m.Peer)
}

// first is the message that the launch waits for, of those with peer if there is one.
func (x *messaging) first(peer int) (found *end) {
	for i := range x.ends {
		if h := &x.ends[i]; h.stage != ended && (found == nil || h.m.Peer == peer && found.m.Peer != peer) {
			found = h
		}
	}
	return found
}

func (x *messaging) sizes(peer int) string {
	if h := x.first(peer); h != nil {
		return h.String()
	}
	return ""
}

// doing says what can be seen of a peer that has not come.
func (x *messaging) doing(peer int) string {
	if h := x.first(peer); h != nil && h.m.Peer == peer {
		return x.seen(h)
	}
	return fmt.Sprintf("rank %d is busy, stopped, or makes other calls", peer)
}

// seen says what the peer of a message does instead.
func (x *messaging) seen(h *end) string {
	if h.m.Receive {
		return x.f.unreceived(x.e, h.m.Peer, x.e.space.Rank)
	}
	return x.f.wants(x.e, h.m.Peer)
}

// wants says which message of this rank a peer waits for.
func (f *transfers) wants(e *Engine, peer int) string {
	at := f.c.Wanted(e.space.Rank)
	tag, bytes := e.word(peer, at+wantedTag).Load(), e.word(peer, at+wantedBytes).Load()
	switch {
	case e.word(peer, at+wantedCount).Load() != 0:
		return fmt.Sprintf("rank %d waits for tag %d, %d bytes", peer, tag, bytes)
	case tag|bytes != 0:
		return fmt.Sprintf("rank %d waits for no message of this rank; the last was tag %d, %d bytes", peer, tag, bytes)
	}
	return fmt.Sprintf("rank %d waits for no message of this rank", peer)
}

// mostNamed bounds the messages that an error lists.
const mostNamed = 4

// unreceived says which messages from src wait at dst.
func (f *transfers) unreceived(e *Engine, src, dst int) string {
	var list []string
	more := 0
	for box := range f.c.Boxes {
		at, back := f.c.Box(src, box), ""
		switch phase := e.word(dst, at+boxState).Load() & phaseMask; {
		case phase == withdrawn:
			back = " (taken back)"
		case phase < offered || phase > offeredAgain:
			continue
		}
		if len(list) == mostNamed {
			more++
			continue
		}
		list = append(list, fmt.Sprintf("tag %d, %d bytes%s", e.word(dst, at+boxTag).Load(), e.word(dst, at+boxBytes).Load(), back))
	}
	if more > 0 {
		list = append(list, fmt.Sprintf("%d more", more))
	}
	if len(list) == 0 {
		return fmt.Sprintf("rank %d has sent no message that rank %d has not received", src, dst)
	}
	return fmt.Sprintf("rank %d has sent what rank %d has not received: %s", src, dst, strings.Join(list, "; "))
}

// rest is the messages of this rank, and to it, that nobody has received and that no launch waits for. All launches of all ranks have
// ended.
func (f *transfers) rest(e *Engine) error {
	var errs []error
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
				errs = append(errs, &comm.PeerError{Rank: p, Op: "close", Err: fmt.Errorf("%w: %s%s", comm.ErrMismatch, f.unreceived(e, src, dst), wanted)})
				break
			}
		}
	}
	return errors.Join(errs...)
}
