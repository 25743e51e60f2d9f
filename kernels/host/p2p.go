package host

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// transfers are the launches of one communicator between two ranks. It is a family. Launches on different streams run at the same time, so
// each has a kernel of its own.
type transfers struct {
	bounds *kernels.PointBounds
	c      PointBlock    // of the ranks of this host, whose numbers are those in the space
	across *pointsAcross // nil on one host
	pairs  []pair        // with the ranks of this host, by their number in the space
	// partners are the others of the group, in the order of their ranks, and byRank has the same by rank.
	partners, byRank []partner
	anyone           partner      // stands for all of them where a receive from any rank waits
	parked           atomic.Int64 // bytes of messages that are copied aside
	next             atomic.Int32 // the partner at which a receive from any rank looks first
	nonce            *shm.Nonce
	// patience is how long a sender waits at least before it copies a message aside.
	patience time.Duration

	mu      sync.Mutex
	moving  []*transferring // idle kernels
	talking []*messaging
}

// defaultPark is how much of messages a rank copies aside.
const defaultPark = 256 << 20

func newTransfers(c *kernels.PointBounds, offset int64) *transfers {
	f := &transfers{bounds: c, c: PointBlock{c, offset}, patience: leastPatience}
	if c.Hosts != nil {
		f.across, f.c = newPointsAcross(c, offset)
		f.across.parked = &f.parked
	}
	return f
}

func (f *transfers) defaults() {
	c := f.bounds
	c.Semaphores = int(kernels.Default(int64(c.Semaphores), kernels.DefaultSemaphores))
	c.Blocks = 0
	c.DefaultMessages()
	c.ParkBytes = kernels.Default(c.ParkBytes, defaultPark)
}

func (f *transfers) layout() kernels.Layout {
	if f.across != nil {
		return f.across.layout(&f.c)
	}
	return kernels.Layout{Bytes: f.c.Bytes(), Zero: f.c.ControlBytes()}
}

// open leaves word of where this rank's memory is.
func (f *transfers) open(e *Engine) {
	space := &e.space
	f.pairs, f.byRank = make([]pair, space.Size), make([]partner, f.bounds.Size)
	for p := range f.pairs {
		pr := &f.pairs[p]
		pr.near, pr.f, pr.boxes = e.near(p), f, make([]outgoing, f.c.Boxes)
		f.byRank[pr.rank] = pr
	}
	f.nonce = shm.NewNonce()
	self := shm.Self(f.nonce)
	self.Write(space.Range(space.Rank, f.c.Card(), shm.CardBytes))
	f.anyone = &f.pairs[(space.Rank+1)%space.Size]
	if f.across != nil {
		f.across.openFars(e)
		for _, p := range f.across.pairs {
			f.byRank[p.rank] = p
		}
		f.anyone = f.across.pairs[0]
	}
	for rank, p := range f.byRank {
		if rank != space.Name(space.Rank) {
			f.partners = append(f.partners, p)
		}
	}
}

// stop comes before the memory goes. Where ranks have not met, a peer may yet find a message that was copied aside, in the midst of a call that
// has not heard why this rank ends. It reads it in one process, where the copy stays, and cannot in another.
func (f *transfers) stop(e *Engine) {
	if e.bells == nil {
		f.nonce.Revoke()
	} else {
		for i := range f.pairs {
			pr := &f.pairs[i]
			pr.out.Lock()
			for k := range pr.boxes {
				e.bells[e.space.Rank].keep(pr.boxes[k].aside)
			}
			pr.out.Unlock()
		}
	}
	if f.across != nil && f.across.quit != nil {
		f.across.stop(e)
	}
}

// partner is another rank of the group as this family has it: *pair on this host, *farPair on another.
type partner interface {
	peer
	// failing is the wait for it that has failed.
	failing() *failedWait

	// send and receive take a message to it, or from it, further, and report whether they have done anything. A receive that has none yet
	// claims one.
	send(x *messaging, i int) bool
	receive(x *messaging, h *end) bool
	// enlist puts a receive among those that wait for its messages, behind them or first. delist takes it out again.
	enlist(h *end, first bool)
	delist(h *end)
	// withdraw ends a message to it, and giveBack what a receive has of one from it, that this rank does not wait for any longer.
	withdraw(x *messaging, h *end, why error)
	giveBack(x *messaging, h *end)
	// alone is the rail on which a rank may sleep whose wait for it nothing else can end, nil if there is none.
	alone() rails.Rail
	// where says on which host it is, if on another, when a launch ends at its deadline.
	where(x *messaging) string
	// unreceived is its messages that wait here, in words, and wanting which one of this rank it waits for.
	unreceived() []string
	wanting() string

	// transfer is a put, get, signal or wait, and shows says what can be seen of it there.
	transfer(x *transferring) error
	shows(x *transferring) string
}

// partner is a rank of the group, nil for kernels.AnyRank.
func (f *transfers) partner(rank int) partner {
	if rank == kernels.AnyRank {
		return nil
	}
	return f.byRank[rank]
}

// ready tries to read the memory of every peer. Messages of those of which it cannot go through staging.
func (f *transfers) ready(e *Engine) kernels.Traits {
	space := &e.space
	var errs []error
	for r := range f.pairs {
		w := &f.pairs[r]
		if r == space.Rank {
			continue
		}
		if e.bells == nil {
			w.memory = shm.ReadCard(space.Range(r, f.c.Card(), shm.CardBytes))
			if err := w.memory.Probe(); err != nil {
				errs = append(errs, fmt.Errorf("rank %d: %w", space.Name(r), err))
				continue
			}
		}
		w.readable = true
		e.word(space.Rank, f.c.Wanted(r)+wantedReads).Store(1)
	}
	return kernels.Traits{Pulls: len(errs) == 0, Slow: errors.Join(errs...)}
}

func (f *transfers) run(p *port, op kernels.Operation) error {
	if a, ok := op.(*kernels.Messages); ok {
		x := takeIdle(f, &f.talking)
		err := x.run(p, f, a)
		giveIdle(f, &f.talking, x)
		return err
	}
	x := takeIdle(f, &f.moving)
	err := x.run(p, f, op.(*kernels.Transfer))
	giveIdle(f, &f.moving, x)
	return err
}

// takeIdle is a kernel from the list of idle ones, or a new one.
func takeIdle[K any](f *transfers, list *[]*K) *K {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(*list)
	if n == 0 {
		return new(K)
	}
	x := (*list)[n-1]
	*list = (*list)[:n-1]
	return x
}

func giveIdle[K any](f *transfers, list *[]*K, x *K) {
	f.mu.Lock()
	*list = append(*list, x)
	f.mu.Unlock()
}

// failedWait is a wait for a rank that has failed, on behalf of all launches that were issued by then.
type failedWait struct {
	last atomic.Uint64 // of these launches
	why  atomic.Pointer[error]
}

// fail says that a launch of this turn has waited long enough.
func (f *failedWait) fail(t *kernels.Turn, why error) {
	f.why.Store(&why)
	f.last.Store(t.Issued.Load())
}

// late reports whether a launch of this turn has to fail at once instead of waiting.
func (f *failedWait) late(t *kernels.Turn) bool { return t.Number <= f.last.Load() }

// error is that of such a launch. It names whom the one before it does.
func (f *failedWait) error() error { return fmt.Errorf("%w: %w", kernels.ErrFailed, *f.why.Load()) }

// transferring is one launch of the kernel on one rank.
type transferring struct {
	f  *transfers
	e  *Engine
	a  *kernels.Transfer
	w  waiter
	to partner
}

func (x *transferring) sizes(int) string {
	if x.a.Kind == kernels.WaitTransfer {
		return fmt.Sprintf("semaphore %d", x.a.Semaphore)
	}
	return ""
}

func (x *transferring) doing(rank int) string {
	if rank != x.a.Peer {
		return fmt.Sprintf("rank %d is busy, stopped, or makes other calls", rank)
	}
	return x.to.shows(x)
}

func (pr *pair) shows(x *transferring) string {
	me, c := pr.e.space.Rank, &pr.f.c
	return fmt.Sprintf("it has signalled %d times, and this rank has consumed %d",
		pr.e.word(me, c.Signals(pr.place, x.a.Semaphore)).Load(), pr.e.word(me, c.Consumed(pr.place, x.a.Semaphore)).Load())
}

func (x *transferring) run(p *port, f *transfers, a *kernels.Transfer) error {
	x.f, x.e, x.a = f, p.e, a
	defer x.reset()
	x.e.count(x.f.c.Calls())
	x.w.begin(p, x, p.call(a, x.f.c.Calls(), 0), a.Timeout)
	if f.across != nil {
		x.w.crosses(f.across.fars)
	}
	x.to = f.partner(a.Peer)
	return x.to.transfer(x)
}

func (pr *pair) transfer(x *transferring) error {
	switch e, a := pr.e, x.a; a.Kind {
	case kernels.PutTransfer:
		x.copy(pr.theirs(a), a.Buffer.Mem)
	case kernels.GetTransfer:
		x.copy(a.Buffer.Mem, pr.theirs(a))
	case kernels.SignalTransfer:
		e.at(signalling, pr.place)
		e.order(pr.place)
		e.word(pr.place, pr.f.c.Signals(e.space.Rank, a.Semaphore)).Add(1)
		e.ring(pr.place)
	case kernels.WaitTransfer:
		return pr.consume(x)
	}
	return nil
}

// theirs is the peer's memory that a put writes or a get reads.
func (pr *pair) theirs(a *kernels.Transfer) []byte {
	if a.Lent.Bytes > 0 {
		return a.Lent.Mem
	}
	return pr.e.space.Range(pr.place, a.Place, a.Buffer.Bytes)
}

func (x *transferring) reset() {
	x.w.leave()
	x.f, x.e, x.a, x.to = nil, nil, nil, nil
}

// consume waits for a signal that no other launch consumes.
func (pr *pair) consume(x *transferring) error {
	e, me, a := pr.e, pr.e.space.Rank, x.a
	signals, consumed := e.word(me, pr.f.c.Signals(pr.place, a.Semaphore)), e.word(me, pr.f.c.Consumed(pr.place, a.Semaphore))
	for {
		had := consumed.Load()
		if signals.Load() > had {
			if consumed.CompareAndSwap(had, had+1) {
				e.order(me)
				return nil
			}
			continue
		}
		if pr.failed.late(&a.Turn) {
			return pr.failed.error()
		}
		if err := x.w.idle(pr); err != nil {
			err = x.w.fail(pr, err)
			pr.failed.fail(&a.Turn, err)
			return err
		}
	}
}

// copy moves bytes through the caches, or around them where they do not fit.
func (x *transferring) copy(dst, src []byte) { x.w.copy(dst, src, int64(len(src)) >= x.e.cacheBytes) }

// copy moves bytes and counts them, through the caches or around them.
func (w *waiter) copy(dst, src []byte, stream bool) {
	for len(src) > 0 {
		n := min(len(src), movedBytes)
		if stream {
			shm.CopyStream(dst[:n], src[:n])
		} else {
			copy(dst, src[:n])
		}
		w.moved(int64(n))
		if dst, src = dst[n:], src[n:]; len(src) > 0 {
			w.e.at(copying, w.e.space.Rank)
		}
	}
	if stream {
		shm.Fence()
	}
}
