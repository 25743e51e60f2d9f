package cuda

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"encoding/binary"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Engine launches the kernels of one rank on one symmetric heap. Its methods may be called from several goroutines.
type Engine struct {
	ctx    *cuda.Context
	space  kernels.Space
	module cuda.Module
	packet cuda.Function
	bulk   bool // the device has a bulk copy engine
	limit  int  // blocks of the exchange kernel that run at once
	small  int  // blocks of the packet kernel that run at once
	fn     cuda.Function
	opens  cuda.Function
	closes cuda.Function
	moves  cuda.Function
	fault  *cuda.HostBuffer
	flags  cuda.LaunchFlags
	side   cuda.Stream // of copies that stay on the device
	fork   cuda.Event
	join   cuda.Event
	step   cuda.Event

	mu    sync.Mutex
	batch cuda.Batch
	args  []byte
}

// Exchange is one launch of the variable-size all-to-all.
type Exchange struct {
	Channels *Channels
	// Routes is the plan. Window, ChunkBytes and Staged are not read: Tuning takes their place.
	Routes *kernels.Routes
	// Src and Dst are the addresses of the user's buffers on the device.
	Src, Dst uintptr
	// DstOffset is the place of Dst in this rank's segment, or -1 when peers cannot write it.
	DstOffset int64
	// Splits, when not 0, is the address of the plan's four arrays of int64 in device memory: send bytes, send offsets,
	// receive bytes, receive offsets, Channels.Size numbers each. The kernel reads them when it runs; those of Routes
	// are then only an estimate.
	Splits uintptr
	// Places, when set, are the offsets in the peers' segments at which this rank's messages go: RecvOffsets of this rank
	// there, from the start of the segment. The copy engines then move every message above PacketBytes, and no
	// multiprocessor does. They must be right: a receiver that has granted another place makes Err report it, but the copies have
	// been made. The receivers' outputs must be writable by peers.
	Places []int64
	// Timeout bounds every wait for a peer.
	Timeout time.Duration
	Tuning  Tuning
}

// Tuning is how a rank does its part. It is local: peers need not agree on any of it. The zero value works.
type Tuning struct {
	// Blocks is how many multiprocessors the kernel takes, at most Channels.Lanes for messages above PacketBytes. 0 means a
	// default.
	Blocks int
	// Staged takes messages in through staging even where peers could write Dst.
	Staged bool
	// Mesh serves all peers at the same time instead of one after the other.
	Mesh bool
	// Paced begins a step of the ring when the message of the step before has arrived, which keeps the ranks from colliding
	// at a receiver. It has no effect on a mesh.
	Paced bool
	// Tail, for copies by the copy engines, is how many bytes at the end of each message a few multiprocessors move while
	// the copy engine prepares its next copy. 0 leaves the multiprocessors alone.
	Tail int64
	// Slack is how many chunks of that message may still be under way.
	Slack int
	// Bulk moves aligned messages with the bulk copy engine, where the device has one.
	Bulk bool
	// Aside copies what stays on the rank with a copy engine when it has at least this many bytes, so that the
	// multiprocessors have their stores for the peers. 0 means never.
	Aside int64
}

// New makes the engine of space.Rank on ctx's device. It loads the kernels, which can wait for running ones: control
// plane. The heap and ctx outlive it; Close releases it.
func New(ctx *cuda.Context, space kernels.Space) (_ *Engine, err error) {
	if space.Size < 1 || space.Size > maxRanks {
		return nil, fmt.Errorf("kernels: %d ranks: the CUDA engine serves 1 to %d", space.Size, maxRanks)
	}
	e := &Engine{ctx: ctx, space: space, args: make([]byte, copyArgsBytes), flags: cuda.RemoteDomain}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("kernels: cuda engine: %w", err), e.Close())
		}
	}()
	if e.module, err = ctx.LoadModule(alltoallvImage); err != nil {
		return nil, err
	}
	for _, k := range []struct {
		name string
		f    *cuda.Function
	}{{"alltoallv_packet", &e.packet}, {"alltoallv", &e.fn}, {"alltoallv_open", &e.opens}, {"alltoallv_close", &e.closes}, {"alltoallv_move", &e.moves}} {
		if *k.f, err = ctx.Function(e.module, k.name); err != nil {
			return nil, err
		}
	}
	major, err := ctx.Device().Attribute(cuda.ComputeMajor)
	if err != nil {
		return nil, err
	}
	shared := 0
	if e.bulk = major >= 9; e.bulk {
		e.flags |= cuda.Programmatic
		shared = bulkStages * bulkBytes
		if err := ctx.SetFunctionAttribute(e.fn, cuda.FunctionMaxDynamicShared, shared); err != nil {
			return nil, err
		}
	}
	multiprocessors, err := ctx.Device().Attribute(cuda.Multiprocessors)
	if err != nil {
		return nil, err
	}
	for _, k := range []struct {
		f               cuda.Function
		threads, shared int
		limit           *int
	}{{e.fn, exchangeThreads, shared, &e.limit}, {e.packet, packetThreads, 0, &e.small}} {
		n, err := ctx.BlocksPerMultiprocessor(k.f, k.threads, k.shared)
		if err != nil {
			return nil, err
		}
		*k.limit = n * multiprocessors
	}
	if e.fault, err = ctx.NewHostBuffer(4096); err != nil {
		return nil, err
	}
	if e.side, err = ctx.NewStream(0); err != nil {
		return nil, err
	}
	if e.fork, err = ctx.NewEvent(false); err != nil {
		return nil, err
	}
	if e.join, err = ctx.NewEvent(false); err != nil {
		return nil, err
	}
	if e.step, err = ctx.NewEvent(false); err != nil {
		return nil, err
	}
	return e, nil
}

// ShareDevice tells the engine, before its first launch, that several ranks run on its GPU, this one included. Their kernels
// wait for each other, so all of them must fit on the GPU at once: each rank gets its share of the multiprocessors, and
// no kernel is set up before its predecessor has ended.
func (e *Engine) ShareDevice(ranks int) error {
	if ranks <= 1 {
		return nil
	}
	if e.limit/ranks == 0 || e.small/ranks == 0 {
		return fmt.Errorf("kernels: %d ranks do not fit on %v", ranks, e.ctx.Device())
	}
	e.limit, e.small = e.limit/ranks, e.small/ranks
	e.flags &^= cuda.Programmatic
	return nil
}

// Close releases the kernels. Nothing of the engine may be running. It is idempotent.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.fault.Close()
	for _, ev := range []*cuda.Event{&e.fork, &e.join, &e.step} {
		if *ev != 0 {
			err = errors.Join(err, e.ctx.DestroyEvent(*ev))
			*ev = 0
		}
	}
	if e.side != 0 {
		err = errors.Join(err, e.ctx.DestroyStream(e.side))
	}
	e.side = 0
	if e.module != 0 {
		err = errors.Join(err, e.ctx.UnloadModule(e.module))
		e.module = 0
	}
	return err
}

// AllToAllV enqueues the exchange on a stream (a CUstream; 0 is the legacy default stream). Every rank of the heap must
// launch its part. Launches of one communicator are ordered by the caller. The error is one of the launch; what happens
// later is told by Err.
func (e *Engine) AllToAllV(stream uintptr, x *Exchange) error {
	if err := x.validate(e.space.Size); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.batch.Reset()
	e.add(&e.batch, x)
	if err := e.ctx.Submit(&e.batch, stream, uintptr(e.side)); err != nil {
		return fmt.Errorf("kernels: alltoallv: %w", err)
	}
	return nil
}

func (x *Exchange) validate(size int) error {
	c := x.Channels
	switch {
	case c.Size != size:
		return fmt.Errorf("kernels: alltoallv: channels of %d ranks on a heap of %d", c.Size, size)
	case c.Lanes < 1 || c.Slots < 1 || c.SlotBytes < 128 || c.SlotBytes%128 != 0 || c.PacketBytes < 0:
		return fmt.Errorf("kernels: alltoallv: channels %+v", *c)
	case len(x.Routes.Order) != size-1 || len(x.Routes.ReverseOrder) != size-1:
		return fmt.Errorf("kernels: alltoallv: orders of %d and %d peers for %d ranks", len(x.Routes.Order), len(x.Routes.ReverseOrder), size)
	case x.Places != nil && (len(x.Places) != size || x.Splits != 0 || x.DstOffset < 0):
		return errors.New("kernels: alltoallv: copies need a place on every rank, splits known to the host and an output that peers can write")
	case x.Timeout <= 0:
		return fmt.Errorf("kernels: alltoallv: timeout %v", x.Timeout)
	}
	return nil
}

// add appends the launch to a batch. e.mu is held.
func (e *Engine) add(b *cuda.Batch, x *Exchange) {
	t, r, c := x.Tuning, x.Routes, x.Channels
	var flags uint32
	for _, f := range [...]struct {
		on  bool
		bit uint32
	}{{t.Staged, flagStaged}, {t.Mesh, flagMesh}, {t.Paced && !t.Mesh, flagPaced}, {t.Bulk && e.bulk, flagBulk}} {
		if f.on {
			flags |= f.bit
		}
	}
	l := cuda.Launch{Flags: e.flags}
	if x.Places != nil {
		e.addCopies(b, x)
		return
	}
	groups, large := int64(0), x.Splits != 0
	for p := range c.Size {
		if p == e.space.Rank {
			continue
		}
		n := max(r.SendBytes[p], r.RecvBytes[p])
		large = large || n > c.PacketBytes
		groups = max(groups, (n+packetGroupPayload-1)/packetGroupPayload)
	}
	if large {
		l.Function, l.Block = e.fn, [3]uint32{exchangeThreads, 1, 1}
		blocks := t.Blocks
		if blocks == 0 {
			blocks = c.Lanes
		}
		l.Grid = [3]uint32{uint32(max(1, min(blocks, c.Lanes, e.limit))), 1, 1}
		if flags&flagBulk != 0 {
			l.SharedBytes = bulkStages * bulkBytes
		}
	} else {
		l.Function, l.Block = e.packet, [3]uint32{packetThreads, 1, 1}
		blocks := t.Blocks
		if blocks == 0 {
			warps := max(1, groups) * int64(max(1, c.Size-1))
			blocks = int(min(maxPacketBlocks, max(minPacketBlocks, (warps+packetWarps-1)/packetWarps)))
		}
		l.Grid = [3]uint32{uint32(max(1, min(blocks, e.small))), 1, 1}
	}
	exchangeArgs(e.args[:argsBytes], uint64(e.space.Base), uint64(e.space.Stride), e.space.Rank, e.fault.Addr(), flags, x)
	l.Args = e.args[:argsBytes]
	me := e.space.Rank
	own := r.SendBytes[me]
	if !large || x.Splits != 0 || t.Aside <= 0 || own < t.Aside {
		b.Launch(0, l)
		return
	}
	binary.LittleEndian.PutUint64(e.args[argsOwn:], 0)
	b.Record(0, e.fork)
	b.WaitEvent(1, e.fork)
	b.Copy(1, x.Dst+uintptr(r.RecvOffsets[me]), x.Src+uintptr(r.SendOffsets[me]), own)
	b.Record(1, e.join)
	b.Launch(0, l)
	b.WaitEvent(0, e.join)
}

// addCopies appends an exchange by the copy engines: one message after the other, since they need order to be fast.
func (e *Engine) addCopies(b *cuda.Batch, x *Exchange) {
	r, c := x.Routes, x.Channels
	exchangeArgs(e.args[:argsBytes], uint64(e.space.Base), uint64(e.space.Stride), e.space.Rank, e.fault.Addr(), 0, x)
	for p, at := range x.Places {
		binary.LittleEndian.PutUint64(e.args[argsBytes+8*p:], uint64(at))
	}
	l := cuda.Launch{Function: e.opens, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{copyThreads, 1, 1}, Flags: e.flags, Args: e.args}
	b.Launch(0, l)
	me := e.space.Rank
	own := r.SendBytes[me]
	aside := own > 0 || x.Tuning.Tail > 0
	if aside {
		b.Record(0, e.fork)
		b.WaitEvent(1, e.fork)
	}
	if own > 0 {
		b.Copy(1, x.Dst+uintptr(r.RecvOffsets[me]), x.Src+uintptr(r.SendOffsets[me]), own)
	}
	for _, p := range r.Order {
		n := r.SendBytes[p]
		if n <= c.PacketBytes {
			continue
		}
		tail := int64(0)
		if x.Tuning.Tail > 0 && n > 4*x.Tuning.Tail {
			tail = x.Tuning.Tail
		}
		dst := e.space.Base + uintptr(int64(p)*e.space.Stride+x.Places[p])
		src := x.Src + uintptr(r.SendOffsets[p])
		b.Copy(0, dst, src, n-tail)
		if tail > 0 {
			b.Record(0, e.step)
			b.WaitEvent(1, e.step)
			var m [moveArgsBytes]byte
			binary.LittleEndian.PutUint64(m[:], uint64(dst)+uint64(n-tail))
			binary.LittleEndian.PutUint64(m[8:], uint64(src)+uint64(n-tail))
			binary.LittleEndian.PutUint64(m[16:], uint64(tail))
			b.Launch(1, cuda.Launch{Function: e.moves, Grid: [3]uint32{8, 1, 1}, Block: [3]uint32{sendThreads, 1, 1}, Flags: e.flags &^ cuda.Programmatic, Args: m[:]})
		}
	}
	if aside {
		b.Record(1, e.join)
		b.WaitEvent(0, e.join)
	}
	l.Function, l.Flags = e.closes, e.flags&^cuda.Programmatic
	b.Launch(0, l)
}

const exchangeThreads = sendThreads + pilotThreads + bulkThreads + recvThreads

// How many blocks the packet kernel takes by default: one for every packetWarps groups of packets, within limits. On 8
// GPUs, 16 blocks were fastest for 8 KiB a rank and 48 for 2 MiB.
const (
	minPacketBlocks = 16
	maxPacketBlocks = 48
	packetWarps     = 4
)

// Err is what a kernel of this rank could not finish: a *comm.PeerError, or a *kernels.CountMismatchError. It is nil as
// long as all went well, costs one load and needs no synchronisation; kernels that still run may yet fail. After a
// PeerError later launches return at once without doing anything.
func (e *Engine) Err() error {
	b := e.fault.Bytes()
	if b == nil || shm.Word32(b, faultKind).Load() == 0 {
		return nil
	}
	peer, epoch := int(binary.LittleEndian.Uint32(b[faultPeer:])), binary.LittleEndian.Uint64(b[faultEpoch:])
	sending := b[faultSending] != 0
	switch shm.Word32(b, faultKind).Load() {
	case faultMismatch:
		m := &kernels.CountMismatchError{
			Src: peer, Dst: e.space.Rank, Epoch: epoch,
			Sent: binary.LittleEndian.Uint64(b[faultSent:]), Expected: binary.LittleEndian.Uint64(b[faultExpect:]),
		}
		if sending {
			m.Src, m.Dst = e.space.Rank, peer
		}
		return m
	case faultPlace:
		return fmt.Errorf("kernels: call %d: rank %d was to receive at %d of its segment and granted %d", epoch, peer,
			binary.LittleEndian.Uint64(b[faultSent:]), binary.LittleEndian.Uint64(b[faultExpect:]))
	case faultAborted:
		return &comm.PeerError{Rank: peer, Op: "alltoallv", Epoch: epoch, Err: comm.ErrAborted}
	default:
		return &comm.PeerError{Rank: peer, Op: "alltoallv", Epoch: epoch, Err: comm.ErrTimeout}
	}
}

// ClearMismatch forgets a *kernels.CountMismatchError, so that Err reports later ones. It is enqueued on the stream that
// the communicator with these channels uses, behind its work so far, which the caller has waited for.
func (e *Engine) ClearMismatch(stream uintptr, c *Channels) error {
	b := e.fault.Bytes()
	if b == nil || shm.Word32(b, faultKind).Load() != faultMismatch {
		return nil
	}
	shm.Word32(b, faultKind).Store(0)
	own := e.space.Base + uintptr(int64(e.space.Rank)*e.space.Stride+c.Offset)
	if err := e.ctx.Set(cuda.Stream(stream), own+controlFault, 0, 4); err != nil {
		return fmt.Errorf("kernels: clear mismatch: %w", err)
	}
	return nil
}
