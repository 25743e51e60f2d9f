// Where the chunks of a plan lie, and which part of them a block moves.
//
// The steps ask this. Reads the entries of the call, through the reductions' calls; touches no data.
#pragma once

#include "../../../internal/cuda/layout/plans.h"
#include "../allreduce/calls.cuh"

namespace sw {

// A stretch of a chunk, in bytes from its beginning.
struct stretch {
	i64 low, high;
};

// The stripe of this block of a chunk that has these bytes.
__device__ __forceinline__ stretch stripe_of(i64 bytes)
{
	i64 grains = (bytes + SW_PLAN_GRAIN - 1) / SW_PLAN_GRAIN;
	auto begin = [&](u32 block) { return min(grains * block / gridDim.x * SW_PLAN_GRAIN, bytes); };
	return {begin(blockIdx.x), begin(blockIdx.x + 1)};
}

// A word of the program that names a chunk.
struct plan_place {
	u32 word;

	__device__ __forceinline__ u32 chunk() const { return word & ((1u << SW_PLAN_PLACE_RANK) - 1); }
	__device__ __forceinline__ u32 rank() const { return word >> SW_PLAN_PLACE_RANK & 0xff; }
	__device__ __forceinline__ u32 buffer() const { return word >> SW_PLAN_PLACE_BUFFER; }
};

// Where the buffers of all ranks lie in a call. In shared memory.
struct plan_places {
	u64 buffers[2][SW_MAX_RANKS]; // addresses of inputs and outputs, or of their slots
	u64 staged[2];                // which of them are slots, a bit a rank
	stretch stripes[2];           // of a chunk, and of one that has an element more
	u64 slot_at;                  // where this block's part of a slot begins
	i64 piece;                    // what moves of a stripe at once
	u32 parts;                    // of the call

	// Whether this rank's input or output is in slots for others, or until its end.
	static __device__ __forceinline__ bool stages(u64 place) { return place == SW_NOWHERE; }

	// Compares the calls of all ranks and finds their buffers. False when a call differs, or the wait was given up.
	// A warp.
	__device__ __forceinline__ bool make(const sw_plan_args &a, u64 epoch, u32 lane)
	{
		const sw_reduce_args &r = a.reduce;
		const sw_world &w = r.world;
		i64 share = a.slot_bytes / gridDim.x / SW_PLAN_GRAIN * SW_PLAN_GRAIN; // of a slot
		u64 nowhere[2] = {0, 0};                                              // of this lane's ranks
		auto find = [&](u32 p, u64 src, u64 dst) {
			u64 at = segment(w, p), told[2] = {src, dst}, slots[2] = {a.block.inputs, a.block.outputs};
#pragma unroll
			for (int i = 0; i < 2; i++) {
				bool none = stages(told[i]);
				nowhere[i] |= static_cast<u64>(none) << p;
				buffers[i][p] = at + (none ? slots[i] + blockIdx.x * share : resolve(w, p, told[i]));
			}
		};
		bool good = meet(r, epoch, lane, [&](u32 p, const entry &e) { find(p, e.src, e.dst); });
		fence_acq_rel_sys(); // what has come before the entries is seen from here on
		if (lane == 0) {
			find(w.rank, r.src_place, r.dst_place);
			buffers[SW_PLAN_INPUT][w.rank] = r.src;
			if (!stages(r.dst_place))
				buffers[SW_PLAN_OUTPUT][w.rank] = r.dst;
		}
		u64 all[2];
#pragma unroll
		for (int i = 0; i < 2; i++) {
			u32 low = __reduce_or_sync(~0u, static_cast<u32>(nowhere[i])),
			    high = __reduce_or_sync(~0u, static_cast<u32>(nowhere[i] >> 32));
			all[i] = static_cast<u64>(high) << 32 | low;
		}
		if (lane == 0) {
			staged[0] = all[0], staged[1] = all[1], slot_at = blockIdx.x * share;
			stripes[0] = stripe_of(a.each * a.size);
			stripes[1] = a.longer != 0 ? stripe_of((a.each + 1) * a.size) : stripes[0];
			// the same on all ranks
			bool sliced = a.scratch != 0 || (all[0] | all[1]) != 0;
			i64 longest = max(stripes[0].high - stripes[0].low, stripes[1].high - stripes[1].low);
			piece = sliced ? share : max(longest, static_cast<i64>(1));
			parts = static_cast<u32>(max((longest + piece - 1) / piece, static_cast<i64>(1)));
		}
		return good;
	}

	// The stretch of a chunk that moves in a part of the call. The chunk has its number in its block.
	__device__ __forceinline__ stretch of(const sw_plan_args &a, u32 chunk, u32 part) const
	{
		const stretch &s = stripes[chunk < a.longer];
		i64 low = min(s.low + part * piece, s.high);
		return {low, min(low + piece, s.high)};
	}

	// Where in a user's buffer a chunk begins, in bytes.
	static __device__ __forceinline__ i64 begin(const sw_plan_args &a, u32 chunk)
	{
		u32 before = chunk % a.chunks;
		return chunk / a.chunks * a.block_bytes + (a.each * before + min(before, a.longer)) * a.size;
	}

	// This block's slot of a chunk of this rank.
	__device__ __forceinline__ u64 slot(const sw_plan_args &a, u64 slots, u32 chunk) const
	{
		return own_segment(a.reduce.world) + slots + chunk * a.slot_bytes + slot_at;
	}

	// The address of `low` bytes behind the beginning of a chunk, or of its slot.
	__device__ __forceinline__ u64 address(const sw_plan_args &a, plan_place at, i64 low) const
	{
		u32 rank = at.rank(), chunk = at.chunk(), buffer = at.buffer();
		if (buffer == SW_PLAN_SCRATCH)
			return segment(a.reduce.world, rank) + a.block.scratch + chunk * a.slot_bytes + slot_at;
		bool mine = buffer == SW_PLAN_INPUT && rank == a.reduce.world.rank; // never in slots for itself
		if (!mine && (staged[buffer] >> rank & 1) != 0)
			return buffers[buffer][rank] + chunk * a.slot_bytes;
		return buffers[buffer][rank] + begin(a, chunk) + low;
	}
};

} // namespace sw
