package cuda

//lint:file-ignore U1000 kernels use what Go does not

import (
	"structs"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Reductions. Threads of a block of their kernels: in the packet kernel the last warp compares the ranks' calls, in the other one it
// watches what peers write and the two before it signal.
const (
	reducePacketThreads = 384
	reduceThreads       = 512
	reduceLineBytes     = 64 // what one block of a rank writes for the same block of a peer: five sequence numbers
	reduceEntryBytes    = 64 // what a rank tells a peer of its call: four words of 12 bytes and a flag
	reduceMaxSlots      = 8
	multicastThreads    = 512 // of a block of the kernels of multicast
	reduceBounds        = 65
)

// Collectives: kernels.Collective.
const (
	reduceScatter = kernels.ReduceScatter
	allGather     = kernels.AllGather
)

// Operators: kernels.ReduceOp.
const (
	opSum  = kernels.Sum
	opAvg  = kernels.Avg
	opMin  = kernels.Min
	opMax  = kernels.Max
	opProd = kernels.Prod
)

// Data types: kernels.DType.
const (
	typeUint8      = kernels.Uint8
	typeInt32      = kernels.Int32
	typeInt64      = kernels.Int64
	typeFloat16    = kernels.Float16
	typeBfloat16   = kernels.BFloat16
	typeFloat32    = kernels.Float32
	typeFloat64    = kernels.Float64
	typeFloat8e4m3 = kernels.Float8E4M3
	typeFloat8e5m2 = kernels.Float8E5M2
)

// Flags of a reduction. All ranks of a call have the same.
const (
	reduceOneShot = 1 // every rank reduces everything for itself; packets only
	reducePull    = 2 // an all-gather reads the peers' slices where it can, instead of having them written
	reduceWarps   = 4 // by multicast: the teams are warps of each block
	reduceBlocks  = 8 // the same, and they are blocks
)

// reduceBlock is where the words of a reduction's control block lie. All but the slots must be zero before the first call.
type reduceBlock struct {
	_ structs.HostLayout

	packetStride place
	control      place // struct sw_control
	entries      place // [2][size]: what each peer calls, by the call's parity
	lines        place // [size][lines]: how far each block of each peer is
	inputs       place // [2][size][packet_stride]: packets to be reduced
	results      place // [2][size][packet_stride]: packets of slices that are reduced
	inputSlots   place // [size][lines][slot_count][chunk_bytes]: staging of input
	resultSlots  place // the same of results
	end          place // the offset behind the block
}

// layReduceBlock lays the block out from offset on.
func layReduceBlock(offset, size, lines, slotCount, chunkBytes, packetBytes int64) (b reduceBlock) {
	at := offset
	b.packetStride = (packetBytes + packetGroupPayload - 1) / packetGroupPayload * packetGroupBytes
	b.control, at = at, at+controlAlign
	b.entries, at = at, at+2*size*reduceEntryBytes
	b.lines, at = at, kernels.AlignUp(at+size*lines*reduceLineBytes, kernels.LineBytes)
	b.inputs, at = at, at+2*size*b.packetStride
	b.results, at = at, at+2*size*b.packetStride
	b.inputSlots, at = at, at+size*lines*slotCount*chunkBytes
	b.resultSlots, at = at, at+size*lines*slotCount*chunkBytes
	b.end = at
	return b
}

// reduceArgs is one launch of an all-reduce, reduce-scatter or all-gather. Every rank owns one slice of the elements.
type reduceArgs struct {
	_ structs.HostLayout

	world       worldWords
	src         uint64 // all slices if the call reduces, else this rank's
	dst         uint64 // all slices if the call gathers, else this rank's
	srcPlace    uint64 // where src lies in this rank's segment, or SW_NOWHERE: peers cannot read it
	dstPlace    uint64 // the same of dst and writing
	block       reduceBlock
	count       uint64              // elements of all slices
	shape       uint64              // digest of slices that count does not imply
	call        uint32              // kernels.ReduceCall.Word and, from bit 24 on, the flags
	lines       uint32              // the most blocks that a launch can have
	slots       uint32              // chunks of a block under way through staging
	chunkBytes  uint32              // of one block; a multiple of the tile
	interval    uint32              // cycles from one tile of a block that crosses a link to the next; 0: as they come
	packetBytes int64               // the longest message of packets
	bounds      [reduceBounds]int64 // slice p is bytes bounds[p] to bounds[p+1]
}

// multicastArgs is one launch of an all-reduce by multicast.
type multicastArgs struct {
	_ structs.HostLayout

	reduce    reduceArgs
	multicast uint64 // address at which multicast reaches the beginning of all ranks' segments
}
