// Bulk data: a warp moves 4 KiB tiles of a message through its registers.
//
// Sends and copies call this. It reads and writes only what its caller names, with plain vector accesses: order
// comes from the caller.
#pragma once

#include "device.cuh"

namespace sw {

constexpr i64 tile_bytes = SW_TILE_BYTES;
static_assert(tile_bytes == 16 * 32 * 8);

// The tiles of a stretch of memory: they begin at multiples of 128 of its address, except the first.
struct tiles {
	u64 src;
	i64 bytes;

	__device__ __forceinline__ i64 begin(i64 k) const
	{
		return k == 0 ? 0 : k * tile_bytes - static_cast<i64>(src & 127);
	}
	__device__ __forceinline__ u32 length(i64 k) const
	{
		i64 end = begin(k + 1);
		return static_cast<u32>((end < bytes ? end : bytes) - begin(k));
	}
	__device__ __forceinline__ bool has(i64 k) const { return begin(k) < bytes; }
	__device__ __forceinline__ u32 count() const
	{
		return static_cast<u32>((bytes + static_cast<i64>(src & 127) + tile_bytes - 1) / tile_bytes);
	}
};

// Up to tile_bytes of a message on their way through a warp's registers.
struct tile {
	uint4 v[8];
	u64 src;
	u32 bytes, lane;

	__device__ __forceinline__ u32 vectors() const { return (src & 15) == 0 ? bytes / 16 : 0; }

	__device__ __forceinline__ void load(u64 from, u32 n)
	{
		src = from, bytes = n;
		u32 count = vectors();
		from += 16 * lane;
		if (count == 256) {
#pragma unroll
			for (int k = 0; k < 8; k++)
				v[k] = load_vector(from + 512 * k);
			return;
		}
#pragma unroll
		for (int k = 0; k < 8; k++)
			v[k] = load_vector_if(32 * k + lane < count, from + 512 * k);
	}

	__device__ __forceinline__ void store(u64 dst) const
	{
		u32 count = vectors();
		if (count == 0 || (dst & 15) != 0) {
			copy_odd(dst, src, bytes, lane, 32);
			return;
		}
		u64 to = dst + 16 * lane;
		if (count == 256) {
#pragma unroll
			for (int k = 0; k < 8; k++)
				store_vector(to + 512 * k, v[k]);
			return;
		}
#pragma unroll
		for (int k = 0; k < 8; k++)
			store_vector_if(32 * k + lane < count, to + 512 * k, v[k]);
		u32 at = 16 * count + lane;
		if (at < bytes)
			store_byte(dst + at, load_byte(src + at));
	}
};

constexpr u32 moved_tiles = 512; // of those that warps share, from one that is told of to the next

// A warp is about to move a tile. It tells peers now and then, since signals may take longer than they wait.
__device__ __forceinline__ void tell_tile(u64 moved, u32 tile, u32 lane)
{
	if ((tile & (moved_tiles - 1)) == 0 && lane == 0)
		tell_moved(moved);
}

constexpr u32 far_ahead = 1u << 30; // cycles: what is due then was due long ago

// Returns when the clock has come to due, and at once where that was long ago.
__device__ __forceinline__ void await_clock(u32 due)
{
#pragma unroll 1
	while (due - static_cast<u32>(clock()) < far_ahead)
		;
}

// When tiles that cross links may begin, so that those of a block keep to a rate. Warps that go along all tiles know
// the time of each: they keep the ranks in step. Warps that wait for chunks take the next time that is free, from a
// counter in shared memory. An interval of 0 holds nothing back.
struct pace {
	u32 due = 0, interval = 0; // the clock at the warp's next tile, and cycles from one to the next; with a
	                           // counter, of the block's first and its next
	u32 *turn = nullptr;
	u64 moved = 0; // moved_word, for whoever waits for more than chunks

	// Returns when a tile that crosses `crossings` links may begin, as the counter has it. All lanes of a warp.
	__device__ __forceinline__ void next(u32 crossings, u32 lane)
	{
		if (interval == 0 || crossings == 0)
			return;
		if (turn == nullptr) {
			await_clock(due);
			due += interval;
			return;
		}
		u32 before = lane == 0 ? atomicAdd(turn, crossings) : 0;
		await_clock(due + __shfl_sync(~0u, before, 0) * interval);
	}
};

// A warp moves tiles first, first+step, ... of a stretch of memory.
__device__ __noinline__ void move(u64 dst, u64 src, i64 bytes, u32 first, u32 step, u32 lane, pace when = pace())
{
	tile t;
	t.lane = lane;
#pragma unroll 1
	for (i64 at = first * tile_bytes - static_cast<i64>(src & 127); at < bytes; at += step * tile_bytes) {
		i64 from = at < 0 ? 0 : at, to = at + tile_bytes < bytes ? at + tile_bytes : bytes;
		when.next(1, lane);
		if (when.moved != 0)
			tell_tile(when.moved, static_cast<u32>((at + 127) / tile_bytes), lane);
		t.load(src + from, static_cast<u32>(to - from));
		t.store(dst + from);
	}
}

} // namespace sw
