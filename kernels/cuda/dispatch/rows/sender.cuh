// Many tokens on their way to ranks: what the threads of a block find out together about its stretch of this rank's
// tokens, and what lies next to rows.
//
// rows/send.cuh calls this. It reads the caller's tokens and writes what lies next to rows of peers' outputs (or
// staging), this rank's places and who of the handle's state, and the words of signals.cuh.
#pragma once

#include "../numbers.cuh"
#include "../routing.cuh"
#include "../signals.cuh"

namespace sw {

// The tokens of a block: t/blocks each, and one more for the first blocks.
struct stretch {
	u32 first, count;

	__device__ __forceinline__ stretch(u32 tokens, u32 block, u32 blocks)
	{
		u32 each = tokens / blocks, more = tokens - each * blocks;
		first = block * each + min(block, more), count = each + (block < more ? 1 : 0);
	}
};

// The state that the threads of a block share about its tokens, in dynamic shared memory behind the ring.
struct stretch_board {
	int *place;  // [tokens][ranks]: the row there, or -1
	u32 *groups; // [groups of 32 tokens][ranks]: how many go there
	u32 *count;  // [slots]: the block's choices
	u32 *before; // [slots]: those of the blocks before it, and of its own that have their place

	__device__ __forceinline__ stretch_board(const sw_dispatch_args &a, u8 *memory)
	    : place(reinterpret_cast<int *>(memory)),
	      groups(reinterpret_cast<u32 *>(memory) + a.send.share * a.world.size),
	      count(groups + (a.send.share + 31) / 32 * a.world.size), before(count + a.slots)
	{
	}
};

struct rows_board {
	u32 slot_cache[SW_DISPATCH_TABLE];
	arrivals full[SW_DISPATCH_SLOTS];
	u32 sent[SW_MAX_RANKS];   // rows of this block for each rank
	u32 before[SW_MAX_RANKS]; // the first row of this block there
	u32 moved[32];            // parts that each warp has moved, and that are written
	unsigned long long bad;
	u32 failed;               // a thread has given up
	u32 wrong;                // some_wrong where a block before this one has such a choice
	u32 sum[SW_MAX_RANKS];    // rows of each rank, of receiving
	u64 output[SW_MAX_RANKS]; // where rows of each rank go: the first that can be
	u32 room[SW_MAX_RANKS];   // and how many have room there: those behind are left out
};

constexpr u32 beside_part = 1; // named barrier of the threads that do not move

struct rows_sender {
	const sw_dispatch_args &a;
	rows_board &b;
	stretch_board s;
	stretch mine;
	u64 epoch;
	u32 warp, warps, lane, n;

	__device__ __forceinline__ rows_sender(const sw_dispatch_args &a, rows_board &b, u8 *memory, u64 epoch)
	    : a(a), b(b), s(a, memory), mine(a.tokens, blockIdx.x, gridDim.x), epoch(epoch), warp(threadIdx.x / 32),
	      warps(blockDim.x / 32), lane(threadIdx.x & 31), n(a.world.size)
	{
	}

	__device__ __forceinline__ u64 own(u64 place) const { return own_segment(a.world) + place; }

	// Whether somebody takes rows while others are on their way.
	__device__ __forceinline__ bool progresses() const
	{
		return (a.mode & (SW_DISPATCH_BY_EXPERT | SW_DISPATCH_BESIDE)) != 0;
	}

	// Counts where the block's tokens go, and tells the blocks behind it. place is 0 before; afterwards it counts
	// from the first of a group of 32 tokens.
	__device__ __forceinline__ void count()
	{
		u64 bad = 0;
		each_choice(a, placement{a, b.slot_cache}, mine.first, mine.count, bad,
		            [&](u32 t, u32, u32, u32 rank) { s.place[t * n + rank] = 1; });
		__syncthreads();
#pragma unroll 1
		for (u32 g = warp; g * 32 < mine.count; g += warps) {
			u32 i = g * 32 + lane;
			bool here = i < mine.count;
#pragma unroll 1
			for (u32 d = 0; d < n; d++) {
				bool goes = here && s.place[i * n + d] != 0;
				u32 go = __ballot_sync(~0u, goes);
				if (here)
					s.place[i * n + d] =
					    goes ? static_cast<int>(__popc(go & ((1u << lane) - 1))) : -1;
				if (lane == 0) {
					s.groups[g * n + d] = __popc(go);
					atomicAdd(&b.sent[d], static_cast<u32>(__popc(go)));
				}
			}
		}
		if (bad != 0)
			atomicExch(&b.bad, static_cast<unsigned long long>(bad));
		__syncthreads();
		if (threadIdx.x < n)
			store_relaxed_sys(own(a.state.block_counts) +
			                      (static_cast<u64>(blockIdx.x) * n + threadIdx.x) * 8,
			                  numbered(epoch, b.sent[threadIdx.x] | (b.bad != 0 ? some_wrong : 0)));
	}

	// Adds up what the blocks before this one have, by rank. False when one of them does not come.
	__device__ __forceinline__ bool add_blocks_before()
	{
		bool good = true;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < blockIdx.x * n; i += blockDim.x) {
			u32 rows;
			if (await_number(a, own(a.state.block_counts) + static_cast<u64>(i) * 8, epoch, a.world.rank,
			                 rows)) {
				atomicAdd(&b.before[i % n], rows & ~some_wrong);
				if ((rows & some_wrong) != 0)
					b.wrong = some_wrong;
			} else
				good = false;
		}
		return good;
	}

	// The last block tells all ranks how many rows go to each of them from this one.
	__device__ __forceinline__ void publish_totals()
	{
#pragma unroll 1
		for (u32 i = threadIdx.x; i < n * n; i += blockDim.x) {
			u32 p = i / n, d = i - p * n;
			store_relaxed_sys(
			    rank_total(a, p, a.world.rank, d, epoch),
			    numbered(epoch, (b.before[d] + b.sent[d]) | b.wrong | (b.bad != 0 ? some_wrong : 0)));
		}
	}

	// Counts the choices of the block's tokens by slot, by the threads that do not move, and tells the blocks
	// behind it. The last block tells all ranks what they get. False when a wait was given up.
	__device__ __forceinline__ bool count_choices(u32 thread, u32 threads)
	{
		placement p{a, b.slot_cache};
#pragma unroll 1
		for (u32 i = thread; i < mine.count * a.top_k; i += threads) {
			u32 t = mine.first + i / a.top_k, k = i % a.top_k;
			i64 e = choice(a, t, k);
			bool some = is_expert(a, e);
			u32 slot = some ? p.slot(static_cast<u32>(e), t) : 0;
			state::who(a)[static_cast<u64>(t) * a.top_k + k] = some ? static_cast<int>(p.rank(slot)) : -1;
			if (some)
				atomicAdd(s.count + slot, 1u);
		}
		part_sync(beside_part, threads);
		bool last = blockIdx.x == gridDim.x - 1, good = true;
		u64 words = own(a.state.block_slots);
#pragma unroll 1
		for (u32 i = thread; i < a.slots; i += threads)
			store_relaxed_sys(words + (static_cast<u64>(blockIdx.x) * a.slots + i) * 8,
			                  numbered(epoch, s.count[i]));
		if (last || (a.mode & SW_DISPATCH_BY_EXPERT) != 0)
#pragma unroll 4
			for (u32 i = thread; i < blockIdx.x * a.slots; i += threads) {
				u32 rows = 0;
				good &= await_number(a, words + static_cast<u64>(i) * 8, epoch, a.world.rank, rows);
				if (rows != 0)
					atomicAdd(s.before + i % a.slots, rows);
			}
		if (!good)
			b.failed = 1;
		part_sync(beside_part, threads);
		good = b.failed == 0;
		const u32 *expert = a.table + a.experts + 1 + a.slots;
#pragma unroll 1
		for (u32 i = thread; i < a.slots && last && good; i += threads) {
			u32 rows = s.before[i] + s.count[i];
#pragma unroll 1
			for (u32 d = 0; d < n; d++)
				store_relaxed_sys(slot_count(a, d, a.world.rank, i, epoch), numbered(epoch, rows));
			if (a.counters != 0 && rows != 0)
				atomicAdd(a.counters + __ldg(expert + i), static_cast<unsigned long long>(rows));
		}
		part_sync(beside_part, threads);
		return good;
	}

	// Tells ranks of each choice its local slot and how many of this rank's choices for that slot come before it,
	// in order. One warp.
	__device__ __forceinline__ void number_choices()
	{
		placement p{a, b.slot_cache};
		u32 all = mine.count * a.top_k;
		auto choice_at = [&](u32 i) { return i < all ? choice(a, mine.first + i / a.top_k, i % a.top_k) : -1; };
		i64 e = choice_at(lane);
#pragma unroll 1
		for (u32 i = lane; i - lane < all; i += 32) {
			i64 next = choice_at(i + 32);
			u32 t = i / a.top_k, k = i - t * a.top_k;
			int slot = is_expert(a, e) ? static_cast<int>(p.slot(static_cast<u32>(e), mine.first + t)) : -1;
			e = next;
			u32 alike = __match_any_sync(~0u, slot), earlier = __popc(alike & ((1u << lane) - 1));
			u32 at = slot < 0 ? 0 : s.before[slot] + earlier;
			__syncwarp();
			if (slot >= 0 && earlier == 0)
				s.before[slot] += __popc(alike);
			__syncwarp();
#pragma unroll 1
			for (u32 d = 0; i < all && d < n; d++) {
				int row = s.place[t * n + d];
				if (row >= 0)
					*view<u64>(segment(a.world, d) + a.send.to_indices +
					           8 * (static_cast<u64>(row) * a.top_k + k)) =
					    slot >= 0 && p.rank(static_cast<u32>(slot)) == d
						? numbered_choice(at, static_cast<u32>(slot) - a.first[d])
						: ~0ull;
			}
		}
	}

	// The first row of this rank in each rank's output: those of lower ranks come first, or every rank has its own
	// part. False when a wait was given up or an output is too small, which all ranks find alike.
	__device__ __forceinline__ bool find_bases()
	{
		if ((a.mode & SW_DISPATCH_COMPACT) == 0) {
			if (threadIdx.x < n)
				atomicAdd(&b.before[threadIdx.x], a.world.rank * a.max_tokens);
			return true;
		}
		bool good = each_rank_total(a, epoch, [&](u32 src, u32 d, u32 rows) {
			rows &= ~some_wrong;
			atomicAdd(&b.sum[d], rows);
			if (src < a.world.rank)
				atomicAdd(&b.before[d], rows);
		});
		if (__syncthreads_or(!good))
			return false;
		if (threadIdx.x == 0 && !all_fit(a, b.sum, epoch)) {
			end_waits(a, epoch); // of a second half, for blocks that send nothing
			good = false;
		}
		return good;
	}

	// Where rows of a rank go. In a call without gaps it says that itself. One thread for each rank; false when the
	// wait was given up, or the rank makes another call.
	__device__ __forceinline__ bool find_output(u32 d)
	{
		u64 word, place = a.send.to_rows;
		u32 room = most_room;
		bool good = true;
		if ((a.mode & SW_DISPATCH_COMPACT) != 0) {
			if (d == a.world.rank)
				room = static_cast<u32>(a.out.room);
			else if ((good = await_begin(a, d, epoch, word, place)))
				room = room_of(word);
		}
		b.output[d] = segment(a.world, d) + place, b.room[d] = room;
		return good;
	}

	// Turns places within groups into rows.
	__device__ __forceinline__ void place()
	{
		int *places = state::places(a);
#pragma unroll 1
		for (u32 i = threadIdx.x; i < mine.count * n; i += blockDim.x) {
			u32 t = i / n, d = i - t * n, g = t / 32;
			int at = s.place[i];
			if (at >= 0) {
				at += static_cast<int>(b.before[d]);
#pragma unroll 1
				for (u32 h = 0; h < g; h++)
					at += static_cast<int>(s.groups[h * n + d]);
			}
			s.place[i] = at;
			places[static_cast<u64>(mine.first) * n + i] = at;
		}
	}

	// The places of an earlier dispatch.
	__device__ __forceinline__ void recall()
	{
		const int *places = state::places(a) + static_cast<u64>(mine.first) * n;
		if (threadIdx.x < n)
			b.before[threadIdx.x] = ~0u;
		__syncthreads();
#pragma unroll 1
		for (u32 i = threadIdx.x; i < mine.count * n; i += blockDim.x) {
			s.place[i] = places[i];
			if (places[i] >= 0) {
				atomicAdd(&b.sent[i % n], 1u);
				atomicMin(&b.before[i % n], static_cast<u32>(places[i]));
			}
		}
	}

	// Sends what lies next to the rows, by the threads that do not move: a warp for each token and rank in turn. By
	// weak stores, which a warp's lanes make together: strong ones cross one by one.
	__device__ __forceinline__ void write_beside(u32 first, u32 step, bool scales)
	{
		placement p{a, b.slot_cache};
#pragma unroll 1
		for (u32 i = first; i < mine.count * n; i += step) {
			int row = s.place[i];
			if (row < 0)
				continue;
			u32 d = i % n, t = mine.first + i / n;
			u64 there = segment(a.world, d);
			if ((a.mode & SW_DISPATCH_CACHED) == 0) {
#pragma unroll 1
				for (u32 k = lane; k < a.top_k; k += 32) {
					i64 e = choice(a, t, k), at = static_cast<i64>(row) * a.top_k + k;
					u32 slot = is_expert(a, e) ? p.slot(static_cast<u32>(e), t) : 0;
					bool goes = is_expert(a, e) && p.rank(slot) == d;
					if ((a.mode & SW_DISPATCH_BY_EXPERT) == 0)
						*view<i64>(there + a.send.to_indices + 8 * at) =
						    goes ? static_cast<i64>(slot - a.first[d]) : -1;
					float w = !goes ? 0
					          : a.send.weights == 0
					              ? 1
					              : __ldg(a.send.weights + static_cast<u64>(t) * a.top_k + k);
					if (a.send.to_weights != 0)
						*view<float>(there + a.send.to_weights + 4 * at) = w;
				}
				if (lane == 0 && a.send.to_sources != 0)
					*view<u64>(there + a.send.to_sources + 8 * static_cast<u64>(row)) =
					    static_cast<u64>(t) << 32 | a.world.rank;
			}
			if (scales)
#pragma unroll 1
				for (u32 k = lane; k < a.scale_words; k += 32)
					*view<u32>(scale_place(there, row, k)) =
					    __ldg(a.send.scales + static_cast<u64>(t) * a.scale_words + k);
		}
	}

	__device__ __forceinline__ u64 scale_place(u64 there, int row, u32 word) const
	{
		u64 at = (a.mode & SW_DISPATCH_COLUMNS) != 0 ? static_cast<u64>(word) * a.out.most + row
		                                             : static_cast<u64>(row) * a.scale_words + word;
		return there + a.send.to_scales + 4 * at;
	}

	// The place of the block's first row for a rank: in its output, or where every rank has its own part among this
	// rank's there.
	__device__ __forceinline__ u32 first(u32 d) const
	{
		u32 part = (a.mode & SW_DISPATCH_COMPACT) != 0 ? 0 : a.world.rank * a.max_tokens;
		return b.sent[d] == 0 ? 0 : b.before[d] - part;
	}

	// How many of the block's first x tokens go to a rank.
	__device__ __forceinline__ u32 rows_before(u32 x, u32 d) const
	{
#pragma unroll 1
		while (x > 0 && s.place[(x - 1) * n + d] < 0)
			x--;
		return x == 0 ? 0 : static_cast<u32>(s.place[(x - 1) * n + d]) - b.before[d] + 1;
	}

	// Tells ranks how far the block's rows are while some warps move them, which report what is written. One warp
	// of the others, when what lies next to rows is written.
	__device__ __forceinline__ void publish_progress()
	{
		constexpr u32 steps = 8;
		if (mine.count < 4 * steps || b.bad != 0)
			return;
#pragma unroll 1
		for (u32 step = 1; step < steps; step++) {
			u32 x = mine.count * step / steps;
			bool there;
			do {
				u32 parts = lane < a.movers ? atom_acquire_cta(&b.moved[lane]) * a.movers + lane
				                            : ~0u; // all before this one
				there = !__any_sync(~0u, parts < x * a.parts);
			} while (!there);
#pragma unroll 1
			for (u32 d = lane; d < n; d += 32) {
				fence_acq_rel_sys(); // X4
				store16_relaxed_sys(done_word(a, d, a.world.rank, blockIdx.x, epoch), epoch,
				                    done(rows_before(x, d), first(d), false));
			}
		}
	}

	// The last words of a block.
	__device__ __forceinline__ void publish_done()
	{
		if (threadIdx.x >= n)
			return;
		if (b.bad != 0)
			say_wrong(a, b.bad, epoch);
		fence_acq_rel_sys(); // X4
		store16_relaxed_sys(done_word(a, threadIdx.x, a.world.rank, blockIdx.x, epoch), epoch,
		                    b.bad != 0 ? b.bad : done(b.sent[threadIdx.x], first(threadIdx.x), true));
		if (a.counters != 0)
			atomicAdd(a.counters + a.experts + threadIdx.x,
			          static_cast<unsigned long long>(b.sent[threadIdx.x]) *
			              (a.wire_bytes + 4 * a.scale_words));
	}
};

} // namespace sw
