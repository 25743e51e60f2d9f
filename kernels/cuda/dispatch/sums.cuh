// Rows on their way back to their tokens: the token's rank reads the rows of all ranks that have one and sums them in
// the order of ranks, after the biases. A rank's row is its partial sum; it lies where the rank has said in the line of
// its begin.
//
// combine_rows and combine_weights call this, and others that sum its sums. It reads rows of peers' segments, this
// rank's own there or where the caller has them, and places and who of the handle's state; it writes the caller's sums.
#pragma once

#include "numbers.cuh"
#include "signals.cuh"

namespace sw {

struct combine_board {
	u64 base[SW_MAX_RANKS];   // where each rank's rows are
	unsigned long long makes; // the ranks that make theirs while they are read, as bits
	arrivals full[SW_DISPATCH_SLOTS];
	u64 has[SW_DISPATCH_SLOTS]; // whose rows a place has, by rank
};

// Where the ranks' rows are. The threads of a block, which have zeroed makes, wait for the peers together. False when
// one does not come, or makes another call.
__device__ __forceinline__ bool await_ranks(const sw_dispatch_args &a, combine_board &b, u64 epoch)
{
	bool good = true;
	if (threadIdx.x < a.world.size) {
		u64 word = begin_word(a, 0), place = a.sum.from_rows;
		if (threadIdx.x != a.world.rank)
			good = await_begin(a, threadIdx.x, epoch, word, place);
		if (good) {
			bool own = threadIdx.x == a.world.rank && a.sum.own != 0;
			b.base[threadIdx.x] =
			    own ? a.sum.own : segment(a.world, threadIdx.x) + resolve(a.world, threadIdx.x, place);
			if (makes(word) && !own)
				atomicOr(&b.makes, 1ull << threadIdx.x);
		}
	}
	return !__syncthreads_or(!good);
}

// Rows that a rank makes while others read them are told in windows of places, each by a word of the reader whose rows
// they are. A reader's rows follow one another and may begin in the middle of a window, so they can lie in one window
// more than they fill. Each has a word of its own.
__device__ __forceinline__ u32 windows(const sw_dispatch_args &a)
{
	return ((a.max_tokens + (1u << a.sum.window) - 1) >> a.sum.window) + 1;
}
__device__ __forceinline__ u32 window_of(const sw_dispatch_args &a, u32 row)
{
	return (row >> a.sum.window) % windows(a);
}
__device__ __forceinline__ u64 made_word(const sw_dispatch_args &a, u32 dst, u32 src, u32 window)
{
	return segment(a.world, dst) + a.state.made + (static_cast<u64>(src) * windows(a) + window) * 8;
}

// Waits until a rank has made the row of one of this rank's tokens, and the others of its window, for bulk copies of
// this thread. `seen` is the window that it has waited for last. False when the wait was given up.
__device__ __forceinline__ bool await_made(const sw_dispatch_args &a, u32 src, int row, u64 epoch, int &seen)
{
	int window = row >> a.sum.window;
	if (window == seen)
		return true;
	patience p(a, src);
	u64 word = made_word(a, a.world.rank, src, window_of(a, static_cast<u32>(row)));
#pragma unroll 1
	while (load_acquire_sys(word) < epoch)
		if (!p.more(epoch, false))
			return false;
	p.count();
	fence_bulk();
	seen = window;
	return true;
}

// 16 bytes of a sum: 0, then the biases, then the rows in the order of their ranks.
template <kind type> struct sum {
	float f[numbers<type>::count];

	__device__ __forceinline__ sum()
	{
#pragma unroll
		for (u32 i = 0; i < numbers<type>::count; i++)
			f[i] = 0;
	}
	__device__ __forceinline__ void add(uint4 v)
	{
		float g[numbers<type>::count];
		numbers<type>::unpack(v, g);
#pragma unroll
		for (u32 i = 0; i < numbers<type>::count; i++)
			f[i] = __fadd_rn(f[i], g[i]);
	}
	// Adds as many of float8 with a scale.
	__device__ __forceinline__ void add_scaled(uint2 v, float scale)
	{
		const u32 pairs[4] = {v.x, v.x >> 16, v.y, v.y >> 16};
#pragma unroll
		for (u32 i = 0; i < numbers<type>::count; i += 2) {
			float low, high;
			floats_of_e4m3x2(pairs[i / 2], low, high);
			f[i] = __fadd_rn(f[i], __fmul_rn(low, scale)),
			f[i + 1] = __fadd_rn(f[i + 1], __fmul_rn(high, scale));
		}
	}
	__device__ __forceinline__ void add_weighted(uint4 v, float w)
	{
		float g[numbers<type>::count];
		numbers<type>::unpack(v, g);
#pragma unroll
		for (u32 i = 0; i < numbers<type>::count; i++)
			f[i] = __fadd_rn(f[i], __fmul_rn(g[i], w));
	}
	__device__ __forceinline__ void add_biases(const sw_dispatch_args &a, u64 at)
	{
		if (a.sum.bias0 != 0)
			add(load_vector(a.sum.bias0 + at));
		if (a.sum.bias1 != 0)
			add(load_vector(a.sum.bias1 + at));
	}
	__device__ __forceinline__ uint4 value() const { return numbers<type>::pack(f); }

	// The numbers, of whose blocks neighbouring lanes have the rest, as float8, and their scale.
	__device__ __forceinline__ uint2 narrowed(u32 &scale) const
	{
		u32 most = 0;
#pragma unroll
		for (u32 i = 0; i < numbers<type>::count; i++)
			most = max(most, __float_as_uint(f[i]) & 0x7fffffff);
		scaling s(most_of(most, 128 / numbers<type>::count), 0);
		uint2 v;
		narrow<numbers<type>::count>(f, s.factor, v.x, v.y);
		scale = s.word;
		return v;
	}
};

// The weights next to the rows of token t, by a warp.
__device__ __forceinline__ void sum_weights(const sw_dispatch_args &a, u32 t, u32 lane)
{
	const int *who = state::who(a), *places = state::places(a);
#pragma unroll 1
	for (u32 k = lane; k < a.top_k; k += 32) {
		u64 i = static_cast<u64>(t) * a.top_k + k;
		int d = who[i];
		float w = 0;
		if (d >= 0) {
			bool own = static_cast<u32>(d) == a.world.rank && a.sum.own != 0;
			u64 from =
			    own ? reinterpret_cast<u64>(a.out.weights) : segment(a.world, d) + a.sum.from_weights;
			u64 row = static_cast<u32>(places[static_cast<u64>(t) * a.world.size + d]);
			w = view<const volatile float>(from)[row * a.top_k + k];
		}
		a.sum.weights[i] = w;
	}
}

// Tells the peers that this block has read what it wanted of their rows, and how many blocks there are. A rank's rows
// are its own again when all blocks of all peers have said so.
__device__ __forceinline__ void signal_read(const sw_dispatch_args &a, u64 epoch)
{
	__syncthreads();
	if (threadIdx.x < a.world.size && threadIdx.x != a.world.rank)
		store16_relaxed_sys(done_word(a, threadIdx.x, a.world.rank, blockIdx.x, epoch), epoch,
		                    done(gridDim.x, 0, true));
}

// How many blocks of a peer read this rank's rows. False when the wait for its first was given up.
__device__ __forceinline__ bool await_readers(const sw_dispatch_args &a, u32 peer, u64 epoch, u64 begin, u32 &blocks)
{
	u64 told;
	if ((blocks = blocks_of(begin)) != 0)
		return true;
	bool good = await_done(a, peer, 0, epoch, told);
	blocks = good ? rows_of(told) : 0;
	return good;
}

// Waits until the peers have read what this rank had in staging for the last call, if that was a combine whose rows
// were kept, or have written its weights, if they came in that call. The threads of a block.
__device__ __forceinline__ bool await_free_staging(const sw_dispatch_args &a, u64 last)
{
	bool good = true;
#pragma unroll 1
	for (u32 p = 0; p < a.world.size && good; p++) {
		if (p == a.world.rank)
			continue;
		pair64 line = load16_relaxed_sys(begin_line(a, a.world.rank, p, last));
		u64 rows;
		u32 blocks = 0;
		if (line.a != last || last == 0 || op_of(line.b) < SW_DISPATCH_SUMS)
			continue;
		good = await_readers(a, p, last, line.b, blocks);
#pragma unroll 1
		for (u32 i = threadIdx.x; i < blocks && good; i += blockDim.x)
			good = await_done(a, p, i, last, rows);
	}
	return good;
}

// The first block waits for that.
__device__ __forceinline__ void await_read(const sw_dispatch_args &a, u64 epoch)
{
	if (blockIdx.x != 0)
		return;
#pragma unroll 1
	for (u32 p = 0; p < a.world.size; p++) {
		if (p == a.world.rank)
			continue;
		u32 blocks;
		u64 rows;
		if (!await_readers(a, p, epoch, load16_relaxed_sys(begin_line(a, a.world.rank, p, epoch)).b, blocks))
			return;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < blocks; i += blockDim.x)
			await_done(a, p, i, epoch, rows);
	}
}

} // namespace sw
