package cuda

//lint:file-ignore U1000 kernels use what Go does not

import "structs"

// Plans: reductions, gathers and all-to-alls whose steps a user has written.
const (
	planThreads     = 512 // of a block
	planGrain       = 128 // bytes of a chunk, of which a multiple lies before each stripe of a block
	planSteps       = 32  // that a block has in shared memory
	reducePlanned   = 16  // the flag of a reduction that a plan does
	planPlaceRank   = 16  // of a word that names a chunk: the rank's bits begin here,
	planPlaceBuffer = 24  // and the buffer's
)

// Steps, and buffers: plan.Buffer.
const (
	planCopy    = 0 // of one chunk, also to another rank
	planReduce  = 1
	planSignal  = 2
	planWait    = 3
	planInput   = 0
	planOutput  = 1
	planScratch = 2
)

// planStep is a step of a rank. A word that names a chunk has its number, the rank and the buffer.
type planStep struct {
	_ structs.HostLayout

	kind      uint32
	to        uint32 // the chunk that is written
	first     uint32 // of the words behind the steps that name what is read
	rows      uint32 // how many
	chunk     uint32 // which chunk of a block is moved
	last      uint32 // 1: a reduction has the elements of all ranks
	peer      uint32 // of a signal or a wait
	semaphore uint32
	number    uint32 // which signal of the semaphore in a part of a call, from 1
	total     uint32 // how many there are in a part
}

// planBlock is where the words and slots for plans lie. Semaphores must be zero before the first call.
type planBlock struct {
	_ structs.HostLayout

	semaphores place // [size][semaphores][lines] lines: {seq} of each block of a peer
	programs   place // of this rank: steps, then words that name chunks
	inputs     place // [chunks][slot_bytes]: slots of a rank's input, all blocks together
	outputs    place // the same of output
	scratch    place // and of scratch
	end        place // the offset behind the block
}

// layPlanBlock lays the block out from offset on. inputs, outputs and scratch count chunks.
func layPlanBlock(offset, size, semaphores, lines, programBytes, inputs, outputs, scratch, slotBytes int64) (b planBlock) {
	at := offset
	b.semaphores, at = at, at+size*semaphores*lines*lineBytes
	b.programs, at = at, (at+programBytes+controlAlign-1)/controlAlign*controlAlign
	b.inputs, at = at, at+inputs*slotBytes
	b.outputs, at = at, at+outputs*slotBytes
	b.scratch, at = at, at+scratch*slotBytes
	b.end = at
	return b
}

// planArgs is one launch of a plan. Where reduce has no place of this rank's input or output, the plan's steps find it in slots.
type planArgs struct {
	_ structs.HostLayout

	reduce     reduceArgs
	block      planBlock
	program    uint64 // offset of the rank's steps in its segment
	slotBytes  int64  // of a chunk
	blockBytes int64  // of a block of the input or the output
	each       int64  // elements of a chunk; the first `longer` chunks of a block have one more
	steps      uint32
	semaphores uint32 // from a rank to another; the last is for parts of a call
	chunks     uint32 // of a block
	longer     uint32
	inputs     uint32 // chunks of the input
	outputs    uint32
	scratch    uint32
	size       uint32 // of an element
}
