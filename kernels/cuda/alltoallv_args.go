package cuda

//lint:file-ignore U1000 kernels use what Go does not

import (
	"structs"

	"github.com/switchyard-moe/switchyard/kernels"
)

// The all-to-all. Threads of a block of its kernel: some send, two warps watch what peers write, the others receive.
const (
	sendThreads    = 384
	watchThreads   = 64
	recvThreads    = 320
	packetThreads  = 1024
	copyThreads    = 256
	ownThreads     = 512
	itemBytes      = 128   // what a block keeps in shared memory of a stripe of the messages to and from a peer
	tileBytes      = 4096  // what one warp moves at a time
	stripeMinBytes = 16384 // messages below this take fewer stripes; both ends must agree
)

// Flags of an exchange.
const (
	flagStaged = 1 // take messages in through staging even where peers could write dst
	flagMesh   = 2 // every block begins with another peer
)

// exchangeBlock is where the words of an all-to-all's control block lie. All but the slots must be zero before the first call.
type exchangeBlock struct {
	_ structs.HostLayout

	packetStride  place
	control       place // struct sw_control
	signals       place // [2][size][stripes] lines: {seq, total}, and of a message through staging {seq of its end, seq}
	credits       place // [size] lines: {seq, offset or SW_NOWHERE} {seq, total}
	complaints    place // [2][size] lines: {epoch, sent} {epoch, expected} of a message that had another length than its receiver expected
	stripeCredits place // [size][stripes] lines: {seq of the last chunk taken out of staging, 0}
	packets       place // [2][size][packet_stride]
	slots         place // [size][stripes][slot_count][slot_bytes]
	end           place // the offset behind the block
}

// layExchangeBlock lays the block out from offset on.
func layExchangeBlock(offset, size, stripes, slotCount, slotBytes, packetBytes int64) (b exchangeBlock) {
	at := offset
	b.packetStride = packetHeaderBytes + (packetBytes+packetGroupPayload-1)/packetGroupPayload*packetGroupBytes
	b.control, at = at, at+controlAlign
	b.signals, at = at, at+2*size*stripes*lineBytes
	b.credits, at = at, at+size*lineBytes
	b.complaints, at = at, at+2*size*lineBytes
	b.stripeCredits, at = at, kernels.AlignUp(at+size*stripes*lineBytes, kernels.LineBytes)
	b.packets, at = at, at+2*size*b.packetStride
	b.slots, at = at, at+size*stripes*slotCount*slotBytes
	b.end = at
	return b
}

// stepWords is a step of an exchange: the rank that this rank sends to in it, the one it receives from, and what. The words of one warp lie
// together, because a first access to a line of arguments takes as long as one to memory.
type stepWords struct {
	_ structs.HostLayout

	to         uint32
	from       uint32
	sendBytes  int64
	sendOffset int64
	recvBytes  int64
	recvOffset int64
}

// exchangeArgs is one launch of the variable-size all-to-all.
type exchangeArgs struct {
	_ structs.HostLayout

	world       worldWords
	src         uint64
	dst         uint64
	dstOffset   int64  // place of dst in this rank's segment, or -1: peers cannot write it
	splits      uint64 // address of int64 [4][size]: send bytes, send offsets, receive bytes, receive offsets by rank; 0: they are below
	block       exchangeBlock
	packetBytes int64 // messages up to this are packets
	slotBytes   int64
	stripes     uint32 // the most that a message is cut into
	slotCount   uint32 // chunks of a stripe under way through staging
	flags       uint32
	interval    uint32 // cycles from one tile of a block to the next; 0: as they come
	inverse     uint32 // 2^32/(size-1), rounded up; 0 where size-1 < 2
	senders     uint32 // blocks that send; as many more copy messages out of staging. 0: every block does both
	srcBytes    int64  // how long the buffers are; looked at where splits are not below
	dstBytes    int64
	ownBytes    int64 // what stays on this rank
	ownSrc      int64
	ownDst      int64
	steps       [maxRanks]stepWords // size-1 of them
}

// copyArgs is an exchange by the copy engines.
type copyArgs struct {
	_ structs.HostLayout

	exchange exchangeArgs
	places   [maxRanks]int64 // where in each peer's segment this rank's message goes, as the host knows it
}
