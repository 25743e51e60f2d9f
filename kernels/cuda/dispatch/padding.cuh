// Where the scales of rows by expert lie, and rows that belong to no token.
//
// Kernels that put rows in their places call this, and those of few tokens for what a masked rank has left. It writes
// the handle's outputs.
#pragma once

#include "state.cuh"

namespace sw {

// How many rows a slot takes in an output.
__device__ __forceinline__ u32 span_of(const sw_dispatch_args &a, u32 rows)
{
	return a.out.capacity != 0 ? static_cast<u32>(a.out.capacity)
	                           : static_cast<u32>((rows + a.out.align - 1) / a.out.align * a.out.align);
}

// Where a word of the scales of a row by expert lies.
__device__ __forceinline__ u64 row_scale(const sw_dispatch_args &a, u32 row, u32 word, u32 slot)
{
	if ((a.mode & SW_DISPATCH_COLUMNS) == 0)
		return a.out.scales + 4 * (static_cast<u64>(row) * a.scale_words + word);
	if (a.out.capacity != 0)
		return a.out.scales + 4 * ((static_cast<u64>(slot) * a.scale_words + word) * a.out.capacity + row -
		                           slot * a.out.capacity);
	return a.out.scales + 4 * (static_cast<u64>(word) * a.out.most + row);
}

// Zeroes the rows of width bytes at rows that belong to no token and their scales, and marks them in sources and
// weights (addresses, or 0). Blocks share the slots, of which counts and offsets say where rows are.
__device__ __forceinline__ void zero_padding(const sw_dispatch_args &a, u64 rows, u32 width, u64 *sources,
                                             float *weights, const u32 *counts, const u32 *offsets)
{
	if ((a.mode & SW_DISPATCH_ZERO) == 0)
		return;
	u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x & 31;
#pragma unroll 1
	for (u32 slot = blockIdx.x; slot < a.local; slot += gridDim.x)
#pragma unroll 1
		for (u32 r = offsets[slot] + counts[slot] + warp; r < offsets[slot + 1]; r += warps) {
#pragma unroll 1
			for (u32 at = lane * 16; at < width; at += 512)
				store_vector(rows + static_cast<u64>(r) * width + at, make_uint4(0, 0, 0, 0));
			if (sources != 0 && lane == 0)
				sources[r] = ~0ull;
			if (weights != 0 && lane == 0)
				weights[r] = 0;
#pragma unroll 1
			for (u32 w = lane; w < a.scale_words; w += 32)
				*view<volatile u32>(row_scale(a, r, w, slot)) = 0;
		}
}

// Makes padding of rows that have no source, of a slot where they are by expert. A block.
__device__ __forceinline__ void clear_rows(const sw_dispatch_args &a, u32 from, u32 to, u32 slot)
{
	u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x & 31;
	bool by_expert = (a.mode & SW_DISPATCH_BY_EXPERT) != 0;
#pragma unroll 1
	for (u32 r = from + warp; r < to; r += warps) {
#pragma unroll 1
		for (u32 at = lane * 16; at < a.wire_bytes; at += 512)
			store_vector(a.out.rows + static_cast<u64>(r) * a.wire_bytes + at, make_uint4(0, 0, 0, 0));
#pragma unroll 1
		for (u32 w = lane; w < a.scale_words; w += 32)
			*view<volatile u32>(row_scale(a, r, w, slot)) = 0;
		if (lane == 0 && a.out.sources != 0)
			a.out.sources[r] = ~0ull;
		if (by_expert) {
			if (lane == 0 && a.out.weights != 0)
				a.out.weights[r] = 0;
			continue;
		}
#pragma unroll 1
		for (u32 k = lane; k < a.top_k; k += 32) {
			view<u64>(own_segment(a.world) + a.send.to_indices)[static_cast<u64>(r) * a.top_k + k] = ~0ull;
			if (a.send.to_weights != 0)
				view<float>(own_segment(a.world) +
				            a.send.to_weights)[static_cast<u64>(r) * a.top_k + k] = 0;
		}
	}
}

} // namespace sw
