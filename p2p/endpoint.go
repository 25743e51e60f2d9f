package p2p

import (
	"context"
	"fmt"
	"sync/atomic"

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
// On GPUs there are Put, Get, Signal and Wait, which CUDA graphs capture, and no messages yet (ErrUnsupported). A failed wait is an error of
// Fault and of the next call, which then has not happened; later calls go on. Signals of one semaphore come from one stream at a time, and so
// do the waits for them. Calls without a stream share one: a Wait there holds up the others.
type Endpoint struct {
	c       *communicator.Communicator
	bounds  kernels.PointBounds
	options Options
	issued  atomic.Uint64
	idle    communicator.Pool[op]
	quiet   communicator.Pool[messages]
}

// op is one launch, and keeps its arguments alive until it has run.
type op struct {
	args        kernels.Transfer
	done        func(error) // for launches on a stream
	mine, peers memory.View
}

// New makes an Endpoint. It is collective: every rank of the heap's group calls it, in the same order as its other allocations, with equal
// options. The heap grows if it has no room. A failure on one rank is an error on all. The caller closes the Endpoint before the heap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Endpoint, error) {
	x := &Endpoint{}
	var err error
	x.bounds, err = o.validate(h.Group().Size(), h.Engine())
	x.options = o
	x.c, err = communicator.Open(ctx, h, communicator.Config{
		Name: "p2p", Must: []string{fingerprint(&x.bounds)}, Family: &x.bounds, Timeout: o.Timeout, Rest: true,
	}, err)
	if err != nil {
		return nil, err
	}
	return x, nil
}

// Put copies src to the memory of rank peer that lies there where at lies here. at is a view of symmetric memory, a buffer of the heap or
// registered memory, and as long as src, which is any memory of the heap's device. The peer may use the bytes after it has consumed a signal
// that came behind the put in this stream.
func (x *Endpoint) Put(s device.Stream, peer int, at, src memory.View) error {
	return x.move(s, kernels.PutTransfer, peer, at, src)
}

// Get copies the memory of rank peer that lies there where at lies here to dst, which is as long and any memory of the heap's device. The
// peer takes no part in it.
func (x *Endpoint) Get(s device.Stream, peer int, dst, at memory.View) error {
	return x.move(s, kernels.GetTransfer, peer, at, dst)
}

// Signal counts a semaphore at rank peer up by one: what this rank has put before, on this stream, is there. Semaphores of the two directions
// have nothing to do with each other.
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
	if err := x.serves(kind.String(), mine); err != nil {
		return err
	}
	if at.Len() != mine.Len() {
		return invalid("%v: %d bytes here, %d at rank %d", kind, mine.Len(), at.Len(), peer)
	}
	place, err := x.c.Heap.Counterpart(at, peer)
	if err != nil {
		return fmt.Errorf("p2p: %v: %w", kind, err)
	}
	o := x.take(kind, peer)
	o.mine, o.peers = mine, at
	o.args.Buffer, o.args.Place = x.c.Heap.Operand(mine), place
	return x.launch(s, o)
}

// flag is a signal or a wait.
func (x *Endpoint) flag(s device.Stream, kind kernels.TransferKind, peer, semaphore int) error {
	if err := x.other(kind.String(), peer); err != nil {
		return err
	}
	if semaphore < 0 || semaphore >= x.bounds.Semaphores {
		return invalid("%v: semaphore %d, want 0 to %d", kind, semaphore, x.bounds.Semaphores-1)
	}
	o := x.take(kind, peer)
	o.args.Semaphore = semaphore
	return x.launch(s, o)
}

// other refuses a peer that is not another rank.
func (x *Endpoint) other(kind string, peer int) error {
	if peer < 0 || peer >= x.bounds.Size || peer == x.c.Group.Rank() {
		return invalid("%s: rank %d, want another of the %d ranks than %d", kind, peer, x.bounds.Size, x.c.Group.Rank())
	}
	return nil
}

// serves refuses memory that does not exist any more, or is another device's.
func (x *Endpoint) serves(kind string, v memory.View) error {
	if err := v.Valid(); err != nil {
		return fmt.Errorf("p2p: %s: %w", kind, err)
	}
	if !x.c.Heap.Serves(v) {
		return invalid("%s: a buffer at %#x is not memory of %v", kind, v.Ptr(), x.c.Heap.Device())
	}
	return nil
}

// take is an idle op or a new one.
func (x *Endpoint) take(kind kernels.TransferKind, peer int) *op {
	o := x.idle.Take()
	if o == nil {
		o = new(op)
		o.args.Issued, o.args.Timeout = &x.issued, x.options.Timeout
		o.done = func(error) { x.give(o) }
	}
	o.args.Kind, o.args.Peer = kind, peer
	return o
}

// give takes an op back.
func (x *Endpoint) give(o *op) {
	o.mine, o.peers = memory.View{}, memory.View{}
	o.args.Buffer = kernels.Buffer{}
	x.idle.Give(o)
}

func (x *Endpoint) launch(s device.Stream, o *op) error {
	o.args.Done = nil
	if s != nil {
		o.args.Done = o.done
	}
	o.args.Number = x.issued.Add(1)
	err := x.c.LaunchApart(s, &o.args)
	if s == nil || err != nil {
		x.give(o)
	}
	return err
}

// Fault returns the error of calls that have run by now, nil if there is none, on a device whose streams do not report it; the host's
// streams do.
func (x *Endpoint) Fault() error { return x.c.Fault() }

// Close waits for the calls on streams and gives the control block back. It is collective and idempotent. After a failure of the group it
// releases this rank's memory and returns. When ctx ends, calls that wait for peers give up.
func (x *Endpoint) Close(ctx context.Context) error { return x.c.Close(ctx) }
