// Messages as packets: words of 16 bytes, 12 of data and a flag that tells the call, so that data and signal arrive as
// one. A small message needs no credit, no fence and no signal of its own.
//
// All warps of a kernel may send and receive packets. Writes this rank's packet places in the peers' segments (double
// buffered by the call's parity) and, after a disagreement, its credit line or its complaint there; reads and wipes the
// places in its own segment, and the peers' complaints. Places lie behind a header, whose first packet tells the
// message's length, and whether its sender has a complaint of the call before.
#pragma once

#include "../lines.cuh"
#include "../packet.cuh"
#include "steps.cuh"

namespace sw {

__device__ __forceinline__ u64 packet_place(const sw_exchange_args &a, u64 epoch, u32 dst, u32 src)
{
	return segment(a.world, dst) + a.block.packets +
	       (packet::parity(epoch) * a.world.size + src) * a.block.packet_stride;
}

// The length, in the header and as what a credit expects, where a rank refuses the splits that it finds in device
// memory. The rest of the header then says which: refusal.cuh.
constexpr u64 refused = ~0ull;

// A refused part of a rank's splits, in the header at place: two vectors behind the first packet.
struct refused_part {
	u64 bytes, offset, limit, whose; // the part's peer, and from bit 32 on whether it is sent

	__device__ __forceinline__ void store(u64 place) const
	{
		store16_relaxed_sys(place + 16, bytes, offset);
		store16_relaxed_sys(place + 32, limit, whose);
	}

	__device__ __forceinline__ void load(u64 place)
	{
		pair64 v = load16_relaxed_sys(place + 16), w = load16_relaxed_sys(place + 32);
		bytes = v.a, offset = v.b, limit = w.a, whose = w.b;
	}

	// Records that rank has refused it.
	__device__ __forceinline__ void record(const sw_world &w, u32 rank, u64 epoch) const
	{
		give_up(w, SW_FAULT_SPLITS, rank, epoch, whose >> 32 != 0, bytes, offset, limit,
		        static_cast<u32>(whose));
	}
};

// The flags in the third word of a header: copy engines write the large messages; and the rank has complained in the
// call before of somebody's message.
constexpr u32 by_copies = 1, has_complained = 2;

// A line of credits: the receiver tells its sender where a large message goes, and how long it expects it.
struct credit {
	pair64 place, expected; // each with a number

	static __device__ __forceinline__ u64 line_of(const sw_exchange_args &a, u32 src, u32 dst)
	{
		return segment(a.world, src) + a.block.credits + dst * SW_LINE_BYTES;
	}

	// Tells the sender.
	static __device__ __forceinline__ void signal(const sw_exchange_args &a, u32 src, u64 epoch, u64 place,
	                                              u64 expected)
	{
		u64 at = line_of(a, src, a.world.rank);
		line{at}.signal(seq(epoch, 0), place);
		line{at + 16}.signal(seq(epoch, 0), expected);
	}

	// Waits until the receiver has. False when the wait was given up.
	static __device__ __forceinline__ bool await(const sw_exchange_args &a, u32 dst, u64 epoch)
	{
		u64 at = line_of(a, a.world.rank, dst);
		wait w;
		return sw::await(w, a.world, dst, epoch, true, [&] {
			return load_acquire_sys(at) >= seq(epoch, 0) && load_acquire_sys(at + 16) >= seq(epoch, 0);
		});
	}

	// The line as the receiver has written it by now.
	static __device__ __forceinline__ credit look(const sw_exchange_args &a, u32 dst)
	{
		u64 at = line_of(a, a.world.rank, dst);
		return {load16_relaxed_sys(at), load16_relaxed_sys(at + 16)};
	}

	// Whether both words are those of the call.
	__device__ __forceinline__ bool is_of(u64 epoch) const
	{
		return place.a == seq(epoch, 0) && expected.a == seq(epoch, 0);
	}
	// Whether the receiver has given the message of the call up, and gone on.
	__device__ __forceinline__ bool past(u64 epoch) const { return place.a > seq(epoch, 0); }
};

// Where rank src finds what dst says of a message of call epoch that had another length than dst expected. The sender
// of a packet needs no credit and may be through before dst looks; dst's header in the next call tells it to look here.
__device__ __forceinline__ u64 complaint(const sw_exchange_args &a, u64 epoch, u32 src, u32 dst)
{
	return segment(a.world, src) + a.block.complaints +
	       (packet::parity(epoch) * a.world.size + dst) * SW_LINE_BYTES;
}

// The last calls, even and odd, in which this rank has complained. Threads of this call may write one of them
// meanwhile, the headers ask for the other.
__device__ __forceinline__ u64 complained_at(const sw_exchange_args &a)
{
	return own_segment(a.world) + a.world.control + offsetof(sw_control, complained);
}
__device__ __forceinline__ pair64 last_complaints(const sw_exchange_args &a)
{
	return load16_relaxed_sys(complained_at(a) + zero_of_lane());
}

// The word about the call before in the header of call epoch.
__device__ __forceinline__ u32 complains(pair64 last, u64 epoch)
{
	u64 call = packet::parity(epoch) != 0 ? last.a : last.b;
	return call != 0 && call == epoch - 1 ? has_complained : 0;
}

// Records that a peer and this rank have different sizes in mind, or that the peer has refused its splits, which it has
// said in the header of its message before it told anything else.
__device__ __noinline__ void disagree(const sw_exchange_args &a, u32 peer, u64 epoch, bool sending, u64 sent,
                                      u64 expected)
{
	if ((sending ? expected : sent) != refused) {
		give_up(a.world, SW_FAULT_MISMATCH, peer, epoch, sending, sent, expected);
		if (!sending) {
			u64 line = complaint(a, epoch, peer, a.world.rank);
			store16_relaxed_sys(line + 16, epoch, expected);
			fence_acq_rel_sys();
			store16_relaxed_sys(line, epoch, sent);
			store_relaxed_sys(complained_at(a) + 8 * packet::parity(epoch), epoch); // for the next headers
		}
		return;
	}
	fence_acq_rel_sys();
	refused_part x;
	x.load(packet_place(a, epoch, a.world.rank, peer));
	x.record(a.world, peer, epoch);
}

// Records what a peer in a later call has said of this rank's message of call epoch: of a large one while its sender is
// in that call, of a packet in the next.
__device__ __noinline__ void hear_why(const sw_exchange_args &a, u32 peer, u64 epoch, bool large)
{
	u64 line = complaint(a, epoch, a.world.rank, peer);
	fence_acq_rel_sys();
	pair64 sent = load16_relaxed_sys(line), expected = load16_relaxed_sys(line + 16);
	if (sent.a == epoch && (sent.b > static_cast<u64>(a.packet_bytes)) == large)
		give_up(a.world, SW_FAULT_MISMATCH, peer, epoch, true, sent.b, expected.b);
}

// Reads the word about the call before in a peer's header of this call.
__device__ __forceinline__ void hear(const sw_exchange_args &a, const packet &header, u32 peer, u64 epoch)
{
	if ((header.word(2) & has_complained) != 0)
		hear_why(a, peer, epoch - 1, false);
}

// The same of the senders of large messages, of whose headers nothing else needs to wait.
template <typename Steps>
__device__ __noinline__ void hear_of_large(const sw_exchange_args &a, Steps r, u64 epoch, u32 first, u32 step)
{
#pragma unroll 1
	for (u32 i = first; i < a.world.size - 1; i += step) {
		u32 p = r[i].from;
		if (r[i].recv_bytes <= a.packet_bytes)
			continue;
		packet header;
		wait w;
#pragma unroll 1
		while (!(header = packet::get(packet_place(a, epoch, a.world.rank, p))).has(packet::flag(epoch)))
			if (!w.slow(a.world)) {
				give_up(a.world, w.kind, p, epoch, false);
				return;
			}
		hear(a, header, p, epoch);
	}
}

__device__ __noinline__ void send_odd(u64 wire, u64 src, i64 left, u32 flag)
{
	quad q;
	q.load_odd(src, left);
#pragma unroll
	for (int k = 0; k < 4; k++)
		if (12 * k < left)
			q.put(wire, k, flag);
}

// True when the message's header is there and tells another length: no use in waiting for the rest.
__device__ __noinline__ bool other_length(u64 place, i64 bytes, u32 flag)
{
	packet p = packet::get(place);
	return p.has(flag) && p.low() != static_cast<u64>(bytes);
}

// The next two return false when the wait was given up.
__device__ __noinline__ bool recv_odd(const sw_exchange_args &a, u64 place, u64 wire, u64 dst, i64 left, i64 bytes,
                                      u32 flag, wait &w)
{
	quad q;
#pragma unroll 1
	for (;;) {
		bool all = true;
#pragma unroll
		for (int k = 0; k < 4; k++)
			if (12 * k < left)
				all &= q.get(wire, k, flag);
		if (all)
			break;
		if (!w.slow(a.world) || (w.looked() && other_length(place, bytes, flag)))
			return false;
	}
	q.store_odd(dst, left);
	return true;
}

__device__ __forceinline__ bool recv_group(const sw_exchange_args &a, u64 place, u64 dst, i64 bytes, u32 group,
                                           u32 flag, u32 lane, wait &w)
{
	part t(place + SW_PACKET_HEADER_BYTES, dst, bytes, group, lane);
	if (t.left <= 0)
		return true;
	if (!t.whole)
		return recv_odd(a, place, t.wire, dst + t.at, t.left, bytes, flag, w);
	quad q;
#pragma unroll 1
	for (;;) {
		bool all = true;
#pragma unroll
		for (int k = 0; k < 4; k++)
			if (12 * k < t.left)
				all &= q.get(t.wire, k, flag);
		if (all)
			break;
		if (!w.slow(a.world) || (w.looked() && other_length(place, bytes, flag)))
			return false;
	}
	q.store(dst + t.at, t.left);
	return true;
}

// The sender of a packet as its receiver knows it: waits for the header and compares the length. One thread.
__device__ __forceinline__ void recv_header(const sw_exchange_args &a, u64 place, i64 bytes, u32 flag, u32 peer,
                                            u64 epoch)
{
	packet header;
	wait w;
	if (!await(w, a.world, peer, epoch, false, [&] { return (header = packet::get(place)).has(flag); }))
		return;
	hear(a, header, peer, epoch);
	if (header.low() == static_cast<u64>(bytes))
		return;
	disagree(a, peer, epoch, false, header.low(), static_cast<u64>(bytes));
	// The sender of a large message waits for a credit: it tells what is wrong.
	if (header.low() > static_cast<u64>(a.packet_bytes) && header.low() != refused)
		credit::signal(a, peer, epoch, SW_NOWHERE, static_cast<u64>(bytes));
}

// Wipes one place of a peer that the call did not use.
__device__ __forceinline__ void wipe_one(const sw_exchange_args &a, u64 place, i64 bytes, u64 epoch)
{
	u32 groups = static_cast<u32>((a.block.packet_stride - SW_PACKET_HEADER_BYTES) / SW_PACKET_GROUP_BYTES);
	if (groups == 0)
		return;
	u32 at = static_cast<u32>(epoch / 2) % (groups * (SW_PACKET_GROUP_BYTES / 16));
	if (at / (SW_PACKET_GROUP_BYTES / 16) >= packet_groups(bytes))
		packet::wipe(place + SW_PACKET_HEADER_BYTES + 16 * static_cast<u64>(at));
}

// The warps of a grid share the groups of all packets: task t is group t/peers for the peer of step t%peers, so that
// neighbouring warps serve different peers. The header goes out for every message, also one that will travel with
// credit, so that a receiver with another size in mind learns of it.
template <typename Steps> struct packets {
	const sw_exchange_args &a;
	Steps r;
	u32 warp, warps, lane;
	quad first; // what the warp sends first
	bool loaded;

	__device__ __forceinline__ packets(const sw_exchange_args &a, Steps r, u32 warp, u32 warps, u32 lane)
	    : a(a), r(r), warp(warp), warps(warps), lane(lane), loaded(false)
	{
	}

	// The most groups of a packet of this rank.
	__device__ __forceinline__ u32 most(bool sending)
	{
		u32 groups = 0;
#pragma unroll 1
		for (u32 i = lane; i < a.world.size - 1; i += 32) {
			i64 n = sending ? r[i].send_bytes : r[i].recv_bytes;
			if (n <= a.packet_bytes)
				groups = max(groups, packet_groups(n));
		}
		return __reduce_max_sync(~0u, groups);
	}

	// Loads what the warp sends first, before the number of the call is known. place is where that is, known from
	// the arguments alone.
	struct ahead {
		u64 src;
		i64 left;
		bool whole;
	};

	__device__ __forceinline__ ahead look_ahead()
	{
		share s(a, warp);
		sw_step x = r[s.rest];
		part t(0, a.src + x.send_offset, x.send_bytes, s.quotient, lane);
		return {a.src + x.send_offset + t.at, t.left, x.send_bytes <= a.packet_bytes && t.left > 0 && t.whole};
	}

	__device__ __forceinline__ void preload(const ahead &x)
	{
		loaded = x.whole;
		if (loaded)
			first.load(x.src, x.left);
	}

	// The headers of the steps first, first+step, ... by_copies says that copy engines write large messages, also
	// to a rank that has refused its splits.
	__device__ __forceinline__ void announce(u64 epoch, pair64 last, u32 first, u32 step, u32 also = 0)
	{
		u32 flag = packet::flag(epoch);
#pragma unroll 1
		for (u32 i = first; i < a.world.size - 1; i += step)
			packet::put(packet_place(a, epoch, r[i].to, a.world.rank), flag,
			            static_cast<u64>(r[i].send_bytes), also | complains(last, epoch));
	}

	__device__ __forceinline__ void send(u64 epoch)
	{
		u32 flag = packet::flag(epoch), peers = a.world.size - 1;
		u32 tasks = peers * most(true);
#pragma unroll 1
		for (u32 t = warp; t < tasks; t += warps) {
			share d(a, t);
			sw_step m = r[d.rest];
			if (m.send_bytes > a.packet_bytes)
				continue;
			u64 src = a.src + m.send_offset;
			part x(packet_place(a, epoch, m.to, a.world.rank) + SW_PACKET_HEADER_BYTES, src, m.send_bytes,
			       d.quotient, lane);
			if (x.left <= 0)
				continue;
			if (!x.whole) {
				send_odd(x.wire, src + x.at, x.left, flag);
				continue;
			}
			if (!loaded)
				first.load(src + x.at, x.left);
			loaded = false;
#pragma unroll
			for (int k = 0; k < 4; k++)
				if (12 * k < x.left)
					first.put(x.wire, k, flag);
		}
	}

	__device__ __forceinline__ void receive(u64 epoch)
	{
		u32 flag = packet::flag(epoch), peers = a.world.size - 1;
		u32 tasks = peers * most(false);
		wait w;
#pragma unroll 1
		for (u32 t = warp; t < tasks; t += warps) {
			share d(a, t);
			sw_step m = r[d.rest];
			if (m.recv_bytes <= a.packet_bytes &&
			    !recv_group(a, packet_place(a, epoch, a.world.rank, m.from), a.dst + m.recv_offset,
			                m.recv_bytes, d.quotient, flag, lane, w)) {
				give_up(a.world, w.kind, m.from, epoch, false);
				break;
			}
		}
		// headers last and by the warps with the least to do
#pragma unroll 1
		for (u32 i = warps - 1 - warp; i < peers; i += warps) {
			sw_step m = r[i];
			if (lane != 0 || m.recv_bytes > a.packet_bytes)
				continue;
			u64 place = packet_place(a, epoch, a.world.rank, m.from);
			recv_header(a, place, m.recv_bytes, flag, m.from, epoch);
			wipe_one(a, place, m.recv_bytes, epoch);
		}
	}
};

} // namespace sw
