// Entries: a rank tells its peers of a call and compares what they tell. The ranks agree before one touches a peer's
// memory.
//
// The kernels of reductions begin here. Writes this rank's entries in the peers' segments, reads those in its own, and
// records it when calls differ.
#pragma once

#include "../lines.cuh"
#include "../packet.cuh"

namespace sw {

__device__ __forceinline__ u32 call_op(const sw_reduce_args &a) { return a.call & 0xff; }
__device__ __forceinline__ u32 call_type(const sw_reduce_args &a) { return a.call >> 8 & 0xff; }
__device__ __forceinline__ bool reduces(const sw_reduce_args &a) { return (a.call >> 16 & SW_REDUCE_SCATTER) != 0; }
__device__ __forceinline__ bool gathers(const sw_reduce_args &a) { return (a.call >> 16 & SW_ALL_GATHER) != 0; }
__device__ __forceinline__ bool has(const sw_reduce_args &a, u32 flag) { return (a.call >> 24 & flag) != 0; }
__device__ __forceinline__ bool one_shot(const sw_reduce_args &a) { return has(a, SW_REDUCE_ONE_SHOT); }

// The elements that a rank reduces or hands out: all of them in one shot, else its slice.
struct span {
	i64 at, bytes;

	__device__ __forceinline__ span(const sw_reduce_args &a, u32 rank)
	{
		bool all = one_shot(a);
		at = all ? 0 : a.bounds[rank];
		bytes = a.bounds[all ? a.world.size : rank + 1] - at;
	}
};

__device__ __forceinline__ u64 entry_place(const sw_reduce_args &a, u64 epoch, u32 dst, u32 src)
{
	return segment(a.world, dst) + a.block.entries +
	       (packet::parity(epoch) * a.world.size + src) * SW_REDUCE_ENTRY_BYTES;
}

// Tells every peer of the call. A warp.
__device__ __forceinline__ void enter(const sw_reduce_args &a, u64 epoch, u32 lane)
{
	u32 flag = packet::flag(epoch);
#pragma unroll 1
	for (u32 p = lane; p < a.world.size; p += 32) {
		if (p == a.world.rank)
			continue;
		u64 to = entry_place(a, epoch, p, a.world.rank);
		packet::put(to, flag, a.count, a.call);
		packet::put(to + 16, flag, a.shape, gridDim.x);
		packet::put(to + 32, flag, a.src_place, 0);
		packet::put(to + 48, flag, a.dst_place, 0);
	}
}

// An entry. Its words come one by one.
struct entry {
	u64 count, shape, src, dst;
	u32 call, blocks;

	__device__ __forceinline__ bool get(u64 from, u32 flag)
	{
		packet x = packet::get(from), y = packet::get(from + 16), z = packet::get(from + 32),
		       w = packet::get(from + 48);
		count = x.low(), shape = y.low(), src = z.low(), dst = w.low();
		call = x.word(2), blocks = y.word(2);
		return x.has(flag) && y.has(flag) && z.has(flag) && w.has(flag);
	}
};

__device__ __forceinline__ u64 call_word(u32 call, u32 blocks) { return static_cast<u64>(blocks) << 32 | call; }

// The ranks call different things: a fault of this call alone.
__device__ __noinline__ void give_up_call(const sw_reduce_args &a, u32 peer, u64 epoch, const entry &e)
{
	u64 own = own_segment(a.world);
	store_relaxed_sys(own + a.world.control + offsetof(sw_control, mismatched), epoch);
	volatile sw_fault *f = reinterpret_cast<sw_fault *>(a.world.fault);
	u32 *kind = reinterpret_cast<u32 *>(own + a.world.control + offsetof(sw_control, fault));
	if (atomicCAS(kind, SW_FAULT_NONE, SW_FAULT_MISMATCH) != SW_FAULT_NONE)
		return;
	f->peer = peer;
	f->epoch = epoch;
	f->expected = a.count;
	f->sent = e.count;
	f->mine = call_word(a.call, gridDim.x);
	f->theirs = call_word(e.call, e.blocks);
	f->my_shape = a.shape;
	f->their_shape = e.shape;
	f->sending = 0;
	__threadfence_system();
	f->kind = SW_FAULT_MISMATCH;
	__threadfence_system();
}

// Waits for the peers' entries and gives each to `each`. False when a call differs, or the wait was given up. A warp.
template <typename Each> __device__ __forceinline__ bool meet(const sw_reduce_args &a, u64 epoch, u32 lane, Each each)
{
	u32 flag = packet::flag(epoch);
	bool good = true;
#pragma unroll 1
	for (u32 p = lane; p < a.world.size; p += 32) {
		if (p == a.world.rank)
			continue;
		entry e;
		wait w;
		w.epoch = epoch;
		u64 from = entry_place(a, epoch, a.world.rank, p);
		if (!await(w, a.world, p, epoch, false, [&] { return e.get(from, flag); })) {
			good = false;
		} else if (e.count != a.count || e.shape != a.shape || e.call != a.call || e.blocks != gridDim.x) {
			give_up_call(a, p, epoch, e);
			good = false;
		} else {
			each(p, e);
		}
	}
	__syncwarp();
	return __any_sync(~0u, !good) == 0;
}

// Wipes one place of a peer that no packet of the call lands in. groups is how many of them the call uses. A warp.
__device__ __forceinline__ void wipe_one(const sw_reduce_args &a, u64 epoch, u64 region, u32 peer, u32 groups)
{
	u32 words = static_cast<u32>(a.block.packet_stride / 16);
	if (words == 0 || peer == a.world.rank)
		return;
	u32 at = static_cast<u32>(epoch / 2) % words;
	if (at / (SW_PACKET_GROUP_BYTES / 16) >= groups)
		packet::wipe(own_segment(a.world) + region +
		             (packet::parity(epoch) * a.world.size + peer) * a.block.packet_stride +
		             16 * static_cast<u64>(at));
}

} // namespace sw
