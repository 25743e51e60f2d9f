// Lines: words by which ranks tell each other how far they are in a call. A word lies in its reader's segment and has
// one writer. The numbers in it only grow, so what an earlier call has left there never counts as new (X9).
//
// Each family says where its lines lie. Writes peers' segments, reads this rank's.
#pragma once

#include "device.cuh"

namespace sw {

// Waits for a peer until come() is true. False when the wait was given up, which is recorded. The deadline is that of
// w, which may be one of several waits. peer is read when the wait is given up: come may change it.
template <typename Come>
__device__ __forceinline__ bool await(wait &w, const sw_world &world, const u32 &peer, u64 epoch, bool sending,
                                      Come come)
{
#pragma unroll 1
	while (!come())
		if (!w.slow(world)) {
			give_up(world, w.kind, peer, epoch, sending);
			return false;
		}
	return true;
}

// Waits until what another warp of the block writes is at least want, which is not 0, and returns it. 0 when over says
// that the block has given up.
__device__ __forceinline__ u32 await_warp(u32 *word, u32 want, u32 *over, u32 lane)
{
	u32 here = 0;
	if (lane == 0)
#pragma unroll 1
		while ((here = atom_acquire_cta(word)) < want) {
			if (atom_acquire_cta(over) != 0) {
				here = 0;
				break;
			}
			__nanosleep(20);
		}
	return __shfl_sync(~0u, here, 0);
}

// One line.
struct line {
	u64 at;

	// Tells the reader. Data that it is told of is written before, behind fence_acq_rel_sys (X4).
	__device__ __forceinline__ void signal(u64 number) const { store_relaxed_sys(at, number); }
	__device__ __forceinline__ void signal(u64 number, u64 value) const { store16_relaxed_sys(at, number, value); }

	// Waits until a peer has signalled the number, and sees what the peer wrote before that. With `of_call` the
	// wait also ends when the ranks' calls turn out to differ.
	__device__ __forceinline__ bool await(const sw_world &world, u32 peer, u64 epoch, u64 number,
	                                      bool of_call = false) const
	{
		wait w;
		if (of_call)
			w.epoch = epoch;
		return sw::await(w, world, peer, epoch, false, [&] { return load_acquire_sys(at) >= number; });
	}
};

} // namespace sw
