// The sending half of a dispatch of few tokens.
//
// few/dispatch.cuh calls this. It reads the caller's tokens and writes the notes and packets of its peers' states, the
// counts of signals.cuh, and this rank's places and who.
#pragma once

#include "../experts.cuh"
#include "wire.cuh"

namespace sw {

struct few_board {
	u32 slot_cache[SW_DISPATCH_TABLE];
	u32 goes[SW_DISPATCH_FEW_TOKENS / 32][SW_MAX_RANKS];  // by group of 32 tokens and rank: whose tokens go there
	u32 wants[SW_DISPATCH_FEW_TOKENS][SW_MAX_RANKS / 32]; // a token's ranks as bits
	unsigned long long bad;
	u32 out;                  // the ranks that the call does without
	u32 gone;                 // those of which the first block misses numbers
	u32 before[SW_MAX_RANKS]; // rows of the ranks before this one in each rank's output without gaps
	take_board take;
};

// The sending half of a dispatch. The last block of a grid tells how many rows come, and those before it which; the
// others send them, without waiting for these. A small grid has one block for both.
struct few_sender {
	const sw_dispatch_args &a;
	few_board &b;
	u32 *count; // [tables][slots] in dynamic shared memory: the choices of each warp's stretch for each slot, then
	            // those before it
	float *weights;                  // [tokens][top_k] behind that
	unsigned short *slots;           // [tokens][top_k] behind those: the slot of each choice, or no_slot
	u32 lane, warp, n, tables, each; // stretches, and choices of one
	u32 out = 0;                     // the ranks that the call does without
	bool cached;

	static constexpr u32 no_slot = 0xffff;

	__device__ __forceinline__ few_sender(const sw_dispatch_args &a, few_board &b, u64 *memory)
	    : a(a), b(b), count(reinterpret_cast<u32 *>(memory)), lane(threadIdx.x & 31), warp(threadIdx.x / 32),
	      n(a.world.size), tables((a.mode & SW_DISPATCH_BY_EXPERT) != 0 ? blockDim.x / 32 : 1),
	      cached((a.mode & SW_DISPATCH_CACHED) != 0)
	{
		weights = reinterpret_cast<float *>(count + tables * a.slots);
		slots = reinterpret_cast<unsigned short *>(weights + a.tokens * a.top_k);
		each = (a.tokens * a.top_k + blockDim.x - 1) / blockDim.x * 32;
	}

	// How many blocks tell what lies next to rows. Routing that is known needs one.
	static __device__ __forceinline__ u32 publishers(bool cached)
	{
		return cached ? 1 : min(gridDim.x / SW_DISPATCH_FEW_PUBLISHER + 1, 3u);
	}
	// How many of them tell which rows come, 1 or 2, and the number of this one.
	__device__ __forceinline__ u32 parts() const { return max(publishers(cached), 2u) - 1; }
	__device__ __forceinline__ u32 part() const { return blockIdx.x + publishers(cached) - gridDim.x; }

	__device__ __forceinline__ bool publishes() const { return part() < publishers(cached); }
	__device__ __forceinline__ bool tells_counts() const { return blockIdx.x == gridDim.x - 1; }
	__device__ __forceinline__ bool tells_rows() const { return part() < parts(); }
	__device__ __forceinline__ u64 own(u64 place) const { return own_segment(a.world) + place; }
	__device__ __forceinline__ bool goes_on(u32 d) const { return out == 0 || (out >> d & 1) == 0; }
	__device__ __forceinline__ bool compact() const { return (a.mode & SW_DISPATCH_COMPACT) != 0; }

	// Before await_stream.
	__device__ __forceinline__ void clear()
	{
		if (!cached)
			placement::fill(a, b.slot_cache);
		if (threadIdx.x == 0)
			b.bad = 0;
		if (!publishes())
			return;
#pragma unroll 1
		for (u32 t = threadIdx.x; t < a.tokens; t += blockDim.x)
#pragma unroll
			for (u32 i = 0; i < SW_MAX_RANKS / 32; i++)
				b.wants[t][i] = 0;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < tables * a.slots && !cached; i += blockDim.x)
			count[i] = 0;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.tokens * a.top_k && !cached; i += blockDim.x)
			slots[i] = no_slot;
	}

	// The ranks of token t as bits. A warp.
	__device__ __forceinline__ u64 ranks(u32 t) const
	{
		u32 bits[2] = {0, 0};
		if (cached) {
			const int *places = state::places(a) + static_cast<u64>(t) * n;
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				bits[i] = __ballot_sync(~0u, lane + 32 * i < n && places[lane + 32 * i] >= 0);
		} else {
			placement p{a, b.slot_cache, out};
#pragma unroll 1
			for (u32 k = lane; k < a.top_k; k += 32) {
				i64 e = choice(a, t, k);
				u32 slot = is_expert(a, e) ? p.slot(static_cast<u32>(e), t) : placement::none,
				    r = slot != placement::none ? p.rank(slot) : ~0u;
				bits[0] |= r < 32 ? 1u << r : 0, bits[1] |= r < 64 && r >= 32 ? 1u << (r & 31) : 0;
			}
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				bits[i] = __reduce_or_sync(~0u, bits[i]);
		}
		return static_cast<u64>(bits[1]) << 32 | bits[0];
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

	// The threads of a block that publishes load where all tokens go. They meet after it.
	__device__ __forceinline__ void load_choices()
	{
		if (cached) {
			const int *places = state::places(a);
#pragma unroll 1
			for (u32 i = threadIdx.x; i < a.tokens * n; i += blockDim.x)
				if (places[i] >= 0)
					atomicOr(&b.wants[i / n][i % n / 32], 1u << (i % n & 31));
			return;
		}
		constexpr u32 early = 4; // weights of a thread that are on their way next to choices
		const float *from = a.send.weights;
		u32 all = a.tokens * a.top_k;
		float w[early];
#pragma unroll
		for (u32 j = 0; j < early; j++) {
			u32 i = threadIdx.x + j * blockDim.x;
			w[j] = from != nullptr && i < all ? __ldg(from + i) : 1;
		}
		u64 bad = 0;
		each_choice(a, placement{a, b.slot_cache, out}, 0, a.tokens, bad,
		            [&](u32 t, u32 k, u32 slot, u32 rank) {
				    u32 i = t * a.top_k + k;
				    atomicOr(&b.wants[t][rank / 32], 1u << (rank & 31));
				    slots[i] = static_cast<unsigned short>(slot);
				    atomicAdd(count + (tables == 1 ? 0 : i / each * a.slots) + slot, 1u);
			    });
		if (bad != 0)
			atomicExch(&b.bad, static_cast<unsigned long long>(bad));
#pragma unroll
		for (u32 j = 0; j < early; j++)
			if (threadIdx.x + j * blockDim.x < all)
				weights[threadIdx.x + j * blockDim.x] = w[j];
#pragma unroll 1
		for (u32 i = threadIdx.x + early * blockDim.x; i < all; i += blockDim.x)
			weights[i] = from != nullptr ? __ldg(from + i) : 1;
	}

	// Tells all ranks what they have seen: how many rows come first, since that is waited for.
	__device__ __forceinline__ void publish(u64 epoch)
	{
		if (!cached)
			sum_counts(epoch);
#pragma unroll 1
		for (u32 g = warp; g * 32 < a.tokens; g += blockDim.x / 32)
#pragma unroll 1
			for (u32 d = 0; d < n; d++) {
				u32 t = g * 32 + lane,
				    go = __ballot_sync(~0u, t < a.tokens && (b.wants[t][d / 32] >> (d & 31) & 1) != 0);
				if (lane == (d & 31))
					b.goes[g][d] = go;
			}
		__syncthreads();
		if (tells_counts())
			publish_totals(epoch);
		if (tells_rows() && b.bad == 0 && !cached) {
			publish_rows(epoch);
			publish_choices(epoch);
		}
	}

	// How many rows come, or that a choice is no expert. Where rows of one rank follow those of the one before, all
	// ranks hear of all.
	__device__ __forceinline__ void publish_totals(u64 epoch)
	{
#pragma unroll 1
		for (u32 i = threadIdx.x; compact() && !cached && i < n * n; i += blockDim.x) {
			u32 p = i / n, d = i - p * n;
			store_relaxed_sys(rank_total(a, p, a.world.rank, d, epoch),
			                  numbered(epoch, before(a.tokens, d)));
		}
		if (b.bad != 0 && threadIdx.x < n) {
			say_wrong(a, b.bad, epoch);
			fence_acq_rel_sys();
		}
		if (threadIdx.x < n && goes_on(threadIdx.x)) {
			u32 rows = before(a.tokens, threadIdx.x);
			store16_relaxed_sys(done_word(a, threadIdx.x, a.world.rank, 0, epoch), epoch,
			                    b.bad != 0 ? b.bad : done(rows, 0, true));
			if (a.counters != 0)
				atomicAdd(a.counters + a.experts + threadIdx.x,
				          static_cast<unsigned long long>(rows) * (a.wire_bytes + 4 * a.scale_words));
		}
		if (b.bad != 0 && threadIdx.x == 0)
			complain(a, a.world.rank, epoch);
	}

	// How many choices there are for each slot. Counts become those of the stretches before.
	__device__ __forceinline__ void sum_counts(u64 epoch)
	{
		constexpr u32 batch = 4; // that are read together
		const u32 *expert = a.table + a.experts + 1 + a.slots;
#pragma unroll 1
		for (u32 slot = threadIdx.x; slot < a.slots; slot += blockDim.x) {
			u32 rows = 0;
#pragma unroll 1
			for (u32 first = 0; first < tables; first += batch) {
				u32 some[batch], *of = count + first * a.slots + slot;
#pragma unroll
				for (u32 j = 0; j < batch; j++)
					some[j] = first + j < tables ? of[j * a.slots] : 0;
#pragma unroll
				for (u32 j = 0; j < batch; j++) {
					if (first + j < tables)
						of[j * a.slots] = rows;
					rows += some[j];
				}
			}
			if (!tells_counts())
				continue;
#pragma unroll 1
			for (u32 d = 0; d < n; d++)
				if (goes_on(d))
					store_relaxed_sys(slot_count(a, d, a.world.rank, slot, epoch),
					                  numbered(epoch, rows));
			if (a.counters != 0 && rows != 0)
				atomicAdd(a.counters + __ldg(expert + slot), static_cast<unsigned long long>(rows));
		}
	}

	// Which tokens come, and to which of this rank's rows there. Places in an output without gaps count from the
	// first of these until place() has been called.
	__device__ __forceinline__ void publish_rows(u64 epoch)
	{
		u32 flag = packet::flag(epoch), first = compact() ? 0 : a.world.rank * a.max_tokens;
		int *places = state::places(a);
#pragma unroll 1
		for (u32 i = threadIdx.x * parts() + part(); i < a.max_tokens * n; i += blockDim.x * parts()) {
			u32 t = i / n, d = i - t * n;
			bool goes = t < a.tokens && (b.goes[t / 32][d] >> (t & 31) & 1) != 0;
			u32 row = goes ? before(t, d) : ~0u;
			if (goes_on(d))
				packet::put(note_place(a, d, a.world.rank, t, epoch), flag, row, a.tokens, 0);
			if (t < a.tokens)
				places[i] = goes ? static_cast<int>(first + row) : -1;
		}
	}

	// Has the places in outputs without gaps count from the first row there, when that is known. The threads that
	// have written them, or those of a kernel behind theirs.
	__device__ __forceinline__ void place() const
	{
		int *places = state::places(a);
#pragma unroll 1
		for (u32 i = threadIdx.x * parts() + part(); i < a.tokens * n; i += blockDim.x * parts())
			if (places[i] >= 0)
				places[i] += static_cast<int>(b.before[i % n]);
	}

	// Their choices: the local slot, how many of this rank's choices for it come before, and the weight.
	__device__ __forceinline__ void publish_choices(u64 epoch)
	{
		placement p{a, b.slot_cache};
		u32 flag = packet::flag(epoch), first = warp * each, end = min(first + each, a.tokens * a.top_k);
		bool numbers = tables != 1;
#pragma unroll 1
		for (u32 i = first + lane; i - lane < end; i += 32) {
			u32 slot = i < end ? slots[i] : no_slot, number = 0;
			if (numbers) {
				u32 alike = __match_any_sync(~0u, static_cast<int>(slot)),
				    earlier = __popc(alike & ((1u << lane) - 1)), *mine = count + warp * a.slots + slot;
				number = slot == no_slot ? 0 : *mine + earlier;
				__syncwarp();
				if (slot != no_slot && earlier == 0)
					*mine += __popc(alike);
				__syncwarp();
			}
			if (i >= end || ((i - first) / 32 & (parts() - 1)) != part())
				continue;
			u32 t = i / a.top_k, k = i - t * a.top_k;
			int to = slot == no_slot ? -1 : static_cast<int>(p.rank(slot));
			state::who(a)[i] = to;
			float weight = weights[i];
#pragma unroll 1
			for (u32 d = 0; d < n; d++)
				if ((b.wants[t][d / 32] >> (d & 31) & 1) != 0) {
					bool goes = to == static_cast<int>(d);
					packet::put(note_place(a, d, a.world.rank, t, epoch) + 16 * (1 + k), flag,
					            goes ? slot - a.first[d] : ~0u, number,
					            goes ? __float_as_uint(weight) : 0);
				}
		}
	}
};

// The scales of token t that the caller gives, as packets behind its choices.
__device__ __forceinline__ void send_scales(const sw_dispatch_args &a, u32 t, u64 ranks, u64 epoch, u32 lane)
{
	const u32 *scales = a.send.scales + static_cast<u64>(t) * a.scale_words;
#pragma unroll 1
	for (u32 w = 3 * lane; w < a.scale_words; w += 96) {
		u32 v[3];
#pragma unroll
		for (u32 i = 0; i < 3; i++)
			v[i] = w + i < a.scale_words ? __ldg(scales + w + i) : 0;
#pragma unroll 1
		for (u64 left = ranks; left != 0; left &= left - 1)
			packet::put(note_place(a, __ffsll(left) - 1, a.world.rank, t, epoch) +
			                16 * (1 + a.top_k + w / 3),
			            packet::flag(epoch), v[0], v[1], v[2]);
	}
}

} // namespace sw
