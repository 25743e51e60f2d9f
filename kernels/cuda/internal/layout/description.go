package layout

import (
	"math/bits"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Shared is the description.
func Shared() *Layout {
	return &Layout{Constants: constants(), Structs: structs(), Blocks: blocks()}
}

func constants() []Group {
	return []Group{
		{"Of all families.", []Constant{
			{"maxRanks", 64, ""},
			{"lineBytes", 32, "a line: what one rank writes for another with one or two 16-byte stores"},
			{"abortOffset", kernels.AbortOffset, "the word that makes every wait of a rank return"},
			{"chunkBits", uint64(bits.TrailingZeros64(kernels.Seq(1, 0))), "of a sequence number count chunks within one call"},
			{"aliasOffset", kernels.AliasOffset, "the alias table in a rank's segment"},
			{"aliasShift", kernels.AliasShift, "how a place names a row of it"},
			{"controlAlign", kernels.LineBytes, "parts of a control block that peers write begin at a multiple"},
			{"nowhere", 1<<64 - 1, "the place of memory that peers cannot write"},
		}},
		{"Packets: 16 bytes on the wire carry 12 bytes and a 32-bit flag. A group is what one warp moves: 4 packets a thread.", []Constant{
			{"packetGroupPayload", 1536, ""},
			{"packetGroupBytes", 2048, ""},
			{"packetHeaderBytes", 128, "before the first group; its first packet carries the message's length"},
		}},
		{"The all-to-all. Threads of a block of its kernel: some send, two warps watch what peers write, the others receive.", []Constant{
			{"sendThreads", 384, ""},
			{"watchThreads", 64, ""},
			{"recvThreads", 320, ""},
			{"packetThreads", 1024, ""},
			{"copyThreads", 256, ""},
			{"ownThreads", 512, ""},
			{"itemBytes", 128, "what a block keeps in shared memory of a stripe of the messages to and from a peer"},
			{"tileBytes", 4096, "what one warp moves at a time"},
			{"stripeMinBytes", 16384, "messages below this take fewer stripes; both ends must agree"},
		}},
		{"Flags of an exchange.", []Constant{
			{"flagStaged", 1, "take messages in through staging even where peers could write dst"},
			{"flagMesh", 2, "every block begins with another peer"},
		}},
		{"Kinds of a fault.", []Constant{
			{"faultNone", 0, ""},
			{"faultTimeout", 1, "waited for peer for too long"},
			{"faultAborted", 2, "saw the abort word"},
			{"faultMismatch", 3, "the two ends disagree on the size: sent and expected"},
			{"faultPlace", 4, "the receiver of a copy wants it elsewhere: sent holds the caller's offset, expected the receiver's"},
			{"faultSplits", 5, "splits in device memory reach past a buffer: sent holds the bytes, expected the offset"},
		}},
	}
}

func structs() []Struct {
	return []Struct{
		{
			Name: "fault", Go: "get", Words: []string{"kind"},
			Doc: "What a kernel that gave up left behind, in pinned host memory. kind is written last.",
			Fields: []Field{
				{Name: "kind", Type: "u32"},
				{Name: "peer", Type: "u32"},
				{Name: "epoch", Type: "u64"},
				{Name: "sent", Type: "u64"},
				{Name: "expected", Type: "u64"},
				{Name: "limit", Type: "u64"},
				{Name: "sending", Type: "u32", Doc: "1: this rank was sending to peer, 0: receiving"},
				{Name: "pad", Type: "u32"},
			},
		},
		{
			Name: "control", Words: []string{"fault"},
			Doc: "The words of a control block that only its own rank touches.",
			Fields: []Field{
				{Name: "epoch", Type: "u64", Doc: "calls so far"},
				{Name: "readers", Type: "u32", Doc: "blocks of the running kernel that have read epoch"},
				{Name: "fault", Type: "u32", Doc: "kind of the first fault; later kernels return at once, except after a mismatch"},
			},
		},
		{
			Name: "world", Go: "put",
			Doc: "What every kernel knows of the heap and its rank. It comes first in every family's arguments.",
			Fields: []Field{
				{Name: "base", Type: "u64", Doc: "this rank's segment lies at base + rank*stride, and so do all others where segments is 0"},
				{Name: "stride", Type: "u64", Doc: "distance of two ranks' segments"},
				{Name: "segments", Type: "u64", Doc: "address of uint64 [size]: the ranks' segments; or 0"},
				{Name: "control", Type: "u64", Doc: "place of the communicator's struct sw_control in every rank's segment"},
				{Name: "fault", Type: "u64", Doc: "address of a struct sw_fault"},
				{Name: "timeout_ns", Type: "u64", Doc: "bounds every wait for a peer"},
				{Name: "rank", Type: "u32"},
				{Name: "size", Type: "u32"},
			},
		},
		{
			Name: "step", Go: "put",
			Doc: "A step of an exchange: the rank that this rank sends to in it, the one it receives from, and what. What one warp needs lies\n" +
				" * together, because a first access to a line of arguments takes as long as one to memory.",
			Fields: []Field{
				{Name: "to", Type: "u32"},
				{Name: "from", Type: "u32"},
				{Name: "send_bytes", Type: "i64"},
				{Name: "send_offset", Type: "i64"},
				{Name: "recv_bytes", Type: "i64"},
				{Name: "recv_offset", Type: "i64"},
			},
		},
		{
			Name: "exchange_args", Go: "put",
			Doc: "One launch of the variable-size all-to-all.",
			Fields: []Field{
				{Name: "world", Type: "world"},
				{Name: "src", Type: "u64"},
				{Name: "dst", Type: "u64"},
				{Name: "dst_offset", Type: "i64", Doc: "place of dst in this rank's segment, or -1: peers cannot write it"},
				{Name: "splits", Type: "u64", Doc: "address of int64 [4][size]: send bytes, send offsets, receive bytes, receive offsets by rank; 0: they are below"},
				{Name: "block", Type: "exchange_block"},
				{Name: "packet_bytes", Type: "i64", Doc: "messages up to this are packets"},
				{Name: "slot_bytes", Type: "i64"},
				{Name: "stripes", Type: "u32", Doc: "the most that a message is cut into"},
				{Name: "slot_count", Type: "u32", Doc: "chunks of a stripe under way through staging"},
				{Name: "flags", Type: "u32"},
				{Name: "interval", Type: "u32", Doc: "cycles from one tile of a block to the next; 0: as they come"},
				{Name: "inverse", Type: "u32", Doc: "2^32/(size-1), rounded up; 0 where size-1 < 2"},
				{Name: "senders", Type: "u32", Doc: "blocks that send; as many more copy messages out of staging. 0: every block does both"},
				{Name: "src_bytes", Type: "i64", Doc: "how long the buffers are; looked at where splits are not below"},
				{Name: "dst_bytes", Type: "i64"},
				{Name: "own_bytes", Type: "i64", Doc: "what stays on this rank"},
				{Name: "own_src", Type: "i64"},
				{Name: "own_dst", Type: "i64"},
				{Name: "steps", Type: "step", Count: "maxRanks", Doc: "size-1 of them"},
			},
		},
		{
			Name: "copy_args", Go: "put",
			Doc: "An exchange by the copy engines.",
			Fields: []Field{
				{Name: "exchange", Type: "exchange_args"},
				{Name: "places", Type: "i64", Count: "maxRanks", Doc: "where in each peer's segment this rank's message goes, as the host knows it"},
			},
		},
	}
}

func blocks() []Block {
	return []Block{
		{
			Name:   "exchange_block",
			Doc:    "Where the words of an all-to-all's control block lie. All but the slots must be zero before the first call.",
			Params: []string{"size", "stripes", "slot_count", "slot_bytes", "packet_bytes"},
			Values: []Part{{Name: "packet_stride", Size: "packetHeaderBytes + (packet_bytes + packetGroupPayload - 1) / packetGroupPayload * packetGroupBytes"}},
			Parts: []Part{
				{Name: "control", Size: "controlAlign", Doc: "struct sw_control"},
				{Name: "signals", Size: "2 * size * stripes * lineBytes", Doc: "[2][size][stripes] lines: {seq, total}, and of a message through staging {seq of its end, seq}"},
				{Name: "credits", Size: "size * lineBytes", Doc: "[size] lines: {seq, offset or SW_NOWHERE} {seq, total}"},
				{Name: "stripe_credits", Size: "size * stripes * lineBytes", Doc: "[size][stripes] lines: {seq of the last chunk taken out of staging, 0}"},
				{Name: "packets", Size: "2 * size * packet_stride", Align: kernels.LineBytes, Doc: "[2][size][packet_stride]"},
				{Name: "slots", Size: "size * stripes * slot_count * slot_bytes", Doc: "[size][stripes][slot_count][slot_bytes]"},
			},
		},
	}
}
