// Where tokens go: the slot of a choice, the rank of a slot, the ranks of a token.
//
// The kernels that send call this. It reads the placement, whose most wanted part a block keeps in shared memory, and the choices.
#pragma once

#include "../device.cuh"

namespace sw {

// The placement table: C[experts+1], then the slots of all experts, then the expert of each slot.
struct placement {
	const sw_moe_args &a;
	const u32 *near; // of the first experts: the slot, or where its copies are
	static constexpr u32 copies = 1u << 31;

	// All threads of the block, which meet before the first use. The table does not change while calls are under way.
	static __device__ __forceinline__ void fill(const sw_moe_args &a, u32 *near)
	{
		const u32 *c = reinterpret_cast<const u32 *>(a.table), *slots = c + a.experts + 1;
		for (u32 e = threadIdx.x; e < min(a.experts, static_cast<u32>(SW_MOE_TABLE)); e += blockDim.x)
			near[e] = __ldg(c + e + 1) - __ldg(c + e) == 1 ? __ldg(slots + __ldg(c + e)) : copies;
	}

	// The slot for an expert of token t of this rank.
	__device__ __forceinline__ u32 slot(u32 e, u32 t) const
	{
		if (e < SW_MOE_TABLE && near[e] != copies)
			return near[e];
		const u32 *c = reinterpret_cast<const u32 *>(a.table);
		u32 first = __ldg(c + e), count = __ldg(c + e + 1) - first;
		return __ldg(c + a.experts + 1 + first + (a.world.rank + t) % count);
	}

	__device__ __forceinline__ u32 rank(u32 slot) const
	{
		if (a.slots_inverse != 0)
			return __umulhi(slot, a.slots_inverse);
		u32 r = 0;
#pragma unroll 1
		while (slot >= a.first[r + 1])
			r++;
		return r;
	}
};

// Choice k of token t; -1 when it is masked.
__device__ __forceinline__ i64 choice(const sw_moe_args &a, u32 t, u32 k)
{
	i64 i = static_cast<i64>(t) * a.top_k + k;
	return a.index_bytes == 8 ? static_cast<i64>(__ldg(reinterpret_cast<const long long *>(a.choices) + i)) : static_cast<i64>(__ldg(reinterpret_cast<const int *>(a.choices) + i));
}

__device__ __forceinline__ bool is_expert(const sw_moe_args &a, i64 e) { return e >= 0 && e < a.experts; }

// The ranks of token t as bits. A choice that is no expert is noted, and taken as masked.
__device__ __forceinline__ u64 ranks_of(const sw_moe_args &a, const placement &p, u32 t, u64 &bad)
{
	u64 mask = 0;
#pragma unroll 1
	for (u32 k = 0; k < a.top_k; k += 8) {
		i64 e[8];
#pragma unroll
		for (u32 i = 0; i < 8; i++)
			e[i] = k + i < a.top_k ? choice(a, t, k + i) : -1;
#pragma unroll
		for (u32 i = 0; i < 8; i++) {
			if (is_expert(a, e[i]))
				mask |= 1ull << p.rank(p.slot(static_cast<u32>(e[i]), t));
			else if (e[i] != -1 && bad == 0)
				bad = 1ull << 63 | static_cast<u64>(t & 0xffffff) << 38 | static_cast<u64>(k + i) << 32 | static_cast<u32>(e[i]);
		}
	}
	return mask;
}

// Records that a rank's token has a choice that is no expert, as ranks_of packs it.
__device__ __noinline__ void complain(const sw_moe_args &a, u32 rank, u64 bad, u64 epoch)
{
	give_up(a.world, SW_FAULT_INDEX, rank, epoch, false, bad >> 38 & 0xffffff, bad >> 32 & 0x3f, static_cast<u64>(static_cast<i64>(static_cast<int>(static_cast<u32>(bad)))));
}

} // namespace sw
