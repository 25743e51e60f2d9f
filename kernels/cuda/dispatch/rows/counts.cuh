// Counts of many tokens for the host, while rows are on their way: results can be allocated before the rows are there.
//
// dispatch_counts calls this. It reads the words of signals.cuh that ranks tell when they know where their tokens go,
// and writes the memory that host and device share.
#pragma once

#include "receiver.cuh"

namespace sw {

struct counts_board {
	u32 total[SW_MAX_RANKS]; // rows for each rank
	u32 from[SW_MAX_RANKS];  // rows for this one from each rank
};

// One block.
struct counts_teller {
	const sw_dispatch_args &a;
	counts_board &b;
	u64 epoch;

	// False where a wait was given up, a choice of a rank is no expert, or an output is too small. The kernel that
	// sends finds that, too, and says it, and the host hears nothing.
	__device__ __forceinline__ bool add_totals()
	{
		u32 n = a.world.size, me = a.world.rank;
		bool good, wrong = false;
		if (threadIdx.x < n)
			b.total[threadIdx.x] = 0;
		__syncthreads();
		good = each_rank_total(a, epoch, [&](u32 src, u32 d, u32 rows) {
			wrong |= (rows & some_wrong) != 0;
			atomicAdd(&b.total[d], rows);
			if (d == me)
				b.from[src] = rows;
		});
		if (__syncthreads_or(!good || wrong))
			return false;
		bool over = threadIdx.x < n && (a.mode & SW_DISPATCH_COMPACT) != 0 && b.total[threadIdx.x] > a.out.most;
		return !__syncthreads_or(over);
	}

	__device__ __forceinline__ void run()
	{
		if (!add_totals())
			return;
		u32 n = a.world.size, gone = 0, *counts = mapped_words(a, 0);
		bool good = true;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.local; i += blockDim.x) {
			u32 total = 0;
			good &= each_slot_count(a, a.first[a.world.rank] + i, epoch, 0, gone,
			                        [&](u32, u32 rows) { total += rows; });
			counts[i] = total;
		}
		if (!__syncthreads_or(!good))
			tell_host(a, b.from, threadIdx.x <= n ? first_row(a, b.from, threadIdx.x) : 0);
	}
};

} // namespace sw
