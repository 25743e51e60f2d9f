package cuda

//lint:file-ignore U1000 kernels use what Go does not

import "structs"

// Messages between two ranks.
const (
	messageThreads    = 256       // of a block
	fewMessageThreads = 192       // of a block of a launch whose messages are all small: one look at 8 KiB
	mostMessages      = 64        // of one launch
	messageRate       = 350       // bytes a nanosecond that the blocks of a message store over a link: links get slower where more is offered
	messageFault      = 1 << 31   // in part of a fault: it is a message's
	anyRank           = 1<<32 - 1 // the peer of a receive from any rank, and of its fault
	messageItemBytes  = 64        // of what the blocks of a group do together: its packets, and room
	stagingSlots      = 2         // of each block and rank, for chunks of messages that the receiver cannot read at their sender
)

// Answers to a message, and its states. The number of the message is above these two bits.
const (
	answerClaimed   = 1 // the receiver reads it
	answerTaken     = 2 // the receiver has it
	answerRefused   = 3 // the receiver expects another size, or has given up where that is all bits
	answerBits      = 2
	stateOffered    = 0 // the sender has thought better of withdrawing it
	stateWithdrawal = 1 // the sender withdraws it, unless it is claimed
	stateGone       = 2 // the sender has withdrawn it
)

// messageBlock is where the words for messages lie. All of it before staging must be zero before the first launch. Boxes are those of one rank's
// messages to another.
type messageBlock struct {
	_ structs.HostLayout

	control    place // of the pointBlock
	anyone     place // struct sw_control of receives from any rank
	headers    place // [size][boxes] lines of two packets: {tag, low half of the size}, {place, high half}, by the sender
	states     place // [size][boxes] words: the last message of the box that its sender began to withdraw, by the sender
	filled     place // [size][blocks] lines: {claim and chunks in staging}, by the sender
	payload    place // [size][boxes] packets of a small message, by the sender
	answers    place // [size][boxes] {number and answer, claim and blocks, 0 where it reads, or the size that the receiver expects}, by the receiver
	drained    place // [size][blocks] lines: {claim and chunks copied out of staging}, by the receiver
	complaints place // [size] two lines: {number, tag}, {sent, expected} of the last small message whose size the receiver refused
	counters   place // struct sw_message_counters [size], of this rank
	freed      place // [size][boxes] words: the last message that this rank has withdrawn from the box
	ended      place // [size][boxes] words: the last message of the rank that this rank is through with
	items      place // [2][size] packets in messageItemBytes: what the blocks of a launch are to do together, for sends and for receives; this rank's own of receives from any rank
	done       place // [2][size][blocks] words: the last item that a block has done, and whether it has failed
	staging    place // [size][blocks][stagingSlots] chunks
	end        place // the offset behind the block
}

// layMessageBlock lays the block out from offset on. payloadBytes is that of a box.
func layMessageBlock(offset, control, size, boxes, payloadBytes, blocks, stagingBytes int64) (b messageBlock) {
	at := offset
	b.control = control
	b.anyone, at = at, at+controlAlign
	b.headers, at = at, at+size*boxes*lineBytes
	b.filled, at = at, at+size*blocks*lineBytes
	b.drained, at = at, at+size*blocks*lineBytes
	b.complaints, at = at, at+size*2*lineBytes
	b.answers, at = at, at+size*boxes*16
	b.counters, at = at, at+size*64
	b.items, at = at, at+2*size*messageItemBytes
	b.states, at = at, at+size*boxes*8
	b.freed, at = at, at+size*boxes*8
	b.ended, at = at, at+size*boxes*8
	b.done, at = at, at+2*size*blocks*8
	at = (at + controlAlign - 1) / controlAlign * controlAlign
	b.payload, at = at, at+size*boxes*payloadBytes
	b.staging, at = at, at+size*blocks*stagingSlots*stagingBytes
	b.end = at
	return b
}

// messageCounters are what a rank counts of its messages with another: 64 bytes.
type messageCounters struct {
	_ structs.HostLayout

	sent   uint64    // the number of the last message to the rank
	heard  uint64    // the last of them of whose size the rank has complained, and this rank has told
	low    uint64    // this rank is through with all messages of the rank below this number
	early  uint64    // the number of messages above low that this rank is through with
	claims uint64    // that it has made
	turn   uint64    // this rank's own: where a receive from any rank looks first
	items  [2]uint64 // of what blocks do together, for sends and for receives; this rank's own of receives from any rank
}

// messageEntry is one message of a launch.
type messageEntry struct {
	_ structs.HostLayout

	tag     uint64
	address uint64
	place   uint64 // of a send: where the receiver reads it at its sender, if it reaches that, or nowhere; of a receive: the address of the word that gets its sender, or 0
	bytes   int64
	peer    uint32 // anyRank: a receive from any rank
	_       uint32
}

// messageGroup is the messages of a launch with one rank in one direction, and the first of its blocks. With a receive from any rank among
// them, all receives of the launch are one group, whose peer is anyRank.
type messageGroup struct {
	_ structs.HostLayout

	peer    uint32
	receive uint32
	first   uint32 // of the entries
	block   uint32
}

// messagesArgs is one launch of messages.
type messagesArgs struct {
	_ structs.HostLayout

	world        worldWords
	block        messageBlock
	eagerBytes   int64
	stagingBytes int64
	payloadBytes int64
	boxes        uint32 // a power of two
	blocks       uint32 // that staging is laid out for
	count        uint32 // of entries
	groupCount   uint32
	interval     uint32 // cycles from one tile of a warp to its next into a peer's staging; 0: as they come
	_            uint32
	entries      [mostMessages]messageEntry
	groups       [mostMessages]messageGroup
}
