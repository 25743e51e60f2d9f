// The kernel that reads the rows of this rank's tokens on all ranks and sums them, and the one that does so with what
// lies next to them only.
//
// combine_rows and combine_weights call this. It reads what sums.cuh does and writes the caller's sums.
#pragma once

#include "sums.cuh"

namespace sw {

// The bytes of a partial sum, and of the sum that a part of it becomes.
template <bool float8> __device__ __forceinline__ u32 sum_bytes(const sw_dispatch_args &a)
{
	return float8 ? a.wire_bytes : a.row_bytes;
}
template <kind type, bool float8> __device__ __forceinline__ u32 part_bytes(const sw_dispatch_args &a)
{
	return float8 ? a.part / float8_sum::stretch * SW_DISPATCH_STRETCH * numbers<type>::size : a.part;
}

template <kind type, bool float8, bool waits>
__device__ __forceinline__ void sum_rows(const sw_dispatch_args &a, const combine_board &b, arrivals *full, u64 *has,
                                         u64 epoch, u8 *ring)
{
	u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, n = a.world.size, tasks = a.tokens * a.parts,
	    step = gridDim.x * a.movers;
	// A warp has a ring of `depth` places, each for a part of the rows of one token on all ranks.
	u32 due = static_cast<u32>(clock()) + warp * (a.interval / a.movers);
	const int *places = state::places(a);
	u8 *mine = ring + static_cast<u64>(warp) * a.depth * n * a.part;
	full += warp * a.depth, has += warp * a.depth;
	int row_lo = -1, row_hi = -1;            // the rows of the token that is loaded next, of ranks lane and lane+32
	[[maybe_unused]] int seen[2] = {-1, -1}; // windows of those ranks that are made
	[[maybe_unused]] bool lost = false;      // a wait was given up
	// The rows of part k, before it is loaded: places come from memory.
	auto find_rows = [&](u32 k) {
		u32 task = blockIdx.x + gridDim.x * warp + k * step;
		u64 first = static_cast<u64>(task / a.parts) * n;
		row_lo = task < tasks && lane < n ? places[first + lane] : -1;
		row_hi = task < tasks && lane + 32 < n ? places[first + lane + 32] : -1;
	};
	// Begins to load part k of this warp.
	auto load = [&](u32 k) {
		u32 task = blockIdx.x + gridDim.x * warp + k * step;
		if (task >= tasks)
			return;
		u32 t = task / a.parts, at = (task - t * a.parts) * a.part,
		    bytes = min(a.part, sum_bytes<float8>(a) - at), place = k % a.depth;
		int rows[2] = {row_lo, row_hi};
		find_rows(k + 1);
		// Rows that are made while they are read have to be there.
		if constexpr (waits) {
			bool good = !lost;
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				if (good && rows[i] >= 0 && (b.makes >> (lane + 32 * i) & 1) != 0)
					good = await_made(a, lane + 32 * i, rows[i], epoch, seen[i]);
			lost = __any_sync(~0u, !good);
			if (lost)
				rows[0] = rows[1] = -1;
		}
		u64 there = static_cast<u64>(__ballot_sync(~0u, rows[1] >= 0)) << 32 | __ballot_sync(~0u, rows[0] >= 0);
		u32 count = __popc(static_cast<u32>(there)) + __popc(static_cast<u32>(there >> 32));
		// All warps together ask for what a link carries.
		if (a.interval != 0) {
#pragma unroll 1
			while (static_cast<int>(due - static_cast<u32>(clock())) > 0)
				;
			due += a.interval * (count - static_cast<u32>(there >> a.world.rank & 1));
		}
		// The rows come by bulk copies, which a word of the place counts.
		if (lane == 0) {
			has[place] = there;
			full[place].expect(bytes * count);
		}
		__syncwarp();
#pragma unroll
		for (u32 i = 0; i < 2; i++)
			if (rows[i] >= 0)
				bulk_load(mine + (place * n + lane + 32 * i) * a.part,
				          b.base[lane + 32 * i] + static_cast<u64>(rows[i]) * sum_bytes<float8>(a) + at,
				          bytes, full + place);
	};
	// The ring is filled; then each part is summed, and its place loaded anew.
	find_rows(0);
#pragma unroll 1
	for (u32 k = 0; k < a.depth; k++)
		load(k);
	u32 k = 0;
#pragma unroll 1
	for (u32 task = blockIdx.x + gridDim.x * warp; task < tasks; task += step, k++) {
		u32 t = task / a.parts, part = task - t * a.parts, at = part * part_bytes<type, float8>(a),
		    bytes = min(part_bytes<type, float8>(a), a.row_bytes - at), place = k % a.depth;
		full[place].await(k / a.depth);
		u64 there = has[place];
#pragma unroll 1
		for (u32 i = lane * 16; i < bytes; i += 512) {
			sum<type> s;
			s.add_biases(a, static_cast<u64>(t) * a.row_bytes + at + i);
#pragma unroll 1
			for (u64 left = there; left != 0; left &= left - 1) {
				if constexpr (float8) {
					const u8 *from = mine + (place * n + __ffsll(left) - 1) * a.part;
					u32 element = i / numbers<type>::size;
					const u8 *narrow = from + float8_sum::at(element);
					uint2 v = numbers<type>::count == 8
					              ? *reinterpret_cast<const uint2 *>(narrow)
					              : make_uint2(*reinterpret_cast<const u32 *>(narrow), 0);
					s.add_scaled(
					    v, *reinterpret_cast<const float *>(from + float8_sum::scale_at(element)));
				} else {
					s.add(*reinterpret_cast<const uint4 *>(
					    mine + (place * n + __ffsll(left) - 1) * a.part + i));
				}
			}
			store_vector(a.sum.y + static_cast<u64>(t) * a.row_bytes + at + i, s.value());
		}
		if (part == 0 && a.sum.weights != 0)
			sum_weights(a, t, lane);
		__syncwarp();
		load(k + a.depth);
	}
}

template <kind type, bool float8>
__device__ __forceinline__ void combine_rows(const sw_dispatch_args &a, combine_board &b, u8 *ring)
{
	// While the kernel before runs: shared memory.
	if (threadIdx.x < a.movers * a.depth)
		b.full[threadIdx.x].init();
	if (threadIdx.x == 0)
		b.makes = 0;
	fence_bulk();
	bool beside = (a.mode & SW_DISPATCH_BESIDE) != 0;
	bool begins = (a.mode & SW_DISPATCH_SEND) != 0;
	call now = beside ? call::look(a.world) : call::open(a.world);
	u64 epoch = now.epoch();
	if (!now.begins())
		return;
	// Peers hear where this rank's rows are, and say where theirs are.
	if (begins)
		now.advance_by_last();
	epoch -= begins ? 0 : 1;
	if (begins && blockIdx.x == 0 && threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		signal_begin(a, threadIdx.x, epoch, gridDim.x);
	if (!await_ranks(a, b, epoch))
		return;
	fence_bulk();
	// Warps sum rows. Where a rank still makes its own, they wait for windows of them.
	if (threadIdx.x / 32 < a.movers && b.makes != 0)
		sum_rows<type, float8, true>(a, b, b.full, b.has, epoch, ring);
	else if (threadIdx.x / 32 < a.movers)
		sum_rows<type, float8, false>(a, b, b.full, b.has, epoch, ring);
	release_stream();
	if (beside)
		await_stream(); // what comes behind this kernel comes behind that one
	// Rows belong to their ranks again.
	signal_read(a, epoch);
	if ((a.mode & SW_DISPATCH_KEEP) == 0)
		await_read(a, epoch);
}

// The weights that lie next to rows go back to their tokens.
__device__ __forceinline__ void combine_beside(const sw_dispatch_args &a, combine_board &b)
{
	if (threadIdx.x == 0)
		b.makes = 0;
	__syncthreads();
	call now = call::open(a.world);
	u64 epoch = now.epoch();
	if (!now.begins())
		return;
	now.advance_by_last();
	if (blockIdx.x == 0 && threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		signal_begin(a, threadIdx.x, epoch, gridDim.x);
	if (!await_ranks(a, b, epoch))
		return;
#pragma unroll 1
	for (u32 t = threadIdx.x / 32 * gridDim.x + blockIdx.x; t < a.tokens && a.sum.weights != 0;
	     t += blockDim.x / 32 * gridDim.x)
		sum_weights(a, t, threadIdx.x & 31);
	release_stream();
	signal_read(a, epoch);
	if ((a.mode & SW_DISPATCH_KEEP) == 0)
		await_read(a, epoch);
}

} // namespace sw
