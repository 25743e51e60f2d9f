// The working warps of an exchange through memory: some push this rank's input into the peers' staging, where they
// cannot read it; some reduce this rank's slice and hand the result out; some copy the peers' slices of the result out
// of staging, or out of the peers' memory.
//
// Reads and writes the user's buffers, those of peers where they can be reached, and staging slots here and there.
// Peers' writes are read only after the watching warp has seen that it is there.
#pragma once

#include "board.cuh"

namespace sw {

// A rank's peers, each rank in another order.
__device__ __forceinline__ u32 peer_in_turn(const sw_reduce_args &a, u32 i)
{
	u32 p = a.world.rank + 1 + i;
	return p < a.world.size ? p : p - a.world.size;
}

__device__ __forceinline__ u64 all_peers(const sw_reduce_args &a)
{
	return (a.world.size == 64 ? ~0ull : (1ull << a.world.size) - 1) & ~(1ull << a.world.rank);
}

// The most chunks of this block in a slice of some ranks.
__device__ __forceinline__ u32 most_chunks(const sw_reduce_args &a, u64 ranks)
{
	u32 most = 0;
#pragma unroll 1
	for (u32 p = 0; p < a.world.size; p++)
		if (ranks >> p & 1)
			most = max(most, chunks_of(a, span(a, p).bytes));
	return most;
}

struct reduce_worker {
	const sw_reduce_args &a;
	reduce_board &b;
	u32 warp, lane; // among those with the same work

	__device__ __forceinline__ void report(reports *r, u32 j)
	{
		__syncwarp();
		if (lane == 0)
			r[j % a.slots].report();
		if (warp == 0 && lane == 0)
			tell_moved(moved_word(a.world, a.world.rank));
	}

	__device__ __forceinline__ void push()
	{
		u32 most = most_chunks(a, all_peers(a)), room = 0;
#pragma unroll 1
		for (u32 j = 0; j < most; j++) {
			if (room < j + 1 && (room = b.await(&b.push_room, j + 1, lane)) == 0)
				return;
#pragma unroll 1
			for (u32 i = 0; i < a.world.size - 1; i++) {
				u32 p = peer_in_turn(a, i);
				span s(a, p);
				chunk c(a, s.bytes, j);
				if (c.bytes > 0)
					move(b.push_to[p] + static_cast<u64>(c.slot_at),
					     a.src + static_cast<u64>(s.at + c.at), c.bytes, warp, b.push_warps, lane,
					     b.held(a));
			}
			report(b.pushed, j);
		}
	}

	__device__ __forceinline__ void reduce()
	{
		span s(a, a.world.rank);
		if ((b.pushing | b.handing) == 0) { // nothing to wait for: all tiles of the grid's warps in a row
			fold(b.fold, {0, 0, s.bytes, warp * gridDim.x + blockIdx.x, b.reduce_warps * gridDim.x, lane,
			              b.held(a, b.crossings, warp, b.reduce_warps), b.crossings});
			return;
		}
		u32 mine = chunks_of(a, s.bytes), ready = b.pushing != 0 ? 0 : no_limit,
		    room = b.handing != 0 ? 0 : no_limit;
#pragma unroll 1
		for (u32 j = 0; j < mine; j++) {
			if (ready < j + 1 && (ready = b.await(&b.ready, j + 1, lane)) == 0)
				return;
			if (room < j + 1 && (room = b.await(&b.room, j + 1, lane)) == 0)
				return;
			chunk c(a, s.bytes, j);
			fold(b.fold, {c.at, c.slot_at, c.bytes, warp, b.reduce_warps, lane, b.held(a), b.crossings});
			report(b.reduced, j);
		}
	}

	__device__ __forceinline__ void take()
	{
		if (b.taking == 0) { // nothing to wait for
			pace when = b.held(a, 1, warp, b.take_warps);
#pragma unroll 1
			for (u32 i = 0; i < a.world.size - 1; i++) {
				u32 p = peer_in_turn(a, i);
				span s(a, p);
				if ((b.pulling >> p & 1) == 0)
					continue;
				move(a.dst + static_cast<u64>(s.at), b.take_from[p], s.bytes,
				     warp * gridDim.x + blockIdx.x, b.take_warps * gridDim.x, lane, when);
				when.due +=
				    static_cast<u32>((s.bytes + tile_bytes - 1) / tile_bytes / gridDim.x) * a.interval;
			}
			return;
		}
		u32 most = most_chunks(a, b.taking | b.pulling), staged = most_chunks(a, b.taking);
#pragma unroll 1
		for (u32 j = 0; j < most; j++) {
#pragma unroll 1
			for (u32 i = 0; i < a.world.size - 1; i++) {
				u32 p = peer_in_turn(a, i);
				span s(a, p);
				chunk c(a, s.bytes, j);
				if (c.bytes == 0 || ((b.taking | b.pulling) >> p & 1) == 0)
					continue;
				bool pulled = (b.pulling >> p & 1) != 0;
				if (!pulled && b.await(&b.results[p], j + 1, lane) == 0)
					return;
				move(a.dst + static_cast<u64>(s.at + c.at),
				     b.take_from[p] + static_cast<u64>(pulled ? c.at : c.slot_at), c.bytes, warp,
				     b.take_warps, lane);
			}
			if (j < staged)
				report(b.taken, j);
		}
	}

	// One warp's share of a block's work.
	__device__ __forceinline__ void run()
	{
		if (warp < b.push_warps) {
			push();
			return;
		}
		warp -= b.push_warps;
		bool reducing = warp < b.reduce_warps;
		if (reducing) {
			reduce();
		} else {
			warp -= b.reduce_warps;
			take();
		}
		if (reducing || b.pulling != 0)
			b.end_work();
	}
};

} // namespace sw
