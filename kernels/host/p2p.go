package host

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// transfers are the launches of one communicator between two ranks. It is a family. Launches on different streams run at the same time, so
// each has a kernel of its own.
type transfers struct {
	c      PointBlock
	failed []atomic.Uint64 // by peer: the last launch that was issued when a wait for it failed
	pairs  []pair          // by peer
	parked atomic.Int64    // bytes of messages that are copied aside
	nonce  *shm.Nonce
	// patience is how long a sender waits at least before it copies a message aside.
	patience time.Duration

	mu      sync.Mutex
	moving  []*transferring // idle kernels
	talking []*messaging
}

// The defaults of transfers.
const (
	defaultBoxes        = 32
	defaultEager        = 8 << 10
	defaultPointStaging = 64 << 10
	defaultPark         = 256 << 20
)

func newTransfers(c *kernels.PointBounds, offset int64) *transfers {
	return &transfers{c: PointBlock{c, offset}, patience: leastPatience}
}

func (f *transfers) defaults() {
	c := f.c.PointBounds
	c.Semaphores = int(kernels.Default(int64(c.Semaphores), kernels.DefaultSemaphores))
	c.Blocks = 0
	c.Boxes = int(kernels.Default(int64(c.Boxes), defaultBoxes))
	c.EagerBytes, c.StagingBytes = kernels.Default(c.EagerBytes, defaultEager), kernels.Default(c.StagingBytes, defaultPointStaging)
	c.ParkBytes = kernels.Default(c.ParkBytes, defaultPark)
}

func (f *transfers) layout() kernels.Layout {
	return kernels.Layout{Bytes: f.c.Bytes(), Zero: f.c.ControlBytes()}
}

// open leaves word of where this rank's memory is.
func (f *transfers) open(e *Engine) {
	space := &e.space
	f.failed, f.pairs = make([]atomic.Uint64, space.Size), make([]pair, space.Size)
	for p := range f.pairs {
		f.pairs[p].boxes = make([]outgoing, f.c.Boxes)
	}
	f.nonce = shm.NewNonce()
	card := shm.View[uint64](space.Range(space.Rank, f.c.Card(), 32))
	self := shm.Self(f.nonce)
	card[0], card[1] = uint64(self.PID), uint64(self.At)
	copy(shm.Bytes(card[2:]), self.Nonce[:])
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
			card := shm.View[uint64](space.Range(r, f.c.Card(), 32))
			w.memory = shm.Process{PID: int(card[0]), At: uintptr(card[1]), Nonce: shm.Nonce(shm.Bytes(card[2:]))}
			if err := w.memory.Probe(); err != nil {
				errs = append(errs, fmt.Errorf("rank %d: %w", r, err))
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

// late reports whether a launch of this turn has to fail at once instead of waiting for peer.
func (f *transfers) late(peer int, t *kernels.Turn) bool { return t.Number <= f.failed[peer].Load() }

// gaveUp says that a launch of this turn has waited long enough for peer, on behalf of all that were issued by now.
func (f *transfers) gaveUp(peer int, t *kernels.Turn) { f.failed[peer].Store(t.Issued.Load()) }

// transferring is one launch of the kernel on one rank.
type transferring struct {
	f *transfers
	e *Engine
	a *kernels.Transfer
	w waiter
}

func (x *transferring) sizes(int) string {
	if x.a.Kind == kernels.WaitTransfer {
		return fmt.Sprintf("semaphore %d", x.a.Semaphore)
	}
	return ""
}

// doing says what can be seen of a peer that has not come.
func (x *transferring) doing(peer int) string {
	me, c := x.e.space.Rank, &x.f.c
	if peer != x.a.Peer {
		return fmt.Sprintf("rank %d is busy, stopped, or makes other calls", peer)
	}
	return fmt.Sprintf("it has signalled %d times, and this rank has consumed %d",
		x.e.word(me, c.Signals(peer, x.a.Semaphore)).Load(), x.e.word(me, c.Consumed(peer, x.a.Semaphore)).Load())
}

func (x *transferring) run(p *port, f *transfers, a *kernels.Transfer) error {
	x.f, x.e, x.a = f, p.e, a
	defer x.reset()
	e, me := p.e, p.e.space.Rank
	e.count(x.f.c.Calls())
	x.w.begin(p, x, p.call(a, x.f.c.Calls(), 0), a.Timeout)
	switch a.Kind {
	case kernels.PutTransfer:
		x.copy(e.space.Range(a.Peer, a.Place, a.Buffer.Bytes), a.Buffer.Mem)
	case kernels.GetTransfer:
		x.copy(a.Buffer.Mem, e.space.Range(a.Peer, a.Place, a.Buffer.Bytes))
	case kernels.SignalTransfer:
		e.at(signalling, a.Peer)
		e.order(a.Peer)
		e.word(a.Peer, x.f.c.Signals(me, a.Semaphore)).Add(1)
		e.ring(a.Peer)
	case kernels.WaitTransfer:
		return x.consume()
	}
	return nil
}

func (x *transferring) reset() {
	x.w.leave()
	x.f, x.e, x.a = nil, nil, nil
}

// consume waits for a signal that no other launch consumes.
func (x *transferring) consume() error {
	e, me, a := x.e, x.e.space.Rank, x.a
	signals, consumed := e.word(me, x.f.c.Signals(a.Peer, a.Semaphore)), e.word(me, x.f.c.Consumed(a.Peer, a.Semaphore))
	for {
		had := consumed.Load()
		if signals.Load() > had {
			if consumed.CompareAndSwap(had, had+1) {
				e.order(me)
				return nil
			}
			continue
		}
		if x.f.late(a.Peer, &a.Turn) {
			return &comm.PeerError{Rank: a.Peer, Op: a.Operation(), Err: kernels.ErrFailed}
		}
		if err := x.w.idle(a.Peer); err != nil {
			x.f.gaveUp(a.Peer, &a.Turn)
			return x.w.fail(a.Peer, err)
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
		dst, src = dst[n:], src[n:]
	}
	if stream {
		shm.Fence()
	}
}
