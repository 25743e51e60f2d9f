// Roll calls: every rank signals every other and waits for all of them. A kernel has one block, with a thread for each
// peer.
//
// Writes this rank's line in the peers' segments; reads the peers' lines in its own.
#include "lines.cuh"

extern "C" __global__ void __launch_bounds__(SW_ROLLCALL_THREADS, 1)
    rollcall(const __grid_constant__ sw_rollcall_args a)
{
	using namespace sw;
	call now = call::open(a.world);
	if (!now.begins())
		return;
	u64 epoch = now.epoch();
	now.advance_by_last();
	release_stream();

	// Signal. What came before in the stream is seen by a peer that has awaited it (X4).
	u32 peer = threadIdx.x;
	if (peer >= a.world.size || peer == a.world.rank)
		return;
	fence_acq_rel_sys();
	line{segment(a.world, peer) + a.block.signals + a.world.rank * SW_LINE_BYTES}.signal(last_seq(epoch));

	// Wait. A peer may be in the next call already, so its number is at least this call's.
	line theirs{own_segment(a.world) + a.block.signals + peer * SW_LINE_BYTES};
	theirs.await(a.world, peer, epoch, last_seq(epoch));
}
