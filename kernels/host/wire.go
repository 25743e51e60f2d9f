package host

import "github.com/switchyard-moe/switchyard/kernels"

// Every communicator owns a control block at the same offset of each rank's segment. An ordered pair of ranks, src to dst, has two kinds of
// lines in the block of an exchange, each with one writer:
//
//   - the signal line, in dst's segment, written by src: "chunk k of call e is there, of a message of b bytes";
//   - credit lines, in src's segment, written by dst: "chunk k of call e may be written to this place, this long".
//
// The first word of a line is its sequence number, call epoch and chunk in one (kernels.Seq). It is written last, with release semantics, and
// waiting means "at least". It only ever grows, so a line left over from an earlier call, or from a call that failed, can never be taken for a
// new one.

// This engine's words in the header of a segment.
const (
	sleepersOffset = kernels.EngineOffset       // 32-bit: threads of this rank that sleep on the doorbell
	doorbellOffset = kernels.EngineOffset + 64  // 32-bit: grows when a peer has signalled a sleeping rank
	coreOffset     = kernels.EngineOffset + 128 // 32-bit: the processor on which this rank last began to wait, plus 1
	waitingOffset  = kernels.EngineOffset + 192 // 64-bit: the call in which this rank waits, 0 when it does not
	awaitedOffset  = kernels.EngineOffset + 256 // 32-bit: the rank for which this rank waits, or waited when it gave up, plus 1, and the bits below
	passesOffset   = awaitedOffset + 4          // 32-bit: how often this rank has looked before it sleeps, so that others see that it runs
)

// The bits of that word say that the wait has failed: by its deadline, then the rank is the one to blame, or for another reason.
const (
	gaveUpBit = 1 << 31
	failedBit = 1 << 30
)

// Byte offsets of the words of a line.
const (
	LineSeq    = 0  // sequence number, written last with release
	LineTotal  = 8  // the extent of the whole message as the writer of the line knows it
	LineOffset = 16 // credits: where the chunk goes, from the start of the receiver's segment
	LineLen    = 24 // credits: bytes that may be written there
	LineSource = 16 // signals: where the message lies at its sender, 0 when it may not be read any more

	lineRefused = 32 // signals: of refused splits bytes, offset, limit, and the part's peer in the upper half behind whether it is sent
)

// refused is the LineLen of a credit that grants nothing because the two ranks disagree on the extent of the message. As the LineTotal of a
// credit or a signal it says that its writer has refused its own splits and takes no part in the call.
const refused = 1<<64 - 1

// extent is the size of a message, and above it what is known of its elements, as ranks tell it each other. A message of no bytes has no elements.
type extent uint64

const elementsShift = 56

func extentOf(bytes int64, of kernels.Elements) extent {
	if bytes == 0 {
		return 0
	}
	return extent(bytes) | extent(of)<<elementsShift
}

func (x extent) bytes() int64               { return int64(x & (1<<elementsShift - 1)) }
func (x extent) elements() kernels.Elements { return kernels.Elements(x >> elementsShift) }

// fits reports whether a message of this extent can be received as another.
func (x extent) fits(o extent) bool {
	return x == o || x.bytes() == o.bytes() && x.elements().Alike(o.elements())
}

// A packet's first word has its flag in the upper half, and its extent in the lower: kernels.Elements in the upper byte, and 24 bits of bytes.
const packetElementsShift = 24

func (x extent) packet() uint64 {
	return uint64(x.elements())<<packetElementsShift | uint64(x.bytes())
}

// extentOfPacket is what a packet's first word says.
func extentOfPacket(word uint64) extent {
	return extentOf(int64(word&(1<<packetElementsShift-1)), kernels.Elements(word>>packetElementsShift))
}

// PacketFlag is the flag of the packet words of call e: 32 bits, and never zero, which is what words hold that no packet
// has reached yet. It comes again after 2^32-1 calls, with the other parity.
func PacketFlag(e uint64) uint64 { return e%(1<<32-1) + 1 }
