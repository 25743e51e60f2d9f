// Where tokens go: the slot of a choice, the rank of a slot, the ranks of a token.
//
// The kernels that send call this. It reads the placement, whose most wanted part a block keeps in shared memory, and
// the choices.
#pragma once

#include "state.cuh"

namespace sw {

// The placement table: C[experts+1], then the slots of all experts, then the expert of each slot.
struct placement {
	const sw_dispatch_args &a;
	const u32 *cache; // of the first experts: the slot, or where its copies are
	u32 out = 0;      // the ranks that the call does without: their copies of experts are passed over
	static constexpr u32 copies = 1u << 31, none = ~0u;

	// All threads of the block, which meet before the first use. The table does not change while calls are under
	// way.
	static __device__ __forceinline__ void fill(const sw_dispatch_args &a, u32 *cache)
	{
		const u32 *c = a.table, *slots = c + a.experts + 1;
		for (u32 e = threadIdx.x; e < min(a.experts, static_cast<u32>(SW_DISPATCH_TABLE)); e += blockDim.x)
			cache[e] = __ldg(c + e + 1) - __ldg(c + e) == 1 ? __ldg(slots + __ldg(c + e)) : copies;
	}

	// The slot for an expert of token t of this rank, none where the call does without all of its copies.
	__device__ __forceinline__ u32 slot(u32 e, u32 t) const
	{
		if (out != 0)
			return elsewhere(e, t);
		if (e < SW_DISPATCH_TABLE && cache[e] != copies)
			return cache[e];
		const u32 *c = a.table;
		u32 first = __ldg(c + e), count = __ldg(c + e + 1) - first;
		return __ldg(c + a.experts + 1 + first + (a.world.rank + t) % count);
	}

	__device__ __noinline__ u32 elsewhere(u32 e, u32 t) const
	{
		const u32 *c = a.table;
		u32 first = __ldg(c + e), count = __ldg(c + e + 1) - first;
#pragma unroll 1
		for (u32 i = 0; i < count; i++) {
			u32 s = __ldg(c + a.experts + 1 + first + (a.world.rank + t + i) % count);
			if ((out >> rank(s) & 1) == 0)
				return s;
		}
		return none;
	}

	__device__ __forceinline__ u32 rank(u32 slot) const
	{
		if (a.send.slots_inverse != 0)
			return __umulhi(slot, a.send.slots_inverse);
		u32 r = 0;
#pragma unroll 1
		while (slot >= a.first[r + 1])
			r++;
		return r;
	}
};

// Choice k of token t; -1 when it is masked.
__device__ __forceinline__ i64 choice(const sw_dispatch_args &a, u32 t, u32 k)
{
	i64 i = static_cast<i64>(t) * a.top_k + k;
	return a.send.index_bytes == 8
	           ? static_cast<i64>(__ldg(reinterpret_cast<const long long *>(a.send.choices) + i))
	           : static_cast<i64>(__ldg(reinterpret_cast<const int *>(a.send.choices) + i));
}

// A choice next to a row in staging: the local slot, and which of its rank's choices for that slot it is. All bits are
// set where a choice is not for the rank.
__device__ __forceinline__ u64 numbered_choice(u32 number, u32 slot) { return static_cast<u64>(number) << 32 | slot; }
__device__ __forceinline__ int slot_in(u64 v) { return static_cast<int>(static_cast<u32>(v)); }
__device__ __forceinline__ u32 number_in(u64 v) { return static_cast<u32>(v >> 32); }

__device__ __forceinline__ bool is_expert(const sw_dispatch_args &a, i64 e) { return e >= 0 && e < a.experts; }

// Calls f with token, number, slot and rank of each choice of `tokens` tokens from the first on that has an expert, by
// all threads of a block, where the call has a rank for it. A choice that is no expert is noted in bad.
template <typename F>
__device__ __forceinline__ void each_choice(const sw_dispatch_args &a, const placement &p, u32 first, u32 tokens,
                                            u64 &bad, F f)
{
	constexpr u32 batch = 4; // of a thread, that are loaded together
	u32 all = tokens * a.top_k;
	u64 from = a.send.choices + static_cast<u64>(first) * a.top_k * a.send.index_bytes;
	bool wide = a.send.index_bytes == 8;
#pragma unroll 1
	for (u32 begin = threadIdx.x; begin < all; begin += batch * blockDim.x) {
		i64 e[batch];
		if (wide)
#pragma unroll
			for (u32 j = 0; j < batch; j++)
				e[j] = begin + j * blockDim.x < all
				           ? static_cast<i64>(__ldg(reinterpret_cast<const long long *>(from) + begin +
				                                    j * blockDim.x))
				           : -1;
		else
#pragma unroll
			for (u32 j = 0; j < batch; j++)
				e[j] = begin + j * blockDim.x < all
				           ? static_cast<i64>(
						 __ldg(reinterpret_cast<const int *>(from) + begin + j * blockDim.x))
				           : -1;
#pragma unroll
		for (u32 j = 0; j < batch; j++) {
			u32 i = begin + j * blockDim.x, t = i / a.top_k, k = i - t * a.top_k;
			if (is_expert(a, e[j])) {
				u32 slot = p.slot(static_cast<u32>(e[j]), first + t);
				if (slot != placement::none)
					f(t, k, slot, p.rank(slot));
			} else if (e[j] != -1 && bad == 0)
				bad = 1ull << 63 | static_cast<u64>((first + t) & 0xffffff) << 8 | k;
		}
	}
}

// Where a rank says what it has in place of an expert. A rank that is through a call knows that all have begun it, and
// so have read what was said in the one before.
__device__ __forceinline__ u64 wrong_choice(const sw_dispatch_args &a, u32 rank, u64 epoch)
{
	return segment(a.world, rank) + a.world.control + offsetof(sw_control, wrong) + (epoch & 1) * 16;
}
__device__ __forceinline__ u32 token_of(u64 bad) { return bad >> 8 & 0xffffff; }
__device__ __forceinline__ u32 number_of(u64 bad) { return bad & 0xff; }

// Says it, before a fence and the word of a block. Of the choices of several blocks any may stay.
__device__ __noinline__ void say_wrong(const sw_dispatch_args &a, u64 bad, u64 epoch)
{
	store16_relaxed_sys(wrong_choice(a, a.world.rank, epoch), bad,
	                    static_cast<u64>(choice(a, token_of(bad), number_of(bad))));
}

// Records that a rank's token has a choice that is no expert, behind the word of a block that says so.
__device__ __noinline__ void complain(const sw_dispatch_args &a, u32 rank, u64 epoch)
{
	fence_acq_rel_sys();
	pair64 said = load16_relaxed_sys(wrong_choice(a, rank, epoch));
	give_up(a.world, SW_FAULT_INDEX, rank, epoch, false, token_of(said.a), number_of(said.a), said.b);
}

} // namespace sw
