// How a message above the packets' limit is cut into stripes, and those into chunks, and where their words lie. Both
// ends compute the same.
//
// Called by whoever sends, receives or watches such messages. Touches no memory: addresses only.
#pragma once

#include "../lines.cuh"
#include "steps.cuh"

namespace sw {

// True when this rank takes messages in through staging.
__device__ __forceinline__ bool through_staging(const sw_exchange_args &a)
{
	return a.dst_offset < 0 || (a.flags & SW_FLAG_STAGED) != 0;
}

// Lengths are divided in units of 128 bytes, which 32 bits count up to 512 GiB.
__device__ __forceinline__ u32 units(i64 bytes) { return static_cast<u32>((bytes + 127) >> 7); }

// How a message is cut into stripes; both ends compute the same.
struct stripes {
	i64 bytes, per;
	u32 count;

	__device__ __forceinline__ stripes(const sw_exchange_args &a, i64 n) : bytes(n)
	{
		i64 want = (n + SW_STRIPE_MIN_BYTES - 1) / SW_STRIPE_MIN_BYTES;
		count = want < a.stripes ? static_cast<u32>(want) : a.stripes;
		if (count == 0)
			count = 1;
		per = 128 * static_cast<i64>((units(n) + count - 1) / count);
	}
	__device__ __forceinline__ i64 begin(u32 stripe) const { return stripe * per < bytes ? stripe * per : bytes; }
	__device__ __forceinline__ i64 length(u32 stripe) const { return begin(stripe + 1) - begin(stripe); }
};

// The line in dst's segment by which src signals a stripe in calls of parity 0. Those of parity 1 lie parity_bytes
// behind.
__device__ __forceinline__ u64 signal_line(const sw_exchange_args &a, u32 dst, u32 src, u32 stripe)
{
	return segment(a.world, dst) + a.block.signals + (static_cast<u64>(src) * a.stripes + stripe) * SW_LINE_BYTES;
}

// Messages through staging have three words for signals in a line: the first of all signals, one for the end of the
// message and one for a second warp that signals chunks. So these warps do not wait for each other, and none overwrites
// a later signal by an earlier one.
constexpr u64 end_of_staged = 16, other_teller = 24;

__device__ __forceinline__ u64 parity_bytes(const sw_exchange_args &a, u64 epoch)
{
	return (epoch & 1) * a.world.size * a.stripes * SW_LINE_BYTES;
}

// The line of a stripe in a call.
struct stripe_line {
	const sw_exchange_args &a;
	u64 epoch, even; // of parity 0

	__device__ __forceinline__ u64 at() const { return even + parity_bytes(a, epoch); }

	// Tells the receiver of the stripe's end, or of chunks, and of the message's length.
	__device__ __forceinline__ void signal(u64 bytes) const { line{at()}.signal(last_seq(epoch), bytes); }
	__device__ __forceinline__ void signal(u64 number, u64 bytes) const { line{at()}.signal(number, bytes); }

	// The same in a word of its own.
	__device__ __forceinline__ void signal_word(u64 word, u64 number) const { line{at() + word}.signal(number); }

	// look reads a word. see makes visible what the sender wrote before that.
	__device__ __forceinline__ void see(u64 word) const { load_acquire_sys(at() + word); }
	__device__ __forceinline__ pair64 look(u64 word = 0) const { return load16_relaxed_sys(at() + word); }
};

__device__ __forceinline__ u64 stripe_credit(const sw_exchange_args &a, u32 src, u32 dst, u32 stripe)
{
	return segment(a.world, src) + a.block.stripe_credits +
	       (static_cast<u64>(dst) * a.stripes + stripe) * SW_LINE_BYTES;
}

__device__ __forceinline__ u64 stripe_slots(const sw_exchange_args &a, u32 dst, u32 src, u32 stripe)
{
	return segment(a.world, dst) + a.block.slots +
	       (static_cast<u64>(src) * a.stripes + stripe) * a.slot_count * a.slot_bytes;
}

__device__ __forceinline__ u32 chunk_count(const sw_exchange_args &a, i64 length)
{
	u32 slot = units(a.slot_bytes);
	return length == 0 ? 1 : (units(length) + slot - 1) / slot;
}

} // namespace sw
