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
		{"Reductions. Threads of a block of their kernels: in the packet kernel the last warp compares the ranks' calls, in the other one it\n * watches what peers write and the two before it signal.", []Constant{
			{"reducePacketThreads", 384, ""},
			{"reduceThreads", 512, ""},
			{"reduceLineBytes", 64, "what one block of a rank writes for the same block of a peer: five sequence numbers"},
			{"reduceEntryBytes", 64, "what a rank tells a peer of its call: four words of 12 bytes and a flag"},
			{"reduceMaxSlots", 8, ""},
			{"multicastThreads", 512, "of a block of the kernels of multicast"},
			{"reduceBounds", 65, ""},
		}},
		{"Collectives: kernels.Collective.", []Constant{
			{"reduceScatter", uint64(kernels.ReduceScatter), ""},
			{"allGather", uint64(kernels.AllGather), ""},
		}},
		{"Operators: kernels.ReduceOp.", []Constant{
			{"opSum", uint64(kernels.Sum), ""},
			{"opAvg", uint64(kernels.Avg), ""},
			{"opMin", uint64(kernels.Min), ""},
			{"opMax", uint64(kernels.Max), ""},
			{"opProd", uint64(kernels.Prod), ""},
		}},
		{"Data types: kernels.DType.", []Constant{
			{"typeUint8", uint64(kernels.Uint8), ""},
			{"typeInt32", uint64(kernels.Int32), ""},
			{"typeInt64", uint64(kernels.Int64), ""},
			{"typeFloat16", uint64(kernels.Float16), ""},
			{"typeBfloat16", uint64(kernels.BFloat16), ""},
			{"typeFloat32", uint64(kernels.Float32), ""},
			{"typeFloat64", uint64(kernels.Float64), ""},
			{"typeFloat8e4m3", uint64(kernels.Float8E4M3), ""},
			{"typeFloat8e5m2", uint64(kernels.Float8E5M2), ""},
		}},
		{"Flags of a reduction. All ranks of a call have the same.", []Constant{
			{"reduceOneShot", 1, "every rank reduces everything for itself; packets only"},
			{"reducePull", 2, "an all-gather reads the peers' slices where it can, instead of having them written"},
			{"reduceWarps", 4, "by multicast: the teams are warps of each block"},
			{"reduceBlocks", 8, "the same, and they are blocks"},
		}},
		{"Flags of an exchange.", []Constant{
			{"flagStaged", 1, "take messages in through staging even where peers could write dst"},
			{"flagMesh", 2, "every block begins with another peer"},
		}},
		{"MoE dispatch.", []Constant{
			{"moeThreads", 1024, "of a block of dispatch_rows"},
			{"moeFewThreads", 512, "of a block of dispatch_few"},
			{"moeFewSumThreads", 384, "of a block of combine_few"},
			{"moeSumThreads", 512, "of a block of combine_rows"},
			{"moePassThreads", 512, "of a block of the passes over this rank's memory"},
			{"moeMaxBlocks", 160, "of a kernel that peers wait for"},
			{"moeFewTokens", 256, "the most tokens of the kernels for few"},
			{"moeFewSlots", 1024, "and the most slots"},
			{"moeTable", 1024, "experts whose places a block keeps in shared memory"},
			{"moeSums", uint64(kernels.CombineOp), "the least operation that reads peers' rows"},
			{"moeFirst", 65, "entries of moe_args.first"},
			{"moeScales", 512, "bytes of shared memory for the scales that a warp makes"},
			{"moeSlots", 128, "places for rows under way that the warps of a block have together, at most"},
			{"moeSumPassThreads", 512, "of a block of the pass that makes sums: those that make, and a warp that tells"},
			{"moePassPart", 2048, "bytes of a row that a warp of a pass adds or copies at a time"},
			{"moeDensePart", 3584, "bytes of a row of few tokens that a warp sends to experts as packets, 4096 bytes of them"},
			{"moePlainPart", 1536, "the same on the way back, 2048"},
			{"moeNarrowPart", 2048, "the same of rows that cross as float8, 1536, or 1024 where elements have 4 bytes"},
			{"moeStretch", 512, "elements of a float8 partial sum behind one group of scales"},
			{"moeWindow", 64, "rows of one rank that are told together when they are made"},
		}},
		{"What a launch for MoE does.", []Constant{
			{"moeSend", 1, "the first half of a call"},
			{"moeReceive", 2, "the second half"},
			{"moeCached", 4, "the routing is there already"},
			{"moeFree", 8, "peers may write this rank's output when they see the begin of this call"},
			{"moeKeep", 16, "the rows of a combine stay as they are until the handle's next dispatch is complete"},
			{"moeCompact", 32, "rows of one rank follow those of the one before"},
			{"moeByExpert", 64, "rows arrive in staging and are spread over the experts' rows"},
			{"moeColumns", 128, "scales in column-major order"},
			{"moeExponents", 256, "scales are exponents, four in a word"},
			{"moeZero", 512, "padding is zero"},
			{"moeWeigh", 1024, "rows are multiplied by the weights of the dispatch"},
			{"moeGiven", 2048, "or by those beside the rows"},
			{"moeBeside", 4096, "the two kernels of the call run beside each other"},
		}},
		{"Kinds of a fault.", []Constant{
			{"faultNone", 0, ""},
			{"faultTimeout", 1, "waited for peer for too long"},
			{"faultAborted", 2, "saw the abort word"},
			{"faultMismatch", 3, "the two ends disagree on the size: sent and expected"},
			{"faultPlace", 4, "the receiver of a copy wants it elsewhere: sent holds the caller's offset, expected the receiver's"},
			{"faultOrder", 5, "peer makes another call: sent holds its word, expected this rank's"},
			{"faultIndex", 6, "peer's token has a choice that is no expert: sent holds the token, expected the choice, limit the expert"},
			{"faultOverflow", 7, "peer would get more rows than it has room for: sent rows, limit; expected holds the expert, or all bits where it is the output as a whole"},
			{"faultSplits", 8, "peer, which can be this rank, has splits in device memory that reach past a buffer: sent holds the bytes, expected the offset, limit the buffer's length"},
		}},
	}
}

func structs() []Struct {
	return []Struct{
		{
			Name: "fault", Go: "get", Words: []string{"kind", "stop"},
			Doc: "What a kernel that gave up left behind, in pinned host memory. kind is written last.",
			Fields: []Field{
				{Name: "kind", Type: "u32"},
				{Name: "peer", Type: "u32"},
				{Name: "epoch", Type: "u64"},
				{Name: "sent", Type: "u64"},
				{Name: "expected", Type: "u64"},
				{Name: "limit", Type: "u64"},
				{Name: "mine", Type: "u64", Doc: "of ranks that call different reductions: kernels.ReduceCall.Word of this rank's and of peer's, and their digests"},
				{Name: "theirs", Type: "u64"},
				{Name: "my_shape", Type: "u64"},
				{Name: "their_shape", Type: "u64"},
				{Name: "sending", Type: "u32", Doc: "1: this rank was sending to peer, 0: receiving; of refused splits: whether they are of what peer sends"},
				{Name: "part", Type: "u32", Doc: "of refused splits: the rank that peer sends to or receives from"},
				{Name: "stop", Type: "u64", Doc: "set by the host: every wait of the communicator's kernels returns"},
			},
		},
		{
			Name: "control", Words: []string{"fault"},
			Doc: "The words of a control block that only its own rank touches.",
			Fields: []Field{
				{Name: "epoch", Type: "u64", Doc: "calls so far"},
				{Name: "readers", Type: "u32", Doc: "blocks of the running kernel that have read epoch"},
				{Name: "fault", Type: "u32", Doc: "kind of the first fault; later kernels return at once, except after a mismatch"},
				{Name: "mismatched", Type: "u64", Doc: "the call of the last mismatch of a reduction"},
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
		moeArgs(),
		{
			Name: "reduce_args", Go: "put",
			Doc: "One launch of an all-reduce, reduce-scatter or all-gather. Every rank owns one slice of the elements.",
			Fields: []Field{
				{Name: "world", Type: "world"},
				{Name: "src", Type: "u64", Doc: "all slices if the call reduces, else this rank's"},
				{Name: "dst", Type: "u64", Doc: "all slices if the call gathers, else this rank's"},
				{Name: "src_place", Type: "u64", Doc: "where src lies in this rank's segment, or SW_NOWHERE: peers cannot read it"},
				{Name: "dst_place", Type: "u64", Doc: "the same of dst and writing"},
				{Name: "block", Type: "reduce_block"},
				{Name: "count", Type: "u64", Doc: "elements of all slices"},
				{Name: "shape", Type: "u64", Doc: "digest of slices that count does not imply"},
				{Name: "call", Type: "u32", Doc: "kernels.ReduceCall.Word and, from bit 24 on, the flags"},
				{Name: "lines", Type: "u32", Doc: "the most blocks that a launch can have"},
				{Name: "slots", Type: "u32", Doc: "chunks of a block under way through staging"},
				{Name: "chunk_bytes", Type: "u32", Doc: "of one block; a multiple of the tile"},
				{Name: "interval", Type: "u32", Doc: "cycles from one tile of a block that crosses a link to the next; 0: as they come"},
				{Name: "pad", Type: "u32"},
				{Name: "packet_bytes", Type: "i64", Doc: "the longest message of packets"},
				{Name: "bounds", Type: "i64", Count: "reduceBounds", Doc: "slice p is bytes bounds[p] to bounds[p+1]"},
			},
		},
		{
			Name: "multicast_args", Go: "put",
			Doc: "One launch of an all-reduce by multicast.",
			Fields: []Field{
				{Name: "reduce", Type: "reduce_args"},
				{Name: "multicast", Type: "u64", Doc: "address at which multicast reaches the beginning of all ranks' segments"},
			},
		},
	}
}

// moeArgs is what the kernels of MoE dispatch share. Places are from the start of a segment and the same on every rank.
func moeArgs() Struct {
	f := func(typ string, names ...string) (fields []Field) {
		for _, n := range names {
			fields = append(fields, Field{Name: n, Type: typ})
		}
		return fields
	}
	s := Struct{Name: "moe_args", Go: "put", Doc: "One launch for MoE dispatch. Places are the same on every rank."}
	s.Fields = append(s.Fields, Field{Name: "world", Type: "world"}, Field{Name: "state", Type: "moe_block", Doc: "of the handle"})
	s.Fields = append(s.Fields, Field{Name: "x", Type: "u64", Doc: "address of the tokens, or of their gradients"}, Field{Name: "scales", Type: "u64", Doc: "address of the scales beside them"})
	s.Fields = append(s.Fields, Field{Name: "choices", Type: "u64", Doc: "address of [tokens][top_k] experts"}, Field{Name: "weights", Type: "u64", Doc: "address of [tokens][top_k] float32; 0: all are 1"})
	s.Fields = append(s.Fields, Field{Name: "table", Type: "u64", Doc: "address of kernels.MoE.Placement"}, Field{Name: "counters", Type: "u64", Doc: "address of kernels.MoE.Counters"})
	s.Fields = append(s.Fields, Field{Name: "mapped", Type: "u64", Doc: "address of kernels.MoEHandle.Mapped; 0: none"}, Field{Name: "ticket", Type: "u64"})
	s.Fields = append(s.Fields, Field{Name: "to_rows", Type: "u64", Doc: "place to which rows are sent"}, Field{Name: "to_scales", Type: "u64"}, Field{Name: "to_indices", Type: "u64"}, Field{Name: "to_weights", Type: "u64"}, Field{Name: "to_sources", Type: "u64"})
	s.Fields = append(s.Fields, Field{Name: "rows", Type: "u64", Doc: "address of this rank's rows"}, Field{Name: "row_scales", Type: "u64"}, Field{Name: "row_weights", Type: "u64"}, Field{Name: "row_sources", Type: "u64"}, Field{Name: "ready", Type: "u64", Doc: "address of the words by which the caller marks rows done; 0: all are"})
	s.Fields = append(s.Fields, Field{Name: "counts", Type: "u64", Doc: "address of kernels.MoEHandle.Counts, and so on"}, Field{Name: "offsets", Type: "u64"}, Field{Name: "rank_counts", Type: "u64"}, Field{Name: "landed", Type: "u64"})
	s.Fields = append(s.Fields, Field{Name: "from_rows", Type: "u64", Doc: "place of the rows that peers read"}, Field{Name: "from_weights", Type: "u64", Doc: "place of [rows][top_k] float32 that they read; 0: none"})
	s.Fields = append(s.Fields, Field{Name: "y", Type: "u64", Doc: "address of the sums, or of the rows' gradients"}, Field{Name: "sum_weights", Type: "u64", Doc: "address of float32 [tokens][top_k]; 0: none"}, Field{Name: "bias0", Type: "u64"}, Field{Name: "bias1", Type: "u64"})
	s.Fields = append(s.Fields, Field{Name: "most_rows", Type: "i64", Doc: "rows of an output, or of what a combine of few tokens is given"}, Field{Name: "align", Type: "i64"}, Field{Name: "capacity", Type: "i64", Doc: "0: an expert's rows follow those of the one before"}, Field{Name: "offset_base", Type: "i64", Doc: "rows from one rank's first row to the next one's; 0: they follow one another"})
	s.Fields = append(s.Fields, f("u32", "op", "mode", "tokens", "top_k", "max_tokens", "experts", "slots", "local", "index_bytes")...)
	s.Fields = append(s.Fields, Field{Name: "slots_inverse", Type: "u32", Doc: "2^32 over the slots of a rank, rounded up; 0 where ranks have different numbers or one each"})
	s.Fields = append(s.Fields, Field{Name: "row_bytes", Type: "u32", Doc: "of a token here"}, Field{Name: "wire_bytes", Type: "u32", Doc: "of a row that crosses"}, Field{Name: "scale_words", Type: "u32", Doc: "32-bit words of scales beside a row"}, Field{Name: "scale_block", Type: "u32", Doc: "elements with one scale"})
	s.Fields = append(s.Fields, Field{Name: "part", Type: "u32", Doc: "bytes of a row that a warp moves at a time"}, Field{Name: "parts", Type: "u32", Doc: "of a row"}, Field{Name: "movers", Type: "u32", Doc: "warps that move"}, Field{Name: "depth", Type: "u32", Doc: "parts that a warp has under way"}, Field{Name: "interval", Type: "u32", Doc: "cycles from one part of a warp to its next; 0: as they come"})
	s.Fields = append(s.Fields, Field{Name: "share", Type: "u32", Doc: "tokens that a block's shared memory has room for"})
	s.Fields = append(s.Fields, Field{Name: "first", Type: "u32", Count: "moeFirst", Doc: "slots before each rank's"}, Field{Name: "pad", Type: "u32"})
	return s
}

func blocks() []Block {
	return []Block{
		{
			Name:   "moe_block",
			Doc:    "Where the words of a handle lie. All must be zero before the first call.",
			Params: []string{"size", "slots", "local", "max_tokens", "top_k", "staged", "note_bytes", "packet_bytes"},
			Values: []Part{{Name: "note_stride", Size: "note_bytes"}, {Name: "packet_stride", Size: "packet_bytes"}},
			Parts: []Part{
				{Name: "control", Size: "controlAlign", Doc: "struct sw_control"},
				{Name: "landing", Size: "controlAlign", Doc: "the epoch of the call for which kernels.MoEHandle.Landed counts"},
				{Name: "begins", Size: "2 * size * lineBytes", Doc: "[2][size] lines: {epoch, word} {epoch, place of rows}, what each rank says when it begins a call"},
				{Name: "dones", Size: "2 * size * moeMaxBlocks * 16", Doc: "[2][size][blocks]: {epoch, word}, what each block of each rank says of the rows that are there"},
				{Name: "slot_counts", Size: "2 * size * slots * 8", Align: kernels.LineBytes, Doc: "[2][size][slots]: rows of each rank for each slot, behind the low half of the epoch"},
				{Name: "rank_totals", Size: "size * size * 8", Align: kernels.LineBytes, Doc: "[size][size]: rows of each rank for each rank, likewise"},
				{Name: "block_counts", Size: "moeMaxBlocks * size * 8", Align: kernels.LineBytes, Doc: "[blocks][size]: rows of this rank's blocks for each rank, likewise"},
				{Name: "block_slots", Size: "moeMaxBlocks * slots * 8", Align: kernels.LineBytes, Doc: "[blocks][slots]: choices of this rank's blocks for each slot, likewise"},
				{Name: "made", Size: "size * ((max_tokens + moeWindow - 1) / moeWindow) * 8", Align: kernels.LineBytes, Doc: "[size][windows]: the last epoch in which each rank has made the partial sums of a window of this rank's rows"},
				{Name: "making", Size: "size * ((max_tokens + moeWindow - 1) / moeWindow) * 4", Align: kernels.LineBytes, Doc: "[size][windows]: parts of the partial sums that this rank has made for each; 0 between calls"},
				{Name: "arrived", Size: "size * 4", Align: kernels.LineBytes, Doc: "[size]: rows in staging from each rank"},
				{Name: "places", Size: "max_tokens * size * 4", Align: kernels.LineBytes, Doc: "[max_tokens][size]: the row of each token among those of this rank on each rank, or -1"},
				{Name: "who", Size: "max_tokens * top_k * 4", Align: kernels.LineBytes, Doc: "[max_tokens][top_k]: the rank of each choice, or -1"},
				{Name: "spread", Size: "staged * top_k * 4", Align: kernels.LineBytes, Doc: "[staged][top_k]: the expert's row of each choice of a row in staging, or -1"},
				{Name: "indices", Size: "staged * top_k * 8", Align: kernels.LineBytes, Doc: "[staged][top_k]: each choice beside rows in staging, as routing.cuh numbers them"},
				{Name: "weights", Size: "staged * top_k * 4", Align: kernels.LineBytes, Doc: "[staged][top_k] float32, likewise"},
				{Name: "sources", Size: "staged * 8", Align: kernels.LineBytes, Doc: "[staged][2], likewise"},
				{Name: "wiped", Size: "controlAlign", Align: kernels.LineBytes, Doc: "[2]: by parity of calls, the token of which places that are not used are wiped next"},
				{Name: "notes", Size: "2 * size * max_tokens * note_stride", Align: kernels.LineBytes, Doc: "[2][size][max_tokens][note_stride]: what lies beside a row of few tokens, as packets"},
				{Name: "packets", Size: "2 * size * max_tokens * packet_stride", Align: kernels.LineBytes, Doc: "[2][size][max_tokens][packet_stride]: rows of few tokens"},
			},
		},
		{
			Name:   "exchange_block",
			Doc:    "Where the words of an all-to-all's control block lie. All but the slots must be zero before the first call.",
			Params: []string{"size", "stripes", "slot_count", "slot_bytes", "packet_bytes"},
			Values: []Part{{Name: "packet_stride", Size: "packetHeaderBytes + (packet_bytes + packetGroupPayload - 1) / packetGroupPayload * packetGroupBytes"}},
			Parts: []Part{
				{Name: "control", Size: "controlAlign", Doc: "struct sw_control"},
				{Name: "signals", Size: "2 * size * stripes * lineBytes", Doc: "[2][size][stripes] lines: {seq, total}, and of a message through staging {seq of its end, seq}"},
				{Name: "credits", Size: "size * lineBytes", Doc: "[size] lines: {seq, offset or SW_NOWHERE} {seq, total}"},
				{Name: "complaints", Size: "size * lineBytes", Doc: "[size] lines: {epoch, sent} {epoch, expected} of a message that had another length than its receiver expected"},
				{Name: "stripe_credits", Size: "size * stripes * lineBytes", Doc: "[size][stripes] lines: {seq of the last chunk taken out of staging, 0}"},
				{Name: "packets", Size: "2 * size * packet_stride", Align: kernels.LineBytes, Doc: "[2][size][packet_stride]"},
				{Name: "slots", Size: "size * stripes * slot_count * slot_bytes", Doc: "[size][stripes][slot_count][slot_bytes]"},
			},
		},
		{
			Name:   "reduce_block",
			Doc:    "Where the words of a reduction's control block lie. All but the slots must be zero before the first call.",
			Params: []string{"size", "lines", "slot_count", "chunk_bytes", "packet_bytes"},
			Values: []Part{{Name: "packet_stride", Size: "(packet_bytes + packetGroupPayload - 1) / packetGroupPayload * packetGroupBytes"}},
			Parts: []Part{
				{Name: "control", Size: "controlAlign", Doc: "struct sw_control"},
				{Name: "entries", Size: "2 * size * reduceEntryBytes", Doc: "[2][size]: what each peer calls, by the call's parity"},
				{Name: "lines", Size: "size * lines * reduceLineBytes", Doc: "[size][lines]: how far each block of each peer is"},
				{Name: "inputs", Size: "2 * size * packet_stride", Align: kernels.LineBytes, Doc: "[2][size][packet_stride]: packets to be reduced"},
				{Name: "results", Size: "2 * size * packet_stride", Doc: "[2][size][packet_stride]: packets of slices that are reduced"},
				{Name: "input_slots", Size: "size * lines * slot_count * chunk_bytes", Doc: "[size][lines][slot_count][chunk_bytes]: staging of input"},
				{Name: "result_slots", Size: "size * lines * slot_count * chunk_bytes", Doc: "the same of results"},
			},
		},
	}
}
