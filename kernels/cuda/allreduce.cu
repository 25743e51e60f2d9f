// All-reduce, reduce-scatter and all-gather. Every rank owns one slice of the elements: it combines its slice of all
// ranks' inputs, always in the order of ranks, so that all ranks and all runs get the same bits (R2), and hands the
// result to all. In one shot every rank does that with all elements, for itself.
//
// Two kernels: `allreduce_packet` for small calls, `allreduce` for all others, which reads and writes the peers'
// buffers where it can and goes through staging where it cannot; each rank says in its entry what may be done with its
// buffers. All ranks of a call take the same kernel and as many blocks. Their parts are in allreduce/, one idea a file:
//
//	calls      what ranks tell one another of a call
//	elements   types and operators
//	packets    small calls, whose words carry their flag
//	folds      a warp combines rows into targets
//	board      what the warps of a block tell one another
//	working    the warps that push, reduce and take
//	watching   the warps between them and the peers
//
// A rank ends call e only when it has all entries of call e, and a peer writes its entry of call e when it has ended
// call e-1. So what is indexed by the epoch's parity is never overwritten before it has been read (X3), and whoever has
// a peer's entry may write its staging.
#include "allreduce/packets.cuh"
#include "allreduce/watching.cuh"

namespace sw {

// The work of a warp of the packet kernel: it moves data, meets the peers, or advances the number of the call.
enum class packet_role { mover, meeter, counter };

__device__ __forceinline__ packet_role packet_role_of(u32 warp)
{
	return warp < packet_warps    ? packet_role::mover
	       : warp == packet_warps ? packet_role::meeter
	                              : packet_role::counter;
}

// The work of a warp of the kernel through memory.
enum class memory_role { worker, input_signaller, result_signaller, watcher };

__device__ __forceinline__ memory_role memory_role_of(u32 warp)
{
	return warp == work_warps + 2   ? memory_role::watcher
	       : warp == work_warps     ? memory_role::input_signaller
	       : warp == work_warps + 1 ? memory_role::result_signaller
	                                : memory_role::worker;
}

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_REDUCE_PACKET_THREADS, 1)
    allreduce_packet(const __grid_constant__ sw_reduce_args a)
{
	using namespace sw;
	SW_SHARED(u64, verdict);
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	packet_role role = packet_role_of(warp);

	// The warp's first packet is known before the call's number, and loaded while that comes.
	// neighbouring warps of the grid lie in different blocks, so that few groups use many multiprocessors
	packet_warp p(a, &verdict, warp * gridDim.x + blockIdx.x, packet_warps * gridDim.x, lane);
	packet_warp::task task = p.input(role == packet_role::mover ? p.warp : 0);
	u32 tasks = p.tasks(), groups = packet_groups(span(a, a.world.rank).bytes),
	    most = gathers(a) && !one_shot(a) ? p.most_groups() : 0;
	call now = call::open(a.world); // all that is above goes on while the kernel before runs
	p.preload(task, role == packet_role::mover);
	u64 epoch = p.epoch = now.epoch();
	if (__any_sync(~0u, epoch == 0) != 0) // a fault may be written just now
		return;

	// Packets and entries go out.
	if (role == packet_role::mover)
		p.send(task, tasks);
	else if (role == packet_role::meeter && blockIdx.x == 0)
		enter(a, epoch, lane);
	if (role == packet_role::meeter && lane == 0)
		verdict = 0;
	__syncthreads(); // every warp has read the number
	release_stream();

	// The meeter tells the movers whether the ranks' calls agree, before they write the user's memory.
	if (role == packet_role::meeter) {
		bool good = meet(a, epoch, lane, [](u32, const entry &) {});
		if (lane == 0)
			store_relaxed_cta(&verdict, good ? calls_agree : calls_differ);
		for (u32 q = lane; blockIdx.x == 0 && q < a.world.size; q += 32) {
			wipe_one(a, epoch, a.block.inputs, q, reduces(a) ? groups : 0);
			wipe_one(a, epoch, a.block.results, q,
			         gathers(a) && !one_shot(a) ? packet_groups(span(a, q).bytes) : 0);
		}
	} else if (role == packet_role::counter) { // takes long, and nobody waits for it
		if (lane == 0)
			now.advance();
	} else if (!reduces(a)) {
		if (p.take_results(most))
			p.keep();
	} else if (reduce_any(p, groups) && most != 0) {
		p.take_results(most);
	}
}

extern "C" __global__ void __launch_bounds__(SW_REDUCE_THREADS, 1) allreduce(const __grid_constant__ sw_reduce_args a)
{
	using namespace sw;
	SW_SHARED(reduce_board, b);
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	memory_role role = memory_role_of(warp);
	bool good = true;

	// The watcher makes the board, the first part while the kernel before runs, and meets the peers.
	if (role == memory_role::watcher)
		b.begin(a, lane);
	call now = call::open(a.world);
	u64 epoch = now.epoch();
	if (role == memory_role::watcher && epoch != 0) {
		if (blockIdx.x == 0) // the sooner the better
			enter(a, epoch, lane);
		good = b.make(a, epoch, lane);
	}

	// All warps go on, or none: those of a block wait for one another. The first signaller, for which nobody waits
	// yet, advances the number, which takes long.
	bool stops = __syncthreads_or(epoch == 0 || !good) != 0;
	if (epoch != 0 && threadIdx.x == 32 * work_warps)
		now.advance();
	release_stream();
	if (stops)
		return;
	if (a.world.size == 1) {
		if (a.dst != a.src && warp < work_warps)
			move(a.dst, a.src, a.bounds[1], warp * gridDim.x + blockIdx.x, work_warps * gridDim.x, lane);
		return;
	}

	// Each warp does its part.
	if (role == memory_role::watcher) {
		reduce_watch(a, epoch, b, lane).run();
		for (u32 p = lane; blockIdx.x == 0 && p < a.world.size; p += 32) {
			wipe_one(a, epoch, a.block.inputs, p, 0);
			wipe_one(a, epoch, a.block.results, p, 0);
		}
	} else if (role == memory_role::input_signaller) {
		reduce_signaller{a, epoch, b, lane}.run_inputs();
	} else if (role == memory_role::result_signaller) {
		reduce_signaller{a, epoch, b, lane}.run_results();
	} else {
		reduce_worker{a, b, warp, lane}.run();
	}
}
