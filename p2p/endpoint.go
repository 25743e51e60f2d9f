package p2p

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Endpoint is one rank's end of the transfers of a group over one symmetric heap. Its methods may be called from several goroutines.
//
// A call is enqueued on its stream; with a nil stream it is complete on return. Its buffers belong to it until then. Calls on one stream run
// in their order, and calls on different streams, or on none, at the same time.
//
// Bad arguments return an error (ErrInvalid, ErrClosed, memory.ErrFreed) before anything is enqueued. A wait that fails is an error of its call
// alone, which names the peer: comm.ErrTimeout if it does not come within Options.Timeout, comm.ErrPeerLost if it is lost. It consumes
// nothing, and every other call goes on, except that calls which were enqueued before the failure and would have to wait for the same peer
// fail at once. On a host stream the error is one of the stream.
//
// On GPUs, CUDA graphs capture the calls. A failed wait is an error of Fault and of the next call, which then has not happened; later calls go
// on. Signals of one semaphore come from one stream at a time, and so do the waits for them. Messages to one rank follow each other in the
// order of their calls, also on different streams, and so do those from one; captured ones, and those without a stream, the caller orders.
// Calls without a stream share one: a Wait there holds up the others.
type Endpoint struct {
	c       *communicator.Communicator
	bounds  kernels.PointBounds
	options Options
	issued  atomic.Uint64
	turns   sync.Mutex
	last    []turn            // on GPUs: of the last messages to each rank, and from each
	list    []kernels.Message // that are launched

	transfers communicator.Launches[kernels.Transfer, *kernels.Transfer]
	messages  communicator.Launches[kernels.Messages, *kernels.Messages]
}

// New makes an Endpoint. It is collective: every rank of the heap's group calls it, in the same order as its other allocations, with equal
// options. The heap grows if it has no room. A failure on one rank is an error on all. The caller closes the Endpoint before the heap.
//
// A ctx that ends while ranks wait for each other may leave the group out of step, as in memory.NewHeap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Endpoint, error) {
	if h == nil {
		return nil, invalid("the heap is nil")
	}
	x := &Endpoint{}
	var err error
	x.bounds, err = o.validate(h)
	x.options = o
	x.c, err = communicator.Open(ctx, h, communicator.Config{
		Name: "p2p", Must: []string{fingerprint(&x.bounds)}, Family: &x.bounds, Timeout: o.Timeout, Rest: true, Hosts: true,
	}, err)
	if err != nil {
		return nil, err
	}
	x.transfers.C, x.transfers.Apart, x.transfers.Reset = x.c, true, func(a *kernels.Transfer) {
		*a = kernels.Transfer{}
		a.Issued, a.Timeout = &x.issued, x.c.Timeout()
	}
	x.messages.C, x.messages.Apart, x.messages.Reset = x.c, true, func(a *kernels.Messages) {
		clear(a.List)
		*a = kernels.Messages{List: a.List[:0]}
		a.Issued, a.Timeout = &x.issued, x.c.Timeout()
	}
	if h.Device().Kind() != device.HostKind {
		x.last = make([]turn, 2*x.bounds.Size)
	}
	return x, nil
}

// Put copies src to the memory of rank peer that lies there where at lies here. at is a view of symmetric memory, a buffer of the heap or
// registered memory, or of memory that the peer has shared with this rank and this rank has opened (memory.Opened), and as long as src, which
// is any memory of the heap's device. The peer may use the bytes after it has consumed a signal that came behind the put in this stream. Registered memory of a rank on another host is refused (ErrUnsupported).
func (x *Endpoint) Put(s device.Stream, peer int, at, src memory.View) error {
	return x.move(s, kernels.PutTransfer, peer, at, src)
}

// Get copies the memory of rank peer that lies there where at lies here, or that at is a part of (memory.Opened), to dst, which is as long and
// any memory of the heap's device. The peer takes no part in it.
func (x *Endpoint) Get(s device.Stream, peer int, dst, at memory.View) error {
	return x.move(s, kernels.GetTransfer, peer, at, dst)
}

// Signal counts a semaphore at rank peer up by one: what this rank has put before, on this stream, is there. Semaphores of the two directions
// have nothing to do with each other. On another host 64 signals of a semaphore can wait for the peer; one more waits for room.
func (x *Endpoint) Signal(s device.Stream, peer, semaphore int) error {
	return x.flag(s, kernels.SignalTransfer, peer, semaphore)
}

// Wait consumes one signal of rank peer: later work on the stream comes after that signal. Each signal is consumed once, by one Wait.
func (x *Endpoint) Wait(s device.Stream, peer, semaphore int) error {
	return x.flag(s, kernels.WaitTransfer, peer, semaphore)
}

// move is a put or a get.
func (x *Endpoint) move(s device.Stream, kind kernels.TransferKind, peer int, at, mine memory.View) error {
	if err := x.other(kind.String(), peer); err != nil {
		return err
	}
	if err := x.c.Serves(kind.String(), mine); err != nil {
		return err
	}
	if at.Len() != mine.Len() {
		return invalid("%v: %d bytes here, %d at rank %d", kind, mine.Len(), at.Len(), peer)
	}
	if !at.Alike(mine) {
		return invalid("%v: elements of %s here, of %s at rank %d", kind, mine.Element(), at.Element(), peer)
	}
	if lender, ok := x.c.Heap.Lender(at); ok {
		return x.moveLent(s, kind, peer, lender, at, mine)
	}
	place, err := x.c.Heap.Counterpart(at, peer)
	if err != nil {
		return fmt.Errorf("p2p: %v: %w", kind, err)
	}
	if o := x.bounds.Hosts; o != nil && o.Host[peer] != o.Host[o.Rank] && place >= o.Limit {
		return fmt.Errorf("p2p: %v: %w: registered memory of rank %d on host %d, want a buffer of the heap", kind, ErrUnsupported, peer, o.Host[peer])
	}
	return x.launch(s, func(a *kernels.Transfer) {
		a.Kind, a.Peer, a.Buffer, a.Place = kind, peer, x.c.Heap.Operand(mine), place
	})
}

// moveLent is a put or a get of memory that rank lender has shared.
func (x *Endpoint) moveLent(s device.Stream, kind kernels.TransferKind, peer, lender int, at, mine memory.View) error {
	if lender != peer {
		return invalid("%v: memory that rank %d has shared, want that of rank %d", kind, lender, peer)
	}
	if err := at.Valid(); err != nil {
		return fmt.Errorf("p2p: %v: %w", kind, err)
	}
	return x.launch(s, func(a *kernels.Transfer) {
		a.Kind, a.Peer, a.Buffer, a.Lent = kind, peer, x.c.Heap.Operand(mine), x.c.Heap.Operand(at)
	})
}

// flag is a signal or a wait.
func (x *Endpoint) flag(s device.Stream, kind kernels.TransferKind, peer, semaphore int) error {
	if err := x.other(kind.String(), peer); err != nil {
		return err
	}
	if semaphore < 0 || semaphore >= x.bounds.Semaphores {
		return invalid("%v: semaphore %d, want 0 to %d", kind, semaphore, x.bounds.Semaphores-1)
	}
	return x.launch(s, func(a *kernels.Transfer) { a.Kind, a.Peer, a.Semaphore = kind, peer, semaphore })
}

// other refuses a peer that is not another rank.
func (x *Endpoint) other(kind string, peer int) error {
	if peer < 0 || peer >= x.bounds.Size || peer == x.c.Group.Rank() {
		return invalid("%s: rank %d, want another of the %d ranks than %d", kind, peer, x.bounds.Size, x.c.Group.Rank())
	}
	return nil
}

// launch makes a launch of which set fills in the arguments.
func (x *Endpoint) launch(s device.Stream, set func(a *kernels.Transfer)) error {
	o := x.transfers.Take()
	set(&o.Args)
	o.Args.Number = x.issued.Add(1)
	return x.transfers.Launch(s, o)
}

// Fault returns the error of calls that have run by now, nil if there is none, on a device whose streams do not report it; the host's
// streams do.
func (x *Endpoint) Fault() error { return x.c.Fault() }

// SetTimeout sets [Options.Timeout] for the calls of this rank from now on.
func (x *Endpoint) SetTimeout(d time.Duration) error { return x.c.SetTimeout(d) }

// Close waits for the calls on streams and gives the control block back. It is collective and idempotent. After a failure of the group it
// releases this rank's memory and returns. When ctx ends, calls that wait for peers give up.
func (x *Endpoint) Close(ctx context.Context) error { return x.c.Close(ctx) }
