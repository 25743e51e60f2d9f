package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

const (
	// copyEngineBytes is the size from which a copy engine moves a put or a get.
	copyEngineBytes = 4 << 20
	// blockBytes is what each block of a smaller one has, up to the most blocks.
	blockBytes    = 16 << 10
	defaultMovers = 32
	mostMovers    = 128
	// Staging of messages has slots of the most bytes, or smaller ones so that those of all peers do not take more than the room.
	mostMessageStaging, messageStagingRoom = 128 << 10, 32 << 20
)

// points are the launches of one communicator between two ranks. It is a family. Launches on different streams run at the same time.
type points struct {
	*kernels.PointBounds
	offset             int64
	move, signal, wait cuda.Function
	messages, few      cuda.Function
	resident           int           // blocks of messages that run at the same time
	timeout            time.Duration // of the last wait
	args               pointArgs
	list               messagesArgs // of the last messages
	p                  *port        // of messages, nil before the first
	senders            sync.Mutex   // held by a launch without a stream until it has told whose messages it has received
}

func newPoints(b *kernels.PointBounds, offset int64) *points {
	return &points{PointBounds: b, offset: offset}
}

// defaults are the host's, but for staging, and for copies of messages whose receivers are late.
func (x *points) defaults(multiprocessors, free int) {
	x.Semaphores = int(kernels.Default(int64(x.Semaphores), kernels.DefaultSemaphores))
	x.Blocks = min(int(kernels.Default(int64(x.Blocks), int64(min(defaultMovers, free)))), max(multiprocessors, 1), mostMovers)
	if x.StagingBytes == 0 {
		fit := messageStagingRoom / int64(x.Size*x.Blocks*stagingSlots) / tileBytes * tileBytes
		x.StagingBytes = min(max(fit, tileBytes), mostMessageStaging)
	}
	x.DefaultMessages()
	x.Boxes = 1 << bits.Len(uint(x.Boxes-1)) // a box is found by a mask
	x.ParkBytes = 0
}

func (x *points) members() int { return x.Size }

func (x *points) check() error {
	if c := x.PointBounds; c.Semaphores < 1 || c.Blocks < 1 || c.Boxes < 1 || c.Boxes&(c.Boxes-1) != 0 || c.EagerBytes < 0 || c.StagingBytes < kernels.LineBytes {
		return fmt.Errorf("kernels: p2p: bounds %+v", *c)
	}
	return nil
}

func (x *points) block() pointBlock {
	return layPointBlock(x.offset, int64(x.Size), int64(x.Semaphores))
}

// messageBlock lies behind it.
func (x *points) messageBlock() messageBlock {
	b := x.block()
	return layMessageBlock(kernels.AlignUp(b.end, controlAlign), b.control, int64(x.Size), int64(x.Boxes), x.payload(), int64(x.Blocks), x.StagingBytes)
}

// payload is the bytes of a box.
func (x *points) payload() int64 {
	return (x.EagerBytes + packetGroupPayload - 1) / packetGroupPayload * packetGroupBytes
}

func (x *points) layout() kernels.Layout {
	b := x.messageBlock()
	return kernels.Layout{Bytes: b.end - x.offset, Zero: b.staging - x.offset}
}

// control is the place of the struct sw_control for a peer.
func (x *points) control(peer int) int64 { return x.block().control + int64(peer)*controlAlign }

func (x *points) controls(offset int64) (all []int64) {
	b := layPointBlock(offset, int64(x.Size), int64(x.Semaphores))
	for p := range x.Size {
		all = append(all, b.control+int64(p)*controlAlign)
	}
	return append(all, int64(x.messageBlock().anyone))
}

// fault says what a wait has seen of its peer. The signal that it waited for is not lost, so the communicator stays usable.
func (x *points) fault(f *faultWords, me int) error {
	switch {
	case f.part == messageFault && f.kind != faultAborted:
		return x.messageFault(f, me)
	case f.part == messageFault && f.peer == anyRank: // of those that it waits for, one is named
		f.peer = uint32((me + 1) % x.Size)
		return nil
	case f.kind != faultTimeout:
		return nil
	}
	return &kernels.WaitError{Err: &comm.PeerError{Rank: int(f.peer), Op: kernels.WaitTransfer.String(), Err: fmt.Errorf(
		"%w after %v (semaphore %d): it has signalled %d times, and this rank has consumed %d", comm.ErrTimeout, x.timeout, f.part, f.sent, f.expected)}}
}

// hit names the other peers of which this rank has a fault; of those there is no record.
func (x *points) hit(err error, controls []int) error {
	var named *comm.PeerError
	var sizes *kernels.MessageMismatchError
	ofPeer, ofSizes := errors.As(err, &named), errors.As(err, &sizes)
	for _, peer := range controls {
		switch {
		case ofPeer && peer == named.Rank, ofSizes && (peer == sizes.Src || peer == sizes.Dst), !ofPeer && !ofSizes && peer == x.Size:
		case peer == x.Size:
			err = errors.Join(err, &kernels.WaitError{Err: fmt.Errorf("kernels: recv from any rank: %w", comm.ErrTimeout)})
		default:
			err = errors.Join(err, &kernels.WaitError{Err: &comm.PeerError{Rank: peer, Op: x.Family(), Err: errAlso}})
		}
	}
	return err
}

// errAlso is of a peer whose fault there is no room to describe.
var errAlso = fmt.Errorf("%w, or it has another size for a message", comm.ErrTimeout)

func (x *points) load(e *Engine) error {
	err := e.loadModule("p2p", entry{"p2p_move", &x.move}, entry{"p2p_signal", &x.signal}, entry{"p2p_wait", &x.wait})
	if err == nil {
		err = e.loadModule("messages", entry{"p2p_messages", &x.messages}, entry{"p2p_few_messages", &x.few})
	}
	if err == nil {
		x.resident, err = e.blocks(x.messages, messageThreads, 0)
	}
	return err
}

// add appends a transfer, or messages. A large put or get goes to a copy engine.
func (x *points) add(p *port, op kernels.Operation) error {
	if m, ok := op.(*kernels.Messages); ok {
		return x.addMessages(p, m)
	}
	a, ok := op.(*kernels.Transfer)
	if !ok {
		return errForeign
	}
	x.args = pointArgs{world: p.world(x.control(a.Peer), a.Timeout), block: x.block(),
		peer: uint32(a.Peer), semaphore: uint32(a.Semaphore), semaphores: uint32(x.Semaphores), bytes: a.Buffer.Bytes}
	l := cuda.Launch{Function: x.signal, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{pointWaiters, 1, 1}, Flags: p.e.flags}
	switch a.Kind {
	case kernels.WaitTransfer:
		l.Function, x.timeout = x.wait, a.Timeout
	case kernels.PutTransfer, kernels.GetTransfer:
		n := a.Buffer.Bytes
		dst, src := a.Lent.Ptr, a.Buffer.Ptr
		if a.Lent.Bytes == 0 {
			dst = p.e.space.Addr(a.Peer, a.Place)
		}
		if a.Kind == kernels.GetTransfer {
			dst, src = src, dst
		}
		switch {
		case n == 0:
			return nil
		case n >= copyEngineBytes:
			p.batch.Copy(0, dst, src, n)
			return nil
		}
		x.args.dst, x.args.src = uint64(dst), uint64(src)
		blocks := min(int64(x.Blocks), (n+blockBytes-1)/blockBytes)
		l.Function, l.Grid[0], l.Block[0] = x.move, uint32(blocks), pointThreads
	}
	l.Args = cuda.BytesOf(&x.args)
	p.batch.Launch(0, l)
	return nil
}
