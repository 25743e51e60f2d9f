// The board of a block in an exchange through memory: its warps read there which ranks are read and written directly,
// which through staging, and how far each is.
//
// The watching warp makes it when it has met the peers, and keeps it up to date; the working warps (working.cuh) and
// those that signal (watching.cuh) read it. Touches shared memory only.
#pragma once

#include "calls.cuh"
#include "folds.cuh"

namespace sw {

constexpr u32 work_warps = (SW_REDUCE_THREADS - 96) / 32;
constexpr u32 end_of_work = 1; // named barrier
constexpr u32 no_limit = ~0u;

// The words of a line: what a block of a rank tells the same block of a peer.
constexpr u64 inputs_pushed = 0, results_pushed = 8, inputs_taken = 16, results_taken = 24, all_done = 32;

struct reduce_board {
	fold_table fold;
	u64 line[SW_MAX_RANKS];      // this rank's, at the peer
	u64 push_to[SW_MAX_RANKS];   // the peer's staging of this rank's input
	u64 take_from[SW_MAX_RANKS]; // where the peer's slice of the result comes from
	u64 pushing;                 // ranks, a bit each: they push their input into staging here
	u64 handing;                 // this rank's result goes to staging there
	u64 taking,
	    pulling; // their slice of the result is copied by this rank: from staging here, from their memory there
	u64 touching, touched; // this rank reads or writes their memory directly; they do so with this rank's
	u32 pushes;            // this rank's input goes through staging
	u32 stores;            // this rank writes peers' memory
	u32 push_warps, reduce_warps, take_warps;

	reports pushed[SW_REDUCE_MAX_SLOTS], reduced[SW_REDUCE_MAX_SLOTS], taken[SW_REDUCE_MAX_SLOTS]; // by slot
	u32 ready;                 // chunks that all staged inputs have
	u32 room;                  // chunks of results that all staged outputs have room for
	u32 push_room;             // chunks of input that all peers have room for
	u32 results[SW_MAX_RANKS]; // chunks of the peer's results that are in staging here
	u32 over;                  // the block has given up
	u32 met;                   // clock when the peers had come
	u32 turn;                  // of the tiles that are held to a rate
	u32 crossings; // of a tile that is folded: peers whose memory it is read from, and peers that it is written to

	__device__ __forceinline__ void begin(const sw_reduce_args &a, u32 lane);
	__device__ __forceinline__ bool make(const sw_reduce_args &a, u64 epoch, u32 lane);

	// Whether anything goes through staging.
	__device__ __forceinline__ bool any_staged() const { return pushes != 0 || (pushing | handing | taking) != 0; }

	// The warps that read or write peers' memory meet the one that tells peers of the end.
	__device__ __forceinline__ void end_work()
	{
		part_sync(end_of_work, 32 * (1 + reduce_warps + (pulling != 0 ? take_warps : 0)));
	}

	// Of tiles in chunks, and of all tiles in a row, of which the warp takes every warps-th.
	__device__ __forceinline__ pace held(const sw_reduce_args &a) { return {met, a.interval, &turn}; }
	__device__ __forceinline__ pace held(const sw_reduce_args &a, u32 crossings, u32 warp, u32 warps) const
	{
		u32 each = crossings * a.interval;
		return {met + warp * each, warps * each, nullptr, moved_word(a.world, a.world.rank)};
	}

	// Waits until what the watching warp writes is at least want, and returns it. 0 when the block gives up.
	__device__ __forceinline__ u32 await(u32 *word, u32 want, u32 lane)
	{
		return await_warp(word, want, &over, lane);
	}
};

// A block's share of the chunks of `bytes` bytes. Those of a slice go round the blocks.
__device__ __forceinline__ u32 chunks_of(const sw_reduce_args &a, i64 bytes)
{
	u32 all = static_cast<u32>((bytes + a.chunk_bytes - 1) / a.chunk_bytes);
	return all > blockIdx.x ? (all - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
}

// Chunk j of this block in a slice.
struct chunk {
	i64 at, slot_at;
	u32 bytes;

	__device__ __forceinline__ chunk(const sw_reduce_args &a, i64 slice, u32 j)
	{
		at = (static_cast<i64>(j) * gridDim.x + blockIdx.x) * a.chunk_bytes;
		slot_at = static_cast<i64>(j % a.slots) * a.chunk_bytes;
		i64 left = slice - at;
		bytes = left <= 0 ? 0 : left < a.chunk_bytes ? static_cast<u32>(left) : a.chunk_bytes;
	}
};

__device__ __forceinline__ u64 slots_of(const sw_reduce_args &a, u64 region, u32 dst, u32 src)
{
	return segment(a.world, dst) + region +
	       (static_cast<u64>(src) * a.lines + blockIdx.x) * a.slots * a.chunk_bytes;
}

// The lines of src's block in dst's segment: a word for each that the block tells of.
__device__ __forceinline__ u64 line_of(const sw_reduce_args &a, u32 dst, u32 src)
{
	return segment(a.world, dst) + a.block.lines +
	       (static_cast<u64>(src) * a.lines + blockIdx.x) * SW_REDUCE_LINE_BYTES;
}

// One word of the lines between this block and those of the peers.
struct reduce_lines {
	const sw_reduce_args &a;
	u64 epoch;
	const reduce_board &b;
	u64 word;

	// Tells a peer of chunks.
	__device__ __forceinline__ void signal(u32 peer, u32 chunks) const
	{
		line{b.line[peer] + word}.signal(seq(epoch, chunks));
	}

	// Tells a peer that the block is through with the call, and waits until the peer is.
	__device__ __forceinline__ void signal(u32 peer) const { line{b.line[peer] + word}.signal(last_seq(epoch)); }
	__device__ __forceinline__ bool await(u32 peer) const
	{
		return line{line_of(a, a.world.rank, peer) + word}.await(a.world, peer, epoch, last_seq(epoch));
	}
};

// Whether this rank writes its result to the peers.
__device__ __forceinline__ bool hands_to_peers(const sw_reduce_args &a)
{
	return gathers(a) && !(has(a, SW_REDUCE_PULL) && a.src_place != SW_NOWHERE);
}

// Whether x reads or writes y's memory directly, as the places of both tell.
__device__ __forceinline__ bool touches(const sw_reduce_args &a, u64 x_src, u64 y_src, u64 y_dst)
{
	if (reduces(a) && y_src != SW_NOWHERE)
		return true;
	if (!gathers(a))
		return false;
	bool pull = has(a, SW_REDUCE_PULL);
	return pull && y_src != SW_NOWHERE ? true : !(pull && x_src != SW_NOWHERE) && y_dst != SW_NOWHERE;
}

// The part that needs no word of the peers: the watching warp writes it while the kernel before still runs.
__device__ __forceinline__ void reduce_board::begin(const sw_reduce_args &a, u32 lane)
{
	span mine(a, a.world.rank);
	u64 own = a.dst + (gathers(a) ? static_cast<u64>(mine.at) : 0);
	if (lane == 0) {
		pushes = reduces(a) && a.src_place == SW_NOWHERE;
		fold.rows = reduces(a) ? a.world.size : 1;
		fold.from[reduces(a) ? a.world.rank : 0] = a.src + (reduces(a) ? static_cast<u64>(mine.at) : 0);
		fold.targets = hands_to_peers(a) ? a.world.size - 1 : 0;
		if (reduces(a) || own != a.src)
			fold.to[fold.targets++] = own;
		fold.type = call_type(a), fold.op = call_op(a), fold.end = ending(call_op(a), a.world.size);
		fold.moved = moved_word(a.world, a.world.rank);
		ready = room = push_room = over = turn = 0;
	}
	for (u32 p = lane; p < a.world.size; p += 32) {
		results[p] = 0;
		line[p] = line_of(a, p, a.world.rank);
		push_to[p] = slots_of(a, a.block.input_slots, p, a.world.rank);
	}
	__syncwarp();
}

// Meets the peers and writes the rest. The watching warp, while the others wait. False when the ranks' calls differ or
// one did not come.
__device__ __forceinline__ bool reduce_board::make(const sw_reduce_args &a, u64 epoch, u32 lane)
{
	u32 me = a.world.rank, size = a.world.size;
	bool pull = has(a, SW_REDUCE_PULL), hands = hands_to_peers(a);
	span mine(a, me);
	enum { pushes_here = 1, takes_staged = 2, staged_here = 4, pulled = 8, touches_it = 16, touches_me = 32 };
	u32 found[2] = {0, 0}; // of ranks lane and lane+32
	u64 bits = fold.from[reduces(a) ? me : 0] |
	           (a.dst + (gathers(a) ? static_cast<u64>(mine.at) : 0)); // of all addresses of rows and targets
	bool good = meet(a, epoch, lane, [&](u32 p, const entry &e) {
		u64 src = e.src == SW_NOWHERE ? SW_NOWHERE : segment(a.world, p) + resolve(a.world, p, e.src);
		u64 dst = e.dst == SW_NOWHERE ? SW_NOWHERE : segment(a.world, p) + resolve(a.world, p, e.dst);
		u32 &f = found[p / 32];
		if (reduces(a)) {
			u64 from = src + static_cast<u64>(mine.at);
			if (src == SW_NOWHERE) {
				from = slots_of(a, a.block.input_slots, me, p);
				f |= pushes_here;
			}
			fold.from[p] = from;
			bits |= from;
		}
		if (hands) {
			u64 to = dst + static_cast<u64>(mine.at);
			if (dst == SW_NOWHERE) {
				to = slots_of(a, a.block.result_slots, p, me);
				f |= takes_staged;
			}
			fold.to[p > me ? p - me - 1 : p + size - me - 1] = to; // ranks begin with different peers
			bits |= to;
		}
		if (gathers(a) && pull && src != SW_NOWHERE) {
			take_from[p] = src;
			f |= pulled;
		} else if (gathers(a) && a.dst_place == SW_NOWHERE) {
			take_from[p] = slots_of(a, a.block.result_slots, me, p);
			f |= staged_here;
		}
		if (touches(a, a.src_place, e.src, e.dst))
			f |= touches_it;
		if (touches(a, e.src, a.src_place, a.dst_place))
			f |= touches_me;
	});
	if (!good)
		return false;
	auto ranks = [&](u32 what) {
		return static_cast<u64>(size > 32 ? __ballot_sync(~0u, (found[1] & what) != 0) : 0) << 32 |
		       __ballot_sync(~0u, (found[0] & what) != 0);
	};
	u64 pushers = ranks(pushes_here), takers = ranks(takes_staged), staged = ranks(staged_here),
	    far = ranks(pulled), its = ranks(touches_it), mines = ranks(touches_me);
	bool aligned = __any_sync(~0u, (bits & 15) != 0) == 0;
	if (lane == 0) {
		pushing = fold.from_staged = pushers;
		handing = takers, taking = staged, pulling = far, touching = its, touched = mines;
		fold.to_staged = (takers >> 1 >> me | takers << (size - me - 1)) & ((1ull << (size - 1)) - 1);
		stores = hands;
		crossings = (reduces(a) ? size - 1 - __popcll(pushers) : 0) + (hands ? size - 1 : 0);
		fold.aligned = aligned;
		push_warps = pushes != 0 ? work_warps / 3 : 0;
		take_warps = far != 0 ? work_warps - work_warps / 4 : staged != 0 ? work_warps / 3 : 0;
		reduce_warps = work_warps - push_warps - take_warps;
		met = static_cast<u32>(clock());
	}
	__syncwarp();
	if (any_staged())
		for (u32 i = lane; i < a.slots; i += 32) {
			pushed[i].expect(max(push_warps, 1u));
			reduced[i].expect(reduce_warps);
			taken[i].expect(max(take_warps, 1u));
		}
	return true;
}

} // namespace sw
