// The pass that makes the partial sums of this rank's rows before peers read them, or while they do.
//
// experts_sum calls this. It reads the caller's rows and what lies next to rows in staging; it writes staging, the
// words made of peers, and making of the handle's state.
#pragma once

#include "experts.cuh"

namespace sw {

// The rows that a pass makes, in its order: from every rank those in its first window of places, then those in its
// second, so that every rank gets rows from the start. A warp asks for its tasks, parts of rows or whole ones, in
// order.
struct pass_order {
	const sw_dispatch_args &a;
	const staged_rows &staged;
	u32 window, first, last; // the number of windows behind each rank's first; their first task, and the next ones'
	bool compact, whole;     // whole: all rows are one window

	__device__ __forceinline__ pass_order(const sw_dispatch_args &a, const staged_rows &staged)
	    : a(a), staged(staged), window(0), first(0), last(0), compact((a.mode & SW_DISPATCH_COMPACT) != 0),
	      whole((a.mode & SW_DISPATCH_BESIDE) == 0)
	{
		measure();
	}

	// The rows of a rank that the pass makes: this rank's own may be read where they are.
	__device__ __forceinline__ u32 rows_of_rank(u32 src) const
	{
		return a.sum.own != 0 && src == a.world.rank ? 0 : staged.first[src + 1] - staged.first[src];
	}
	__device__ __forceinline__ u32 rows() const
	{
		u32 own = a.world.rank;
		return staged.first[a.world.size] - (staged.first[own + 1] - staged.first[own]) + rows_of_rank(own);
	}

	// The place of a rank's first row.
	__device__ __forceinline__ u32 place_of(u32 src) const
	{
		return compact ? staged.first[src] : src * a.max_tokens;
	}

	// How many rows of a rank come before a window.
	__device__ __forceinline__ u32 rows_before(u32 src, u32 window) const
	{
		u32 rows = rows_of_rank(src), place = place_of(src);
		if (window == 0)
			return 0;
		return whole ? rows : min(rows, (((place >> a.sum.window) + window) << a.sum.window) - place);
	}

	__device__ __forceinline__ u32 rows_in(u32 src, u32 window) const
	{
		return rows_before(src, window + 1) - rows_before(src, window);
	}

	__device__ __forceinline__ void measure()
	{
		first = last;
#pragma unroll 1
		for (u32 src = 0; src < a.world.size; src++)
			last += rows_in(src, window) * a.parts;
	}

	struct task {
		u32 src, at, row, part, window; // at is the row where each rank has max_tokens, row its place
		bool there;
	};

	// The task of a number, which is greater than the last one that was asked for.
	__device__ __forceinline__ task find(u32 number)
	{
		task k;
#pragma unroll 1
		while (number >= last && !whole && window + 1 < windows(a))
			window++, measure();
		if (!(k.there = number < last))
			return k;
		u32 r = (number - first) / a.parts, some;
		k.part = (number - first) - r * a.parts, k.window = window;
#pragma unroll 1
		for (k.src = 0; r >= (some = rows_in(k.src, window)); k.src++)
			r -= some;
		r += rows_before(k.src, window);
		k.at = k.src * a.max_tokens + r, k.row = place_of(k.src) + r;
		return k;
	}
};

struct pass_board {
	static constexpr u32 rounds = 16; // under way

	staged_rows staged;
	reports made[rounds]; // of the warps, in each round of their tasks
	u32 told;             // rounds that have been told
	u32 failed;           // a warp has given up
};

// A pass over this rank's rows: makes the partial sums of rows by expert in staging, or copies rows by token there or,
// with y, out of it. In each round every warp has a part of a row, or a row. With SW_DISPATCH_BESIDE the kernel behind
// it, which reads and sums, runs next to it: the block's last warp tells ranks of each window of rows that is complete,
// so that no other waits for what it has stored.
template <kind type, bool float8> struct partials {
	static constexpr u32 vectors = SW_DISPATCH_PASS_PART / 512,
			     workers = SW_DISPATCH_SUM_PASS_THREADS / 32 - 1; // of a lane in a part; warps that make

	const sw_dispatch_args &a;
	pass_board &b;
	pass_order order;
	u64 own, epoch;
	u32 lane, warp, rounds;
	bool beside, by_expert;

	__device__ __forceinline__ partials(const sw_dispatch_args &a, pass_board &b, u64 epoch)
	    : a(a), b(b), order(a, b.staged), own(own_segment(a.world)), epoch(epoch), lane(threadIdx.x & 31),
	      warp(threadIdx.x / 32), beside((a.mode & SW_DISPATCH_BESIDE) != 0),
	      by_expert((a.mode & SW_DISPATCH_BY_EXPERT) != 0)
	{
		u32 all = order.rows() * a.parts, each = workers * gridDim.x;
		rounds = (max(all, blockIdx.x) - blockIdx.x + each - 1) / each;
	}

	// The number of a warp's task in a round: neighbours are in different blocks.
	__device__ __forceinline__ u32 number(u32 warp, u32 round) const
	{
		return (round * workers + warp) * gridDim.x + blockIdx.x;
	}

	// The experts' rows of a row's choices lane and lane+32, and their weights; -1 for no row.
	__device__ __forceinline__ void load_choices(const pass_order::task &k, int *row, float *weight) const
	{
		bool given = (a.mode & SW_DISPATCH_GIVEN) != 0;
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u64 i = static_cast<u64>(k.at) * a.top_k + lane + 32 * j;
			bool some = k.there && by_expert && lane + 32 * j < a.top_k;
			row[j] = some ? state::spread(a)[i] : -1;
			weight[j] = some && !given ? weight_of(a, i, 0) : 0;
			if (given && row[j] >= 0)
				weight[j] = weight_of(a, i, row[j]);
		}
	}

	// Waits until the caller has marked the rows of a task. False when the wait was given up.
	__device__ __forceinline__ bool await_marks(const pass_order::task &k) const
	{
		const u32 *counts = by_expert ? a.out.counts : a.out.rank_counts;
		bool good = true;
		if (!by_expert)
			good = await_ready(a, k.src, counts[k.src], epoch);
		else
#pragma unroll 1
			for (u32 c = lane; c < a.top_k; c += 32) {
				u64 i = static_cast<u64>(k.at) * a.top_k + c;
				int slot = state::spread(a)[i] < 0 ? -1 : slot_in(state::indices(a)[i]);
				if (slot >= 0)
					good &= await_ready(a, static_cast<u32>(slot), counts[slot], epoch);
			}
		return !__any_sync(~0u, !good);
	}

	__device__ __forceinline__ void load(uint4 *v, u64 row, u32 part) const
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = part * SW_DISPATCH_PASS_PART + i * 512 + lane * 16;
			v[i] = load_vector_if(at < a.row_bytes, row + at);
		}
	}

	// The part of a row's sum: the next row is on its way while one is added.
	template <typename F>
	__device__ __forceinline__ void add_up(const pass_order::task &k, const int *row, const float *weight,
	                                       F use) const
	{
		sum<type> s[vectors];
		uint4 v[vectors], next[vectors];
		u64 here = static_cast<u64>(__ballot_sync(~0u, row[1] >= 0)) << 32 | __ballot_sync(~0u, row[0] >= 0);
		auto load_first = [&](uint4 *to) {
			u32 c = __ffsll(here) - 1;
			load(to,
			     a.out.rows +
			         static_cast<u64>(__shfl_sync(~0u, c < 32 ? row[0] : row[1], c & 31)) * a.row_bytes,
			     k.part);
		};
		auto add = [&](const uint4 *from, u32 c) {
			float w = __shfl_sync(~0u, c < 32 ? weight[0] : weight[1], c & 31);
#pragma unroll
			for (u32 i = 0; i < vectors; i++)
				s[i].add_weighted(from[i], w);
		};
		if (here != 0)
			load_first(v);
#pragma unroll 1
		while (here != 0) {
			u32 c = __ffsll(here) - 1;
			here &= here - 1;
			if (here != 0)
				load_first(next);
			add(v, c);
			if (here == 0)
				break;
			c = __ffsll(here) - 1;
			here &= here - 1;
			if (here != 0)
				load_first(v);
			add(next, c);
		}
		use(s);
	}

	// Stores the part of a row's sum as float8.
	__device__ __forceinline__ void store_float8(const pass_order::task &k, const sum<type> *s, u32 part) const
	{
		u64 to = own + a.sum.from_rows + static_cast<u64>(k.row) * a.wire_bytes;
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = part * SW_DISPATCH_PASS_PART + i * 512 + lane * 16, element = at / numbers<type>::size,
			    scale;
			uint2 v = s[i].narrowed(scale);
			if (at >= a.row_bytes)
				continue;
			if constexpr (numbers<type>::count == 8)
				store_vector2(to + float8_sum::at(element), v);
			else
				*view<u32>(to + float8_sum::at(element)) = v.x;
			if (element % 128 == 0)
				*view<u32>(to + float8_sum::scale_at(element)) = scale;
		}
	}

	__device__ __forceinline__ void store(const pass_order::task &k, const uint4 *v, u32 part) const
	{
		u32 at = part * SW_DISPATCH_PASS_PART + lane * 16;
		u64 to = (a.sum.y != 0 ? a.sum.y : own + a.sum.from_rows) + static_cast<u64>(k.row) * a.row_bytes + at;
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			store_vector_if(at + i * 512 < a.row_bytes, to + i * 512, v[i]);
	}

	// Copies a task of a row by token, or makes float8 of it: the next part is on its way while one is stored.
	__device__ __forceinline__ void copy(const pass_order::task &k) const
	{
		constexpr u32 size = SW_DISPATCH_PASS_PART;
		u64 row = a.out.rows + static_cast<u64>(k.row) * a.row_bytes;
		u32 part = k.part * (a.part / size), end = min(part + a.part / size, (a.row_bytes + size - 1) / size);
		uint4 v[vectors], next[vectors];
		auto put = [&](const uint4 *from) {
			if constexpr (float8) {
				sum<type> s[vectors];
#pragma unroll
				for (u32 i = 0; i < vectors; i++)
					s[i].add(from[i]);
				store_float8(k, s, part);
			} else {
				store(k, from, part);
			}
			part++;
		};
		load(v, row, part);
#pragma unroll 1
		while (part < end) {
			if (part + 1 < end)
				load(next, row, part + 1);
			put(v);
			if (part == end)
				break;
			if (part + 1 < end)
				load(v, row, part + 1);
			put(next);
		}
	}

	__device__ __forceinline__ void copy_weights(const pass_order::task &k, const int *row) const
	{
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u32 c = lane + 32 * j;
			int r = by_expert ? row[j] : static_cast<int>(k.row * a.top_k + c);
			if (c < a.top_k)
				view<float>(own + a.sum.from_weights)[static_cast<u64>(k.row) * a.top_k + c] =
				    r < 0 ? 0 : a.out.weights[r];
		}
	}

	// Makes a warp's part of a round. False when a wait was given up.
	__device__ __forceinline__ bool make(const pass_order::task &k, const int *row, const float *weight) const
	{
		if (a.sum.ready != 0 && !await_marks(k))
			return false;
		if (by_expert)
			add_up(k, row, weight, [&](const sum<type> *s) {
				if constexpr (float8) {
					store_float8(k, s, k.part);
				} else {
					uint4 out[vectors];
#pragma unroll
					for (u32 i = 0; i < vectors; i++)
						out[i] = s[i].value();
					store(k, out, k.part);
				}
			});
		else
			copy(k);
		if (k.part == 0 && a.sum.from_weights != 0)
			copy_weights(k, row);
		return true;
	}

	__device__ __forceinline__ void work()
	{
		pass_order::task now = order.find(number(warp, 0));
		int row[2], next_row[2];
		float weight[2], next_weight[2];
		load_choices(now, row, weight);
#pragma unroll 1
		for (u32 round = 0; round < rounds; round++) {
			pass_order::task next = order.find(number(warp, round + 1));
			load_choices(next, next_row, next_weight);
			if (now.there && !make(now, row, weight)) {
				if (lane == 0)
					store_release_cta(&b.failed, 1u);
				return;
			}
			if (beside) {
				__syncwarp();
				if (lane == 0) {
#pragma unroll 1
					while (round >= pass_board::rounds &&
					       atom_acquire_cta(&b.told) + pass_board::rounds <= round)
						if (atom_acquire_cta(&b.failed) != 0)
							break;
					b.made[round % pass_board::rounds].report();
				}
			}
			now = next;
#pragma unroll
			for (u32 j = 0; j < 2; j++)
				row[j] = next_row[j], weight[j] = next_weight[j];
		}
	}

	// Tells ranks of complete windows. One warp; each lane goes through the tasks of one that works.
	__device__ __forceinline__ void publish_windows()
	{
#pragma unroll 1
		for (u32 round = 0; round < rounds; round++) {
			bool good = true;
			if (lane == 0)
#pragma unroll 1
				while (good && !b.made[round % pass_board::rounds].all(round / pass_board::rounds))
					good = atom_acquire_cta(&b.failed) == 0;
			if (__any_sync(~0u, !good))
				return;
			pass_order::task k;
			k.there = false;
			if (lane < workers)
				k = order.find(number(lane, round));
			if (k.there) {
				u32 window = window_of(a, k.row),
				    *making = state::making(a) + k.src * windows(a) + window;
				if (add_acq_rel_gpu(making, 1) + 1 == order.rows_in(k.src, k.window) * a.parts) {
					*making = 0;
					fence_acq_rel_sys(); // X4
					store_relaxed_sys(made_word(a, k.src, a.world.rank, window), epoch);
				}
			}
			__syncwarp();
			if (lane == 0)
				store_release_cta(&b.told, round + 1);
		}
	}
};

template <kind type, bool float8>
__device__ __forceinline__ void make_partials(const sw_dispatch_args &a, pass_board &b)
{
	await_stream();
	if (threadIdx.x == 0) {
		b.staged.make(a, state::arrived(a));
		b.told = b.failed = 0;
#pragma unroll
		for (u32 i = 0; i < pass_board::rounds; i++)
			b.made[i].expect(partials<type, float8>::workers);
	}
	// Staging is free when peers have read what it had for the call before.
	call now = call::look(a.world);
	u64 epoch = now.epoch(); // of the call that comes
	if (__syncthreads_or(epoch == 0 || !await_free_staging(a, epoch - 1)))
		return;
	bool beside = (a.mode & SW_DISPATCH_BESIDE) != 0;
	if (beside)
		release_stream();
	// The roles of warps: all but the last make sums, and that one tells peers of windows that are whole.
	partials<type, float8> p(a, b, epoch);
	if (threadIdx.x / 32 < p.workers)
		p.work();
	else if (beside)
		p.publish_windows();
	if (!beside)
		release_stream();
}

} // namespace sw
