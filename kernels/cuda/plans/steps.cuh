// The steps of a plan, as one block does them.
//
// The kernel calls this. Reads and writes the chunks that the steps name, in this rank's memory and in peers', signals
// peers' semaphores and waits for its own.
#pragma once

#include "../allreduce/folds.cuh"
#include "places.cuh"

namespace sw {

struct plan_board {
	plan_places at;
	sw_plan_step steps[SW_PLAN_STEPS];
	fold_table folds[2]; // in turns: one is made while warps may still work with the other
};

struct plan_run {
	const sw_plan_args &a;
	const sw_world &w;
	u64 epoch;
	plan_board &b;
	u32 warp, lane, warps;
	u32 part = 0;       // of the call
	u32 fold_turn = 0;  // of reductions
	bool good = true;   // what thread 0 knows: it has not given up
	bool moved = false; // data, since the threads have met
	bool fenced = true; // thread 0, since data was moved or a signal was awaited

	__device__ __forceinline__ plan_run(const sw_plan_args &a, u64 epoch, plan_board &b, u32 warp, u32 lane)
	    : a(a), w(a.reduce.world), epoch(epoch), b(b), warp(warp), lane(lane), warps(blockDim.x / 32)
	{
	}

	// The threads meet. False when thread 0 has given up.
	__device__ __forceinline__ bool meet_threads()
	{
		moved = false;
		return __syncthreads_or(!good) == 0;
	}

	// The line of a semaphore for signals of this block of rank src, in the segment of dst.
	__device__ __forceinline__ line semaphore(u32 dst, u32 src, u32 number) const
	{
		u64 index = (src * static_cast<u64>(a.semaphores) + number) * a.reduce.lines + blockIdx.x;
		return {segment(w, dst) + a.block.semaphores + index * SW_LINE_BYTES};
	}

	__device__ __forceinline__ void copy(u64 to, u64 from, i64 bytes) const
	{
		pace when;
		when.moved = moved_word(w, w.rank);
		if (bytes > 0 && to != from)
			move(to, from, bytes, warp, warps, lane, when);
	}

	// Copies this part of this rank's input to its slots.
	__device__ __forceinline__ void expose_input()
	{
		for (u32 chunk = 0; chunk < a.inputs; chunk++) {
			stretch s = b.at.of(a, chunk % a.chunks, part);
			copy(b.at.slot(a, a.block.inputs, chunk), a.reduce.src + plan_places::begin(a, chunk) + s.low,
			     s.high - s.low);
		}
		moved = true, fenced = false;
	}

	// Copies this part of the output out of its slots.
	__device__ __forceinline__ void fetch_output()
	{
		for (u32 chunk = 0; chunk < a.outputs; chunk++) {
			stretch s = b.at.of(a, chunk % a.chunks, part);
			copy(a.reduce.dst + plan_places::begin(a, chunk) + s.low, b.at.slot(a, a.block.outputs, chunk),
			     s.high - s.low);
		}
		moved = true, fenced = false;
	}

	// Returns when all ranks have come here. False when the wait was given up.
	__device__ __forceinline__ bool meet_ranks()
	{
		__syncthreads();
		bool all = true;
		u32 last = a.semaphores - 1;
		u64 number = seq(epoch, part + 1);
		if (warp == 0) {
			fence_acq_rel_sys();
			for (u32 p = lane; p < w.size; p += 32)
				if (p != w.rank)
					semaphore(p, w.rank, last).signal(number);
			for (u32 p = lane; p < w.size; p += 32)
				if (p != w.rank && !semaphore(w.rank, p, last).await(w, p, epoch, number))
					all = false;
		}
		moved = false, fenced = false;
		return __syncthreads_or(!all) == 0;
	}

	__device__ __forceinline__ u64 number_of(const sw_plan_step &s) const
	{
		return seq(epoch, part * s.total + s.number);
	}

	// A signal, or a wait: thread 0 does them all.
	__device__ __forceinline__ void synchronize(const sw_plan_step &s)
	{
		if (moved)
			meet_threads();
		if (threadIdx.x != 0 || !good)
			return;
		if (s.kind == SW_PLAN_WAIT) {
			good = semaphore(w.rank, s.peer, s.semaphore).await(w, s.peer, epoch, number_of(s));
			fenced = false;
			return;
		}
		if (!fenced)
			fence_acq_rel_sys(); // X4, also of what peers have told this rank
		fenced = true;
		semaphore(s.peer, w.rank, s.semaphore).signal(number_of(s));
	}

	// Makes the table of a reduction. A warp.
	__device__ __forceinline__ void make_fold(fold_table &t, const sw_plan_step &s, const u32 *words, i64 low) const
	{
		u64 to = b.at.address(a, plan_place{s.to}, low);
		bool odd = (to & 15) != 0;
		for (u32 i = lane; i < s.rows; i += 32) {
			t.from[i] = b.at.address(a, plan_place{__ldg(words + s.first + i)}, low);
			odd = odd || (t.from[i] & 15) != 0;
		}
		odd = __any_sync(~0u, odd) != 0;
		if (lane != 0)
			return;
		u32 op = call_op(a.reduce);
		if (op == SW_OP_AVG && s.last == 0)
			op = SW_OP_SUM;
		t.to[0] = to, t.from_staged = 0, t.to_staged = 0, t.rows = s.rows, t.targets = 1;
		t.aligned = !odd, t.type = call_type(a.reduce), t.op = op, t.moved = moved_word(w, w.rank);
		t.end = ending(op, w.size);
	}

	// Moves a chunk, or combines several. False when thread 0 has given up.
	__device__ __forceinline__ bool move_chunk(const sw_plan_step &s, const u32 *words)
	{
		stretch at = b.at.of(a, s.chunk, part);
		i64 bytes = at.high - at.low;
		fold_table &t = b.folds[fold_turn & 1];
		if (s.kind == SW_PLAN_REDUCE) {
			fold_turn++;
			if (warp == 0)
				make_fold(t, s, words, at.low);
		}
		if (!meet_threads())
			return false;
		if (s.kind == SW_PLAN_REDUCE)
			fold(t, {0, 0, bytes, warp, warps, lane, pace(), 0});
		else
			copy(b.at.address(a, plan_place{s.to}, at.low),
			     b.at.address(a, plan_place{__ldg(words + s.first)}, at.low), bytes);
		moved = true, fenced = false;
		return true;
	}

	// All steps for one part of the chunks. False when this block gives up.
	__device__ __forceinline__ bool run_steps()
	{
		const auto *steps = reinterpret_cast<const sw_plan_step *>(own_segment(w) + a.program);
		const auto *words = reinterpret_cast<const u32 *>(steps + a.steps);
		for (u32 first = 0; first < a.steps; first += SW_PLAN_STEPS) {
			u32 n = min(a.steps - first, static_cast<u32>(SW_PLAN_STEPS));
			if (!meet_threads()) // none looks at the steps before any more
				return false;
			for (u32 i = threadIdx.x; i < n; i += blockDim.x)
				b.steps[i] = steps[first + i];
			__syncthreads();
			for (u32 i = 0; i < n; i++) {
				const sw_plan_step &s = b.steps[i];
				if (s.kind == SW_PLAN_SIGNAL || s.kind == SW_PLAN_WAIT)
					synchronize(s);
				else if (!move_chunk(s, words))
					return false;
			}
		}
		return meet_threads();
	}

	__device__ __forceinline__ void run()
	{
		bool exposes = plan_places::stages(a.reduce.src_place),
		     fetches = plan_places::stages(a.reduce.dst_place);
		bool exposed = b.at.staged[SW_PLAN_INPUT] != 0; // anybody's input
		u32 parts = b.at.parts;
		for (; part < parts; part++) {
			if (exposes)
				expose_input();
			if ((part > 0 || exposed) && !meet_ranks())
				return;
			if (!run_steps())
				return;
			if (fetches)
				fetch_output();
		}
	}
};

} // namespace sw
