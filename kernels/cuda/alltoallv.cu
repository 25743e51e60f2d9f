// The variable-size all-to-all. Two kernels speak one protocol: `alltoallv_packet` for calls in which every message of
// this rank is a packet, `alltoallv` for all others. Which one a peer runs does not matter.
#include "device.cuh"

namespace sw {

// Where a kernel finds its steps: in its arguments, or in shared memory, where they may also come from a table in device
// memory.
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

	// Every thread of the block calls it and meets the others at a barrier before the first use. True when splits from device
	// memory reach past the buffers.
	static __device__ __forceinline__ bool fill(store &s, const sw_exchange_args &a)
	{
		const i64 *table = reinterpret_cast<const i64 *>(a.splits);
		if (table != nullptr)
			await_stream(); // somebody may be writing it
		bool outside = false;
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.size; i += blockDim.x) {
			if (i == a.size - 1) {
				s.own[0] = table == nullptr ? a.own_bytes : table[a.rank];
				s.own[1] = table == nullptr ? a.own_src : table[a.size + a.rank];
				s.own[2] = table == nullptr ? a.own_dst : table[3 * a.size + a.rank];
				outside |= table != nullptr && (past(s.own[0], s.own[1], a.src_bytes) || past(s.own[0], s.own[2], a.dst_bytes));
				continue;
			}
			sw_step x = a.steps[i];
			if (table != nullptr) {
				x.send_bytes = table[x.to];
				x.send_offset = table[a.size + x.to];
				x.recv_bytes = table[2 * a.size + x.from];
				x.recv_offset = table[3 * a.size + x.from];
				outside |= past(x.send_bytes, x.send_offset, a.src_bytes) || past(x.recv_bytes, x.recv_offset, a.dst_bytes);
			}
			s.steps[i] = x;
		}
		return outside;
	}

	static __device__ __forceinline__ bool past(i64 bytes, i64 offset, i64 limit) { return bytes < 0 || offset < 0 || bytes > limit || offset > limit - bytes; }

	// Records one of the splits that reach past.
	static __device__ __noinline__ void complain(const store &s, const sw_exchange_args &a, u64 epoch)
	{
		auto say = [&](u32 peer, bool sending, i64 bytes, i64 offset, i64 limit) {
			if (past(bytes, offset, limit))
				give_up(a, SW_FAULT_SPLITS, peer, epoch, sending, static_cast<u64>(bytes), static_cast<u64>(offset), static_cast<u64>(limit));
		};
#pragma unroll 1
		for (u32 i = threadIdx.x; i < a.size; i += blockDim.x) {
			if (i == a.size - 1) {
				say(a.rank, true, s.own[0], s.own[1], a.src_bytes);
				say(a.rank, false, s.own[0], s.own[2], a.dst_bytes);
				continue;
			}
			const sw_step &x = s.steps[i];
			say(x.to, true, x.send_bytes, x.send_offset, a.src_bytes);
			say(x.from, false, x.recv_bytes, x.recv_offset, a.dst_bytes);
		}
	}

	__device__ __forceinline__ const sw_step &operator[](u32 i) const { return s.steps[i]; }
	__device__ __forceinline__ i64 own_bytes() const { return s.own[0]; }
	__device__ __forceinline__ i64 own_src() const { return s.own[1]; }
	__device__ __forceinline__ i64 own_dst() const { return s.own[2]; }
};

// t/(size-1) and the rest, for t below 2^26.
struct share {
	u32 quotient, rest;

	__device__ __forceinline__ share(const sw_exchange_args &a, u32 t)
	{
		quotient = a.inverse == 0 ? t : __umulhi(t, a.inverse);
		rest = t - quotient * (a.size - 1);
	}
};

// The sum of what this lane and those below it bring.
__device__ __forceinline__ u32 running_sum(u32 mine, u32 lane)
{
#pragma unroll
	for (u32 by = 1; by < 32; by *= 2) {
		u32 below = __shfl_sync(~0u, mine, (lane - by) & 31);
		mine += lane >= by ? below : 0;
	}
	return mine;
}

// ---- packets -------------------------------------------------------------------------------------------------------

// Never 0, which memory begins with. Equal flags are 2^31 calls apart or more; wipe_one sees to it that none lies so long.
__device__ __forceinline__ u32 packet_flag(u64 epoch)
{
	u32 low = static_cast<u32>(epoch);
	return low != 0 ? low : 0x80000000u;
}

__device__ __forceinline__ u64 packet_place(const sw_exchange_args &a, u64 epoch, u32 dst, u32 src)
{
	return segment(a, dst) + a.packets + ((epoch & 1) * a.size + src) * a.packet_stride;
}

__device__ __forceinline__ u32 packet_groups(i64 bytes) { return static_cast<u32>((bytes + SW_PACKET_GROUP_PAYLOAD - 1) / SW_PACKET_GROUP_PAYLOAD); }

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
				store_vector(p + 16 * i, make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
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

	// Packet k as its two words.
	__device__ __forceinline__ void put(u64 to, int k, u32 flag) const
	{
		store16(to + 512 * k, static_cast<u64>(w[3 * k + 1]) << 32 | w[3 * k], static_cast<u64>(flag) << 32 | w[3 * k + 2]);
	}

	__device__ __forceinline__ bool get(u64 from, int k, u32 flag)
	{
		pair64 v = load16(from + 512 * k);
		w[3 * k] = static_cast<u32>(v.a);
		w[3 * k + 1] = static_cast<u32>(v.a >> 32);
		w[3 * k + 2] = static_cast<u32>(v.b);
		return static_cast<u32>(v.b >> 32) == flag;
	}
};

// A thread's part of one group: where it is in the message and on the wire.
struct part {
	i64 at, left;
	u64 wire;
	bool whole; // the user's side can be moved in vectors

	__device__ __forceinline__ part(u64 place, u64 user, i64 bytes, u32 group, u32 lane)
	{
		at = static_cast<i64>(group) * SW_PACKET_GROUP_PAYLOAD + 48 * lane;
		left = bytes - at;
		wire = place + SW_PACKET_HEADER_BYTES + static_cast<u64>(group) * SW_PACKET_GROUP_BYTES + 16 * lane;
		whole = ((user + at) & 15) == 0 && (left >= 48 || (left & 15) == 0);
	}
};

static __device__ __noinline__ void send_odd(u64 wire, u64 src, i64 left, u32 flag)
{
	quad q;
	q.load_odd(src, left);
#pragma unroll
	for (int k = 0; k < 4; k++)
		if (12 * k < left)
			q.put(wire, k, flag);
}

// True when the message's header is there and tells another length: no use in waiting for the rest.
static __device__ __noinline__ bool other_length(u64 place, i64 bytes, u32 flag)
{
	pair64 v = load16(place);
	return static_cast<u32>(v.b >> 32) == flag && v.a != static_cast<u64>(bytes);
}

// The next two return false when the wait was given up.
static __device__ __noinline__ bool recv_odd(const sw_exchange_args &a, u64 place, u64 wire, u64 dst, i64 left, i64 bytes, u32 flag, wait &w)
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
		if (!w.slow(a) || ((w.polls & 255) == 0 && other_length(place, bytes, flag)))
			return false;
	}
	q.store_odd(dst, left);
	return true;
}

__device__ __forceinline__ bool recv_group(const sw_exchange_args &a, u64 place, u64 dst, i64 bytes, u32 group, u32 flag, u32 lane, wait &w)
{
	part t(place, dst, bytes, group, lane);
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
		if (!w.slow(a) || ((w.polls & 255) == 0 && other_length(place, bytes, flag)))
			return false;
	}
	q.store(dst + t.at, t.left);
	return true;
}

// The sender of a packet as its receiver knows it: waits for the header and compares the length. One thread.
__device__ __forceinline__ bool recv_header(const sw_exchange_args &a, u64 place, i64 bytes, u32 flag, u32 peer, u64 epoch, wait &w)
{
#pragma unroll 1
	for (;;) {
		pair64 v = load16(place);
		if (static_cast<u32>(v.b >> 32) == flag) {
			if (v.a == static_cast<u64>(bytes))
				return true;
			give_up(a, SW_FAULT_MISMATCH, peer, epoch, false, v.a, static_cast<u64>(bytes));
			if (v.a > static_cast<u64>(a.packet_bytes)) { // its sender waits for a credit: tell it what is wrong
				u64 credit = segment(a, peer) + a.credits + a.rank * SW_LINE_BYTES;
				store16(credit, seq(epoch, 0), SW_NOWHERE);
				store16(credit + 16, seq(epoch, 0), static_cast<u64>(bytes));
			}
			return false;
		}
		if (!w.slow(a)) {
			give_up(a, w.kind, peer, epoch, false);
			return false;
		}
	}
}

// A packet from 2^31 calls ago could be taken for a new one, if its place had not been written since. Each call wipes one
// place of every peer that the call did not use, so none stays that long.
__device__ __forceinline__ void wipe_one(const sw_exchange_args &a, u64 place, i64 bytes, u64 epoch)
{
	u32 groups = static_cast<u32>((a.packet_stride - SW_PACKET_HEADER_BYTES) / SW_PACKET_GROUP_BYTES);
	if (groups == 0)
		return;
	u32 at = static_cast<u32>(epoch / 2) % (groups * (SW_PACKET_GROUP_BYTES / 16));
	if (at / (SW_PACKET_GROUP_BYTES / 16) >= packet_groups(bytes))
		store16(place + SW_PACKET_HEADER_BYTES + 16 * static_cast<u64>(at), 0, 0);
}

// The warps of a grid share the groups of all packets: task t is group t/peers for the peer of step t%peers, so that
// neighbouring warps serve different peers. The header goes out for every message, also one that will travel with credit, so
// that a receiver with another size in mind learns of it.
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
		for (u32 i = lane; i < a.size - 1; i += 32) {
			i64 n = sending ? r[i].send_bytes : r[i].recv_bytes;
			if (n <= a.packet_bytes)
				groups = max(groups, packet_groups(n));
		}
		return __reduce_max_sync(~0u, groups);
	}

	// Loads what the warp sends first, before the number of the call is known. place is where that is, known from the
	// arguments alone.
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

	// The headers of the steps first, first+step, ...
	__device__ __forceinline__ void announce(u64 epoch, u32 first, u32 step)
	{
		u32 flag = packet_flag(epoch);
#pragma unroll 1
		for (u32 i = first; i < a.size - 1; i += step)
			store16(packet_place(a, epoch, r[i].to, a.rank), static_cast<u64>(r[i].send_bytes), static_cast<u64>(flag) << 32);
	}

	__device__ __forceinline__ void send(u64 epoch)
	{
		u32 flag = packet_flag(epoch), peers = a.size - 1;
		u32 tasks = peers * most(true);
#pragma unroll 1
		for (u32 t = warp; t < tasks; t += warps) {
			share d(a, t);
			sw_step m = r[d.rest];
			if (m.send_bytes > a.packet_bytes)
				continue;
			u64 src = a.src + m.send_offset;
			part x(packet_place(a, epoch, m.to, a.rank), src, m.send_bytes, d.quotient, lane);
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
		u32 flag = packet_flag(epoch), peers = a.size - 1;
		u32 tasks = peers * most(false);
		wait w;
#pragma unroll 1
		for (u32 t = warp; t < tasks; t += warps) {
			share d(a, t);
			sw_step m = r[d.rest];
			if (m.recv_bytes <= a.packet_bytes &&
			    !recv_group(a, packet_place(a, epoch, a.rank, m.from), a.dst + m.recv_offset, m.recv_bytes, d.quotient, flag, lane, w)) {
				give_up(a, w.kind, m.from, epoch, false);
				break;
			}
		}
		// headers last and by the warps with the least to do
#pragma unroll 1
		for (u32 i = warps - 1 - warp; i < peers; i += warps) {
			sw_step m = r[i];
			if (lane != 0 || m.recv_bytes > a.packet_bytes)
				continue;
			u64 place = packet_place(a, epoch, a.rank, m.from);
			wait h;
			recv_header(a, place, m.recv_bytes, flag, m.from, epoch, h);
			wipe_one(a, place, m.recv_bytes, epoch);
		}
	}
};

constexpr i64 tile_bytes = SW_TILE_BYTES;
static_assert(tile_bytes == 16 * 32 * 8);

// The tiles of a stretch of memory: they begin at multiples of 128 of its address, except the first.
struct tiles {
	u64 src;
	i64 bytes;

	__device__ __forceinline__ i64 begin(i64 k) const { return k == 0 ? 0 : k * tile_bytes - static_cast<i64>(src & 127); }
	__device__ __forceinline__ u32 length(i64 k) const
	{
		i64 end = begin(k + 1);
		return static_cast<u32>((end < bytes ? end : bytes) - begin(k));
	}
	__device__ __forceinline__ bool has(i64 k) const { return begin(k) < bytes; }
	__device__ __forceinline__ u32 count() const { return static_cast<u32>((bytes + static_cast<i64>(src & 127) + tile_bytes - 1) / tile_bytes); }
};

// Up to tile_bytes of a message on their way through a warp's registers.
struct tile {
	uint4 v[8];
	u64 src;
	u32 bytes, lane;

	__device__ __forceinline__ u32 vectors() const { return (src & 15) == 0 ? bytes / 16 : 0; }

	__device__ __forceinline__ void load(u64 from, u32 n)
	{
		src = from, bytes = n;
		u32 count = vectors();
		from += 16 * lane;
		if (count == 256) {
#pragma unroll
			for (int k = 0; k < 8; k++)
				v[k] = load_vector(from + 512 * k);
			return;
		}
#pragma unroll
		for (int k = 0; k < 8; k++)
			v[k] = load_vector_if(32 * k + lane < count, from + 512 * k);
	}

	__device__ __forceinline__ void store(u64 dst) const
	{
		u32 count = vectors();
		if (count == 0 || (dst & 15) != 0) {
			copy_odd(dst, src, bytes, lane, 32);
			return;
		}
		u64 to = dst + 16 * lane;
		if (count == 256) {
#pragma unroll
			for (int k = 0; k < 8; k++)
				store_vector(to + 512 * k, v[k]);
			return;
		}
#pragma unroll
		for (int k = 0; k < 8; k++)
			store_vector_if(32 * k + lane < count, to + 512 * k, v[k]);
		u32 at = 16 * count + lane;
		if (at < bytes)
			store_byte(dst + at, load_byte(src + at));
	}
};

// A warp moves tiles first, first+step, ... of a stretch of memory.
static __device__ __noinline__ void move(u64 dst, u64 src, i64 bytes, u32 first, u32 step, u32 lane)
{
	tile t;
	t.lane = lane;
#pragma unroll 1
	for (i64 at = first * tile_bytes - static_cast<i64>(src & 127); at < bytes; at += step * tile_bytes) {
		i64 from = at < 0 ? 0 : at, to = at + tile_bytes < bytes ? at + tile_bytes : bytes;
		t.load(src + from, static_cast<u32>(to - from));
		t.store(dst + from);
	}
}

// A warp copies its tiles of what stays on this rank.
template <typename Steps> __device__ __forceinline__ void copy_own(const sw_exchange_args &a, Steps r, u32 first, u32 step, u32 lane)
{
	u64 from = a.src + r.own_src(), to = a.dst + r.own_dst();
	if (from != to)
		move(to, from, r.own_bytes(), first, step, lane);
}

// ---- messages with credit ------------------------------------------------------------------------------------------

// True when this rank takes messages in through staging.
__device__ __forceinline__ bool through_staging(const sw_exchange_args &a) { return a.dst_offset < 0 || (a.flags & SW_STAGED) != 0; }

// Lengths are divided in units of 128 bytes, which 32 bits count up to 512 GiB.
__device__ __forceinline__ u32 units(i64 bytes) { return static_cast<u32>((bytes + 127) >> 7); }

// How a message is striped over lanes; both ends compute the same.
struct stripes {
	i64 bytes, per;
	u32 count;

	__device__ __forceinline__ stripes(const sw_exchange_args &a, i64 n) : bytes(n)
	{
		i64 want = (n + SW_LANE_MIN_BYTES - 1) / SW_LANE_MIN_BYTES;
		count = want < a.lanes ? static_cast<u32>(want) : a.lanes;
		if (count == 0)
			count = 1;
		per = 128 * static_cast<i64>((units(n) + count - 1) / count);
	}
	__device__ __forceinline__ i64 begin(u32 lane) const { return lane * per < bytes ? lane * per : bytes; }
	__device__ __forceinline__ i64 length(u32 lane) const { return begin(lane + 1) - begin(lane); }
};

// The line in dst's segment by which src signals a lane in calls of parity 0. Those of parity 1 lie parity_bytes behind.
__device__ __forceinline__ u64 signal_line(const sw_exchange_args &a, u32 dst, u32 src, u32 lane)
{
	return segment(a, dst) + a.signals + (static_cast<u64>(src) * a.lanes + lane) * SW_LINE_BYTES;
}

// Messages through staging have three words for signals in a line: the first of all signals, one for the end of the message and one for a
// second warp that signals chunks. So these warps do not wait for each other, and none overwrites a later signal by an earlier one.
constexpr u64 end_of_staged = 16, other_teller = 24;

__device__ __forceinline__ u64 parity_bytes(const sw_exchange_args &a, u64 epoch) { return (epoch & 1) * a.size * a.lanes * SW_LINE_BYTES; }

__device__ __forceinline__ u64 lane_credit(const sw_exchange_args &a, u32 src, u32 dst, u32 lane)
{
	return segment(a, src) + a.lane_credits + (static_cast<u64>(dst) * a.lanes + lane) * SW_LINE_BYTES;
}

__device__ __forceinline__ u64 lane_slots(const sw_exchange_args &a, u32 dst, u32 src, u32 lane)
{
	return segment(a, dst) + a.slots + (static_cast<u64>(src) * a.lanes + lane) * a.slot_count * a.slot_bytes;
}

__device__ __forceinline__ u32 chunk_count(const sw_exchange_args &a, i64 length)
{
	u32 slot = units(a.slot_bytes);
	return length == 0 ? 1 : (units(length) + slot - 1) / slot;
}

constexpr u32 send_warps = SW_SEND_THREADS / 32, recv_warps = SW_RECV_THREADS / 32;
constexpr u32 send_part = 1; // named barrier
constexpr u32 chunks_ahead = 32;
constexpr u32 tellers = 2; // warps that signal chunks in a block that only sends; each has its word
constexpr u32 far_ahead = 1u << 30; // cycles: what is due then was due long ago
constexpr u64 skip_message = SW_NOWHERE - 1; // a place: the receiver expects another size, send nothing
constexpr u32 all_chunks = (1u << chunk_bits) - 1; // of an item that has arrived: last_seq
constexpr u32 no_chunks = ~0u;			   // of an item that will not: its sender has another size in mind

// What a block sends on one lane of a message, and what it receives. They are worked out before the call begins, because one
// warp takes long for that.
struct lane_out {
	u64 src, to;	// of the message; in place, it goes to `to` plus the place that the receiver tells
	u64 slots;	// the receiver's staging
	u64 line;	// signal_line
	u64 room;	// lane_credit
	i64 all;	// bytes of the message
	i64 at, bytes;	// the lane's part of it where it goes through staging
	u32 lane, lanes; // in place, the lane's tiles are those of the message with the same remainder
	u32 step, chunks; // chunks is 0 when the lane is not used
};

struct lane_in {
	u64 to, slots, line, room;
	i64 bytes;
	u32 step, chunks;
};

static_assert(sizeof(lane_out) + sizeof(lane_in) == SW_ITEM_BYTES);

// Where some blocks send and others copy out of staging, there are as many of each, and they count from 0 alike.
__device__ __forceinline__ u32 alike(const sw_exchange_args &a) { return a.senders != 0 ? a.senders : gridDim.x; }
__device__ __forceinline__ u32 among_alike(const sw_exchange_args &a) { return blockIdx.x < alike(a) ? blockIdx.x : blockIdx.x - alike(a); }

// Item i of a block is lane block+i/peers*blocks of the message of step i%peers.
struct items {
	u32 peers, mine, count;

	__device__ __forceinline__ items(const sw_exchange_args &a) : peers(a.size - 1), mine((a.lanes - among_alike(a) + alike(a) - 1) / alike(a)), count(peers * mine) {}
};

// The items in the order in which a block sends them: all lanes of a step, then those of the next one.
struct walk {
	u32 peers, mine, start;

	__device__ __forceinline__ walk(u32 peers, u32 lanes, u32 start) : peers(peers), mine(lanes), start(start) {}
	__device__ __forceinline__ walk(const sw_exchange_args &a, const items &all) : peers(all.peers), mine(all.mine), start((a.flags & SW_MESH) != 0 ? among_alike(a) % all.peers : 0) {}

	__device__ __forceinline__ u32 operator[](u32 i) const
	{
		u32 steps = i / mine, step = start + steps;
		return (step < peers ? step : step - peers) + (i - steps * mine) * peers;
	}
};

// How many warps of a block copy messages out of staging.
__device__ __forceinline__ u32 takers(const sw_exchange_args &a) { return a.senders != 0 ? send_warps + recv_warps : recv_warps; }

// A word that other warps write, the same for all lanes.
__device__ __forceinline__ u32 read_by_one(u32 *word, u32 lane)
{
	u32 v = lane == 0 ? read_shared(word) : 0;
	return __shfl_sync(~0u, v, 0);
}

// What the warps of a block tell one another.
struct board {
	u64 place[SW_MAX_RANKS]; // by step: where the receiver wants the message, from its segment on; 0 before it has said
	reports written[chunks_ahead]; // the sending warps have written staged chunk k, of all those with the same remainder
	u32 told;		 // staged chunks that are signalled, or about to be
	u32 written_all;	 // everything is written, and its signals are on their way
	u32 begin;		 // clock when the first receiver had said where it wants its message
	u32 begin_staged;	 // and when the first warp had come to those through staging
	u32 failed;		 // a sending warp has not written all of its tiles
	u32 over;		 // the block has given up
	u32 packets;		 // 1: some are to be sent; 2: some are to be received

	// By item, in dynamic shared memory:
	lane_out *out;
	lane_in *in;
	reports *taken; // [slot]: the receiving warps have copied a chunk out
	u32 *room;	// chunks that the receiver has taken out of staging
	u32 *arrived;	// chunks that are in staging here
	u32 *given;	// chunks that have been given back to the sender
	u32 *next;	// [warp that copies out of staging]: the chunk that it wants, 0 when there is none

	// The threads of the block make it, and meet before the first use.
	__device__ __forceinline__ void make(const sw_exchange_args &a, gathered r, u64 *memory, const items &all)
	{
		u32 peers = all.peers, count = all.count;
		lane_out *o = reinterpret_cast<lane_out *>(memory);
		lane_in *n = reinterpret_cast<lane_in *>(o + count);
		reports *t = reinterpret_cast<reports *>(n + count);
		u32 *words = reinterpret_cast<u32 *>(t + count * a.slot_count);
		for (u32 i = threadIdx.x; i < 2 * count; i += blockDim.x) {
			u32 k = i < count ? i : i - count, s = k % peers, l = among_alike(a) + k / peers * alike(a);
			const sw_step &m = r[s];
			i64 bytes = i < count ? m.send_bytes : m.recv_bytes;
			stripes part(a, bytes);
			bool used = bytes > a.packet_bytes && l < part.count;
			i64 begin = part.begin(l), length = part.length(l);
			u32 chunks = used ? chunk_count(a, length) : 0;
			if (i < count)
				o[k] = {a.src + m.send_offset, segment(a, m.to), lane_slots(a, m.to, a.rank, l), signal_line(a, m.to, a.rank, l),
					lane_credit(a, a.rank, m.to, l), bytes, begin, length, l, part.count, s, chunks};
			else
				n[k] = {a.dst + m.recv_offset + begin, lane_slots(a, a.rank, m.from, l), signal_line(a, a.rank, m.from, l),
					lane_credit(a, m.from, a.rank, l), length, s, chunks};
		}
		for (u32 i = threadIdx.x; i < count * a.slot_count; i += blockDim.x)
			t[i].expect(takers(a));
		for (u32 i = threadIdx.x; i < 3 * count; i += blockDim.x)
			words[i] = 0;
		if (threadIdx.x < chunks_ahead)
			written[threadIdx.x].expect(send_warps);
		if (threadIdx.x < SW_MAX_RANKS) {
			place[threadIdx.x] = 0;
			if (threadIdx.x < peers) {
				i64 sends = r[threadIdx.x].send_bytes;
				u32 some = (sends > 0 && sends <= a.packet_bytes ? 1 : 0) | (r[threadIdx.x].recv_bytes <= a.packet_bytes ? 2 : 0);
				if (some != 0)
					atomicOr(&packets, some);
			}
		}
		if (threadIdx.x == 0) {
			told = written_all = failed = over = begin = begin_staged = 0;
			out = o, in = n, taken = t;
			room = words, arrived = words + count, given = words + 2 * count, next = words + 3 * count;
		}
	}

	// place[step] as all lanes of the warp see it.
	__device__ __forceinline__ u64 seen(u32 step)
	{
		u64 p = look_shared(&place[step]);
		return __any_sync(~0u, p == 0) != 0 ? 0 : p;
	}

	// The clock when the first place was told. To be asked after one has been seen.
	__device__ __forceinline__ u32 began(u32 lane) { return read_by_one(&begin, lane); }

	// Waits until what another warp writes is at least want, which is not 0, and returns it. 0 when the block gives up.
	__device__ __forceinline__ u32 await(u32 *word, u32 want, u32 lane)
	{
		u32 here = 0;
		if (lane == 0)
#pragma unroll 1
			while ((here = read_shared(word)) < want) {
				if (read_shared(&over) != 0) {
					here = 0;
					break;
				}
				__nanosleep(20);
			}
		return __shfl_sync(~0u, here, 0);
	}
};

// Returns when the clock has come to due, and at once where that was long ago.
__device__ __forceinline__ void await_clock(u32 due)
{
#pragma unroll 1
	while (due - static_cast<u32>(clock()) < far_ahead)
		;
}

// Waits until the receivers of the steps that the lanes name have said where they want their messages. False when the block gives up.
__device__ __forceinline__ bool await_place(board &b, bool wanted, u32 step, u64 &place)
{
#pragma unroll 1
	while (__any_sync(~0u, wanted && (place = look_shared(&b.place[step])) == 0) != 0) {
		if (__any_sync(~0u, read_shared(&b.over) != 0) != 0)
			return false;
		__nanosleep(20);
	}
	return true;
}

// A warp sends its part of the messages that are written in place: of the tiles of all of a block's items in a row it takes every
// send_warps-th, so that a message without work for it costs it nothing. A message whose receiver wants it through staging is passed
// over. With an interval each tile has its time, counted from when the first receiver was ready: ranks that begin together stay in
// step. False when the block gives up.
static __device__ __noinline__ bool write_in_place(board &b, u32 peers, u32 lanes, u32 start, u32 warp, u32 lane, u32 interval)
{
	walk order(peers, lanes, start);
	u32 mine = warp, before = 0, begin = 0; // the warp's next tile; the tiles of the items that have been looked at; when tile 0 is due
#pragma unroll 1
	for (u32 first = 0; first < peers * lanes; first += 32) {
		u32 count = 0, item = 0;
		if (first + lane < peers * lanes) {
			item = order[first + lane];
			const lane_out &o = b.out[item];
			u32 whole = tiles{o.src, o.all}.count();
			count = o.chunks != 0 && o.lane < whole ? (whole - o.lane + o.lanes - 1) / o.lanes : 0;
		}
		u32 end = before + running_sum(count, lane), last = before, step = 0;
		before = __shfl_sync(~0u, end, 31);
		u64 cur = 0, low = 0, high = 0, to = 0, place = 0; // the tile and the message in src; what to add to get to where it goes
		i64 stride = 0;
#pragma unroll 1
		for (; mine < before; mine += send_warps, cur += stride) {
			if (mine >= last) {
				u32 who = __popc(__ballot_sync(~0u, end <= mine));
				last = __shfl_sync(~0u, end, who);
				const lane_out &o = b.out[__shfl_sync(~0u, item, who)];
				step = o.step, low = o.src, high = low + o.all, to = o.to - low;
				stride = o.lanes * tile_bytes;
				cur = (low & ~127ull) + o.lane * tile_bytes + (mine - last + __shfl_sync(~0u, count, who)) * stride;
				stride *= send_warps;
				place = b.seen(step);
				if (place >= skip_message) {
					mine += (last - 1 - mine) / send_warps * send_warps; // and one more by the loop
					continue;
				}
				to += place;
			}
			tile t;
			t.lane = lane;
			u64 from = cur < low ? low : cur, until = cur + tile_bytes < high ? cur + tile_bytes : high;
			t.load(from, static_cast<u32>(until - from)); // wanted as soon as the credit is there
			if (place == 0) {
				if (!await_place(b, true, step, place))
					return false;
				if (place >= skip_message) {
					mine += (last - 1 - mine) / send_warps * send_warps;
					continue;
				}
				to += place;
			}
			if (interval != 0 && begin == 0)
				begin = b.began(lane);
			if (interval != 0)
				await_clock(begin + mine * interval);
			t.store(from + to);
		}
	}
	return true;
}

// A warp sends its part of the messages that go through staging: of the tiles of all of a block's items in a row it takes every
// send_warps-th, and each has its time, counted from when the first warp came here. The warps report chunk by chunk. False when the block
// gives up.
static __device__ __noinline__ bool write_staged(board &b, walk order, u32 items, i64 slot_bytes, u32 slots, u32 warp, u32 lane, u32 interval)
{
	u32 each = static_cast<u32>((slot_bytes + tile_bytes - 1) / tile_bytes); // tiles of a chunk, but for the last one of an item
	u32 mine = warp, before = 0, begin = 0;
	u32 written = 0, told = 0; // chunks that the warp has reported; those that have been signalled, as far as it knows
	auto report = [&] {
		if (written >= chunks_ahead + told && (told = b.await(&b.told, written - chunks_ahead + 1, lane)) == 0) // others are that far behind
			return false;
		__syncwarp();
		if (lane == 0)
			b.written[written % chunks_ahead].report();
		written++;
		return true;
	};
	tile t;
	t.lane = lane;
#pragma unroll 1
	for (u32 i = 0; i < items; i++) {
		u32 item = order[i];
		const lane_out &o = b.out[item];
		if (o.chunks == 0 || look_shared(&b.place[o.step]) != SW_NOWHERE)
			continue;
		u64 src = o.src + o.at, dst = o.slots + (1 % slots) * slot_bytes; // of chunk c
		i64 left = o.bytes;						   // from its beginning on
		u32 c = 1, slot = 1 % slots, first = before, room = 0;		   // first is its first tile
		before += (o.chunks - 1) * each + static_cast<u32>((left - (o.chunks - 1) * slot_bytes + tile_bytes - 1) / tile_bytes);
#pragma unroll 1
		for (; mine < before; mine += send_warps) {
#pragma unroll 1
			for (; mine >= first + each; first += each) {
				if (!report())
					return false;
				c++, src += slot_bytes, left -= slot_bytes;
				slot = slot + 1 == slots ? 0 : slot + 1;
				dst = o.slots + slot * slot_bytes;
			}
			i64 at = (mine - first) * tile_bytes, rest = min(left, slot_bytes) - at;
			t.load(src + at, static_cast<u32>(min(rest, tile_bytes)));
			if (c > slots + room && (room = b.await(&b.room[item], c - slots, lane)) == 0)
				return false;
			if (interval != 0 && begin == 0) {
				if (lane == 0)
					atomicCAS(&b.begin_staged, 0u, static_cast<u32>(clock()) | 1u);
				begin = read_by_one(&b.begin_staged, lane);
			}
			if (interval != 0)
				await_clock(begin + mine * interval);
			t.store(dst + at);
		}
#pragma unroll 1
		for (; c <= o.chunks; c++)
			if (!report())
				return false;
	}
	return true;
}

// The sending half of a block. Its warps go along the same messages in the same order, each with tiles of its own, and do not
// wait for one another: while some wait for memory others store. What is written in place comes first; the others begin when all
// receivers are ready, which keeps the ranks in step.
struct sender {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;
	board &b;
	u32 warp, lane;

	// Whether the receivers have all said where they want their messages, and any of them through staging.
	__device__ __forceinline__ bool await_credits(const items &all, bool &any)
	{
		any = false;
#pragma unroll 1
		for (u32 first = 0; first < all.peers; first += 32) {
			u32 s = first + lane;
			u64 place = 0;
			if (!await_place(b, s < all.peers && b.out[s].chunks != 0, s, place))
				return false;
			any |= __any_sync(~0u, place == SW_NOWHERE) != 0;
		}
		return true;
	}

	__device__ __forceinline__ bool write(const items &all)
	{
		walk order(a, all);
		bool any;
		return write_in_place(b, all.peers, all.mine, order.start, warp, lane, a.interval) && await_credits(all, any) &&
		       (!any || write_staged(b, order, all.count, a.slot_bytes, a.slot_count, warp, lane, a.interval));
	}

	__device__ __forceinline__ void run()
	{
		items all(a);
		if (!write(all) && lane == 0)
			write_shared(&b.failed, 1u);
		part_sync(send_part, SW_SEND_THREADS);
		if (warp == 0 && b.failed == 0)
			finish(all);
	}

	// All messages are there: one fence for all of them. Tellers need not end theirs.
	__device__ __forceinline__ void finish(const items &all)
	{
		if (lane == 0)
			publish(&b.written_all, 1u);
#pragma unroll 1
		for (u32 first = 0; first < all.count; first += 32) {
			u64 line = 0, bytes = 0;
			bool staged = false;
			if (first + lane < all.count) {
				const lane_out &o = b.out[first + lane];
				u64 place = look_shared(&b.place[o.step]);
				staged = place == SW_NOWHERE;
				if (o.chunks != 0 && place != skip_message)
					line = o.line + parity_bytes(a, epoch), bytes = static_cast<u64>(r[o.step].send_bytes);
			}
			if (first == 0)
				fence_system();
			if (line != 0 && staged)
				store_relaxed(line + end_of_staged, last_seq(epoch));
			else if (line != 0)
				store16(line, last_seq(epoch), bytes);
		}
	}
};

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
		for (u32 i = tid; i < a.size - 1; i += threads) {
			u32 p = r[i].from;
			i64 n = r[i].recv_bytes;
			if (n <= a.packet_bytes)
				continue;
			u64 line = segment(a, p) + a.credits + a.rank * SW_LINE_BYTES;
			store16(line, seq(epoch, 0), in_place ? static_cast<u64>(a.dst_offset + r[i].recv_offset) : SW_NOWHERE);
			store16(line + 16, seq(epoch, 0), static_cast<u64>(n));
		}
	}

	// True when the size of the arriving message, of which the sender tells total, is right.
	__device__ __forceinline__ bool right_size(u64 total, u32 p, i64 n)
	{
		if (total == static_cast<u64>(n))
			return true;
		give_up(a, SW_FAULT_MISMATCH, p, epoch, false, total, static_cast<u64>(n));
		return false;
	}

	// True when the sender of a large message has another size in mind.
	__device__ __forceinline__ bool other_size(u32 p, i64 n)
	{
		pair64 v = load16(packet_place(a, epoch, a.rank, p));
		if (static_cast<u32>(v.b >> 32) != packet_flag(epoch) || v.a == static_cast<u64>(n))
			return false;
		give_up(a, SW_FAULT_MISMATCH, p, epoch, false, v.a, static_cast<u64>(n));
		return true;
	}

	// Cycles from one tile of what stays on this rank to the next, so that it takes three quarters of the time of the sends.
	__device__ __forceinline__ u32 own_interval()
	{
		float sends = 0;
#pragma unroll 1
		for (u32 i = 0; i < a.size - 1; i++)
			sends += static_cast<float>(r[i].send_bytes);
		return static_cast<u32>(min(0.75f * static_cast<float>(a.interval) * sends / static_cast<float>(r.own_bytes()), 1e6f));
	}

	// Copies a warp's tiles of what stays on this rank beside sends that are held to a rate: one at once, while they wait for credits, the
	// others spread out, or the sends would be late.
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
			const lane_in &o = b.in[i];
			if (o.chunks == 0)
				continue;
			u32 p = r[o.step].from;
			i64 n = r[o.step].recv_bytes;
			u64 line = o.line + parity_bytes(a, epoch);
			await_line(line, p, n);
		}
	}

	// Waits for the signal that a message written in place is there.
	__device__ __forceinline__ void await_line(u64 line, u32 p, i64 n)
	{
		wait w;
		pair64 v;
#pragma unroll 1
		while ((v = load16(line)).a < last_seq(epoch)) { // nobody reads the bytes before the kernel ends
			if (!w.slow(a)) {
				give_up(a, w.kind, p, epoch, false);
				return;
			}
			if ((w.polls & 255) == 0 && other_size(p, n))
				return;
		}
		right_size(v.b, p, n);
	}

	// Copies a warp's tiles of chunk k of an item out of staging. True when it was the last.
	__device__ __forceinline__ bool take_chunk(board &b, u32 i, u32 k, u32 warp, u32 lane)
	{
		const lane_in &o = b.in[i];
		u32 slot = k % a.slot_count, warps = takers(a);
		i64 at = (k - 1) * a.slot_bytes, left = o.bytes - at;
		u32 slot_tiles = static_cast<u32>(a.slot_bytes / tile_bytes);
		u32 first = (warp + k * (warps - slot_tiles % warps)) % warps; // the tiles of successive chunks go round
		move(o.to + at, o.slots + slot * a.slot_bytes, left < a.slot_bytes ? left : a.slot_bytes, first, warps, lane);
		__syncwarp();
		if (k + a.slot_count <= o.chunks && lane == 0)
			b.taken[i * a.slot_count + slot].report();
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
				u32 i = first + lane, k = i < all.count ? next[i] : 0, come = k != 0 ? read_shared(&b.arrived[i]) : 0;
#pragma unroll 1
				for (u32 ready = __ballot_sync(~0u, k != 0 && come >= k); ready != 0; ready &= ready - 1) {
					u32 from = __ffs(ready) - 1, chunk = __shfl_sync(~0u, k, from), end = __shfl_sync(~0u, come, from);
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
				move(a.dst + r.own_dst() + own.begin(mine), own.src + own.begin(mine), own.length(mine), 0, 1, lane);
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

// A warp that watches what peers write for the block, so that no other warp has to: many that poll one line hold up the write that
// they wait for. It also tells peers what the other warps have done, because the fence before that takes long.
struct watch {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;
	board &b;
	u32 lane;
	u32 missing = 0; // somebody that this lane waits for: the rank plus 1, and whether this rank is sending to it
	bool fresh = false; // something has come since the last round
	wait w;

	__device__ __forceinline__ watch(const sw_exchange_args &a, gathered r, u64 epoch, board &b, u32 lane) : a(a), r(r), epoch(epoch), b(b), lane(lane) {}

	__device__ __forceinline__ void wait_for(u32 peer, bool sending) { missing = (peer + 1) << 1 | static_cast<u32>(sending); }

	// How many chunks of this call a peer's word tells of.
	__device__ __forceinline__ u32 chunks(u64 word) const { return word >= seq(epoch, 0) ? static_cast<u32>(word - seq(epoch, 0)) : 0; }

	// Ends a round of which something is open. False when the block gives up.
	__device__ __forceinline__ bool go_on()
	{
		bool any = __any_sync(~0u, fresh) != 0;
		u32 someone = __ballot_sync(~0u, missing != 0), whom = __shfl_sync(~0u, missing, someone == 0 ? 0 : __ffs(someone) - 1), go = 1;
		missing = 0, fresh = false;
		if (any) {
			w = wait();
			return true;
		}
		if (lane == 0 && (read_shared(&b.over) != 0 || !w.slow(a))) {
			give_up(a, w.kind, whom == 0 ? a.rank : (whom >> 1) - 1, epoch, (whom & 1) != 0);
			write_shared(&b.over, 1u);
			go = 0;
		}
		return __shfl_sync(~0u, go, 0) != 0;
	}
};

// A warp that signals staged chunks. A block that only sends has several: a fence takes 2 to 5 us, and theirs overlap.
struct teller {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;
	board &b;
	u32 lane, word;
	bool alone;
	u32 mine = 0;		// chunks so far
	u32 at = 0, before = 0; // an item, in order, and the chunks before it

	__device__ __forceinline__ teller(const sw_exchange_args &a, gathered r, u64 epoch, board &b, u32 lane, u32 word)
	    : a(a), r(r), epoch(epoch), b(b), lane(lane), word(word), alone(a.senders == 0)
	{
	}

	// Signals the staged chunks that all warps have written and no other teller has taken on. False when there are none.
	__device__ __forceinline__ bool tell(const items &all)
	{
		u32 from = alone ? mine : read_by_one(&b.told, lane);
		u32 k = from + lane, ready = __ballot_sync(~0u, b.written[k % chunks_ahead].all(k / chunks_ahead));
		u32 end = from + (ready == ~0u ? 32 : __ffs(~ready) - 1); // in order
		if (end == from || (!alone && __shfl_sync(~0u, lane == 0 ? atomicCAS(&b.told, from, end) : 0, 0) != from))
			return false;
		fence_system(); // X4: what the warps wrote comes before the signal, also what was written before these chunks
		if (alone && lane == 0)
			publish(&b.told, end);
		mine = end;
		walk order(a, all);
#pragma unroll 1
		for (;; at++) {
			const lane_out &o = b.out[order[at]];
			u32 chunks = b.place[o.step] == SW_NOWHERE ? o.chunks : 0;
			if (chunks != 0 && before + chunks > from && lane == 0)
				signal(o, min(chunks, end - before)); // of a lane's chunks the last one is told of
			if (before + chunks >= end)
				return true;
			before += chunks;
		}
	}

	__device__ __forceinline__ void signal(const lane_out &o, u32 chunk)
	{
		u64 line = o.line + parity_bytes(a, epoch), s = chunk == o.chunks ? last_seq(epoch) : seq(epoch, chunk);
		if (word == 0)
			store16(line, s, static_cast<u64>(r[o.step].send_bytes));
		else
			store_relaxed(line + other_teller, s);
	}

	// True when the sending warps have signalled everything, or are about to.
	__device__ __forceinline__ bool through() { return read_by_one(&b.written_all, lane) != 0; }

	// Runs until everything is signalled, or the block gives up.
	__device__ __forceinline__ void run()
	{
		items all(a);
#pragma unroll 1
		while (!through()) {
			if (tell(all))
				continue;
			if (read_by_one(&b.over, lane) != 0)
				return;
			__nanosleep(20);
		}
	}
};

struct send_watch : watch {
	using watch::watch;

	// True while the credit of a step has not come. Of a message on whose lanes the block sends nothing it is not awaited: its
	// receiver can be through before the block has looked, and grant the next call's.
	__device__ __forceinline__ bool await_credit(u32 s)
	{
		if (b.place[s] != 0 || b.out[s].chunks == 0)
			return false;
		u64 line = own_segment(a) + a.credits + r[s].to * SW_LINE_BYTES, n = static_cast<u64>(r[s].send_bytes);
		pair64 x = load16(line), y = load16(line + 16);
		if (x.a != seq(epoch, 0) || y.a != seq(epoch, 0)) {
			wait_for(r[s].to, true);
			return true;
		}
		atomicCAS(&b.begin, 0u, static_cast<u32>(clock()) | 1u);
		publish(&b.place[s], y.b == n ? resolve(a, r[s].to, x.b) : skip_message);
		if (y.b != n)
			give_up(a, SW_FAULT_MISMATCH, r[s].to, epoch, true, n, y.b);
		fresh = true;
		return false;
	}

	// What the receiver of a staged message has made room for.
	__device__ __forceinline__ void look_for_room(u32 i)
	{
		const lane_out &o = b.out[i];
		if (o.chunks <= b.room[i] + a.slot_count)
			return;
		u32 c = chunks(load_relaxed(o.room));
		if (c > b.room[i]) {
			publish(&b.room[i], c);
			fresh = true;
		}
		wait_for(r[o.step].to, true);
	}

	__device__ __forceinline__ void run()
	{
		items all(a);
		teller tells(a, r, epoch, b, lane, 0);
		bool credits = true, staged = false;
#pragma unroll 1
		for (;;) {
			if (credits) {
				bool open = false;
#pragma unroll 1
				for (u32 s = lane; s < all.peers; s += 32) {
					open |= await_credit(s);
					staged |= b.place[s] == SW_NOWHERE;
				}
				credits = __any_sync(~0u, open) != 0;
				staged = __any_sync(~0u, staged) != 0;
				__syncwarp(); // places that other lanes have written
			}
			if (staged) {
#pragma unroll 1
				for (u32 i = lane; i < all.count; i += 32)
					if (b.place[b.out[i].step] == SW_NOWHERE)
						look_for_room(i);
				if (a.senders == 0) // otherwise there are warps for that
					fresh |= tells.tell(all);
			}
			if ((!credits && (!staged || tells.through())) || !go_on())
				return;
		}
	}
};

struct recv_watch : watch {
	using watch::watch;

	// True while an item has not arrived as a whole.
	__device__ __forceinline__ bool await_item(receiver &in, u32 i, bool doubt)
	{
		const lane_in &o = b.in[i];
		if (o.chunks == 0 || b.arrived[i] >= all_chunks)
			return false;
		u32 p = r[o.step].from;
		i64 n = r[o.step].recv_bytes;
		u64 line = o.line + parity_bytes(a, epoch);
		pair64 v = load16(line), w = load16(line + end_of_staged);
		u64 last = max(v.a, max(w.a, w.b));
		u32 c = chunks(last);
		if (c > b.arrived[i]) {
			load_acquire(line + (last == v.a ? 0 : last == w.a ? end_of_staged : other_teller)); // no older than that: what it tells of is seen behind it
			if (last == v.a && !in.right_size(v.b, p, n))
				c = no_chunks;
			publish(&b.arrived[i], c);
			fresh = true;
		} else if (doubt && in.other_size(p, n)) {
			publish(&b.arrived[i], c = no_chunks);
		}
		if (c < all_chunks)
			wait_for(p, false);
		return c < all_chunks;
	}

	// Tells the senders which slots the warps have emptied since.
	__device__ __forceinline__ void credit(const items &all)
	{
#pragma unroll 1
		for (u32 first = 0; first < all.count; first += 32) {
			u32 i = first + lane, k = 0;
			bool empty = false;
			if (i < all.count && b.arrived[i] > b.given[i] && b.arrived[i] != no_chunks) {
				k = b.given[i] + 1;
				empty = k + a.slot_count <= b.in[i].chunks && b.taken[i * a.slot_count + k % a.slot_count].all((k - 1) / a.slot_count);
			}
			if (empty) { // X3: what the warps have read they have stored, so no fence need see to it
				store16(b.in[i].room, seq(epoch, k), 0);
				b.given[i] = k;
				fresh = true;
			}
		}
	}

	// Runs until everything has arrived in staging. The last chunks do not, before the slots that they need are given back.
	__device__ __forceinline__ void run(receiver &in)
	{
		items all(a);
#pragma unroll 1
		for (u32 round = 1;; round++) {
			bool open = false;
#pragma unroll 1
			for (u32 i = lane; i < all.count; i += 32)
				open |= await_item(in, i, (round & 255) == 0);
			credit(all);
			if (__any_sync(~0u, open) == 0 || !go_on())
				return;
		}
	}
};

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_PACKET_THREADS, 1) alltoallv_packet(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	direct r{a};
	u32 warps = gridDim.x * (SW_PACKET_THREADS / 32), lane = threadIdx.x & 31;
	// neighbouring warps of the grid lie in different blocks, so that few groups use many multiprocessors
	u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
	packets<direct> x(a, r, warp, warps, lane);
	packets<direct>::ahead ahead{0, 0, false};
	if (a.size > 1)
		ahead = x.look_ahead();
	await_stream();
	call_number number;
	number.load(a);
	x.preload(ahead);
	u64 epoch = number.epoch();
	if (__any_sync(~0u, epoch == 0)) // a fault may be written just now
		return;
	if (a.size > 1) {
		if (lane == 0)
			x.announce(epoch, warp, warps);
		x.send(epoch);
	}
	__syncthreads(); // every warp has read the number
	if (threadIdx.x == blockDim.x - 1)
		number.advance(a);
	release_stream();
	copy_own(a, r, warps - 1 - warp, warps, lane); // first by the warps that have sent least
	if (a.size > 1)
		x.receive(epoch);
}

extern "C" __global__ void __launch_bounds__(SW_SEND_THREADS + SW_WATCH_THREADS + SW_RECV_THREADS, 1) alltoallv(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	SW_DYNAMIC_SHARED(memory);
	SW_SHARED(gathered::store, steps);
	SW_SHARED(board, b);
	if (threadIdx.x == 0)
		b.packets = 0;
	bool outside = gathered::fill(steps, a);
	__syncthreads();
	if (a.size > 1)
		b.make(a, {steps}, memory, items(a));
	await_stream(); // all that is above goes on while the kernel before runs
	call_number number;
	number.load(a);
	gathered r{steps};
	u64 epoch = number.epoch();
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32 * gridDim.x;
	receiver in{a, r, epoch};
	bool grants = blockIdx.x == 0 && warp == send_warps + 1;
	if (grants && a.splits == 0 && epoch != 0) // the sooner the better; splits from device memory are to be looked at by all threads first
		in.grant(lane, 32);
	if (__syncthreads_or(outside || epoch == 0)) { // for all or none: warps of a block wait for one another
		if (blockIdx.x == 0 && epoch != 0 && a.splits != 0)
			gathered::complain(steps, a, epoch);
		return;
	}
	if (threadIdx.x == blockDim.x - 1)
		number.advance(a);
	release_stream();
	packets<gathered> x(a, r, warp * alike(a) + among_alike(a), alike(a) * send_warps, lane);
	bool sends = blockIdx.x < alike(a), receives = a.senders == 0 || !sends;
	if (a.size == 1) {
		copy_own(a, r, x.warp, warps, lane);
		return;
	}
	bool staged = through_staging(a);
	if (warp < send_warps && sends) {
		if ((b.packets & 1) != 0)
			x.send(epoch);
		sender out{a, r, epoch, b, warp, lane};
		out.run();
	} else if (warp == send_warps) {
		if (blockIdx.x == 0)
			x.announce(epoch, lane, 32);
		if (sends)
			send_watch(a, r, epoch, b, lane).run();
	} else if (warp == send_warps + 1) {
		if (grants && a.splits != 0)
			in.grant(lane, 32);
		if (staged && receives)
			recv_watch(a, r, epoch, b, lane).run(in);
	} else if (!receives) {
		if (warp < send_warps + 2 + tellers)
			teller(a, r, epoch, b, lane, warp - send_warps - 2).run();
	} else {
		if (warp > send_warps)
			warp -= send_warps + recv_warps + 2 - takers(a);
		if (staged) {
			in.take_staged(b, warp, lane);
		} else {
			in.copy_own_beside(warp, lane);
			in.await_in_place(b, warp * 32 + lane, SW_RECV_THREADS);
		}
	}
	if ((b.packets & 2) != 0) {
		x.warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
		x.warps = warps;
		x.receive(epoch);
	}
}

// What stays on this rank, beside copies by the copy engines.
extern "C" __global__ void __launch_bounds__(SW_OWN_THREADS, 1) alltoallv_own(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	constexpr u32 warps = SW_OWN_THREADS / 32;
	copy_own(a, direct{a}, threadIdx.x / 32 * gridDim.x + blockIdx.x, warps * gridDim.x, threadIdx.x & 31);
}

// Around copies by the copy engines: the first kernel grants and waits for credits, the copies follow in the stream, the second
// kernel signals and waits for signals. Both have one block, and begin so.
static __device__ __forceinline__ sw::call_number begin_copies(sw::gathered::store &steps, const sw_exchange_args &a)
{
	sw::gathered::fill(steps, a);
	sw::await_stream();
	sw::call_number number;
	number.load(a);
	__syncthreads();
	return number;
}

extern "C" __global__ void __launch_bounds__(SW_COPY_THREADS, 1) alltoallv_open(const __grid_constant__ sw_copy_args c)
{
	using namespace sw;
	const sw_exchange_args &a = c.exchange;
	SW_SHARED(gathered::store, steps);
	call_number number = begin_copies(steps, a);
	gathered r{steps};
	u64 epoch = number.epoch();
	if (__any_sync(~0u, epoch == 0))
		return;
	if (threadIdx.x == 0)
		number.advance(a);
	if (a.size == 1)
		return;
	receiver in{a, r, epoch};
	in.grant(threadIdx.x, SW_COPY_THREADS);
	packets<gathered> x(a, r, threadIdx.x / 32, SW_COPY_THREADS / 32, threadIdx.x & 31);
	x.announce(epoch, threadIdx.x, SW_COPY_THREADS);
	x.send(epoch);
#pragma unroll 1
	for (u32 i = threadIdx.x; i < a.size - 1; i += SW_COPY_THREADS) {
		u32 p = r[i].to;
		i64 n = r[i].send_bytes;
		if (n <= a.packet_bytes)
			continue;
		u64 line = own_segment(a) + a.credits + p * SW_LINE_BYTES;
		wait w;
#pragma unroll 1
		while (load_acquire(line) < seq(epoch, 0) || load_acquire(line + 16) < seq(epoch, 0))
			if (!w.slow(a)) {
				give_up(a, w.kind, p, epoch, true);
				return;
			}
		u64 place = load16(line).b, expected = load16(line + 16).b;
		if (expected != static_cast<u64>(n))
			give_up(a, SW_FAULT_MISMATCH, p, epoch, true, static_cast<u64>(n), expected);
		else if (place != static_cast<u64>(c.places[p]))
			give_up(a, SW_FAULT_PLACE, p, epoch, true, static_cast<u64>(c.places[p]), place);
	}
}

extern "C" __global__ void __launch_bounds__(SW_COPY_THREADS, 1) alltoallv_close(const __grid_constant__ sw_copy_args c)
{
	using namespace sw;
	const sw_exchange_args &a = c.exchange;
	SW_SHARED(gathered::store, steps);
	call_number number = begin_copies(steps, a);
	gathered r{steps};
	if (__any_sync(~0u, number.epoch() == 0) || a.size == 1)
		return;
	u64 epoch = number.epoch() - 1; // alltoallv_open has advanced it
	fence_system();			// X4: the copies come before their signals
#pragma unroll 1
	for (u32 i = threadIdx.x; i < (a.size - 1) * a.lanes; i += SW_COPY_THREADS) {
		u32 p = r[i / a.lanes].to, lane = i % a.lanes;
		i64 n = r[i / a.lanes].send_bytes;
		if (n > a.packet_bytes && lane < stripes(a, n).count)
			store16(signal_line(a, p, a.rank, lane) + parity_bytes(a, epoch), last_seq(epoch), static_cast<u64>(n));
	}
	receiver in{a, r, epoch};
	for (u32 i = threadIdx.x; i < (a.size - 1) * a.lanes; i += SW_COPY_THREADS) {
		const sw_step &m = r[i / a.lanes];
		u32 lane = i % a.lanes;
		if (m.recv_bytes > a.packet_bytes && lane < stripes(a, m.recv_bytes).count)
			in.await_line(signal_line(a, a.rank, m.from, lane) + parity_bytes(a, epoch), m.from, m.recv_bytes);
	}
	packets<gathered> x(a, r, threadIdx.x / 32, SW_COPY_THREADS / 32, threadIdx.x & 31);
	x.receive(epoch);
}
