package cuda

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// exchangeKernels are the kernels of the variable-size all-to-all.
type exchangeKernels struct {
	packet, exchange, opens, copied, closes, own cuda.Function
	small                                        int // blocks of the packet kernel that run at once
	limit                                        int // blocks of the exchange kernel that run at once
	shared                                       int // dynamic shared memory that a block of the exchange kernel can have
}

// exchanges are the launches of one communicator. It is a family.
//
// A message above PacketBytes is cut into at most Stripes parts. A stripe is a message of its own, with its own signals and staging, served by
// one block of each rank, so that blocks never wait for each other.
type exchanges struct {
	*kernels.ExchangeBounds
	common
	offset int64
	k      *exchangeKernels
	args   copyArgs
	places []int64
}

const (
	exchangeThreads  = sendThreads + watchThreads + recvThreads
	apartThreads     = sendThreads + recvThreads
	maxSharedBytes   = 96 << 10 // of a block, asked for at launch
	fixedSharedBytes = 8 << 10  // more than the rest of what the kernel has
	copyPiece        = 1 << 30  // what copy engines copy before the rank tells that it is alive: 3 ms over NVLink, 0.1 s over PCIe
)

// ownAsideBytes is the least that a copy engine moves of what stays on the rank, next to few blocks that move the rest. A multiprocessor moves 45
// GB/s, across a link or within the GPU: 8 of them that copied both took 98 us for 32 MiB on 2 H200, and take 60. To enqueue the copy and its
// events takes the host 8 us, which less than this does not save. Where a block serves each stripe the link is the limit, and a copy engine takes
// from it.
const ownAsideBytes = 8 << 20

// How many blocks the packet kernel takes by default: one for every packetWarps groups of packets, within limits. On 8
// GPUs, 16 blocks were fastest for 8 KiB a rank and 48 for 2 MiB.
const (
	minPacketBlocks = 16
	maxPacketBlocks = 48
	packetWarps     = 4
)

func newExchanges(c *kernels.ExchangeBounds, offset int64) *exchanges {
	return &exchanges{ExchangeBounds: c, offset: offset}
}

// defaults are for Stripes that are set. Packets take the place of eager messages.
func (x *exchanges) defaults(int, int) {
	c := x.ExchangeBounds
	packets := int64(512 << 10)
	if c.Size > 4 {
		packets = 255 << 10 // 2 MiB in equal parts of 256 KiB are faster by a ring
	}
	c.PacketBytes, c.EagerBytes = kernels.Default(c.PacketBytes, packets), 0
	c.DefaultSlots(8, 128<<20, 128<<10, c.Size*max(c.Stripes, 1))
}

func (x *exchanges) members() int { return x.Size }

func (x *exchanges) check() error {
	if c := x.ExchangeBounds; c.Stripes < 1 || c.Slots < 1 || c.SlotBytes < 128 || c.SlotBytes%128 != 0 || c.PacketBytes < 0 {
		return fmt.Errorf("kernels: alltoallv: bounds %+v", *c)
	}
	return nil
}

func (x *exchanges) block() exchangeBlock {
	return layExchangeBlock(x.offset, int64(x.Size), int64(x.Stripes), int64(x.Slots), x.SlotBytes, x.PacketBytes)
}

func (x *exchanges) layout() kernels.Layout {
	b := x.block()
	return kernels.Layout{Bytes: b.end - x.offset, Zero: b.slots - x.offset}
}

func (*exchanges) fault(f *faultWords, me int) error {
	peer, sending := int(f.peer), f.sending != 0
	switch f.kind {
	case faultMismatch:
		m := &kernels.CountMismatchError{Src: peer, Dst: me, Epoch: f.epoch, Sent: f.sent, Expected: f.expected}
		if sending {
			m.Src, m.Dst = me, peer
		}
		return m
	case faultPlace:
		return fmt.Errorf("kernels: call %d: rank %d was to receive at %d of its segment and granted %d", f.epoch, peer, f.sent, f.expected)
	case faultSplits:
		return &kernels.SplitsError{Rank: peer, Peer: int(f.part), Send: sending, Epoch: f.epoch, Bytes: int64(f.sent), Offset: int64(f.expected), Limit: int64(f.limit)}
	}
	return nil
}

func (x *exchanges) load(e *Engine) (err error) {
	if x.k, err = loadOnce[exchangeKernels](e); err != nil {
		return err
	}
	if n := sharedBytes(x, min(x.Stripes, x.k.limit), recvThreads); n > x.k.shared {
		return fmt.Errorf("%d stripes of %d ranks on at most %d blocks need %d bytes of shared memory", x.Stripes, x.Size, x.k.limit, n)
	}
	return nil
}

func (k *exchangeKernels) load(e *Engine) (err error) {
	if err = e.loadModule("alltoallv", entry{"alltoallv_packet", &k.packet}, entry{"alltoallv", &k.exchange},
		entry{"alltoallv_open", &k.opens}, entry{"alltoallv_copied", &k.copied}, entry{"alltoallv_close", &k.closes}, entry{"alltoallv_own", &k.own}); err != nil {
		return err
	}
	k.shared = min(maxSharedBytes, e.maxShared-fixedSharedBytes)
	if err = e.ctx.SetFunctionAttribute(k.exchange, cuda.FunctionMaxDynamicShared, k.shared); err != nil {
		return err
	}
	if k.limit, err = e.blocks(k.exchange, exchangeThreads, k.shared); err != nil {
		return err
	}
	k.small, err = e.blocks(k.packet, packetThreads, 0)
	return err
}

// add appends an exchange. Its arguments are copied into the batch.
func (x *exchanges) add(p *port, op kernels.Operation) error {
	a, ok := op.(*kernels.AllToAllV)
	if !ok {
		return errForeign
	}
	if err := x.validate(a); err != nil {
		return err
	}
	if a.Schedule.Copies {
		x.addCopies(p, a)
	} else {
		x.addKernel(p, a)
	}
	return nil
}

func (x *exchanges) validate(a *kernels.AllToAllV) error {
	s, r, size := &a.Schedule, a.Routes, x.Size
	switch {
	case len(r.Order) != size-1 || len(r.ReverseOrder) != size-1:
		return fmt.Errorf("kernels: alltoallv: orders of %d and %d peers for %d ranks", len(r.Order), len(r.ReverseOrder), size)
	case s.Copies && (len(r.PeerOffsets) != size || a.Splits.Bytes > 0 || !a.Dst.Reach):
		return errors.New("kernels: alltoallv: copies need a place on every rank, splits known to the host and an output that peers can write")
	case s.Rate < 0:
		return fmt.Errorf("kernels: alltoallv: rate %v", s.Rate)
	}
	return nil
}

func (x *exchanges) addKernel(p *port, a *kernels.AllToAllV) {
	e, c, k, s, r := p.e, x, x.k, &a.Schedule, a.Routes
	var flags uint32
	if s.Staged {
		flags |= flagStaged
	}
	if s.Window != 1 {
		flags |= flagMesh
	}
	l := cuda.Launch{Flags: e.flags}
	groups, large, interval, senders, aside := int64(0), a.Splits.Bytes > 0, uint32(0), 0, false
	for q := range c.Size {
		if q == e.space.Rank {
			continue
		}
		n := max(r.SendBytes[q], r.RecvBytes[q])
		large = large || n > c.PacketBytes
		groups = max(groups, (n+packetGroupPayload-1)/packetGroupPayload)
	}
	if large {
		l.Function, l.Block = k.exchange, [3]uint32{exchangeThreads, 1, 1}
		blocks := s.Blocks
		if blocks == 0 {
			blocks = c.Stripes
		}
		most := min(c.Stripes, k.limit)
		for blocks = max(1, min(blocks, most)); blocks < most && sharedBytes(c, blocks, recvThreads) > k.shared; {
			blocks++ // fewer would have more stripes each than they have room for
		}
		grid, takers := blocks, recvThreads
		if staged := s.Staged || !a.Dst.Reach; s.CopyBlocks >= blocks && staged && c.Size > 1 && 2*blocks <= k.limit && sharedBytes(c, blocks, apartThreads) <= k.shared {
			senders, grid, takers = blocks, 2*blocks, apartThreads
		}
		l.Grid = [3]uint32{uint32(grid), 1, 1}
		l.SharedBytes = uint32(sharedBytes(c, blocks, takers))
		aside = blocks < most && a.Splits.Bytes == 0 && r.SendBytes[e.space.Rank] >= ownAsideBytes
		if s.Rate > 0 {
			interval = e.cyclesFor(tileBytes*int64(blocks), s.Rate)
		}
	} else {
		l.Function, l.Block = k.packet, [3]uint32{packetThreads, 1, 1}
		blocks := s.Blocks
		if blocks == 0 {
			warps := max(1, groups) * int64(max(1, c.Size-1))
			blocks = int(min(maxPacketBlocks, max(minPacketBlocks, (warps+packetWarps-1)/packetWarps)))
		}
		l.Grid = [3]uint32{uint32(max(1, min(blocks, k.small))), 1, 1}
	}
	x.args.exchange.fill(p.world(c.offset, a.Timeout), flags, interval, senders, c, a)
	if aside = aside && x.ownAside(p, a, 0); aside {
		x.args.exchange.ownBytes = 0
	}
	l.Args = cuda.BytesOf(&x.args.exchange)
	p.batch.Launch(0, l)
	if aside {
		x.join(p)
	}
}

// sharedBytes is the dynamic shared memory of a block of the exchange kernel: what its warps tell one another of every stripe
// of a message that the block looks after. takers is how many of its threads copy messages out of staging.
func sharedBytes(c *exchanges, blocks, takers int) int {
	items := (c.Size - 1) * ((c.Stripes + blocks - 1) / blocks)
	return items * (itemBytes + 8*c.Slots + 4*(3+takers/32))
}

// fill sets the arguments of an exchange.
func (a *exchangeArgs) fill(world worldWords, flags, interval uint32, senders int, c *exchanges, x *kernels.AllToAllV) {
	r, me := x.Routes, world.rank
	*a = exchangeArgs{
		world: world,
		src:   uint64(x.Src.Ptr), dst: uint64(x.Dst.Ptr), dstOffset: x.Dst.PlaceOr(-1), splits: uint64(x.Splits.Ptr),
		block: c.block(), packetBytes: c.PacketBytes, slotBytes: c.SlotBytes, stripes: uint32(c.Stripes), slotCount: uint32(c.Slots),
		flags: flags, interval: interval, senders: uint32(senders),
		srcBytes: x.Src.Bytes, dstBytes: x.Dst.Bytes,
		ownBytes: r.SendBytes[me], ownSrc: r.SendOffsets[me], ownDst: r.RecvOffsets[me],
	}
	if peers := uint64(c.Size - 1); peers > 1 {
		a.inverse = uint32((1<<32 + peers - 1) / peers)
	}
	for i, to := range r.Order {
		from := r.ReverseOrder[i]
		a.steps[i] = stepWords{
			to: uint32(to), from: uint32(from),
			sendBytes: r.SendBytes[to], sendOffset: r.SendOffsets[to], recvBytes: r.RecvBytes[from], recvOffset: r.RecvOffsets[from],
		}
	}
}

// addCopies appends an exchange by the copy engines: one message after the other, since they need order to be fast. The message
// to the rank itself takes some of their time where they copy it too, least when it comes before the peers are awaited.
func (x *exchanges) addCopies(p *port, a *kernels.AllToAllV) {
	e, c, r, b := p.e, x, a.Routes, &p.batch
	x.args.exchange.fill(p.world(c.offset, a.Timeout), 0, 0, 0, c, a)
	x.places = x.places[:0]
	for q, at := range r.PeerOffsets {
		x.places = append(x.places, a.Dst.Place+at)
		x.args.places[q] = a.Dst.Place + at
	}
	aside := x.ownAside(p, a, a.Schedule.Blocks)
	l := cuda.Launch{Function: x.k.opens, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{copyThreads, 1, 1}, Flags: e.flags, Args: cuda.BytesOf(&x.args)}
	b.Launch(0, l)
	told := cuda.Launch{Function: x.k.copied, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{32, 1, 1}, Args: cuda.BytesOf(&x.args)}
	room := int64(copyPiece)
	for _, q := range r.Order {
		n := r.SendBytes[q]
		if n <= c.PacketBytes {
			continue
		}
		for at := int64(0); at < n; {
			if room == 0 {
				b.Launch(0, told)
				room = copyPiece
			}
			piece := min(n-at, room)
			b.Copy(0, e.space.Addr(int(q), x.places[q])+uintptr(at), a.Src.Ptr+uintptr(r.SendOffsets[q]+at), piece)
			at, room = at+piece, room-piece
		}
	}
	if aside {
		x.join(p)
	}
	l.Function, l.Flags = x.k.closes, e.flags&^cuda.Programmatic
	b.Launch(0, l)
}

// ownAside appends, on a stream of its own, the copy of what stays on the rank: by a kernel of `blocks` blocks, or by a copy engine. It reports
// whether there is one; join has the call's stream wait for it.
func (x *exchanges) ownAside(p *port, a *kernels.AllToAllV, blocks int) bool {
	r, me, b := a.Routes, p.e.space.Rank, &p.batch
	own, from, to := r.SendBytes[me], a.Src.Ptr+uintptr(r.SendOffsets[me]), a.Dst.Ptr+uintptr(r.RecvOffsets[me])
	if own == 0 || from == to {
		return false
	}
	b.Record(0, p.aside.fork)
	b.WaitEvent(1, p.aside.fork)
	if n := min(blocks, x.k.limit); n > 0 {
		b.Launch(1, cuda.Launch{Function: x.k.own, Grid: [3]uint32{uint32(n), 1, 1}, Block: [3]uint32{ownThreads, 1, 1}, Args: cuda.BytesOf(&x.args.exchange)})
	} else {
		b.Copy(1, to, from, own)
	}
	return true
}

// join has the call's stream wait for what ownAside appended.
func (*exchanges) join(p *port) {
	p.batch.Record(1, p.aside.join)
	p.batch.WaitEvent(0, p.aside.join)
}
