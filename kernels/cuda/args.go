package cuda

//lint:file-ignore U1000 kernels use what Go does not

import (
	"structs"
	"time"

	"github.com/switchyard-moe/switchyard/kernels"
)

//go:generate go run ./internal/genlayout -root ../..

// The words that kernels share with Go are constants, structs with structs.HostLayout and functions that lay control blocks out, in this file
// and those whose names end in _args.go, which use nothing of other files. genlayout writes them for C, with their comments: maxRanks becomes
// SW_MAX_RANKS, worldWords struct sw_world, layDispatchBlock sw_lay_dispatch_block.

// Of all families.
const (
	maxRanks     = 64
	lineBytes    = 32                  // a line: what one rank writes for another with one or two 16-byte stores
	abortOffset  = kernels.AbortOffset // the word that makes every wait of a rank return
	chunkBits    = 20                  // of a sequence number count chunks within one call
	aliasOffset  = kernels.AliasOffset // the alias table in a rank's segment
	aliasShift   = kernels.AliasShift  // how a place names a row of it
	controlAlign = kernels.LineBytes   // parts of a control block that peers write begin at a multiple
	nowhere      = 1<<64 - 1           // the place of memory that peers cannot write
)

// Packets: 16 bytes on the wire carry 12 bytes and a 32-bit flag. A group is what one warp moves: 4 packets a thread.
const (
	packetGroupPayload = 1536
	packetGroupBytes   = 2048
	packetHeaderBytes  = 128 // before the first group; its first packet carries the message's length
)

// Kinds of a fault.
const (
	faultNone     = 0
	faultTimeout  = 1 // waited for peer for too long
	faultAborted  = 2 // saw the abort word
	faultMismatch = 3 // the two ends disagree on the size: sent and expected
	faultPlace    = 4 // the receiver of a copy wants it elsewhere: sent holds the caller's offset, expected the receiver's
	faultOrder    = 5 // peer makes another call: sent holds its word, expected this rank's
	faultIndex    = 6 // peer's token has a choice that is no expert: sent holds the token, expected the choice, limit the expert
	faultOverflow = 7 // peer would get more rows than it has room for: sent rows, limit; expected holds the expert, or all bits where it is the output as a whole
	faultSplits   = 8 // peer, which can be this rank, has splits in device memory that reach past a buffer: sent holds the bytes, expected the offset, limit the buffer's length
	faultMasked   = 9 // this rank is masked: the others go on without it
)

// place is a distance in bytes, mostly from the start of a rank's segment. C has it without a sign.
type place = int64

// faultWords is what a kernel that gave up left behind, in pinned host memory. kind is written last.
type faultWords struct {
	_ structs.HostLayout

	kind       uint32
	peer       uint32
	epoch      uint64
	sent       uint64
	expected   uint64
	limit      uint64
	mine       uint64 // of ranks that call different reductions: kernels.ReduceCall.Word of this rank's and of peer's, and their digests
	theirs     uint64
	myShape    uint64
	theirShape uint64
	sending    uint32 // 1: this rank was sending to peer, 0: receiving; of refused splits: whether they are of what peer sends
	part       uint32 // of refused splits: the rank that peer sends to or receives from
	stop       uint64 // set by the host: every wait of the communicator's kernels returns
}

// controlWords are the words of a control block that only its own rank writes.
type controlWords struct {
	_ structs.HostLayout

	epoch      uint64    // calls so far
	readers    uint32    // blocks of the running kernel that have read epoch
	fault      uint32    // kind of the first fault; later kernels return at once, except after a mismatch
	mismatched uint64    // the last call of a reduction or dispatch that ranks disagree on
	moved      uint64    // the time when this rank last moved bytes, told now and then; peers look at it before they blame
	complained [2]uint64 // by parity, the last call of an exchange in which this rank complained of the size of a peer's message
	wrong      [4]uint64 // by parity, a choice of this rank's tokens that is no expert: which one, as a block's word says, and what it is
}

// worldWords is what every kernel knows of the heap and its rank. It comes first in every family's arguments.
type worldWords struct {
	_ structs.HostLayout

	base      uint64 // this rank's segment lies at base + rank*stride, and so do all others where segments is 0
	stride    uint64 // distance of two ranks' segments
	segments  uint64 // address of uint64 [size]: the ranks' segments; or 0
	control   uint64 // place of the communicator's struct sw_control in every rank's segment
	fault     uint64 // address of a struct sw_fault
	timeoutNs uint64 // bounds every wait for a peer
	rank      uint32
	size      uint32
}

// worldOf is the part of the arguments that all families share. control is the place of the communicator's struct sw_control, fault
// the address of its fault record.
func worldOf(space *kernels.Space, control int64, fault uintptr, timeout time.Duration) worldWords {
	return worldWords{
		base: uint64(space.Base), stride: uint64(space.Stride), segments: uint64(space.SegmentTable()),
		control: uint64(control), fault: uint64(fault), timeoutNs: uint64(timeout.Nanoseconds()),
		rank: uint32(space.Rank), size: uint32(space.Size),
	}
}

// addressOf is a buffer's address, 0 for none; placeOf its place.
func addressOf(b *kernels.Buffer) uint64 {
	if b.Bytes == 0 {
		return 0
	}
	return uint64(b.Ptr)
}

func placeOf(b *kernels.Buffer) uint64 {
	if b.Bytes == 0 {
		return 0
	}
	return uint64(b.Place)
}
