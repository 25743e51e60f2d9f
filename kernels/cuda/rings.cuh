// A ring of slots by which chunks come from one rank to another on another host, and its two ends.
//
// The sender fills a slot of its own, and posts it for the slot of equal index of the receiver. Once the receiver has
// given that back the bytes have landed, so they have left the sender's slot too, and both are free. Chunks and puts
// that give back are counted for ever, also from call to call, so what an earlier call has left never counts as new
// (X9).
//
// Calls: one thread a ring and end, while others wait for it at a barrier to copy. Reads words and slots in this rank's
// segment of the rail, and its state in memory of the GPU.
#pragma once

#include "queue.cuh"

namespace sw {

struct ring_end {
	const sw_world &w;
	const sw_rail &rail;
	const sw_ring &r;
	u64 epoch;
	u64 count; // chunks so far

	__device__ __forceinline__ ring_end(const sw_world &w, const sw_rail &rail, const sw_ring &r, u64 epoch)
	    : w(w), rail(rail), r(r), epoch(epoch), count(load_relaxed_sys(r.state))
	{
	}

	// For the next call.
	__device__ __forceinline__ void keep() const { store_relaxed_sys(r.state, count); }

	__device__ __forceinline__ put_queue to_proxy() const { return {rail.queue}; }
	__device__ __forceinline__ u64 index() const { return count % r.slot_count; }
};

// The sender's end.
struct ring_out : ring_end {
	using ring_end::ring_end;

	// Waits until the next chunk can be written, and says where. 0 when the wait was given up.
	__device__ __forceinline__ u64 await_slot() const
	{
		if (count >= r.slot_count) {
			u64 puts = (count - r.slot_count) / r.gives + 1;
			if (!line{rail.segment + r.given}.await(w, static_cast<u32>(r.name), epoch, puts))
				return 0;
		}
		return rail.segment + r.sources + index() * r.slot_bytes;
	}

	// Sends what is in the slot, behind a barrier after the stores of its bytes. False when it was given up.
	__device__ __forceinline__ bool send(i64 bytes)
	{
		u64 at = index() * r.slot_bytes;
		count++;
		return to_proxy().post(w, epoch, {r.slots + at, r.sources + at, bytes, r.landed, r.peer, 0, {0, 0}}) !=
		       0;
	}
};

// The receiver's end.
struct ring_in : ring_end {
	using ring_end::ring_end;

	// Waits for the next chunk, and says where it is. 0 when the wait was given up.
	__device__ __forceinline__ u64 await_chunk() const
	{
		if (!line{rail.segment + r.landed}.await(w, static_cast<u32>(r.name), epoch, count + 1))
			return 0;
		return rail.segment + r.slots + index() * r.slot_bytes;
	}

	// Gives the slot back, behind a barrier after the loads of its bytes. False when it was given up.
	__device__ __forceinline__ bool give_back()
	{
		return ++count % r.gives != 0 || to_proxy().post(w, epoch, {0, 0, 0, r.given, r.peer, 0, {0, 0}}) != 0;
	}
};

} // namespace sw
