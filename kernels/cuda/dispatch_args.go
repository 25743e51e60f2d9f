package cuda

//lint:file-ignore U1000 kernels use what Go does not

import (
	"structs"

	"github.com/switchyard-moe/switchyard/kernels"
)

// MoE dispatch.
const (
	dispatchThreads        = 1024              // of a block of dispatch_rows
	dispatchFewThreads     = 512               // of a block of dispatch_few
	dispatchFewPublisher   = 16                // blocks of dispatch_few for each, after the first, that tells what lies next to rows
	dispatchFewSumThreads  = 448               // of a block of combine_few
	dispatchSumThreads     = 512               // of a block of combine_rows
	dispatchPassThreads    = 512               // of a block of the passes over this rank's memory
	dispatchMaxBlocks      = 160               // of a kernel that peers wait for
	dispatchFewTokens      = 1024              // the most tokens of the kernels for few
	dispatchFewSlots       = 1024              // and the most slots
	dispatchTable          = 1024              // experts whose places a block keeps in shared memory
	dispatchSums           = kernels.OpCombine // the least operation that reads peers' rows
	dispatchFirst          = 65                // entries of dispatch_args.first
	dispatchScales         = 512               // bytes of shared memory for the scales that a warp makes
	dispatchSlots          = 128               // places for rows under way that the warps of a block have together, at most
	dispatchSumPassThreads = 512               // of a block of the pass that makes sums: those that make, and a warp that tells
	dispatchPassPart       = 2048              // bytes of a row that a warp of a pass adds or copies at a time
	dispatchDensePart      = 3584              // bytes of a row of few tokens that a warp sends to experts as packets, 4096 bytes of them
	dispatchPlainPart      = 1536              // the same on the way back, 2048
	dispatchNarrowPart     = 2048              // the same of partial sums that cross as float8, 1536, or 1024 where elements have 4 bytes
	dispatchStretch        = 512               // elements of a float8 partial sum behind one group of scales
	dispatchWindow         = 6                 // log2 of the fewest places of a window: rows of one rank in a window are told together when they are made
	tokenWeightsThreads    = 256               // of a block of token_weights
	dispatchCountsThreads  = 256               // of the one block of dispatch_counts
	maskedRanks            = kernels.MaxMaskedRanks
	maskEnded              = 32 // of a mask word: the bit of rank 0 among those of ranks whose processes have ended
)

// The bits of a launch's mode.
const (
	dispatchSend      = 1     // the first half of a call
	dispatchReceive   = 2     // the second half
	dispatchCached    = 4     // the routing is there already
	dispatchFree      = 8     // peers may write this rank's output when they see the begin of this call
	dispatchKeep      = 16    // the rows of a combine stay as they are until the handle's next dispatch is complete
	dispatchCompact   = 32    // rows of one rank follow those of the one before
	dispatchByExpert  = 64    // rows arrive in staging and are spread over the experts' rows
	dispatchColumns   = 128   // scales in column-major order
	dispatchExponents = 256   // scales are exponents, four in a word
	dispatchZero      = 512   // padding is zero
	dispatchWeigh     = 1024  // rows are multiplied by the weights of the dispatch
	dispatchGiven     = 2048  // or by those next to the rows
	dispatchBeside    = 4096  // the two kernels of the call run at the same time
	dispatchPowers    = 8192  // scales are float32 powers of two
	dispatchTold      = 16384 // a kernel next to the one that sends tells the host of counts, and counts the call; with BESIDE a copy behind that takes rows as they come
)

// dispatchBlock is where the words of a handle lie. All must be zero before the first call.
type dispatchBlock struct {
	_ structs.HostLayout

	noteStride   place
	packetStride place
	control      place // struct sw_control
	landing      place // the epoch of the call for which kernels.DispatchHandle.Landed counts
	begins       place // [2][size] lines: {epoch, word} {epoch, place of rows}, what each rank says when it begins a call
	dones        place // [2][size][blocks]: {epoch, word}, what each block of each rank says of the rows that are there
	slotCounts   place // [2][size][slots]: rows of each rank for each slot, behind the low half of the epoch
	rankTotals   place // [2][size][size]: rows of each rank for each rank, as above
	blockCounts  place // [blocks][size]: rows of this rank's blocks for each rank, as above
	blockSlots   place // [blocks][slots]: choices of this rank's blocks for each slot, as above
	made         place // [size][windows]: the last epoch in which each rank has made the partial sums of a window of this rank's rows
	making       place // [size][windows]: parts of the partial sums that this rank has made for each; 0 between calls
	arrived      place // [size]: rows in staging from each rank
	places       place // [max_tokens][size]: the row of each token among those of this rank on each rank, or -1
	who          place // [max_tokens][top_k]: the rank of each choice, or -1
	spread       place // [staged][top_k]: the expert's row of each choice of a row in staging, or -1
	indices      place // [staged][top_k]: each choice next to rows in staging, as routing.cuh numbers them
	weights      place // [staged][top_k] float32, in the order of indices
	sources      place // [staged][2], in the order of indices
	wiped        place // [2]: by parity of calls, the token of which places that are not used are wiped next
	notes        place // [2][size][max_tokens][note_stride]: what lies next to a row of few tokens, as packets
	packets      place // [2][size][max_tokens][packet_stride]: rows of few tokens
	end          place // the offset behind the block
}

// layDispatchBlock lays the block out from offset on. staged is how many rows it has a source for, spread the same of what is next to rows on their
// way to rows by expert.
func layDispatchBlock(offset, size, slots, maxTokens, topK, staged, spread, noteStride, packetStride int64) (b dispatchBlock) {
	at := offset
	b.noteStride, b.packetStride = noteStride, packetStride
	b.control, at = at, at+controlAlign
	b.landing, at = at, at+controlAlign
	b.begins, at = at, at+2*size*lineBytes
	b.dones, at = at, kernels.AlignUp(at+2*size*dispatchMaxBlocks*16, kernels.LineBytes)
	b.slotCounts, at = at, kernels.AlignUp(at+2*size*slots*8, kernels.LineBytes)
	b.rankTotals, at = at, kernels.AlignUp(at+2*size*size*8, kernels.LineBytes)
	b.blockCounts, at = at, kernels.AlignUp(at+dispatchMaxBlocks*size*8, kernels.LineBytes)
	b.blockSlots, at = at, kernels.AlignUp(at+dispatchMaxBlocks*slots*8, kernels.LineBytes)
	windows := (maxTokens+1<<dispatchWindow-1)>>dispatchWindow + 1 // a rank's rows may begin in the middle of one
	b.made, at = at, kernels.AlignUp(at+size*windows*8, kernels.LineBytes)
	b.making, at = at, kernels.AlignUp(at+size*windows*4, kernels.LineBytes)
	b.arrived, at = at, kernels.AlignUp(at+size*4, kernels.LineBytes)
	b.places, at = at, kernels.AlignUp(at+maxTokens*size*4, kernels.LineBytes)
	b.who, at = at, kernels.AlignUp(at+maxTokens*topK*4, kernels.LineBytes)
	b.spread, at = at, kernels.AlignUp(at+spread*topK*4, kernels.LineBytes)
	b.indices, at = at, kernels.AlignUp(at+spread*topK*8, kernels.LineBytes)
	b.weights, at = at, kernels.AlignUp(at+spread*topK*4, kernels.LineBytes)
	b.sources, at = at, kernels.AlignUp(at+staged*8, kernels.LineBytes)
	b.wiped, at = at, kernels.AlignUp(at+controlAlign, kernels.LineBytes)
	b.notes, at = at, kernels.AlignUp(at+2*size*maxTokens*b.noteStride, kernels.LineBytes)
	b.packets, at = at, at+2*size*maxTokens*b.packetStride
	b.end = at
	return b
}

// moveRouting has the block's routing lie elsewhere, in memory that only this rank uses. Kernels add places to the address of their own
// segment and wrap around, so it may lie anywhere.
func (b *dispatchBlock) moveRouting(by place) {
	for _, at := range []*place{&b.arrived, &b.places, &b.who, &b.spread, &b.indices, &b.weights, &b.sources} {
		*at += by
	}
}

// dispatchSendWords is what only the kernels of a dispatch have: this rank's tokens, where they go, and what the caller wants to know of what comes.
type dispatchSendWords struct {
	_ structs.HostLayout

	x            uint64 // address of the tokens, or of their gradients
	scales       uint64 `c:"const uint32_t *"` // address of the scales next to them
	choices      uint64 // address of [tokens][top_k] experts
	weights      uint64 `c:"const float *"` // address of [tokens][top_k] float32; 0: all are 1
	toRows       uint64 // place to which rows are sent
	toScales     uint64
	toIndices    uint64
	toWeights    uint64
	toSources    uint64
	mapped       uint64 // address of kernels.DispatchHandle.Mapped; 0: none
	ticket       uint64
	landed       uint64 `c:"uint32_t *"` // address of kernels.DispatchHandle.Landed; 0: none
	offsetBase   int64  // rows from one rank's first row to the next one's; 0: they follow one another
	indexBytes   uint32
	slotsInverse uint32 // 2^32 over the slots of a rank, rounded up; 0 where ranks have different numbers or one each
	scaleBlock   uint32 // elements with one scale
	share        uint32 // tokens that a block's shared memory has room for
}

// dispatchRowsWords is the rows of this rank's experts or, by token, of the tokens that it got.
type dispatchRowsWords struct {
	_ structs.HostLayout

	rows       uint64 // their address
	scales     uint64
	weights    uint64 `c:"float *"` // of each, or of [rows][top_k]
	sources    uint64 `c:"uint64_t *"`
	counts     uint64 `c:"uint32_t *"` // address of kernels.DispatchHandle.Counts, and so on
	offsets    uint64 `c:"uint32_t *"`
	rankCounts uint64 `c:"uint32_t *"`
	most       int64  // rows of an output, or of what a combine of few tokens is given
	room       int64  // rows that a dispatch by token writes at most: those behind are left out
	align      int64
	capacity   int64 // 0: an expert's rows follow those of the one before
}

// dispatchSumWords is what only the kernels of a combine and of gradients have.
type dispatchSumWords struct {
	_ structs.HostLayout

	ready       uint64 // address of the words by which the caller marks rows done; 0: all are
	fromRows    uint64 // place of the rows that peers read
	own         uint64 // address of the rows of this rank's own tokens; 0: they lie where peers read the others
	fromWeights uint64 // place of [rows][top_k] float32 that they read; 0: none
	y           uint64 // address of the sums, or of the rows' gradients
	weights     uint64 `c:"float *"` // address of float32 [tokens][top_k], the sums' weights; 0: none
	bias0       uint64
	bias1       uint64
	window      uint32 // log2 of the places of rows that are told together, the same on all ranks
	spare       uint32
}

// maskWords is the control block of a dispatcher with Masks, in every rank's segment.
type maskWords struct {
	_ structs.HostLayout

	mask  uint64              // bit r: rank r is masked, bit maskEnded+r: its process has ended, too. Any rank sets bits, only this one clears them
	asks  uint64              // not 0 while this rank wants to be unmasked
	taken uint64              // rank 0's counts: what was decided at a combine, see masks.cuh
	call  uint64              // whom the last call does without, see masks.cuh
	lost  uint32              // ranks whose data has not come to all blocks of the running kernel
	ended uint32              // blocks of it that are through
	total uint32              // requests of this rank's host that mask has,
	seen  [maskedRanks]uint32 // and those for each rank
}

// maskRequests is what a rank's host wants to be masked, in pinned host memory, which kernels read also while the driver is busy. Numbers
// only grow, and total is written last.
type maskRequests struct {
	_ structs.HostLayout

	number [maskedRanks]uint32 // of requests to mask each rank
	ended  uint32              // bits of the ranks whose processes have ended
	total  uint32              // of requests
}

// maskArgs is a launch of dispatch_mask or dispatch_unmask.
type maskArgs struct {
	_ structs.HostLayout

	world   worldWords
	masks   place  // of struct sw_mask
	bits    uint64 // to set in all mask words, or the whole of this rank's
	rank    uint32 // that is masked
	number  uint32 // of the request among those for the rank,
	total   uint32 // and among all
	epoch   uint64 // calls that the others have made
	control place  // of the handle's struct sw_control
}

// dispatchArgs is one launch for MoE dispatch. Places are the same on every rank.
type dispatchArgs struct {
	_ structs.HostLayout

	world      worldWords
	state      dispatchBlock // of the handle
	op         uint32
	mode       uint32
	tokens     uint32
	topK       uint32
	maxTokens  uint32
	experts    uint32
	slots      uint32
	local      uint32
	rowBytes   uint32 // of a token here
	wireBytes  uint32 // of a row that crosses
	scaleWords uint32 // 32-bit words of scales next to a row
	part       uint32 // bytes of a row that a warp moves at a time
	parts      uint32 // of a row
	movers     uint32 // warps that move
	depth      uint32 // parts that a warp has under way
	interval   uint32 // cycles from one part of a warp to its next; 0: as they come
	table      uint64 `c:"const uint32_t *"`     // address of kernels.DispatchBounds.Placement
	counters   uint64 `c:"unsigned long long *"` // address of kernels.DispatchBounds.Counters
	send       dispatchSendWords
	out        dispatchRowsWords
	sum        dispatchSumWords
	first      [dispatchFirst]uint32 // slots before each rank's
	masks      place                 // of struct sw_mask, by which calls go on without ranks; 0: none do
	requests   uint64                // address of struct sw_mask_requests
}
