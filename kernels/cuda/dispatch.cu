// MoE dispatch and combine: the kernels. Rows cross by token: a token once to a rank, however many of its experts are there. Where the caller wants them by expert, passes over
// a rank's own memory come behind a dispatch and before a combine. Their parts are in dispatch/, one idea a file:
//
//	numbers   rows of numbers: sums, rounding, float8 with scales
//	signals   what ranks tell each other about a call
//	routing   where tokens go
//	rows      many tokens on their way to ranks
//	few       few tokens
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
	if (!cached)
		placement::fill(a, b.near);
	if (threadIdx.x < a.movers * a.depth)
		b.full[threadIdx.x].init();
	if (threadIdx.x < SW_MAX_RANKS)
		b.sent[threadIdx.x] = b.before[threadIdx.x] = b.sum[threadIdx.x] = 0;
	if (threadIdx.x == 0)
		b.bad = 0;
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
	if (threadIdx.x == blockDim.x - 1)
		number.advance(a.world);
	rows_sender r(a, b, memory + ring, epoch);
	mover<Quantiser> m(a, r, memory);
	if (moves)
		m.begin();
	if (blockIdx.x == 0 && threadIdx.x < n && threadIdx.x != a.world.rank)
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
		if (!cached)
			r.tally(threadIdx.x - 32 * a.movers, blockDim.x - 32 * a.movers);
		r.write_beside(warp - a.movers, r.warps - a.movers, !Quantiser::makes_scales && a.scale_words != 0);
	}
	release_stream();
	__syncthreads();
	if (!good)
		return;
	if (threadIdx.x == 0 && b.bad != 0)
		complain(a, a.world.rank, b.bad, epoch);
	r.tell_done();
	if ((a.mode & SW_MOE_RECEIVE) == 0 || blockIdx.x != 0)
		return;
	rows_receiver in{a, b, epoch};
	if (threadIdx.x == 0)
		b.own = 0;
	__syncthreads();
#pragma unroll 1
	for (u32 i = threadIdx.x; i < gridDim.x && !cached; i += blockDim.x) { // all blocks of this rank
		u32 rows = 0;
		await_number(a, own_segment(a.world) + a.state.block_counts + (static_cast<u64>(i) * n + a.world.rank) * 8, epoch, a.world.rank, rows);
		atomicAdd(&b.own, rows);
	}
	__syncthreads();
	if (!cached)
		in.tell_counts();
	if (in.await(b.own) && !cached)
		in.tell_ranks();
}

// The number of the call that this rank is in, after its first half.
__device__ __forceinline__ u64 running_call(const sw_moe_args &a)
{
	call_number number;
	number.load(a.world);
	return number.epoch() == 0 ? 0 : number.v.a;
}

template <kind type> __device__ __forceinline__ void sum_rows(const sw_moe_args &a, u64 *base, arrivals *full, u64 *has, u8 *ring)
{
	u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, n = a.world.size, tasks = a.tokens * a.parts, step = gridDim.x * a.movers;
	u32 due = static_cast<u32>(clock()) + warp * (a.interval / a.movers);
	const int *places = reinterpret_cast<const int *>(own_segment(a.world) + a.state.places);
	u8 *mine = ring + static_cast<u64>(warp) * a.depth * n * a.part;
	full += warp * a.depth, has += warp * a.depth;
	int near = -1, far = -1; // the rows of the token that is loaded next, of ranks lane and lane+32
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
		u32 t = task / a.parts, at = (task - t * a.parts) * a.part, bytes = min(a.part, a.row_bytes - at), place = k % a.depth;
		int rows[2] = {near, far};
		look(k + 1);
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
				bulk_load(mine + (place * n + lane + 32 * i) * a.part, base[lane + 32 * i] + static_cast<u64>(rows[i]) * a.row_bytes + at, bytes, full + place);
	};
	look(0);
#pragma unroll 1
	for (u32 k = 0; k < a.depth; k++)
		load(k);
	u32 k = 0;
#pragma unroll 1
	for (u32 task = blockIdx.x + gridDim.x * warp; task < tasks; task += step, k++) {
		u32 t = task / a.parts, part = task - t * a.parts, at = part * a.part, bytes = min(a.part, a.row_bytes - at), place = k % a.depth;
		full[place].await(k / a.depth);
		u64 there = has[place];
#pragma unroll 1
		for (u32 i = lane * 16; i < bytes; i += 512) {
			sum<type> s;
#pragma unroll 1
			for (u64 left = there; left != 0; left &= left - 1)
				s.add(*reinterpret_cast<const uint4 *>(mine + (place * n + __ffsll(left) - 1) * a.part + i));
			s.add_biases(a, static_cast<u64>(t) * a.row_bytes + at + i);
			store_vector(a.y + static_cast<u64>(t) * a.row_bytes + at + i, s.value());
		}
		if (part == 0 && a.sum_weights != 0)
			sum_weights(a, t, lane);
		__syncwarp();
		load(k + a.depth);
	}
}

template <kind type> __device__ __forceinline__ void combine_rows(const sw_moe_args &a, u64 *base, arrivals *full, u64 *has, u8 *ring)
{
	if (threadIdx.x < a.movers * a.depth)
		full[threadIdx.x].init();
	fence_bulk();
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
	if (!await_rows(a, base, epoch))
		return;
	fence_bulk();
	if (threadIdx.x / 32 < a.movers)
		sum_rows<type>(a, base, full, has, ring);
	release_stream();
	tell_read(a, epoch);
	if ((a.mode & SW_MOE_KEEP) == 0)
		await_read(a, epoch);
}

// Makes the partial sums of rows by expert in staging, or copies rows by token there or, with y, out of it. A warp has 2 KiB of a row at a time.
template <kind type> __device__ __forceinline__ void make_partials(const sw_moe_args &a, staged_rows &staged)
{
	await_stream();
	if (threadIdx.x == 0)
		staged.make(a, reinterpret_cast<const u32 *>(own_segment(a.world) + a.state.arrived));
	call_number number;
	number.load(a.world);
	u64 epoch = number.epoch(); // of the call that comes
	if (__syncthreads_or(epoch == 0 || !await_free_staging(a, epoch - 1)))
		return;
	u32 lane = threadIdx.x & 31, warps = blockDim.x / 32, chunks = (a.row_bytes + 2047) / 2048, all = staged.first[a.world.size];
	bool by_expert = (a.mode & SW_MOE_BY_EXPERT) != 0;
	u64 own = own_segment(a.world);
	const int *spread = reinterpret_cast<const int *>(own + a.state.spread);
	const i64 *index = reinterpret_cast<const i64 *>(own + a.state.indices);
	const u32 *counts = reinterpret_cast<const u32 *>(by_expert ? a.counts : a.rank_counts);
#pragma unroll 1
	for (u32 task = threadIdx.x / 32 * gridDim.x + blockIdx.x; task < all * chunks; task += warps * gridDim.x) {
		u32 i = task / chunks, c = task - i * chunks, src, at = staged.at(a, i, src);
		u32 row = (a.mode & SW_MOE_COMPACT) != 0 ? i : at; // of a token-major output
		if (a.ready != 0) {
			bool good = true;
			if (!by_expert)
				good = await_ready(a, src, counts[src], epoch);
			else
#pragma unroll 1
				for (u32 k = lane; k < a.top_k; k += 32) {
					int slot = spread[static_cast<u64>(at) * a.top_k + k] < 0 ? -1 : static_cast<int>(index[static_cast<u64>(at) * a.top_k + k]);
					if (slot >= 0)
						good &= await_ready(a, static_cast<u32>(slot), counts[slot], epoch);
				}
			if (__any_sync(~0u, !good))
				return;
		}
		u64 to = (a.y != 0 ? a.y : own + a.from_rows) + static_cast<u64>(by_expert ? at : row) * a.row_bytes + c * 2048 + lane * 16;
		u32 left = a.row_bytes - c * 2048;
		if (!by_expert) {
			u64 from = a.rows + static_cast<u64>(row) * a.row_bytes + c * 2048 + lane * 16;
#pragma unroll
			for (u32 j = 0; j < 4; j++)
				store_vector_if(j * 512 + lane * 16 < left, to + j * 512, load_vector_if(j * 512 + lane * 16 < left, from + j * 512));
		} else {
			sum<type> s[4];
#pragma unroll 1
			for (u32 first = 0; first < a.top_k; first += 32) {
				u32 k = first + lane;
				int r = k < a.top_k ? spread[static_cast<u64>(at) * a.top_k + k] : -1;
				float w = r < 0 ? 0 : weight_of(a, static_cast<u64>(at) * a.top_k + k, r);
				u64 from = a.rows + c * 2048 + lane * 16;
				uint4 v[4], next[4];
				u32 here = __ballot_sync(~0u, r >= 0);
				auto load = [&](uint4 *to) {
					int row = __shfl_sync(~0u, r, __ffs(here) - 1);
#pragma unroll
					for (u32 j = 0; j < 4; j++)
						to[j] = load_vector_if(j * 512 + lane * 16 < left, from + static_cast<u64>(row) * a.row_bytes + j * 512);
				};
				auto add = [&](const uint4 *row, u32 which) {
					float weight = __shfl_sync(~0u, w, which);
#pragma unroll
					for (u32 j = 0; j < 4; j++)
						s[j].add_weighted(row[j], weight);
				};
				if (here != 0)
					load(v);
#pragma unroll 1
				while (here != 0) { // the next row is on its way while one is added
					u32 which = __ffs(here) - 1;
					here &= here - 1;
					if (here != 0)
						load(next);
					add(v, which);
					if (here == 0)
						break;
					which = __ffs(here) - 1;
					here &= here - 1;
					if (here != 0)
						load(v);
					add(next, which);
				}
			}
#pragma unroll
			for (u32 j = 0; j < 4; j++)
				store_vector_if(j * 512 + lane * 16 < left, to + j * 512, s[j].value());
		}
		if (c == 0 && a.from_weights != 0)
#pragma unroll 1
			for (u32 k = lane; k < a.top_k; k += 32) {
				int r = by_expert ? spread[static_cast<u64>(at) * a.top_k + k] : static_cast<int>(row * a.top_k + k);
				float w = r < 0 ? 0 : reinterpret_cast<const float *>(a.row_weights)[r];
				reinterpret_cast<float *>(own + a.from_weights)[static_cast<u64>(by_expert ? at : row) * a.top_k + k] = w;
			}
	}
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
	zero_padding(a, a.y, a.row_bytes, 0, 0);
	release_stream();
}

// The end of a dispatch of few tokens, by the first block.
__device__ __forceinline__ void receive_few(const sw_moe_args &a, rows_board &b, u64 epoch, u32 own)
{
	if (blockIdx.x != 0)
		return;
	rows_receiver in{a, b, epoch};
	bool cached = (a.mode & SW_MOE_CACHED) != 0;
	if (!cached)
		in.tell_counts();
	if (in.await(own) && !cached)
		in.tell_ranks();
}

template <typename Float8, bool quantises> __device__ __forceinline__ void send_few(const sw_moe_args &a, few_board &b, rows_board &in)
{
	u32 n = a.world.size, lane = threadIdx.x & 31;
	bool cached = (a.mode & SW_MOE_CACHED) != 0;
	u32 workers = gridDim.x > 1 && !cached ? gridDim.x - 1 : gridDim.x; // the last block counts choices, beside the others
	few_tasks tasks(a.tokens, a.row_bytes, workers);
	few_sender f{a, b, lane, n};
	if (!cached)
		placement::fill(a, b.near);
	if (threadIdx.x == 0)
		b.bad = 0;
	if (blockIdx.x == gridDim.x - 1)
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.slots; i += blockDim.x)
			b.tally[i] = 0;
	__syncthreads();
	await_stream();
	call_number number;
	number.load(a.world);
	u32 peer = blockDim.x - 1 - threadIdx.x; // the last threads look after peers
	begun seen;
	if (peer < n)
		seen.load(a, peer);
	few_row row;
	if (tasks.warp < tasks.count)
		row.load(a.x + static_cast<u64>(tasks.warp / tasks.parts) * a.row_bytes, a.row_bytes, tasks.warp % tasks.parts, lane);
	f.look(cached);
	u64 epoch = number.epoch();
	bool good = epoch != 0;
	if (good && peer < n && peer != a.world.rank) {
		if (blockIdx.x == 0)
			tell_begin(a, peer, epoch, gridDim.x);
		good = await_room(a, peer, epoch, seen);
	}
	if (__syncthreads_or(!good))
		return;
	if (threadIdx.x == 0) {
		number.advance(a.world);
		if (b.bad != 0 && blockIdx.x == 0)
			complain(a, a.world.rank, b.bad, epoch);
	}
	Float8 q;
#pragma unroll 1
	for (u32 task = tasks.warp; task != ~0u && task < tasks.count + a.tokens; task += tasks.warps) {
		if (task >= tasks.count) {
			f.write_beside(task - tasks.count, cached, !quantises && a.scale_words != 0);
			continue;
		}
		u32 t = task / tasks.parts, part = task - t * tasks.parts;
		if (task != tasks.warp)
			row.load(a.x + static_cast<u64>(t) * a.row_bytes, a.row_bytes, part, lane);
		if constexpr (quantises)
			q.make(row, (a.mode & SW_MOE_EXPONENTS) != 0);
#pragma unroll 1
		for (u32 d = 0; d < n; d++) {
			int to = f.row(t, d);
			if (to < 0)
				continue;
			u64 there = segment(a.world, d);
			if constexpr (quantises)
				q.store(a, f, there, to, part, lane);
			else
				row.store(there + a.to_rows + static_cast<u64>(to) * a.wire_bytes, a.row_bytes, part, lane);
		}
	}
	if (!cached && blockIdx.x == gridDim.x - 1)
		f.tell_counts(epoch);
	__syncthreads();
	if (threadIdx.x < n && threadIdx.x != a.world.rank) {
		u64 rows = b.bad != 0 ? b.bad : blockIdx.x == 0 ? f.before(a.tokens, threadIdx.x) : 0;
		fence_acq_rel_sys();
		store16_relaxed_sys(done_word(a, threadIdx.x, a.world.rank, blockIdx.x, epoch), epoch, rows);
	}
	if (threadIdx.x < n && blockIdx.x == 0 && a.counters != 0)
		atomicAdd(reinterpret_cast<unsigned long long *>(a.counters) + a.experts + threadIdx.x,
			  static_cast<unsigned long long>(f.before(a.tokens, threadIdx.x)) * (a.wire_bytes + 4 * a.scale_words));
	release_stream();
	if ((a.mode & SW_MOE_RECEIVE) != 0)
		receive_few(a, in, epoch, f.before(a.tokens, a.world.rank));
}

template <kind type> __device__ __forceinline__ void combine_few(const sw_moe_args &a, u64 *base)
{
	u32 lane = threadIdx.x & 31, n = a.world.size;
	few_tasks tasks(a.tokens, a.row_bytes, gridDim.x);
	await_stream();
	bool begins = (a.mode & SW_MOE_SEND) != 0;
	call_number number;
	number.load(a.world);
	const int *places = reinterpret_cast<const int *>(own_segment(a.world) + a.state.places);
	int row = lane < n && tasks.warp < tasks.count ? places[static_cast<u64>(tasks.warp / tasks.parts) * n + lane] : -1; // of the first task
	u64 epoch = number.epoch();
	if (__any_sync(~0u, epoch == 0))
		epoch = 0;
	epoch -= epoch != 0 && !begins ? 1 : 0;
	if (epoch != 0 && begins && blockIdx.x == 0 && threadIdx.x < n && threadIdx.x != a.world.rank)
		tell_begin(a, threadIdx.x, epoch, gridDim.x);
	bool good = epoch != 0;
	if (threadIdx.x < n && good) {
		u64 word, place = a.from_rows;
		if (threadIdx.x != a.world.rank)
			good = await_begin(a, threadIdx.x, epoch, word, place);
		if (good)
			base[threadIdx.x] = segment(a.world, threadIdx.x) + resolve(a.world, threadIdx.x, place);
	}
	bool stop = __syncthreads_or(!good);
	if (begins && epoch != 0 && threadIdx.x == blockDim.x - 1)
		number.advance(a.world); // also where peers make another call
	if (stop)
		return;
#pragma unroll 1
	for (u32 task = tasks.warp; task < tasks.count; task += tasks.warps) {
		u32 t = task / tasks.parts, part = task - t * tasks.parts;
		if (task != tasks.warp)
			row = lane < n ? places[static_cast<u64>(t) * n + lane] : -1;
		sum<type> s[few_vectors];
		few_row one, other;
#pragma unroll 1
		for (u32 d = 0; d < n; d += 2) { // two ranks' rows are on their way together
			int first = d < 32 ? __shfl_sync(~0u, row, d) : places[static_cast<u64>(t) * n + d];
			int second = d + 1 == n ? -1 : d + 1 < 32 ? __shfl_sync(~0u, row, (d + 1) & 31) : places[static_cast<u64>(t) * n + d + 1];
			if (first >= 0)
				one.load(base[d] + static_cast<u64>(first) * a.row_bytes, a.row_bytes, part, lane);
			if (second >= 0)
				other.load(base[d + 1] + static_cast<u64>(second) * a.row_bytes, a.row_bytes, part, lane);
#pragma unroll
			for (u32 i = 0; i < few_vectors; i++) {
				if (first >= 0)
					s[i].add(one.v[i]);
				if (second >= 0)
					s[i].add(other.v[i]);
			}
		}
#pragma unroll
		for (u32 i = 0; i < few_vectors; i++) {
			u32 at = (part * few_vectors + i) * 512 + lane * 16;
			if (at < a.row_bytes) {
				s[i].add_biases(a, static_cast<u64>(t) * a.row_bytes + at);
				one.v[i] = s[i].value();
			}
		}
		one.store(a.y + static_cast<u64>(t) * a.row_bytes, a.row_bytes, part, lane);
		if (part == 0 && a.sum_weights != 0)
			sum_weights(a, t, lane);
	}
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

#define SW_DISPATCH_FEW(name, float8, quantises)                                                                                                                                  \
	extern "C" __global__ void __launch_bounds__(SW_MOE_FEW_THREADS, 1) name(const __grid_constant__ sw_moe_args a)                                                             \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_SHARED(few_board, b);                                                                                                                                           \
		SW_SHARED(rows_board, in);                                                                                                                                         \
		send_few<float8, quantises>(a, b, in);                                                                                                                             \
	}

SW_DISPATCH_FEW(dispatch_few, few_float8<kind::f32>, false)
SW_DISPATCH_FEW(dispatch_few_f32, few_float8<kind::f32>, true)
SW_DISPATCH_FEW(dispatch_few_bf16, few_float8<kind::bf16>, true)
SW_DISPATCH_FEW(dispatch_few_f16, few_float8<kind::f16>, true)

#define SW_COMBINE(suffix, type)                                                                                                                                                  \
	extern "C" __global__ void __launch_bounds__(SW_MOE_SUM_THREADS, 1) combine_rows_##suffix(const __grid_constant__ sw_moe_args a)                                            \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_DYNAMIC_LINES(memory);                                                                                                                                         \
		SW_SHARED(combine_board, b);                                                                                                                                       \
		combine_rows<type>(a, b.base, b.full, b.has, reinterpret_cast<u8 *>(memory));                                                                                             \
	}                                                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_FEW_THREADS, 1) combine_few_##suffix(const __grid_constant__ sw_moe_args a)                                             \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_SHARED(combine_board, b);                                                                                                                                       \
		combine_few<type>(a, b.base);                                                                                                                                      \
	}                                                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_PASS_THREADS) experts_sum_##suffix(const __grid_constant__ sw_moe_args a)                                               \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_SHARED(staged_rows, staged);                                                                                                                                    \
		make_partials<type>(a, staged);                                                                                                                                    \
	}                                                                                                                                                                          \
	extern "C" __global__ void __launch_bounds__(SW_MOE_PASS_THREADS) experts_spread_##suffix(const __grid_constant__ sw_moe_args a)                                            \
	{                                                                                                                                                                          \
		using namespace sw;                                                                                                                                                \
		SW_SHARED(staged_rows, staged);                                                                                                                                    \
		spread_gradients<type>(a, staged);                                                                                                                                 \
	}

SW_COMBINE(f32, kind::f32)
SW_COMBINE(bf16, kind::bf16)
SW_COMBINE(f16, kind::f16)

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

// The second half of a token-major dispatch by itself. One block.
extern "C" __global__ void __launch_bounds__(SW_MOE_THREADS, 1) dispatch_receive(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	SW_SHARED(rows_board, b);
	await_stream();
	u64 epoch = running_call(a);
	if (__syncthreads_or(epoch == 0))
		return;
	bool cached = (a.mode & SW_MOE_CACHED) != 0;
	const int *places = reinterpret_cast<const int *>(own_segment(a.world) + a.state.places);
	if (threadIdx.x == 0)
		b.own = 0;
	__syncthreads();
#pragma unroll 1
	for (u32 t = threadIdx.x; t < a.tokens && !cached; t += blockDim.x)
		if (places[static_cast<u64>(t) * a.world.size + a.world.rank] >= 0)
			atomicAdd(&b.own, 1u);
	__syncthreads();
	rows_receiver in{a, b, epoch};
	if (!cached)
		in.tell_counts();
	if (in.await(b.own) && !cached)
		in.tell_ranks();
}

// Rows from staging to their experts: the second half of an expert-major dispatch, or of the part of a backward that needs no sums.
extern "C" __global__ void __launch_bounds__(SW_MOE_PASS_THREADS, 1) experts_take(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	SW_DYNAMIC_LINES(memory);
	SW_SHARED(take_board, b);
	await_stream();
	u64 epoch = running_call(a);
	if (__syncthreads_or(epoch == 0))
		return;
	bool cached = (a.mode & SW_MOE_CACHED) != 0;
	taker t(a, b, reinterpret_cast<u32 *>(memory), epoch);
	const u32 *kept = reinterpret_cast<const u32 *>(own_segment(a.world) + a.state.arrived);
	for (u32 i = threadIdx.x; i < a.local; i += blockDim.x)
		t.hist[i] = 0;
	if (!cached && !t.look_at_counts())
		return;
	const int *places = reinterpret_cast<const int *>(own_segment(a.world) + a.state.places);
	u32 own = 0;
	for (u32 i = threadIdx.x; i < a.tokens; i += blockDim.x) // of this rank, whose stores came before
		own += places[static_cast<u64>(i) * a.world.size + a.world.rank] >= 0 ? 1 : 0;
	if (threadIdx.x == 0)
		b.own = 0;
	__syncthreads();
	if (own != 0)
		atomicAdd(&b.own, own);
	__syncthreads();
	rows_receiver in{a, b.rows, epoch};
	if (!in.await(b.own))
		return;
	if (threadIdx.x == 0)
		b.staged.make(a, cached ? kept : b.rows.sum);
	if (!cached && t.warp == 0)
		t.lay_out();
	if (!cached && blockIdx.x == 0) {
		t.count_ranks();
		t.tell_rank_counts();
	}
	__syncthreads();
	if (!cached && blockIdx.x == 0 && a.mapped != 0 && threadIdx.x == 0) {
		fence_acq_rel_sys();
		store_relaxed_sys(a.mapped, a.ticket);
	}
	stretch mine(b.staged.first[t.n], blockIdx.x, gridDim.x);
	if (!cached) {
		if (blockIdx.x == 0 && threadIdx.x == 0)
			__threadfence(); // what others add to comes before the word that lets them
		if (!t.find_bases(mine))
			return;
		if (t.warp == 0)
			t.rank_choices(mine);
		__syncthreads();
	}
	t.copy(mine);
	release_stream();
	if (a.landed != 0) {
		__syncthreads();
		fence_acq_rel_sys();
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.local; i += blockDim.x)
			if (t.hist[i] != 0)
				atomicAdd_system(reinterpret_cast<u32 *>(a.landed) + i, t.hist[i]);
	}
}

// Padding that callers find zero. Behind experts_take.
extern "C" __global__ void __launch_bounds__(SW_MOE_PASS_THREADS, 1) experts_zero(const __grid_constant__ sw_moe_args a)
{
	using namespace sw;
	await_stream();
	zero_padding(a, a.rows, a.wire_bytes, a.row_sources, a.row_weights);
	release_stream();
}
