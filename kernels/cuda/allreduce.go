package cuda

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// reductionKernels are the kernels of all-reduce, reduce-scatter and all-gather.
type reductionKernels struct {
	packet, reduce cuda.Function
	small          int // blocks of the packet kernel that run at once
	limit          int // blocks of the other one that run at once
}

// reductions are the launches of one communicator. It is a family.
type reductions struct {
	common
	c         *kernels.ReduceBounds
	offset    int64
	k         *reductionKernels
	multicast *multicastKernels // nil without Multicast
	args      multicastArgs

	// With plans:
	interpreter *planKernels
	planned     planBlock
	programs    []program
	plan        planArgs
}

// The defaults of reductions on GPUs. Packets of all ranks together take the same room however many ranks there are; on 2 H200 one shot of
// them is fastest up to 1 MiB, and two shots up to 2 MiB.
const (
	reducePacketRoom = 2 << 20
	minReducePackets = 4 << 10
	maxReduceBlocks  = 96
	reduceSlots      = 4
	reduceStaging    = 96 << 20
	maxReduceChunk   = 64 << 10
)

func newReductions(c *kernels.ReduceBounds, offset int64) *reductions {
	return &reductions{c: c, offset: offset}
}

// defaults take a block on each multiprocessor at most, also where Blocks says more.
func (x *reductions) defaults(multiprocessors, free int) {
	c := x.c
	c.OneShotBytes = kernels.Default(c.OneShotBytes, max(reducePacketRoom/int64(max(c.Size, 2)), minReducePackets))
	c.Blocks = max(1, min(int(kernels.Default(int64(c.Blocks), int64(min(maxReduceBlocks, free)))), multiprocessors))
	c.DefaultSlots(reduceSlots, reduceStaging, maxReduceChunk, 2*c.Size*c.Blocks)
	c.Plans.DefaultSlots(c.StagingBytes, largestPlanSlot, max(int64(c.Blocks)*planGrain, leastPlanSlot))
}

func (x *reductions) members() int { return x.c.Size }

func (x *reductions) check() error {
	switch c := x.c; {
	case c.Blocks < 1 || c.OneShotBytes < 0:
		return fmt.Errorf("kernels: allreduce: bounds %+v", *c)
	case c.Slots < 2 || c.Slots > reduceMaxSlots:
		return fmt.Errorf("kernels: allreduce: %d slots: the CUDA engine has 2 to %d", c.Slots, reduceMaxSlots)
	case c.SlotBytes < tileBytes || c.SlotBytes%tileBytes != 0 || c.SlotBytes > 1<<30:
		return fmt.Errorf("kernels: allreduce: slots of %d bytes: those of the CUDA engine have a multiple of %d, at most %d", c.SlotBytes, tileBytes, 1<<30)
	case len(c.Plans.List) > 0 && (c.Plans.SlotBytes < int64(c.Blocks)*planGrain || c.Plans.SlotBytes%kernels.LineBytes != 0):
		return fmt.Errorf("kernels: allreduce: slots of %d bytes for plans in %d blocks: each has at least %d of them", c.Plans.SlotBytes, c.Blocks, planGrain)
	}
	return nil
}

func (x *reductions) block() reduceBlock {
	c := x.c
	return layReduceBlock(x.offset, int64(c.Size), int64(c.Blocks), int64(c.Slots), c.SlotBytes, c.OneShotBytes)
}

func (x *reductions) layout() kernels.Layout {
	b := x.block()
	if len(x.c.Plans.List) > 0 {
		p := x.planBlock()
		return kernels.Layout{Bytes: p.end - x.offset, Zero: p.programs - x.offset}
	}
	return kernels.Layout{Bytes: b.end - x.offset, Zero: b.inputSlots - x.offset}
}

// fault decodes a record. Ranks that disagree record what both call; the upper half of these words is the number of blocks.
func (*reductions) fault(f *faultWords, me int) error {
	if f.kind != faultMismatch {
		return nil
	}
	mine, theirs := kernels.ReduceCall{Count: int64(f.expected), Shape: f.myShape}, kernels.ReduceCall{Count: int64(f.sent), Shape: f.theirShape}
	mine.SetWord(uint64(uint32(f.mine)))
	theirs.SetWord(uint64(uint32(f.theirs)))
	return &kernels.CallMismatchError{Rank: me, Peer: int(f.peer), Mine: mine, Theirs: theirs, Epoch: f.epoch}
}

func (x *reductions) load(e *Engine) (err error) {
	if x.k, err = loadOnce[reductionKernels](e); err != nil {
		return err
	}
	n := min(x.k.small, x.k.limit)
	if x.c.Multicast {
		if x.multicast, err = loadOnce[multicastKernels](e); err != nil {
			return err
		}
		n = min(n, x.multicast.limit)
	}
	if len(x.c.Plans.List) > 0 {
		if x.interpreter, err = loadOnce[planKernels](e); err != nil {
			return err
		}
		n = min(n, x.interpreter.limit)
	}
	if x.c.Blocks > n {
		return fmt.Errorf("%d blocks, of which %d run at once", x.c.Blocks, n)
	}
	return nil
}

func (k *reductionKernels) load(e *Engine) (err error) {
	if err = e.loadModule("allreduce", entry{"allreduce_packet", &k.packet}, entry{"allreduce", &k.reduce}); err != nil {
		return err
	}
	if k.limit, err = e.blocks(k.reduce, reduceThreads, 0); err != nil {
		return err
	}
	k.small, err = e.blocks(k.packet, reducePacketThreads, 0)
	return err
}

// add appends a reduction. Its arguments are copied into the batch.
func (x *reductions) add(p *port, op kernels.Operation) error {
	a, ok := op.(*kernels.Reduction)
	if !ok {
		return errForeign
	}
	if err := x.validate(a); err != nil {
		return err
	}
	if a.Algorithm == kernels.Planned {
		x.addPlan(p, a)
		return nil
	}
	l := cuda.Launch{Function: x.k.reduce, Grid: [3]uint32{uint32(a.Blocks), 1, 1}, Block: [3]uint32{reduceThreads, 1, 1}, Flags: p.e.flags, Args: cuda.BytesOf(&x.args.reduce)}
	if a.Packets {
		l.Function, l.Block = x.k.packet, [3]uint32{reducePacketThreads, 1, 1}
	}
	if a.Multicast != kernels.NoMulticast {
		l.Function, l.Block[0], l.Args = x.multicast.kernel(a.Multicast), multicastThreads, cuda.BytesOf(&x.args)
	}
	x.fill(p, a)
	p.batch.Launch(0, l)
	return nil
}

func (x *reductions) validate(a *kernels.Reduction) error {
	c := x.c
	if len(a.Bounds) != c.Size+1 {
		return fmt.Errorf("kernels: allreduce: %d bounds for %d ranks", len(a.Bounds), c.Size)
	}
	if a.Blocks < 1 || a.Blocks > c.Blocks {
		return fmt.Errorf("kernels: allreduce: %d blocks, want 1 to %d", a.Blocks, c.Blocks)
	}
	if a.Algorithm == kernels.Planned {
		return x.validatePlan(a)
	}
	message := a.Longest() * a.Call.DType.Size()
	if a.Algorithm == kernels.OneShot {
		message = a.PushBytes()
	}
	switch {
	case a.Algorithm == kernels.Ring || a.Algorithm == kernels.OneShot && !a.Packets && c.Size > 1:
		return fmt.Errorf("kernels: allreduce: the CUDA engine has no %v without packets", a.Algorithm)
	case a.Packets && message > c.OneShotBytes:
		return fmt.Errorf("kernels: allreduce: packets of %d bytes, at most %d", message, c.OneShotBytes)
	case !a.Packets && (message+c.SlotBytes-1)/c.SlotBytes > int64(a.Blocks)*kernels.MaxChunks:
		return fmt.Errorf("kernels: allreduce: %d bytes for one peer are too many chunks of %d", message, c.SlotBytes)
	case !(a.Rate >= 0):
		return fmt.Errorf("kernels: allreduce: rate %v", a.Rate)
	}
	return x.validateMulticast(a)
}

// interval is how many cycles a block has for a tile that crosses a link.
func (x *reductions) interval(e *Engine, a *kernels.Reduction) uint32 {
	if a.Rate == 0 || a.Packets {
		return 0
	}
	return e.cyclesFor(tileBytes*int64(a.Blocks), a.Rate)
}

// fill sets a launch's arguments, and behind them those that only multicast has.
func (x *reductions) fill(p *port, a *kernels.Reduction) {
	c, space, es := x.c, &p.e.space, a.Call.DType.Size()
	call := uint32(a.Call.Word())
	if a.Algorithm == kernels.OneShot && a.Call.Collective == kernels.AllReduce {
		call |= reduceOneShot << 24
	}
	if a.Pull {
		call |= reducePull << 24
	}
	call |= multicastFlags(a.Multicast) << 24
	srcPlace := uint64(a.Src.PlaceOr(-1))
	if a.Push && a.Call.Collective.Reduces() {
		srcPlace = nowhere
	}
	x.args = multicastArgs{multicast: uint64(space.Multicast), reduce: reduceArgs{
		world: p.world(x.offset, a.Timeout),
		src:   uint64(a.Src.Ptr), dst: uint64(a.Dst.Ptr), srcPlace: srcPlace, dstPlace: uint64(a.Dst.PlaceOr(-1)),
		block: x.block(), count: uint64(a.Call.Count), shape: a.Call.Shape, call: call,
		lines: uint32(c.Blocks), slots: uint32(c.Slots), chunkBytes: uint32(c.SlotBytes), interval: x.interval(p.e, a), packetBytes: c.OneShotBytes,
	}}
	for i, at := range a.Bounds {
		x.args.reduce.bounds[i] = at * es
	}
}
