// What the warps of a block tell one another in an exchange through memory: who is read and written directly, who through staging, and
// how far everybody is.
//
// The watching warp makes it when it has met the peers, and keeps it up to date; the working warps (working.cuh) and those that signal
// (watching.cuh) read it. Touches shared memory only.
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
	u64 line[SW_MAX_RANKS]; // this rank's, at the peer
	u64 push_to[SW_MAX_RANKS]; // the peer's staging of this rank's input
	u64 take_from[SW_MAX_RANKS]; // where the peer's slice of the result comes from
	u64 pushing; // ranks, a bit each: they push their input into staging here
	u64 handing; // this rank's result goes to staging there
	u64 taking, pulling; // their slice of the result is copied by this rank: from staging here, from their memory there
	u64 touching, touched; // this rank reads or writes their memory directly; they do so with this rank's
	u32 pushes; // this rank's input goes through staging
	u32 stores; // this rank writes peers' outputs directly
	u32 push_warps, reduce_warps, take_warps;

	reports pushed[SW_REDUCE_MAX_SLOTS], reduced[SW_REDUCE_MAX_SLOTS], taken[SW_REDUCE_MAX_SLOTS]; // by slot
	u32 ready;		     // chunks that all staged inputs have
	u32 room;		     // chunks of results that all staged outputs have room for
	u32 push_room;		     // chunks of input that all peers have room for
	u32 results[SW_MAX_RANKS];   // chunks of the peer's results that are in staging here
	u32 over;		     // the block has given up

	// The warps that read or write peers' memory meet the one that tells peers of the end.
	__device__ __forceinline__ void end_work() { part_sync(end_of_work, 32 * (1 + reduce_warps + (pulling != 0 ? take_warps : 0))); }

	// Waits until what the watching warp writes is at least want, and returns it. 0 when the block gives up.
	__device__ __forceinline__ u32 await(u32 *word, u32 want, u32 lane)
	{
		u32 here = 0;
		if (lane == 0)
#pragma unroll 1
			while ((here = atom_acquire_cta(word)) < want) {
				if (atom_acquire_cta(&over) != 0) {
					here = 0;
					break;
				}
				__nanosleep(20);
			}
		return __shfl_sync(~0u, here, 0);
	}
};

// A block's chunks of so many bytes. Those of a slice go round the blocks.
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
	return segment(a.world, dst) + region + (static_cast<u64>(src) * a.lines + blockIdx.x) * a.slots * a.chunk_bytes;
}

__device__ __forceinline__ u64 line_of(const sw_reduce_args &a, u32 dst, u32 src)
{
	return segment(a.world, dst) + a.block.lines + (static_cast<u64>(src) * a.lines + blockIdx.x) * SW_REDUCE_LINE_BYTES;
}

// Whether x reads or writes y's memory directly, as the places of both tell. hands: results are handed out by this kernel.
__device__ __forceinline__ bool touches(const sw_reduce_args &a, bool hands, u64 x_src, u64 y_src, u64 y_dst)
{
	if (reduces(a) && y_src != SW_NOWHERE)
		return true;
	if (!hands)
		return false;
	bool pull = has(a, SW_REDUCE_PULL);
	return pull && y_src != SW_NOWHERE ? true : !(pull && x_src != SW_NOWHERE) && y_dst != SW_NOWHERE;
}

// Makes the board. The watching warp, while the others wait. False when the ranks' calls differ or one did not come.
__device__ __forceinline__ bool make_board(const sw_reduce_args &a, u64 epoch, reduce_board &b, u32 lane)
{
	u32 me = a.world.rank, size = a.world.size;
	bool hands = gathers(a) && !one_shot(a) && !has(a, SW_REDUCE_COPIES), pull = has(a, SW_REDUCE_PULL);
	bool hands_peers = hands && !(pull && a.src_place != SW_NOWHERE);
	span mine(a, me);
	u64 own = a.dst + (gathers(a) ? static_cast<u64>(mine.at) : 0);
	if (lane == 0) {
		b.fold.from_staged = b.fold.to_staged = b.pushing = b.handing = b.taking = b.pulling = b.touching = b.touched = 0;
		b.pushes = reduces(a) && a.src_place == SW_NOWHERE;
		b.stores = 0;
		b.fold.rows = reduces(a) ? size : 1;
		b.fold.from[reduces(a) ? me : 0] = a.src + (reduces(a) ? static_cast<u64>(mine.at) : 0);
		b.fold.targets = hands_peers ? size - 1 : 0;
		if (reduces(a) || own != a.src)
			b.fold.to[b.fold.targets++] = own;
		b.fold.type = call_type(a), b.fold.op = call_op(a), b.fold.end = ending(call_op(a), size);
		b.ready = b.room = b.push_room = b.over = 0;
	}
	for (u32 p = lane; p < size; p += 32)
		b.results[p] = 0;
	__syncwarp();
	auto set = [](u64 &mask, u32 p) { atomicOr(reinterpret_cast<unsigned long long *>(&mask), 1ull << p); };
	bool good = meet(a, epoch, lane, [&](u32 p, const entry &e) {
		u64 src = e.src == SW_NOWHERE ? SW_NOWHERE : segment(a.world, p) + resolve(a.world, p, e.src);
		u64 dst = e.dst == SW_NOWHERE ? SW_NOWHERE : segment(a.world, p) + resolve(a.world, p, e.dst);
		b.line[p] = line_of(a, p, me);
		b.push_to[p] = slots_of(a, a.block.input_slots, p, me);
		if (reduces(a)) {
			b.fold.from[p] = src != SW_NOWHERE ? src + static_cast<u64>(mine.at) : slots_of(a, a.block.input_slots, me, p);
			if (src == SW_NOWHERE)
				set(b.fold.from_staged, p), set(b.pushing, p);
		}
		if (hands_peers) {
			u32 i = p > me ? p - me - 1 : p + size - me - 1; // ranks begin with different peers
			b.fold.to[i] = dst != SW_NOWHERE ? dst + static_cast<u64>(mine.at) : slots_of(a, a.block.result_slots, p, me);
			if (dst == SW_NOWHERE)
				set(b.fold.to_staged, i), set(b.handing, p);
			else
				b.stores = 1;
		}
		if (hands && pull && src != SW_NOWHERE)
			b.take_from[p] = src, set(b.pulling, p);
		else if (hands && a.dst_place == SW_NOWHERE)
			b.take_from[p] = slots_of(a, a.block.result_slots, me, p), set(b.taking, p);
		if (touches(a, hands, a.src_place, e.src, e.dst))
			set(b.touching, p);
		if (touches(a, hands, e.src, a.src_place, a.dst_place))
			set(b.touched, p);
	});
	__syncwarp();
	if (lane == 0) {
		if (has(a, SW_REDUCE_COPIES)) // allreduce_close sees to it
			b.touching = b.touched = 0;
		u64 bits = 0;
		for (u32 i = 0; i < b.fold.rows && good; i++)
			bits |= b.fold.from[i];
		for (u32 i = 0; i < b.fold.targets && good; i++)
			bits |= b.fold.to[i];
		b.fold.aligned = (bits & 15) == 0;
		b.push_warps = b.pushes != 0 ? work_warps / 3 : 0;
		b.take_warps = b.pulling != 0 ? work_warps - work_warps / 4 : b.taking != 0 ? work_warps / 3 : 0;
		b.reduce_warps = work_warps - b.push_warps - b.take_warps;
		for (u32 i = 0; i < a.slots; i++) {
			b.pushed[i].expect(max(b.push_warps, 1u));
			b.reduced[i].expect(b.reduce_warps);
			b.taken[i].expect(max(b.take_warps, 1u));
		}
	}
	return good;
}

} // namespace sw
