// Few tokens: rows, and what lies next to them, cross as packets to places of their own, from which the receiver puts
// them where they belong. Data says by itself that it is there. So no rank waits for another before it sends, and
// nothing is fenced. This is how rows are packets, and where those are.
//
// Senders and receivers of few tokens call this. Notes and packets are double buffered by the call's parity: whoever is
// through a call knows that its peers have begun it, and so are through the one before.
#pragma once

#include "../../packet.cuh"
#include "../numbers.cuh"

namespace sw {

// Where the note of token t of rank src is on rank dst: what lies next to its row. It is a packet for the row, one for
// each choice, and those of the scales that the caller has given. And where the packets of the row are.
__device__ __forceinline__ u64 note_place(const sw_dispatch_args &a, u32 dst, u32 src, u32 t, u64 epoch)
{
	return segment(a.world, dst) + a.state.notes +
	       ((packet::parity(epoch) * a.world.size + src) * a.max_tokens + t) * a.state.note_stride;
}
__device__ __forceinline__ u64 row_place(const sw_dispatch_args &a, u32 dst, u32 src, u32 t, u64 epoch)
{
	return segment(a.world, dst) + a.state.packets +
	       ((packet::parity(epoch) * a.world.size + src) * a.max_tokens + t) * a.state.packet_stride;
}

// The packets of a note that have the weights of the token's choices in a combine by them, three each, and where they
// are: behind those of the choices, where a dispatch has scales.
__device__ __forceinline__ u32 weight_packets(const sw_dispatch_args &a) { return (a.top_k + 2) / 3; }
__device__ __forceinline__ u32 weights_in_note(const sw_dispatch_args &a) { return 16 * (1 + a.top_k); }

// A row has parts of this number of vectors a lane.
template <u32 vectors> __device__ __forceinline__ u32 few_parts(u32 bytes)
{
	return max((bytes + 512 * vectors - 1) / (512 * vectors), 1u);
}

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

// Loads a lane's packets of a part, those that it wants; the others are as if they had come. flag is where packets have
// it.
template <u32 packets, typename F>
__device__ __forceinline__ void load_packets(packet (&v)[packets], u64 place, u32 part, u32 lane, u64 flag, F wanted)
{
	place += part * packets * 512 + lane * 16;
#pragma unroll
	for (u32 i = 0; i < packets; i++) {
		v[i] = {{0, flag}};
		if (wanted(i))
			v[i] = packet::get(place + i * 512);
	}
}

// Flags of rows on their way back, which packets of rows to experts, at the same places in other calls, never have: the
// highest bit of theirs is 0.
__device__ __forceinline__ u32 flag_back(u64 epoch) { return packet::flag(epoch) | 0x80000000; }

// Packets of 14 bytes and a flag of 16 bits. Flags of calls of one parity differ, unless they are 32,767 of them apart
// or more.
struct tight {
	static __device__ __forceinline__ u32 flag(u64 epoch) { return 1 + static_cast<u32>(epoch / 2) % 32767; }

	static __device__ __forceinline__ void put(u64 place, u32 flag, u32 x, u32 y, u32 z, u32 end)
	{
		packet::put(place, flag << 16 | end, x, y, z);
	}
	static __device__ __forceinline__ bool has(const packet &v, u32 flag) { return v.word(3) >> 16 == flag; }
	// Bytes 12 and 13.
	static __device__ __forceinline__ u32 end(const packet &v) { return v.word(3) & 0xffff; }

	// Loads a lane's packets of a part, those that it wants. True when they are there.
	template <u32 packets, typename F>
	static __device__ __forceinline__ bool read(packet (&v)[packets], u64 place, u32 part, u32 lane, u32 flag,
	                                            F wanted)
	{
		load_packets(v, place, part, lane, static_cast<u64>(flag) << 48, wanted);
		bool all = true;
#pragma unroll
		for (u32 i = 0; i < packets; i++)
			all &= has(v[i], flag);
		return all;
	}
};

// The words of a lane of a part of a row, as they cross.
template <u32 count> struct few_words {
	static constexpr u32 packets = (count + 2) / 3;
	u32 w[3 * packets];

	__device__ __forceinline__ void write_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag) const
	{
		place += part * packets * 512 + lane * 16;
#pragma unroll
		for (u32 i = 0; i < packets; i++)
			if (i < used)
				packet::put(place + i * 512, flag, w[3 * i], w[3 * i + 1], w[3 * i + 2]);
	}

	// True when they are there.
	__device__ __forceinline__ bool read_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag)
	{
		packet v[packets];
		load_packets(v, place, part, lane, static_cast<u64>(flag) << 32, [&](u32 i) { return i < used; });
		bool all = true;
#pragma unroll
		for (u32 i = 0; i < packets; i++) {
			w[3 * i] = v[i].word(0), w[3 * i + 1] = v[i].word(1), w[3 * i + 2] = v[i].word(2);
			all &= v[i].has(flag);
		}
		return all;
	}
};

// A row as it is: words of this number of vectors.
template <u32 count> struct few_whole : few_words<4 * count> {
	using few_words<4 * count>::w;
	static constexpr u32 vectors = count;
	static constexpr bool scaled = false;

	static __device__ __forceinline__ u32 parts(u32 bytes) { return few_parts<vectors>(bytes); }

	__device__ __forceinline__ void set(u32 i, uint4 v)
	{
		w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
	}
	__device__ __forceinline__ uint4 vector(u32 i) const
	{
		return make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
	}

	__device__ __forceinline__ void make(const few_vectors<vectors> &r, u32, u32)
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			set(i, r.v[i]);
	}
};

// A row as it is, on its way to experts: a lane has seven vectors of a part. There is one packet for all but the end of
// each vector, and one for their ends.
struct few_dense : few_whole<SW_DISPATCH_DENSE_PART / 512> {
	static constexpr u32 packets = vectors + 1;
	static_assert(vectors == 7, "their ends fill a packet");

	static __device__ __forceinline__ u32 flag(u64 epoch) { return tight::flag(epoch); }

	// How many vectors a lane has of a part.
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32 lane)
	{
		u32 at = part * 512 * vectors + lane * 16;
		return at < bytes ? min((bytes - at + 511) / 512, vectors) : 0;
	}

	__device__ __forceinline__ void write_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag) const
	{
		place += part * packets * 512 + lane * 16;
		u32 ends[vectors];
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			ends[i] = w[4 * i + 3] >> 16;
			if (i < used)
				tight::put(place + i * 512, flag, w[4 * i], w[4 * i + 1], w[4 * i + 2],
				           w[4 * i + 3] & 0xffff);
		}
		if (used != 0)
			tight::put(place + vectors * 512, flag, ends[0] | ends[1] << 16, ends[2] | ends[3] << 16,
			           ends[4] | ends[5] << 16, ends[6]);
	}

	// True when they are there.
	__device__ __forceinline__ bool read_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag)
	{
		packet v[packets];
		bool all = tight::read(v, place, part, lane, flag,
		                       [&](u32 i) { return i < used || (i == vectors && used != 0); });
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 end = i == 6 ? v[vectors].word(3) : v[vectors].word(i / 2) >> (i % 2 * 16);
			w[4 * i] = v[i].word(0), w[4 * i + 1] = v[i].word(1), w[4 * i + 2] = v[i].word(2);
			w[4 * i + 3] = tight::end(v[i]) | end << 16;
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

// A row as it is, on its way back: a lane has three vectors of a part, fewer than on the way there, since a warp has
// several rows at once. There is one packet for all but the end of each vector, and a lane of the first half has one
// for the ends of two lanes, its own and those of the lane 16 behind it.
struct few_plain : few_whole<SW_DISPATCH_PLAIN_PART / 512> {
	static constexpr u32 packets = vectors + 1, half = 16;
	static_assert(vectors == 3, "the ends of two lanes fill a packet");
	u32 other[2]; // ends of the lane 16 behind, as they came: of vectors 0 and 1, and in the high half of vector 2

	static __device__ __forceinline__ u32 flag(u64 epoch) { return tight::flag(epoch) | 0x8000; }

	// How many vectors a lane has of a part.
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32 lane)
	{
		u32 at = part * 512 * vectors + lane * 16;
		return (at < bytes ? 1 : 0) + (at + 512 < bytes ? 1 : 0) + (at + 1024 < bytes ? 1 : 0);
	}
	// Whether a lane with that many vectors has packet i.
	static __device__ __forceinline__ bool has(u32 i, u32 used, u32 lane)
	{
		return i < used || (i == vectors && used != 0 && lane < half);
	}

	// All lanes.
	__device__ __forceinline__ void write_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag) const
	{
		place += part * packets * 512 + lane * 16;
		u32 first = w[3] >> 16 | (w[7] & 0xffff0000), third = w[11] >> 16;
		u32 others = __shfl_sync(~0u, first, lane | half), last = __shfl_sync(~0u, third, lane | half);
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			if (has(i, used, lane))
				tight::put(place + i * 512, flag, w[4 * i], w[4 * i + 1], w[4 * i + 2],
				           w[4 * i + 3] & 0xffff);
		if (has(vectors, used, lane))
			tight::put(place + vectors * 512, flag, first, others, third | last << 16, 0);
	}

	// True when they are there.
	__device__ __forceinline__ bool read_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag)
	{
		packet v[packets];
		bool all = tight::read(v, place, part, lane, flag, [&](u32 i) { return has(i, used, lane); });
#pragma unroll
		for (u32 i = 0; i < vectors; i++)
			w[4 * i] = v[i].word(0), w[4 * i + 1] = v[i].word(1), w[4 * i + 2] = v[i].word(2);
		w[3] = tight::end(v[0]) | v[vectors].word(0) << 16;
		w[7] = tight::end(v[1]) | (v[vectors].word(0) & 0xffff0000);
		w[11] = tight::end(v[2]) | v[vectors].word(2) << 16;
		other[0] = v[vectors].word(1), other[1] = v[vectors].word(2);
		return all;
	}

	// Hands over the ends that came with another lane's. All lanes, when their packets are there.
	__device__ __forceinline__ void join(u32 lane)
	{
		u32 first = __shfl_sync(~0u, other[0], lane & (half - 1)),
		    third = __shfl_sync(~0u, other[1], lane & (half - 1));
		if (lane >= half) {
			w[3] |= first << 16;
			w[7] |= first & 0xffff0000;
			w[11] |= third & 0xffff0000;
		}
	}
};

// A row of numbers of a type as float8 with scales of blocks of 128, on its way to experts: a lane has what seven
// vectors become, and some lanes of a block carry a block's scale each. Packets have three words each, and two bytes of
// what the last vector became; one more has the scale.
template <kind type> struct few_narrow {
	static constexpr u32 vectors = SW_DISPATCH_DENSE_PART / 512,
			     count = numbers<type>::count / 4; // words that a vector becomes
	static constexpr u32 full = 2 * count, packets = full + 1;
	static constexpr u32 span = 128 * numbers<type>::size / 16; // lanes of a block of 128: 16 or 32
	static constexpr bool scaled = true;
	static_assert(vectors == 7, "what the last becomes fills the ends of packets");
	u32 w[count * vectors], scale;

	static __device__ __forceinline__ u32 flag(u64 epoch) { return tight::flag(epoch); }

	static __device__ __forceinline__ u32 parts(u32 bytes) { return few_parts<vectors>(bytes); }
	// How many vectors a lane has of a part, and 8 where it carries a scale.
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32 lane)
	{
		return few_dense::used(bytes, part, lane) | (block(bytes, part, lane) != ~0u ? 8 : 0);
	}
	// Whether such a lane has packet i.
	static __device__ __forceinline__ bool has(u32 i, u32 used)
	{
		return i == full ? (used & 8) != 0 : 3 * i < count * (used & 7);
	}

	__device__ __forceinline__ void make(const few_vectors<vectors> &r, u32 lane, u32 mode)
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
			scaling s(most[i], mode);
			u32 low, high;
			narrow<type>(r.v[i], s.factor, low, high);
			w[count * i] = low;
			if constexpr (count == 2)
				w[2 * i + 1] = high;
			if (i == 0 || lane % span == i)
				scale = s.word;
		}
	}

	__device__ __forceinline__ void write_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag) const
	{
		place += part * packets * 512 + lane * 16;
		if (has(full, used))
			tight::put(place + full * 512, flag, scale, 0, 0, 0);
#pragma unroll
		for (u32 i = 0; i < full; i++)
			if (has(i, used))
				tight::put(place + i * 512, flag, w[3 * i], w[3 * i + 1], w[3 * i + 2],
				           w[3 * full + i / 2] >> (i % 2 * 16) & 0xffff);
	}

	// True when they are there.
	__device__ __forceinline__ bool read_packets(u64 place, u32 part, u32 used, u32 lane, u32 flag)
	{
		packet v[packets];
		bool all = tight::read(v, place, part, lane, flag, [&](u32 i) { return has(i, used); });
#pragma unroll
		for (u32 i = 0; i < full; i++)
			w[3 * i] = v[i].word(0), w[3 * i + 1] = v[i].word(1), w[3 * i + 2] = v[i].word(2);
#pragma unroll
		for (u32 i = 0; i < full; i += 2)
			w[3 * full + i / 2] = tight::end(v[i]) | tight::end(v[i + 1]) << 16;
		scale = v[full].word(0);
		return all;
	}

	__device__ __forceinline__ void store(u64 row, u32 bytes, u32 part, u32 lane) const
	{
#pragma unroll
		for (u32 i = 0; i < vectors; i++) {
			u32 at = (part * vectors + i) * 512 + lane * 16;
			if (at >= bytes)
				continue;
			if constexpr (count == 2)
				store_vector2(row + at / 2, make_uint2(w[2 * i], w[2 * i + 1]));
			else
				*view<u32>(row + at / 4) = w[i];
		}
	}

	// The number of the block whose scale a lane carries, or ~0.
	static __device__ __forceinline__ u32 block(u32 bytes, u32 part, u32 lane)
	{
		u32 at = (part * vectors + lane % span) * 512 + lane / span * span * 16;
		return lane % span < vectors && at < bytes ? at / (16 * span) : ~0u;
	}
};

// A partial sum as float8 with scales, on its way back: a lane has what four vectors become, and one of its blocks'
// scales.
template <kind type> struct few_float8 : few_words<numbers<type>::count + 1> {
	using base = few_words<numbers<type>::count + 1>;
	using base::w;
	static constexpr u32 vectors = SW_DISPATCH_NARROW_PART / 512,
			     count = numbers<type>::count / 4;      // words that a vector becomes
	static constexpr u32 span = 128 * numbers<type>::size / 16; // lanes of a block of 128: 16 or 32
	static constexpr u32 last = numbers<type>::count;

	static __device__ __forceinline__ u32 flag(u64 epoch) { return flag_back(epoch); }

	static __device__ __forceinline__ u32 parts(u32 bytes) { return few_parts<vectors>(bytes); }
	static __device__ __forceinline__ u32 used(u32 bytes, u32 part, u32)
	{
		return part * 512 * vectors < bytes ? base::packets : 0;
	}

	__device__ __forceinline__ void join(u32) const {}

	// Vector i; the lanes of a block have its scale. lane%4 says whose scale a lane carries.
	__device__ __forceinline__ void set(u32 i, u32 low, u32 high, u32 scale, u32 lane)
	{
		w[count * i] = low;
		if constexpr (count == 2)
			w[2 * i + 1] = high;
		if (i == 0 || lane % vectors == i)
			w[last] = scale;
	}
	__device__ __forceinline__ uint2 vector(u32 i) const
	{
		return make_uint2(w[count * i], count == 2 ? w[count * i + count - 1] : 0);
	}
	// The scale of vector i. All lanes.
	__device__ __forceinline__ float scale(u32 i, u32 lane) const
	{
		return __uint_as_float(__shfl_sync(~0u, w[last], lane / span * span + i));
	}
};

// Parts of rows as tasks of the warps of some of a grid's blocks. Neighbouring warps lie in different blocks.
struct few_tasks {
	u32 first, step;

	__device__ __forceinline__ few_tasks(u32 block, u32 blocks)
	    : first(blockIdx.x - block < blocks ? threadIdx.x / 32 * blocks + blockIdx.x - block : ~0u),
	      step(blocks * (blockDim.x / 32))
	{
	}
};

} // namespace sw
