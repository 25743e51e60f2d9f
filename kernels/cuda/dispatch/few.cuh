// Few tokens: rows, and what lies beside them, cross as packets to places of their own, from which the receiver puts them where they belong. Data says by itself that it is
// there. So no rank waits for another before it sends, and nothing is fenced.
//
// dispatch_few and combine_few call this. A sender writes the notes and packets of its peers' states and says the counts of signals.cuh; the receiver reads them and writes the
// caller's outputs and its handle's state. Notes and packets are double buffered by the call's parity: whoever is through a call knows that its peers have begun it, and so
// are through the one before.
#pragma once

#include "../packet.cuh"
#include "experts.cuh"

namespace sw {

struct few_board {
	u32 near[SW_MOE_TABLE];
	u32 goes[SW_MOE_FEW_TOKENS / 32][SW_MAX_RANKS]; // by group of 32 tokens and rank: whose tokens go there
	u32 wants[SW_MOE_FEW_TOKENS][SW_MAX_RANKS / 32]; // a token's ranks as bits
	u64 bad;
	take_board take;
};

// Where the note of token t of rank src is on rank dst: what lies beside its row. It is a packet for the row, one for each choice, and those of the scales that the caller has
// given. And where the packets of the row are.
__device__ __forceinline__ u64 note_place(const sw_moe_args &a, u32 dst, u32 src, u32 t, u64 epoch)
{
	return segment(a.world, dst) + a.state.notes + (((epoch & 1) * a.world.size + src) * a.max_tokens + t) * a.state.note_stride;
}
__device__ __forceinline__ u64 row_place(const sw_moe_args &a, u32 dst, u32 src, u32 t, u64 epoch)
{
	return segment(a.world, dst) + a.state.packets + (((epoch & 1) * a.world.size + src) * a.max_tokens + t) * a.state.packet_stride;
}

// Three words and the flag of a call.
__device__ __forceinline__ void put_packet(u64 place, u32 flag, u32 x, u32 y, u32 z) { store16_relaxed_sys(place, static_cast<u64>(y) << 32 | x, static_cast<u64>(flag) << 32 | z); }
__device__ __forceinline__ bool has_flag(pair64 v, u32 flag) { return static_cast<u32>(v.b >> 32) == flag; }
__device__ __forceinline__ u32 word_of(pair64 v, u32 i) { return static_cast<u32>(i == 0 ? v.a : i == 1 ? v.a >> 32 : v.b); }

// A row has parts of so many vectors a lane.
template <u32 vectors> __device__ __forceinline__ u32 few_parts(u32 bytes) { return max((bytes + 512 * vectors - 1) / (512 * vectors), 1u); }

// Those of a lane of one part, as they are loaded.
template <u32 vectors> struct few_vectors {
	uint4 v[vectors];

	// Vectors past the row's end are 0.
	__device__ __forceinline__ void load(u64 row, u32 bytes, u32 part, u32 lane)
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = (part * vectors + i) * 512 + lane * 16;
			v[i] = load_vector_if(at < bytes, row + at);
		}
	}
};

// Loads a lane's packets of a part, those that it wants; the others are as if they had come. flag is where packets have it.
template <u32 packets, typename F> __device__ __forceinline__ void load_packets(pair64 (&v)[packets], u64 place, u32 part, u32 lane, u64 flag, F wanted)
{
	place += part * packets * 512 + lane * 16;
#pragma unroll
	for (u32 i = 0; i < packets; i++) {
		v[i] = {0, flag};
		if (wanted(i))
			v[i] = load16_relaxed_sys(place + i * 512);
	}
}

// The words of a lane of a part of a row, as they cross.
template <u32 count> struct few_words {
	static constexpr u32 packets = (count + 2) / 3;
	u32 w[3 * packets];

	__device__ __forceinline__ void put(u64 place, u32 part, u32 used, u32 lane, u32 flag) const
	{
		place += part * packets * 512 + lane * 16;
#pragma unroll
		for (u32 i = 0; i < packets; i++)
			if (i < used)
				put_packet(place + i * 512, flag, w[3 * i], w[3 * i + 1], w[3 * i + 2]);
	}

	// True when they are there.
	__device__ __forceinline__ bool get(u64 place, u32 part, u32 used, u32 lane, u32 flag)
	{
		pair64 v[packets];
		load_packets(v, place, part, lane, static_cast<u64>(flag) << 32, [&](u32 i) { return i < used; });
		bool all = true;
#pragma unroll
		for (u32 i = 0; i < packets; i++) {
			w[3 * i] = word_of(v[i], 0), w[3 * i + 1] = word_of(v[i], 1), w[3 * i + 2] = word_of(v[i], 2);
			all &= has_flag(v[i], flag);
		}
		return all;
	}
};

// A row as it is: words of so many vectors.
template <u32 count> struct few_whole : few_words<4 * count> {
	using few_words<4 * count>::w;
	static constexpr u32 vectors = count;
	static constexpr bool scaled = false;

	static __device__ __forceinline__ u32 parts(u32 bytes) { return few_parts<vectors>(bytes); }

	__device__ __forceinline__ void set(u32 i, uint4 v) { w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w; }
	__device__ __forceinline__ uint4 vector(u32 i) const { return make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]); }

	__device__ __forceinline__ void make(const few_vectors<vectors> &r, u32, bool)
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			set(i, r.v[i]);
	}
};

// A row as it is, on its way to experts: a lane has seven vectors of a part. Its packets have 14 bytes and a flag of 16 bits: one for all but the end of each vector, and one
// for their ends. On the way back, where a warp has several rows at once, so many registers cost more than fewer bytes save.
struct few_dense : few_whole<SW_MOE_DENSE_PART / 512> {
	static constexpr u32 packets = vectors + 1;
	static_assert(vectors == 7, "their ends fill a packet");

	// Those of calls of one parity differ, unless they are 65,535 of them apart or more.
	static __device__ __forceinline__ u32 flag(u64 epoch) { return 1 + static_cast<u32>(epoch / 2) % 65535; }

	// How many vectors a lane has of a part.
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32 lane)
	{
		u32 at = part * 512 * vectors + lane * 16;
		return at < bytes ? min((bytes - at + 511) / 512, vectors) : 0;
	}

	__device__ __forceinline__ void put(u64 place, u32 part, u32 used, u32 lane, u32 flag) const
	{
		place += part * packets * 512 + lane * 16;
		u32 ends[vectors + 1];
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			ends[i] = w[4 * i + 3] >> 16;
			if (i < used)
				put_packet(place + i * 512, flag << 16 | (w[4 * i + 3] & 0xffff), w[4 * i], w[4 * i + 1], w[4 * i + 2]);
		}
		if (used != 0)
			put_packet(place + vectors * 512, flag << 16 | ends[6], ends[0] | ends[1] << 16, ends[2] | ends[3] << 16, ends[4] | ends[5] << 16);
	}

	// True when they are there.
	__device__ __forceinline__ bool get(u64 place, u32 part, u32 used, u32 lane, u32 flag)
	{
		pair64 v[packets];
		load_packets(v, place, part, lane, static_cast<u64>(flag) << 48, [&](u32 i) { return i < used || (i == vectors && used != 0); });
		bool all = true;
#pragma unroll
		for (u32 i = 0; i < packets; i++)
			all &= static_cast<u32>(v[i].b >> 48) == flag;
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 end = i == 6 ? static_cast<u32>(v[vectors].b >> 32) : word_of(v[vectors], i / 2) >> (i % 2 * 16);
			w[4 * i] = word_of(v[i], 0), w[4 * i + 1] = word_of(v[i], 1), w[4 * i + 2] = word_of(v[i], 2);
			w[4 * i + 3] = (static_cast<u32>(v[i].b >> 32) & 0xffff) | end << 16;
		}
		return all;
	}

	// Into a row of a dispatch's output.
	__device__ __forceinline__ void store(u64 row, u32 bytes, u32 part, u32 lane) const
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = (part * vectors + i) * 512 + lane * 16;
			store_vector_if(at < bytes, row + at, vector(i));
		}
	}
};

// A row as it is, on its way back: a lane has three vectors of a part.
struct few_plain : few_whole<SW_MOE_PLAIN_PART / 512> {
	static_assert(vectors == 3, "they fill four packets");

	static __device__ __forceinline__ u32 flag(u64 epoch) { return packet_flag(epoch); }

	// How many packets a lane has of a part.
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32 lane)
	{
		u32 at = part * 512 * vectors + lane * 16, have = (at < bytes ? 1 : 0) + (at + 512 < bytes ? 1 : 0) + (at + 1024 < bytes ? 1 : 0);
		return (4 * have + 2) / 3;
	}
};

// A row of numbers of a type as float8 with scales: a lane has what four vectors become, and one of its blocks' scales.
template <kind type> struct few_float8 : few_words<numbers<type>::count + 1> {
	using base = few_words<numbers<type>::count + 1>;
	using base::w;
	static constexpr u32 vectors = SW_MOE_NARROW_PART / 512, count = numbers<type>::count / 4; // words that a vector becomes
	static constexpr bool scaled = true;
	static constexpr u32 span = 128 * numbers<type>::size / 16; // lanes of a block of 128: 16 or 32
	static constexpr u32 last = numbers<type>::count;

	static __device__ __forceinline__ u32 flag(u64 epoch) { return packet_flag(epoch); }

	static __device__ __forceinline__ u32 parts(u32 bytes) { return few_parts<vectors>(bytes); }
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32) { return part * 512 * vectors < bytes ? base::packets : 0; }

	// Vector i; the lanes of a block have its scale. lane%4 says whose scale a lane carries.
	__device__ __forceinline__ void set(u32 i, u32 low, u32 high, u32 scale, u32 lane)
	{
		w[count * i] = low;
		if constexpr (count == 2)
			w[2 * i + 1] = high;
		if (i == 0 || lane % vectors == i)
			w[last] = scale;
	}
	__device__ __forceinline__ uint2 vector(u32 i) const { return make_uint2(w[count * i], count == 2 ? w[count * i + count - 1] : 0); }
	// The scale of vector i. All lanes.
	__device__ __forceinline__ float scale(u32 i, u32 lane) const { return __uint_as_float(__shfl_sync(~0u, w[last], lane / span * span + i)); }

	__device__ __forceinline__ void make(const few_vectors<vectors> &r, u32 lane, bool exponents)
	{
		u32 most[vectors];
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			most[i] = numbers<type>::most(r.v[i]);
#pragma unroll
		for (u32 by = 1; by < span; by *= 2)
#pragma unroll
			for (u32 i = 0; i < vectors; i++)
				most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], by));
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			scaling s(most[i], exponents);
			u32 low, high;
			narrow<type>(r.v[i], s.factor, low, high);
			set(i, low, high, s.word, lane);
		}
	}

	__device__ __forceinline__ void store(u64 row, u32 bytes, u32 part, u32 lane) const
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = (part * vectors + i) * 512 + lane * 16;
			if (at >= bytes)
				continue;
			if constexpr (count == 2)
				store_vector2(row + at / 2, vector(i));
			else
				*reinterpret_cast<u32 *>(row + at / 4) = w[i];
		}
	}

	// The number of the block whose scale a lane carries, or ~0.
	static __device__ __forceinline__ u32 block(u32 bytes, u32 part, u32 lane)
	{
		u32 at = (part * vectors + lane % span) * 512 + lane / span * span * 16;
		return lane % span < vectors && at < bytes ? at / (16 * span) : ~0u;
	}
};

// The sending half of a dispatch. The last block of a grid tells what lies beside rows; the others send those, without waiting for it.
struct few_sender {
	const sw_moe_args &a;
	few_board &b;
	u32 *count;	       // [tables][slots] in dynamic shared memory: the choices of each warp's stretch for each slot, then those before it
	float *weights;	       // [tokens][top_k] behind that
	unsigned short *slots; // [tokens][top_k] behind those: the slot of each choice, or no_slot
	u32 lane, warp, n, tables, each; // stretches, and choices of one
	bool cached;

	static constexpr u32 no_slot = 0xffff;

	__device__ __forceinline__ few_sender(const sw_moe_args &a, few_board &b, u64 *memory)
	    : a(a), b(b), count(reinterpret_cast<u32 *>(memory)), lane(threadIdx.x & 31), warp(threadIdx.x / 32), n(a.world.size),
	      tables((a.mode & SW_MOE_BY_EXPERT) != 0 ? blockDim.x / 32 : 1), cached((a.mode & SW_MOE_CACHED) != 0)
	{
		weights = reinterpret_cast<float *>(count + tables * a.slots);
		slots = reinterpret_cast<unsigned short *>(weights + a.tokens * a.top_k);
		each = (a.tokens * a.top_k + blockDim.x - 1) / blockDim.x * 32;
	}

	__device__ __forceinline__ bool tells() const { return blockIdx.x == gridDim.x - 1; }
	__device__ __forceinline__ u64 own(u64 place) const { return own_segment(a.world) + place; }

	// Before await_stream.
	__device__ __forceinline__ void clear()
	{
		if (!cached)
			placement::fill(a, b.near);
		if (threadIdx.x == 0)
			b.bad = 0;
		if (!tells())
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
			const int *places = reinterpret_cast<const int *>(own(a.state.places)) + static_cast<u64>(t) * n;
#pragma unroll
			for (u32 i = 0; i < 2; i++)
				bits[i] = __ballot_sync(~0u, lane + 32 * i < n && places[lane + 32 * i] >= 0);
		} else {
			placement p{a, b.near};
#pragma unroll 1
			for (u32 k = lane; k < a.top_k; k += 32) {
				i64 e = choice(a, t, k);
				u32 r = is_expert(a, e) ? p.rank(p.slot(static_cast<u32>(e), t)) : ~0u;
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

	// The threads of the block that tells look where all tokens go. They meet after it.
	__device__ __forceinline__ void look()
	{
		if (cached) {
			const int *places = reinterpret_cast<const int *>(own(a.state.places));
#pragma unroll 1
			for (u32 i = threadIdx.x; i < a.tokens * n; i += blockDim.x)
				if (places[i] >= 0)
					atomicOr(&b.wants[i / n][i % n / 32], 1u << (i % n & 31));
			return;
		}
		constexpr u32 early = 4; // weights of a thread that are on their way beside choices
		const float *from = reinterpret_cast<const float *>(a.weights);
		u32 all = a.tokens * a.top_k;
		float w[early];
#pragma unroll
		for (u32 j = 0; j < early; j++) {
			u32 i = threadIdx.x + j * blockDim.x;
			w[j] = from != nullptr && i < all ? __ldg(from + i) : 1;
		}
		u64 bad = 0;
		each_choice(a, placement{a, b.near}, 0, a.tokens, bad, [&](u32 t, u32 k, u32 slot, u32 rank) {
			u32 i = t * a.top_k + k;
			atomicOr(&b.wants[t][rank / 32], 1u << (rank & 31));
			slots[i] = static_cast<unsigned short>(slot);
			atomicAdd(count + (tables == 1 ? 0 : i / each * a.slots) + slot, 1u);
		});
		if (bad != 0)
			atomicExch(reinterpret_cast<unsigned long long *>(&b.bad), static_cast<unsigned long long>(bad));
#pragma unroll
		for (u32 j = 0; j < early; j++)
			if (threadIdx.x + j * blockDim.x < all)
				weights[threadIdx.x + j * blockDim.x] = w[j];
#pragma unroll 1
		for (u32 i = threadIdx.x + early * blockDim.x; i < all; i += blockDim.x)
			weights[i] = from != nullptr ? __ldg(from + i) : 1;
	}

	// Tells all ranks what they have seen: how many rows come first, since that is waited for.
	__device__ __forceinline__ void tell(u64 epoch)
	{
#pragma unroll 1
		for (u32 g = warp; g * 32 < a.tokens; g += blockDim.x / 32)
#pragma unroll 1
			for (u32 d = 0; d < n; d++) {
				u32 t = g * 32 + lane, go = __ballot_sync(~0u, t < a.tokens && (b.wants[t][d / 32] >> (d & 31) & 1) != 0);
				if (lane == (d & 31))
					b.goes[g][d] = go;
			}
		if (!cached)
			tell_counts(epoch);
		__syncthreads();
		if (threadIdx.x < n) {
			u32 rows = before(a.tokens, threadIdx.x);
			store16_relaxed_sys(done_word(a, threadIdx.x, a.world.rank, 0, epoch), epoch, b.bad != 0 ? b.bad : done(rows, 0, true));
			if (a.counters != 0)
				atomicAdd(reinterpret_cast<unsigned long long *>(a.counters) + a.experts + threadIdx.x,
					  static_cast<unsigned long long>(rows) * (a.wire_bytes + 4 * a.scale_words));
		}
		if (b.bad != 0) {
			if (threadIdx.x == 0)
				complain(a, a.world.rank, b.bad, epoch);
		} else if (!cached) {
			tell_rows(epoch);
			tell_choices(epoch);
		}
	}

	// How many choices there are for each slot. Counts become those of the stretches before.
	__device__ __forceinline__ void tell_counts(u64 epoch)
	{
		const u32 *expert = reinterpret_cast<const u32 *>(a.table) + a.experts + 1 + a.slots;
#pragma unroll 1
		for (u32 slot = threadIdx.x; slot < a.slots; slot += blockDim.x) {
			u32 rows = 0;
#pragma unroll 1
			for (u32 i = 0; i < tables; i++) {
				u32 some = count[i * a.slots + slot];
				count[i * a.slots + slot] = rows;
				rows += some;
			}
#pragma unroll 1
			for (u32 d = 0; d < n; d++)
				store_relaxed_sys(slot_count(a, d, a.world.rank, slot, epoch), numbered(epoch, rows));
			if (a.counters != 0 && rows != 0)
				atomicAdd(reinterpret_cast<unsigned long long *>(a.counters) + __ldg(expert + slot), static_cast<unsigned long long>(rows));
		}
	}

	// Which tokens come, and to which row.
	__device__ __forceinline__ void tell_rows(u64 epoch)
	{
		u32 flag = packet_flag(epoch);
		int *places = reinterpret_cast<int *>(own(a.state.places));
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.max_tokens * n; i += blockDim.x) {
			u32 t = i / n, d = i - t * n;
			bool goes = t < a.tokens && (b.goes[t / 32][d] >> (t & 31) & 1) != 0;
			int row = goes ? static_cast<int>(a.world.rank * a.max_tokens + before(t, d)) : -1;
			put_packet(note_place(a, d, a.world.rank, t, epoch), flag, static_cast<u32>(row), a.tokens, 0);
			if (t < a.tokens)
				places[i] = row;
		}
	}

	// Their choices: the local slot, how many of this rank's choices for it come before, and the weight.
	__device__ __forceinline__ void tell_choices(u64 epoch)
	{
		placement p{a, b.near};
		u32 flag = packet_flag(epoch), first = warp * each, end = min(first + each, a.tokens * a.top_k);
		bool numbers = tables != 1;
#pragma unroll 1
		for (u32 i = first + lane; i - lane < end; i += 32) {
			u32 slot = i < end ? slots[i] : no_slot, number = 0;
			if (numbers) {
				u32 alike = __match_any_sync(~0u, static_cast<int>(slot)), earlier = __popc(alike & ((1u << lane) - 1)), *mine = count + warp * a.slots + slot;
				number = slot == no_slot ? 0 : *mine + earlier;
				__syncwarp();
				if (slot != no_slot && earlier == 0)
					*mine += __popc(alike);
				__syncwarp();
			}
			if (i >= end)
				continue;
			u32 t = i / a.top_k, k = i - t * a.top_k;
			int to = slot == no_slot ? -1 : static_cast<int>(p.rank(slot));
			reinterpret_cast<int *>(own(a.state.who))[i] = to;
			float weight = weights[i];
#pragma unroll 1
			for (u32 d = 0; d < n; d++)
				if ((b.wants[t][d / 32] >> (d & 31) & 1) != 0) {
					bool goes = to == static_cast<int>(d);
					put_packet(note_place(a, d, a.world.rank, t, epoch) + 16 * (1 + k), flag, goes ? slot - a.first[d] : ~0u, number, goes ? __float_as_uint(weight) : 0);
				}
		}
	}
};

// Parts of rows as tasks of the warps of some of a grid's blocks. Neighbouring warps lie in different blocks.
struct few_tasks {
	u32 first, step;

	__device__ __forceinline__ few_tasks(u32 block, u32 blocks)
	    : first(blockIdx.x - block < blocks ? threadIdx.x / 32 * blocks + blockIdx.x - block : ~0u), step(blocks * (blockDim.x / 32))
	{
	}
};

// The scales of token t that the caller gives, as packets behind its choices.
__device__ __forceinline__ void send_scales(const sw_moe_args &a, u32 t, u64 ranks, u64 epoch, u32 lane)
{
	const u32 *scales = reinterpret_cast<const u32 *>(a.scales) + static_cast<u64>(t) * a.scale_words;
#pragma unroll 1
	for (u32 w = 3 * lane; w < a.scale_words; w += 96) {
		u32 v[3];
#pragma unroll
		for (u32 i = 0; i < 3; i++)
			v[i] = w + i < a.scale_words ? __ldg(scales + w + i) : 0;
#pragma unroll 1
		for (u64 left = ranks; left != 0; left &= left - 1)
			put_packet(note_place(a, __ffsll(left) - 1, a.world.rank, t, epoch) + 16 * (1 + a.top_k + w / 3), packet_flag(epoch), v[0], v[1], v[2]);
	}
}

// Has a packet's flag never be one of long ago: every call forgets what lies in the places of one token that it does not use. The next call of its parity takes the next
// token, which a word of the state has.
__device__ __forceinline__ u32 *next_wiped(const sw_moe_args &a, u64 epoch) { return reinterpret_cast<u32 *>(own_segment(a.world) + a.state.wiped) + (epoch & 1); }

// Forgets what src has sent of token t, all of it or behind the first packet of its note. A warp.
__device__ __forceinline__ void wipe(const sw_moe_args &a, u32 src, u32 t, u64 epoch, u32 from_note, u32 lane)
{
	u64 note = note_place(a, a.world.rank, src, t, epoch), row = row_place(a, a.world.rank, src, t, epoch);
#pragma unroll 1
	for (u32 at = from_note + 16 * lane; at < a.state.note_stride; at += 512)
		store16_relaxed_sys(note + at, 0, 0);
#pragma unroll 1
	for (u32 at = 16 * lane; at < a.state.packet_stride; at += 512)
		store16_relaxed_sys(row + at, 0, 0);
}

// The token of a call, of which the blocks have read the words of even and odd calls. The kernel of its first half has the word go on when all of its blocks have, one thread.
struct wiping {
	u32 even, odd;

	__device__ __forceinline__ explicit wiping(const sw_moe_args &a) : even(*next_wiped(a, 0)), odd(*next_wiped(a, 1)) {}
	__device__ __forceinline__ u32 next(u64 epoch) const { return (epoch & 1) == 0 ? even : odd; }
	__device__ __forceinline__ void advance(const sw_moe_args &a, u64 epoch) const { *next_wiped(a, epoch) = next(epoch) + 1 < a.max_tokens ? next(epoch) + 1 : 0; }
	__device__ __forceinline__ u32 token(const sw_moe_args &a, u64 epoch, bool sends) const { return sends ? next(epoch) : (next(epoch) != 0 ? next(epoch) : a.max_tokens) - 1; }
};

// Ends the waits of this rank in a call that ranks do not make together.
__device__ __forceinline__ void end_waits(const sw_moe_args &a, u64 epoch) { store_relaxed_sys(own_segment(a.world) + a.world.control + offsetof(sw_control, mismatched), epoch); }

// The receiving half of a dispatch.
template <typename Wire, bool by_expert> struct few_receiver {
	const sw_moe_args &a;
	taker &t;
	u64 epoch, own;
	u32 flag, row_flag, lane, n, wiped; // the token whose unused places are wiped
	wait &w;
	int rows[2], slots[2]; // of choices lane and lane+32: the rows that the token goes to, or -1; where a token has one, lane 0 has it

	__device__ __forceinline__ few_receiver(const sw_moe_args &a, taker &t, wait &w, u64 epoch, u32 wiped)
	    : a(a), t(t), epoch(epoch), own(own_segment(a.world)), flag(packet_flag(epoch)), row_flag(Wire::flag(epoch)), lane(threadIdx.x & 31), n(a.world.size), wiped(wiped), w(w)
	{
	}

	// Calls f with each row that the token goes to, and its slot.
	template <typename F> __device__ __forceinline__ void each_row(F f) const
	{
#pragma unroll
		for (u32 i = 0; i < 2; i++)
#pragma unroll 1
			for (u32 left = __ballot_sync(~0u, rows[i] >= 0); left != 0; left &= left - 1) {
				u32 from = __ffs(left) - 1;
				int row = __shfl_sync(~0u, rows[i], from), slot = __shfl_sync(~0u, slots[i], from);
				f(row, slot);
			}
	}

	// Puts the part of a row where it goes.
	__device__ __forceinline__ void put(const Wire &x, u32 part) const
	{
		each_row([&](int row, int slot) {
			x.store(a.rows + static_cast<u64>(row) * a.wire_bytes, a.row_bytes, part, lane);
			if constexpr (Wire::scaled) {
				u32 block = Wire::block(a.row_bytes, part, lane);
				if (block != ~0u)
					*reinterpret_cast<volatile u32 *>(row_scale(a, static_cast<u32>(row), block, static_cast<u32>(slot))) = x.w[Wire::last];
			}
		});
	}

	// The scales that the sender's caller has given.
	__device__ __forceinline__ bool put_scales(u64 note, pair64 v)
	{
#pragma unroll 1
		for (u32 begin = 0; begin < a.scale_words; begin += 96) {
			u32 word = begin + 3 * lane;
			bool good = true;
#pragma unroll 1
			while (word < a.scale_words && good && !has_flag(v, flag))
				v = load16_relaxed_sys(note + 16 * (1 + a.top_k + word / 3)), good = w.slow(a.world);
			if (__any_sync(~0u, !good))
				return false;
			each_row([&, v](int row, int slot) {
#pragma unroll
				for (u32 j = 0; j < 3; j++)
					if (word + j < a.scale_words)
						*reinterpret_cast<volatile u32 *>(row_scale(a, static_cast<u32>(row), word + j, static_cast<u32>(slot))) = word_of(v, j);
			});
			v = {0, 0};
		}
		return true;
	}

	// What lies beside row r of token k of rank src.
	__device__ __forceinline__ void put_beside(u32 r, u64 source, const u32 *number, const float *weight) const
	{
#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			u32 k = lane + 32 * i;
			u64 at = static_cast<u64>(r) * a.top_k + k;
			if (k >= a.top_k)
				continue;
			reinterpret_cast<u64 *>(own + a.to_indices)[at] = slots[i] < 0 ? ~0ull : numbered_choice(number[i], static_cast<u32>(slots[i]));
			if (a.to_weights != 0)
				reinterpret_cast<float *>(own + a.to_weights)[at] = weight[i];
			if (!by_expert)
				continue;
			reinterpret_cast<int *>(own + a.state.spread)[at] = rows[i];
			if (rows[i] >= 0 && a.row_weights != 0)
				reinterpret_cast<float *>(a.row_weights)[rows[i]] = weight[i];
			if (rows[i] >= 0 && a.row_sources != 0)
				reinterpret_cast<u64 *>(a.row_sources)[rows[i]] = source;
		}
		if (lane != 0)
			return;
		reinterpret_cast<u64 *>(own + a.state.sources)[r] = source;
		if (a.to_sources != 0)
			reinterpret_cast<u64 *>(own + a.to_sources)[r] = source;
	}

	// Says that the token is there, to those who want to know.
	__device__ __forceinline__ void land() const
	{
		if (a.landed == 0)
			return;
		__syncwarp();
		count_landed(a, rows, slots);
	}

	// Takes parts from `part` to end of token k of rank src. False when a wait was given up. With `absent` true the rank has no more tokens.
	__device__ __forceinline__ bool take(u32 src, u32 k, u32 part, u32 end, bool &absent)
	{
		u64 note = note_place(a, a.world.rank, src, k, epoch), place = row_place(a, a.world.rank, src, k, epoch);
		Wire x;
		pair64 head, mine, more{0, 0}, scale{0, 0};
		bool good = true, comes = false, scales = !Wire::scaled && part == 0 && 3 * lane < a.scale_words;
		u32 used = Wire::used(a.row_bytes, part, lane);
#pragma unroll 1
		while (good) {
			head = load16_relaxed_sys(note);
			mine = load16_relaxed_sys(note + 16 * min(lane + 1, a.top_k));
			if (a.top_k > 32)
				more = load16_relaxed_sys(note + 16 * min(lane + 33, a.top_k));
			if (scales)
				scale = load16_relaxed_sys(note + 16 * (1 + a.top_k + lane));
			bool there = x.get(place, part, used, lane, row_flag);
			comes = static_cast<int>(word_of(head, 0)) >= 0;
			if (has_flag(head, flag) && (!comes || (there && has_flag(mine, flag) && (a.top_k <= 32 || has_flag(more, flag)))))
				break;
			good = w.slow(a.world);
		}
		if (__any_sync(~0u, !good))
			return false;
		absent = k >= word_of(head, 1);
		if (!comes) {
			if (part == 0 && k == wiped)
				wipe(a, src, k, epoch, 16, lane);
			return true;
		}
		u32 r = word_of(head, 0), number[2] = {word_of(mine, 1), word_of(more, 1)};
		float weight[2] = {__uint_as_float(word_of(mine, 2)), __uint_as_float(word_of(more, 2))};
		slots[0] = lane < a.top_k ? static_cast<int>(word_of(mine, 0)) : -1, slots[1] = lane + 32 < a.top_k ? static_cast<int>(word_of(more, 0)) : -1;
#pragma unroll
		for (u32 i = 0; i < 2; i++)
			rows[i] = slots[i] < 0 || !by_expert ? -1 : static_cast<int>(t.base[src * a.local + slots[i]] + number[i]);
		if (part == 0)
			put_beside(r, static_cast<u64>(k) << 32 | src, number, weight);
		if (!by_expert)
			rows[0] = lane == 0 ? static_cast<int>(r) : -1;
		return finish(x, note, scale, place, part, end);
	}

	// The same of row r of a rank, whose token and places are known from an earlier dispatch.
	__device__ __forceinline__ bool retake(u32 src, u32 r, u32 part, u32 end)
	{
		u32 k = static_cast<u32>(reinterpret_cast<const u64 *>(own + a.state.sources)[r] >> 32);
#pragma unroll
		for (u32 i = 0; i < 2; i++) {
			u64 at = static_cast<u64>(r) * a.top_k + lane + 32 * i;
			bool some = by_expert && lane + 32 * i < a.top_k;
			rows[i] = some ? reinterpret_cast<const int *>(own + a.state.spread)[at] : -1;
			slots[i] = some ? slot_in(reinterpret_cast<const u64 *>(own + a.state.indices)[at]) : -1;
		}
		if (!by_expert)
			rows[0] = lane == 0 ? static_cast<int>(r) : -1;
		u64 place = row_place(a, a.world.rank, src, k, epoch);
		Wire x;
		return await(x, place, part) && finish(x, note_place(a, a.world.rank, src, k, epoch), {0, 0}, place, part, end);
	}

	__device__ __forceinline__ bool await(Wire &x, u64 place, u32 part)
	{
		bool good = true;
		u32 used = Wire::used(a.row_bytes, part, lane);
#pragma unroll 1
		while (good && !x.get(place, part, used, lane, row_flag))
			good = w.slow(a.world);
		return !__any_sync(~0u, !good);
	}

	__device__ __forceinline__ bool finish(Wire &x, u64 note, pair64 scale, u64 place, u32 part, u32 end)
	{
		if (part == 0 && !Wire::scaled && a.scale_words != 0 && !put_scales(note, scale))
			return false;
#pragma unroll 1
		for (;;) {
			put(x, part);
			if (++part == end)
				break;
			if (!await(x, place, part))
				return false;
		}
		land();
		return true;
	}

	// Wipes what no rank sends with routing that is known. A warp.
	__device__ __forceinline__ void wipe_cached() const
	{
#pragma unroll 1
		for (u32 src = 0; src < n; src++) {
			u32 count = reinterpret_cast<const u32 *>(own + a.state.arrived)[src];
			bool comes = false;
#pragma unroll 1
			for (u32 i = lane; i < count; i += 32)
				comes |= reinterpret_cast<const u64 *>(own + a.state.sources)[src * a.max_tokens + i] >> 32 == wiped;
			if (!__any_sync(~0u, comes))
				wipe(a, src, wiped, epoch, 0, lane);
		}
	}

	// All rows. The caller's count of rows that have landed wants them whole.
	__device__ __forceinline__ void run(bool cached)
	{
		u32 all = Wire::parts(a.row_bytes), parts = a.landed != 0 ? 1 : all;
		u64 through = 0; // ranks that have no more tokens
		const u32 *arrived = reinterpret_cast<const u32 *>(own + a.state.arrived);
		u32 busy = gridDim.x > 1 ? 1 : 0; // the first block looks after counts
		few_tasks tasks(busy, gridDim.x - busy);
#pragma unroll 1
		for (u32 task = tasks.first; task < a.max_tokens * n * parts; task += tasks.step) {
			u32 i = task / (n * parts), rest = task - i * n * parts, src = rest / parts, part = rest - src * parts, end = a.landed != 0 ? all : part + 1;
			bool good = true, absent = false;
			if (cached) {
				if (i < arrived[src])
					good = retake(src, src * a.max_tokens + i, part, end);
			} else if ((through >> src & 1) == 0 || (part == 0 && i == wiped)) {
				good = take(src, i, part, end, absent);
				through |= static_cast<u64>(absent) << src;
			}
			if (!good) {
				give_up(a.world, w.kind, src, epoch, false);
				return;
			}
		}
	}
};

// The rows of a combine on their way: this rank's partial sums, and what peers' become.
template <kind type, bool float8, bool by_expert> struct few_combiner {
	using Wire = std::conditional_t<float8, few_float8<type>, few_plain>;
	static constexpr u32 vectors = Wire::vectors, experts = 4, sources = 2; // the last two: rows that a warp loads together to add them

	const sw_moe_args &a;
	u64 epoch, own;
	u32 flag, row_flag, lane, n;
	wait &w;

	__device__ __forceinline__ few_combiner(const sw_moe_args &a, wait &w) : a(a), own(own_segment(a.world)), lane(threadIdx.x & 31), n(a.world.size), w(w) {}

	__device__ __forceinline__ void begin(u64 call)
	{
		epoch = w.epoch = call;
		flag = packet_flag(call), row_flag = Wire::flag(call);
	}

	// Waits until the caller has marked the rows of row r from rank src.
	__device__ __forceinline__ bool await_marks(u32 src, u32 r) const
	{
		if (!by_expert)
			return !__any_sync(~0u, !await_ready(a, src, reinterpret_cast<const u32 *>(a.rank_counts)[src], epoch));
		bool good = true;
#pragma unroll 1
		for (u32 c = lane; c < a.top_k; c += 32) {
			int slot = slot_in(reinterpret_cast<const u64 *>(own + a.state.indices)[static_cast<u64>(r) * a.top_k + c]);
			if (slot >= 0)
				good &= await_ready(a, static_cast<u32>(slot), reinterpret_cast<const u32 *>(a.counts)[slot], epoch);
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

	// The part of a partial sum of the experts' rows, in the order of choices.
	__device__ __forceinline__ void add_up(const int *row, const float *weight, u32 part, sum<type> *s) const
	{
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			u32 left = __ballot_sync(~0u, row[half] >= 0);
#pragma unroll 1
			while (left != 0) {
				few_vectors<vectors> v[experts];
				float by[experts];
				u32 some = min(static_cast<u32>(__popc(left)), experts);
#pragma unroll
				for (u32 j = 0; j < experts; j++) {
					u32 from = left == 0 ? 0 : __ffs(left) - 1;
					left &= left - 1;
					by[j] = __shfl_sync(~0u, weight[half], from);
					u64 there = a.rows + static_cast<u64>(__shfl_sync(~0u, row[half], from)) * a.row_bytes;
					v[j].load(there, j < some ? a.row_bytes : 0, part, lane);
				}
#pragma unroll
				for (u32 j = 0; j < experts; j++)
					if (j < some)
#pragma unroll
						for (u32 i = 0; i < vectors; i++)
							s[i].add_weighted(v[j].v[i], by[j]);
			}
		}
	}

	// What is known of a task before it is known which call this is.
	struct errand {
		u32 r, part, src, t; // row r, from rank src; its token
		bool there;
		int row[2];	 // experts' rows of choices lane and lane+32, and their weights
		float weight[2];
		few_vectors<vectors> v; // where a row is its rank's partial sum
	};

	__device__ __forceinline__ u32 errands() const { return a.max_tokens * n * Wire::parts(a.row_bytes); }

	__device__ __forceinline__ void look(u32 task, errand &x) const
	{
		bool given = (a.mode & SW_MOE_GIVEN) != 0;
		u32 parts = Wire::parts(a.row_bytes), i = task / (n * parts), rest = task - i * n * parts;
		x.src = rest / parts, x.part = rest - x.src * parts, x.r = x.src * a.max_tokens + i;
		u32 here = reinterpret_cast<const u32 *>(own + a.state.arrived)[x.src];
		if (!by_expert && a.ready == 0 && x.r < a.most_rows) // whether it is there or not
			x.v.load(a.rows + static_cast<u64>(x.r) * a.row_bytes, a.row_bytes, x.part, lane);
		x.t = static_cast<u32>(reinterpret_cast<const u64 *>(own + a.state.sources)[x.r] >> 32);
#pragma unroll
		for (u32 j = 0; j < 2; j++) {
			u64 c = static_cast<u64>(x.r) * a.top_k + lane + 32 * j;
			bool some = by_expert && lane + 32 * j < a.top_k;
			x.row[j] = some ? reinterpret_cast<const int *>(own + a.state.spread)[c] : -1;
			x.weight[j] = some && !given ? weight_of(a, c, 0) : 0;
		}
		x.there = i < here;
	}

	// Sends what this rank has of its peers' tokens. x is the first of the warp's tasks.
	__device__ __forceinline__ void send(errand &x)
	{
		bool given = (a.mode & SW_MOE_GIVEN) != 0;
		few_tasks tasks(0, gridDim.x);
#pragma unroll 1
		for (u32 task = tasks.first; task < errands(); task += tasks.step) {
			if (task != tasks.first)
				look(task, x);
			if (!x.there)
				continue;
#pragma unroll
			for (u32 j = 0; j < 2; j++)
				if (given && x.row[j] >= 0)
					x.weight[j] = weight_of(a, 0, x.row[j]);
			if (a.ready != 0) {
				if (!await_marks(x.src, x.r))
					return;
				if (!by_expert)
					x.v.load(a.rows + static_cast<u64>(x.r) * a.row_bytes, a.row_bytes, x.part, lane);
			}
			Wire words;
			if constexpr (by_expert || float8) {
				sum<type> s[vectors];
				if constexpr (by_expert)
					add_up(x.row, x.weight, x.part, s);
				else
#pragma unroll
					for (u32 j = 0; j < vectors; j++)
						s[j].add(x.v.v[j]);
				set(words, s);
			} else {
				words.make(x.v, lane, false);
			}
			words.put(row_place(a, x.src, a.world.rank, x.t, epoch), x.part, Wire::used(a.row_bytes, x.part, lane), lane, row_flag);
			if (x.part != 0 || a.row_weights == 0 || a.from_weights == 0)
				continue;
#pragma unroll
			for (u32 j = 0; j < 2; j++) {
				u32 k = lane + 32 * j;
				i64 at = by_expert ? x.row[j] : static_cast<i64>(x.r) * a.top_k + k;
				if (k < a.top_k)
					put_packet(note_place(a, x.src, a.world.rank, x.t, epoch) + 16 * (1 + k), flag, at < 0 ? 0 : __float_as_uint(reinterpret_cast<const float *>(a.row_weights)[at]), 0, 0);
			}
		}
	}

	// Sums what comes. False when a wait was given up.
	__device__ __forceinline__ bool receive(u32 wiped)
	{
		u32 parts = Wire::parts(a.row_bytes);
		const int *places = reinterpret_cast<const int *>(own + a.state.places);
		few_tasks tasks(0, gridDim.x);
		if (tasks.first == tasks.step - 1) { // the warp that has the least to do
			u64 come = wiped < a.tokens ? ranks(places, wiped) : 0;
#pragma unroll 1
			for (u32 src = 0; src < n; src++)
				if ((come >> src & 1) == 0)
					wipe(a, src, wiped, epoch, 0, lane);
		}
#pragma unroll 1
		for (u32 task = tasks.first; task < a.tokens * parts; task += tasks.step) {
			u32 t = task / parts, part = task - t * parts, used = Wire::used(a.row_bytes, part, lane);
			u64 left = ranks(places, t);
			sum<type> s[vectors];
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
#pragma unroll 1
				while (good) {
#pragma unroll
					for (u32 j = 0; j < sources; j++)
						if (j < some && (there >> j & 1) == 0)
							there |= static_cast<u32>(x[j].get(row_place(a, a.world.rank, from[j], t, epoch), part, used, lane, row_flag)) << j;
					if (there == (1u << some) - 1)
						break;
					if (!(good = w.slow(a.world)))
						give_up(a.world, w.kind, from[__ffs(~there) - 1], epoch, false);
				}
				if (__any_sync(~0u, !good))
					return false;
#pragma unroll
				for (u32 j = 0; j < sources; j++)
#pragma unroll
					for (u32 i = 0; i < vectors; i++)
						if (j < some) {
							if constexpr (float8)
								s[i].add_scaled(x[j].vector(i), x[j].scale(i, lane));
							else
								s[i].add(x[j].vector(i));
						}
			}
#pragma unroll
			for (u32 i = 0; i < vectors; i++) {
				u32 at = (part * vectors + i) * 512 + lane * 16;
				if (at >= a.row_bytes)
					continue;
				s[i].add_biases(a, static_cast<u64>(t) * a.row_bytes + at);
				store_vector(a.y + static_cast<u64>(t) * a.row_bytes + at, s[i].value());
			}
			if (part == 0 && a.sum_weights != 0 && !take_weights(t))
				return false;
		}
		return true;
	}

	// The ranks that have rows of token t, as bits.
	__device__ __forceinline__ u64 ranks(const int *places, u32 t) const
	{
		const int *p = places + static_cast<u64>(t) * n;
		u32 low = __ballot_sync(~0u, lane < n && p[lane] >= 0), high = n > 32 ? __ballot_sync(~0u, lane + 32 < n && p[lane + 32] >= 0) : 0;
		return static_cast<u64>(high) << 32 | low;
	}

	// The weights that lie beside the rows of token t.
	__device__ __forceinline__ bool take_weights(u32 t)
	{
		const int *who = reinterpret_cast<const int *>(own + a.state.who);
		bool good = true;
#pragma unroll 1
		for (u32 k = lane; k < a.top_k; k += 32) {
			u64 i = static_cast<u64>(t) * a.top_k + k;
			int d = who[i];
			pair64 v{0, 0};
#pragma unroll 1
			while (d >= 0 && good && (v = load16_relaxed_sys(note_place(a, a.world.rank, d, t, epoch) + 16 * (1 + k)), !has_flag(v, flag)))
				if (!(good = w.slow(a.world)))
					give_up(a.world, w.kind, d, epoch, false);
			reinterpret_cast<float *>(a.sum_weights)[i] = __uint_as_float(word_of(v, 0));
		}
		return !__any_sync(~0u, !good);
	}
};

} // namespace sw
