// A combine of few tokens in one kernel: a rank sends the sum of what its experts made of each token as packets, and
// the token's rank adds those up. Where the token's rank has the weights of a combine, they cross in its notes first.
//
// combine_few and its kin call this. It reads the experts' rows and writes the notes and packets of its peers' states;
// it reads those of its own and writes the caller's sums.
#pragma once

#include "../experts.cuh"
#include "wipe.cuh"

namespace sw {

// The rows of a combine on their way: this rank's partial sums, and what peers' become. Late: the weights of rows come
// in this call.
template <kind type, bool float8, bool by_expert, bool late> struct few_combiner {
	static_assert(by_expert || !late, "rows by token are not weighted");
	using Wire = std::conditional_t<float8, few_float8<type>, few_plain>;
	static constexpr u32 vectors = Wire::vectors, experts = 4,
			     sources = 2; // the last two: rows that a warp loads together to add them

	const sw_dispatch_args &a;
	u64 epoch, own;
	u32 flag, row_flag, lane, n;
	wait &w;

	__device__ __forceinline__ few_combiner(const sw_dispatch_args &a, wait &w)
	    : a(a), own(own_segment(a.world)), lane(threadIdx.x & 31), n(a.world.size), w(w)
	{
	}

	__device__ __forceinline__ void begin(u64 call)
	{
		epoch = w.epoch = call;
		flag = packet::flag(call), row_flag = Wire::flag(call);
	}

	// Waits until the caller has marked the rows of the token in place p, from rank src.
	__device__ __forceinline__ bool await_marks(u32 src, u32 p) const
	{
		if (!by_expert)
			return !__any_sync(~0u, !await_ready(a, src, a.out.rank_counts[src], epoch));
		bool good = true;
#pragma unroll 1
		for (u32 c = lane; c < a.top_k; c += 32) {
			int slot = slot_in(state::indices(a)[static_cast<u64>(p) * a.top_k + c]);
			if (slot >= 0)
				good &= await_ready(a, static_cast<u32>(slot), a.out.counts[slot], epoch);
		}
		return !__any_sync(~0u, !good);
	}

	__device__ __forceinline__ void set(Wire &x, const sum<type> *s) const
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			if constexpr (float8) {
				u32 scale;
				uint2 v = s[i].narrowed(scale);
				x.set(i, v.x, v.y, scale, lane);
			} else {
				x.set(i, s[i].value());
			}
	}

	// The parts of a task that are known before the call is.
	struct errand {
		u32 r, p, part, src, t; // row r, from rank src, and its place in that rank's part; its token
		bool there;
		int row[2]; // experts' rows of choices lane and lane+32, and their weights
		float weight[2];
		few_vectors<vectors> v; // where a row is its rank's partial sum
	};

	// The part of a partial sum of the experts' rows, in the order of choices. Weights that come in this call are
	// awaited while the first rows are on their way. False when the wait was given up.
	__device__ __forceinline__ bool add_up(errand &x, sum<type> *s) const
	{
		bool known = !late;
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			u32 left = __ballot_sync(~0u, x.row[half] >= 0);
#pragma unroll 1
			while (left != 0) {
				few_vectors<vectors> v[experts];
				float by[experts];
				u32 from[experts], some = min(static_cast<u32>(__popc(left)), experts);
#pragma unroll
				for (u32 j = 0; j < experts; j++) {
					from[j] = left == 0 ? 0 : __ffs(left) - 1;
					left &= left - 1;
					if constexpr (!late)
						by[j] = __shfl_sync(~0u, x.weight[half], from[j]);
					u64 there =
					    a.out.rows +
					    static_cast<u64>(__shfl_sync(~0u, x.row[half], from[j])) * a.row_bytes;
					v[j].load(there, j < some ? a.row_bytes : 0, x.part, lane);
				}
				if constexpr (late) {
					if (!known && !await_weights(x))
						return false;
					known = true;
#pragma unroll
					for (u32 j = 0; j < experts; j++)
						by[j] = __shfl_sync(~0u, x.weight[half], from[j]);
				}
#pragma unroll
				for (u32 j = 0; j < experts; j++)
					if (j < some)
#pragma unroll
						for (u32 i = 0; i < vectors; i++)
							s[i].add_weighted(v[j].v[i], by[j]);
			}
		}
		return true;
	}

	// Sends the weights of this rank's tokens to the ranks that have rows of them. Each thread of the grid has some
	// packets, and none waits before it has sent its own.
	__device__ __forceinline__ void send_weights() const
	{
		const int *places = state::places(a);
		u32 packets = weight_packets(a);
#pragma unroll 1
		for (u32 i = threadIdx.x * gridDim.x + blockIdx.x; i < a.tokens * packets * n;
		     i += blockDim.x * gridDim.x) {
			u32 t = i / (packets * n), rest = i - t * packets * n, p = rest / n, d = rest - p * n, v[3];
			bool goes = places[t * n + d] >= 0;
#pragma unroll
			for (u32 j = 0; j < 3; j++)
				v[j] = 3 * p + j < a.top_k
				           ? __float_as_uint(a.send.weights[static_cast<u64>(t) * a.top_k + 3 * p + j])
				           : 0;
			if (goes)
				packet::put(note_place(a, d, a.world.rank, t, epoch) + weights_in_note(a) + 16 * p,
				            flag, v[0], v[1], v[2]);
		}
	}

	// Takes the weights that the rank of a row's token has sent. False when the wait was given up.
	__device__ __forceinline__ bool await_weights(errand &x) const
	{
		u64 place = note_place(a, a.world.rank, x.src, x.t, epoch) + weights_in_note(a);
		bool good = true;
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u32 k = lane + 32 * j;
			packet v{};
#pragma unroll 1
			while (k < a.top_k && good && (v = packet::get(place + 16 * (k / 3)), !v.has(flag)))
				good = masks::slow(a, w);
			x.weight[j] = __uint_as_float(v.word(k % 3));
		}
		if (!good)
			give_up(a.world, w.kind, x.src, epoch, true);
		return !__any_sync(~0u, !good);
	}

	__device__ __forceinline__ u32 errands() const { return a.max_tokens * n * Wire::parts(a.row_bytes); }

	__device__ __forceinline__ void load(u32 task, errand &x) const
	{
		bool given = (a.mode & SW_DISPATCH_GIVEN) != 0;
		u32 parts = Wire::parts(a.row_bytes), i = task / (n * parts), rest = task - i * n * parts;
		const u32 *arrived = state::arrived(a);
		x.src = rest / parts, x.part = rest - x.src * parts, x.p = x.r = x.src * a.max_tokens + i;
		u32 here = arrived[x.src];
		if (!by_expert && (a.mode & SW_DISPATCH_COMPACT) != 0) { // rows of one rank follow those before
			u32 before = 0;
#pragma unroll 1
			for (u32 src = lane; src < x.src; src += 32)
				before += arrived[src];
			x.r = __reduce_add_sync(~0u, before) + i;
		}
		if (!by_expert && a.sum.ready == 0 && x.r < a.out.most) // whether it is there or not
			x.v.load(a.out.rows + static_cast<u64>(x.r) * a.row_bytes, a.row_bytes, x.part, lane);
		x.t = static_cast<u32>(state::sources(a)[x.p] >> 32);
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u64 c = static_cast<u64>(x.p) * a.top_k + lane + 32 * j;
			bool some = by_expert && lane + 32 * j < a.top_k;
			x.row[j] = some ? state::spread(a)[c] : -1;
			x.weight[j] = some && !given && !late ? weight_of(a, c, 0) : 0;
		}
		x.there = i < here;
	}

	// Sends what this rank has of its peers' tokens. x is the first of the warp's tasks.
	__device__ __forceinline__ void send(errand &x)
	{
		bool given = (a.mode & SW_DISPATCH_GIVEN) != 0;
		few_tasks tasks(0, gridDim.x);
		u32 most = 0; // the most rows that came from a rank: no task behind them has any
#pragma unroll 1
		for (u32 p = lane; p < n; p += 32)
			most = max(most, state::arrived(a)[p]);
		u32 count = __reduce_max_sync(~0u, most) * n * Wire::parts(a.row_bytes);
#pragma unroll 1
		for (u32 task = tasks.first; task < count; task += tasks.step) {
			if (task != tasks.first)
				load(task, x);
			if (!x.there || (masks::on(a) && __any_sync(~0u, masks::without(a, x.src)))) // of one mind
				continue;
#pragma unroll
			for (u32 j = 0; j < 2; j++)
				if (given && x.row[j] >= 0)
					x.weight[j] = weight_of(a, 0, x.row[j]);
			if (a.sum.ready != 0) {
				if (!await_marks(x.src, x.p))
					return;
				if (!by_expert)
					x.v.load(a.out.rows + static_cast<u64>(x.r) * a.row_bytes, a.row_bytes, x.part,
					         lane);
			}
			Wire words;
			if constexpr (by_expert || float8) {
				sum<type> s[vectors];
				if constexpr (by_expert) {
					if (!add_up(x, s))
						return;
				} else
#pragma unroll
					for (u32 j = 0; j < vectors; j++)
						s[j].add(x.v.v[j]);
				set(words, s);
			} else {
				words.make(x.v, lane, 0);
			}
			words.write_packets(row_place(a, x.src, a.world.rank, x.t, epoch), x.part,
			                    Wire::used(a.row_bytes, x.part, lane), lane, row_flag);
			if (x.part != 0 || a.out.weights == 0 || a.sum.from_weights == 0)
				continue;
#pragma unroll
			for (u32 j = 0; j < 2; j++) {
				u32 k = lane + 32 * j;
				i64 at = by_expert ? x.row[j] : static_cast<i64>(x.r) * a.top_k + k;
				if (k < a.top_k)
					packet::put(note_place(a, x.src, a.world.rank, x.t, epoch) + 16 * (1 + k), flag,
					            at < 0 ? 0 : __float_as_uint(a.out.weights[at]), 0, 0);
			}
		}
	}

	// Sums what comes. Where ranks were masked before all of it had come, the last block sums those ranks' tokens
	// anew, without them. shared is a word of the block.
	__device__ __forceinline__ void receive(u32 wiped, u32 *shared)
	{
		few_tasks tasks(0, gridDim.x);
		forget(wiped, tasks);
		u32 first = tasks.first, step = tasks.step, without = 0;
#pragma unroll 1
		for (;;) {
			add_parts(first, step, without);
			if (!masks::on(a) || without != 0)
				return;
			u32 last = masks::through(a, shared);
			if (last != 0 && threadIdx.x == 0)
				masks::take_in(a, epoch);
			without = last & masks::all;
			if (without == 0)
				return;
			first = threadIdx.x / 32, step = blockDim.x / 32;
		}
	}

	// Forgets what lies in places that are not used.
	__device__ __forceinline__ void forget(u32 wiped, const few_tasks &tasks)
	{
		const int *places = state::places(a);
		if (tasks.first == tasks.step - 1) { // the warp that has the least to do
			u64 come = wiped < a.tokens ? ranks(places, wiped) : 0, weighed = 0;
			u32 weights = weights_in_note(a);
			if constexpr (late)
				weighed = senders(wiped);
#pragma unroll 1
			for (u32 src = 0; src < n; src++) {
				if ((come >> src & 1) == 0)
					wipe(a, src, wiped, epoch, 0, weights, lane);
				if ((weighed >> src & 1) == 0)
					wipe_note(a, src, wiped, epoch, weights, a.state.note_stride, lane);
			}
		}
	}

	// The ranks whose token t has a row here, as bits. A rank's rows are in the order of its tokens.
	__device__ __forceinline__ u64 senders(u32 t) const
	{
		u32 bits[2];
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u32 src = lane + 32 * j, low = 0, high = src < n ? state::arrived(a)[src] : 0, end = high;
			const u64 *sources = state::sources(a) + static_cast<u64>(src) * a.max_tokens;
#pragma unroll 1
			while (low < high) {
				u32 half = (low + high) / 2;
				if (sources[half] >> 32 < t)
					low = half + 1;
				else
					high = half;
			}
			bits[j] = __ballot_sync(~0u, low < end && sources[low] >> 32 == t);
		}
		return static_cast<u64>(bits[1]) << 32 | bits[0];
	}

	// Sums parts of tokens: all, or those of tokens that go to ranks of `without`, without these. A warp ends when
	// a wait is given up.
	__device__ __forceinline__ void add_parts(u32 first, u32 step, u32 without)
	{
		u32 parts = Wire::parts(a.row_bytes);
		const int *places = state::places(a);
#pragma unroll 1
		for (u32 task = first; task < a.tokens * parts; task += step) {
			u32 t = task / parts, part = task - t * parts, used = Wire::used(a.row_bytes, part, lane);
			u64 left = ranks(places, t);
			if (without != 0) {
				if ((left & without) == 0)
					continue;
				left &= ~static_cast<u64>(without);
			}
			sum<type> s[vectors];
#pragma unroll
			for (u32 i = 0; i < vectors; i++) {
				u32 at = (part * vectors + i) * 512 + lane * 16;
				if (at < a.row_bytes)
					s[i].add_biases(a, static_cast<u64>(t) * a.row_bytes + at);
			}
#pragma unroll 1
			while (left != 0) {
				Wire x[sources];
				u32 from[sources], some = min(static_cast<u32>(__popcll(left)), sources), there = 0;
#pragma unroll
				for (u32 j = 0; j < sources; j++) {
					from[j] = left == 0 ? 0 : __ffsll(left) - 1;
					left &= left - 1;
				}
				bool good = true;
				u32 gone = 0,
				    last = 0; // of the sources: those that are masked, and looked at once more
#pragma unroll 1
				while (good) {
#pragma unroll
					for (u32 j = 0; j < sources; j++)
						if (j < some && (there >> j & 1) == 0)
							there |= static_cast<u32>(x[j].read_packets(
								     row_place(a, a.world.rank, from[j], t, epoch),
								     part, used, lane, row_flag))
							         << j;
					if (there == (1u << some) - 1)
						break;
					if (masks::on(a)) {
						u32 missing = ((1u << some) - 1) & ~there;
						gone |= missing & last, there |= missing & last, last = 0;
#pragma unroll
						for (u32 j = 0; j < sources; j++)
							if ((missing >> j & 1) != 0 && masks::without(a, from[j]))
								last |= 1u << j;
						if (there == (1u << some) - 1)
							break;
					}
					if (!(good = masks::slow(a, w)))
						give_up(a.world, w.kind, from[__ffs(~there) - 1], epoch, false);
				}
				if (__any_sync(~0u, !good))
					return;
				if (masks::on(a)) {
					gone = __reduce_or_sync(~0u, gone);
#pragma unroll
					for (u32 j = 0; j < sources; j++)
						if ((gone >> j & 1) != 0 && lane == 0)
							masks::lose(a, 1u << from[j]);
				}
#pragma unroll
				for (u32 j = 0; j < sources; j++)
					x[j].join(lane);
#pragma unroll
				for (u32 j = 0; j < sources; j++)
#pragma unroll
					for (u32 i = 0; i < vectors; i++)
						if (j < some && (gone >> j & 1) == 0) {
							if constexpr (float8)
								s[i].add_scaled(x[j].vector(i), x[j].scale(i, lane));
							else
								s[i].add(x[j].vector(i));
						}
			}
#pragma unroll
			for (u32 i = 0; i < vectors; i++) {
				u32 at = (part * vectors + i) * 512 + lane * 16;
				if (at < a.row_bytes)
					store_vector(a.sum.y + static_cast<u64>(t) * a.row_bytes + at, s[i].value());
			}
			if (part == 0 && a.sum.weights != 0 && !take_weights(t, without))
				return;
		}
	}

	// The ranks that have rows of token t, as bits.
	__device__ __forceinline__ u64 ranks(const int *places, u32 t) const
	{
		const int *p = places + static_cast<u64>(t) * n;
		u32 low = __ballot_sync(~0u, lane < n && p[lane] >= 0),
		    high = n > 32 ? __ballot_sync(~0u, lane + 32 < n && p[lane + 32] >= 0) : 0;
		return static_cast<u64>(high) << 32 | low;
	}

	// The weights that lie next to the rows of token t, 0 for those of ranks of `without`.
	__device__ __forceinline__ bool take_weights(u32 t, u32 without)
	{
		const int *who = state::who(a);
		bool good = true;
#pragma unroll 1
		for (u32 k = lane; k < a.top_k; k += 32) {
			u64 i = static_cast<u64>(t) * a.top_k + k;
			int d = who[i];
			packet v{};
			masks::patient wait;
			if (without != 0 && d >= 0 && (without >> d & 1) != 0)
				d = -1;
#pragma unroll 1
			while (d >= 0 && good &&
			       (v = packet::get(note_place(a, a.world.rank, d, t, epoch) + 16 * (1 + k)), !v.has(flag)))
				good = wait.more(a, w, static_cast<u32>(d));
			if (wait.gone) {
				masks::lose(a, 1u << d);
				v = {}, good = true;
			} else if (!good)
				give_up(a.world, w.kind, static_cast<u32>(d), epoch, false);
			a.sum.weights[i] = __uint_as_float(v.word(0));
		}
		return !__any_sync(~0u, !good);
	}
};

// A combine of few tokens, or one of its halves.
template <kind type, bool float8, bool by_expert, bool late = false>
__device__ __forceinline__ void few_combine(const sw_dispatch_args &a, u32 *shared)
{
	u32 lane = threadIdx.x & 31, n = a.world.size;
	bool sends = (a.mode & SW_DISPATCH_SEND) != 0;
	wait w;
	few_combiner<type, float8, by_expert, late> c(a, w);
	few_tasks tasks(0, gridDim.x);
	call now = call::open(a.world);
	// Reads that take long are issued together: the number, and the rows of the first task.
	wiping wiped(a);
	typename few_combiner<type, float8, by_expert, late>::errand first;
	if (sends && tasks.first < c.errands())
		c.load(tasks.first, first);
	u64 epoch = now.epoch();
	if (!now.begins())
		return;
	if (sends && now.advance_by_last())
		wiped.advance(a, epoch);
	epoch -= sends ? 0 : 1;
	if (masks::on(a) && __syncthreads_or(threadIdx.x == 0 && (masks::now(a) >> a.world.rank & 1) != 0)) {
		if (threadIdx.x == 0)
			give_up(a.world, SW_FAULT_MASKED, a.world.rank, epoch, sends);
		return;
	}
	// Peers hear of the call, and that no block of this rank reads their rows.
	c.begin(epoch);
	u32 peer = threadIdx.x;
	if (sends && blockIdx.x == 0 && peer < n && peer != a.world.rank && !masks::without(a, peer)) {
		signal_begin(a, peer, epoch, 0);
		store16_relaxed_sys(done_word(a, peer, a.world.rank, 0, epoch), epoch,
		                    done(0, 0, true)); // none of its blocks reads rows of peers
	}
	// Partial sums go to the ranks of their tokens.
	if constexpr (late)
		if (sends)
			c.send_weights();
	if (sends)
		c.send(first);
	release_stream();
	if ((a.mode & SW_DISPATCH_RECEIVE) == 0)
		return;
	// A warp looks for ranks that make another call. All sum what comes.
	if (blockIdx.x == 0 && threadIdx.x < 32)
#pragma unroll 1
		for (u32 p = lane; p < n; p += 32) {
			u64 word, place;
			bool gone;
			if (p != a.world.rank && !await_begin(a, p, epoch, word, place, gone) && !gone)
				end_waits(a, epoch);
		}
	c.receive(wiped.token(a, epoch, sends), shared);
}

} // namespace sw
