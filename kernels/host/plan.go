package host

import (
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// planRun is a call that a plan does. Chunks longer than a slot move in parts: every rank does all steps for part 0 of all chunks, then for
// part 1, and no rank begins a part before all have ended the one before, so that scratch is free.
//
// A buffer that others touch and cannot reach has a copy in slots of staging for the length of a part, as has an output that shares memory
// with the input: a plan may write an output early.
type planRun struct {
	block  int64 // elements of a block
	piece  int64 // elements of a part of a chunk
	part   int64
	copied [plan.Buffers]bool // of this rank's input and output, that they are in staging
}

// planned does the steps of the call's plan. A rank tells all others first that it has begun, and where its buffers are: it is done with
// staging of earlier calls then.
func (x *reducing) planned() error {
	a, p := x.a, x.a.Plan
	r := &x.plan
	r.block = a.Call.Count
	if a.Call.Collective != kernels.AllReduce {
		r.block /= int64(x.c.Size)
	}
	r.piece = x.c.Plans.SlotBytes / a.Call.DType.Size()
	r.copied[plan.Input] = p.Read[x.me] && !a.Src.Reach
	r.copied[plan.Output] = p.Written[x.me] && !a.Dst.Reach || a.Src.Overlaps(&a.Dst)
	src, dst := a.Src.PlaceOr(-1), a.Dst.PlaceOr(-1)
	if r.copied[plan.Input] {
		src = -1
	}
	if r.copied[plan.Output] {
		dst = -1
	}
	longest := (r.block + int64(p.Plan.Chunks) - 1) / int64(p.Plan.Chunks)
	x.exposeInput()
	for i := range x.links {
		x.enter(&x.links[i], src, dst, kernels.LastSeq(x.epoch))
	}
	if err := x.meetAll(); err != nil {
		return err
	}
	for {
		if err := x.steps(); err != nil {
			return err
		}
		x.fetchOutput()
		if r.part++; r.part*r.piece >= longest {
			return nil
		}
		x.exposeInput()
		if err := x.meetInPlan(); err != nil {
			return err
		}
	}
}

// exposeInput copies this part of the input to staging if others read it there.
func (x *reducing) exposeInput() {
	if !x.plan.copied[plan.Input] {
		return
	}
	for chunk := range x.a.Plan.Chunks(plan.Input) {
		lo, hi := x.within(plan.Input, chunk)
		copy(x.slot(x.me, plan.Input, chunk, hi-lo), x.a.Src.Mem[lo:hi])
	}
}

// fetchOutput copies this part of an output out of staging.
func (x *reducing) fetchOutput() {
	if !x.plan.copied[plan.Output] {
		return
	}
	for chunk := range x.a.Plan.Chunks(plan.Output) {
		lo, hi := x.within(plan.Output, chunk)
		copy(x.a.Dst.Mem[lo:hi], x.slot(x.me, plan.Output, chunk, hi-lo))
	}
}

// within is where this part of a chunk of the input or the output lies, in bytes of the user's buffer.
func (x *reducing) within(b plan.Buffer, chunk int) (lo, hi int64) {
	n := x.a.Plan.Plan.Chunks
	at, end := x.class(chunk % n)
	es := x.a.Call.DType.Size()
	begin := int64(chunk/n) * x.plan.block
	return (begin + at) * es, (begin + end) * es
}

// class is this part of a chunk in its block, in elements.
func (x *reducing) class(c int) (lo, hi int64) {
	r, n := &x.plan, int64(x.a.Plan.Plan.Chunks)
	// The quotient and the rest apart, so that nothing overflows.
	each, rest := r.block/n, r.block%n
	begin := each*int64(c) + min(int64(c), rest)
	end := begin + each
	if int64(c) < rest {
		end++
	}
	lo = min(begin+r.part*r.piece, end)
	return lo, min(lo+r.piece, end)
}

// slot is n bytes of a chunk in a rank's staging.
func (x *reducing) slot(rank int, b plan.Buffer, chunk int, n int64) []byte {
	return x.e.space.Range(rank, x.c.PlanSlot(b, chunk), n)
}

// chunk is the memory of a place for a step that moves chunks of a class.
func (x *reducing) chunk(at plan.Place, class int) []byte {
	lo, hi := x.class(class)
	n := (hi - lo) * x.a.Call.DType.Size()
	rank := at.Rank
	if rank < 0 {
		rank = x.me
	}
	if at.Buffer == plan.Scratch {
		return x.slot(rank, at.Buffer, at.Chunk, n)
	}
	begin, end := x.within(at.Buffer, at.Chunk)
	if rank == x.me {
		switch {
		case x.plan.copied[at.Buffer] && at.Buffer == plan.Output:
			return x.slot(rank, at.Buffer, at.Chunk, n)
		case at.Buffer == plan.Output:
			return x.a.Dst.Mem[begin:end]
		}
		return x.a.Src.Mem[begin:end]
	}
	l := &x.links[(rank-x.me+x.c.Size)%x.c.Size-1]
	place := l.src
	if at.Buffer == plan.Output {
		place = l.dst
	}
	if place < 0 {
		return x.slot(rank, at.Buffer, at.Chunk, n)
	}
	return x.e.space.Range(rank, place+begin, n)
}

// steps does all steps for one part of the chunks.
func (x *reducing) steps() error {
	for i := range x.a.Plan.Programs[x.me] {
		op := &x.a.Plan.Programs[x.me][i]
		switch op.Do {
		case plan.Signal:
			x.raise(*op.Peer, op.Semaphore)
		case plan.Wait:
			if err := x.consume(*op.Peer, op.Semaphore); err != nil {
				return err
			}
		case plan.Reduce:
			x.combine(op)
		default:
			at := x.me
			if op.To.Rank >= 0 {
				at = op.To.Rank
			}
			x.e.at(puttingData, at)
			x.w.copy(x.chunk(*op.To, op.Class), x.chunk(op.From[0], op.Class), false)
		}
	}
	return nil
}

// combine is a reduction. Averages are divided where the elements of all ranks are in.
func (x *reducing) combine(op *plan.Op) {
	x.e.at(takingData, x.me)
	rows := x.rows[:0]
	for _, from := range op.From {
		rows = append(rows, x.chunk(from, op.Class))
	}
	x.rows = rows
	how := x.a.Call.Op
	if how == kernels.Avg && !op.Final {
		how = kernels.Sum
	}
	to := x.chunk(*op.To, op.Class)
	x.fold.rows(to, rows, 0, int64(len(to)), how, x.c.Size)
	x.w.moved(int64(len(to)))
}

// raise signals a semaphore at peer.
func (x *reducing) raise(peer, semaphore int) {
	x.e.at(signalling, peer)
	x.e.order(peer)
	x.e.word(peer, x.c.Semaphore(x.me, semaphore)).Add(1)
	x.e.ring(peer)
}

// consume waits for a signal of peer.
func (x *reducing) consume(peer, semaphore int) error {
	want := x.e.word(x.me, x.c.Consumed(peer, semaphore)).Add(1)
	if err := x.w.until(x.e.near(peer), x.e.word(x.me, x.c.Semaphore(peer, semaphore)), want); err != nil {
		return err
	}
	x.e.order(x.me)
	return nil
}

// meetInPlan returns when all ranks have come here.
func (x *reducing) meetInPlan() error {
	last := x.c.Plans.Semaphores
	for i := range x.links {
		x.raise(x.links[i].peer, last)
	}
	for i := range x.links {
		if err := x.consume(x.links[i].peer, last); err != nil {
			return err
		}
	}
	return nil
}
