package cuda

import (
	"errors"
	"fmt"
	"sync"
	"time"

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
	limit  int // blocks of the exchange kernel that run at once
	small  int // blocks of the packet kernel that run at once
	shared int // dynamic shared memory that a block of the exchange kernel can have
	fn     cuda.Function
	opens  cuda.Function
	own    cuda.Function
	closes cuda.Function
	cycles float64 // of a multiprocessor in a nanosecond
	fault  *cuda.HostBuffer
	flags  cuda.LaunchFlags
	side   cuda.Stream // of copies that stay on the device
	fork   cuda.Event
	join   cuda.Event

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
	// SrcBytes and DstBytes are how long Src and Dst are, which Splits must not reach past.
	SrcBytes, DstBytes int64
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
	// Blocks is how many multiprocessors the kernel takes, at most Channels.Stripes for messages above PacketBytes. 0 means a
	// default. With Exchange.Places it is how many copy what stays on the rank; 0 leaves that to a copy engine.
	Blocks int
	// Staged takes messages in through staging even where peers could write Dst.
	Staged bool
	// Mesh serves all peers at the same time instead of one after the other.
	Mesh bool
	// Apart lets blocks of their own, as many as send, copy messages out of staging, where the device has room for them: what a
	// multiprocessor writes to its own memory takes from what it can send.
	Apart bool
	// Rate spreads the stores of the blocks together over time, to so many bytes a nanosecond. Senders that offer a little less
	// than a link carries keep their order around the ring, and the link is then used better than by all they could store.
	// 0 means as fast as they can.
	Rate float64
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
	}{{"alltoallv_packet", &e.packet}, {"alltoallv", &e.fn}, {"alltoallv_open", &e.opens}, {"alltoallv_close", &e.closes}, {"alltoallv_own", &e.own}} {
		if *k.f, err = ctx.Function(e.module, k.name); err != nil {
			return nil, err
		}
	}
	major, err := ctx.Device().Attribute(cuda.ComputeMajor)
	if err != nil {
		return nil, err
	}
	if major >= 9 {
		e.flags |= cuda.Programmatic
	}
	most, err := ctx.Device().Attribute(cuda.SharedBytesPerBlockOptIn)
	if err != nil {
		return nil, err
	}
	e.shared = min(maxSharedBytes, most-fixedSharedBytes)
	if err := ctx.SetFunctionAttribute(e.fn, cuda.FunctionMaxDynamicShared, e.shared); err != nil {
		return nil, err
	}
	kilohertz, err := ctx.Device().Attribute(cuda.ClockRate)
	if err != nil {
		return nil, err
	}
	e.cycles = float64(kilohertz) / 1e6
	multiprocessors, err := ctx.Device().Attribute(cuda.Multiprocessors)
	if err != nil {
		return nil, err
	}
	for _, k := range []struct {
		f               cuda.Function
		threads, shared int
		limit           *int
	}{{e.fn, exchangeThreads, e.shared, &e.limit}, {e.packet, packetThreads, 0, &e.small}} {
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
	for _, ev := range []*cuda.Event{&e.fork, &e.join} {
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
	if n := sharedBytes(x.Channels, min(x.Channels.Stripes, e.limit), recvThreads); n > e.shared {
		return fmt.Errorf("kernels: alltoallv: %d stripes of %d ranks on at most %d blocks need %d bytes of shared memory", x.Channels.Stripes, x.Channels.Size, e.limit, n)
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
	case c.Stripes < 1 || c.Slots < 1 || c.SlotBytes < 128 || c.SlotBytes%128 != 0 || c.PacketBytes < 0:
		return fmt.Errorf("kernels: alltoallv: channels %+v", *c)
	case len(x.Routes.Order) != size-1 || len(x.Routes.ReverseOrder) != size-1:
		return fmt.Errorf("kernels: alltoallv: orders of %d and %d peers for %d ranks", len(x.Routes.Order), len(x.Routes.ReverseOrder), size)
	case x.Places != nil && (len(x.Places) != size || x.Splits != 0 || x.DstOffset < 0):
		return errors.New("kernels: alltoallv: copies need a place on every rank, splits known to the host and an output that peers can write")
	case x.Timeout <= 0:
		return fmt.Errorf("kernels: alltoallv: timeout %v", x.Timeout)
	case x.Tuning.Rate < 0:
		return fmt.Errorf("kernels: alltoallv: rate %v", x.Tuning.Rate)
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
	}{{t.Staged, flagStaged}, {t.Mesh, flagMesh}} {
		if f.on {
			flags |= f.bit
		}
	}
	l := cuda.Launch{Flags: e.flags}
	if x.Places != nil {
		e.addCopies(b, x)
		return
	}
	groups, large, interval, senders := int64(0), x.Splits != 0, uint32(0), 0
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
			blocks = c.Stripes
		}
		most := min(c.Stripes, e.limit)
		for blocks = max(1, min(blocks, most)); blocks < most && sharedBytes(c, blocks, recvThreads) > e.shared; {
			blocks++ // fewer would have more stripes each than they have room for
		}
		grid, takers := blocks, recvThreads
		if staged := t.Staged || x.DstOffset < 0; t.Apart && staged && c.Size > 1 && 2*blocks <= e.limit && sharedBytes(c, blocks, apartThreads) <= e.shared {
			senders, grid, takers = blocks, 2*blocks, apartThreads
		}
		l.Grid = [3]uint32{uint32(grid), 1, 1}
		l.SharedBytes = uint32(sharedBytes(c, blocks, takers))
		if t.Rate > 0 {
			interval = uint32(min(tileBytes*float64(blocks)/t.Rate*e.cycles, 1<<24))
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
	encodeExchange(e.args[:exchangeArgsBytes], &e.space, e.fault.Addr(), flags, interval, senders, x)
	l.Args = e.args[:exchangeArgsBytes]
	b.Launch(0, l)
}

// sharedBytes is the dynamic shared memory of a block of the exchange kernel: what its warps tell one another of every stripe
// of a message that the block looks after. takers is how many of its threads copy messages out of staging.
func sharedBytes(c *Channels, blocks, takers int) int {
	items := (c.Size - 1) * ((c.Stripes + blocks - 1) / blocks)
	return items * (itemBytes + 8*c.Slots + 4*(3+takers/32))
}

// addCopies appends an exchange by the copy engines: one message after the other, since they need order to be fast. What stays on the
// rank takes some of their time where they copy it too, least when it comes before the peers are awaited.
func (e *Engine) addCopies(b *cuda.Batch, x *Exchange) {
	r, c := x.Routes, x.Channels
	encodeExchange(e.args[:exchangeArgsBytes], &e.space, e.fault.Addr(), 0, 0, 0, x)
	for p, at := range x.Places {
		putCopyArgsPlaces(e.args, p, at)
	}
	me := e.space.Rank
	own, from, to := r.SendBytes[me], x.Src+uintptr(r.SendOffsets[me]), x.Dst+uintptr(r.RecvOffsets[me])
	aside := own > 0 && from != to
	if aside {
		b.Record(0, e.fork)
		b.WaitEvent(1, e.fork)
		if n := min(x.Tuning.Blocks, e.limit); n > 0 {
			b.Launch(1, cuda.Launch{Function: e.own, Grid: [3]uint32{uint32(n), 1, 1}, Block: [3]uint32{ownThreads, 1, 1}, Args: e.args[:exchangeArgsBytes]})
		} else {
			b.Copy(1, to, from, own)
		}
	}
	l := cuda.Launch{Function: e.opens, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{copyThreads, 1, 1}, Flags: e.flags, Args: e.args}
	b.Launch(0, l)
	for _, p := range r.Order {
		n := r.SendBytes[p]
		if n <= c.PacketBytes {
			continue
		}
		b.Copy(0, e.space.Addr(int(p), x.Places[p]), x.Src+uintptr(r.SendOffsets[p]), n)
	}
	if aside {
		b.Record(1, e.join)
		b.WaitEvent(0, e.join)
	}
	l.Function, l.Flags = e.closes, e.flags&^cuda.Programmatic
	b.Launch(0, l)
}

const (
	exchangeThreads  = sendThreads + watchThreads + recvThreads
	apartThreads     = sendThreads + recvThreads
	maxSharedBytes   = 96 << 10 // of a block, asked for at launch
	fixedSharedBytes = 8 << 10  // more than the kernel has beside that
)

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
	var f faultWords
	f.get(b)
	peer, epoch, sending := int(f.peer), f.epoch, f.sending != 0
	switch f.kind {
	case faultMismatch:
		m := &kernels.CountMismatchError{
			Src: peer, Dst: e.space.Rank, Epoch: epoch,
			Sent: f.sent, Expected: f.expected,
		}
		if sending {
			m.Src, m.Dst = e.space.Rank, peer
		}
		return m
	case faultPlace:
		return fmt.Errorf("kernels: call %d: rank %d was to receive at %d of its segment and granted %d", epoch, peer, f.sent, f.expected)
	case faultSplits:
		return &kernels.SplitsError{Peer: peer, Send: sending, Epoch: epoch, Bytes: int64(f.sent), Offset: int64(f.expected), Limit: int64(f.limit)}
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
	own := e.space.Addr(e.space.Rank, c.Offset)
	if err := e.ctx.Set(cuda.Stream(stream), own+controlFault, 0, 4); err != nil {
		return fmt.Errorf("kernels: clear mismatch: %w", err)
	}
	return nil
}
