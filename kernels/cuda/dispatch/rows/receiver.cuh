// The second half of a dispatch of many tokens.
//
// dispatch_rows, dispatch_receive, experts_take and dispatch_few call this, and dispatch_counts for what the host
// hears. It reads the words of signals.cuh and writes the caller's counts and the handle's arrived.
#pragma once

#include "../routing.cuh"
#include "../signals.cuh"

namespace sw {

struct receive_board {
	u32 sum[SW_MAX_RANKS];
};

// The first of a rank's rows in an output by token, where `from` says how many each rank has there; for the number of
// ranks one behind the last.
__device__ __forceinline__ u32 first_row(const sw_dispatch_args &a, const u32 *from, u32 rank)
{
	u32 at = 0;
#pragma unroll 1
	for (u32 src = 0; src < rank; src++)
		at += a.send.offset_base != 0 ? static_cast<u32>(a.send.offset_base) : from[src];
	return at;
}

// Tells the host where the rows of each rank are in an output by token, and that all its numbers are there. Those
// before are written. A thread has the first row of its rank. All threads of a block.
__device__ __forceinline__ void tell_host(const sw_dispatch_args &a, const u32 *from, u32 first)
{
	u32 n = a.world.size, *mapped = mapped_words(a, a.local);
	if (threadIdx.x <= n)
		mapped[threadIdx.x] = first;
	if (threadIdx.x < n)
		mapped[n + 1 + threadIdx.x] = from[threadIdx.x];
	__threadfence_system();
	__syncthreads();
	if (threadIdx.x == 0) {
		fence_acq_rel_sys();
		store_relaxed_sys(a.send.mapped, a.send.ticket);
	}
}

// The second half of a dispatch, by the threads of one block: waits for all blocks of all ranks, and leaves what the
// caller and later calls want to know. Token-major outputs are whole then.
struct rows_receiver {
	const sw_dispatch_args &a;
	u32 *sum; // [ranks]: rows from each
	u64 epoch;

	// True when everything is there. Behind a choice that is no expert, too, nobody writes rows any more: their
	// memory may be the caller's. Some of the block's threads; sum was 0.
	__device__ __forceinline__ bool await(u32 thread, u32 threads)
	{
		bool good = true;
#pragma unroll 1
		for (u32 src = 0; src < a.world.size; src++) {
			u64 begin, place, word;
			if (!await_begin(a, src, epoch, begin, place))
				return false;
#pragma unroll 1
			for (u32 i = thread; i < blocks_of(begin); i += threads)
				if (!await_done(a, src, i, epoch, word))
					return false;
				else if (!is_bad(word))
					atomicAdd(&sum[src], rows_of(word));
				else if (good)
					complain(a, src, epoch), good = false;
		}
		return good;
	}

	// How many choices each slot of this rank got, which the ranks say early. Some of the block's threads. `out`
	// are ranks that the call does without, `gone` those of which numbers are missing.
	__device__ __forceinline__ bool publish_counts(u32 thread, u32 threads, u32 out, u32 &gone)
	{
		u32 *counts = a.out.counts, *mapped = mapped_words(a, 0);
		bool good = true;
#pragma unroll 1
		for (u32 i = thread; i < a.local; i += threads) {
			u32 total = 0;
			good &= each_slot_count(a, a.first[a.world.rank] + i, epoch, out, gone,
			                        [&](u32, u32 rows) { total += rows; });
			counts[i] = total;
			if (mapped != nullptr)
				mapped[i] = total;
		}
		return good;
	}

	// The end of a token-major dispatch. All threads of a block.
	__device__ __forceinline__ void finish(bool cached)
	{
		if (threadIdx.x < a.world.size)
			sum[threadIdx.x] = 0;
		__syncthreads();
		u32 half = blockDim.x / 2, gone = 0;
		bool good = threadIdx.x < half
		                ? await(threadIdx.x, half)
		                : cached || publish_counts(threadIdx.x - half, blockDim.x - half, 0, gone);
		if (!__syncthreads_or(!good) && !cached)
			publish_ranks();
	}

	// Where the rows of each rank are in a token-major output.
	__device__ __forceinline__ void publish_ranks()
	{
		u32 n = a.world.size, first = threadIdx.x <= n ? first_row(a, sum, threadIdx.x) : 0;
		if (threadIdx.x <= n)
			a.out.offsets[threadIdx.x] = first;
		if (threadIdx.x < n) {
			a.out.rank_counts[threadIdx.x] = sum[threadIdx.x];
			state::arrived(a)[threadIdx.x] = sum[threadIdx.x];
		}
		if (a.send.mapped != 0)
			tell_host(a, sum, first);
	}
};

} // namespace sw
