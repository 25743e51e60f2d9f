package cuda

import (
	"github.com/switchyard-moe/switchyard/kernels"
)

const (
	dispatchFewShared = 70 << 10 // dynamic shared memory of the kernels for few tokens, on any GPU

	dispatchStretchScales = dispatchStretch / 128 * 4 // bytes
)

// staged is how many rows staging has: a part for each source rank.
func (x *dispatches) staged() int64 { return int64(x.m.Ranks) * int64(x.m.MaxTokens) }

func (x *dispatches) block(offset int64) dispatchBlock {
	m := x.m
	notes, packets, staged, spread := int64(0), int64(0), x.staged(), x.staged()
	if x.few() {
		notes, packets = x.noteBytes(), x.packetBytes()
	} else if m.Layout.ByToken() {
		staged = 0
	}
	if m.Layout.ByToken() {
		spread = 0
	}
	return layDispatchBlock(offset, int64(m.Ranks), int64(m.Slots()), int64(m.MaxTokens), int64(m.TopK), staged, spread, notes, packets)
}

// few reports whether tokens and what is made of them cross by the kernels for few.
func (x *dispatches) few() bool {
	m := x.m
	return m.LowLatency && m.MaxTokens <= dispatchFewTokens && m.Slots() <= dispatchFewSlots &&
		(!m.Quantizes() || m.Scales.Block == 128) && x.fewShared() <= dispatchFewShared
}

// fewShared is the dynamic shared memory of a block for few tokens: that of the block which tells where tokens go, then where the experts' rows are.
func (x *dispatches) fewShared() int64 {
	m, tables, local := x.m, int64(1), int64(x.m.MostLocal())
	if !m.Layout.ByToken() {
		tables = dispatchFewThreads / 32
	}
	return max(4*tables*int64(m.Slots())+6*int64(m.MaxTokens)*int64(m.TopK), 4*(2*local+1+int64(m.Ranks)*local))
}

// noteBytes is what lies next to a row of few tokens: a packet for the row, one for each choice, and scales that the caller gives, or on the way
// back the weights of choices.
func (x *dispatches) noteBytes() int64 {
	choices, scales, weights := int64(x.m.TopK), int64(0), int64(0)
	if !x.m.Quantizes() {
		scales = int64(x.m.ScaleWords())
	}
	if !x.m.Layout.ByToken() {
		weights = choices
	}
	return kernels.AlignUp(16*(1+choices+(max(scales, weights)+2)/3), kernels.LineBytes)
}

// packetBytes is the size of a row of few tokens on its way.
func (x *dispatches) packetBytes() int64 {
	m := x.m
	parts := func(row, part int64) int64 { return (row + part - 1) / part }
	there, back := parts(m.TokenBytes(), dispatchDensePart), parts(m.SumBytes(), dispatchPlainPart)*2048
	if m.Quantizes() {
		there *= 512 + 4096/m.TokenType.Size()
	} else {
		there *= 4096
	}
	if m.Float8Partials {
		back = parts(int64(m.Hidden)*m.SumType.Size(), dispatchNarrowPart) * (512 + 2048/m.SumType.Size())
	}
	return max(there, back)
}

// partialBytes is the size of a partial sum that crosses.
func (x *dispatches) partialBytes() int64 {
	if !x.m.Float8Partials {
		return x.m.SumBytes()
	}
	elements := int64(x.m.Hidden)
	return (elements+dispatchStretch-1)/dispatchStretch*dispatchStretchScales + kernels.AlignUp(elements, 16)
}

// The parts of a handle's staging, from its start: rows and scales that arrive, rows that peers read, and weights next to them.
func (x *dispatches) scalesAt() int64 {
	return kernels.AlignUp(x.staged()*max(x.m.RowBytes(), x.m.SumBytes()), kernels.LineBytes)
}
func (x *dispatches) sumsAt() int64 {
	return kernels.AlignUp(x.scalesAt()+4*x.staged()*int64(x.m.ScaleWords()), kernels.LineBytes)
}
func (x *dispatches) weightsAt() int64 {
	return kernels.AlignUp(x.sumsAt()+x.staged()*max(x.m.SumBytes(), x.partialBytes()), kernels.LineBytes)
}

// tokenWeightsAt is where peers write the weights of their tokens, for a combine by them.
func (x *dispatches) tokenWeightsAt() int64 {
	return kernels.AlignUp(x.weightsAt()+4*x.staged()*int64(x.m.TopK), kernels.LineBytes)
}

func (x *dispatches) layout() kernels.Layout {
	staging := x.tokenWeightsAt()
	if !x.m.Layout.ByToken() && !x.few() {
		staging += 4 * x.staged() * int64(x.m.TopK)
	}
	control := int64(controlAlign)
	if x.m.Masks {
		control = kernels.AlignUp(maskBytes, controlAlign)
	}
	return kernels.Layout{
		Bytes: control, Zero: control,
		State: x.block(0).end, Staging: staging,
		Routing: int64(x.block(0).arrived), RoutingBytes: int64(x.block(0).wiped - x.block(0).arrived),
		LowLatency: x.few(),
	}
}
