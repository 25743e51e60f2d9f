// Flags of packets come again. So every call forgets what lies in some places that it does not use.
//
// Kernels for few tokens call this. It writes the notes and packets of this rank's state, and its words wiped.
#pragma once

#include "wire.cuh"

namespace sw {

// Has a packet's flag never be one of long ago: every call forgets what lies in the places of one token that it does
// not use. The next call of its parity takes the next token, which a word of the state has.
__device__ __forceinline__ u32 *next_wiped(const sw_dispatch_args &a, u64 epoch)
{
	return state::wiped(a) + packet::parity(epoch);
}

// Forgets what src has sent of the note of token t, from one byte to another. A warp.
__device__ __forceinline__ void wipe_note(const sw_dispatch_args &a, u32 src, u32 t, u64 epoch, u32 from, u32 to,
                                          u32 lane)
{
	u64 note = note_place(a, a.world.rank, src, t, epoch);
#pragma unroll 1
	for (u32 at = from + 16 * lane; at < to; at += 512)
		packet::wipe(note + at);
}

// Forgets what src has sent of token t: its row, and its note from one byte to another. A warp.
__device__ __forceinline__ void wipe(const sw_dispatch_args &a, u32 src, u32 t, u64 epoch, u32 from, u32 to, u32 lane)
{
	u64 row = row_place(a, a.world.rank, src, t, epoch);
	wipe_note(a, src, t, epoch, from, to, lane);
#pragma unroll 1
	for (u32 at = 16 * lane; at < a.state.packet_stride; at += 512)
		packet::wipe(row + at);
}

// The token of a call, of which the blocks have read the words of even and odd calls. The kernel of its first half has
// the word go on when all of its blocks have, one thread.
struct wiping {
	u32 even, odd;

	__device__ __forceinline__ explicit wiping(const sw_dispatch_args &a)
	    : even(*next_wiped(a, 0)), odd(*next_wiped(a, 1))
	{
	}
	__device__ __forceinline__ u32 next(u64 epoch) const { return packet::parity(epoch) == 0 ? even : odd; }
	__device__ __forceinline__ void advance(const sw_dispatch_args &a, u64 epoch) const
	{
		*next_wiped(a, epoch) = next(epoch) + 1 < a.max_tokens ? next(epoch) + 1 : 0;
	}
	__device__ __forceinline__ u32 token(const sw_dispatch_args &a, u64 epoch, bool sends) const
	{
		return sends ? next(epoch) : (next(epoch) != 0 ? next(epoch) : a.max_tokens) - 1;
	}
};

} // namespace sw
