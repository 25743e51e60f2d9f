// MoE dispatch and combine: the kernels. Rows cross by token: a token once to a rank, however many of its experts are there. Where the caller wants them by expert, passes over
// a rank's own memory come behind a dispatch and before a combine. Few tokens take one kernel each way. Their parts are in dispatch/, one idea a file:
//
//	numbers   rows of numbers: sums, rounding, float8 with scales
//	signals   what ranks tell each other about a call
//	routing   where tokens go
//	rows      many tokens on their way to ranks
//	few       few tokens, both ways
//	sums      rows on their way back
//	experts   between rows by token and rows by expert
//
// A call with a handle is counted in its struct sw_control by the kernel of its first half. A kernel that gives up leaves a fault and returns.
#include "dispatch/experts.cuh"
#include "dispatch/few.cuh"

namespace sw {

template <typename Quantiser> __device__ __forceinline__ void send_rows(const sw_moe_args &a, rows_board &b, u8 *memory)
{
	u32 n = a.world.size, warp = threadIdx.x / 32, ring = a.movers * (a.depth * a.part + (Quantiser::makes_scales ? SW_MOE_SCALES : 0));
	bool cached = (a.mode & SW_MOE_CACHED) != 0, moves = warp < a.movers;
	bool by_expert = (a.mode & SW_MOE_BY_EXPERT) != 0, beside = (a.mode & SW_MOE_BESIDE) != 0;
	if (!cached) {
		placement::fill(a, b.near);
		stretch_board s(a, memory + ring);
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.slots; i += blockDim.x)
			s.count[i] = s.before[i] = 0;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.share * n; i += blockDim.x)
			s.place[i] = 0;
	}
	if (threadIdx.x < a.movers * a.depth)
		b.full[threadIdx.x].init();
	if (threadIdx.x < SW_MAX_RANKS)
		b.sent[threadIdx.x] = b.before[threadIdx.x] = b.sum[threadIdx.x] = 0;
	if (threadIdx.x < 32)
		b.moved[threadIdx.x] = 0;
	if (threadIdx.x == 0)
		b.bad = 0, b.failed = 0;
	fence_bulk();
	await_stream();
	call_number number;
	number.load(a.world);
	begun seen;
	if (threadIdx.x < n)
		seen.load(a, threadIdx.x);
	u64 epoch = number.epoch();
	if (__syncthreads_or(epoch == 0))
		return;
	if (beside)
		release_stream(); // for experts_take, which counts the call
	else if (threadIdx.x == blockDim.x - 1)
		number.advance(a.world);
	rows_sender r(a, b, memory + ring, epoch);
	mover<Quantiser> m(a, r, memory);
	if (moves)
		m.begin();
	begin_landing(a, epoch);
	if (blockIdx.x == 0 && threadIdx.x < n)
		tell_begin(a, threadIdx.x, epoch, gridDim.x);
	bool good = threadIdx.x >= n || threadIdx.x == a.world.rank || await_room(a, threadIdx.x, epoch, seen);
	if (cached)
		r.recall();
	else {
		r.count();
		good = r.look_back() && good;
		good = !__syncthreads_or(!good);
		if (good && (a.mode & SW_MOE_COMPACT) != 0) {
			if (blockIdx.x == gridDim.x - 1)
				r.tell_totals();
			__syncthreads(); // what has been told changes now
		}
		good = good && r.find_bases();
	}
	good = !__syncthreads_or(!good);
	if (good && !cached) {
		r.place();
		__syncthreads();
	}
	if (moves)
		m.run(good);
	else if (good) {
		u32 thread = threadIdx.x - 32 * a.movers, threads = blockDim.x - 32 * a.movers, numbers = !cached && by_expert ? 1 : 0; // warps that number choices
		if (!cached)
			good = r.count_choices(thread, threads);
		if (thread / 32 < numbers)
			r.number_choices();
		else
			r.write_beside(thread / 32 - numbers, threads / 32 - numbers, !Quantiser::makes_scales && a.scale_words != 0);
		part_sync(beside_part, threads);
		if (good && by_expert && thread < 32)
			r.tell_progress();
	}
	if (!beside)
		release_stream();
	if (__syncthreads_or(!good))
		return;
	if (threadIdx.x == 0 && b.bad != 0)
		complain(a, a.world.rank, b.bad, epoch);
	r.tell_done();
	if ((a.mode & SW_MOE_RECEIVE) != 0 && blockIdx.x == 0)
		rows_receiver{a, b.sum, epoch}.finish(cached);
}

// The number of the call that this rank is in, after its first half.
__device__ __forceinline__ u64 running_call(const sw_moe_args &a)
{
	call_number number;
	number.load(a.world);
	return number.epoch() == 0 ? 0 : number.v.a;
}

// The bytes of a partial sum, and of the sum that a part of it becomes.
template <bool float8> __device__ __forceinline__ u32 sum_bytes(const sw_moe_args &a) { return float8 ? a.wire_bytes : a.row_bytes; }
template <kind type, bool float8> __device__ __forceinline__ u32 part_bytes(const sw_moe_args &a)
{
	return float8 ? a.part / float8_sum::stretch * SW_MOE_STRETCH * numbers<type>::size : a.part;
}

template <kind type, bool float8, bool waits> __device__ __forceinline__ void sum_rows(const sw_moe_args &a, const combine_board &b, arrivals *full, u64 *has, u64 epoch, u8 *ring)
{
	u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, n = a.world.size, tasks = a.tokens * a.parts, step = gridDim.x * a.movers;
	u32 due = static_cast<u32>(clock()) + warp * (a.interval / a.movers);
	const int *places = reinterpret_cast<const int *>(own_segment(a.world) + a.state.places);
	u8 *mine = ring + static_cast<u64>(warp) * a.depth * n * a.part;
	full += warp * a.depth, has += warp * a.depth;
	int near = -1, far = -1; // the rows of the token that is loaded next, of ranks lane and lane+32
	[[maybe_unused]] int seen[2] = {-1, -1}; // windows of those ranks that are made
	[[maybe_unused]] bool lost = false;	 // a wait was given up
	auto look = [&](u32 k) {
		u32 task = blockIdx.x + gridDim.x * warp + k * step;
		u64 first = static_cast<u64>(task / a.parts) * n;
		near = task < tasks && lane < n ? places[first + lane] : -1;
		far = task < tasks && lane + 32 < n ? places[first + lane + 32] : -1;
	};
	// Begins to load part k of this warp.
	auto load = [&](u32 k) {
		u32 task = blockIdx.x + gridDim.x * warp + k * step;
		if (task >= tasks)
			return;
		u32 t = task / a.parts, at = (task - t * a.parts) * a.part, bytes = min(a.part, sum_bytes<float8>(a) - at), place = k % a.depth;
		int rows[2] = {near, far};
		look(k + 1);
		if constexpr (waits) {
			bool good = !lost;
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				if (good && rows[i] >= 0 && (b.makes >> (lane + 32 * i) & 1) != 0)
					good = await_made(a, lane + 32 * i, rows[i], epoch, seen[i]);
			fence_bulk();
			lost = __any_sync(~0u, !good);
			if (lost)
				rows[0] = rows[1] = -1;
		}
		u64 there = static_cast<u64>(__ballot_sync(~0u, rows[1] >= 0)) << 32 | __ballot_sync(~0u, rows[0] >= 0);
		u32 count = __popc(static_cast<u32>(there)) + __popc(static_cast<u32>(there >> 32));
		if (a.interval != 0) {
#pragma unroll 1
			while (static_cast<int>(due - static_cast<u32>(clock())) > 0)
				;
			due += a.interval * (count - static_cast<u32>(there >> a.world.rank & 1));
		}
		if (lane == 0) {
			has[place] = there;
			full[place].expect(bytes * count);
		}
		__syncwarp();
#pragma unroll
		for (u32 i = 0; i < 2; i++)
			if (rows[i] >= 0)
				bulk_load(mine + (place * n + lane + 32 * i) * a.part, b.base[lane + 32 * i] + static_cast<u64>(rows[i]) * sum_bytes<float8>(a) + at, bytes, full + place);
	};
	look(0);
#pragma unroll 1
	for (u32 k = 0; k < a.depth; k++)
		load(k);
	u32 k = 0;
#pragma unroll 1
	for (u32 task = blockIdx.x + gridDim.x * warp; task < tasks; task += step, k++) {
		u32 t = task / a.parts, part = task - t * a.parts, at = part * part_bytes<type, float8>(a), bytes = min(part_bytes<type, float8>(a), a.row_bytes - at), place = k % a.depth;
		full[place].await(k / a.depth);
		u64 there = has[place];
#pragma unroll 1
		for (u32 i = lane * 16; i < bytes; i += 512) {
			sum<type> s;
#pragma unroll 1
			for (u64 left = there; left != 0; left &= left - 1) {
				if constexpr (float8) {
					const u8 *from = mine + (place * n + __ffsll(left) - 1) * a.part;
					u32 element = i / numbers<type>::size;
					const u8 *narrow = from + float8_sum::at(element);
					uint2 v = numbers<type>::count == 8 ? *reinterpret_cast<const uint2 *>(narrow) : make_uint2(*reinterpret_cast<const u32 *>(narrow), 0);
					s.add_scaled(v, *reinterpret_cast<const float *>(from + float8_sum::scale_at(element)));
				} else {
					s.add(*reinterpret_cast<const uint4 *>(mine + (place * n + __ffsll(left) - 1) * a.part + i));
				}
			}
			s.add_biases(a, static_cast<u64>(t) * a.row_bytes + at + i);
			store_vector(a.y + static_cast<u64>(t) * a.row_bytes + at + i, s.value());
		}
		if (part == 0 && a.sum_weights != 0)
			sum_weights(a, t, lane);
		__syncwarp();
		load(k + a.depth);
	}
}

template <kind type, bool float8> __device__ __forceinline__ void combine_rows(const sw_moe_args &a, combine_board &b, u8 *ring)
{
	if (threadIdx.x < a.movers * a.depth)
		b.full[threadIdx.x].init();
	if (threadIdx.x == 0)
		b.makes = 0;
	fence_bulk();
	bool beside = (a.mode & SW_MOE_BESIDE) != 0;
	if (!beside)
		await_stream();
	bool begins = (a.mode & SW_MOE_SEND) != 0;
	call_number number;
	number.load(a.world);
	u64 epoch = number.epoch();
	if (__syncthreads_or(epoch == 0))
		return;
	if (begins && threadIdx.x == blockDim.x - 1)
		number.advance(a.world);
	epoch -= begins ? 0 : 1;
	if (begins && blockIdx.x == 0 && threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		tell_begin(a, threadIdx.x, epoch, gridDim.x);
	if (!await_ranks(a, b, epoch))
		return;
	fence_bulk();
	if (threadIdx.x / 32 < a.movers && b.makes != 0)
		sum_rows<type, float8, true>(a, b, b.full, b.has, epoch, ring);
	else if (threadIdx.x / 32 < a.movers)
		sum_rows<type, float8, false>(a, b, b.full, b.has, epoch, ring);
	release_stream();
	if (beside)
		await_stream(); // what comes behind this kernel comes behind that one
	tell_read(a, epoch);
	if ((a.mode & SW_MOE_KEEP) == 0)
		await_read(a, epoch);
}

// The rows of staging in the order in which a pass makes them: window by window, so that every rank gets rows from the start. A warp asks for its tasks, parts of rows, in order.
struct pass_order {
	const sw_moe_args &a;
	const staged_rows &staged;
	u32 span, window, first, last; // rows of a window; the first task of the window, and of the next

	__device__ __forceinline__ pass_order(const sw_moe_args &a, const staged_rows &staged)
	    : a(a), staged(staged), span((a.mode & SW_MOE_BESIDE) != 0 ? SW_MOE_WINDOW : a.max_tokens), window(0), first(0), last(0)
	{
		measure();
	}

	__device__ __forceinline__ u32 rows_in(u32 src, u32 window) const
	{
		return static_cast<u32>(min(max(static_cast<int>(staged.first[src + 1] - staged.first[src]) - static_cast<int>(window * span), 0), static_cast<int>(span)));
	}

	__device__ __forceinline__ void measure()
	{
		first = last;
#pragma unroll 1
		for (u32 src = 0; src < a.world.size; src++)
			last += rows_in(src, window) * a.parts;
	}

	struct task {
		u32 src, at, row, part, window; // at is the row in staging, row that of a token-major output
		bool there;
	};

	// The task of a number, which is greater than the last one that was asked for.
	__device__ __forceinline__ task find(u32 number)
	{
		task k;
#pragma unroll 1
		while (number >= last && (window + 1) * span < a.max_tokens)
			window++, measure();
		if (!(k.there = number < last))
			return k;
		u32 r = (number - first) / a.parts, some;
		k.part = (number - first) - r * a.parts, k.window = window;
#pragma unroll 1
		for (k.src = 0; r >= (some = rows_in(k.src, window)); k.src++)
			r -= some;
		r += window * span;
		k.at = k.src * a.max_tokens + r, k.row = (a.mode & SW_MOE_COMPACT) != 0 ? staged.first[k.src] + r : k.at;
		return k;
	}
};

struct pass_board {
	static constexpr u32 rounds = 16; // under way

	staged_rows staged;
	reports made[rounds]; // of the warps, in each round of their tasks
	u32 told;	      // rounds that have been told
	u32 failed;	      // a warp has given up
};

// A pass over this rank's rows: makes the partial sums of rows by expert in staging, or copies rows by token there or, with y, out of it. In each round every warp has a part of a row.
// With SW_MOE_BESIDE the kernel behind it, which reads and sums, runs beside it: the block's last warp tells ranks of each window of rows that is complete, so that no other
// waits for what it has stored.
template <kind type, bool float8> struct partials {
	static constexpr u32 vectors = SW_MOE_PASS_PART / 512, workers = SW_MOE_SUM_PASS_THREADS / 32 - 1; // of a lane in a part; warps that make

	const sw_moe_args &a;
	pass_board &b;
	pass_order order;
	u64 own, epoch;
	u32 lane, warp, rounds;
	bool beside, by_expert;

	__device__ __forceinline__ partials(const sw_moe_args &a, pass_board &b, u64 epoch)
	    : a(a), b(b), order(a, b.staged), own(own_segment(a.world)), epoch(epoch), lane(threadIdx.x & 31), warp(threadIdx.x / 32), beside((a.mode & SW_MOE_BESIDE) != 0),
	      by_expert((a.mode & SW_MOE_BY_EXPERT) != 0)
	{
		u32 all = b.staged.first[a.world.size] * a.parts, each = workers * gridDim.x;
		rounds = (max(all, blockIdx.x) - blockIdx.x + each - 1) / each;
	}

	// The number of a warp's task in a round: neighbours are in different blocks.
	__device__ __forceinline__ u32 number(u32 warp, u32 round) const { return (round * workers + warp) * gridDim.x + blockIdx.x; }

	// The experts' rows of a row's choices lane and lane+32, and their weights; -1 where there is none.
	__device__ __forceinline__ void look(const pass_order::task &k, int *row, float *weight) const
	{
		bool given = (a.mode & SW_MOE_GIVEN) != 0;
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u64 i = static_cast<u64>(k.at) * a.top_k + lane + 32 * j;
			bool some = k.there && by_expert && lane + 32 * j < a.top_k;
			row[j] = some ? reinterpret_cast<const int *>(own + a.state.spread)[i] : -1;
			weight[j] = some && !given ? weight_of(a, i, 0) : 0;
			if (given && row[j] >= 0)
				weight[j] = weight_of(a, i, row[j]);
		}
	}

	// Waits until the caller has marked the rows of a task. False when the wait was given up.
	__device__ __forceinline__ bool await_marks(const pass_order::task &k) const
	{
		const u32 *counts = reinterpret_cast<const u32 *>(by_expert ? a.counts : a.rank_counts);
		bool good = true;
		if (!by_expert)
			good = await_ready(a, k.src, counts[k.src], epoch);
		else
#pragma unroll 1
			for (u32 c = lane; c < a.top_k; c += 32) {
				u64 i = static_cast<u64>(k.at) * a.top_k + c;
				int slot = reinterpret_cast<const int *>(own + a.state.spread)[i] < 0 ? -1 : slot_in(reinterpret_cast<const u64 *>(own + a.state.indices)[i]);
				if (slot >= 0)
					good &= await_ready(a, static_cast<u32>(slot), counts[slot], epoch);
			}
		return !__any_sync(~0u, !good);
	}

	__device__ __forceinline__ void load(uint4 *v, u64 row, u32 part) const
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = part * SW_MOE_PASS_PART + i * 512 + lane * 16;
			v[i] = load_vector_if(at < a.row_bytes, row + at);
		}
	}

	// The part of a row's sum: the next row is on its way while one is added.
	template <typename F> __device__ __forceinline__ void add_up(const pass_order::task &k, const int *row, const float *weight, F use) const
	{
		sum<type> s[vectors];
		uint4 v[vectors], next[vectors];
		u64 here = static_cast<u64>(__ballot_sync(~0u, row[1] >= 0)) << 32 | __ballot_sync(~0u, row[0] >= 0);
		auto load_first = [&](uint4 *to) {
			u32 c = __ffsll(here) - 1;
			load(to, a.rows + static_cast<u64>(__shfl_sync(~0u, c < 32 ? row[0] : row[1], c & 31)) * a.row_bytes, k.part);
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
	__device__ __forceinline__ void store_float8(const pass_order::task &k, const sum<type> *s) const
	{
		u64 to = own + a.from_rows + static_cast<u64>(by_expert ? k.at : k.row) * a.wire_bytes;
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = k.part * SW_MOE_PASS_PART + i * 512 + lane * 16, element = at / numbers<type>::size, scale;
			uint2 v = s[i].narrowed(scale);
			if (at >= a.row_bytes)
				continue;
			if constexpr (numbers<type>::count == 8)
				store_vector2(to + float8_sum::at(element), v);
			else
				*reinterpret_cast<u32 *>(to + float8_sum::at(element)) = v.x;
			if (element % 128 == 0)
				*reinterpret_cast<u32 *>(to + float8_sum::scale_at(element)) = scale;
		}
	}

	__device__ __forceinline__ void copy_weights(const pass_order::task &k, const int *row) const
	{
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u32 c = lane + 32 * j;
			int r = by_expert ? row[j] : static_cast<int>(k.row * a.top_k + c);
			if (c < a.top_k)
				reinterpret_cast<float *>(own + a.from_weights)[static_cast<u64>(by_expert ? k.at : k.row) * a.top_k + c] = r < 0 ? 0 : reinterpret_cast<const float *>(a.row_weights)[r];
		}
	}

	// Makes a warp's part of a round. False when a wait was given up.
	__device__ __forceinline__ bool make(const pass_order::task &k, const int *row, const float *weight) const
	{
		if (a.ready != 0 && !await_marks(k))
			return false;
		uint4 out[vectors];
		if (by_expert)
			add_up(k, row, weight, [&](const sum<type> *s) {
				if constexpr (float8) {
					store_float8(k, s);
				} else {
#pragma unroll
					for (u32 i = 0; i < vectors; i++)
						out[i] = s[i].value();
				}
			});
		else
			load(out, a.rows + static_cast<u64>(k.row) * a.row_bytes, k.part);
		if constexpr (float8) {
			if (!by_expert) {
				sum<type> s[vectors];
#pragma unroll
				for (u32 i = 0; i < vectors; i++)
					s[i].add(out[i]);
				store_float8(k, s);
			}
		} else {
			u32 at = k.part * SW_MOE_PASS_PART + lane * 16;
			u64 to = (a.y != 0 ? a.y : own + a.from_rows) + static_cast<u64>(by_expert ? k.at : k.row) * a.row_bytes + at;
#pragma unroll
			for (u32 i = 0; i < vectors; i++)
				store_vector_if(at + i * 512 < a.row_bytes, to + i * 512, out[i]);
		}
		if (k.part == 0 && a.from_weights != 0)
			copy_weights(k, row);
		return true;
	}

	__device__ __forceinline__ void work()
	{
		pass_order::task now = order.find(number(warp, 0));
		int row[2], next_row[2];
		float weight[2], next_weight[2];
		look(now, row, weight);
#pragma unroll 1
		for (u32 round = 0; round < rounds; round++) {
			pass_order::task next = order.find(number(warp, round + 1));
			look(next, next_row, next_weight);
			if (now.there && !make(now, row, weight)) {
				if (lane == 0)
					store_release_cta(&b.failed, 1u);
				return;
			}
			if (beside) {
				__syncwarp();
				if (lane == 0) {
#pragma unroll 1
					while (round >= pass_board::rounds && atom_acquire_cta(&b.told) + pass_board::rounds <= round)
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
	__device__ __forceinline__ void tell()
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
				u32 *making = reinterpret_cast<u32 *>(own + a.state.making) + k.src * windows(a) + k.window;
				if (add_acq_rel_gpu(making, 1) + 1 == order.rows_in(k.src, k.window) * a.parts) {
					*making = 0;
					fence_acq_rel_sys(); // X4
					store_relaxed_sys(made_word(a, k.src, a.world.rank, k.window), epoch);
				}
			}
			__syncwarp();
			if (lane == 0)
				store_release_cta(&b.told, round + 1);
		}
	}
};

template <kind type, bool float8> __device__ __forceinline__ void make_partials(const sw_moe_args &a, pass_board &b)
{
	await_stream();
	if (threadIdx.x == 0) {
		b.staged.make(a, reinterpret_cast<const u32 *>(own_segment(a.world) + a.state.arrived));
		b.told = b.failed = 0;
	}
	if (threadIdx.x < pass_board::rounds)
		b.made[threadIdx.x].expect(partials<type, float8>::workers);
	call_number number;
	number.load(a.world);
	u64 epoch = number.epoch(); // of the call that comes
	if (__syncthreads_or(epoch == 0 || !await_free_staging(a, epoch - 1)))
		return;
	bool beside = (a.mode & SW_MOE_BESIDE) != 0;
	if (beside)
		release_stream();
	partials<type, float8> p(a, b, epoch);
	if (threadIdx.x / 32 < p.workers)
		p.work();
	else if (beside)
		p.tell();
	if (!beside)
		release_stream();
}

// The gradients of rows by expert: from those of their tokens, which lie in staging. A warp has a whole row.
template <kind type> __device__ __forceinline__ void spread_gradients(const sw_moe_args &a, staged_rows &staged)
{
	using number = numbers<type>;
	await_stream();
	if (threadIdx.x == 0)
		staged.make(a, reinterpret_cast<const u32 *>(own_segment(a.world) + a.state.arrived));
	call_number counter;
	counter.load(a.world);
	if (__syncthreads_or(counter.epoch() == 0))
		return;
	u32 lane = threadIdx.x & 31, all = staged.first[a.world.size];
	bool dots = a.from_weights != 0 || a.sum_weights != 0;
	u64 own = own_segment(a.world);
	const int *spread = reinterpret_cast<const int *>(own + a.state.spread);
#pragma unroll 1
	for (u32 task = threadIdx.x / 32 * gridDim.x + blockIdx.x; task < all * a.top_k; task += blockDim.x / 32 * gridDim.x) {
		u32 i = task / a.top_k, k = task - i * a.top_k, src, at = staged.at(a, i, src);
		u64 j = static_cast<u64>(at) * a.top_k + k;
		int r = spread[j];
		float w = r < 0 ? 1 : weight_of(a, j, r);
		float chain[8];
#pragma unroll
		for (u32 c = 0; c < 8; c++)
			chain[c] = 0;
		u64 dy = own + a.to_rows + static_cast<u64>(at) * a.row_bytes, row = a.rows + static_cast<u64>(max(r, 0)) * a.row_bytes, out = a.y + static_cast<u64>(max(r, 0)) * a.row_bytes;
		constexpr u32 vectors = 8 / number::count; // of 8 neighbouring elements
#pragma unroll 1
		for (u32 e = lane * 8; r >= 0 && e * number::size < a.row_bytes; e += 256)
#pragma unroll
			for (u32 v = 0; v < vectors; v++) {
				u32 o = e * number::size + 16 * v;
				if (o >= a.row_bytes)
					continue;
				float g[number::count], x[number::count], p[number::count];
				number::unpack(load_vector(dy + o), g);
				if (dots)
					number::unpack(load_vector(row + o), x);
#pragma unroll
				for (u32 c = 0; c < number::count; c++) {
					if (dots)
						chain[v * number::count + c] = __fadd_rn(chain[v * number::count + c], __fmul_rn(x[c], g[c]));
					p[c] = __fmul_rn(g[c], w);
				}
				store_vector(out + o, number::pack(p));
			}
		// the order of kernels.DotChains
#pragma unroll
		for (u32 by = 4; by >= 1; by /= 2)
#pragma unroll
			for (u32 c = 0; c < by; c++)
				chain[c] = __fadd_rn(chain[c], chain[c + by]);
		float dot = chain[0];
#pragma unroll
		for (u32 by = 16; by >= 1; by /= 2)
			dot = __fadd_rn(dot, __shfl_down_sync(~0u, dot, by));
		if (lane == 0) {
			if (a.from_weights != 0)
				reinterpret_cast<float *>(own + a.from_weights)[j] = r < 0 ? 0 : dot;
			if (a.sum_weights != 0 && r >= 0)
				reinterpret_cast<float *>(a.sum_weights)[r] = dot;
		}
	}
	zero_padding(a, a.y, a.row_bytes, 0, 0, reinterpret_cast<const u32 *>(a.counts), reinterpret_cast<const u32 *>(a.offsets));
	release_stream();
}

// A dispatch of few tokens, or one of its halves.
template <typename Wire, bool by_expert> __device__ __forceinline__ void few_dispatch(const sw_moe_args &a, few_board &b, u64 *memory)
{
	bool sends = (a.mode & SW_MOE_SEND) != 0, cached = (a.mode & SW_MOE_CACHED) != 0;
	u32 lane = threadIdx.x & 31, n = a.world.size, parts = Wire::parts(a.row_bytes), count = sends ? a.tokens * parts : 0;
	few_sender f(a, b, memory);
	few_tasks tasks(0, gridDim.x > 1 && !cached ? gridDim.x - 1 : gridDim.x);
	if (sends)
		f.clear();
	__syncthreads();
	await_stream();
	call_number number;
	number.load(a.world);
	wiping wiped(a);
	few_vectors<Wire::vectors> row;
	u64 ranks = 0;
	if (tasks.first < count) {
		row.load(a.x + static_cast<u64>(tasks.first / parts) * a.row_bytes, a.row_bytes, tasks.first % parts, lane);
		ranks = f.ranks(tasks.first / parts);
	}
	if (sends && f.tells())
		f.look();
	u64 epoch = number.epoch();
	if (__syncthreads_or(epoch == 0))
		return;
	epoch -= sends ? 0 : 1;
	if (sends) {
		if (threadIdx.x == blockDim.x - 1 && number.advance(a.world))
			wiped.advance(a, epoch);
		begin_landing(a, epoch);
		if (blockIdx.x == 0 && threadIdx.x < n)
			tell_begin(a, threadIdx.x, epoch, 1);
		if (f.tells())
			f.tell(epoch);
	}
	u32 flag = Wire::flag(epoch);
#pragma unroll 1
	for (u32 task = tasks.first; task < count; task += tasks.step) {
		u32 t = task / parts, part = task - t * parts;
		if (task != tasks.first) {
			row.load(a.x + static_cast<u64>(t) * a.row_bytes, a.row_bytes, part, lane);
			ranks = f.ranks(t);
		}
		Wire x;
		x.make(row, lane, (a.mode & SW_MOE_EXPONENTS) != 0);
#pragma unroll 1
		for (u64 left = ranks; left != 0; left &= left - 1)
			x.put(row_place(a, __ffsll(left) - 1, a.world.rank, t, epoch), part, Wire::used(a.row_bytes, part, lane), lane, flag);
		if (part == 0 && !Wire::scaled && a.scale_words != 0)
			send_scales(a, t, ranks, epoch, lane);
	}
	release_stream();
	if ((a.mode & SW_MOE_RECEIVE) == 0)
		return;
	taker t(a, b.take, reinterpret_cast<u8 *>(memory), epoch);
	__syncthreads();
	wait w;
	w.epoch = epoch;
	few_receiver<Wire, by_expert> in(a, t, w, epoch, wiped.token(a, epoch, sends));
	u64 word, place;
	if (blockIdx.x == (gridDim.x > 2 ? 1 : 0) && threadIdx.x >= blockDim.x - 32) { // a warp looks for ranks that make another call, which tell nothing else
#pragma unroll 1
		for (u32 p = lane; p < n; p += 32)
			if (!await_begin(a, p, epoch, word, place))
				end_waits(a, epoch);
		if (cached)
			in.wipe_cached();
	}
	if constexpr (by_expert)
		if (!t.prepare())
			return;
	if (blockIdx.x == 0) {
		rows_receiver counts{a, b.take.sum, epoch};
		bool good = true;
		if (threadIdx.x < n) {
			good = await_done(a, threadIdx.x, 0, epoch, word);
			if (good && is_bad(word))
				complain(a, threadIdx.x, word, epoch), good = false;
			b.take.sum[threadIdx.x] = rows_of(word);
			if (!good)
				end_waits(a, epoch);
		} else if (threadIdx.x >= SW_MAX_RANKS && !by_expert && !cached) {
			good = counts.tell_counts(threadIdx.x - SW_MAX_RANKS, blockDim.x - SW_MAX_RANKS);
		}
		if (__syncthreads_or(!good))
			return;
		if (!cached && !by_expert)
			counts.tell_ranks();
		if (!cached && by_expert && threadIdx.x < n)
			reinterpret_cast<u32 *>(own_segment(a.world) + a.state.arrived)[threadIdx.x] = b.take.sum[threadIdx.x];
	}
	in.run(cached);
}

// A combine of few tokens, or one of its halves.
template <kind type, bool float8, bool by_expert> __device__ __forceinline__ void few_combine(const sw_moe_args &a)
{
	u32 lane = threadIdx.x & 31, n = a.world.size;
	bool sends = (a.mode & SW_MOE_SEND) != 0;
	wait w;
	few_combiner<type, float8, by_expert> c(a, w);
	few_tasks tasks(0, gridDim.x);
	await_stream();
	call_number number;
	number.load(a.world);
	wiping wiped(a);
	typename few_combiner<type, float8, by_expert>::errand first;
	if (sends && tasks.first < c.errands())
		c.look(tasks.first, first);
	u64 epoch = number.epoch();
	if (__syncthreads_or(epoch == 0))
		return;
	if (sends && threadIdx.x == blockDim.x - 1 && number.advance(a.world))
		wiped.advance(a, epoch);
	epoch -= sends ? 0 : 1;
	c.begin(epoch);
	u32 peer = threadIdx.x;
	if (sends && blockIdx.x == 0 && peer < n && peer != a.world.rank) {
		tell_begin(a, peer, epoch, 0);
		store16_relaxed_sys(done_word(a, peer, a.world.rank, 0, epoch), epoch, done(0, 0, true)); // none of its blocks reads rows of peers
	}
	if (sends)
		c.send(first);
	release_stream();
	if ((a.mode & SW_MOE_RECEIVE) == 0)
		return;
	if (blockIdx.x == 0 && threadIdx.x < 32)
#pragma unroll 1
		for (u32 p = lane; p < n; p += 32) {
			u64 word, place;
			if (p != a.world.rank && !await_begin(a, p, epoch, word, place))
				end_waits(a, epoch);
		}
	c.receive(wiped.token(a, epoch, sends));
}

// The weights that lie beside rows go back to their tokens.
__device__ __forceinline__ void combine_beside(const sw_moe_args &a, combine_board &b)
{
	if (threadIdx.x == 0)
		b.makes = 0;
	__syncthreads();
	await_stream();
	call_number number;
	number.load(a.world);
	u64 epoch = number.epoch();
	if (__syncthreads_or(epoch == 0))
		return;
	if (threadIdx.x == blockDim.x - 1)
		number.advance(a.world);
	if (blockIdx.x == 0 && threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		tell_begin(a, threadIdx.x, epoch, gridDim.x);
	if (!await_ranks(a, b, epoch))
		return;
#pragma unroll 1
	for (u32 t = threadIdx.x / 32 * gridDim.x + blockIdx.x; t < a.tokens && a.sum_weights != 0; t += blockDim.x / 32 * gridDim.x)
		sum_weights(a, t, threadIdx.x & 31);
	release_stream();
	tell_read(a, epoch);
	if ((a.mode & SW_MOE_KEEP) == 0)
		await_read(a, epoch);
}

} // namespace sw

#define SW_DISPATCH_ROWS(name, quantiser)                                                                                                                                         \
	extern "C" __global__ void __launch_bounds__(SW_MOE_THREADS, 1) name(const __grid_constant__ sw_moe_args a)                                                                 \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_DYNAMIC_LINES(memory);                                                                                                                                         \
		SW_SHARED(rows_board, b);                                                                                                                                          \
		send_rows<quantiser>(a, b, reinterpret_cast<u8 *>(memory));                                                                                                        \
	}

SW_DISPATCH_ROWS(dispatch_rows, as_they_are)
SW_DISPATCH_ROWS(dispatch_rows_f32, to_float8<kind::f32>)
SW_DISPATCH_ROWS(dispatch_rows_bf16, to_float8<kind::bf16>)
SW_DISPATCH_ROWS(dispatch_rows_f16, to_float8<kind::f16>)

// One kernel for rows by token, and one for rows by expert, so that neither has code of the other on its way.
#define SW_DISPATCH_FEW(name, wire, by_expert)                                                                                                                                    \
	extern "C" __global__ void __launch_bounds__(SW_MOE_FEW_THREADS, 1) name(const __grid_constant__ sw_moe_args a)                                                             \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_DYNAMIC_LINES(memory);                                                                                                                                         \
		SW_SHARED(few_board, b);                                                                                                                                           \
		few_dispatch<wire, by_expert>(a, b, memory);                                                                                                                       \
	}

SW_DISPATCH_FEW(dispatch_few, few_dense, false)
SW_DISPATCH_FEW(dispatch_few_f32, few_float8<kind::f32>, false)
SW_DISPATCH_FEW(dispatch_few_bf16, few_float8<kind::bf16>, false)
SW_DISPATCH_FEW(dispatch_few_f16, few_float8<kind::f16>, false)
SW_DISPATCH_FEW(dispatch_few_by_expert, few_dense, true)
SW_DISPATCH_FEW(dispatch_few_by_expert_f32, few_float8<kind::f32>, true)
SW_DISPATCH_FEW(dispatch_few_by_expert_bf16, few_float8<kind::bf16>, true)
SW_DISPATCH_FEW(dispatch_few_by_expert_f16, few_float8<kind::f16>, true)

// Float8: partial sums cross as float8.
#define SW_COMBINE(suffix, type, float8)                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_SUM_THREADS, 1) combine_rows_##suffix(const __grid_constant__ sw_moe_args a)                                            \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_DYNAMIC_LINES(memory);                                                                                                                                         \
		SW_SHARED(combine_board, b);                                                                                                                                       \
		combine_rows<type, float8>(a, b, reinterpret_cast<u8 *>(memory));                                                                                                         \
	}                                                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_FEW_SUM_THREADS, 1) combine_few_##suffix(const __grid_constant__ sw_moe_args a)                                         \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		few_combine<type, float8, false>(a);                                                                                                                               \
	}                                                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_FEW_SUM_THREADS, 1) combine_few_by_expert_##suffix(const __grid_constant__ sw_moe_args a)                               \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		few_combine<type, float8, true>(a);                                                                                                                                \
	}                                                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_SUM_PASS_THREADS, 1) experts_sum_##suffix(const __grid_constant__ sw_moe_args a)                                               \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_SHARED(pass_board, b);                                                                                                                                          \
		make_partials<type, float8>(a, b);                                                                                                                                 \
	}

SW_COMBINE(f32, kind::f32, false)
SW_COMBINE(bf16, kind::bf16, false)
SW_COMBINE(f16, kind::f16, false)
SW_COMBINE(f32_float8, kind::f32, true)
SW_COMBINE(bf16_float8, kind::bf16, true)
SW_COMBINE(f16_float8, kind::f16, true)

#define SW_SPREAD(suffix, type)                                                                                                                                                   \
	extern "C" __global__ void __launch_bounds__(SW_MOE_PASS_THREADS) experts_spread_##suffix(const __grid_constant__ sw_moe_args a)                                            \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_SHARED(staged_rows, staged);                                                                                                                                    \
		spread_gradients<type>(a, staged);                                                                                                                                 \
	}

SW_SPREAD(f32, kind::f32)
SW_SPREAD(bf16, kind::bf16)
SW_SPREAD(f16, kind::f16)

// The first half of a combine by itself: tells the peers where the rows are.
extern "C" __global__ void __launch_bounds__(SW_MAX_RANKS, 1) combine_begin(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	await_stream();
	call_number number;
	number.load(a.world);
	u64 epoch = number.epoch();
	if (epoch == 0)
		return;
	if (threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		tell_begin(a, threadIdx.x, epoch, 0);
	__syncthreads();
	if (threadIdx.x == 0)
		number.advance(a.world);
}

extern "C" __global__ void __launch_bounds__(SW_MOE_FEW_SUM_THREADS, 1) combine_weights(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	SW_SHARED(combine_board, b);
	combine_beside(a, b);
}

// The second half of a token-major dispatch by itself. One block.
extern "C" __global__ void __launch_bounds__(SW_MOE_THREADS, 1) dispatch_receive(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	SW_SHARED(receive_board, b);
	await_stream();
	u64 epoch = running_call(a);
	if (__syncthreads_or(epoch == 0))
		return;
	rows_receiver{a, b.sum, epoch}.finish((a.mode & SW_MOE_CACHED) != 0);
}

// Rows from staging to their experts: the second half of an expert-major dispatch. With SW_MOE_BESIDE it begins while the kernel before it runs, which sends.
extern "C" __global__ void __launch_bounds__(SW_MOE_PASS_THREADS, 1) experts_take(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	SW_DYNAMIC_LINES(memory);
	SW_SHARED(take_board, b);
	bool beside = (a.mode & SW_MOE_BESIDE) != 0;
	if (!beside)
		await_stream();
	call_number number;
	number.load(a.world);
	u64 epoch = number.epoch() == 0 ? 0 : number.v.a + (beside ? 1 : 0);
	if (threadIdx.x < SW_MAX_RANKS)
		b.sum[threadIdx.x] = 0;
	if (threadIdx.x < a.movers)
		b.full[threadIdx.x].init();
	fence_bulk();
	bool good = !__syncthreads_or(epoch == 0);
	if (good && beside && threadIdx.x == blockDim.x - 1)
		number.advance(a.world);
	taker t(a, b, reinterpret_cast<u8 *>(memory), epoch);
	good = good && t.prepare() && t.copy_as_they_come();
	if (!__syncthreads_or(!good) && blockIdx.x == 0) {
		good = !__syncthreads_or(!rows_receiver{a, b.sum, epoch}.await(threadIdx.x, blockDim.x));
		if (good && threadIdx.x < t.n && !t.cached)
			reinterpret_cast<u32 *>(own_segment(a.world) + a.state.arrived)[threadIdx.x] = b.sum[threadIdx.x];
	}
	bulk_await();
	release_stream();
	if (beside)
		await_stream(); // what comes behind this kernel comes behind that one
}
