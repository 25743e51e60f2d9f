package cuda

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// planKernels are the kernel that interprets plans.
type planKernels struct {
	run   cuda.Function
	limit int // blocks that run at once
}

// The bounds of PlanBounds.SlotBytes on GPUs where nothing is said. All blocks share a slot.
const (
	largestPlanSlot = 8 << 20
	leastPlanSlot   = 4 << 10
)

func (k *planKernels) load(e *Engine) (err error) {
	if err = e.loadModule("plans", entry{"plans", &k.run}); err != nil {
		return err
	}
	k.limit, err = e.blocks(k.run, planThreads, 0)
	return err
}

// program is the steps of one rank in one plan, and behind them the words that name what they read.
type program struct {
	plan  *plan.Checked
	at    int64 // in a rank's segment
	bytes int64 // of its steps and words on the rank that has most
	most  int64 // of the signals of a semaphore in a part of a call
}

// encode is what the kernel reads of the steps of a rank.
func encode(p *plan.Checked, rank int) (steps []planStep, words []uint32) {
	type way struct {
		waits           bool
		peer, semaphore int
	}
	total := map[way]uint32{}
	wayOf := func(op *plan.Op) way { return way{op.Do == plan.Wait, *op.Peer, op.Semaphore} }
	word := func(at plan.Place) uint32 {
		holder := at.Rank
		if holder < 0 {
			holder = rank
		}
		return uint32(at.Buffer)<<planPlaceBuffer | uint32(holder)<<planPlaceRank | uint32(at.Chunk)
	}
	steps = make([]planStep, len(p.Programs[rank]))
	for i := range steps {
		op, s := &p.Programs[rank][i], &steps[i]
		s.kind = map[plan.Kind]uint32{plan.Put: planCopy, plan.Copy: planCopy, plan.Reduce: planReduce, plan.Signal: planSignal, plan.Wait: planWait}[op.Do]
		if op.Peer != nil {
			s.peer, s.semaphore = uint32(*op.Peer), uint32(op.Semaphore)
			total[wayOf(op)]++
			s.number = total[wayOf(op)]
			continue
		}
		s.to, s.first, s.rows, s.chunk = word(*op.To), uint32(len(words)), uint32(len(op.From)), uint32(op.Class)
		if op.Final {
			s.last = 1
		}
		for _, from := range op.From {
			words = append(words, word(from))
		}
	}
	for i := range steps {
		if op := &p.Programs[rank][i]; op.Peer != nil {
			steps[i].total = total[wayOf(op)]
		}
	}
	return steps, words
}

// text is both as they lie in memory.
func text(steps []planStep, words []uint32) (b []byte) {
	for i := range steps {
		b = append(b, cuda.BytesOf(&steps[i])...)
	}
	return append(b, shm.Bytes(words)...)
}

// layPrograms finds room for the programs of all plans, the same on all ranks.
func (x *reductions) layPrograms() (bytes int64) {
	x.programs = x.programs[:0]
	for _, p := range x.c.Plans.List {
		o := program{plan: p, at: bytes}
		for rank := range p.Plan.Ranks {
			steps, words := encode(p, rank)
			o.bytes = max(o.bytes, int64(len(text(steps, words))))
			for i := range steps {
				o.most = max(o.most, int64(steps[i].total))
			}
		}
		bytes += kernels.AlignUp(o.bytes, 8)
		x.programs = append(x.programs, o)
	}
	return bytes
}

// planBlock lies behind the reduceBlock.
func (x *reductions) planBlock() planBlock {
	p, bytes := &x.c.Plans, x.layPrograms()
	b := layPlanBlock(kernels.AlignUp(x.block().end, kernels.LineBytes), int64(x.c.Size), int64(p.Semaphores+1), int64(x.c.Blocks), bytes,
		int64(p.Chunks[plan.Input]), int64(p.Chunks[plan.Output]), int64(p.Chunks[plan.Scratch]), p.SlotBytes)
	for i := range x.programs {
		x.programs[i].at += b.programs
	}
	return b
}

// opened writes the programs of this rank.
func (x *reductions) opened(p *port) (kernels.Port, error) {
	if len(x.c.Plans.List) == 0 {
		return p, nil
	}
	x.planned = x.planBlock()
	for _, o := range x.programs {
		steps, words := encode(o.plan, p.e.space.Rank)
		if err := p.e.write(p.e.space.Addr(p.e.space.Rank, o.at), text(steps, words)); err != nil {
			return nil, errors.Join(fmt.Errorf("kernels: open %s: %w", p.name, err), p.Close())
		}
	}
	return p, nil
}

// programOf is that of a call's plan, nil if the port was not opened with it.
func (x *reductions) programOf(a *kernels.Reduction) *program {
	for i := range x.programs {
		if x.programs[i].plan == a.Plan {
			return &x.programs[i]
		}
	}
	return nil
}

func (x *reductions) validatePlan(a *kernels.Reduction) error {
	c, o := x.c, x.programOf(a)
	switch {
	case o == nil:
		return errors.New("kernels: allreduce: a plan that is not in the bounds")
	case a.Packets || a.Pull || a.Push || a.Rate != 0 || a.Multicast != kernels.NoMulticast:
		return fmt.Errorf("kernels: allreduce: plan %q, packets %v, pull %v, push %v, rate %v, %v", o.plan.Plan.Name, a.Packets, a.Pull, a.Push, a.Rate, a.Multicast)
	}
	grains := (x.planArgs(a).each+1)*a.Call.DType.Size()/planGrain + 1
	parts := (grains/int64(a.Blocks) + 1) / (c.Plans.SlotBytes / int64(a.Blocks) / planGrain)
	if parts >= kernels.MaxChunks/max(o.most, 1) {
		return fmt.Errorf("kernels: allreduce: plan %q: %d bytes make more parts than signals have numbers for", o.plan.Plan.Name, a.Call.Count*a.Call.DType.Size())
	}
	return nil
}

// planArgs are the arguments of a plan but for those of all reductions.
func (x *reductions) planArgs(a *kernels.Reduction) *planArgs {
	p, o := &a.Plan.Plan, x.programOf(a)
	block, n := a.Call.Count, int64(p.Chunks)
	if a.Call.Collective != kernels.AllReduce {
		block /= int64(x.c.Size)
	}
	x.plan = planArgs{
		block: x.planned, program: uint64(o.at), slotBytes: x.c.Plans.SlotBytes, blockBytes: block * a.Call.DType.Size(), each: block / n,
		semaphores: uint32(x.c.Plans.Semaphores + 1), chunks: uint32(n), longer: uint32(block % n),
		inputs: uint32(a.Plan.Chunks(plan.Input)), outputs: uint32(a.Plan.Chunks(plan.Output)), scratch: uint32(p.Scratch), size: uint32(a.Call.DType.Size()),
	}
	return &x.plan
}

// addPlan appends a call that a plan does. A buffer that others touch and cannot reach has slots, as has an output that shares memory with the
// input: a plan may write an output early.
func (x *reductions) addPlan(p *port, a *kernels.Reduction) {
	x.fill(p, a)
	me, args := p.e.space.Rank, x.planArgs(a)
	args.reduce, args.steps = x.args.reduce, uint32(len(a.Plan.Programs[me]))
	args.reduce.call |= reducePlanned << 24
	args.reduce.srcPlace, args.reduce.dstPlace = uint64(a.Src.PlaceOr(0)), uint64(a.Dst.PlaceOr(0))
	if a.Plan.Read[me] && !a.Src.Reach && a.Src.Bytes > 0 {
		args.reduce.srcPlace = nowhere
	}
	if a.Plan.Written[me] && !a.Dst.Reach && a.Dst.Bytes > 0 || a.Src.Overlaps(&a.Dst) {
		args.reduce.dstPlace = nowhere
	}
	p.batch.Launch(0, cuda.Launch{Function: x.interpreter.run, Grid: [3]uint32{uint32(a.Blocks), 1, 1}, Block: [3]uint32{planThreads, 1, 1},
		Flags: p.e.flags, Args: cuda.BytesOf(args)})
}
