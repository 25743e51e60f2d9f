// A dispatch of few tokens in one kernel.
//
// dispatch_few and its kin call this.
#pragma once

#include "../rows/receiver.cuh"
#include "receive.cuh"
#include "send.cuh"

namespace sw {

// Finds where the rows of each rank begin in an output without gaps, and this rank's in those of others. All threads of
// a block. False when a wait was given up or an output is too small, which all blocks find alike.
__device__ __forceinline__ bool few_place(few_board &b, taker &t)
{
	const sw_dispatch_args &a = t.a;
	u32 n = a.world.size, me = a.world.rank;
	if (t.cached) {
		if (threadIdx.x < n)
			b.take.first[threadIdx.x] = first_row(a, state::arrived(a), threadIdx.x);
		__syncthreads();
		return true;
	}
	if (threadIdx.x < n)
		b.take.total[threadIdx.x] = b.take.from[threadIdx.x] = b.before[threadIdx.x] = 0;
	__syncthreads();
	bool good = each_rank_total(a, t.epoch, [&](u32 src, u32 d, u32 rows) {
		atomicAdd(&b.take.total[d], rows);
		if (src < me)
			atomicAdd(&b.before[d], rows);
		if (d == me)
			b.take.from[src] = rows;
	});
	if (__syncthreads_or(!good))
		return false;
	good = threadIdx.x != 0 || all_fit(a, b.take.total, t.epoch);
	if (threadIdx.x < n)
		b.take.first[threadIdx.x] = first_row(a, b.take.from, threadIdx.x);
	return !__syncthreads_or(!good);
}

// Takes what comes. All threads of each block. False where a block does not know where rows go.
template <typename Wire, bool by_expert>
__device__ __forceinline__ bool few_take(few_board &b, const few_sender &f, taker &t, few_receiver<Wire, by_expert> &in)
{
	const sw_dispatch_args &a = t.a;
	u32 lane = threadIdx.x & 31, n = a.world.size;
	u64 epoch = t.epoch, word, place;
	// A warp looks for ranks that make another call, which tell nothing else.
	if (blockIdx.x == (gridDim.x > 2 ? 1 : 0) && threadIdx.x >= blockDim.x - 32) {
#pragma unroll 1
		for (u32 p = lane; p < n; p += 32) {
			bool gone = (t.out >> (p & 31) & 1) != 0;
			if (!gone && !await_begin(a, p, epoch, word, place, gone) && !gone)
				end_waits(a, epoch);
		}
		if (t.cached)
			in.wipe_cached();
	}
	// Each block works out where rows begin, unless each rank has a part of its own.
	if constexpr (by_expert) {
		if (!t.prepare()) {
			if (blockIdx.x == 0)
				taker::tell_none(a);
			return false;
		}
	} else if ((a.mode & SW_DISPATCH_COMPACT) != 0) {
		if (!few_place(b, t))
			return false;
		if (!t.cached && f.tells_rows())
			f.place();
	}
	in.lost |= t.out;
	// The first block hears how many rows come and publishes what the caller wants to know.
	if (blockIdx.x == 0) {
		rows_receiver counts{a, b.take.sum, epoch};
		bool good = true;
		u32 out;
		do { // again where a rank was masked before it had told all
			out = in.lost;
			u32 missing = 0;
			if (threadIdx.x < n) {
				bool gone = (out >> (threadIdx.x & 31) & 1) != 0;
				word = 0;
				if (!gone) {
					good = await_rows_of(a, threadIdx.x, 0, epoch, ~0u, word, gone);
					missing = gone ? 1u << (threadIdx.x & 31) : 0;
				}
				if (good && is_bad(word))
					complain(a, threadIdx.x, epoch), good = false;
				b.take.sum[threadIdx.x] = rows_of(word);
				if (!good)
					end_waits(a, epoch);
			} else if (threadIdx.x >= SW_MAX_RANKS && !by_expert && !t.cached) {
				good = counts.publish_counts(threadIdx.x - SW_MAX_RANKS, blockDim.x - SW_MAX_RANKS, out,
				                             missing);
			}
			if (missing != 0) {
				masks::lose(a, missing);
				atomicOr(&b.gone, missing);
			}
			if (__syncthreads_or(!good))
				return true;
			if (masks::on(a))
				in.lost |= b.gone;
		} while (masks::on(a) && !by_expert && in.lost != out);
		if (!t.cached && !by_expert)
			counts.publish_ranks();
		if (!t.cached && by_expert && threadIdx.x < n)
			state::arrived(a)[threadIdx.x] = b.take.sum[threadIdx.x];
	}
	// The others put rows where they belong, as they come.
	in.run(t.cached);
	return true;
}

// Makes what has come of ranks that were masked in the call as if nothing had, where the caller can see it. The last
// block that is through.
template <bool by_expert> __device__ __forceinline__ void few_forget(taker &t, u32 ranks)
{
	const sw_dispatch_args &a = t.a;
	u32 n = a.world.size, me = a.world.rank;
#pragma unroll 1
	for (u32 src = 0; src < n; src++) {
		if ((ranks >> src & 1) == 0)
			continue;
		if (threadIdx.x == 0) {
			a.out.rank_counts[src] = 0;
			state::arrived(a)[src] = 0;
			if (a.send.mapped != 0)
				mapped_words(a, by_expert ? 2 * a.local + 1 : a.local + n + 1)[src] = 0;
		}
		if constexpr (by_expert) {
			if ((t.out >> src & 1) == 0)
#pragma unroll 1
				for (u32 slot = 0; slot < a.local; slot++) {
					u32 first = t.base[src * a.local + slot];
					clear_rows(a, first,
					           first + static_cast<u32>(load_relaxed_sys(
							       slot_count(a, me, src, a.first[me] + slot, t.epoch))),
					           slot);
				}
		} else {
			pair64 told = load16_relaxed_sys(done_word(a, me, src, 0, t.epoch));
			u32 first = src * a.max_tokens;
			clear_rows(a, first, first + (told.a == t.epoch && !is_bad(told.b) ? rows_of(told.b) : 0), 0);
		}
	}
	if (a.send.landed == 0)
		return;
	__syncthreads();
#pragma unroll 1
	for (u32 slot = threadIdx.x; slot < a.local; slot += blockDim.x) {
		fence_acq_rel_sys();
		static_cast<volatile u32 *>(a.send.landed)[slot] = t.count[slot];
	}
}

// The receiving half of a dispatch, or the whole of its second half.
template <typename Wire, bool by_expert>
__device__ __forceinline__ void few_receive(few_board &b, const few_sender &f, u64 *memory, u64 epoch, u32 wiped)
{
	const sw_dispatch_args &a = f.a;
	taker t(a, b.take, reinterpret_cast<u8 *>(memory), epoch);
	if (masks::on(a)) {
		t.out = b.out;
		if (threadIdx.x == 0)
			b.gone = 0;
	}
	__syncthreads();
	wait w;
	w.epoch = epoch;
	few_receiver<Wire, by_expert> in(a, t, w, epoch, wiped);
	bool knows = few_take(b, f, t, in);
	if (!masks::on(a))
		return;
	u32 lost = masks::through(a, &b.out);
	if ((lost & masks::all) != 0 && knows)
		few_forget<by_expert>(t, lost & masks::all);
}

// A dispatch of few tokens, or one of its halves.
template <typename Wire, bool by_expert>
__device__ __forceinline__ void few_dispatch(const sw_dispatch_args &a, few_board &b, u64 *memory)
{
	bool sends = (a.mode & SW_DISPATCH_SEND) != 0, cached = (a.mode & SW_DISPATCH_CACHED) != 0;
	u32 lane = threadIdx.x & 31, n = a.world.size, parts = Wire::parts(a.row_bytes),
	    count = sends ? a.tokens * parts : 0;
	// While the kernel before runs: shared memory, and whose turn it is. Some blocks publish where tokens go.
	few_sender f(a, b, memory);
	few_tasks tasks(0, gridDim.x > 1 && !cached ? gridDim.x - few_sender::publishers(cached) : gridDim.x);
	if (sends)
		f.clear();
	__syncthreads();
	call now = call::open(a.world);
	if (masks::on(a)) {
		u64 epoch = sends ? now.epoch() : now.begun();
		if (threadIdx.x == 0)
			b.out = epoch != 0 ? masks::left_out(a, epoch) : 0;
		__syncthreads();
		f.out = b.out;
	}
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
	if (!now.begins()) {
		if (by_expert && blockIdx.x == 0)
			taker::tell_none(a);
		return;
	}
	// Peers hear of the call, and of counts, places and choices.
	epoch -= sends ? 0 : 1;
	if (sends && now.advance_by_last())
		wiped.advance(a, epoch);
	if (!f.goes_on(a.world.rank)) {
		if (threadIdx.x == 0)
			give_up(a.world, SW_FAULT_MASKED, a.world.rank, epoch, sends);
		return;
	}
	if (sends) {
		begin_landing(a, epoch);
		if (blockIdx.x == 0 && threadIdx.x < n && f.goes_on(threadIdx.x))
			signal_begin(a, threadIdx.x, epoch, 1);
		if (f.publishes())
			f.publish(epoch);
	}
	// The other blocks send rows, each as packets to all of its ranks, without a wait for anybody. Each begins with
	// another rank, since the links of one do not carry what all of them have.
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
		u64 before = (1ull << (a.world.rank + task) % n) - 1;
#pragma unroll 1
		for (u64 left = ranks & ~before, rest = ranks & before; (left | rest) != 0; left &= left - 1) {
			if (left == 0)
				left = rest, rest = 0;
			x.write_packets(row_place(a, __ffsll(left) - 1, a.world.rank, t, epoch), part,
			                Wire::used(a.row_bytes, part, lane), lane, flag);
		}
		if (part == 0 && !Wire::scaled && a.scale_words != 0)
			send_scales(a, t, ranks, epoch, lane);
	}
	release_stream();
	if ((a.mode & SW_DISPATCH_RECEIVE) == 0)
		return;
	few_receive<Wire, by_expert>(b, f, memory, epoch, wiped.token(a, epoch, sends));
}

} // namespace sw
