// Plans: all-reduces, reduce-scatters, all-gathers and all-to-alls as steps, which package plan has checked. Their
// parts are in plans/, one idea a file:
//
//	places     where chunks lie, and which part of them a block moves
//	steps      what a block does
//
// Every block does all steps of its rank, on its own stripe of every chunk, and signals the same block of other ranks.
// So blocks never wait for each other. A chunk that peers cannot reach, and scratch, have slots: stripes that are
// longer than their part of a slot move in parts, and no rank begins a part before all have ended the one before, as
// far as this block goes.
//
// A rank has all entries of call e before it touches a peer's memory, and a peer writes its entry when it has ended
// call e-1. So slots are free then, and semaphores, whose numbers begin with the call's, need no zeros between calls.
#include "plans/steps.cuh"

extern "C" __global__ void __launch_bounds__(SW_PLAN_THREADS, 1) plans(const __grid_constant__ sw_plan_args a)
{
	using namespace sw;
	SW_SHARED(plan_board, b);
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	bool good = true;
	call now = call::open(a.reduce.world);
	u64 epoch = now.epoch();
	if (warp == 0 && epoch != 0) {
		if (blockIdx.x == 0) // the sooner the better
			enter(a.reduce, epoch, lane);
		good = b.at.make(a, epoch, lane);
	}
	bool stops = __syncthreads_or(epoch == 0 || !good) != 0;
	if (epoch != 0)
		now.advance_by_last();
	release_stream();
	if (stops)
		return;
	plan_run(a, epoch, b, warp, lane).run();
	for (u32 p = threadIdx.x; blockIdx.x == 0 && p < a.reduce.world.size; p += blockDim.x) {
		wipe_one(a.reduce, epoch, a.reduce.block.inputs, p, 0);
		wipe_one(a.reduce, epoch, a.reduce.block.results, p, 0);
	}
}
