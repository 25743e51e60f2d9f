package cuda

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// sums are the kernels of a combine.
func (l *dispatchCall) sums() *sumKernels {
	kind := numberKind(l.m.SumType)
	if l.m.Float8Partials {
		return &l.k.sumsFloat8[kind]
	}
	return &l.k.sums[kind]
}

// fewSums is the kernel of a combine of few tokens. Late: the weights of rows come in the call.
func (l *dispatchCall) fewSums(late bool) cuda.Function {
	kind := numberKind(l.m.SumType)
	switch {
	case late:
		return l.sums().late
	case !l.m.Masks:
		return l.sums().few[l.order()]
	case l.m.Float8Partials:
		return l.masked.sumsFloat8[kind][l.order()]
	}
	return l.masked.sums[kind][l.order()]
}

func (x *dispatches) addCombine(p *port, c *kernels.Combine) error {
	l, err := x.call(p, &c.DispatchCall)
	if err == nil {
		err = aligned(c.Op, &c.Rows, &c.Y, &c.Bias[0], &c.Bias[1])
	}
	if err != nil {
		return err
	}
	m, a := x.m, l.base
	a.rowBytes, a.wireBytes = uint32(m.SumBytes()), uint32(x.partialBytes())
	a.out.rows, a.out.weights = uint64(c.Rows.Ptr), addressOf(&c.RowWeights)
	a.sum = dispatchSumWords{
		ready: addressOf(&c.Ready), fromRows: uint64(c.Rows.Place),
		y: uint64(c.Y.Ptr), weights: addressOf(&c.SumWeights), bias0: addressOf(&c.Bias[0]), bias1: addressOf(&c.Bias[1]),
		window: dispatchCopyWindow,
	}
	if !m.Layout.ByToken() {
		a.mode |= weighs(c.Weighting)
		a.sum.window = dispatchWindow
	}
	a.mode |= x.frees(c)
	if c.RowWeights.Bytes > 0 || c.SumWeights.Bytes > 0 { // a rank may have rows and no tokens, or the other way round
		a.sum.fromWeights = l.place(l.weightsAt())
	}
	switch {
	case c.Weighting != kernels.TokenWeights:
	case x.few(): // they cross in the same kernel; ranks whose calls differ hear of it by the operation
		a.op, a.send.weights = uint32(kernels.OpTokenWeights), addressOf(&c.TokenWeights)
	default:
		a.state.weights = place(l.place(x.tokenWeightsAt()))
		if c.Phase&kernels.Send != 0 {
			l.tokenWeights(a, c)
		}
	}
	if x.few() {
		if l.compact() {
			a.mode |= dispatchCompact
		}
		a.sum.fromRows, a.out.most = 0, c.Rows.Bytes/int64(a.rowBytes)
		l.launch(l.fewSums(c.Weighting == kernels.TokenWeights), &a, l.fewBlocks(), dispatchFewSumThreads, 0)
		return nil
	}
	staged := !m.Layout.ByToken() || m.Float8Partials || !c.Rows.Reach || c.Ready.Bytes > 0 || c.RowWeights.Bytes > 0
	if staged {
		a.sum.fromRows = l.place(l.sumsAt())
		if l.readsOwn(c) {
			a.sum.own = uint64(c.Rows.Ptr)
		}
	}
	a.mode |= x.keeps(staged || c.Release)
	if staged && c.Phase&kernels.Send != 0 {
		blocks := l.blocks(dispatchMaxBlocks)
		if l.overlaps() && (!m.Layout.ByToken() || int64(l.c.Tokens*(m.Ranks-1))*int64(a.rowBytes) >= dispatchCopyBesideBytes) {
			a.mode |= dispatchBeside
			blocks = l.making(c)
		}
		makes := a
		if makes.sum.y = 0; c.RowWeights.Bytes == 0 {
			makes.sum.fromWeights = 0
		}
		l.pass(makes, blocks)
	}
	if c.Phase&kernels.Receive == 0 {
		l.launch(x.k.begin, &a, 1, maxRanks, 0)
		return nil
	}
	l.sum(a)
	return nil
}

// readsOwn reports whether the kernel that sums reads the rows of this rank's own tokens where the caller has them. It does where such a row is
// what would cross, is complete when the call begins, and stays as it is until the call has ended.
func (l *dispatchCall) readsOwn(c *kernels.Combine) bool {
	return l.m.Layout.ByToken() && !l.m.Float8Partials && c.Phase == kernels.Both && c.Ready.Bytes == 0 &&
		(c.RowWeights.Bytes > 0 || c.SumWeights.Bytes == 0)
}

// frees is the mode in which peers may send rows of the next dispatch before this rank has begun it: into memory that nothing else uses by
// then. Rows by expert are this rank's business, and so is what peers write by the end of a dispatch. In an output by rank each peer has a part
// of its own.
func (x *dispatches) frees(c *kernels.Combine) uint32 {
	if x.m.Shared == nil && (!x.m.Layout.ByToken() || c.Release && x.m.Layout == kernels.RankRows) {
		return dispatchFree
	}
	return 0
}

// keeps is the mode in which a call ends before peers have read this rank's rows, where the next call that writes them waits for that.
func (x *dispatches) keeps(rows bool) uint32 {
	if x.m.Shared == nil && rows {
		return dispatchKeep
	}
	return 0
}

// tokenWeights appends the kernel that sends the weights of this rank's tokens, which is a call of its own.
func (l *dispatchCall) tokenWeights(a dispatchArgs, c *kernels.Combine) {
	a.op, a.mode, a.send.weights = uint32(kernels.OpTokenWeights), dispatchSend|dispatchReceive, addressOf(&c.TokenWeights)
	choices := l.c.Tokens * l.m.TopK
	l.launch(l.k.tokenWeights, &a, max(1, min(l.blocks(dispatchBlocks), (choices+tokenWeightsThreads-1)/tokenWeightsThreads)), tokenWeightsThreads, 0)
}

// sum appends the kernel that reads and sums the rows of a rank's tokens.
func (l *dispatchCall) sum(a dispatchArgs) {
	m, blocks, row, n, whole := l.m, l.crossing(a.mode&dispatchBeside != 0), int64(a.wireBytes), int64(l.m.Ranks), int64(16)
	movers, depth := int64(dispatchSumThreads/32), int64(3)
	if n > 4 {
		movers, depth = 12, 2
	}
	if m.Float8Partials {
		whole = dispatchStretch + dispatchStretchScales
		movers = min(movers, int64(l.k.shared)/(depth*n*whole))
	}
	room := int64(l.k.shared) / (movers * depth * n) / whole * whole
	parts := (row + room - 1) / room
	part := kernels.AlignUp((row+parts-1)/parts, whole)
	a.part, a.parts, a.movers, a.depth = uint32(part), uint32((row+part-1)/part), uint32(movers), uint32(depth)
	a.interval = l.interval(part, movers*int64(blocks), dispatchReadRate)
	l.launch(l.sums().rows, &a, blocks, dispatchSumThreads, int(movers*depth*n*part))
}

func (x *dispatches) addBackward(p *port, b *kernels.CombineBackward) error {
	l, err := x.call(p, &b.DispatchCall)
	if err == nil {
		err = aligned(b.Op, &b.DY, &b.Rows, &b.DRows)
	}
	if err != nil {
		return err
	}
	m, a := x.m, l.base
	if b.Phase != kernels.Both {
		return fmt.Errorf("kernels: %v in halves", b.Op)
	}
	// The gradients of tokens travel as tokens do.
	a.rowBytes, a.wireBytes, a.send.x = uint32(m.SumBytes()), uint32(m.SumBytes()), uint64(b.DY.Ptr)
	l.toStaging(&a)
	a.mode |= dispatchCached
	if err := l.send(a, false); err != nil {
		return err
	}
	l.launch(x.k.receive, &a, 1, dispatchThreads, 0)
	a.sum.y = uint64(b.DRows.Ptr)
	if m.Layout.ByToken() { // out of staging into the caller's rows
		a.out.rows = uint64(p.e.space.Addr(m.Rank, int64(a.send.toRows)))
		l.pass(a, l.blocks(dispatchMaxBlocks))
		return nil
	}
	a.out.rows, a.out.weights = uint64(b.Rows.Ptr), addressOf(&b.RowWeights)
	back := b.Weighting == kernels.DispatchedWeights // on every rank, also on one without tokens
	if b.DWeights.Bytes > 0 && b.Weighting == kernels.GivenWeights {
		a.sum.weights = addressOf(&b.DWeights)
	}
	if back {
		a.sum.fromWeights = l.place(l.weightsAt())
	}
	a.mode |= weighs(b.Weighting)
	if m.Layout == kernels.PaddedRows || m.Layout == kernels.FlatRows {
		a.mode |= dispatchZero
	}
	l.launch(x.k.spread[numberKind(m.SumType)], &a, l.spreading(), dispatchPassThreads, 0)
	if back { // a sum of nothing but what lies next to rows
		a.mode, a.rowBytes, a.tokens = dispatchSend|dispatchReceive|x.keeps(true), 0, uint32(b.Tokens)
		a.sum.weights = addressOf(&b.DWeights)
		l.launch(x.k.weights, &a, l.blocks(dispatchBlocks), dispatchFewSumThreads, 0)
	}
	return nil
}
