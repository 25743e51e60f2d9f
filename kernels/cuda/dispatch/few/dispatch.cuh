// A dispatch of few tokens in one kernel.
//
// dispatch_few and its kin call this.
#pragma once

#include "../rows/receiver.cuh"
#include "receive.cuh"
#include "send.cuh"

namespace sw {

// A dispatch of few tokens, or one of its halves.
template <typename Wire, bool by_expert>
__device__ __forceinline__ void few_dispatch(const sw_dispatch_args &a, few_board &b, u64 *memory)
{
	bool sends = (a.mode & SW_DISPATCH_SEND) != 0, cached = (a.mode & SW_DISPATCH_CACHED) != 0;
	u32 lane = threadIdx.x & 31, n = a.world.size, parts = Wire::parts(a.row_bytes),
	    count = sends ? a.tokens * parts : 0;
	// While the kernel before runs: shared memory, and whose turn it is. One block publishes where tokens go.
	few_sender f(a, b, memory);
	few_tasks tasks(0, gridDim.x > 1 && !cached ? gridDim.x - 1 : gridDim.x);
	if (sends)
		f.clear();
	__syncthreads();
	call now = call::open(a.world);
	// Reads that take long are issued together: the number, the first row, the choices.
	wiping wiped(a);
	few_vectors<Wire::vectors> row;
	u64 ranks = 0;
	if (tasks.first < count) {
		row.load(a.send.x + static_cast<u64>(tasks.first / parts) * a.row_bytes, a.row_bytes,
		         tasks.first % parts, lane);
		ranks = f.ranks(tasks.first / parts);
	}
	if (sends && f.publishes())
		f.load_choices();
	u64 epoch = now.epoch();
	if (!now.begins())
		return;
	// Peers hear of the call, and of counts, places and choices.
	epoch -= sends ? 0 : 1;
	if (sends) {
		if (now.advance_by_last())
			wiped.advance(a, epoch);
		begin_landing(a, epoch);
		if (blockIdx.x == 0 && threadIdx.x < n)
			signal_begin(a, threadIdx.x, epoch, 1);
		if (f.publishes())
			f.publish(epoch);
	}
	// The other blocks send rows, each as packets to all of its ranks, without a wait for anybody.
	u32 flag = Wire::flag(epoch);
#pragma unroll 1
	for (u32 task = tasks.first; task < count; task += tasks.step) {
		u32 t = task / parts, part = task - t * parts;
		if (task != tasks.first) {
			row.load(a.send.x + static_cast<u64>(t) * a.row_bytes, a.row_bytes, part, lane);
			ranks = f.ranks(t);
		}
		Wire x;
		x.make(row, lane, a.mode);
#pragma unroll 1
		for (u64 left = ranks; left != 0; left &= left - 1)
			x.write_packets(row_place(a, __ffsll(left) - 1, a.world.rank, t, epoch), part,
			                Wire::used(a.row_bytes, part, lane), lane, flag);
		if (part == 0 && !Wire::scaled && a.scale_words != 0)
			send_scales(a, t, ranks, epoch, lane);
	}
	release_stream();
	if ((a.mode & SW_DISPATCH_RECEIVE) == 0)
		return;
	// The receiving half.
	taker t(a, b.take, reinterpret_cast<u8 *>(memory), epoch);
	__syncthreads();
	wait w;
	w.epoch = epoch;
	few_receiver<Wire, by_expert> in(a, t, w, epoch, wiped.token(a, epoch, sends));
	u64 word, place;
	// A warp looks for ranks that make another call, which tell nothing else.
	if (blockIdx.x == (gridDim.x > 2 ? 1 : 0) && threadIdx.x >= blockDim.x - 32) {
#pragma unroll 1
		for (u32 p = lane; p < n; p += 32)
			if (!await_begin(a, p, epoch, word, place))
				end_waits(a, epoch);
		if (cached)
			in.wipe_cached();
	}
	// Each block works out where rows by expert begin.
	if constexpr (by_expert)
		if (!t.prepare())
			return;
	// The first block hears how many rows come and publishes what the caller wants to know.
	if (blockIdx.x == 0) {
		rows_receiver counts{a, b.take.sum, epoch};
		bool good = true;
		if (threadIdx.x < n) {
			good = await_done(a, threadIdx.x, 0, epoch, word);
			if (good && is_bad(word))
				complain(a, threadIdx.x, word, epoch), good = false;
			b.take.sum[threadIdx.x] = rows_of(word);
			if (!good)
				end_waits(a, epoch);
		} else if (threadIdx.x >= SW_MAX_RANKS && !by_expert && !cached) {
			good = counts.publish_counts(threadIdx.x - SW_MAX_RANKS, blockDim.x - SW_MAX_RANKS);
		}
		if (__syncthreads_or(!good))
			return;
		if (!cached && !by_expert)
			counts.publish_ranks();
		if (!cached && by_expert && threadIdx.x < n)
			state::arrived(a)[threadIdx.x] = b.take.sum[threadIdx.x];
	}
	// The others put rows where they belong, as they come.
	in.run(cached);
}

} // namespace sw
