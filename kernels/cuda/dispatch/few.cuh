// Few tokens: every warp has one stretch of a row in its registers, every block looks up for itself where all tokens go, and says for itself when its stores are done. No
// block waits for another of its rank.
//
// dispatch_few and combine_few call this. It touches the same memory as rows.cuh and sums.cuh.
#pragma once

#include "numbers.cuh"
#include "routing.cuh"
#include "rows.cuh"
#include "signals.cuh"

namespace sw {

constexpr u32 few_vectors = 4; // of a lane: a warp has 2 KiB of a row

struct few_board {
	u32 near[SW_MOE_TABLE];
	u32 goes[SW_MOE_FEW_TOKENS / 32][SW_MAX_RANKS]; // by group of 32 tokens and rank: whose tokens go there
	u32 wants[SW_MOE_FEW_TOKENS][SW_MAX_RANKS / 32]; // a token's ranks as bits
	u64 base[SW_MAX_RANKS];				// of combine: where a rank's rows are
	u32 tally[SW_MOE_FEW_SLOTS];
	u64 bad;
};

struct few_sending {
	few_board board;
	receive_board in;
};

// Stretches of rows as tasks of warps.
struct few_tasks {
	u32 parts, count, warp, warps, lane;

	// Neighbouring warps of the grid lie in different blocks, of which so many have tasks; the others' first is past the last.
	__device__ __forceinline__ few_tasks(u32 tokens, u32 row_bytes, u32 blocks)
	    : parts(max((row_bytes + 512 * few_vectors - 1) / (512 * few_vectors), 1u)), count(tokens * parts),
	      warp(blockIdx.x < blocks ? threadIdx.x / 32 * blocks + blockIdx.x : ~0u), warps(blocks * (blockDim.x / 32)), lane(threadIdx.x & 31)
	{
	}
};

struct few_sender {
	const sw_moe_args &a;
	few_board &b;
	unsigned short *slots; // [tokens][top_k], for rows that are spread over experts: the slot of each choice, or no_slot
	u32 lane, n;

	static constexpr u32 no_slot = 0xffff;

	__device__ __forceinline__ bool by_expert() const { return (a.mode & SW_MOE_BY_EXPERT) != 0; }

	__device__ __forceinline__ u64 own(u64 place) const { return own_segment(a.world) + place; }

	// Before look.
	__device__ __forceinline__ void clear(bool cached)
	{
#pragma unroll 1
		for (u32 t = threadIdx.x; t < a.tokens; t += blockDim.x)
#pragma unroll
			for (u32 i = 0; i < SW_MAX_RANKS / 32; i++)
				b.wants[t][i] = 0;
		if (by_expert() && !cached)
#pragma unroll 1
			for (u32 i = threadIdx.x; i < a.tokens * a.top_k; i += blockDim.x)
				slots[i] = no_slot;
	}

	// The threads of the block look where all tokens go. They meet after it.
	__device__ __forceinline__ void look(bool cached)
	{
		if (!cached) {
			u64 bad = 0;
			bool notes = by_expert();
			each_choice(a, placement{a, b.near}, 0, a.tokens, bad, [&](u32 t, u32 k, u32 slot, u32 rank) {
				atomicOr(&b.wants[t][rank / 32], 1u << (rank & 31));
				if (notes)
					slots[t * a.top_k + k] = static_cast<unsigned short>(slot);
			});
			if (bad != 0)
				atomicExch(reinterpret_cast<unsigned long long *>(&b.bad), static_cast<unsigned long long>(bad));
		} else {
			const int *places = reinterpret_cast<const int *>(own(a.state.places));
#pragma unroll 1
			for (u32 i = threadIdx.x; i < a.tokens * n; i += blockDim.x)
				if (places[i] >= 0)
					atomicOr(&b.wants[i / n][i % n / 32], 1u << (i % n & 31));
		}
		__syncthreads();
		u32 warp = threadIdx.x / 32, t = threadIdx.x;
		if (warp * 32 >= a.tokens)
			return;
#pragma unroll 1
		for (u32 d = 0; d < n; d++) {
			u32 go = __ballot_sync(~0u, t < a.tokens && (b.wants[t][d / 32] >> (d & 31) & 1) != 0);
			if (lane == (d & 31))
				b.goes[warp][d] = go;
		}
	}

	// How many of the first t tokens go to rank d.
	__device__ __forceinline__ u32 before(u32 t, u32 d) const
	{
		u32 rows = 0;
#pragma unroll 1
		for (u32 g = 0; g < t / 32; g++)
			rows += __popc(b.goes[g][d]);
		return (t & 31) == 0 ? rows : rows + __popc(b.goes[t / 32][d] & ((1u << (t & 31)) - 1));
	}

	// The row of token t on rank d, or -1. Every rank has its own part of an output.
	__device__ __forceinline__ int row(u32 t, u32 d) const
	{
		if ((b.goes[t / 32][d] >> (t & 31) & 1) == 0)
			return -1;
		return static_cast<int>(a.world.rank * a.max_tokens + before(t, d));
	}

	__device__ __forceinline__ u64 scale_place(u64 there, int row, u32 word) const
	{
		u64 at = (a.mode & SW_MOE_COLUMNS) != 0 ? static_cast<u64>(word) * a.most_rows + row : static_cast<u64>(row) * a.scale_words + word;
		return there + a.to_scales + 4 * at;
	}

	// How many of this rank's choices for the slot of choice first+lane of token t come before it. A warp.
	__device__ __forceinline__ u32 numbered(u32 t, u32 first) const
	{
		u32 number = 0;
#pragma unroll 1
		for (u32 k = first; k < min(first + 32, a.top_k); k++) {
			u32 before = t * a.top_k + k, slot = slots[before], alike = 0;
			if (slot == no_slot)
				continue;
#pragma unroll 4
			for (u32 i = lane; i < before; i += 32)
				alike += slots[i] == slot ? 1 : 0;
			alike = __reduce_add_sync(~0u, alike);
			if (lane == k - first)
				number = alike;
		}
		return number;
	}

	// What lies beside the rows of token t, by a warp.
	__device__ __forceinline__ void write_beside(u32 t, bool cached, bool scales)
	{
		placement p{a, b.near};
		int at = lane < n ? row(t, lane) : -1;
		if (!cached)
#pragma unroll 1
			for (u32 d = lane; d < n; d += 32)
				reinterpret_cast<int *>(own(a.state.places))[static_cast<u64>(t) * n + d] = d == lane ? at : row(t, d);
#pragma unroll 1
		for (u32 first = 0; !cached && first < a.top_k; first += 32) {
			u32 number = by_expert() ? numbered(t, first) : 0, k = first + lane;
			i64 e = k < a.top_k ? choice(a, t, k) : -1;
			int slot = is_expert(a, e) ? static_cast<int>(p.slot(static_cast<u32>(e), t)) : -1, to = slot < 0 ? -1 : static_cast<int>(p.rank(static_cast<u32>(slot)));
			if (k >= a.top_k)
				continue;
			reinterpret_cast<int *>(own(a.state.who))[static_cast<u64>(t) * a.top_k + k] = to;
			float weight = a.weights == 0 ? 1 : __ldg(reinterpret_cast<const float *>(a.weights) + static_cast<u64>(t) * a.top_k + k);
#pragma unroll 1
			for (u32 d = 0; d < n; d++) {
				int r = row(t, d);
				if (r < 0)
					continue;
				u64 there = segment(a.world, d), i = static_cast<u64>(r) * a.top_k + k;
				bool goes = to == static_cast<int>(d);
				*reinterpret_cast<u64 *>(there + a.to_indices + 8 * i) = goes ? numbered_choice(number, static_cast<u32>(slot) - a.first[d]) : ~0ull;
				if (a.to_weights != 0)
					*reinterpret_cast<float *>(there + a.to_weights + 4 * i) = goes ? weight : 0;
				if (k == 0 && a.to_sources != 0)
					*reinterpret_cast<u64 *>(there + a.to_sources + 8 * static_cast<u64>(r)) = static_cast<u64>(t) << 32 | a.world.rank;
			}
		}
#pragma unroll 1
		for (u32 d = 0; scales && d < n; d++) {
			int r = row(t, d);
			if (r < 0)
				continue;
			u64 there = segment(a.world, d);
#pragma unroll 1
			for (u32 k = lane; k < a.scale_words; k += 32)
				*reinterpret_cast<u32 *>(scale_place(there, r, k)) = __ldg(reinterpret_cast<const u32 *>(a.scales) + static_cast<u64>(t) * a.scale_words + k);
		}
	}

	// One block tells all ranks how many choices and rows of this one they get.
	__device__ __forceinline__ void tell_counts(u64 epoch)
	{
		placement p{a, b.near};
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.tokens * a.top_k; i += blockDim.x) {
			u32 t = i / a.top_k;
			i64 e = choice(a, t, i - t * a.top_k);
			if (is_expert(a, e))
				atomicAdd(&b.tally[p.slot(static_cast<u32>(e), t)], 1u);
		}
		__syncthreads();
		const u32 *expert = reinterpret_cast<const u32 *>(a.table) + a.experts + 1 + a.slots;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.slots * n; i += blockDim.x) {
			u32 to = i / a.slots, slot = i - to * a.slots, rows = b.tally[slot];
			store_relaxed_sys(segment(a.world, to) + a.state.slot_counts + (static_cast<u64>(a.world.rank) * a.slots + slot) * 8, sw::numbered(epoch, rows));
			if (to == 0 && a.counters != 0 && rows != 0)
				atomicAdd(reinterpret_cast<unsigned long long *>(a.counters) + __ldg(expert + slot), static_cast<unsigned long long>(rows));
		}
	}
};

// A stretch of a row as it was loaded. Vectors past the row's end are 0.
struct few_row {
	uint4 v[few_vectors];

	__device__ __forceinline__ void load(u64 row, u32 bytes, u32 part, u32 lane)
	{
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++) {
			u32 at = (part * few_vectors + i) * 512 + lane * 16;
			v[i] = load_vector_if(at < bytes, row + at);
		}
	}

	__device__ __forceinline__ void store(u64 row, u32 bytes, u32 part, u32 lane) const
	{
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++) {
			u32 at = (part * few_vectors + i) * 512 + lane * 16;
			store_vector_if(at < bytes, row + at, v[i]);
		}
	}
};

// A stretch of a float8 partial sum as it was loaded, by the vectors of the sum that it becomes.
template <kind type> struct few_float8_sum {
	uint2 v[few_vectors];
	float scale[few_vectors];

	__device__ __forceinline__ void load(u64 row, u32 bytes, u32 part, u32 lane)
	{
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++) {
			u32 at = (part * few_vectors + i) * 512 + lane * 16, element = at / numbers<type>::size;
			v[i] = make_uint2(0, 0), scale[i] = 0;
			if (at >= bytes)
				continue;
			if constexpr (numbers<type>::count == 8)
				v[i] = load_vector2(row + float8_sum::at(element));
			else
				v[i].x = *reinterpret_cast<const volatile u32 *>(row + float8_sum::at(element));
			scale[i] = *reinterpret_cast<const volatile float *>(row + float8_sum::scale_at(element));
		}
	}
};

template <kind type> struct few_float8 {
	u32 low[few_vectors], high[few_vectors], word[few_vectors];

	static constexpr u32 span = 128 * numbers<type>::size / 16; // lanes of a block of 128: 16 or 32

	__device__ __forceinline__ void make(const few_row &r, bool exponents)
	{
		u32 most[few_vectors];
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++)
			most[i] = numbers<type>::most(r.v[i]);
#pragma unroll
		for (u32 by = 1; by < span; by *= 2)
#pragma unroll
			for (u32 i = 0; i < few_vectors; i++)
				most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], by));
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++) {
			scaling s(most[i], exponents);
			narrow<type>(r.v[i], s.factor, low[i], high[i]);
			word[i] = s.word;
		}
	}

	__device__ __forceinline__ void store(const sw_moe_args &a, const few_sender &f, u64 there, int row, u32 part, u32 lane) const
	{
		u64 to = there + a.to_rows + static_cast<u64>(row) * a.wire_bytes;
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++) {
			u32 at = (part * few_vectors + i) * 512 + lane * 16;
			if (at >= a.row_bytes)
				continue;
			if constexpr (numbers<type>::count == 8)
				store_vector2(to + at / 2, make_uint2(low[i], high[i]));
			else
				*reinterpret_cast<u32 *>(to + at / 4) = low[i];
			if (lane % span == 0)
				*reinterpret_cast<u32 *>(f.scale_place(there, row, at / (16 * span))) = word[i];
		}
	}
};

} // namespace sw
