// Words by which a caller sees how many rows of each expert have landed, while others are still on their way.
//
// Kernels that send and those that put rows in their places call this. It writes the caller's words landed and counts,
// and landing of the handle's state.
#pragma once

#include "signals.cuh"

namespace sw {

// Has the words of what has landed count for this call; counts are no numbers until they are known. The threads of the
// first block of a kernel that sends.
__device__ __forceinline__ void begin_landing(const sw_dispatch_args &a, u64 epoch)
{
	if (a.send.landed == 0 || blockIdx.x != 0 || a.op >= SW_DISPATCH_SUMS)
		return;
#pragma unroll 1
	for (u32 i = threadIdx.x; i < a.local; i += blockDim.x) {
		static_cast<volatile u32 *>(a.send.landed)[i] = 0;
		if ((a.mode & SW_DISPATCH_CACHED) == 0)
			static_cast<volatile u32 *>(a.out.counts)[i] = ~0u;
	}
	__syncthreads();
	if (threadIdx.x == 0) {
		fence_acq_rel_sys(); // what others add to comes before the word that lets them
		store_relaxed_sys(own_segment(a.world) + a.state.landing, epoch);
	}
}

// Counts the rows of a lane's two choices, or -1, as landed. The writes that the lane knows of come before.
__device__ __forceinline__ void count_landed(const sw_dispatch_args &a, const int *rows, const int *slots)
{
#pragma unroll
	for (u32 i = 0; i < 2; i++)
		if (rows[i] >= 0) {
			fence_acq_rel_sys();
			atomicAdd_system(a.send.landed + slots[i], 1u);
		}
}

} // namespace sw
