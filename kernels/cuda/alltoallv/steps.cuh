// The steps of an exchange: in each step this rank sends to one peer and receives from another.
//
// Every kernel begins here. Reads the arguments and, where splits are in device memory, those; writes shared memory.
#pragma once

#include "../device.cuh"
#include "../tiles.cuh"

namespace sw {

// Where a kernel finds its steps: in its arguments, or in shared memory, where they may also come from a table in
// device memory.
struct direct {
	const sw_exchange_args &a;

	__device__ __forceinline__ sw_step operator[](u32 i) const { return a.steps[i]; }
	__device__ __forceinline__ i64 own_bytes() const { return a.own_bytes; }
	__device__ __forceinline__ i64 own_src() const { return a.own_src; }
	__device__ __forceinline__ i64 own_dst() const { return a.own_dst; }
};

struct gathered {
	struct store {
		sw_step steps[SW_MAX_RANKS];
		i64 own[3];
	};
	const store &s;

	// Every thread of the block calls it and meets the others at a barrier before the first use. True when splits
	// from device memory reach past the buffers.
	static __device__ __forceinline__ bool fill(store &s, const sw_exchange_args &a)
	{
		const i64 *table = reinterpret_cast<const i64 *>(a.splits);
		if (table != nullptr)
			await_stream(); // somebody may be writing it
		bool outside = false;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.world.size; i += blockDim.x) {
			if (i == a.world.size - 1) {
				s.own[0] = table == nullptr ? a.own_bytes : table[a.world.rank];
				s.own[1] = table == nullptr ? a.own_src : table[a.world.size + a.world.rank];
				s.own[2] = table == nullptr ? a.own_dst : table[3 * a.world.size + a.world.rank];
				outside |= table != nullptr && (past(s.own[0], s.own[1], a.src_bytes) ||
				                                past(s.own[0], s.own[2], a.dst_bytes));
				continue;
			}
			sw_step x = a.steps[i];
			if (table != nullptr) {
				x.send_bytes = table[x.to];
				x.send_offset = table[a.world.size + x.to];
				x.recv_bytes = table[2 * a.world.size + x.from];
				x.recv_offset = table[3 * a.world.size + x.from];
				outside |= past(x.send_bytes, x.send_offset, a.src_bytes) ||
				           past(x.recv_bytes, x.recv_offset, a.dst_bytes);
			}
			s.steps[i] = x;
		}
		return outside;
	}

	static __device__ __forceinline__ bool past(i64 bytes, i64 offset, i64 limit)
	{
		return bytes < 0 || offset < 0 || bytes > limit || offset > limit - bytes;
	}

	__device__ __forceinline__ const sw_step &operator[](u32 i) const { return s.steps[i]; }
	__device__ __forceinline__ i64 own_bytes() const { return s.own[0]; }
	__device__ __forceinline__ i64 own_src() const { return s.own[1]; }
	__device__ __forceinline__ i64 own_dst() const { return s.own[2]; }
};

// A warp copies its tiles of what stays on this rank.
template <typename Steps>
__device__ __forceinline__ void copy_own(const sw_exchange_args &a, Steps r, u32 first, u32 step, u32 lane)
{
	u64 from = a.src + r.own_src(), to = a.dst + r.own_dst();
	if (from != to)
		move(to, from, r.own_bytes(), first, step, lane);
}

// t/(size-1) and the rest, for t below 2^26.
struct share {
	u32 quotient, rest;

	__device__ __forceinline__ share(const sw_exchange_args &a, u32 t)
	{
		quotient = a.inverse == 0 ? t : __umulhi(t, a.inverse);
		rest = t - quotient * (a.world.size - 1);
	}
};

} // namespace sw
