// The ground of the kernels of all families: ordered memory accesses, waiting with a deadline, faults, copies of any
// alignment.
#pragma once

#include "../../internal/cuda/layout/args.h"

namespace sw {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

struct pair64 {
	u64 a, b;
};

} // namespace sw

#ifdef SW_EMULATED
#include SW_EMULATED // these words for a processor: testdata/emulate
#else
#include "ptx.cuh"
#endif

namespace sw {

constexpr u32 chunk_bits = SW_CHUNK_BITS;

__device__ __forceinline__ u64 seq(u64 epoch, u64 chunk) { return epoch << chunk_bits | chunk; }
__device__ __forceinline__ u64 last_seq(u64 epoch) { return epoch << chunk_bits | ((1u << chunk_bits) - 1); }

// This rank's segment, and any rank's. Where the heap's segments do not lie at equal distances, base is set so that
// this rank's lies right, and the others are in a table, which does not change.
__device__ __forceinline__ u64 own_segment(const sw_world &w) { return w.base + w.rank * w.stride; }

__device__ __forceinline__ u64 segment(const sw_world &w, u32 rank)
{
	if (w.segments != 0)
		return __ldg(reinterpret_cast<const unsigned long long *>(w.segments) + rank);
	return w.base + rank * w.stride;
}

// The distance from segment(w, peer) to a place that peer has told. Mostly it is the place itself. A place of
// memory that is registered but not mapped in the segment names a row of the alias table instead: its address, here, by
// rank.
__device__ __forceinline__ u64 resolve(const sw_world &w, u32 peer, u64 place)
{
	if (place >> 62 != 1) // also SW_NOWHERE
		return place;
	u64 row = (place & ~(1ull << 62)) >> SW_ALIAS_SHIFT, offset = place & ((1ull << SW_ALIAS_SHIFT) - 1);
	return load_relaxed_sys(own_segment(w) + SW_ALIAS_OFFSET + (row * w.size + peer) * 8) + offset -
	       segment(w, peer);
}

// Whether a fault is one of a single call: the ranks disagree, or their data is refused.
__device__ __forceinline__ bool of_one_call(u32 kind) { return kind == SW_FAULT_MISMATCH || kind >= SW_FAULT_ORDER; }

constexpr u32 slow_polls = 256;  // of a wait between two looks at the clock and the abort word
constexpr u32 host_polls = 8192; // and at the host's word
constexpr u32 moved_looks = 8;   // of a wait, until its deadline, at what the ranks have moved; below 16

__device__ __forceinline__ u64 moved_word(const sw_world &w, u32 rank)
{
	return segment(w, rank) + w.control + offsetof(sw_control, moved);
}

// This rank moves bytes. One thread.
__device__ __forceinline__ void tell_moved(u64 word) { store_relaxed_sys(word, now_ns()); }

// A number that differs once any rank has moved bytes of the communicator's calls: a multiple of 16, never 0.
__device__ __forceinline__ u32 all_moved(const sw_world &w)
{
	u64 sum = 0;
#pragma unroll 1
	for (u32 p = 0; p < w.size; p++)
		sum += load_relaxed_sys(moved_word(w, p));
	return static_cast<u32>(sum) << 4 | 1u << 31;
}

// A wait polls; slow() is called after every failed poll and says whether to go on. Clock and abort word are looked at
// once in a while. So is, less often, the host's word, which reaches kernels also while the driver is busy, as it is in
// a thread that frees memory and waits for them. Reading it takes the way to the host: 30,000 threads that do it at
// once need 300 us.
//
// A verdict comes behind a poll that fails after the cause has been seen: what the call waits for may have come before
// the abort, or in the last moment of the deadline.
//
// The deadline measures silence (F1). A rank that moves bytes is alive, though it may signal nothing for long, and so
// is one that waits for such a rank. The bytes of a call are finite, so no wait is endless.
struct wait {
	u32 since = 0; // when it last looked at what the ranks have moved, in 1,024 ns; small, for these lie on stacks
	u32 seen = 0;  // what it saw, and in the last 4 bits how many looks in a row have seen the same
	u32 polls = 0; // with the bit `last` from the time when the wait was found to be over
	u32 kind = SW_FAULT_NONE;
	u64 epoch = 0; // of a reduction: its waits also end when the ranks' calls turn out to differ

	static constexpr u32 last = 1u << 31;

	// Whether the last call of slow has looked at more than the number of polls.
	__device__ __forceinline__ bool looked() const { return polls % slow_polls == 0; }

	// Ends the wait once the caller has polled again.
	__device__ __forceinline__ bool end(u32 why)
	{
		if ((polls & last) == 0) {
			polls = (polls - 1) | last; // the next call of slow comes to the same
			return true;
		}
		kind = why;
		return false;
	}

	__device__ __noinline__ bool slow(const sw_world &w)
	{
		polls++;
		if (!looked())
			return true;
		u64 own = own_segment(w);
		u32 fault = load32_relaxed_gpu(own + w.control + offsetof(sw_control, fault));
		if (fault != SW_FAULT_NONE && !of_one_call(fault)) {
			kind = SW_FAULT_NONE; // somebody of this rank has given up and said why
			return false;
		}
		if (epoch != 0 && load_relaxed_sys(own + w.control + offsetof(sw_control, mismatched)) == epoch) {
			kind = SW_FAULT_NONE;
			return false;
		}
		if (load_relaxed_sys(own + SW_ABORT_OFFSET) != 0 ||
		    (polls % host_polls == 0 && load_relaxed_sys(w.fault + offsetof(sw_fault, stop)) != 0))
			return end(SW_FAULT_ABORTED);
		u32 t = static_cast<u32>(now_ns() >> 10) | 1;
		if (since == 0)
			since = t;
		bool late = (seen & 15) == moved_looks;
		if (!late && static_cast<u64>(t - since) << 10 <= w.timeout_ns / moved_looks)
			return true;
		u32 moved = all_moved(w);
		since = t;
		if (moved != (seen & ~15u)) // so too at the first look
			seen = moved, polls &= ~last;
		else if (late || (++seen & 15) == moved_looks)
			return end(SW_FAULT_TIMEOUT);
		return true;
	}
};

// give_up records the first fault of this rank. A fault of one call gives way to others.
__device__ __noinline__ void give_up(const sw_world &w, u32 kind, u32 peer, u64 epoch, bool sending, u64 sent = 0,
                                     u64 expected = 0, u64 limit = 0, u32 part = 0)
{
	if (kind == SW_FAULT_NONE)
		return;
	u64 own = own_segment(w);
	u32 *first = reinterpret_cast<u32 *>(own + w.control + offsetof(sw_control, fault));
	u32 before = atomicCAS(first, SW_FAULT_NONE, kind);
	if (of_one_call(before) && !of_one_call(kind))
		before = atomicCAS(first, before, kind) == before ? SW_FAULT_NONE : kind;
	if (before != SW_FAULT_NONE)
		return;
	volatile sw_fault *f = reinterpret_cast<sw_fault *>(w.fault);
	f->peer = peer;
	f->epoch = epoch;
	f->sent = sent;
	f->expected = expected;
	f->limit = limit;
	f->sending = sending;
	f->part = part;
	__threadfence_system();
	f->kind = kind;
	__threadfence_system();
}

// A call of a communicator, as its kernel sees it. The number is read as early as possible; then, off the critical
// path, the last block that has read the counter advances it, so no kernel of its own does.
struct call {
	const sw_world &w;
	pair64 v;

	// Asks for the number. Code in front of it runs while the kernel before runs.
	static __device__ __forceinline__ call open(const sw_world &w)
	{
		await_stream();
		return look(w);
	}

	// The same without a wait for the kernel before.
	static __device__ __forceinline__ call look(const sw_world &w)
	{
		// An address that looks different in every lane: the compiler would move a value that is the same in
		// all of them to a uniform register at once, and so wait for it here.
		return {w, load16_relaxed_sys(own_segment(w) + w.control + zero_of_lane())};
	}

	// 0 after an earlier fault: the kernel must do nothing.
	__device__ __forceinline__ u64 epoch() const
	{
		u32 fault = static_cast<u32>(v.b >> 32);
		return fault == SW_FAULT_NONE || of_one_call(fault) ? v.a + 1 : 0;
	}

	// The last call that has begun: that of a kernel which comes behind its call's first half.
	__device__ __forceinline__ u64 begun() const { return v.a; }

	// Whether a block does something, for all of its threads or none: a fault may be written just now. They meet,
	// so what follows is behind the last load.
	__device__ __forceinline__ bool begins() const { return !__syncthreads_or(epoch() == 0); }

	// One thread of a block, after a barrier behind every load of the block. True in the last block.
	__device__ __forceinline__ bool advance() const
	{
		sw_control *c = reinterpret_cast<sw_control *>(own_segment(w) + w.control);
		if (gridDim.x > 1) {
			if (add_acq_rel_gpu(&c->readers, 1) != gridDim.x - 1)
				return false;
			c->readers = 0;
		}
		c->epoch = v.a + 1;
		return true;
	}

	// The same by the last thread of each block.
	__device__ __forceinline__ bool advance_by_last() const { return threadIdx.x == blockDim.x - 1 && advance(); }
};

// The sum of what this lane and those below it bring.
__device__ __forceinline__ u32 running_sum(u32 mine, u32 lane)
{
#pragma unroll
	for (u32 by = 1; by < 32; by *= 2) {
		u32 below = __shfl_sync(~0u, mine, (lane - by) & 31);
		mine += lane >= by ? below : 0;
	}
	return mine;
}

// ---- copies --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u8 load_byte(u64 p) { return *reinterpret_cast<const volatile u8 *>(p); }
__device__ __forceinline__ void store_byte(u64 p, u8 v) { *reinterpret_cast<volatile u8 *>(p) = v; }

// shifted is 16 bytes that begin in `lo` at byte 4*w + r/8.
template <int w> __device__ __forceinline__ uint4 shifted(uint4 lo, uint4 hi, u32 r)
{
	u32 v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
	return make_uint4(__funnelshift_r(v[w], v[w + 1], r), __funnelshift_r(v[w + 1], v[w + 2], r),
	                  __funnelshift_r(v[w + 2], v[w + 3], r), __funnelshift_r(v[w + 3], v[w + 4], r));
}

// copy_shifted copies count vectors to an aligned dst from src, which lies s bytes after a multiple of 16. All vectors
// that it loads must be readable.
template <int w> __device__ __forceinline__ void copy_shifted(u64 dst, u64 src, i64 count, u32 s, u32 tid, u32 threads)
{
	u64 from = src - s;
	u32 r = (s & 3) * 8;
	constexpr int unroll = 4;
	i64 i = tid;
#pragma unroll 1
	for (; i + (unroll - 1) * static_cast<i64>(threads) < count; i += unroll * static_cast<i64>(threads)) {
		uint4 lo[unroll], hi[unroll];
#pragma unroll
		for (int k = 0; k < unroll; k++) {
			lo[k] = load_vector(from + 16 * (i + k * static_cast<i64>(threads)));
			hi[k] = load_vector(from + 16 * (i + k * static_cast<i64>(threads)) + 16);
		}
#pragma unroll
		for (int k = 0; k < unroll; k++)
			store_vector(dst + 16 * (i + k * static_cast<i64>(threads)), shifted<w>(lo[k], hi[k], r));
	}
	for (; i < count; i += threads)
		store_vector(dst + 16 * i, shifted<w>(load_vector(from + 16 * i), load_vector(from + 16 * i + 16), r));
}

// copy_odd is copy for ends that are aligned differently, and for a few bytes.
__device__ __noinline__ void copy_odd(u64 dst, u64 src, i64 n, u32 tid, u32 threads)
{
	if (n < 64) {
		for (i64 i = tid; i < n; i += threads)
			store_byte(dst + i, load_byte(src + i));
		return;
	}
	// 16 bytes or more at each end byte by byte, so that the aligned loads between stay inside the source
	u32 head = 16 + (-static_cast<u32>(dst) & 15);
	i64 count = (n - head) / 16 - 1;
	i64 done = head + 16 * count;
	u32 tail = static_cast<u32>(n - done);
	for (u32 i = tid; i < head + tail; i += threads) {
		i64 at = i < head ? i : done + (i - head);
		store_byte(dst + at, load_byte(src + at));
	}
	u64 from = src + head;
	u32 s = from & 15;
	switch (s >> 2) {
	case 0:
		copy_shifted<0>(dst + head, from, count, s, tid, threads);
		break;
	case 1:
		copy_shifted<1>(dst + head, from, count, s, tid, threads);
		break;
	case 2:
		copy_shifted<2>(dst + head, from, count, s, tid, threads);
		break;
	default:
		copy_shifted<3>(dst + head, from, count, s, tid, threads);
	}
}

} // namespace sw
