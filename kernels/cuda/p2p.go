package cuda

import (
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// pointKernels are the kernels of transfers between two ranks.
type pointKernels struct{ move, signal, wait cuda.Function }

func (k *pointKernels) load(e *Engine) error {
	return e.loadModule("p2p", entry{"p2p_move", &k.move}, entry{"p2p_signal", &k.signal}, entry{"p2p_wait", &k.wait})
}

const (
	// copyEngineBytes is the size from which a copy engine moves a put or a get.
	copyEngineBytes = 4 << 20
	// blockBytes is what each block of a smaller one has, up to the most blocks.
	blockBytes    = 16 << 10
	defaultMovers = 32
)

// points are the launches of one communicator between two ranks. It is a family. Launches on different streams run at the same time.
type points struct {
	*kernels.PointBounds
	offset  int64
	k       *pointKernels
	timeout time.Duration // of the last wait
	args    pointArgs
}

func newPoints(b *kernels.PointBounds, offset int64) *points {
	return &points{PointBounds: b, offset: offset}
}

// defaults have no boxes, which are for messages.
func (x *points) defaults(multiprocessors int) {
	x.Semaphores = int(kernels.Default(int64(x.Semaphores), kernels.DefaultSemaphores))
	x.Blocks = min(int(kernels.Default(int64(x.Blocks), defaultMovers)), max(multiprocessors, 1))
	x.Boxes, x.EagerBytes, x.StagingBytes, x.ParkBytes = 0, 0, 0, 0
}

func (x *points) check(ranks int) error {
	switch c := x.PointBounds; {
	case c.Size != ranks:
		return fmt.Errorf("kernels: p2p: bounds of %d ranks on a heap of %d", c.Size, ranks)
	case c.Semaphores < 1 || c.Blocks < 1:
		return fmt.Errorf("kernels: p2p: bounds %+v", *c)
	}
	return nil
}

func (x *points) block() pointBlock {
	return layPointBlock(x.offset, int64(x.Size), int64(x.Semaphores))
}

func (x *points) layout() kernels.Layout {
	b := x.block()
	return kernels.Layout{Bytes: b.end - b.control, Zero: b.end - b.control}
}

// control is the place of the struct sw_control for a peer.
func (x *points) control(peer int) int64 { return x.block().control + int64(peer)*controlAlign }

func (x *points) controls(offset int64) (all []int64) {
	b := layPointBlock(offset, int64(x.Size), int64(x.Semaphores))
	for p := range x.Size {
		all = append(all, b.control+int64(p)*controlAlign)
	}
	return all
}

// fault says what a wait has seen of its peer. The signal that it waited for is not lost, so the communicator stays usable.
func (x *points) fault(f *faultWords, _ int) error {
	if f.kind != faultTimeout {
		return nil
	}
	return &kernels.WaitError{Err: &comm.PeerError{Rank: int(f.peer), Op: kernels.WaitTransfer.String(), Err: fmt.Errorf(
		"%w after %v (semaphore %d): it has signalled %d times, and this rank has consumed %d", comm.ErrTimeout, x.timeout, f.part, f.sent, f.expected)}}
}

// hit names the other peers for which this rank has waited too long; of those there is no record.
func (x *points) hit(err error, controls []int) error {
	var first *comm.PeerError
	errors.As(err, &first)
	for _, peer := range controls {
		if peer != first.Rank {
			err = errors.Join(err, &kernels.WaitError{Err: &comm.PeerError{Rank: peer, Op: kernels.WaitTransfer.String(), Err: comm.ErrTimeout}})
		}
	}
	return err
}

func (x *points) load(e *Engine) (err error) {
	x.k, err = loadOnce[pointKernels](e)
	return err
}

// add appends a transfer. A large put or get goes to a copy engine.
func (x *points) add(p *port, op kernels.Operation) error {
	a, ok := op.(*kernels.Transfer)
	switch {
	case !ok:
		return fmt.Errorf("kernels: %s between two ranks on GPUs: %w", op.Operation(), comm.ErrUnsupported)
	case a.Timeout <= 0:
		return fmt.Errorf("kernels: %s: timeout %v", op.Operation(), a.Timeout)
	}
	x.args = pointArgs{world: worldOf(&p.e.space, x.control(a.Peer), p.fault.Addr(), a.Timeout.Nanoseconds()), block: x.block(),
		peer: uint32(a.Peer), semaphore: uint32(a.Semaphore), semaphores: uint32(x.Semaphores), bytes: a.Buffer.Bytes}
	l := cuda.Launch{Function: x.k.signal, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{pointWaiters, 1, 1}, Flags: p.e.flags}
	switch a.Kind {
	case kernels.WaitTransfer:
		l.Function, x.timeout = x.k.wait, a.Timeout
	case kernels.PutTransfer, kernels.GetTransfer:
		n := a.Buffer.Bytes
		dst, src := p.e.space.Addr(a.Peer, a.Place), a.Buffer.Ptr
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
		l.Function, l.Grid[0], l.Block[0] = x.k.move, uint32(blocks), pointThreads
	}
	l.Args = cuda.BytesOf(&x.args)
	p.batch.Launch(0, l)
	return nil
}
