// The queue from the kernels of a rank to its proxy, which puts bytes to ranks of other hosts and signals behind them.
//
// A descriptor says which bytes of this rank's segment of the rail, in pinned host memory, go where. Any thread of any
// block may post one. The proxy reads them in the order of their numbers, so puts that one thread posts leave in its
// order. Puts that name one word are counted there in that order, each once its bytes have landed with all before it:
// that word lies in the receiver's segment of the rail, and its kernels wait for it as for any line (lines.cuh).
//
// Calls: threads that send. Writes the queue's descriptors, and two words in memory of the GPU.
#pragma once

#include "../../internal/cuda/layout/rails.h"
#include "lines.cuh"

namespace sw {

struct put_queue {
	const sw_queue &q;

	__device__ __forceinline__ u64 done_word() const { return q.head + SW_QUEUE_DONE; }
	__device__ __forceinline__ u64 slot(u64 number) const
	{
		return q.head + SW_QUEUE_HEAD_BYTES + (number - 1) % q.slots * SW_PUT_BYTES;
	}

	// Waits until the bytes of a descriptor, and of all before it, may be written again. One thread. A proxy that
	// does not come to that is this rank's fault: the record names this rank. False when the wait was given up.
	__device__ __forceinline__ bool await_done(const sw_world &w, u64 epoch, u64 number) const
	{
		u64 known = q.next + 8, now = load_acquire_sys(known);
		if (now >= number)
			return true;
		wait s;
		if (!sw::await(s, w, w.rank, epoch, true,
		               [&] { return (now = load_acquire_sys(done_word())) >= number; }))
			return false;
		// Others ask here first, because the way to the host takes long. The fence has them see what the proxy
		// did.
		fence_acq_rel_sys();
		atomicMax(reinterpret_cast<unsigned long long *>(known), static_cast<unsigned long long>(now));
		return true;
	}

	// Leaves a put to the proxy, behind a barrier after the stores of its bytes. One thread. Its number, from 1; 0
	// when the wait for a slot was given up, after which the queue goes no further.
	__device__ __forceinline__ u64 post(const sw_world &w, u64 epoch, const sw_put &p) const
	{
		auto *next = reinterpret_cast<unsigned long long *>(q.next);
		u64 number = atomicAdd(next, 1ull) + 1, at = slot(number);
		if (number > q.slots && !await_done(w, epoch, number - q.slots))
			return 0;
		store16_relaxed_sys(at, p.place, p.source);
		store16_relaxed_sys(at + 16, static_cast<u64>(p.bytes), p.signal);
		store_relaxed_sys(at + offsetof(sw_put, peer), p.peer);
		fence_acq_rel_sys(); // X4: the bytes and the descriptor come before its number
		store_relaxed_sys(at + SW_PUT_NUMBER, number);
		return number;
	}

	// The kernel ends, and posts nothing more. One thread of it, behind all of its posts.
	__device__ __forceinline__ void end_kernel() const
	{
		u64 ran = q.head + SW_QUEUE_RAN;
		fence_acq_rel_sys();
		store_relaxed_sys(ran, load_relaxed_sys(ran) + 1);
	}
};

} // namespace sw
