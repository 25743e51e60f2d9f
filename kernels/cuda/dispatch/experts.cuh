// Between rows by token, which cross, and rows by expert. Rows from all ranks land in staging, a part for each source
// rank. A pass over this rank's memory puts each in the rows of its experts, in the order of source rank, token and
// choice, while they come; on the way back another makes the partial sum of each row's experts in staging, where peers
// read it while it is made.
//
// experts_take, experts_sum and experts_spread call this, and dispatch_few for where rows go. It reads staging and what
// lies next to it in the handle's state, and writes the handle's outputs, spread, landing and arrived; on the way back
// the other way round, and the words made.
#pragma once

#include "landing.cuh"
#include "padding.cuh"
#include "routing.cuh"
#include "sums.cuh"

namespace sw {

// The rows in staging, counted without gaps: row i is one of a source rank.
struct staged_rows {
	u32 first[SW_MAX_RANKS + 1]; // of each source rank

	// One thread of the block, before the others meet it.
	__device__ __forceinline__ void make(const sw_dispatch_args &a, const u32 *counts)
	{
		first[0] = 0;
#pragma unroll 1
		for (u32 src = 0; src < a.world.size; src++)
			first[src + 1] = first[src] + counts[src];
	}

	// Its place in staging, where each source rank has max_tokens rows.
	__device__ __forceinline__ u32 at(const sw_dispatch_args &a, u32 i, u32 &src) const
	{
		src = 0;
#pragma unroll 1
		while (i >= first[src + 1])
			src++;
		return src * a.max_tokens + i - first[src];
	}
};

struct take_board {
	u32 sum[SW_MAX_RANKS];       // rows in staging from each rank
	u32 total[SW_MAX_RANKS];     // rows of each rank's output
	u32 from[SW_MAX_RANKS];      // rows by expert from each rank, in the first block
	u32 first[SW_MAX_RANKS + 1]; // of all ranks' blocks, counted one after the other
	u32 over;                    // the first slot that overflows
	u32 out, gone;               // the ranks that the call does without, and those of which counts are missing
	arrivals full[SW_DISPATCH_PASS_THREADS / 32];
};

struct taker {
	const sw_dispatch_args &a;
	take_board &b;
	u32 *count, *first, *base; // by local slot: rows, the first of them, and by rank and slot the first from there
	u64 epoch;
	u32 warp, lane, n;
	u32 moved;   // parts of rows that this warp has loaded
	u8 *place;   // where it has them
	u32 out = 0; // the ranks that the call does without, by few tokens
	bool cached;

	// The bytes of dynamic shared memory in front of the warps' places.
	static __device__ __forceinline__ u32 front(const sw_dispatch_args &a)
	{
		return (4 * (2 * a.local + 1 + a.world.size * a.local) + 127) / 128 * 128;
	}

	__device__ __forceinline__ taker(const sw_dispatch_args &a, take_board &b, u8 *memory, u64 epoch)
	    : a(a), b(b), count(reinterpret_cast<u32 *>(memory)), first(count + a.local), base(count + 2 * a.local + 1),
	      epoch(epoch), warp(threadIdx.x / 32), lane(threadIdx.x & 31), n(a.world.size), moved(0),
	      place(memory + front(a) + warp * a.part), cached((a.mode & SW_DISPATCH_CACHED) != 0)
	{
	}

	__device__ __forceinline__ u64 own(u64 place) const { return own_segment(a.world) + place; }

	// Adds up the ranks' counts. False when a wait was given up, or an output would overflow, which all ranks find
	// alike.
	__device__ __forceinline__ bool load_counts()
	{
		do
			if (!add_counts())
				return false;
		while (masks::on(a) && !decided()); // then anew
		return fits();
	}

	// Whether all blocks agree on whose counts this one has added up.
	__device__ __forceinline__ bool decided()
	{
		if (threadIdx.x == 0) {
			u32 now = masks::decide(a, b.gone);
			b.gone |= now ^ out;
			b.out = now;
		}
		__syncthreads();
		u32 gone = b.gone;
		out = b.out;
		__syncthreads();
		return gone == 0;
	}

	__device__ __forceinline__ bool add_counts()
	{
		bool good = true, teller = blockIdx.x == 0;
		u32 me = a.world.rank, gone = 0;
		if (threadIdx.x < n)
			b.total[threadIdx.x] = b.from[threadIdx.x] = 0;
		if (threadIdx.x == 0)
			b.over = ~0u;
		if (masks::on(a) && threadIdx.x == 0)
			b.gone = 0;
		__syncthreads();
#pragma unroll 1
		for (u32 i = threadIdx.x; i - lane < a.slots; i += blockDim.x) {
			u32 slot = min(i, a.slots - 1), rows = 0, r = 0;
			bool mine = slot >= a.first[me] && slot < a.first[me + 1];
			good &= each_slot_count(a, slot, epoch, out, gone, [&](u32 src, u32 some) {
				if (mine)
					base[src * a.local + slot - a.first[me]] = rows;
				rows += some;
				if (!teller)
					return;
				some = __reduce_add_sync(~0u, mine && i < a.slots ? some : 0);
				if (lane == 0 && some != 0)
					atomicAdd(&b.from[src], some);
			});
			if (i >= a.slots)
				continue;
			if (mine)
				count[slot - a.first[me]] = rows;
			if (a.out.capacity != 0) {
				if (rows > a.out.capacity)
					atomicMin(&b.over, slot);
				continue;
			}
#pragma unroll 1
			while (slot >= a.first[r + 1])
				r++;
			atomicAdd(&b.total[r], span_of(a, rows));
		}
		if (gone != 0)
			atomicOr(&b.gone, gone);
		return !__syncthreads_or(!good);
	}

	// False when an output would overflow.
	__device__ __forceinline__ bool fits()
	{
		u32 me = a.world.rank;
		if (b.over != ~0u) {
			if (b.over >= a.first[me] && b.over < a.first[me + 1] && threadIdx.x == 0)
				overflow(me, b.over, count[b.over - a.first[me]], a.out.capacity);
			else if (threadIdx.x == 0) {
				u32 rows = 0, r = 0;
#pragma unroll 1
				for (u32 src = 0; src < n; src++)
					rows += static_cast<u32>(
					    load_relaxed_sys(slot_count(a, a.world.rank, src, b.over, epoch)));
#pragma unroll 1
				while (b.over >= a.first[r + 1])
					r++;
				overflow(r, b.over, rows, a.out.capacity);
			}
			return false;
		}
		u32 full = ~0u;
#pragma unroll 1
		for (u32 r = 0; r < n && full == ~0u; r++)
			if (a.out.capacity == 0 && b.total[r] > a.out.most)
				full = r;
		if (full == ~0u)
			return true;
		if (threadIdx.x == 0)
			overflow(full, ~0ull, b.total[full], a.out.most);
		return false;
	}

	// slot is ~0 where the output as a whole is too small.
	__device__ __forceinline__ void overflow(u32 rank, u64 slot, u64 rows, i64 limit)
	{
		const u32 *expert = a.table + a.experts + 1 + a.slots;
		give_up(a.world, SW_FAULT_OVERFLOW, rank, epoch, false, rows,
		        slot == ~0ull ? slot : __ldg(expert + slot), static_cast<u64>(limit));
	}

	// Tells how many rows by expert came from each rank. A thread a rank.
	__device__ __forceinline__ void publish_rank_counts()
	{
		if (threadIdx.x >= n)
			return;
		u32 rows = b.from[threadIdx.x];
		a.out.rank_counts[threadIdx.x] = rows;
		if (a.send.mapped != 0)
			mapped_words(a, 2 * a.local + 1)[threadIdx.x] = rows;
	}

	// Has numbers in memory of the caller say that nothing came, where a call is given up. One block.
	static __device__ __forceinline__ void tell_none(const sw_dispatch_args &a)
	{
		u32 *numbers = a.send.ticket == 0 ? mapped_words(a, 0) : nullptr;
#pragma unroll 1
		for (u32 i = threadIdx.x; numbers != nullptr && i < 2 * a.local + 1 + a.world.size; i += blockDim.x)
			numbers[i] = 0;
	}

	// The first row of each local slot; what callers want to know, by the first block. One warp.
	__device__ __forceinline__ void lay_out()
	{
		if (a.out.capacity != 0) {
#pragma unroll 1
			for (u32 i = lane; i <= a.local; i += 32)
				first[i] = i * static_cast<u32>(a.out.capacity);
		} else {
			u32 at = 0;
#pragma unroll 1
			for (u32 begin = 0; begin < a.local; begin += 32) {
				u32 i = begin + lane, rows = i < a.local ? span_of(a, count[i]) : 0,
				    sum = running_sum(rows, lane);
				if (i < a.local)
					first[i] = at + sum - rows;
				at += __shfl_sync(~0u, sum, 31);
			}
			if (lane == 0)
				first[a.local] = at;
		}
		__syncwarp();
		if (blockIdx.x != 0)
			return;
		u32 *counts = a.out.counts, *offsets = a.out.offsets;
		u32 *mapped = mapped_words(a, 0);
#pragma unroll 1
		for (u32 i = lane; i <= a.local; i += 32) {
			offsets[i] = first[i];
			if (mapped != nullptr)
				mapped[a.local + i] = first[i];
			if (i == a.local)
				continue;
			counts[i] = count[i];
			if (mapped != nullptr)
				mapped[i] = count[i];
		}
	}

	// Where everything goes: rows of slots and of ranks, what the caller wants to know, padding. False when a wait
	// was given up, or an output would overflow.
	__device__ __forceinline__ bool prepare()
	{
		bool teller = blockIdx.x == 0, good = true;
		if (a.send.landed != 0) { // counts are written behind that, too
			patience p(a, a.world.rank);
			if (threadIdx.x == 0)
#pragma unroll 1
				while (good && load_acquire_sys(own(a.state.landing)) != epoch)
					good = p.more(epoch, false);
			if (__syncthreads_or(!good))
				return false;
		}
		if (cached) {
#pragma unroll 1
			for (u32 i = threadIdx.x; i <= a.local; i += blockDim.x) {
				first[i] = a.out.offsets[i];
				if (i < a.local)
					count[i] = a.out.counts[i];
			}
		} else {
			if (!load_counts())
				return false;
			if (warp == 0)
				lay_out();
			if (teller)
				publish_rank_counts();
			__syncthreads();
			if (teller && a.send.mapped != 0 && threadIdx.x == 0) {
				fence_acq_rel_sys();
				store_relaxed_sys(a.send.mapped, a.send.ticket);
			}
#pragma unroll 1
			for (u32 i = threadIdx.x; i < n * a.local; i += blockDim.x)
				base[i] += first[i % a.local];
		}
		__syncthreads();
		zero_padding(a, a.out.rows, a.wire_bytes, a.out.sources, a.out.weights, count, first);
		return true;
	}

	// Copies a row in staging to those of its experts, and what lies next to it. A warp that moves.
	__device__ __forceinline__ void copy(u32 src, u32 staged)
	{
		u32 part = 0;
		u64 row = own(a.send.to_rows) + static_cast<u64>(staged) * a.wire_bytes;
		auto load = [&] {
			u32 bytes = min(a.part, a.wire_bytes - part * a.part);
			if (lane == 0) {
				b.full[warp].expect(bytes);
				bulk_load_once(place, row + part * a.part, bytes, &b.full[warp]);
			}
			return bytes;
		};
		u32 bytes = load();
		const volatile u32 *from_scales =
		    view<const volatile u32>(own(a.send.to_scales)) + static_cast<u64>(staged) * a.scale_words;
		u32 scale = lane < a.scale_words ? from_scales[lane] : 0; // the first 32
		int *spread = state::spread(a) + static_cast<u64>(staged) * a.top_k;
		const volatile u64 *choices =
		    static_cast<const volatile u64 *>(state::indices(a)) + static_cast<u64>(staged) * a.top_k;
		int rows[2], slots[2]; // of choices lane and lane+32
#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			u32 k = lane + 32 * i;
			u64 c = k < a.top_k ? choices[k] : ~0ull;
			slots[i] = slot_in(c);
			rows[i] = slots[i] < 0 ? -1
			          : cached     ? spread[k]
			                       : static_cast<int>(base[src * a.local + slots[i]] + number_in(c));
			if (k < a.top_k && !cached)
				spread[k] = rows[i];
		}
#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			if (rows[i] < 0)
				continue;
			if (a.out.weights != 0)
				a.out.weights[rows[i]] = static_cast<const volatile float *>(
				    state::weights(a))[static_cast<u64>(staged) * a.top_k + lane + 32 * i];
			if (a.out.sources != 0)
				a.out.sources[rows[i]] = static_cast<const volatile u64 *>(state::sources(a))[staged];
		}
		u64 there = static_cast<u64>(__ballot_sync(~0u, rows[1] >= 0)) << 32 | __ballot_sync(~0u, rows[0] >= 0);
		auto of = [&](const int *v, u32 k) { return __shfl_sync(~0u, k < 32 ? v[0] : v[1], k & 31); };
#pragma unroll 1
		for (u32 first = 0; first < a.scale_words; first += 32) {
			u32 w = first + lane, next = w + 32 < a.scale_words ? from_scales[w + 32] : 0;
#pragma unroll 1
			for (u64 left = there; left != 0; left &= left - 1) {
				u32 k = __ffsll(left) - 1;
				int to = of(rows, k), slot = of(slots, k);
				if (w < a.scale_words)
					*view<volatile u32>(
					    row_scale(a, static_cast<u32>(to), w, static_cast<u32>(slot))) = scale;
			}
			scale = next;
		}
#pragma unroll 1
		for (;;) {
			b.full[warp].await(moved++);
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				if (rows[i] >= 0)
					bulk_store(a.out.rows + static_cast<u64>(rows[i]) * a.wire_bytes +
					               part * a.part,
					           place, bytes);
			bulk_commit();
			bulk_await_read<0>();
			__syncwarp();
			if (++part == a.parts)
				break;
			bytes = load();
		}
		if (a.send.landed == 0)
			return;
		bulk_await();
		fence_bulk();
		count_landed(a, rows, slots);
	}

	// Copies rows as their ranks' blocks say that they are there. Warps share the ranks' blocks. False when a wait
	// was given up.
	__device__ __forceinline__ bool copy_as_they_come()
	{
		bool good = true;
		if (threadIdx.x == 0) {
			b.first[0] = 0;
#pragma unroll 1
			for (u32 src = 0; src < n && good; src++) {
				u64 word = 0, place;
				good = await_begin(a, src, epoch, word, place);
				b.first[src + 1] = b.first[src] + blocks_of(word);
			}
		}
		if (__syncthreads_or(!good))
			return false;
		u32 blocks = b.first[n], all = a.movers * gridDim.x, each = max(all / blocks, 1u), groups = all / each,
		    me = warp * gridDim.x + blockIdx.x;
#pragma unroll 1
		for (u32 i = warp < a.movers && me / each < groups ? me / each : blocks; i < blocks; i += groups) {
			u32 src = 0;
#pragma unroll 1
			while (i >= b.first[src + 1])
				src++;
			u64 word = 0; // what the block has said
#pragma unroll 1
			for (u32 r = me % each;; r += each) {
				if (!is_all(word) && rows_of(word) <= r) {
					if (lane == 0) {
						good = await_rows_of(a, src, i - b.first[src], epoch, r, word);
						fence_bulk();
					}
					word = __shfl_sync(~0u, static_cast<unsigned long long>(word), 0);
					if (__any_sync(~0u, !good))
						return false;
				}
				if (is_bad(word) || rows_of(word) <= r)
					break;
				copy(src, src * a.max_tokens + first_of(word) + r);
			}
		}
		return true;
	}
};

// The weight of an expert's row, which is that of entry i of what lies next to rows in staging.
__device__ __forceinline__ float weight_of(const sw_dispatch_args &a, u64 i, int row)
{
	if ((a.mode & SW_DISPATCH_GIVEN) != 0)
		return a.out.weights[row];
	return (a.mode & SW_DISPATCH_WEIGH) != 0 ? state::weights(a)[i] : 1;
}

// Waits until the caller has marked `rows` rows of a group as done. False when the wait was given up.
__device__ __forceinline__ bool await_ready(const sw_dispatch_args &a, u32 group, u32 rows, u64 epoch)
{
	patience p(a, a.world.rank);
#pragma unroll 1
	while (load32_acquire_sys(a.sum.ready + 4 * static_cast<u64>(group)) < rows)
		if (!p.more(epoch, true))
			return false;
	return true;
}

} // namespace sw
