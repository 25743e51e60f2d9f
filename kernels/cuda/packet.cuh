// Packets: words of 16 bytes, 12 of data and a flag that tells the call, so that data and signal arrive as one.
//
// Kernels of small messages call this. Reads and writes only what its caller names.
#pragma once

#include "device.cuh"

namespace sw {

// A packet. Where it lies has two places, for even and odd calls: who is through a call knows that its peers have begun
// it, and so are through the one before. Equal flags are 2^31 calls apart or more, and every call wipes some places
// that it does not use, so that no packet lies so long.
struct packet {
	pair64 v;

	// Of a call. Never 0, which memory begins with.
	static __device__ __forceinline__ u32 flag(u64 epoch)
	{
		u32 low = static_cast<u32>(epoch);
		return low != 0 ? low : 0x80000000u;
	}

	// Which of its two places a call has.
	static __device__ __forceinline__ u64 parity(u64 epoch) { return epoch & 1; }

	static __device__ __forceinline__ void put(u64 place, u32 flag, u64 low, u32 high)
	{
		store16_relaxed_sys(place, low, static_cast<u64>(flag) << 32 | high);
	}
	static __device__ __forceinline__ void put(u64 place, u32 flag, u32 x, u32 y, u32 z)
	{
		put(place, flag, static_cast<u64>(y) << 32 | x, z);
	}
	static __device__ __forceinline__ void wipe(u64 place) { store16_relaxed_sys(place, 0, 0); }
	static __device__ __forceinline__ packet get(u64 place) { return {load16_relaxed_sys(place)}; }

	__device__ __forceinline__ bool has(u32 flag) const { return word(3) == flag; }
	__device__ __forceinline__ u64 low() const { return v.a; }
	// The last of four has the flag.
	__device__ __forceinline__ u32 word(u32 i) const
	{
		u64 half = i < 2 ? v.a : v.b;
		return static_cast<u32>(i % 2 == 0 ? half : half >> 32);
	}
};

__device__ __forceinline__ u32 packet_groups(i64 bytes)
{
	return static_cast<u32>((bytes + SW_PACKET_GROUP_PAYLOAD - 1) / SW_PACKET_GROUP_PAYLOAD);
}

// The 48 bytes of one thread.
struct quad {
	u32 w[12];

	// From an aligned address, n bytes in units of 16.
	__device__ __forceinline__ void load(u64 p, i64 n)
	{
#pragma unroll
		for (int i = 0; i < 3; i++) {
			uint4 v = make_uint4(0, 0, 0, 0);
			if (16 * i < n)
				v = load_vector(p + 16 * i);
			w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
		}
	}

	// From any address, n bytes.
	__device__ __forceinline__ void load_odd(u64 p, i64 n)
	{
		if (n >= 48 && (p & 3) == 0) {
#pragma unroll
			for (int i = 0; i < 12; i++)
				w[i] = *reinterpret_cast<const volatile u32 *>(p + 4 * i);
			return;
		}
#pragma unroll
		for (int i = 0; i < 12; i++) {
			w[i] = 0;
#pragma unroll
			for (int k = 0; k < 4; k++)
				if (4 * i + k < n)
					w[i] |= static_cast<u32>(load_byte(p + 4 * i + k)) << (8 * k);
		}
	}

	__device__ __forceinline__ void store(u64 p, i64 n) const
	{
#pragma unroll
		for (int i = 0; i < 3; i++)
			if (16 * i < n)
				store_vector(p + 16 * i,
				             make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
	}

	__device__ __forceinline__ void store_odd(u64 p, i64 n) const
	{
		if (n >= 48 && (p & 3) == 0) {
#pragma unroll
			for (int i = 0; i < 12; i++)
				*reinterpret_cast<volatile u32 *>(p + 4 * i) = w[i];
			return;
		}
#pragma unroll
		for (int i = 0; i < 12; i++)
#pragma unroll
			for (int k = 0; k < 4; k++)
				if (4 * i + k < n)
					store_byte(p + 4 * i + k, static_cast<u8>(w[i] >> (8 * k)));
	}

	// Packet k of four.
	__device__ __forceinline__ void put(u64 to, int k, u32 flag) const
	{
		packet::put(to + 512 * k, flag, w[3 * k], w[3 * k + 1], w[3 * k + 2]);
	}

	// True when it is there.
	__device__ __forceinline__ bool get(u64 from, int k, u32 flag)
	{
		packet p = packet::get(from + 512 * k);
#pragma unroll
		for (u32 i = 0; i < 3; i++)
			w[3 * k + i] = p.word(i);
		return p.has(flag);
	}
};

// Parts that are not aligned have functions of their own, so that others need not fetch their instructions.
__device__ __noinline__ quad load_odd(u64 p, i64 n)
{
	quad q;
	q.load_odd(p, n);
	return q;
}

__device__ __noinline__ void store_odd(quad q, u64 p, i64 n) { q.store_odd(p, n); }

// A thread's part of one group: where it is in the message and on the wire, whose first group lies at place.
struct part {
	i64 at, left;
	u64 wire;
	bool whole; // the user's side can be moved in vectors

	__device__ __forceinline__ part(u64 place, u64 user, i64 bytes, u32 group, u32 lane)
	{
		at = static_cast<i64>(group) * SW_PACKET_GROUP_PAYLOAD + 48 * lane;
		left = bytes - at;
		wire = place + static_cast<u64>(group) * SW_PACKET_GROUP_BYTES + 16 * lane;
		whole = ((user + at) & 15) == 0 && (left >= 48 || (left & 15) == 0);
	}
};

} // namespace sw
