package cuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// port is one communicator's end of an Engine.
type port struct {
	e      *Engine
	fam    family
	name   string
	offset int64 // of the control block, which begins with a struct sw_control

	fault *cuda.HostBuffer // a struct sw_fault
	aside *asideStream     // for what an exchange does next to its kernel; nil: another family
	queue *portQueue       // of launches that cross hosts, else nil

	mu    sync.Mutex // held while a launch is put together and submitted
	batch cuda.Batch

	masksMu   sync.Mutex  // guards the fields below, of a dispatcher with Masks
	masking   cuda.Stream // of the kernels that mask, and of reads
	maskBatch cuda.Batch
	maskErr   atomic.Pointer[error] // why a rank could not be masked
}

func newPort(e *Engine, fam family, name string, offset int64) (_ *port, err error) {
	p := &port{e: e, fam: fam, name: name, offset: offset}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("kernels: open %s: %w", name, err), p.Close())
		}
	}()
	if p.fault, err = e.ctx.NewHostBuffer(4096); err != nil {
		return nil, err
	}
	if err = p.begin(); err != nil {
		return nil, err
	}
	switch x := fam.(type) {
	case *dispatches:
		if x.m.Masks {
			if e.space.SegmentTable() != 0 {
				return nil, errors.New("masks need memory that stays when its process ends: not a heap with LegacyIPC")
			}
			p.masking, err = e.ctx.NewStream(0)
		}
	case *exchanges:
		p.aside, err = newAsideStream(e.ctx)
	case *hostExchanges:
		if p.aside, err = newAsideStream(e.ctx); err == nil {
			p.queue, err = e.newQueue()
		}
	}
	if err != nil {
		return nil, err
	}
	e.enter(p)
	return p, nil
}

// begin makes sure that the engine has a stream for the first call without one. Where ranks of a process share a GPU the driver holds the first
// kernel of a stream back while another rank's runs, so that must not be a kernel the others wait for. The wait ends with such a kernel, at its
// deadline, as that for a module does which is loaded.
func (p *port) begin() error {
	s, err := p.e.takeStream()
	if err != nil {
		return err
	}
	defer p.e.giveStream(s)
	if p.e.sharers == 1 {
		return nil
	}
	return errors.Join(p.e.ctx.Set(s, p.fault.Addr(), 0, 4), p.e.ctx.SynchronizeStream(s))
}

// Ready tells what GPUs do.
func (p *port) Ready() kernels.Traits {
	return kernels.Traits{Multiprocessors: true, CopyEngines: true, Shared: p.e.sharers > 1}
}

// Launch enqueues op on a CUDA stream. The arguments are copied, so op is done when Launch returns; what the kernels come
// to is told by Fault. With a nil stream Launch waits for them.
func (p *port) Launch(s device.Stream, op kernels.Operation) error {
	if s == nil {
		return p.await(op)
	}
	cs, ok := s.(*device.CUDAStream)
	if !ok {
		return fmt.Errorf("kernels: the CUDA engine needs a CUDA stream, not one of %v", s.Device())
	}
	if err := p.submit(cs.Handle(), op); err != nil {
		return err
	}
	op.Finish(nil)
	return nil
}

// await has op run on a stream of the engine.
func (p *port) await(op kernels.Operation) (err error) {
	if x, ok := p.fam.(*points); ok && x.tells(op) {
		x.senders.Lock()
		defer x.senders.Unlock()
		defer func() {
			if err == nil {
				err = x.tell(p, op.(*kernels.Messages))
			}
		}()
	}
	s, err := p.e.takeStream()
	if err != nil {
		return fmt.Errorf("kernels: %s: %w", op.Operation(), err)
	}
	defer p.e.giveStream(s)
	if err := p.submit(uintptr(s), op); err != nil {
		return err
	}
	if err := p.e.ctx.SynchronizeStream(s); err != nil {
		return fmt.Errorf("kernels: %s: %w", op.Operation(), err)
	}
	if op.Noted().Alone { // what earlier calls failed of is told by one that others take part in
		return nil
	}
	return p.Fault()
}

// submit enqueues op on a CUstream.
func (p *port) submit(stream uintptr, op kernels.Operation) error {
	if op.Within() <= 0 && !op.Noted().Alone {
		return fmt.Errorf("kernels: %s: timeout %v", op.Operation(), op.Within())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.batch.Reset()
	switch err := p.fam.add(p, op); {
	case errors.Is(err, errForeign):
		return fmt.Errorf("kernels: %s on a port of %s", op.Operation(), p.name)
	case err != nil:
		return err
	}
	if err := p.e.ctx.Submit(&p.batch, stream, p.aside.handle()); err != nil {
		return fmt.Errorf("kernels: %s: %w", op.Operation(), err)
	}
	if p.queue == nil {
		return nil
	}
	captured, err := p.e.ctx.Capturing(cuda.Stream(stream))
	p.queue.submitted(captured || err != nil) // a proxy that looks for too long is better than one that does not look
	return err
}

// world is worldOf for launches of the port.
func (p *port) world(control int64, timeout time.Duration) worldWords {
	return worldOf(&p.e.space, control, p.fault.Addr(), timeout)
}

// Fault is what a kernel of this rank could not finish: a *comm.PeerError with the group's reason where it was told to give up, an
// error of the operation, or one that is Recoverable, which Fault clears. Kernels that still run may yet fail. After
// another error than a recoverable one later launches return at once without doing anything.
func (p *port) Fault() error {
	err := p.err()
	switch failed := p.maskErr.Load(); {
	case err == nil && failed != nil:
		return *failed
	case err == nil:
		return nil
	case kernels.Recoverable(err):
		// The next launch may be on any stream, so what clears the record must be over by then.
		hit, cerr := p.clear()
		return errors.Join(p.fam.hit(err, hit), cerr)
	}
	if why := p.e.why(); why != nil {
		return fmt.Errorf("%w: %w", why, err) // who looks for a rank in it finds the lost one first
	}
	return err
}

// record is what a fault record's memory holds.
func record(b []byte) *faultWords { return cuda.StructOf[faultWords](b) }

// err reads the fault record.
func (p *port) err() error {
	b := p.fault.Bytes()
	if b == nil || atomic.LoadUint32(&record(b).kind) == faultNone {
		return nil
	}
	f := *record(b)
	if err := p.fam.fault(&f, p.e.space.Rank); err != nil {
		return err
	}
	x, crosses := p.fam.(*hostExchanges)
	if f.kind == faultAborted {
		if crosses {
			f.peer = uint32(x.name(f.peer))
		}
		return &comm.PeerError{Rank: int(f.peer), Op: p.name, Epoch: f.epoch, Err: comm.ErrAborted}
	}
	if crosses {
		if err := x.late(p, &f); err != nil {
			return err
		}
	}
	peer, does := p.culprit(int(f.peer))
	return &comm.PeerError{Rank: p.e.space.Name(peer), Op: p.name, Epoch: f.epoch, Err: fmt.Errorf("%w: %s", comm.ErrTimeout, does)}
}

// culprit is the rank to blame for a wait for peer, and what it does as far as can be seen: of all ranks the one that has begun the fewest
// calls of the communicator, since who waits in this call has begun it.
func (p *port) culprit(peer int) (rank int, does string) {
	size := p.e.space.Size
	begun := make([]uint64, size)
	word := make([]byte, 8)
	for r := range size {
		for _, at := range p.fam.controls(p.offset) {
			if err := p.e.read(word, p.e.space.Addr(r, at)); err != nil {
				return peer, fmt.Sprintf("what that rank does cannot be seen: %v", err)
			}
			begun[r] += binary.LittleEndian.Uint64(word)
		}
	}
	for r := range size {
		if begun[r] < begun[peer] {
			peer = r
		}
	}
	if own := begun[p.e.space.Rank]; begun[peer] < own {
		if call, seq := p.e.space.Instead(peer); seq != 0 {
			return peer, fmt.Sprintf("that rank has made %d calls of %d, and waits in %s, which this rank has not made", begun[peer], own, call)
		}
		return peer, fmt.Sprintf("that rank has made %d calls of %d: it comes later, makes another call here, or hangs", begun[peer], own)
	}
	return peer, "that rank has begun the call, and not come further"
}

// controlFault is where fault lies in a struct sw_control.
const controlFault = 12

// clear forgets the fault, here and in the structs sw_control, and returns the numbers of those that had one.
func (p *port) clear() (hit []int, err error) {
	atomic.StoreUint32(&record(p.fault.Bytes()).kind, faultNone)
	e := p.e
	s, err := e.takeStream()
	if err != nil {
		return nil, fmt.Errorf("kernels: clear a fault: %w", err)
	}
	defer e.giveStream(s)
	var kind [4]byte
	for i, at := range p.fam.controls(p.offset) {
		place := e.space.Addr(e.space.Rank, at) + controlFault
		err = errors.Join(err, e.ctx.Read(s, kind[:], place))
		if kind == [4]byte{} {
			continue
		}
		hit = append(hit, i)
		err = errors.Join(err, e.ctx.Set(s, place, 0, 4))
	}
	if err = errors.Join(err, e.ctx.SynchronizeStream(s)); err != nil {
		return hit, fmt.Errorf("kernels: clear a fault: %w", err)
	}
	return hit, nil
}

// Drain waits for the device: calls that were captured have no last stream.
func (p *port) Drain(ctx context.Context, _ device.Stream) error {
	return kernels.Drain(ctx, p.e.ctx.Synchronize, p.stop)
}

// Rest is what launches have left behind that no later one can put right. All launches of all ranks have ended.
func (p *port) Rest() error {
	if f, ok := p.fam.(interface{ rest(p *port) error }); ok {
		return f.rest(p)
	}
	return nil
}

// stop makes kernels that wait return, and those that come after them as soon as they wait, or at once after a fault. No call of the driver
// is needed: another thread may be in one that waits for these kernels.
func (p *port) stop() { atomic.StoreUint64(&record(p.fault.Bytes()).stop, 1) }

// Close releases the record and the streams.
func (p *port) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.e.leave(p)
	err := errors.Join(p.queue.close(), p.fault.Close(), p.aside.close())
	if p.masking != 0 {
		err = errors.Join(err, p.e.ctx.DestroyStream(p.masking))
		p.masking = 0
	}
	return err
}
