package host

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// transfers are the launches of one communicator between two ranks. It is a family. Launches on different streams run at the same time, so
// each has a kernel of its own.
type transfers struct {
	c      PointBlock
	failed []atomic.Uint64 // by peer: the last launch that was issued when a wait for it failed
	mu     sync.Mutex
	idle   []*transferring
}

// The defaults of transfers.
const defaultSemaphores = 8

func newTransfers(c *kernels.PointBounds, offset int64) *transfers {
	return &transfers{c: PointBlock{c, offset}, failed: make([]atomic.Uint64, c.Size)}
}

func (f *transfers) defaults() {
	f.c.Semaphores = int(kernels.Default(int64(f.c.Semaphores), defaultSemaphores))
}

func (f *transfers) layout() kernels.Layout {
	return kernels.Layout{Bytes: f.c.Bytes(), Zero: f.c.Bytes()}
}

func (*transfers) open(*Engine)                 {}
func (*transfers) ready(*Engine) kernels.Traits { return kernels.Traits{} }

func (f *transfers) run(p *port, op kernels.Operation) error {
	x := f.take()
	err := x.run(p, op.(*kernels.Transfer))
	x.w.leave()
	f.give(x)
	return err
}

// take is an idle kernel or a new one.
func (f *transfers) take() *transferring {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.idle)
	if n == 0 {
		return &transferring{f: f}
	}
	x := f.idle[n-1]
	f.idle = f.idle[:n-1]
	return x
}

func (f *transfers) give(x *transferring) {
	x.a, x.e = nil, nil
	f.mu.Lock()
	f.idle = append(f.idle, x)
	f.mu.Unlock()
}

// PointBlock is the control block of one communicator for transfers: the same layout at the same Offset of every rank's segment. Methods
// return offsets from the start of a segment.
type PointBlock struct {
	*kernels.PointBounds
	Offset int64
}

// Calls is the word that counts this rank's launches. It names the communicator to the engine; the ranks' numbers need not agree.
func (c *PointBlock) Calls() int64 { return c.Offset }

// Signals is the word that src adds to in its peer's segment.
func (c *PointBlock) Signals(src, semaphore int) int64 {
	return c.Offset + kernels.LineBytes*int64(1+src*c.Semaphores+semaphore)
}

// Consumed is the word in which a rank counts the signals of src that it has consumed, in its own segment.
func (c *PointBlock) Consumed(src, semaphore int) int64 { return c.Signals(src, semaphore) + 8 }

// Bytes is the size of the block. All of it must be zero before the first launch.
func (c *PointBlock) Bytes() int64 { return c.Signals(c.Size, 0) - c.Offset }

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

func (x *transferring) run(p *port, a *kernels.Transfer) error {
	x.e, x.a = p.e, a
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
		if a.Number <= x.f.failed[a.Peer].Load() {
			return &comm.PeerError{Rank: a.Peer, Op: a.Operation(), Err: kernels.ErrFailed}
		}
		if err := x.w.idle(a.Peer); err != nil {
			x.f.failed[a.Peer].Store(a.Issued.Load())
			return x.w.fail(a.Peer, err)
		}
	}
}

// copy moves bytes through the caches, or around them where they do not fit.
func (x *transferring) copy(dst, src []byte) {
	stream := int64(len(src)) >= x.e.cacheBytes
	for len(src) > 0 {
		n := min(len(src), movedBytes)
		if stream {
			shm.CopyStream(dst[:n], src[:n])
		} else {
			copy(dst, src[:n])
		}
		x.w.moved(int64(n))
		dst, src = dst[n:], src[n:]
	}
	if stream {
		shm.Fence()
	}
}
