// Rows one for each token become rows one for each choice, expert by expert, and are summed again: on this rank alone,
// in memory that the caller names. Nothing here waits for another kernel.
//
// The choices of an expert are numbered in the order of tokens by one block, which looks at all of them twice. Rows are
// then read once, and written as often as they have choices.
#include "../../internal/cuda/layout/expand.h"

#include "dispatch/numbers.cuh"
#include "tiles.cuh"

namespace sw {

// The first row of an expert. A warp.
__device__ __forceinline__ u32 first_row(const sw_expand_args &a, u32 expert, u32 lane)
{
	const u32 *counts = reinterpret_cast<const u32 *>(a.counts);
	u32 sum = 0;
#pragma unroll 1
	for (u32 e = lane; e < expert; e += 32)
		sum += (counts[e] + a.align - 1) / a.align * a.align;
	return __reduce_add_sync(~0u, sum);
}

// How many of the rows an expert has with those between it and the next, and with the last expert whether rows are left
// out.
__device__ __forceinline__ void tell_room(const sw_expand_args &a, u32 expert, u32 first)
{
	i64 *rooms = reinterpret_cast<i64 *>(a.rooms);
	u32 count = reinterpret_cast<const u32 *>(a.counts)[expert],
	    end = first + (count + a.align - 1) / a.align * a.align;
	rooms[expert] = min(end, a.length) - min(first, a.length);
	if (expert == a.experts - 1)
		rooms[a.experts] = end > a.length ? 1 : 0;
}

struct places_board {
	u32 before[SW_EXPAND_PLACE_THREADS / 32]; // choices of the expert in the parts of the warps before each
	u32 first;
};

// Writes the rows of the choices of an expert, and -1 for the choices of none. A block. Warps have stretches of
// choices.
__device__ __forceinline__ void number_choices(const sw_expand_args &a, places_board &b)
{
	const i64 *indices = reinterpret_cast<const i64 *>(a.indices);
	int *slots = reinterpret_cast<int *>(a.slots);
	u32 expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32;
	u64 all = static_cast<u64>(a.tokens) * a.top_k, each = (all + 32 * warps - 1) / (32 * warps) * 32,
	    from = warp * each, to = from + each < all ? from + each : all;
	u32 mine = 0;
#pragma unroll 4
	for (u64 i = from + lane; i < to; i += 32)
		mine += indices[i] == expert ? 1 : 0;
	mine = __reduce_add_sync(~0u, mine);
	if (lane == 0)
		b.before[warp] = mine;
	if (warp == 0) {
		u32 first = first_row(a, expert, lane);
		if (lane == 0) {
			b.first = first;
			if (a.rooms != 0)
				tell_room(a, expert, first);
		}
	}
	__syncthreads();
	if (warp == 0) {
		u32 some = lane < warps ? b.before[lane] : 0, sum = running_sum(some, lane);
		if (lane < warps)
			b.before[lane] = sum - some;
	}
	__syncthreads();
	u32 next = b.first + b.before[warp];
#pragma unroll 4
	for (u64 at = from; at < to; at += 32) {
		u64 i = at + lane;
		i64 index = i < to ? indices[i] : 0;
		bool own = i < to && index == expert;
		u32 who = __ballot_sync(~0u, own), slot = next + __popc(who & ((1u << lane) - 1));
		if (own)
			slots[i] = slot < a.length ? static_cast<int>(slot) : -1;
		else if (expert == 0 && i < to && (index < 0 || index >= a.experts))
			slots[i] = -1;
		next += __popc(who);
	}
}

// One piece of work of a warp: a tile of a token's row, or of a row of padding.
struct spreader {
	const sw_expand_args &a;
	u32 lane, each; // tiles of a row

	__device__ __forceinline__ explicit spreader(const sw_expand_args &a)
	    : a(a), lane(threadIdx.x & 31), each((a.row_bytes + SW_TILE_BYTES - 1) / SW_TILE_BYTES)
	{
	}

	// The tile of a token's row, and with the first what lies next to the row, to the rows of its choices.
	__device__ __forceinline__ void copy(u32 token, u32 part) const
	{
		const int *slots = reinterpret_cast<const int *>(a.slots) + static_cast<u64>(token) * a.top_k;
		bool some = false;
#pragma unroll 1
		for (u32 k = lane; k < a.top_k; k += 32)
			some = some || slots[k] >= 0;
		if (!__any_sync(~0u, some))
			return;
		u64 at = static_cast<u64>(part) * SW_TILE_BYTES;
		tile t;
		t.lane = lane;
		t.load(a.rows + token * static_cast<u64>(a.row_bytes) + at,
		       min(a.row_bytes - static_cast<u32>(at), static_cast<u32>(SW_TILE_BYTES)));
#pragma unroll 1
		for (u32 k = 0; k < a.top_k; k++) {
			int slot = slots[k];
			if (slot < 0)
				continue;
			t.store(a.to_rows + slot * static_cast<u64>(a.row_bytes) + at);
			if (part == 0)
				beside(token, k, slot);
		}
	}

	// The scales of a token, and the weight of a choice.
	__device__ __forceinline__ void beside(u32 token, u32 k, u32 slot) const
	{
		u32 words = a.scales != 0 ? a.scale_bytes / 4 : 0;
		const u32 *from = reinterpret_cast<const u32 *>(a.scales) + static_cast<u64>(token) * words;
		u32 *to = reinterpret_cast<u32 *>(a.to_scales) + static_cast<u64>(slot) * words;
#pragma unroll 1
		for (u32 w = lane; w < words; w += 32)
			to[w] = from[w];
		if (a.weights != 0 && lane == 0)
			reinterpret_cast<float *>(a.to_weights)[slot] =
			    reinterpret_cast<const float *>(a.weights)[static_cast<u64>(token) * a.top_k + k];
	}

	// Zeros in a tile of a row of padding, and with the first in what lies next to the row.
	__device__ __forceinline__ void clear(u32 row, u32 part) const
	{
		u64 at = static_cast<u64>(part) * SW_TILE_BYTES,
		    to = a.to_rows + row * static_cast<u64>(a.row_bytes) + at;
		u32 n = min(a.row_bytes - static_cast<u32>(at), static_cast<u32>(SW_TILE_BYTES)), vectors = n / 16;
#pragma unroll 1
		for (u32 v = lane; v < vectors; v += 32)
			store_vector(to + 16 * v, make_uint4(0, 0, 0, 0));
		if (part != 0)
			return;
		u32 words = a.scales != 0 ? a.scale_bytes / 4 : 0;
#pragma unroll 1
		for (u32 w = lane; w < words; w += 32)
			reinterpret_cast<u32 *>(a.to_scales)[static_cast<u64>(row) * words + w] = 0;
		if (a.weights != 0 && lane == 0)
			reinterpret_cast<float *>(a.to_weights)[row] = 0;
	}

	// Warps of all blocks share tokens' tiles, then those of padding.
	__device__ __forceinline__ void run() const
	{
		u64 warp = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32,
		    warps = static_cast<u64>(gridDim.x) * blockDim.x / 32, copies = static_cast<u64>(a.tokens) * each,
		    gap = static_cast<u64>(a.align - 1) * each, all = copies + a.experts * gap;
#pragma unroll 1
		for (u64 i = warp; i < all; i += warps) {
			if (i < copies) {
				u32 token = static_cast<u32>(i / each);
				copy(token, static_cast<u32>(i - static_cast<u64>(token) * each));
				continue;
			}
			u32 expert = static_cast<u32>((i - copies) / gap),
			    rest = static_cast<u32>((i - copies) - expert * gap),
			    count = reinterpret_cast<const u32 *>(a.counts)[expert],
			    room = (count + a.align - 1) / a.align * a.align, behind = count + rest / each;
			if (behind >= room)
				continue;
			u32 row = first_row(a, expert, lane) + behind;
			if (row < a.length)
				clear(row, rest % each);
		}
	}
};

// The sums of the rows of each token's choices, in their order. A choice whose slot is no row has none. A block has a
// token at a time.
template <kind type> __device__ __forceinline__ void fold(const sw_fold_args &a)
{
	using n = numbers<type>;
	u32 vectors = a.row_bytes / 16;
#pragma unroll 1
	for (u32 token = blockIdx.x; token < a.tokens; token += gridDim.x) {
		const int *slots = reinterpret_cast<const int *>(a.slots) + static_cast<u64>(token) * a.top_k;
#pragma unroll 1
		for (u32 v = threadIdx.x; v < vectors; v += blockDim.x) {
			float sum[n::count] = {};
#pragma unroll 4
			for (u32 k = 0; k < a.top_k; k++) {
				u32 slot = static_cast<u32>(slots[k]);
				bool some = slot < a.length;
				float f[n::count];
				n::unpack(load_vector_if(
					      some, a.rows + static_cast<u64>(some ? slot : 0) * a.row_bytes + 16 * v),
				          f);
#pragma unroll
				for (u32 i = 0; i < n::count; i++)
					sum[i] = some ? __fadd_rn(sum[i], f[i]) : sum[i];
			}
			store_vector(a.sums + static_cast<u64>(token) * a.row_bytes + 16 * v, n::pack(sum));
		}
		if (a.weights == 0)
			continue;
#pragma unroll 1
		for (u32 k = threadIdx.x; k < a.top_k; k += blockDim.x) {
			u32 slot = static_cast<u32>(slots[k]);
			reinterpret_cast<float *>(a.to_weights)[static_cast<u64>(token) * a.top_k + k] =
			    slot < a.length ? reinterpret_cast<const float *>(a.weights)[slot] : 0;
		}
	}
}

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_EXPAND_PLACE_THREADS, 1)
    expand_places(const __grid_constant__ sw_expand_args a)
{
	using namespace sw;
	SW_SHARED(places_board, b);
	number_choices(a, b);
}

extern "C" __global__ void __launch_bounds__(SW_EXPAND_THREADS) expand_rows(const __grid_constant__ sw_expand_args a)
{
	sw::spreader(a).run();
}

#define SW_FOLD(name, type) \
	extern "C" __global__ void __launch_bounds__(SW_EXPAND_THREADS) name(const __grid_constant__ sw_fold_args a) \
	{ \
		sw::fold<type>(a); \
	}
SW_FOLD(fold_rows_f32, sw::kind::f32)
SW_FOLD(fold_rows_bf16, sw::kind::bf16)
SW_FOLD(fold_rows_f16, sw::kind::f16)
#undef SW_FOLD
