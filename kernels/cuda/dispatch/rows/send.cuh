// Tokens on their way to ranks, many at a time. Each block takes a stretch of this rank's tokens. Its threads find out
// together where they go; then some warps move rows, by bulk copies through places in shared memory of their own, and
// the others write what lies next to rows. A warp that moves keeps to a rate, so that all blocks together offer what a
// link carries: more than that is slower.
//
// dispatch_rows calls this. It reads the caller's tokens and writes rows of peers' outputs (or staging) and what lies
// next to them, this rank's places and who of the handle's state, and the words of signals.cuh.
#pragma once

#include "../landing.cuh"
#include "mover.cuh"
#include "receiver.cuh"

namespace sw {

template <typename Quantiser>
__device__ __forceinline__ void send_rows(const sw_dispatch_args &a, rows_board &b, u8 *memory)
{
	u32 n = a.world.size, warp = threadIdx.x / 32,
	    ring = a.movers * (a.depth * a.part + (Quantiser::makes_scales ? SW_DISPATCH_SCALES : 0));
	bool cached = (a.mode & SW_DISPATCH_CACHED) != 0, moves = warp < a.movers;
	bool by_expert = (a.mode & SW_DISPATCH_BY_EXPERT) != 0,
	     beside = (a.mode & (SW_DISPATCH_BESIDE | SW_DISPATCH_TOLD)) != 0;
	// While the kernel before runs: shared memory.
	if (!cached) {
		placement::fill(a, b.slot_cache);
		stretch_board s(a, memory + ring);
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.slots; i += blockDim.x)
			s.count[i] = s.before[i] = 0;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.send.share * n; i += blockDim.x)
			s.place[i] = 0;
	}
	if (threadIdx.x < a.movers * a.depth)
		b.full[threadIdx.x].init();
	if (threadIdx.x < SW_MAX_RANKS)
		b.sent[threadIdx.x] = b.before[threadIdx.x] = b.sum[threadIdx.x] = 0;
	if (threadIdx.x < 32)
		b.moved[threadIdx.x] = 0;
	if (threadIdx.x == 0)
		b.bad = 0, b.failed = 0, b.wrong = 0;
	fence_bulk();
	call now = call::open(a.world);
	// Reads that take long are issued together.
	begun seen;
	if (threadIdx.x < n)
		seen.load(a, threadIdx.x);
	u64 epoch = now.epoch();
	if (!now.begins())
		return;
	if (beside)
		release_stream(); // for the kernel that takes or tells of the rows, which counts the call
	else
		now.advance_by_last();
	// The first rows are on their way to shared memory while the block finds out where they go.
	rows_sender r(a, b, memory + ring, epoch);
	mover<Quantiser> m(a, r, memory);
	if (moves)
		m.begin();
	// Peers hear of the call. Nobody writes rows to a peer before it has room for them.
	begin_landing(a, epoch);
	if (blockIdx.x == 0 && threadIdx.x < n)
		signal_begin(a, threadIdx.x, epoch, gridDim.x, a.send.to_rows, static_cast<u64>(a.out.room));
	bool good = threadIdx.x >= n || threadIdx.x == a.world.rank || await_room(a, threadIdx.x, epoch, seen);
	// Where the block's tokens go: known, or behind those of the blocks before this one.
	if (cached)
		r.recall();
	else {
		r.count();
		good = r.add_blocks_before() && good;
		good = !__syncthreads_or(!good);
		if (good && !by_expert) { // any rank may have a kernel that tells of counts
			if (blockIdx.x == gridDim.x - 1)
				r.publish_totals();
			__syncthreads(); // what has been told changes now
		}
		good = good && r.find_bases();
	}
	good = good && (threadIdx.x >= n || r.find_output(threadIdx.x));
	good = !__syncthreads_or(!good);
	if (good && !cached) {
		r.place();
		__syncthreads();
	}
	// The roles of warps: the first move rows; of the others one numbers choices, and the rest write what lies
	// next to rows and then tell how far the movers are.
	if (moves)
		m.run(good);
	else if (good) {
		u32 thread = threadIdx.x - 32 * a.movers, threads = blockDim.x - 32 * a.movers,
		    numbers = !cached && by_expert ? 1 : 0; // warps that number choices
		if (!cached)
			good = r.count_choices(thread, threads);
		if (thread / 32 < numbers)
			r.number_choices();
		else
			r.write_beside(thread / 32 - numbers, threads / 32 - numbers,
			               !Quantiser::makes_scales && a.scale_words != 0);
		part_sync(beside_part, threads);
		if (good && r.progresses() && thread < 32)
			r.publish_progress();
	}
	// All that this block sends is there.
	if (!beside)
		release_stream();
	if (__syncthreads_or(!good))
		return;
	r.publish_done();
	if (threadIdx.x == 0 && b.bad != 0)
		complain(a, a.world.rank, epoch);
	if ((a.mode & SW_DISPATCH_RECEIVE) != 0 && blockIdx.x == 0)
		rows_receiver{a, b.sum, epoch}.finish(cached);
}

} // namespace sw
