// Calls that go on without ranks. Each rank has a mask word in its own segment: bit r says that rank r is masked, bit
// SW_MASK_ENDED+r that its process has ended, too. Any rank sets bits, by a kernel of its own; a rank's host also tells
// its own kernels, in pinned memory. Waits look at the word and go on without a masked rank.
//
// Kernels of few tokens need no agreement on who takes part in a call: what a rank sends depends on nobody, and a place
// for packets has one writer, so a masked rank that lives on disturbs nobody. Only the blocks of one rank have to be of
// one mind. A word says for each call whom they do without: ranks that are masked at the dispatch's beginning, and of
// those that are masked later the ones whose counts have not all come. Blocks note other data that is missing in
// `lost`, and the last block that is through a call makes what it has of those ranks as if nothing had come.
//
// All ranks take a rank in behind the same combine: the first that is through it decides, by a compare-and-swap on a
// word of rank 0's segment, which stays mapped when rank 0 is gone. One word is enough: a rank that is through combine
// e+1 knows that all others have begun it, and so are through e. A rank asks for it after it has seen its own bit,
// which is set last, so by then it is masked on all ranks.
//
// Kernels for few tokens call this, and the waits of signals.cuh. It touches struct sw_mask of all ranks.
#pragma once

#include "state.cuh"

namespace sw {

namespace masks {

constexpr u32 all = (1u << SW_MASKED_RANKS) - 1;

// Kernels of dispatch.cu know no masks, so that nothing is on the way of a call without.
#ifdef SW_DISPATCH_MASKS
__device__ __forceinline__ bool on(const sw_dispatch_args &a) { return a.masks != 0; }
#else
__device__ __forceinline__ constexpr bool on(const sw_dispatch_args &) { return false; }
#endif
__device__ __forceinline__ sw_mask *of(const sw_world &w, u64 place, u32 rank)
{
	return view<sw_mask>(segment(w, rank) + place);
}
__device__ __forceinline__ sw_mask *own(const sw_dispatch_args &a)
{
	return view<sw_mask>(own_segment(a.world) + a.masks);
}
__device__ __forceinline__ u64 address(const void *word) { return reinterpret_cast<u64>(word); }

using word = unsigned long long;

__device__ __forceinline__ u64 cas(u64 *p, u64 expected, u64 v)
{
	return atomicCAS_system(reinterpret_cast<word *>(p), static_cast<word>(expected), static_cast<word>(v));
}
__device__ __forceinline__ void set(u64 *p, u64 bits)
{
	atomicOr_system(reinterpret_cast<word *>(p), static_cast<word>(bits));
}
__device__ __forceinline__ void keep(u64 *p, u64 bits)
{
	atomicAnd_system(reinterpret_cast<word *>(p), static_cast<word>(bits));
}

// The mask word of this rank. Later reads see what there was when it was set, or what came later.
__device__ __forceinline__ u64 now(const sw_dispatch_args &a) { return load_acquire_sys(address(&own(a)->mask)); }

// Whether waits go on without a peer. The caller looks once more at what it waits for.
__device__ __forceinline__ bool without(const sw_dispatch_args &a, u32 peer)
{
	return on(a) && peer != a.world.rank && (now(a) >> peer & 1) != 0;
}

// Takes in what this rank's host wants to be masked.
__device__ __noinline__ void take_requests(const sw_dispatch_args &a)
{
	const volatile sw_mask_requests *told = view<const volatile sw_mask_requests>(a.requests);
	sw_mask *m = own(a);
	u32 total = told->total;
	if (total == *const_cast<volatile u32 *>(&m->total))
		return;
	__threadfence_system();
	u64 ended = told->ended;
#pragma unroll 1
	for (u32 r = 0; r < a.world.size; r++) {
		u32 number = told->number[r];
		if (atomicMax(&m->seen[r], number) < number)
			set(&m->mask, 1ull << r | (ended >> r & 1) << (SW_MASK_ENDED + r));
	}
	atomicMax(&m->total, total);
}

__device__ __noinline__ bool look(const sw_dispatch_args &a, wait &w)
{
	if (w.polls % host_polls == 0)
		take_requests(a);
	if ((now(a) >> a.world.rank & 1) == 0)
		return true;
	return w.end(SW_FAULT_MASKED);
}

// wait::slow of a call that can go on without ranks: also ends when this rank is masked.
__device__ __forceinline__ bool slow(const sw_dispatch_args &a, wait &w)
{
	return w.slow(a.world) && (!on(a) || !w.looked() || look(a, w));
}

// A lane's wait for a peer's data, which ends without it when the peer is masked.
struct patient {
	bool last = false, gone = false; // gone: it has ended without the data

	// After a failed poll. False when the wait is over.
	__device__ __forceinline__ bool more(const sw_dispatch_args &a, wait &w, u32 peer)
	{
		if (last) {
			gone = true;
			return false;
		}
		last = without(a, peer);
		return slow(a, w);
	}
};

// Notes that data of ranks is missing.
__device__ __forceinline__ void lose(const sw_dispatch_args &a, u32 ranks)
{
	if (ranks != 0)
		atomicOr(&own(a)->lost, ranks);
}

// The word `call`: whom this rank does without, who is masked and has told all of its counts, and the call's number.
__device__ __forceinline__ u32 out_of(u64 call) { return static_cast<u32>(call) & all; }
__device__ __forceinline__ u32 in_of(u64 call) { return static_cast<u32>(call >> SW_MASKED_RANKS) & all; }

// Whom a dispatch does without from its beginning: the same for all threads and blocks, also of its second half.
__device__ __forceinline__ u32 left_out(const sw_dispatch_args &a, u64 epoch)
{
	u64 *call = &own(a)->call, seen = load_relaxed_sys(address(call)), mine = epoch << 32 | (now(a) & all);
	if (seen >> 32 == static_cast<u32>(epoch))
		return out_of(seen);
	u64 before = cas(call, seen, mine);
	return out_of(before == seen ? mine : before);
}

// Whom a dispatch does without after a block has read the counts of all, but for those of ranks in `missing`, which are
// masked: who has not told all of its counts before it was masked. One thread, behind the reads.
__device__ __forceinline__ u32 decide(const sw_dispatch_args &a, u32 missing)
{
	__threadfence();
	u64 *call = &own(a)->call, seen = load_relaxed_sys(address(call));
	u32 masked = static_cast<u32>(now(a)) & all;
#pragma unroll 1
	for (u32 open; (open = masked & ~(out_of(seen) | in_of(seen))) != 0;) {
		u64 next = seen | (open & missing) | static_cast<u64>(open & ~missing) << SW_MASKED_RANKS,
		    before = cas(call, seen, next);
		seen = before == seen ? next : before;
	}
	__threadfence();
	return out_of(seen);
}

constexpr u32 is_last = 1u << 31;

// The end of a call's kernel: all threads of each block come here. is_last in the last one, with the ranks of which
// some block misses data.
__device__ __forceinline__ u32 through(const sw_dispatch_args &a, u32 *shared)
{
	__syncthreads();
	if (threadIdx.x == 0) {
		sw_mask *m = own(a);
		bool last = add_acq_rel_gpu(&m->ended, 1) == gridDim.x - 1;
		if (last)
			m->ended = 0;
		*shared = last ? atomicExch(&m->lost, 0u) | is_last : 0;
	}
	__syncthreads();
	return *shared;
}

// The word `taken` has the number of a combine, the ranks that are taken in behind it, and all that take part then.
__device__ __forceinline__ u32 call_of(u64 taken) { return static_cast<u32>(taken >> 32); }

// Takes in the ranks that ask for it, behind a combine. One thread, when this rank is through the call. A rank that
// knows of no masked one decides, too: else a later rank could take in who is masked here only afterwards.
__device__ __noinline__ void take_in(const sw_dispatch_args &a, u64 epoch)
{
	u64 mask = now(a);
	u32 masked = static_cast<u32>(mask) & all, ended = static_cast<u32>(mask >> SW_MASK_ENDED), asking = 0;
#pragma unroll 1
	for (u32 p = 0; p < a.world.size; p++)
		if ((masked & ~ended) >> p & 1 && load_relaxed_sys(address(&of(a.world, a.masks, p)->asks)) != 0)
			asking |= 1u << p;
	u32 members = ((1u << a.world.size) - 1) & ~masked, number = static_cast<u32>(epoch);
	u64 *taken = &of(a.world, a.masks, 0)->taken, seen = load_relaxed_sys(address(taken)),
	    mine = epoch << 32 | asking << SW_MASKED_RANKS | members | asking;
#pragma unroll 1
	while (static_cast<int>(call_of(seen) - number) < 0) {
		u64 before = cas(taken, seen, mine);
		seen = before == seen ? mine : before;
	}
	if (call_of(seen) != number)
		return;
	u64 *own_mask = &own(a)->mask;
	mask = now(a);
#pragma unroll 1
	for (u64 before;; mask = before) { // one that has ended by now stays masked
		before = cas(own_mask, mask,
		             mask & ~static_cast<u64>(in_of(seen) & ~static_cast<u32>(mask >> SW_MASK_ENDED)));
		if (before == mask)
			return;
	}
}

// Sets bits in the mask words of all ranks, last in that of the rank which is masked. One thread.
__device__ __forceinline__ void tell(const sw_mask_args &a)
{
	sw_mask *m = of(a.world, a.masks, a.world.rank);
	atomicMax(&m->seen[a.rank], a.number);
	atomicMax(&m->total, a.total);
#pragma unroll 1
	for (u32 r = 0; r < a.world.size; r++)
		if (r != a.rank)
			set(&of(a.world, a.masks, r)->mask, a.bits);
	__threadfence_system();
	set(&of(a.world, a.masks, a.rank)->mask, a.bits);
}

// Has this rank take part again, from the call behind that of a.epoch on. No other kernel of its runs. One thread.
__device__ __forceinline__ void join(const sw_mask_args &a)
{
	sw_mask *m = of(a.world, a.masks, a.world.rank);
	sw_control *c = view<sw_control>(own_segment(a.world) + a.control);
	c->epoch = a.epoch, c->readers = 0, c->fault = SW_FAULT_NONE;
	m->lost = m->ended = 0;
	store_relaxed_sys(address(&m->asks), 0);
	u64 ended = static_cast<u64>(~0u) << SW_MASK_ENDED;
	keep(&m->mask, a.bits | ended);
	set(&m->mask, a.bits);
}

} // namespace masks

} // namespace sw
