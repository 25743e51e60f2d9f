package host

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// transfers are the launches of one communicator between two ranks. It is a family. Launches on different streams run at the same time, so
// each has a kernel of its own.
type transfers struct {
	bounds *kernels.PointBounds
	c      PointBlock    // of the ranks of this host, whose numbers are those in the space
	across *pointsAcross // nil on one host
	failed []failedWait  // by peer
	pairs  []pair        // by peer
	parked atomic.Int64  // bytes of messages that are copied aside
	took   atomic.Int32  // the rank of the last message that a receive from any has taken
	nonce  *shm.Nonce
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
	f.failed, f.pairs = make([]failedWait, space.Size), make([]pair, space.Size)
	for p := range f.pairs {
		f.pairs[p].boxes = make([]outgoing, f.c.Boxes)
	}
	f.nonce = shm.NewNonce()
	self := shm.Self(f.nonce)
	self.Write(space.Range(space.Rank, f.c.Card(), shm.CardBytes))
	if f.across != nil {
		f.across.openFars(e)
	}
}

// stop comes before the memory goes.
func (f *transfers) stop(e *Engine) {
	if f.across != nil && f.across.quit != nil {
		f.across.stop(e)
	}
}

// index is the number in the space of a rank of the group, or far the rank where it is on another host.
func (f *transfers) index(rank int) (index int, far *farPair) {
	if f.across == nil || rank == kernels.AnyRank {
		return rank, nil
	}
	if far = f.across.pair(rank); far != nil {
		return elsewhere, far
	}
	return f.across.place(rank), nil
}

// elsewhere is the index of a rank of another host.
const elsewhere = -2

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
	f    *transfers
	e    *Engine
	a    *kernels.Transfer
	w    waiter
	peer int      // number in the space, or elsewhere:
	far  *farPair // there
}

func (x *transferring) sizes(int) string {
	if x.a.Kind == kernels.WaitTransfer {
		return fmt.Sprintf("semaphore %d", x.a.Semaphore)
	}
	return ""
}

func (x *transferring) doing(rank int) string {
	me, c := x.e.space.Rank, &x.f.c
	switch {
	case rank != x.a.Peer:
		return fmt.Sprintf("rank %d is busy, stopped, or makes other calls", rank)
	case x.far != nil:
		return x.doingFar(x.far)
	}
	return fmt.Sprintf("it has signalled %d times, and this rank has consumed %d",
		x.e.word(me, c.Signals(x.peer, x.a.Semaphore)).Load(), x.e.word(me, c.Consumed(x.peer, x.a.Semaphore)).Load())
}

func (x *transferring) run(p *port, f *transfers, a *kernels.Transfer) error {
	x.f, x.e, x.a = f, p.e, a
	defer x.reset()
	e, me := p.e, p.e.space.Rank
	e.count(x.f.c.Calls())
	x.w.begin(p, x, p.call(a, x.f.c.Calls(), 0), a.Timeout)
	if f.across != nil {
		x.w.crosses(f.across.fars)
	}
	if x.peer, x.far = f.index(a.Peer); x.far != nil {
		return x.transferFar(x.far)
	}
	switch a.Kind {
	case kernels.PutTransfer:
		x.copy(e.space.Range(x.peer, a.Place, a.Buffer.Bytes), a.Buffer.Mem)
	case kernels.GetTransfer:
		x.copy(a.Buffer.Mem, e.space.Range(x.peer, a.Place, a.Buffer.Bytes))
	case kernels.SignalTransfer:
		e.at(signalling, x.peer)
		e.order(x.peer)
		e.word(x.peer, x.f.c.Signals(me, a.Semaphore)).Add(1)
		e.ring(x.peer)
	case kernels.WaitTransfer:
		return x.consume()
	}
	return nil
}

func (x *transferring) reset() {
	x.w.leave()
	x.f, x.e, x.a, x.far = nil, nil, nil, nil
}

// consume waits for a signal that no other launch consumes.
func (x *transferring) consume() error {
	e, me, a := x.e, x.e.space.Rank, x.a
	signals, consumed := e.word(me, x.f.c.Signals(x.peer, a.Semaphore)), e.word(me, x.f.c.Consumed(x.peer, a.Semaphore))
	for {
		had := consumed.Load()
		if signals.Load() > had {
			if consumed.CompareAndSwap(had, had+1) {
				e.order(me)
				return nil
			}
			continue
		}
		failed := &x.f.failed[x.peer]
		if failed.late(&a.Turn) {
			return failed.error()
		}
		peer := e.near(x.peer)
		if err := x.w.idle(peer); err != nil {
			err = x.w.fail(peer, err)
			failed.fail(&a.Turn, err)
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
