// Between rows by token, which cross, and rows by expert. Rows from all ranks land in staging, a part for each source rank. A pass over this rank's memory
// puts each in the rows of its experts, in the order of source rank, token and choice; on the way back another makes the partial sum of each row's experts in staging,
// where peers read it.
//
// experts_take, experts_sum and experts_spread call this. It reads staging and what lies beside it in the handle's state, and writes the handle's outputs, spread
// and block_slots; on the way back the other way round.
#pragma once

#include "rows.cuh"
#include "sums.cuh"

namespace sw {

// The rows in staging, counted without gaps: row i is one of a source rank.
struct staged_rows {
	u32 first[SW_MAX_RANKS + 1]; // of each source rank

	// One thread of the block, before the others meet it.
	__device__ __forceinline__ void make(const sw_moe_args &a, const u32 *counts)
	{
		first[0] = 0;
#pragma unroll 1
		for (u32 src = 0; src < a.world.size; src++)
			first[src + 1] = first[src] + counts[src];
	}

	// Its place in staging, where each source rank has max_tokens rows.
	__device__ __forceinline__ u32 at(const sw_moe_args &a, u32 i, u32 &src) const
	{
		src = 0;
#pragma unroll 1
		while (i >= first[src + 1])
			src++;
		return src * a.max_tokens + i - first[src];
	}
};

struct take_board {
	rows_board rows;
	staged_rows staged;
	u32 total[SW_MAX_RANKS]; // rows of each rank's output
	u32 over; // the first slot that overflows
	u32 own;  // rows from this rank
};

// How many rows a slot takes in an output.
__device__ __forceinline__ u32 span_of(const sw_moe_args &a, u32 rows) { return a.capacity != 0 ? static_cast<u32>(a.capacity) : static_cast<u32>((rows + a.align - 1) / a.align * a.align); }

// Where a word of the scales of a row by expert lies.
__device__ __forceinline__ u64 row_scale(const sw_moe_args &a, u32 row, u32 word, u32 slot)
{
	if ((a.mode & SW_MOE_COLUMNS) == 0)
		return a.row_scales + 4 * (static_cast<u64>(row) * a.scale_words + word);
	if (a.capacity != 0)
		return a.row_scales + 4 * ((static_cast<u64>(slot) * a.scale_words + word) * a.capacity + row - slot * a.capacity);
	return a.row_scales + 4 * (static_cast<u64>(word) * a.most_rows + row);
}

struct taker {
	const sw_moe_args &a;
	take_board &b;
	u32 *count, *base, *hist; // by local slot: rows, where this block's go, and how many those are
	u64 epoch;
	u32 warp, warps, lane, n;

	__device__ __forceinline__ taker(const sw_moe_args &a, take_board &b, u32 *memory, u64 epoch)
	    : a(a), b(b), count(memory), base(memory + a.local), hist(memory + 2 * a.local), epoch(epoch), warp(threadIdx.x / 32), warps(blockDim.x / 32), lane(threadIdx.x & 31),
	      n(a.world.size)
	{
	}

	__device__ __forceinline__ u64 own(u64 place) const { return own_segment(a.world) + place; }

	// Adds up the ranks' counts. False when a wait was given up, or an output would overflow, which all ranks find alike.
	__device__ __forceinline__ bool look_at_counts()
	{
		bool good = true;
		u32 me = a.world.rank;
		if (threadIdx.x < n)
			b.total[threadIdx.x] = 0;
		if (threadIdx.x == 0)
			b.over = ~0u;
		__syncthreads();
#pragma unroll 1
		for (u32 slot = threadIdx.x; slot < a.slots; slot += blockDim.x) {
			u32 rows = 0, r = 0;
#pragma unroll 1
			for (u32 src = 0; src < n; src++) {
				u32 some = 0;
				good &= await_number(a, own(a.state.slot_counts) + (static_cast<u64>(src) * a.slots + slot) * 8, epoch, src, some);
				rows += some;
			}
#pragma unroll 1
			while (slot >= a.first[r + 1])
				r++;
			if (r == me)
				count[slot - a.first[me]] = rows;
			if (a.capacity != 0 && rows > a.capacity)
				atomicMin(&b.over, slot);
			atomicAdd(&b.total[r], span_of(a, rows));
		}
		if (__syncthreads_or(!good))
			return false;
		if (b.over != ~0u) {
			if (b.over >= a.first[me] && b.over < a.first[me + 1] && threadIdx.x == 0)
				overflow(me, b.over, count[b.over - a.first[me]], a.capacity);
			else if (threadIdx.x == 0) {
				u32 rows = 0, r = 0;
#pragma unroll 1
				for (u32 src = 0; src < n; src++)
					rows += static_cast<u32>(load_relaxed_sys(own(a.state.slot_counts) + (static_cast<u64>(src) * a.slots + b.over) * 8));
#pragma unroll 1
				while (b.over >= a.first[r + 1])
					r++;
				overflow(r, b.over, rows, a.capacity);
			}
			return false;
		}
		u32 full = ~0u;
#pragma unroll 1
		for (u32 r = 0; r < n && full == ~0u; r++)
			if (a.capacity == 0 && b.total[r] > a.most_rows)
				full = r;
		if (full == ~0u)
			return true;
		if (threadIdx.x == 0)
			overflow(full, ~0ull, b.total[full], a.most_rows);
		return false;
	}

	// slot is ~0 where the output as a whole is too small.
	__device__ __forceinline__ void overflow(u32 rank, u64 slot, u64 rows, i64 limit)
	{
		const u32 *expert = reinterpret_cast<const u32 *>(a.table) + a.experts + 1 + a.slots;
		give_up(a.world, SW_FAULT_OVERFLOW, rank, epoch, false, rows, slot == ~0ull ? slot : __ldg(expert + slot), static_cast<u64>(limit));
	}

	// Adds up rows by expert from each rank. All threads of a block.
	__device__ __forceinline__ void count_ranks()
	{
		if (threadIdx.x < n)
			b.total[threadIdx.x] = 0;
		__syncthreads();
#pragma unroll 1
		for (u32 i = threadIdx.x; i < n * a.local; i += blockDim.x) {
			u32 src = i / a.local, slot = a.first[a.world.rank] + i - src * a.local;
			u32 rows = static_cast<u32>(load_relaxed_sys(own(a.state.slot_counts) + (static_cast<u64>(src) * a.slots + slot) * 8));
			if (rows != 0)
				atomicAdd(&b.total[src], rows);
		}
		__syncthreads();
	}

	// And tells them. A thread a rank.
	__device__ __forceinline__ void tell_rank_counts()
	{
		if (threadIdx.x >= n)
			return;
		u32 rows = b.total[threadIdx.x];
		reinterpret_cast<u32 *>(a.rank_counts)[threadIdx.x] = rows;
		if (a.mapped != 0)
			reinterpret_cast<u32 *>(a.mapped)[2 + 2 * a.local + 1 + threadIdx.x] = rows;
		reinterpret_cast<u32 *>(own(a.state.arrived))[threadIdx.x] = b.rows.sum[threadIdx.x];
	}

	// The first row of each local slot; what callers want to know, by the first block. One warp.
	__device__ __forceinline__ void lay_out()
	{
		u32 at = 0;
#pragma unroll 1
		for (u32 first = 0; first < a.local; first += 32) {
			u32 i = first + lane, rows = i < a.local ? span_of(a, count[i]) : 0, sum = running_sum(rows, lane);
			if (i < a.local)
				base[i] = at + sum - rows;
			at += __shfl_sync(~0u, sum, 31);
		}
		if (blockIdx.x != 0)
			return;
		u32 *counts = reinterpret_cast<u32 *>(a.counts), *offsets = reinterpret_cast<u32 *>(a.offsets);
		u32 *mapped = a.mapped == 0 ? nullptr : reinterpret_cast<u32 *>(a.mapped) + 2;
#pragma unroll 1
		for (u32 i = lane; i <= a.local; i += 32) {
			u32 o = i < a.local ? base[i] : at;
			offsets[i] = o;
			if (mapped != nullptr)
				mapped[a.local + i] = o;
			if (i == a.local)
				continue;
			counts[i] = count[i];
			if (mapped != nullptr)
				mapped[i] = count[i];
			if (a.landed != 0)
				reinterpret_cast<volatile u32 *>(a.landed)[i] = 0;
		}
	}

	__device__ __forceinline__ int index(u32 staged, u32 k) const
	{
		return static_cast<int>(reinterpret_cast<const i64 *>(own(a.state.indices))[static_cast<u64>(staged) * a.top_k + k]);
	}

	// Counts this block's rows by slot and adds up those of the blocks before. False when a wait was given up.
	__device__ __forceinline__ bool find_bases(const stretch &mine)
	{
#pragma unroll 1
		for (u32 i = threadIdx.x; i < mine.count * a.top_k; i += blockDim.x) {
			u32 src, t = i / a.top_k, staged = b.staged.at(a, mine.first + t, src);
			int slot = index(staged, i - t * a.top_k);
			if (slot >= 0)
				atomicAdd(&hist[slot], 1u);
		}
		__syncthreads();
		u64 words = own(a.state.block_slots);
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.local; i += blockDim.x)
			store_relaxed_sys(words + (static_cast<u64>(blockIdx.x) * a.local + i) * 8, numbered(epoch, hist[i]));
		bool good = true;
#pragma unroll 4
		for (u32 i = threadIdx.x; i < blockIdx.x * a.local; i += blockDim.x) {
			u32 rows = 0;
			good &= await_number(a, words + static_cast<u64>(i) * 8, epoch, a.world.rank, rows);
			if (rows != 0)
				atomicAdd(&base[i % a.local], rows);
		}
		return !__syncthreads_or(!good);
	}

	// Gives every choice of the block's rows its expert's row, in order. One warp.
	__device__ __forceinline__ void rank_choices(const stretch &mine)
	{
		int *spread = reinterpret_cast<int *>(own(a.state.spread));
		u32 all = mine.count * a.top_k;
#pragma unroll 1
		for (u32 first = 0; first < all; first += 32) {
			u32 i = first + lane, t = i / a.top_k, k = i - t * a.top_k, src, staged = 0;
			int slot = -1;
			if (i < all) {
				staged = b.staged.at(a, mine.first + t, src);
				slot = index(staged, k);
			}
			u32 alike = __match_any_sync(~0u, slot), before = __popc(alike & ((1u << lane) - 1));
			int row = slot < 0 ? -1 : static_cast<int>(base[slot] + before);
			__syncwarp();
			if (slot >= 0 && before == 0)
				base[slot] += __popc(alike);
			__syncwarp();
			if (i < all)
				spread[static_cast<u64>(staged) * a.top_k + k] = row;
		}
	}

	// Copies the block's rows to those of their experts, and what lies beside. The whole block.
	__device__ __forceinline__ void copy(const stretch &mine)
	{
		const int *spread = reinterpret_cast<const int *>(own(a.state.spread));
		u32 chunks = (a.wire_bytes + 2047) / 2048;
		u64 from = own(a.to_rows);
#pragma unroll 1
		for (u32 task = warp; task < mine.count * chunks; task += warps) {
			u32 t = task / chunks, c = task - t * chunks, src, staged = b.staged.at(a, mine.first + t, src);
			uint4 v[4];
			u64 row = from + static_cast<u64>(staged) * a.wire_bytes;
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				v[i] = load_vector_if(c * 2048 + i * 512 + lane * 16 < a.wire_bytes, row + c * 2048 + i * 512 + lane * 16);
			int rows[2]; // of choices lane and lane+32
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				rows[i] = lane + 32 * i < a.top_k ? spread[static_cast<u64>(staged) * a.top_k + lane + 32 * i] : -1;
			u64 there = static_cast<u64>(__ballot_sync(~0u, rows[1] >= 0)) << 32 | __ballot_sync(~0u, rows[0] >= 0);
#pragma unroll 1
			for (; there != 0; there &= there - 1) {
				u32 k = __ffsll(there) - 1;
				int to = __shfl_sync(~0u, k < 32 ? rows[0] : rows[1], k & 31);
				u64 out = a.rows + static_cast<u64>(to) * a.wire_bytes;
#pragma unroll
				for (u32 i = 0; i < 4; i++)
					store_vector_if(c * 2048 + i * 512 + lane * 16 < a.wire_bytes, out + c * 2048 + i * 512 + lane * 16, v[i]);
			}
		}
#pragma unroll 1
		for (u32 t = warp; t < mine.count; t += warps) {
			u32 src, staged = b.staged.at(a, mine.first + t, src);
#pragma unroll 1
			for (u32 k = 0; k < a.top_k; k++) {
				u64 i = static_cast<u64>(staged) * a.top_k + k;
				int to = spread[i];
				if (to < 0)
					continue;
				if (lane == 0 && a.row_weights != 0)
					reinterpret_cast<float *>(a.row_weights)[to] = reinterpret_cast<const float *>(own(a.state.weights))[i];
				if (lane == 0 && a.row_sources != 0)
					reinterpret_cast<u64 *>(a.row_sources)[to] = reinterpret_cast<const u64 *>(own(a.state.sources))[staged];
				u32 slot = static_cast<u32>(index(staged, k));
#pragma unroll 1
				for (u32 w = lane; w < a.scale_words; w += 32)
					*reinterpret_cast<volatile u32 *>(row_scale(a, to, w, slot)) = reinterpret_cast<const u32 *>(own(a.to_scales))[static_cast<u64>(staged) * a.scale_words + w];
			}
		}
	}
};

// Zeroes the rows of width bytes at rows that belong to no token and their scales, and marks them in sources and weights (addresses, or 0). Blocks share the slots.
__device__ __forceinline__ void zero_padding(const sw_moe_args &a, u64 rows, u32 width, u64 sources, u64 weights)
{
	if ((a.mode & SW_MOE_ZERO) == 0)
		return;
	const u32 *counts = reinterpret_cast<const u32 *>(a.counts), *offsets = reinterpret_cast<const u32 *>(a.offsets);
	u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x & 31;
#pragma unroll 1
	for (u32 slot = blockIdx.x; slot < a.local; slot += gridDim.x)
#pragma unroll 1
		for (u32 r = offsets[slot] + counts[slot] + warp; r < offsets[slot + 1]; r += warps) {
#pragma unroll 1
			for (u32 at = lane * 16; at < width; at += 512)
				store_vector(rows + static_cast<u64>(r) * width + at, make_uint4(0, 0, 0, 0));
			if (sources != 0 && lane == 0)
				reinterpret_cast<u64 *>(sources)[r] = ~0ull;
			if (weights != 0 && lane == 0)
				reinterpret_cast<float *>(weights)[r] = 0;
#pragma unroll 1
			for (u32 w = lane; w < a.scale_words; w += 32)
				*reinterpret_cast<volatile u32 *>(row_scale(a, r, w, slot)) = 0;
		}
}

// The weight of an expert's row, which is that of entry i of what lies beside rows in staging.
__device__ __forceinline__ float weight_of(const sw_moe_args &a, u64 i, int row)
{
	if ((a.mode & SW_MOE_GIVEN) != 0)
		return reinterpret_cast<const float *>(a.row_weights)[row];
	return (a.mode & SW_MOE_WEIGH) != 0 ? reinterpret_cast<const float *>(own_segment(a.world) + a.state.weights)[i] : 1;
}

// Waits until the caller has marked `rows` rows of a group as done. False when the wait was given up.
__device__ __forceinline__ bool await_ready(const sw_moe_args &a, u32 group, u32 rows, u64 epoch)
{
	patience p(a, a.world.rank);
#pragma unroll 1
	while (load32_acquire_sys(a.ready + 4 * static_cast<u64>(group)) < rows)
		if (!p.more(epoch, true))
			return false;
	return true;
}

} // namespace sw
