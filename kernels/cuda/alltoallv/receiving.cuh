// The receiving half of a block: credits, the wait for what is written in place, and copies out of staging.
//
// The last warps of the exchange kernel run it, and the kernels around copy engines. Writes this rank's credit lines in
// the peers' segments and its own output; reads the signal lines and staging slots in its own segment.
#pragma once

#include "board.cuh"
#include "packets.cuh"

namespace sw {

// The receiving half of a block.
struct receiver {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;

	// Tells every peer with a large message where it may write.
	__device__ __forceinline__ void grant(u32 tid, u32 threads)
	{
		bool in_place = !through_staging(a);
#pragma unroll 1
		for (u32 i = tid; i < a.world.size - 1; i += threads) {
			u32 p = r[i].from;
			i64 n = r[i].recv_bytes;
			if (n <= a.packet_bytes)
				continue;
			u64 place = in_place ? static_cast<u64>(a.dst_offset + r[i].recv_offset) : SW_NOWHERE;
			credit::signal(a, p, epoch, place, static_cast<u64>(n));
		}
	}

	// True when the size of the arriving message, of which the sender tells total, is right.
	__device__ __forceinline__ bool right_size(u64 total, u32 p, i64 n)
	{
		if (total == static_cast<u64>(n))
			return true;
		give_up(a.world, SW_FAULT_MISMATCH, p, epoch, false, total, static_cast<u64>(n));
		return false;
	}

	// True when the sender of a large message has another size in mind, or has refused its splits.
	__device__ __forceinline__ bool other_size(u32 p, i64 n)
	{
		packet header = packet::get(packet_place(a, epoch, a.world.rank, p));
		if (!header.has(packet::flag(epoch)) || header.low() == static_cast<u64>(n))
			return false;
		disagree(a, p, epoch, false, header.low(), static_cast<u64>(n));
		return true;
	}

	// Cycles from one tile of what stays on this rank to the next, so that it takes three quarters of the time of
	// the sends.
	__device__ __forceinline__ u32 own_interval()
	{
		float sends = 0;
#pragma unroll 1
		for (u32 i = 0; i < a.world.size - 1; i++)
			sends += static_cast<float>(r[i].send_bytes);
		return static_cast<u32>(
		    min(0.75f * static_cast<float>(a.interval) * sends / static_cast<float>(r.own_bytes()), 1e6f));
	}

	// Copies a warp's tiles of what stays on this rank next to sends that are held to a rate: one at once, while
	// they wait for credits, the others spread out, or the sends would be late.
	__device__ __forceinline__ void copy_own_beside(u32 warp, u32 lane)
	{
		u64 from = a.src + r.own_src(), to = a.dst + r.own_dst();
		tiles own{from, from == to ? 0 : r.own_bytes()};
		u32 step = recv_warps * gridDim.x, due = static_cast<u32>(clock()), interval = 0;
#pragma unroll 1
		for (i64 k = warp * gridDim.x + blockIdx.x; own.has(k); k += step) {
			if (interval != 0)
				await_clock(due += interval);
			move(to + own.begin(k), from + own.begin(k), own.length(k), 0, 1, lane);
			if (interval == 0 && a.interval != 0) {
				interval = own_interval();
				due += warp * interval;
				interval *= recv_warps;
			}
		}
	}

	// Messages that peers write in place: every thread waits for lines of its own.
	__device__ __forceinline__ void await_in_place(const board &b, u32 tid, u32 threads)
	{
		u32 count = items(a).count;
#pragma unroll 1
		for (u32 i = tid; i < count; i += threads) {
			const stripe_in &o = b.in[i];
			if (o.chunks == 0)
				continue;
			u32 p = r[o.step].from;
			i64 n = r[o.step].recv_bytes;
			await(stripe_line{a, epoch, o.line}, p, n);
		}
	}

	// Waits for the signal that a message written in place is there.
	__device__ __forceinline__ void await(stripe_line line, u32 p, i64 n)
	{
		wait w;
		pair64 v;
		bool differs = false;
		auto come = [&] {
			differs = w.polls != 0 && w.looked() && other_size(p, n);
			v = line.look(); // nobody reads the bytes before the kernel ends
			return differs || v.a >= last_seq(epoch);
		};
		if (sw::await(w, a.world, p, epoch, false, come) && !differs)
			right_size(v.b, p, n);
	}

	// Copies a warp's tiles of chunk k of an item out of staging. True when it was the last.
	__device__ __forceinline__ bool take_chunk(board &b, u32 i, u32 k, u32 warp, u32 lane)
	{
		const stripe_in &o = b.in[i];
		u32 slot = k % a.slot_count, warps = takers(a);
		i64 at = (k - 1) * a.slot_bytes, left = o.bytes - at;
		u32 slot_tiles = static_cast<u32>(a.slot_bytes / tile_bytes);
		u32 first =
		    (warp + k * (warps - slot_tiles % warps)) % warps; // the tiles of successive chunks go round
		move(o.to + at, o.slots + slot * a.slot_bytes, left < a.slot_bytes ? left : a.slot_bytes, first, warps,
		     lane);
		__syncwarp();
		if (k + a.slot_count <= o.chunks && lane == 0)
			b.taken[i * a.slot_count + slot].report();
		if (warp == 0 && lane == 0)
			tell_moved(b.moved);
		return k == o.chunks;
	}

	// Messages that arrive in staging: every warp copies its tiles of whatever recv_watch has seen come.
	__device__ __forceinline__ void take_staged(board &b, u32 warp, u32 lane)
	{
		items all(a);
		u32 *next = b.next + warp * all.count, open = 0;
#pragma unroll 1
		for (u32 i = lane; i < all.count; i += 32) {
			next[i] = b.in[i].chunks != 0;
			open += next[i];
		}
		open = __reduce_add_sync(~0u, open);
		tiles own{a.src + r.own_src(), a.src + r.own_src() == a.dst + r.own_dst() ? 0 : r.own_bytes()};
		u32 step = takers(a) * alike(a);
		i64 mine = warp * alike(a) + among_alike(a); // the next tile of it
#pragma unroll 1
		while (open > 0) {
			bool any = false;
#pragma unroll 1
			for (u32 first = 0; first < all.count; first += 32) {
				u32 i = first + lane, k = i < all.count ? next[i] : 0,
				    come = k != 0 ? atom_acquire_cta(&b.arrived[i]) : 0;
#pragma unroll 1
				for (u32 ready = __ballot_sync(~0u, k != 0 && come >= k); ready != 0;
				     ready &= ready - 1) {
					u32 from = __ffs(ready) - 1, chunk = __shfl_sync(~0u, k, from),
					    end = __shfl_sync(~0u, come, from);
					bool last = end == no_chunks;
#pragma unroll 1
					for (; !last && chunk <= end; chunk++)
						last = take_chunk(b, first + from, chunk, warp, lane);
					open -= last;
					if (lane == from)
						next[i] = last ? 0 : chunk;
					any = true;
				}
			}
			if (any)
				continue;
			if (own.has(mine)) { // something to do meanwhile
				move(a.dst + r.own_dst() + own.begin(mine), own.src + own.begin(mine), own.length(mine),
				     0, 1, lane);
				mine += step;
				continue;
			}
			if (read_by_one(&b.over, lane) != 0)
				return;
			__nanosleep(20);
		}
		copy_own(a, r, static_cast<u32>(mine), step, lane);
	}
};

} // namespace sw
