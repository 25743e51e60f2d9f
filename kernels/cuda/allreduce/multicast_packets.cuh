// Small calls by multicast: one store of a packet reaches all ranks, and each polls its own memory. A rank's slice of
// an all-gather goes out once, and so does its whole input of an all-reduce, which each rank combines for itself, in
// the order of ranks (R2). Nothing is added by switches, so every operator and type goes this way.
//
// A packet is 8 bytes, 4 of data and the call's flag: what PTX lets arrive as a whole by multicast, whose vectors may
// be torn. The packets of 16 bytes (packets.cuh) have data where these have a flag, so the two never share places: on a
// communicator with multicast all packets that gather are these.
//
// Writes this rank's places in all ranks' segments, its own among them, which nobody reads, and its own output; reads
// its input and the places in its own segment.
#pragma once

#include "multicast.cuh"
#include "packets.cuh"

namespace sw {

constexpr u32 multicast_movers = multicast_warps - 2; // of a block; one warp meets the peers, one counts the call

// A group of packets is 16 bytes of each lane of a warp.
constexpr u32 multicast_group_payload = 512, multicast_group_bytes = 1024;

__device__ __forceinline__ u32 multicast_groups(i64 bytes)
{
	return static_cast<u32>((bytes + multicast_group_payload - 1) / multicast_group_payload);
}

// A lane's part of a group: up to 16 bytes of a message, and its packets, two at a time.
struct multicast_part {
	i64 at, left;
	u64 wire; // from the place of the message on

	__device__ __forceinline__ multicast_part(i64 bytes, u32 group, u32 lane)
	    : at(static_cast<i64>(group) * multicast_group_payload + 16 * lane), left(bytes - at),
	      wire(static_cast<u64>(group) * multicast_group_bytes + 16 * lane)
	{
	}

	__device__ __forceinline__ uint4 load(u64 user) const
	{
		if (left <= 0)
			return make_uint4(0, 0, 0, 0);
		return load_piece(user + static_cast<u64>(at), static_cast<u32>(min(static_cast<i64>(16), left)));
	}
	__device__ __forceinline__ void store(u64 user, uint4 v) const
	{
		if (left > 0)
			store_piece(user + static_cast<u64>(at), static_cast<u32>(min(static_cast<i64>(16), left)), v);
	}

	// To all ranks.
	__device__ __forceinline__ void put(u64 place, u32 flag, uint4 v) const
	{
		u64 to = place + wire, mark = static_cast<u64>(flag) << 32;
		if (left > 0) {
			multimem_store_packet(to, mark | v.x);
			multimem_store_packet(to + 8, mark | v.y);
		}
		if (left > 8) {
			multimem_store_packet(to + 512, mark | v.z);
			multimem_store_packet(to + 520, mark | v.w);
		}
	}

	// True when all are there.
	__device__ __forceinline__ bool get(u64 place, u32 flag, uint4 &v) const
	{
		bool all = true;
		auto two = [&](u64 from, u32 &x, u32 &y) {
			pair64 p = load16_relaxed_sys(from);
			x = static_cast<u32>(p.a), y = static_cast<u32>(p.b);
			all &= p.a >> 32 == flag && p.b >> 32 == flag;
		};
		if (left > 0)
			two(place + wire, v.x, v.y);
		if (left > 8)
			two(place + wire + 512, v.z, v.w);
		return all;
	}
};

struct multicast_packets : packet_warp {
	using packet_warp::packet_warp;

	// The place of a rank's packets, from the beginning of any segment on.
	__device__ __forceinline__ u64 place(u32 src) const
	{
		return a.block.results + (packet::parity(epoch) * a.world.size + src) * a.block.packet_stride;
	}
	__device__ __forceinline__ u64 here(u32 src) const { return own_segment(a.world) + place(src); }

	// This rank's message.
	__device__ __forceinline__ void send(u64 multicast)
	{
		i64 bytes = span(a, a.world.rank).bytes;
		u32 groups = multicast_groups(bytes);
#pragma unroll 1
		for (u32 g = warp; g < groups; g += warps) {
			multicast_part x(bytes, g, lane);
			x.put(multicast + place(a.world.rank), packet::flag(epoch), x.load(a.src));
		}
	}

	// Combines all ranks' messages, four at a time.
	template <typename E> __device__ __forceinline__ void combine_all()
	{
		constexpr u32 wide = 4;
		i64 bytes = span(a, a.world.rank).bytes;
		u32 groups = multicast_groups(bytes), flag = packet::flag(epoch), op = call_op(a);
		ending end(op, a.world.size);
		wait w;
		w.epoch = epoch;
#pragma unroll 1
		for (u32 g = warp; g < groups; g += warps) {
			multicast_part x(bytes, g, lane);
			typename E::value v[E::per];
			bool good = true;
#pragma unroll 1
			for (u32 first = 0; first < a.world.size && good; first += wide) {
				uint4 q[wide] = {};
				u32 late = 0;
				auto there = [&] {
					bool all = true;
#pragma unroll
					for (u32 r = 0; r < wide; r++)
						if (first + r < a.world.size && first + r != a.world.rank) {
							bool one = x.get(here(first + r), flag, q[r]);
							late = one ? late : first + r;
							all &= one;
						}
					return all;
				};
#pragma unroll
				for (u32 r = 0; r < wide; r++)
					if (first + r == a.world.rank)
						q[r] = x.load(a.src);
				good = await(w, a.world, late, epoch, false, there);
#pragma unroll
				for (u32 r = 0; r < wide; r++) {
					if (first == 0 && r == 0)
						E::widen(v, q[r]);
					else if (first + r < a.world.size)
						combine<E, false>(v, q[r], op);
				}
			}
			if (!go_on(good))
				return;
			x.store(a.dst, result<E>(v, end));
		}
	}

	__device__ __forceinline__ void reduce()
	{
		switch (call_type(a)) {
		case SW_TYPE_FLOAT16:
			return combine_all<element<SW_TYPE_FLOAT16>>();
		case SW_TYPE_BFLOAT16:
			return combine_all<element<SW_TYPE_BFLOAT16>>();
		case SW_TYPE_FLOAT32:
			return combine_all<element<SW_TYPE_FLOAT32>>();
		case SW_TYPE_UINT8:
			return combine_all<element<SW_TYPE_UINT8>>();
		case SW_TYPE_INT32:
			return combine_all<element<SW_TYPE_INT32>>();
		case SW_TYPE_INT64:
			return combine_all<element<SW_TYPE_INT64>>();
		case SW_TYPE_FLOAT64:
			return combine_all<element<SW_TYPE_FLOAT64>>();
		case SW_TYPE_FLOAT8E4M3:
			return combine_all<element<SW_TYPE_FLOAT8E4M3>>();
		default:
			return combine_all<element<SW_TYPE_FLOAT8E5M2>>();
		}
	}

	// The peers' slices. False when the call cannot go on.
	__device__ __forceinline__ bool take()
	{
		u32 peers = a.world.size - 1, most = 0;
#pragma unroll 1
		for (u32 p = 0; p < a.world.size; p++)
			most = max(most, multicast_groups(span(a, p).bytes));
		wait w;
		w.epoch = epoch;
#pragma unroll 1
		for (u32 t = warp; t < most * peers; t += warps) {
			u32 group = t / peers, p = peer(t - group * peers);
			span s(a, p);
			multicast_part x(s.bytes, group, lane);
			uint4 v = make_uint4(0, 0, 0, 0);
			auto there = [&] { return x.get(here(p), packet::flag(epoch), v); };
			if (!go_on(await(w, a.world, p, epoch, false, there)))
				return false;
			x.store(a.dst + static_cast<u64>(s.at), v);
		}
		return true;
	}
};

// The kernel.
__device__ __forceinline__ void run_multicast_packets(const sw_multicast_args &m)
{
	const sw_reduce_args &a = m.reduce;
	SW_SHARED(u64, verdict);
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	call now = call::open(a.world);
	u64 epoch = now.epoch();
	if (threadIdx.x == 0)
		verdict = 0;
	if (!now.begins())
		return;
	release_stream();

	if (warp < multicast_movers) {
		// neighbouring warps of the grid lie in different blocks, so that few groups use many multiprocessors
		multicast_packets p(a, &verdict, warp * gridDim.x + blockIdx.x, multicast_movers * gridDim.x, lane);
		p.epoch = epoch;
		p.send(m.multicast);
		if (reduces(a))
			p.reduce();
		else if (p.take())
			p.keep();
	} else if (warp ==
	           multicast_movers) { // tells the movers whether the ranks' calls agree, before they write the output
		if (blockIdx.x == 0)
			enter(a, epoch, lane);
		bool good = meet(a, epoch, lane, [](u32, const entry &) {});
		if (lane == 0)
			store_relaxed_cta(&verdict, good ? calls_agree : calls_differ);
		for (u32 q = lane; blockIdx.x == 0 && q < a.world.size; q += 32) {
			u32 used = multicast_groups(span(a, q).bytes) * multicast_group_bytes;
			wipe_one(a, epoch, a.block.inputs, q, 0);
			wipe_one(a, epoch, a.block.results, q,
			         (used + SW_PACKET_GROUP_BYTES - 1) / SW_PACKET_GROUP_BYTES);
		}
	} else if (lane == 0) { // takes long, and nobody waits for it
		now.advance();
	}
}

} // namespace sw
