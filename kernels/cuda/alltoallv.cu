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

	// Every thread of the block calls it and meets the others at a barrier before the first use.
	static __device__ __forceinline__ void fill(store &s, const sw_exchange_args &a)
	{
		const i64 *table = reinterpret_cast<const i64 *>(a.splits);
		if (table != nullptr)
			await_stream(); // somebody may be writing it
		for (u32 i = threadIdx.x; i < a.size; i += blockDim.x) {
			if (i == a.size - 1) {
				s.own[0] = table == nullptr ? a.own_bytes : table[a.rank];
				s.own[1] = table == nullptr ? a.own_src : table[a.size + a.rank];
				s.own[2] = table == nullptr ? a.own_dst : table[3 * a.size + a.rank];
				continue;
			}
			sw_step x = a.steps[i];
			if (table != nullptr) {
				x.send_bytes = table[x.to];
				x.send_offset = table[a.size + x.to];
				x.recv_bytes = table[2 * a.size + x.from];
				x.recv_offset = table[3 * a.size + x.from];
			}
			s.steps[i] = x;
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

__device__ __forceinline__ u64 segment(const sw_exchange_args &a, u32 rank) { return a.base + rank * a.stride; }

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
	u32 at = static_cast<u32>((epoch / 2) % (groups * (SW_PACKET_GROUP_BYTES / 16)));
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

	__device__ __forceinline__ void send(u64 epoch)
	{
		u32 flag = packet_flag(epoch), peers = a.size - 1;
		for (u32 i = warp; i < peers; i += warps)
			if (lane == 0)
				store16(packet_place(a, epoch, r[i].to, a.rank), static_cast<u64>(r[i].send_bytes), static_cast<u64>(flag) << 32);
		u32 tasks = peers * most(true);
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

// The threads of each block copy pieces of what stays on this rank, dealt out to the blocks. False when there is none left.
template <u32 T, typename Steps> __device__ __forceinline__ bool copy_piece(const sw_exchange_args &a, Steps r, u32 k, u32 tid)
{
	constexpr i64 piece = 16 * 8 * T * 2; // two full batches of stream
	i64 n = r.own_bytes(), at = (gridDim.x - 1 - blockIdx.x + static_cast<i64>(k) * gridDim.x) * piece;
	u64 from = a.src + r.own_src(), to = a.dst + r.own_dst();
	if (at >= n || from == to)
		return false;
	copy_apart<T>(to + at, from + at, min(piece, n - at), tid);
	return true;
}

template <u32 T, typename Steps> __device__ __forceinline__ void copy_own(const sw_exchange_args &a, Steps r, u32 tid)
{
	for (u32 k = 0; copy_piece<T>(a, r, k, tid); k++)
		;
}

// ---- messages with credit ------------------------------------------------------------------------------------------

// How a message is striped over lanes; both ends compute the same.
struct stripes {
	i64 bytes, per;
	u32 count;

	__device__ __forceinline__ stripes(const sw_exchange_args &a, i64 n) : bytes(n)
	{
		i64 want = (n + SW_LANE_MIN_BYTES - 1) / SW_LANE_MIN_BYTES;
		count = want < a.lanes ? static_cast<u32>(want) : a.lanes;
		per = ((n + count - 1) / count + 127) / 128 * 128;
	}
	__device__ __forceinline__ i64 begin(u32 lane) const { return lane * per < bytes ? lane * per : bytes; }
	__device__ __forceinline__ i64 length(u32 lane) const { return begin(lane + 1) - begin(lane); }
};

__device__ __forceinline__ u64 signal_line(const sw_exchange_args &a, u64 epoch, u32 dst, u32 src, u32 lane)
{
	return segment(a, dst) + a.signals + (((epoch & 1) * a.size + src) * a.lanes + lane) * SW_LINE_BYTES;
}

// The second half of a signal line: how many chunks have left, without a promise that they are there. It paces the ring.
__device__ __forceinline__ u64 pace_word(const sw_exchange_args &a, u64 epoch, u32 dst, u32 src, u32 lane)
{
	return signal_line(a, epoch, dst, src, lane) + 16;
}

__device__ __forceinline__ u64 lane_credit(const sw_exchange_args &a, u32 src, u32 dst, u32 lane)
{
	return segment(a, src) + a.lane_credits + (static_cast<u64>(dst) * a.lanes + lane) * SW_LINE_BYTES;
}

__device__ __forceinline__ u64 slot_place(const sw_exchange_args &a, u32 dst, u32 src, u32 lane, u64 chunk)
{
	return segment(a, dst) + a.slots + ((static_cast<u64>(src) * a.lanes + lane) * a.slot_count + chunk % a.slot_count) * a.slot_bytes;
}

constexpr u32 recv_part = 1; // named barrier

__device__ __forceinline__ u32 chunk_count(const sw_exchange_args &a, i64 length)
{
	return length == 0 ? 1 : static_cast<u32>((length + a.slot_bytes - 1) / a.slot_bytes);
}

// The chunks that a block sends, in order. Its warps and its pilot each walk along them.
struct cursor {
	const sw_exchange_args &a;
	gathered r;
	u32 step = 0, lane = blockIdx.x; // of the message
	u32 peer = 0;
	u32 chunk = 0, chunks = 0; // from 1
	u32 count = 0;		   // chunks before this one
	i64 bytes = 0, begin = 0, length = 0;
	u64 src = 0;
	u32 turn;

	__device__ __forceinline__ cursor(const sw_exchange_args &a, gathered r)
	    : a(a), r(r), turn((a.flags & SW_MESH) != 0 ? blockIdx.x % (a.size - 1) : 0)
	{
	}

	// The place in a.order of a step of this block.
	__device__ __forceinline__ u32 turned(u32 s) const { return s + turn < a.size - 1 ? s + turn : s + turn - (a.size - 1); }

	__device__ __forceinline__ bool next()
	{
		if (chunk != 0) {
			count++;
			if (chunk < chunks) {
				chunk++;
				return true;
			}
			lane += gridDim.x;
		}
		for (; step < a.size - 1; step++, lane = blockIdx.x) {
			const sw_step &m = r[turned(step)];
			peer = m.to;
			bytes = m.send_bytes;
			if (bytes <= a.packet_bytes)
				continue;
			stripes s(a, bytes);
			if (lane >= s.count)
				continue;
			begin = s.begin(lane);
			src = a.src + m.send_offset + begin;
			length = s.length(lane);
			chunks = chunk_count(a, length);
			chunk = 1;
			return true;
		}
		return false;
	}
};

// What the warps of a block tell each other.
struct board {
	u64 place[SW_MAX_RANKS];	    // by step: where the receiver wants the message
	u32 progress[SW_SEND_THREADS / 32 + 1]; // chunks that each sending warp, and the bulk copy engine, has written
	u32 allowed;			    // chunks that may be written, or call_over
};

constexpr u32 call_over = ~0u;

constexpr u64 skip_message = SW_NOWHERE - 1; // a place: the receiver expects another size, send nothing

__device__ __forceinline__ u64 destination(const sw_exchange_args &a, const cursor &c, u64 place)
{
	if (place == SW_NOWHERE)
		return slot_place(a, c.peer, a.rank, c.lane, c.chunk);
	return segment(a, c.peer) + place + c.begin + (c.chunk - 1) * a.slot_bytes;
}

// Whether the bulk copy engine moves a chunk; sending warps and engine agree on it.
__device__ __forceinline__ bool by_bulk(const sw_exchange_args &a, u64 dst, u64 src, i64 n)
{
	return (a.flags & SW_BULK) != 0 && ((dst | src) & 15) == 0 && n >= 16;
}

#if __CUDA_ARCH__ >= 900
// One thread that drives the bulk copy engine: tiles go from the source to shared memory and on to the peer. Loads run ahead
// across chunks and messages, stores follow when the pilot has allowed the chunk, and chunks are reported when their stores
// have completed, with later ones under way.
struct bulk_engine {
	const sw_exchange_args &a;
	gathered r;
	board &b;
	u32 tiles, full;   // shared addresses of the tiles and of their barriers
	u32 *chunk_behind; // shared: by tile, which chunk comes when it is done

	// The tiles of all chunks whose source is aligned.
	struct walk {
		cursor c;
		i64 at = 0, n = 0; // in the chunk
		bool alive = true;

		__device__ __forceinline__ walk(const sw_exchange_args &a, gathered r) : c(a, r) { chunk(); }
		__device__ __forceinline__ void chunk()
		{
			at = 0;
			while ((alive = c.next())) {
				n = min(c.length - (c.chunk - 1) * c.a.slot_bytes, c.a.slot_bytes) & ~static_cast<i64>(15);
				if (n > 0 && (source() & 15) == 0)
					return;
			}
		}
		__device__ __forceinline__ u64 source() const { return c.src + (c.chunk - 1) * c.a.slot_bytes + at; }
		__device__ __forceinline__ u32 bytes() const { return static_cast<u32>(min(n - at, static_cast<i64>(SW_BULK_BYTES))); }
		__device__ __forceinline__ void next()
		{
			at += SW_BULK_BYTES;
			if (at >= n)
				chunk();
		}
	};

	__device__ __forceinline__ void load(walk &w, u32 t)
	{
		u32 stage = t % SW_BULK_STAGES, n = w.bytes();
		asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * stage), "r"(n) : "memory");
		asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tiles + stage * SW_BULK_BYTES),
			     "l"(w.source()), "r"(n), "r"(full + 8 * stage)
			     : "memory");
		w.next();
	}

	__device__ __forceinline__ void arrived(u32 t)
	{
		u32 stage = t % SW_BULK_STAGES, phase = t / SW_BULK_STAGES & 1, done = 0;
		while (!done)
			asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
				     : "=r"(done)
				     : "r"(full + 8 * stage), "r"(phase)
				     : "memory");
	}

	__device__ __forceinline__ void run()
	{
		u32 *progress = &b.progress[SW_SEND_THREADS / 32];
		walk in(a, r), out(a, r);
		u32 loaded = 0, stored = 0, allowed = 0;
		write_shared(progress, out.c.count);
		while (loaded < SW_BULK_AHEAD && in.alive)
			load(in, loaded++);
		u64 place = 0;
		bool go = false;
		while (out.alive) {
			const cursor &c = out.c;
			if (out.at == 0) {
				if (allowed <= c.count)
					allowed = read_shared(&b.allowed);
				if (allowed <= c.count) {
					// The pilot may be waiting for a peer that waits for what is under way here.
					asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
					write_shared(progress, c.count);
					while (allowed <= c.count)
						allowed = read_shared(&b.allowed);
				}
				if (allowed == call_over)
					break;
				place = read_shared(&b.place[c.step]);
				go = place != skip_message && by_bulk(a, destination(a, c, place), out.source(), out.n);
			}
			arrived(stored);
			u64 dst = destination(a, c, place) + out.at;
			u32 n = out.bytes();
			if (go)
				asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
					     "r"(tiles + stored % SW_BULK_STAGES * SW_BULK_BYTES), "r"(n)
					     : "memory");
			asm volatile("cp.async.bulk.commit_group;" ::: "memory");
			if (go && out.at + n == out.n) { // up to 15 bytes are left of the chunk
				i64 rest = min(c.length - (c.chunk - 1) * a.slot_bytes, a.slot_bytes) - out.n;
				for (i64 i = 0; i < rest; i++)
					store_byte(dst + n + i, load_byte(out.source() + n + i));
			}
			out.next();
			chunk_behind[stored % (SW_BULK_STORES + 1)] = c.count;
			stored++;
			if (stored > SW_BULK_STORES) {
				asm volatile("cp.async.bulk.wait_group %0;" ::"n"(static_cast<int>(SW_BULK_STORES)) : "memory");
				write_shared(progress, chunk_behind[(stored - SW_BULK_STORES - 1) % (SW_BULK_STORES + 1)]);
			}
			if (in.alive) // its tile's last store is among those that have completed
				load(in, loaded++);
		}
		asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
		for (; stored < loaded; stored++)
			arrived(stored); // nothing may be under way to shared memory when the block ends
		write_shared(progress, call_over);
	}
};
#endif

// A sending warp: writes its share of every chunk as soon as it is allowed. It never waits for other warps, nor for its
// own stores: the pilot does.
__device__ __forceinline__ void send_chunks(const sw_exchange_args &a, gathered r, board &b)
{
	u32 tid = threadIdx.x, lane = tid & 31;
	cursor c(a, r);
	u32 allowed = 0;
	while (c.next()) {
		while (allowed <= c.count) {
			if ((a.flags & SW_BULK) != 0)
				__nanosleep(200); // most likely there is nothing to do
			if (lane == 0)
				allowed = read_shared(&b.allowed);
			allowed = __shfl_sync(~0u, allowed, 0);
		}
		if (allowed == call_over)
			return;
		u64 place = 0;
		if (lane == 0)
			place = read_shared(&b.place[c.step]);
		place = __shfl_sync(~0u, place, 0);
		if (place != skip_message) {
			i64 off = (c.chunk - 1) * a.slot_bytes;
			i64 n = min(c.length - off, a.slot_bytes);
			u64 dst = destination(a, c, place);
			if (!by_bulk(a, dst, c.src + off, n))
				copy<SW_SEND_THREADS>(dst, c.src + off, n, tid);
		}
		__syncwarp();
		if (lane == 0)
			write_shared(&b.progress[tid / 32], c.count + 1);
	}
}

// The warp that watches: takes credits in, lets chunks go, signals those that all sending warps have written.
struct pilot {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;
	board &b;
	u32 lane;
	u32 have[2]; // bit s: the credit of step s has come
	u64 granted; // of the lane that is being sent through staging
	u32 granted_step, granted_lane;

	__device__ __forceinline__ bool take_credits(const cursor &c)
	{
		u32 fresh_any = 0;
#pragma unroll
		for (u32 u = 0; u < 2; u++) {
			u32 s = lane + 32 * u;
			bool need = s < a.size - 1 && (have[u] >> lane & 1) == 0;
			if (__any_sync(~0u, need) == 0)
				continue;
			bool here = false;
			if (need) {
				u32 p = r[c.turned(s)].to;
				i64 n = r[c.turned(s)].send_bytes;
				here = n <= a.packet_bytes;
				if (!here) {
					u64 line = segment(a, a.rank) + a.credits + p * SW_LINE_BYTES;
					pair64 x = load16(line), y = load16(line + 16);
					here = x.a == seq(epoch, 0) && y.a == seq(epoch, 0);
					if (here) {
						bool same = y.b == static_cast<u64>(n);
						write_shared(&b.place[s], same ? x.b : skip_message);
						if (!same)
							give_up(a, SW_FAULT_MISMATCH, p, epoch, true, static_cast<u64>(n), y.b);
					}
				}
			}
			u32 fresh = __ballot_sync(~0u, here);
			have[u] |= fresh;
			fresh_any |= fresh;
		}
		return fresh_any != 0;
	}

	// A word that a peer writes, the same for the whole warp.
	__device__ __forceinline__ u64 look(u64 line) const
	{
		u64 v = 0;
		if (lane == 0)
			v = load_relaxed(line);
		return __shfl_sync(~0u, v, 0);
	}

	// The receiver's slot for this chunk is free.
	__device__ __forceinline__ bool room(const cursor &c)
	{
		if (c.chunk <= a.slot_count)
			return true;
		u64 place = 0;
		if (lane == 0)
			place = read_shared(&b.place[c.step]);
		if (__shfl_sync(~0u, place, 0) != SW_NOWHERE)
			return true;
		u64 want = seq(epoch, c.chunk - a.slot_count);
		if (granted >= want && granted_step == c.step && granted_lane == c.lane)
			return true;
		granted = look(lane_credit(a, a.rank, c.peer, c.lane));
		granted_step = c.step, granted_lane = c.lane;
		return granted >= want;
	}

	// The message of the step before has arrived, but for the slack.
	__device__ __forceinline__ bool in_step(const cursor &c)
	{
		if ((a.flags & SW_PACED) == 0 || c.step == 0 || c.chunk != 1)
			return true;
		u32 q = r[c.turned(c.step - 1)].from;
		i64 n = r[c.turned(c.step - 1)].recv_bytes;
		if (n <= a.packet_bytes)
			return true;
		stripes s(a, n);
		if (c.lane >= s.count)
			return true;
		u32 chunks = chunk_count(a, s.length(c.lane));
		if (chunks <= a.slack)
			return true;
		u64 line = signal_line(a, epoch, a.rank, q, c.lane);
		return __any_sync(~0u, lane < 2 && load_relaxed(line + 16 * lane) >= seq(epoch, chunks - a.slack)) != 0;
	}

	// Lane 0: chunk of a message is on its way, or there.
	__device__ __forceinline__ void report(const cursor &c, bool &fenced)
	{
		if (read_shared(&b.place[c.step]) == SW_NOWHERE) {
			if (!fenced)
				fence_system(); // X4: what the warps wrote comes before the signal
			fenced = true;
			store16(signal_line(a, epoch, c.peer, a.rank, c.lane), c.chunk == c.chunks ? last_seq(epoch) : seq(epoch, c.chunk), static_cast<u64>(c.bytes));
		} else if ((a.flags & SW_PACED) != 0) {
			store16(pace_word(a, epoch, c.peer, a.rank, c.lane), seq(epoch, c.chunk), 0);
		}
	}

	// All messages that were written in place are there: one fence for all of them, because a fence costs as much as a step.
	__device__ __forceinline__ void finish(const cursor &c)
	{
		fence_system();
		for (u32 s = lane; s < a.size - 1; s += 32) {
			const sw_step &m = r[c.turned(s)];
			if (m.send_bytes <= a.packet_bytes || read_shared(&b.place[s]) == SW_NOWHERE)
				continue;
			u32 count = stripes(a, m.send_bytes).count;
			for (u32 l = blockIdx.x; l < count; l += gridDim.x)
				store16(signal_line(a, epoch, m.to, a.rank, l), last_seq(epoch), static_cast<u64>(m.send_bytes));
		}
	}

	__device__ __forceinline__ void run()
	{
		cursor give(a, r), tell(a, r);
		bool giving = give.next(), telling = tell.next();
		wait w;
		while (telling) {
			u32 least = lane < SW_SEND_THREADS / 32 + 1 ? read_shared(&b.progress[lane]) : ~0u;
			least = __reduce_min_sync(~0u, least);
			bool moved = least > tell.count;
			bool fenced = false;
			for (; telling && tell.count < least; telling = tell.next())
				if (lane == 0)
					report(tell, fenced);
			__syncwarp();
			if (!telling)
				break;
			if (giving) {
				moved |= take_credits(give);
				__syncwarp();
				u32 before = give.count;
				bool any = false;
				while (giving && (have[give.step / 32] >> (give.step & 31) & 1) != 0 && room(give) && in_step(give)) {
					before = give.count + 1;
					any = true;
					giving = give.next();
				}
				if (any && lane == 0)
					write_shared(&b.allowed, before);
				moved |= any;
			}
			if (moved) {
				w = wait();
				continue;
			}
			u32 go = 1;
			if (lane == 0) {
				go = w.slow(a);
				if (!go)
					give_up(a, w.kind, giving ? give.peer : tell.peer, epoch, true);
			}
			if (__shfl_sync(~0u, go, 0) == 0) {
				if (lane == 0)
					write_shared(&b.allowed, call_over);
				return;
			}
		}
		finish(tell);
	}
};

// The receiving half of a block.
struct receiver {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;
	u32 tid, threads;
	u64 *word; // shared

	// Tells every peer with a large message where it may write.
	__device__ __forceinline__ void grant()
	{
		bool in_place = a.dst_offset >= 0 && (a.flags & SW_STAGED) == 0;
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

	// True when the size of the arriving message is right.
	__device__ __forceinline__ bool right_size(u64 line, u32 p, i64 n)
	{
		u64 total = load16(line).b;
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

	// Messages that peers write in place: every thread waits for lines of its own.
	__device__ __forceinline__ void await_in_place()
	{
		u32 peers = a.size - 1, mine = (a.lanes - blockIdx.x + gridDim.x - 1) / gridDim.x;
		for (u32 i = tid; i < peers * mine; i += threads) {
			u32 p = r[i % peers].from, lane = blockIdx.x + i / peers * gridDim.x;
			i64 n = r[i % peers].recv_bytes;
			if (n <= a.packet_bytes || lane >= stripes(a, n).count)
				continue;
			u64 line = signal_line(a, epoch, a.rank, p, lane);
			wait w;
			bool here = true;
			while (load_relaxed(line) < last_seq(epoch)) { // nobody reads the bytes before the kernel ends
				if (!w.slow(a)) {
					give_up(a, w.kind, p, epoch, false);
					return;
				}
				if ((w.polls & 255) == 0 && other_size(p, n)) {
					here = false;
					break;
				}
			}
			if (here)
				right_size(line, p, n);
		}
	}

	// Messages that arrive in staging: the part polls all its lanes and copies out what is there.
	__device__ __forceinline__ void take_staged(u32 *next)
	{
		u32 peers = a.size - 1, mine = (a.lanes - blockIdx.x + gridDim.x - 1) / gridDim.x, items = peers * mine;
		// next[i]: chunk that item i waits for, 0 when it is done
		u32 open = 0;
		for (u32 i = 0; i < items; i++) {
			u32 p = r[i % peers].from, lane = blockIdx.x + i / peers * gridDim.x;
			i64 n = r[i % peers].recv_bytes;
			bool wanted = n > a.packet_bytes && lane < stripes(a, n).count;
			open += wanted;
			if (tid == 0)
				next[i] = wanted;
		}
		wait w;
		u32 pieces = 0;
		while (open > 0) {
			if (tid == 0)
				word[0] = ~0ull;
			part_sync(recv_part, threads);
			for (u32 i = tid; i < items; i += threads) {
				u32 k = next[i];
				if (k == 0)
					continue;
				u64 s = load_relaxed(signal_line(a, epoch, a.rank, r[i % peers].from, blockIdx.x + i / peers * gridDim.x));
				if (s >= seq(epoch, k))
					atomicMin(reinterpret_cast<unsigned long long *>(word), static_cast<unsigned long long>(i)); // the first in order
			}
			part_sync(recv_part, threads);
			u64 found = word[0];
			if (found == ~0ull) {
				if (copy_piece<SW_RECV_THREADS>(a, r, pieces, tid)) { // something to do meanwhile
					pieces++;
					part_sync(recv_part, threads);
					continue;
				}
				if (tid == 0) {
					u64 go = w.slow(a);
					if (!go || (w.polls & 255) == 0)
						for (u32 i = 0; i < items; i++)
							if (next[i] != 0) {
								u32 p = r[i % peers].from;
								if (!go)
									give_up(a, w.kind, p, epoch, false);
								else if (other_size(p, r[i % peers].recv_bytes))
									go = 0;
							}
					word[1] = go;
				}
				part_sync(recv_part, threads);
				if (word[1] == 0)
					return;
				continue;
			}
			w.since = 0;
			u32 i = static_cast<u32>(found);
			u32 p = r[i % peers].from, lane = blockIdx.x + i / peers * gridDim.x;
			i64 n = r[i % peers].recv_bytes;
			stripes st(a, n);
			i64 len = st.length(lane);
			u32 chunks = chunk_count(a, len), k = next[i];
			if (tid == 0) // acquires what the signal was released after
				word[1] = load_acquire(signal_line(a, epoch, a.rank, p, lane)) >= seq(epoch, k) && right_size(signal_line(a, epoch, a.rank, p, lane), p, n);
			part_sync(recv_part, threads);
			if (word[1] == 0) {
				open--;
				if (tid == 0)
					next[i] = 0;
				continue;
			}
			i64 off = (k - 1) * a.slot_bytes;
			i64 m = len - off < a.slot_bytes ? len - off : a.slot_bytes;
			copy_apart<SW_RECV_THREADS>(a.dst + r[i % peers].recv_offset + st.begin(lane) + off, slot_place(a, a.rank, p, lane, k), m, tid);
			part_sync(recv_part, threads);
			if (tid == 0) {
				if (k + a.slot_count <= chunks)
					store16(lane_credit(a, p, a.rank, lane), seq(epoch, k), 0);
				next[i] = k == chunks ? 0 : k + 1;
			}
			open -= k == chunks;
		}
		while (copy_piece<SW_RECV_THREADS>(a, r, pieces, tid))
			pieces++;
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
	if (epoch == 0)
		return;
	if (a.size > 1)
		x.send(epoch);
	__syncthreads(); // every warp has read the number
	if (threadIdx.x == blockDim.x - 1)
		number.advance(a);
	release_stream();
	copy_own<SW_PACKET_THREADS>(a, r, SW_PACKET_THREADS - 1 - threadIdx.x); // first by the warps that have sent least
	if (a.size > 1)
		x.receive(epoch);
}

extern "C" __global__ void __launch_bounds__(SW_SEND_THREADS + SW_PILOT_THREADS + SW_BULK_THREADS + SW_RECV_THREADS, 1)
	alltoallv(const __grid_constant__ sw_exchange_args a)
{
	using namespace sw;
	__shared__ gathered::store steps;
	__shared__ board b;
	__shared__ u64 word[2];
	__shared__ u32 next[1024];
	gathered::fill(steps, a);
	await_stream();
	call_number number;
	number.load(a);
	if (threadIdx.x <= SW_SEND_THREADS / 32)
		b.progress[threadIdx.x] = threadIdx.x < SW_SEND_THREADS / 32 || (a.flags & SW_BULK) != 0 ? 0 : call_over;
	if (threadIdx.x == 0)
		b.allowed = 0;
#if __CUDA_ARCH__ >= 900
	extern __shared__ __align__(128) u8 tiles[];
	__shared__ __align__(8) u64 full[SW_BULK_STAGES];
	__shared__ u32 chunk_behind[SW_BULK_STORES + 1];
	u32 full_at = static_cast<u32>(__cvta_generic_to_shared(full));
	if ((a.flags & SW_BULK) != 0 && threadIdx.x == 0) {
		for (u32 i = 0; i < SW_BULK_STAGES; i++)
			asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full_at + 8 * i) : "memory");
		asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
		asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
	}
#endif
	gathered r{steps};
	__syncthreads();
	u64 epoch = number.epoch();
	if (epoch == 0)
		return;
	u32 lane = threadIdx.x & 31;
	if (a.size == 1) {
		copy_own<SW_SEND_THREADS + SW_PILOT_THREADS + SW_BULK_THREADS + SW_RECV_THREADS>(a, r, threadIdx.x);
		if (threadIdx.x == 0)
			number.advance(a);
		return;
	}
	if (threadIdx.x < SW_SEND_THREADS) {
		packets<gathered> x(a, r, threadIdx.x / 32 * gridDim.x + blockIdx.x, gridDim.x * (SW_SEND_THREADS / 32), lane);
		x.send(epoch);
		send_chunks(a, r, b);
		return;
	}
	if (threadIdx.x < SW_SEND_THREADS + SW_PILOT_THREADS) {
		pilot w{a, r, epoch, b, lane, {0, 0}, 0, 0, 0};
		w.run();
		return;
	}
	if (threadIdx.x < SW_SEND_THREADS + SW_PILOT_THREADS + SW_BULK_THREADS) {
#if __CUDA_ARCH__ >= 900
		if ((a.flags & SW_BULK) != 0 && lane == 0) {
			bulk_engine e{a, r, b, static_cast<u32>(__cvta_generic_to_shared(tiles)), full_at, chunk_behind};
			e.run();
		}
#endif
		return;
	}
	receiver in{a, r, epoch, threadIdx.x - SW_SEND_THREADS - SW_PILOT_THREADS - SW_BULK_THREADS, SW_RECV_THREADS, word};
	u32 warps = gridDim.x * (SW_RECV_THREADS / 32), warp = in.tid / 32 * gridDim.x + blockIdx.x;
	if (blockIdx.x == 0)
		in.grant();
	if (in.tid == SW_RECV_THREADS - 1)
		number.advance(a);
	packets<gathered> x(a, r, warp, warps, lane);
	if (a.dst_offset >= 0 && (a.flags & SW_STAGED) == 0) {
		copy_own<SW_RECV_THREADS>(a, r, in.tid);
		in.await_in_place();
	} else {
		in.take_staged(next);
	}
	release_stream();
	x.receive(epoch);
}

// Around copies by the copy engines: the first kernel grants and waits for credits, the copies follow in the stream, the second
// kernel signals and waits for signals. Both have one block.
extern "C" __global__ void __launch_bounds__(SW_COPY_THREADS, 1) alltoallv_open(const __grid_constant__ sw_copy_args c)
{
	using namespace sw;
	const sw_exchange_args &a = c.exchange;
	__shared__ gathered::store steps;
	__shared__ u64 word[2];
	gathered::fill(steps, a);
	await_stream();
	call_number number;
	number.load(a);
	gathered r{steps};
	__syncthreads();
	u64 epoch = number.epoch();
	if (epoch == 0)
		return;
	if (threadIdx.x == 0)
		number.advance(a);
	if (a.size == 1)
		return;
	receiver in{a, r, epoch, threadIdx.x, SW_COPY_THREADS, word};
	in.grant();
	packets<gathered> x(a, r, threadIdx.x / 32, SW_COPY_THREADS / 32, threadIdx.x & 31);
	x.send(epoch);
	for (u32 i = threadIdx.x; i < a.size - 1; i += SW_COPY_THREADS) {
		u32 p = r[i].to;
		i64 n = r[i].send_bytes;
		if (n <= a.packet_bytes)
			continue;
		u64 line = segment(a, a.rank) + a.credits + p * SW_LINE_BYTES;
		wait w;
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
	__shared__ gathered::store steps;
	__shared__ u64 word[2];
	gathered::fill(steps, a);
	await_stream();
	call_number number;
	number.load(a);
	gathered r{steps};
	__syncthreads();
	if (number.epoch() == 0 || a.size == 1)
		return;
	u64 epoch = number.epoch() - 1; // alltoallv_open has advanced it
	for (u32 i = threadIdx.x; i < (a.size - 1) * a.lanes; i += SW_COPY_THREADS) {
		u32 p = r[i / a.lanes].to, lane = i % a.lanes;
		i64 n = r[i / a.lanes].send_bytes;
		if (n > a.packet_bytes && lane < stripes(a, n).count) {
			fence_system();
			store16(signal_line(a, epoch, p, a.rank, lane), last_seq(epoch), static_cast<u64>(n));
		}
	}
	receiver in{a, r, epoch, threadIdx.x, SW_COPY_THREADS, word};
	in.await_in_place();
	packets<gathered> x(a, r, threadIdx.x / 32, SW_COPY_THREADS / 32, threadIdx.x & 31);
	x.receive(epoch);
}

// The end of a message whose beginning a copy engine has moved, while that engine prepares its next copy.
extern "C" __global__ void __launch_bounds__(SW_SEND_THREADS, 1) alltoallv_move(const __grid_constant__ sw_move_args m)
{
	using namespace sw;
	constexpr i64 piece = 65536;
	for (i64 at = blockIdx.x * piece; at < m.bytes; at += gridDim.x * piece)
		copy<SW_SEND_THREADS>(m.dst + at, m.src + at, min(piece, m.bytes - at), threadIdx.x);
}
