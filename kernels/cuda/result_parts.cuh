// Parts of what a dispatch has left, on their way to memory of the caller.
//
// copy_results and take_results call this. It reads the handle's outputs and state and writes the caller's memory.
#pragma once

#include "tiles.cuh"

namespace sw {

// The bytes of each column that are copied.
__device__ __forceinline__ u64 copied(const sw_result_part &p, bool failed, u64 came)
{
	if (p.row == 0)
		return failed && p.fills != 0 ? 0 : p.bytes;
	u64 bytes = came * p.row;
	return bytes < p.bytes ? bytes : p.bytes;
}

struct parts_board {
	sw_result_part parts[SW_RESULT_PARTS];
	u32 before[32]; // tiles of the parts before each
	u32 tiles, count;
};

// A copy of parts, in tiles that all warps share, for most parts have one. The parts are read before the dispatch has
// ended. All threads of the grid.
struct parts_copier {
	parts_board &b;
	u32 lane, thread, threads;

	// The tiles of a column, if it is as long as the part has room.
	static __device__ __forceinline__ u32 most(const sw_result_part &p)
	{
		return p.bytes == 0 ? 0 : static_cast<u32>((p.bytes + 127 + tile_bytes - 1) / tile_bytes);
	}

	// Parts but for the first, which were taken; these are filled only behind the last row.
	__device__ __forceinline__ parts_copier(const sw_result_args &a, u32 taken, parts_board &b)
	    : b(b), lane(threadIdx.x & 31), thread(blockIdx.x * blockDim.x + threadIdx.x),
	      threads(gridDim.x * blockDim.x)
	{
		const u32 *from = reinterpret_cast<const u32 *>(a.parts);
		u32 *to = reinterpret_cast<u32 *>(b.parts);
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.count * sizeof(sw_result_part) / 4; i += blockDim.x)
			to[i] = from[i];
		__syncthreads();
		if (threadIdx.x < 32) {
			u32 some = lane < a.count && lane >= taken ? most(b.parts[lane]) * b.parts[lane].columns : 0,
			    sum = running_sum(some, lane);
			b.before[lane] = sum - some;
			if (lane == 31)
				b.tiles = sum, b.count = a.count;
		}
		__syncthreads();
	}

	// A tile of the copy.
	struct errand {
		const sw_result_part &p;
		u32 column;
		i64 number;

		__device__ __forceinline__ errand(const parts_board &b, u32 k, u32 lane)
		    : p(b.parts[__popc(__ballot_sync(~0u, lane < b.count && b.before[lane] <= k)) - 1])
		{
			u32 rest = k - b.before[&p - b.parts], each = most(p);
			column = rest / each, number = rest - column * each;
		}
		__device__ __forceinline__ tiles of(u64 bytes) const
		{
			return {p.from + column * p.pitch, static_cast<i64>(bytes)};
		}
		__device__ __forceinline__ u64 to() const { return p.to + column * p.bytes; }
	};

	// Copies when the dispatch has ended.
	__device__ __forceinline__ void run(const sw_result_args &a) const
	{
		u32 fault = a.fault == 0 ? ~0u : load32_relaxed_gpu(a.fault), rows = load32_relaxed_gpu(a.rows),
		    k = thread / 32;
		bool there = false;
		tile t;
		t.lane = lane;
		// The first tile is on its way next to the number of rows, as long as it can be.
		if (k < b.tiles) {
			errand e(b, k, lane);
			tiles all = e.of(min(e.p.bytes, e.p.pitch));
			if ((there = all.has(e.number)))
				t.load(all.src + all.begin(e.number), all.length(e.number));
		}
		bool failed = fault != SW_FAULT_NONE;
		u64 came = failed ? 0 : rows;
		fill(failed, came);
#pragma unroll 1
		for (; k < b.tiles; k += threads / 32, there = false) {
			errand e(b, k, lane);
			tiles all = e.of(copied(e.p, failed, came));
			if (!all.has(e.number))
				continue;
			u64 at = all.begin(e.number);
			if (there)
				t.bytes = all.length(e.number);
			else
				t.load(all.src + at, all.length(e.number));
			t.store(e.to() + at);
		}
	}

	// Writes what is behind the last row.
	__device__ __forceinline__ void fill(bool failed, u64 came) const
	{
#pragma unroll 1
		for (u32 i = 0; i < b.count; i++) {
			const sw_result_part &p = b.parts[i];
			if (p.fills == 0)
				continue;
			u64 n = copied(p, failed, came);
#pragma unroll 1
			for (u32 c = 0; c < p.columns; c++)
				for (u64 at = n + 4ull * thread; at < p.bytes; at += 4ull * threads)
					*reinterpret_cast<u32 *>(p.to + c * p.bytes + at) = p.behind;
		}
	}
};

} // namespace sw
