// Reductions by packets: what is to be reduced, and what has been, travels in words that carry their flag, so there is
// no fence and no signal. In one shot every rank sends all to all; in two shots it sends each rank its slice, and then
// its own result to all.
//
// All warps of the packet kernel but the last two run it. Writes this rank's packet places in the peers' segments
// (double buffered by the call's parity) and its own output; reads its input and the places in its own segment.
#pragma once

#include "calls.cuh"
#include "elements.cuh"

namespace sw {

constexpr u32 packet_warps = (SW_REDUCE_PACKET_THREADS - 64) / 32;

__device__ __forceinline__ u64 packet_place(const sw_reduce_args &a, u64 epoch, u64 region, u32 dst, u32 src)
{
	return segment(a.world, dst) + region + (packet::parity(epoch) * a.world.size + src) * a.block.packet_stride;
}

__device__ __forceinline__ void load_part(quad &q, const part &t, u64 user)
{
	if (t.left <= 0)
		return;
	if (t.whole)
		q.load(user + t.at, t.left);
	else
		q = load_odd(user + t.at, t.left);
}

__device__ __forceinline__ void store_part(const quad &q, const part &t, u64 user)
{
	if (t.left <= 0)
		return;
	if (t.whole)
		q.store(user + t.at, t.left);
	else
		store_odd(q, user + t.at, t.left);
}

__device__ __forceinline__ void put_part(const quad &q, i64 left, u64 wire, u32 flag)
{
#pragma unroll
	for (int k = 0; k < 4; k++)
		if (12 * k < left)
			q.put(wire, k, flag);
}

__device__ __forceinline__ bool get_part(quad &q, i64 left, u64 wire, u32 flag)
{
	bool all = true;
#pragma unroll
	for (int k = 0; k < 4; k++)
		if (12 * k < left)
			all &= q.get(wire, k, flag);
	return all;
}

// The verdict of the warp that compares the ranks' calls. The others of its block ask for it before they first write
// the user's memory.
constexpr u64 calls_agree = 1, calls_differ = 2; // 0: not known yet; they differ also where it was given up

struct packet_warp {
	const sw_reduce_args &a;
	u64 *verdict;
	u32 warp, warps, lane; // of the grid's
	u64 epoch = 0;
	bool agreed = false, loaded = false;
	quad first; // what the warp sends first

	__device__ __forceinline__ packet_warp(const sw_reduce_args &a, u64 *verdict, u32 warp, u32 warps, u32 lane)
	    : a(a), verdict(verdict), warp(warp), warps(warps), lane(lane)
	{
	}

	// False when the call cannot go on, or the warp has given up. The same for all lanes.
	__device__ __forceinline__ bool go_on(bool good)
	{
		if (__any_sync(~0u, !good) != 0)
			return false;
#pragma unroll 1
		while (!agreed) {
			u64 v = load_acquire_cta(verdict);
			if (__any_sync(~0u, v == calls_differ) != 0)
				return false;
			agreed = __any_sync(~0u, v == 0) == 0;
		}
		return true;
	}

	__device__ __forceinline__ u32 peer(u32 i) const
	{
		u32 p = a.world.rank + 1 + i;
		return p < a.world.size ? p : p - a.world.size;
	}

	// This rank's first sends: its input to everybody that reduces it, or its slice to all. The same bytes to
	// all peers are one task.
	struct task {
		u32 peer;
		u64 src;
		part x;
	};

	__device__ __forceinline__ bool same_to_all() const { return one_shot(a) || !reduces(a); }

	__device__ __forceinline__ task input(u32 t) const
	{
		u32 peers = a.world.size - 1, group = t, p = a.world.rank;
		if (!same_to_all()) {
			group = peers == 1 ? t : t / peers;
			p = peer(t - group * peers);
		}
		span s(a, p);
		u64 src = a.src + (reduces(a) ? static_cast<u64>(s.at) : 0);
		return {p, src, part(0, src, s.bytes, group, lane)};
	}

	// Loads what is sent first, before the number of the call is known. The task is known from the arguments alone.
	// Without a branch, before which the compiler would wait for the number.
	__device__ __forceinline__ void preload(const task &k, bool moves)
	{
		loaded = moves && k.x.whole && k.x.left > 0;
		first.load(k.src + k.x.at, loaded ? k.x.left : 0);
	}

	// The most groups of a slice.
	__device__ __forceinline__ u32 most_groups() const
	{
		u32 most = 0;
#pragma unroll 1
		for (u32 p = 0; p < a.world.size; p++)
			most = max(most, packet_groups(span(a, p).bytes));
		return most;
	}

	__device__ __forceinline__ u32 tasks() const
	{
		return same_to_all() ? packet_groups(span(a, a.world.rank).bytes) : most_groups() * (a.world.size - 1);
	}

	// Task k is the warp's first one.
	__device__ __forceinline__ void send(task k, u32 tasks)
	{
		u32 flag = packet::flag(epoch);
		u64 region = reduces(a) ? a.block.inputs : a.block.results;
#pragma unroll 1
		for (u32 t = warp; t < tasks;) {
			if (!loaded)
				load_part(first, k.x, k.src);
			loaded = false;
			if (same_to_all())
				hand_out(first, k.x, region, flag);
			else
				put_part(first, k.x.left,
				         packet_place(a, epoch, region, k.peer, a.world.rank) + k.x.wire, flag);
			t += warps;
			if (t < tasks)
				k = input(t);
		}
	}

	__device__ __forceinline__ void hand_out(const quad &q, const part &x, u64 region, u32 flag)
	{
#pragma unroll 1
		for (u32 i = 0; i < a.world.size - 1; i++)
			put_part(q, x.left, packet_place(a, epoch, region, peer(i), a.world.rank) + x.wire, flag);
	}

	// Reduces this rank's groups, `wide` ranks' packets in flight at a time, more than one of sums only, and hands
	// the results out in two shots. False when the call cannot go on.
	template <typename E, int wide> __device__ __forceinline__ bool reduce(u32 groups)
	{
		span s(a, a.world.rank);
		u32 flag = packet::flag(epoch), op = call_op(a);
		ending end(op, a.world.size);
		u64 src = a.src + static_cast<u64>(s.at), dst = a.dst + (gathers(a) ? static_cast<u64>(s.at) : 0);
		bool hands = gathers(a) && !one_shot(a);
		wait w;
		w.epoch = epoch;
#pragma unroll 1
		for (u32 g = warp; g < groups; g += warps) {
			part in(0, src, s.bytes, g, lane), out(0, dst, s.bytes, g, lane);
			typename E::value v[3][E::per];
			bool good = true;
#pragma unroll 1
			for (u32 first = 0; first < a.world.size && good; first += wide) {
				quad q[wide];
				u32 late = 0;
				auto there = [&] {
					bool all = true;
#pragma unroll
					for (int r = 0; r < wide; r++)
						if (first + r < a.world.size && first + r != a.world.rank) {
							bool one = get_part(q[r], in.left,
							                    packet_place(a, epoch, a.block.inputs,
							                                 a.world.rank, first + r) +
							                        in.wire,
							                    flag);
							late = one ? late : first + r;
							all &= one;
						}
					return all;
				};
#pragma unroll
				for (int r = 0; r < wide; r++)
					if (first + r == a.world.rank)
						load_part(q[r], in, src);
				good = await(w, a.world, late, epoch, false, there);
#pragma unroll
				for (int r = 0; r < wide; r++)
#pragma unroll
					for (int i = 0; i < 3; i++) {
						uint4 x = make_uint4(q[r].w[4 * i], q[r].w[4 * i + 1],
						                     q[r].w[4 * i + 2], q[r].w[4 * i + 3]);
						if (first == 0 && r == 0)
							E::widen(v[i], x);
						else if (first + r < a.world.size)
							combine<E, wide != 1>(v[i], x, op);
					}
			}
			if (!go_on(good))
				return false;
			quad q;
#pragma unroll
			for (int i = 0; i < 3; i++) {
				uint4 x = result<E>(v[i], end);
				q.w[4 * i] = x.x, q.w[4 * i + 1] = x.y, q.w[4 * i + 2] = x.z, q.w[4 * i + 3] = x.w;
			}
			if (hands)
				hand_out(q, out, a.block.results, flag);
			store_part(q, out, dst);
		}
		return true;
	}

	// This rank's slice of an all-gather, which stays where it is or goes to the output, when the calls agree.
	__device__ __forceinline__ void keep()
	{
		span s(a, a.world.rank);
		u64 dst = a.dst + static_cast<u64>(s.at);
		u32 groups = dst == a.src ? 0 : packet_groups(s.bytes);
#pragma unroll 1
		for (u32 g = warp; g < groups; g += warps) {
			part in(0, a.src, s.bytes, g, lane), out(0, dst, s.bytes, g, lane);
			quad q;
			load_part(q, in, a.src);
			if (!go_on(true))
				return;
			store_part(q, out, dst);
		}
	}

	// The peers' slices of the result.
	__device__ __forceinline__ bool take_results(u32 most)
	{
		u32 flag = packet::flag(epoch), peers = a.world.size - 1;
		wait w;
		w.epoch = epoch;
#pragma unroll 1
		for (u32 t = warp; t < most * peers; t += warps) {
			u32 group = peers == 1 ? t : t / peers, p = peer(t - group * peers);
			span s(a, p);
			u64 dst = a.dst + static_cast<u64>(s.at);
			part x(packet_place(a, epoch, a.block.results, a.world.rank, p), dst, s.bytes, group, lane);
			quad q;
			auto there = [&] { return get_part(q, x.left, x.wire, flag); };
			if (!go_on(await(w, a.world, p, epoch, false, there)))
				return false;
			store_part(q, x, dst);
		}
		return true;
	}
};

template <u32 type> __device__ __noinline__ bool reduce_packets(packet_warp p, u32 groups)
{
	return p.reduce<element<type>, 1>(groups);
}

// Sums of the types of gradients have code of their own, for 2 and for more ranks. It is in the kernel itself: a
// function would read the arguments through memory, and the compiler would keep there what the function is given.
template <u32 type> __device__ __forceinline__ bool reduce_fast(packet_warp &p, u32 groups)
{
	if (call_op(p.a) > SW_OP_AVG)
		return reduce_packets<type>(p, groups);
	return p.a.world.size == 2 ? p.reduce<element<type>, 2>(groups) : p.reduce<element<type>, 4>(groups);
}

__device__ __forceinline__ bool reduce_any(packet_warp &p, u32 groups)
{
	switch (call_type(p.a)) {
	case SW_TYPE_FLOAT16:
		return reduce_fast<SW_TYPE_FLOAT16>(p, groups);
	case SW_TYPE_BFLOAT16:
		return reduce_fast<SW_TYPE_BFLOAT16>(p, groups);
	case SW_TYPE_FLOAT32:
		return reduce_fast<SW_TYPE_FLOAT32>(p, groups);
	case SW_TYPE_UINT8:
		return reduce_packets<SW_TYPE_UINT8>(p, groups);
	case SW_TYPE_INT32:
		return reduce_packets<SW_TYPE_INT32>(p, groups);
	case SW_TYPE_INT64:
		return reduce_packets<SW_TYPE_INT64>(p, groups);
	case SW_TYPE_FLOAT64:
		return reduce_packets<SW_TYPE_FLOAT64>(p, groups);
	case SW_TYPE_FLOAT8E4M3:
		return reduce_packets<SW_TYPE_FLOAT8E4M3>(p, groups);
	default:
		return reduce_packets<SW_TYPE_FLOAT8E5M2>(p, groups);
	}
}

} // namespace sw
