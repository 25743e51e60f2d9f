// Transfers between two ranks: puts and gets of as many blocks as their launch has, signals and waits of one thread.
//
// A put writes the peer's memory and a signal one line in its segment, so a wait reads its own rank's memory alone.
// Launches on one stream follow each other. Signals of one semaphore, and waits for it, come from one stream at a time,
// because each counts in a word of its own rank.
#include "tiles.cuh"

namespace sw {

__device__ __forceinline__ u64 semaphore_of(const sw_point_args &a, u32 rank)
{
	return rank * static_cast<u64>(a.semaphores) + a.semaphore;
}

} // namespace sw

// The peer looks at this rank's control for this rank, before it blames it.
extern "C" __global__ void __launch_bounds__(SW_POINT_THREADS) p2p_move(const __grid_constant__ sw_point_args a)
{
	using namespace sw;
	await_stream();
	release_stream();
	tiles all{a.src, a.bytes};
	u32 lane = threadIdx.x & 31, warps = gridDim.x * (SW_POINT_THREADS / 32);
	u64 moved =
	    own_segment(a.world) + a.block.control + a.world.rank * SW_CONTROL_ALIGN + offsetof(sw_control, moved);
	tile t;
	t.lane = lane;
	for (i64 k = threadIdx.x / 32 * gridDim.x + blockIdx.x; all.has(k); k += warps) {
		tell_tile(moved, static_cast<u32>(k), lane);
		t.load(a.src + all.begin(k), all.length(k));
		t.store(a.dst + all.begin(k));
	}
}

// Work before it in the stream is seen by a peer that has consumed the signal (X4).
extern "C" __global__ void __launch_bounds__(SW_POINT_WAITERS, 1) p2p_signal(const __grid_constant__ sw_point_args a)
{
	using namespace sw;
	await_stream();
	release_stream();
	if (threadIdx.x != 0)
		return;
	u64 count = own_segment(a.world) + a.block.sent + semaphore_of(a, a.peer) * 8;
	u64 number = load_relaxed_sys(count) + 1;
	store_relaxed_sys(count, number);
	fence_acq_rel_sys();
	store_relaxed_sys(segment(a.world, a.peer) + a.block.signals + semaphore_of(a, a.world.rank) * SW_LINE_BYTES,
	                  number);
}

// A wait that gives up consumes nothing, and tells how many signals it has seen.
extern "C" __global__ void __launch_bounds__(SW_POINT_WAITERS, 1) p2p_wait(const __grid_constant__ sw_point_args a)
{
	using namespace sw;
	await_stream();
	release_stream();
	if (threadIdx.x != 0)
		return;
	u64 own = own_segment(a.world), line = own + a.block.signals + semaphore_of(a, a.peer) * SW_LINE_BYTES;
	u64 count = own + a.block.consumed + semaphore_of(a, a.peer) * 8, consumed = load_relaxed_sys(count);
	wait w;
	while (load_acquire_sys(line) <= consumed)
		if (!w.slow(a.world)) {
			give_up(a.world, w.kind, a.peer, 0, false, load_relaxed_sys(line), consumed, 0, a.semaphore);
			return;
		}
	store_relaxed_sys(count, consumed + 1);
}
