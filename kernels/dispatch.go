package kernels

import (
	"context"
	"fmt"
)

// RowLayout is how the rows of a dispatch lie in its output. A row that belongs to no token is called padding.
type RowLayout uint8

// The layouts. The first three are expert-major: each (token, choice) is a row of its own, and the rows of an expert are ordered by
// source rank, then token, then choice. The others are token-major: a token has one row on a rank however many of its
// experts are there, and rows are ordered by source rank, then token.
const (
	// FlatRows: an expert's rows follow those of the expert before, from a multiple of DispatchBounds.Align on. Padding inside an expert's
	// last multiple is zero.
	FlatRows RowLayout = iota
	// PaddedRows: [local experts, DispatchBounds.Capacity]. Padding is zero.
	PaddedRows
	// SlabRows is PaddedRows with undefined padding.
	SlabRows
	// TokenRows: the rows of a source rank follow those of the rank before. There is no padding.
	TokenRows
	// RankRows: [ranks, DispatchBounds.MaxTokens]. Padding is undefined.
	RankRows
	rowLayouts
)

// Valid reports whether l is one of the constants.
func (l RowLayout) Valid() bool { return l < rowLayouts }

// ByToken reports whether a token has one row on a rank, rather than one for each of its choices there.
func (l RowLayout) ByToken() bool { return l >= TokenRows }

// Fixed reports whether every group begins at a row that does not depend on the routing.
func (l RowLayout) Fixed() bool { return l == PaddedRows || l == SlabRows || l == RankRows }

// String is the layout's name in options and messages.
func (l RowLayout) String() string {
	if !l.Valid() {
		return fmt.Sprintf("RowLayout(%d)", uint8(l))
	}
	return [...]string{"flat", "padded", "slab", "token-major", "rank-padded"}[l]
}

// ScaleFormat is what one scale is.
type ScaleFormat uint8

// The formats.
const (
	// Float32Scales: a float32, by which the value is multiplied.
	Float32Scales ScaleFormat = iota
	// UE8M0Scales: the biased exponent of a power of two (2^(e-127), 255 is NaN), four of them in an int32, the first in the
	// low byte. Those after the row's last are 0.
	UE8M0Scales
	// PowerScales: a float32 that is a power of two, or NaN.
	PowerScales
	scaleFormats
)

// Valid reports whether f is one of the constants.
func (f ScaleFormat) Valid() bool { return f < scaleFormats }

// Scales says how the scales of rows of a quantized type lie, and how an engine makes them. For a block of elements x of a
// token:
//
//   - a is the largest |x|, at least 1e-4 (as float32); with a NaN in the block it is NaN;
//   - the scale is s = a/448, rounded to float32; with UE8M0Scales and PowerScales it is the least power of two that is not below that (NaN
//     above the largest);
//   - an element is x*(448/a), the quotient and the product each rounded to float32, with powers of two x/s; then rounded to
//     nearest even to Float8E4M3. With a NaN or infinity in a block its elements times its scale are NaN.
type Scales struct {
	// Block is how many elements of a row have one scale; the row's last block may be shorter. 0: there are no scales.
	Block  int
	Format ScaleFormat
	// Columns puts the scales of the output in column-major order: all rows' first scale word, then all rows' second. For
	// PaddedRows and SlabRows that is within each expert, [local experts, words, capacity], else [words, DispatchBounds.Rows]. The
	// scales that the caller gives with tokens are always row-major.
	Columns bool
}

// DispatchBounds describes one dispatcher. It is equal on all ranks but for Rank and places, and does not change while it lives.
type DispatchBounds struct {
	Rank, Ranks int
	// Experts is how many experts there are; First[r] to First[r+1] are the slots of rank r, each of which holds one expert at
	// a time. An expert may have slots on several ranks.
	Experts int
	First   []int32
	// TopK is how many choices a token has, MaxTokens how many tokens one rank in a call, Hidden how many elements a row.
	TopK, MaxTokens, Hidden int
	// IndexBytes is the size of an expert index, 4 or 8; -1 masks a choice.
	IndexBytes int
	// TokenType is the type of the tokens that are dispatched. RowType is what arrives: the same, or Float8E4M3 where the
	// engine quantizes. SumType is the type of the rows and tokens of Combine and both backward calls.
	TokenType, RowType, SumType DType
	// Scales of the rows that are dispatched; the caller gives those of the tokens when TokenType is Float8E4M3 and the engine makes them
	// when only RowType is.
	Scales Scales
	// Float8Partials: what crosses in a combine is Float8E4M3 with a scale for each 128 elements, see Combine.
	Float8Partials bool

	Layout RowLayout
	// Rows is how many rows the output of one rank holds. Align belongs to FlatRows, and Capacity to PaddedRows and SlabRows.
	Rows, Align, Capacity int64

	// LowLatency asks for the protocol for few tokens.
	LowLatency bool
	// Landed says that handles have the words of that name.
	Landed bool
	// Masks says that calls can go on without ranks, see Masker.
	Masks bool

	// Placement is a table of 32-bit integers in device memory that says which expert is in which slot: Experts+1 numbers, of which
	// C[e] to C[e+1] are the indices in what follows, the slots of all experts, expert by expert, of expert e; then for each
	// slot its expert. It changes between calls, never during one. Choice k of token t of rank r for expert e goes to the slot with
	// index C[e] + (r+t) mod (C[e+1]-C[e]).
	Placement Buffer
	// Counters are 64-bit words that only grow, see CounterWords. They are zero at first.
	Counters Buffer
	// Handles is the memory of all handles, at the same places of every rank's segment.
	Handles []DispatchHandle
	// Hosts is for ranks on several hosts; nil on one.
	Hosts *Hosts
	// Shared is for dispatchers that take turns with memory; nil for one that has its own.
	Shared *DispatchShared
}

// DispatchShared is what dispatchers have in common whose handles have Staging, Rows, Scales, Indices, Weights and Sources in the same memory.
// All ranks make their calls in one order, whichever dispatcher a call is of, and none in halves. So a call of theirs ends on a rank when no
// peer reads or writes that memory for it any more, and a peer writes there only when the rank has begun the call in which it does.
// There are no Masks and no Hosts. On the host a dispatcher whose memory is its own may have the order in common, and then has halves.
type DispatchShared struct {
	// Shape is the dispatcher's number among them, from 1, on all ranks alike.
	Shape int
	// Words are Layout.Common bytes, zero at first.
	Words Buffer
	// Differ says in words in what two of them differ.
	Differ func(a, b int) (of, other string)
	// Making is the error of all ranks where some make a dispatcher in place of a call of the others. It meets all ranks on the control plane, where
	// those wait. call is the number of the call, and word the CallWord of this rank's.
	Making func(call, word uint64) error
}

// Maker is a port of a dispatcher with DispatchBounds.Shared.
type Maker interface {
	// Make takes the place of this rank's next call, which it counts, and tells all ranks: those that are in a call there, or come to one, call
	// DispatchShared.Making. It does not wait: the rank makes no call before it has met all ranks on the control plane. Then undo has it be as if it had
	// not been called, where no rank is in a call, and all ranks meet once more. None of the rank's launches runs.
	Make() (call uint64, undo func())
}

// Shape is the number of DispatchShared, 0 without.
func (m *DispatchBounds) Shape() int {
	if m.Shared == nil {
		return 0
	}
	return m.Shared.Shape
}

// MaxMaskedRanks is how many ranks a dispatcher with Masks has at most.
const MaxMaskedRanks = 16

// Masker is a port of a dispatcher with DispatchBounds.Masks.
type Masker interface {
	// Mask has the calls of all ranks, also those under way, go on without a rank. It counts as one without tokens. Its rows that have not come
	// in a call under way become padding: zeros of no source. A masked rank's own calls return a MaskedError. ended says that its process has
	// ended; otherwise calls to which it may be writing wait until it is through or has ended, where it writes rows in place.
	Mask(rank int, ended bool)
	// Masked are the ranks that are masked, as this rank knows.
	Masked() []int
	// Unmask has the other ranks take this one in again, which it is after their next combine, and tells how many calls they have made
	// then. None of its own launches runs.
	Unmask(ctx context.Context) (calls uint64, err error)
}

// Family is "dispatch".
func (m *DispatchBounds) Family() string { return "dispatch" }

// Slots is how many slots all ranks have together.
func (m *DispatchBounds) Slots() int { return int(m.First[m.Ranks]) }

// Local is how many slots rank r has.
func (m *DispatchBounds) Local(r int) int { return int(m.First[r+1] - m.First[r]) }

// MostLocal is the most slots that a rank has.
func (m *DispatchBounds) MostLocal() (most int) {
	for r := range m.Ranks {
		most = max(most, m.Local(r))
	}
	return most
}

// TokenBytes is the size of a token.
func (m *DispatchBounds) TokenBytes() int64 { return int64(m.Hidden) * m.TokenType.Size() }

// RowBytes is the size of a row of a dispatch's output.
func (m *DispatchBounds) RowBytes() int64 { return int64(m.Hidden) * m.RowType.Size() }

// SumBytes is the size of a row or token of Combine and the backward calls.
func (m *DispatchBounds) SumBytes() int64 { return int64(m.Hidden) * m.SumType.Size() }

// Quantizes reports whether the engine makes float8 of what it is given.
func (m *DispatchBounds) Quantizes() bool { return m.RowType != m.TokenType }

// ScaleBlocks is how many scales a row has.
func (m *DispatchBounds) ScaleBlocks() int {
	if m.Scales.Block == 0 {
		return 0
	}
	return (m.Hidden + m.Scales.Block - 1) / m.Scales.Block
}

// ScaleWords is how many 32-bit words the scales of one row take.
func (m *DispatchBounds) ScaleWords() int {
	if m.Scales.Format == UE8M0Scales {
		return (m.ScaleBlocks() + 3) / 4
	}
	return m.ScaleBlocks()
}

// Groups is how many groups the output of rank r has: its slots in an expert-major layout, the ranks in a token-major one.
func (m *DispatchBounds) Groups(r int) int {
	if m.Layout.ByToken() {
		return m.Ranks
	}
	return m.Local(r)
}

// WeightsPerRow is how many weights a row has: one where each choice is a row, otherwise one for each choice.
func (m *DispatchBounds) WeightsPerRow() int {
	if m.Layout.ByToken() {
		return m.TopK
	}
	return 1
}

// Counter words: first Experts of them count the choices of this rank's tokens for each expert, the next Ranks the bytes of
// rows and scales that this rank has sent to each rank or let it read, the last Ranks the nanoseconds that it has waited for
// each.
func (m *DispatchBounds) CounterWords() int { return m.Experts + 2*m.Ranks }

// DispatchHandle is the memory of one dispatch: where its tokens went, and what this rank's experts got. It lies in the
// dispatcher's memory and is used again after a release. For one dispatch different ranks may use handles of different
// numbers. All of it has fixed sizes, so that launches can be captured and replayed with other routing; what is beyond the
// rows that a dispatch made is undefined.
//
// A handle is in one call at a time. Different handles of a dispatcher may be between Send and Receive at the same time.
type DispatchHandle struct {
	// State and Staging are the engine's: the routing as Combine and the backward calls need it, signals, rows on their way.
	// State is zero at first, Staging is not.
	State, Staging Buffer
	// Rows is [DispatchBounds.Rows, Hidden]; their Scales are [DispatchBounds.Rows, ScaleWords] of 4 bytes, or as Scales.Columns says.
	Rows, Scales Buffer
	// Counts are 32-bit: for each slot of this rank how many choices came. Offsets are 32-bit: the first row of each group, and
	// one more, behind the last group's last row, padding inside groups included. RankCounts are 32-bit: how many rows came
	// from each rank.
	Counts, Offsets, RankCounts Buffer
	// Indices is for token-major layouts: [DispatchBounds.Rows, TopK] of 64-bit integers, the local number of each choice's expert, -1 for
	// choices that are masked or went to other ranks.
	Indices Buffer
	// Weights are float32 [DispatchBounds.Rows, WeightsPerRow]: those given at dispatch, 1 where none was given, 0 where Indices is -1. In
	// expert-major layouts they are empty unless asked for.
	Weights Buffer
	// Sources are pairs of 32-bit integers for each row: the rank it came from and the number of the token there; -1, -1 in
	// padding that is zero. They are empty unless asked for.
	Sources Buffer
	// Landed are 32-bit words, one for each slot: how many of its rows have landed. A dispatch sets them to zero before it lets
	// any peer write, and each is added to (with release at system scope) after the rows it counts, so a reader that finds
	// (with acquire) a word equal to Counts may read all rows of the slot. Counts are written before Send ends, or are -1 from
	// then on until they are. Empty unless DispatchBounds.Landed is set; expert-major only.
	Landed Buffer
	// Mapped is memory that host and device share, for callers who want counts on the host: MappedWords 32-bit words. It is
	// empty unless asked for.
	Mapped Buffer
}

// MappedWords is the length of DispatchHandle.Mapped: a 64-bit word that takes the value of Dispatch.Ticket when the rest is there
// (release at system scope), then copies of Counts, Offsets and RankCounts.
func (m *DispatchBounds) MappedWords() int {
	return 2 + m.Local(m.Rank) + m.Groups(m.Rank) + 1 + m.Ranks
}

// Phase says which halves of a call a launch is.
type Phase uint8

// The halves. After Send the caller's inputs may be used again once the stream has got there, for all but the rows of a
// combine, which peers may read until Receive; results are there after Receive.
const (
	Send Phase = 1 << iota
	Receive
	Both = Send | Receive
)

// DispatchOp is the kind of a call on a dispatcher.
type DispatchOp uint8

// The calls. OpRefused is a rank that cannot take part in what it was called for, OpResults a copy that other ranks hear nothing of,
// OpTokenWeights the part of a combine by which an engine sends weights, OpMake a rank that makes a dispatcher in place of a call, see Maker, and
// OpExpand and OpFold what a rank does with its rows alone.
const (
	OpRefused DispatchOp = iota
	OpDispatch
	OpRedispatch
	OpCombine
	OpCombineBackward
	OpDispatchBackward
	OpResults
	OpTokenWeights
	OpMake
	OpExpand
	OpFold
)

// String is the call's name in reports.
func (o DispatchOp) String() string {
	return [...]string{"refused", "dispatch", "redispatch", "combine", "combine backward", "dispatch backward", "results", "token weights", "the making of a dispatcher", "expand", "fold"}[o]
}

// DispatchRouting is a copy of what a handle has of the routing of its dispatch, in memory of the device that only this rank reads:
// Layout.RoutingBytes of its State from Layout.Routing on, and its Counts, Offsets and RankCounts.
type DispatchRouting struct {
	State, Counts, Offsets, RankCounts Buffer
}

// DispatchCall is what every launch has. The engine uses it until it calls Done.
type DispatchCall struct {
	Handle int // of DispatchBounds.Handles
	Op     DispatchOp
	Phase  Phase
	// Tokens is the number of this rank's tokens in the dispatch that the call belongs to.
	Tokens int
	// Routing, when set, is that of another dispatch, which the call goes by: its handle is only the memory by which it crosses, and its
	// output. Not for OpDispatch.
	Routing DispatchRouting
	// Blocks bounds the multiprocessors that the launch takes; 0 is the engine's choice. The host engine runs on its caller or
	// stream.
	Blocks int
	// DefaultBlocks, where Blocks is 0, is how many multiprocessors kernels take by which tokens or rows cross while no pass over this rank's
	// rows runs next to them. An engine takes fewer where it leaves others free by default. 0 is the engine's choice.
	DefaultBlocks int
	Launched
}

// Operation is the name of the call.
func (c *DispatchCall) Operation() string { return c.Op.String() }

// Dispatch is one launch of the kernel that sends tokens to their experts. A token crosses to a rank once.
type Dispatch struct {
	DispatchCall
	// X is [tokens, Hidden] of TokenType, its Scales are [tokens, ScaleWords] of 4 bytes where TokenType is Float8E4M3.
	X, Scales Buffer
	// Experts is [tokens, TopK] of IndexBytes, Weights [tokens, TopK] in float32 or none. A OpRedispatch has neither: it sends
	// other tokens the same ways.
	Experts, Weights Buffer
	// Ticket is not 0 and what the engine leaves in the handle's Mapped when the counts are there.
	Ticket uint64
	// Numbers is memory of the device for MappedWords 32-bit words, or none: two that the engine uses, then Counts, Offsets and RankCounts
	// also there, which are 0 if the dispatch is given up before they are known. In expert-major layouts only, and not for an OpRedispatch.
	// An engine whose handles have Mapped may ignore it on a GPU.
	Numbers Buffer
	// Taken says that Results that are Taken, too, are the next launch: rows are told of while others are on their way, which costs a little.
	Taken bool
	// Into, when set, are copied when the dispatch is complete, as a launch of their own would: of OpDispatch on a GPU, not in halves.
	Into *Results
}

// Weighting says what a combine multiplies rows by.
type Weighting uint8

// The weightings. In token-major layouts rows are never multiplied: the caller's row is its rank's partial sum.
const (
	DispatchedWeights Weighting = iota // those of the dispatch, 1 where it had none
	GivenWeights                       // RowWeights
	Unweighted
	TokenWeights // Combine.TokenWeights, of the rank that the token is from
	weightings
)

// Valid reports whether w is one of the constants.
func (w Weighting) Valid() bool { return w < weightings }

// String is like "dispatched weights".
func (w Weighting) String() string {
	if !w.Valid() {
		return fmt.Sprintf("Weighting(%d)", uint8(w))
	}
	return [...]string{"dispatched weights", "given weights", "no weights", "weights of tokens"}[w]
}

// Combine is one launch of the kernel that brings rows back to their tokens, for OpCombine and OpDispatchBackward.
//
// Every rank makes, for every token with rows there, a partial sum p = 0 + w1*row1 + w2*row2 + ... in ascending order of
// choices, in float32; each product and each sum is rounded to nearest even on its own (no fused multiply-add; unweighted rows
// are multiplied by 1, which changes nothing). The partial sum is rounded to SumType. That crosses, also to the rank itself.
// With Float8Partials it is instead quantized, from float32, by the rule of Scales with blocks of 128 and float32 scales, and the
// value of an element is float32(q)*scale, rounded to float32. In token-major layouts the caller's row is that partial sum: it
// crosses as it is, or quantized.
//
// The token's rank sums y = 0 + Bias[0] + Bias[1] + p0 + p1 + ... in float32, over the ranks that have rows of the token, ascending,
// and rounds to SumType once. A token with no row gets its biases, or 0.
//
// On several hosts there is a sum for each host that has rows of the token, s = 0 + p0 + p1 + ... in float32 over its ranks, ascending. It is
// rounded to SumType, or quantized and widened again as a partial sum is, and y is the sum of biases and of these, over hosts, ascending.
type Combine struct {
	DispatchCall
	// Release says that the handle is given back: what the dispatch left is not read any more when the call begins. Rows stay as
	// they are until a later dispatch is complete.
	Release   bool
	Weighting Weighting
	Y         Buffer // [tokens, Hidden] of SumType
	Rows      Buffer // laid out like DispatchHandle.Rows, of SumType; it may end with the last row of the dispatch
	// RowWeights, of the rows in Rows, are float32 [rows, WeightsPerRow]. They weigh rows with GivenWeights, and go to SumWeights.
	RowWeights Buffer
	// TokenWeights is [tokens, TopK] of float32 with the weighting of that name, in expert-major layouts.
	TokenWeights Buffer
	// SumWeights, when set, is float32 [tokens, TopK] and gets for each choice the entry of RowWeights of its row, 0
	// for masked ones.
	SumWeights Buffer
	Bias       [2]Buffer // [tokens, Hidden] of SumType, or none
	// Ready, when set, are 32-bit words, one for each group of the handle: the caller's kernel adds to them (release at system
	// scope) the number of rows that it has written. The rows of a group may be read when its word is not below their number (for
	// expert-major layouts Counts, else RankCounts).
	Ready Buffer
}

// CombineBackward is one launch of the kernel for the gradients of Combine: a row's gradient is w*dy[t] rounded to SumType,
// zero in padding that is zero in the layout, and a weight's gradient is the inner product of its row and dy[t] in float32, see
// DotChains. In token-major layouts a row's gradient is dy[t], and there are no weights.
type CombineBackward struct {
	DispatchCall
	Weighting Weighting
	DY        Buffer // [tokens, Hidden] of SumType
	// Rows and DRows are laid out like DispatchHandle.Rows, of SumType: what Combine had, and the gradients. They may be the same
	// memory. Nobody reads Rows where rows are unweighted.
	Rows, DRows Buffer
	RowWeights  Buffer // with GivenWeights
	// DWeights is float32, or none: [tokens, TopK], 0 for masked choices; with GivenWeights [rows], like RowWeights, undefined
	// in padding.
	DWeights Buffer
}

// The inner product that CombineBackward makes: products are rounded to float32, and that of element i is added to chain i mod
// 256, in ascending order of i, from 0. Then chain j takes, in this order, chains j+4, j+2, j+1 (within its eight), j+128,
// j+64, j+32, j+16 and j+8; the result is chain 0. A thread of a warp that holds 8 neighbouring elements so sums by itself
// first.
const DotChains = 256
