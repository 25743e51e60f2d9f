// Reductions by multicast. Switches add what all ranks have at an address, and store a value on all of them, so every
// byte crosses each rank's link once in and once out, however many ranks there are. Only sums, and averages of floats
// that are not widened, are reduced this way (R1). Each element is added once, so all ranks have the same bits (R2).
//
// Every rank owns a slice, and goes through it in pieces. Three teams of threads deal with the pieces of all ranks, one
// behind the other: one stages this rank's input in its own segment, one loads the sums of this rank's piece from all
// ranks' staging and stores them in all ranks' staging, and one takes what is then there. A team is some warps of a
// block, or whole blocks. A reduce-scatter stores sums in the output, so nobody takes results; an all-gather has
// nothing to add, and stores the input. Where all ranks have a buffer at the same place, it is in place of staging
// (zero copy).
//
// Reads the user's input and writes the user's output, staging in this rank's segment, the multicast addresses of both
// in all ranks' segments, and the lines of blocks (board.cuh), here for the teams of this rank too.
#pragma once

#include "board.cuh"
#include "../multimem.cuh"

namespace sw {

constexpr u32 multicast_warps = SW_MULTICAST_THREADS / 32;

enum : u32 { stager, reducer, taker };

// The board of a block: what its threads know of a call.
struct multicast_board {
	u64 from, to; // multicast addresses of the input and the output of all slices, or SW_NOWHERE
	u32 go[3];    // what a team's first warp has found out
};

// Whether multicast reaches a buffer at that place: it lies in the heap's pool.
__device__ __forceinline__ bool in_reach(u64 place) { return place >> 62 == 0 && (place & 15) == 0; }

// Meets the peers. One warp, while the block's others wait. False when the call cannot go on.
__device__ __forceinline__ bool make_multicast_board(const sw_multicast_args &m, u64 epoch, multicast_board &b,
                                                     u32 lane)
{
	const sw_reduce_args &a = m.reduce;
	bool from = reduces(a) && in_reach(a.src_place), to = gathers(a) && in_reach(a.dst_place);
#pragma unroll 1
	for (u32 p = lane; p < a.world.size; p += 32) {
		bool whole = (a.bounds[p + 1] & 15) == 0; // a slice is whole vectors
		from &= whole, to &= whole;
	}
	bool good = meet(a, epoch, lane, [&](u32, const entry &e) {
		from &= e.src == a.src_place;
		to &= e.dst == a.dst_place;
	});
	from = __any_sync(~0u, !from) == 0;
	to = __any_sync(~0u, !to) == 0;
	if (lane == 0) {
		b.from = from ? m.multicast + a.src_place : SW_NOWHERE;
		b.to = to ? m.multicast + a.dst_place : SW_NOWHERE;
	}
	return good;
}

// Where a vector goes: to all ranks, or to the output, which may lie anywhere.
struct to_all {
	u64 p;
	__device__ __forceinline__ void put(u32 i, u32, uint4 v) const { multimem_store(p + i, v); }
};
struct to_output {
	u64 p;
	__device__ __forceinline__ void put(u32 i, u32 bytes, uint4 v) const
	{
		store_piece(p + i, min(16u, bytes - i), v);
	}
};

// Adds what all ranks have at `from`. The last vector may be part of one, behind which there is room.
template <u32 type, typename To>
__device__ __noinline__ void reduce_piece(u64 from, To to, u32 bytes, u32 thread, u32 threads, ending end)
{
	using E = element<type>;
	auto one = [&](uint4 v) {
		if (end.op != SW_OP_AVG)
			return v;
		typename E::value x[E::per];
		E::widen(x, v);
		return result<E>(x, end);
	};
	u32 i = 16 * thread, step = 16 * threads;
#pragma unroll 1
	for (; i + 3 * step < bytes; i += 4 * step) {
		uint4 v[4];
#pragma unroll
		for (int k = 0; k < 4; k++)
			v[k] = multimem_sum<type>(from + i + k * step);
#pragma unroll
		for (int k = 0; k < 4; k++)
			to.put(i + k * step, bytes, one(v[k]));
	}
#pragma unroll 1
	for (; i < bytes; i += step)
		to.put(i, bytes, one(multimem_sum<type>(from + i)));
}

// Stores the input, which may lie anywhere, on all ranks.
__device__ __noinline__ void spread_piece(u64 from, u64 to, u32 bytes, u32 thread, u32 threads)
{
	u32 i = 16 * thread, step = 16 * threads;
	if ((from & 15) == 0)
#pragma unroll 1
		for (; i + 3 * step + 16 <= bytes; i += 4 * step) {
			uint4 v[4];
#pragma unroll
			for (int k = 0; k < 4; k++)
				v[k] = load_vector(from + i + k * step);
#pragma unroll
			for (int k = 0; k < 4; k++)
				multimem_store(to + i + k * step, v[k]);
		}
#pragma unroll 1
	for (; i < bytes; i += step)
		multimem_store(to + i, load_piece(from + i, min(16u, bytes - i)));
}

// Threads with the same work: those of a block, or some of its warps.
struct multicast_team {
	const sw_multicast_args &m;
	const sw_reduce_args &a;
	u64 epoch;
	multicast_board &b;
	u32 role, row, rows;   // of the teams with this role on the rank, of which there are rows
	u32 warp, warps, lane; // of the team

	__device__ __forceinline__ void sync() { part_sync(1 + role, 32 * warps); }

	// A line of a team: src's team tells the same team of dst, which may be the same rank.
	__device__ __forceinline__ line line_of(u32 dst, u32 src, u64 which) const
	{
		return {segment(a.world, dst) + a.block.lines +
		        (static_cast<u64>(src) * a.lines + row) * SW_REDUCE_LINE_BYTES + which};
	}

	// Tells all ranks, or only this one, how many groups the team is through with.
	__device__ __forceinline__ void tell(u64 which, u32 groups, bool all)
	{
		sync();
		if (warp != 0)
			return;
		fence_alias();
		fence_acq_rel_sys(); // X4: what the team has written comes before the word
#pragma unroll 1
		for (u32 p = lane; p < a.world.size; p += 32)
			if (all || p == a.world.rank)
				line_of(p, a.world.rank, which).signal(seq(epoch, groups));
	}

	// Waits until all ranks' teams, or only this rank's, have told so. False, for all threads, when the call cannot
	// go on.
	__device__ __forceinline__ bool await(u64 which, u32 groups, bool all)
	{
		if (warp == 0) {
			bool good = true;
#pragma unroll 1
			for (u32 p = lane; p < a.world.size; p += 32) {
				if (!all && p != a.world.rank)
					continue;
				good &=
				    line_of(a.world.rank, p, which).await(a.world, p, epoch, seq(epoch, groups), true);
			}
			fence_alias();
			good = __any_sync(~0u, !good) == 0;
			if (lane == 0)
				b.go[role] = good;
		}
		sync();
		return b.go[role] != 0;
	}

	template <typename To> __device__ __forceinline__ void reduce(u64 from, To to, u32 bytes)
	{
		u32 thread = 32 * warp + lane, threads = 32 * warps;
		ending end(call_op(a), a.world.size);
		switch (call_type(a)) {
		case SW_TYPE_FLOAT16:
			return reduce_piece<SW_TYPE_FLOAT16>(from, to, bytes, thread, threads, end);
		case SW_TYPE_BFLOAT16:
			return reduce_piece<SW_TYPE_BFLOAT16>(from, to, bytes, thread, threads, end);
		case SW_TYPE_FLOAT32:
			return reduce_piece<SW_TYPE_FLOAT32>(from, to, bytes, thread, threads, end);
		case SW_TYPE_INT32:
			return reduce_piece<SW_TYPE_INT32>(from, to, bytes, thread, threads, end);
		case SW_TYPE_INT64:
			return reduce_piece<SW_TYPE_INT64>(from, to, bytes, thread, threads, end);
		default:
			return reduce_piece<SW_TYPE_FLOAT64>(from, to, bytes, thread, threads, end);
		}
	}

	// The row's piece j of a rank's slice: where it is among all slices, and how long; of 0 bytes when there is
	// none.
	struct piece {
		i64 at, bytes;

		__device__ __forceinline__ piece(const multicast_team &t, i64 each, u32 rank, u32 j)
		    : at(t.a.bounds[rank] + (static_cast<i64>(j) * t.rows + t.row) * each),
		      bytes(max(i64{0}, min(each, t.a.bounds[rank + 1] - at)))
		{
		}
	};

	__device__ __forceinline__ void run()
	{
		bool stages = reduces(a) && b.from == SW_NOWHERE, takes = gathers(a) && b.to == SW_NOWHERE;
		u32 size = a.world.size, me = a.world.rank;
		i64 longest = 0;
#pragma unroll 1
		for (u32 p = 0; p < size; p++)
			longest = max(longest, a.bounds[p + 1] - a.bounds[p]);
		// A short call is cut finer, so that all rows have a share of it.
		i64 each = min(static_cast<i64>(a.chunk_bytes), ((longest + rows - 1) / rows + 511) / 512 * 512);
		i64 first = each * row, stride = each * rows;
		u32 count = first < longest ? static_cast<u32>((longest - first + stride - 1) / stride) : 0;
		u64 slots = a.block.input_slots + static_cast<u64>(row) * a.slots * size * a.chunk_bytes;
		u64 own = own_segment(a.world), peers = m.multicast;
#pragma unroll 1
		for (u32 j = 0; j < count; j++) {
			// A slot has a place for each rank's piece.
			u64 slot = slots + static_cast<u64>(j % a.slots) * size * a.chunk_bytes;
			// X3: how many pieces must be through before the slot is free
			u32 through = j < a.slots ? 0 : j + 1 - a.slots;
			if (role == stager) {
				// who takes results has seen all ranks reduce
				if (through > 0 && !(takes ? await(results_taken, through, false)
				                           : await(results_pushed, through, true)))
					return;
#pragma unroll 1
				for (u32 p = 0; p < size; p++) {
					piece x(*this, each, p, j);
					move(own + slot + static_cast<u64>(p * each), a.src + static_cast<u64>(x.at),
					     x.bytes, (warp + p) % warps, warps, lane);
				}
				tell(inputs_pushed, j + 1, true);
			} else if (role == reducer) {
				if (stages) {
					if (!await(inputs_pushed, j + 1, true))
						return;
				} else if (takes && through > 0 && !await(results_taken, through, true)) {
					return;
				}
				work(piece(*this, each, me, j), stages, takes,
				     peers + slot + static_cast<u64>(me * each));
				tell(results_pushed, j + 1, true);
			} else {
				if (!await(results_pushed, j + 1, true))
					return;
#pragma unroll 1
				for (u32 p = 0; p < size; p++) {
					piece x(*this, each, p, j);
					move(a.dst + static_cast<u64>(x.at), own + slot + static_cast<u64>(p * each),
					     x.bytes, (warp + p) % warps, warps, lane);
				}
				tell(results_taken, j + 1, !stages);
			}
		}
		if (role == reducer && !takes && count > 0) // peers are done with this rank's memory
			await(results_pushed, count, true);
	}

	// Deals with this rank's piece; staged is its place in all ranks' staging.
	__device__ __forceinline__ void work(piece x, bool stages, bool takes, u64 staged)
	{
		if (x.bytes == 0)
			return;
		u32 bytes = static_cast<u32>(x.bytes);
		i64 in_slice = x.at - a.bounds[a.world.rank];
		u64 from = stages ? staged : b.from + static_cast<u64>(x.at),
		    to = takes ? staged : b.to + static_cast<u64>(x.at);
		if (!reduces(a))
			spread_piece(a.src + static_cast<u64>(in_slice), to, bytes, 32 * warp + lane, 32 * warps);
		else if (gathers(a))
			reduce(from, to_all{to}, bytes);
		else
			reduce(from, to_output{a.dst + static_cast<u64>(in_slice)}, bytes);
	}
};

// The kernel. by_blocks: a team is a block, not some of its warps.
template <bool by_blocks> __device__ __forceinline__ void run_multicast(const sw_multicast_args &m)
{
	const sw_reduce_args &a = m.reduce;
	SW_SHARED(multicast_board, b);
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	call now = call::open(a.world);
	u64 epoch = now.epoch();
	if (!now.begins())
		return;
	now.advance_by_last();
	release_stream();
	bool good = true;
	if (warp == 0) {
		if (blockIdx.x == 0)
			enter(a, epoch, lane);
		good = make_multicast_board(m, epoch, b, lane);
		for (u32 p = lane; good && blockIdx.x == 0 && p < a.world.size; p += 32) {
			wipe_one(a, epoch, a.block.inputs, p, 0);
			wipe_one(a, epoch, a.block.results, p, 0);
		}
	}
	if (__syncthreads_or(!good))
		return;
	// the roles that there are follow one another
	bool stages = reduces(a) && b.from == SW_NOWHERE, takes = gathers(a) && b.to == SW_NOWHERE;
	u32 first = stages ? stager : reducer, roles = 1 + stages + takes;
	u32 warps = by_blocks ? multicast_warps : multicast_warps / roles,
	    lines = by_blocks ? gridDim.x / roles : gridDim.x;
	u32 turn = by_blocks ? blockIdx.x % roles : warp / warps, line = by_blocks ? blockIdx.x / roles : blockIdx.x;
	if (turn < roles && line < lines)
		multicast_team{m, a, epoch, b, first + turn, line, lines, by_blocks ? warp : warp % warps, warps, lane}
		    .run();
}

} // namespace sw
