// A messenger is the blocks of a launch that carry this rank's messages with one other rank in one direction. The first
// of them, the leader, decides; the others follow it through what is large. Where a receive takes messages of any rank,
// one messenger has all receives of the launch, and turns to the rank whose message is next.
//
// A message has a number, which its sender counts for the rank that gets it, and a box: the number modulo the boxes.
// The sender writes the box's header and payload, and its state where the message is withdrawn. The receiver writes the
// answer. Words lie in the segment of the rank that reads them, and the numbers in them only grow.
#pragma once

#include "../../../internal/cuda/layout/messages.h"
#include "../packet.cuh"
#include "../tiles.cuh"

namespace sw {

constexpr u32 message_warps = SW_MESSAGE_THREADS / 32;
// Of a block that has all messages of its launch, none of which is large, or of one that may lead others.
template <bool few> constexpr u32 leader_threads = few ? SW_FEW_MESSAGE_THREADS : SW_MESSAGE_THREADS;

struct messenger {
	const sw_messages_args &a;
	sw_world world; // whose faults are those with the peer
	u64 here, there;
	u32 peer;
	u32 own;           // whose items are the messenger's: the peer's, or this rank's of one that turns
	u32 first, count;  // entries
	u32 block, blocks; // this one, and how many there are
	bool receives, turns;

	__device__ __forceinline__ messenger(const sw_messages_args &args) : a(args), world(args.world)
	{
		u32 g = 0;
		while (g + 1 < a.group_count && a.groups[g + 1].block <= blockIdx.x)
			g++;
		bool last = g + 1 == a.group_count;
		receives = a.groups[g].receive != 0, turns = a.groups[g].peer == SW_ANY_RANK;
		own = turns ? world.rank : a.groups[g].peer;
		first = a.groups[g].first, count = (last ? a.count : a.groups[g + 1].first) - first;
		block = blockIdx.x - a.groups[g].block;
		blocks = (last ? gridDim.x : a.groups[g + 1].block) - a.groups[g].block;
		here = own_segment(world);
		turn_to(own);
	}

	__device__ __forceinline__ void turn_to(u32 rank)
	{
		peer = rank, there = segment(world, rank), world.control = control_of(rank);
	}
	// Of the faults with a rank, or of receives from any.
	__device__ __forceinline__ u64 control_of(u32 rank) const
	{
		return rank == SW_ANY_RANK ? a.block.anyone : a.block.control + rank * SW_CONTROL_ALIGN;
	}

	__device__ __forceinline__ const sw_message_entry &entry(u32 i) const { return a.entries[first + i]; }

	__device__ __forceinline__ u32 box_of(u64 number) const { return static_cast<u32>(number) & (a.boxes - 1); }
	// The place of a message's word in a table by rank and box.
	__device__ __forceinline__ u64 of_box(u64 table, u32 rank, u64 number, u64 bytes) const
	{
		return table + (rank * static_cast<u64>(a.boxes) + box_of(number)) * bytes;
	}
	// The place of a block's line in a table by rank and block.
	__device__ __forceinline__ u64 of_block(u64 table, u32 rank) const
	{
		return table + (rank * static_cast<u64>(a.blocks) + block) * SW_LINE_BYTES;
	}
	__device__ __forceinline__ u64 staging_of(u32 rank, u64 chunk) const
	{
		u64 slot = (rank * static_cast<u64>(a.blocks) + block) * SW_STAGING_SLOTS + chunk % SW_STAGING_SLOTS;
		return a.block.staging + slot * a.staging_bytes;
	}

	// The bytes of a message that a block has in staging at a time: a slot full, or less so that all blocks have
	// some.
	__device__ __forceinline__ i64 chunk_of(i64 bytes, u32 stripes) const
	{
		i64 share = (bytes + stripes - 1) / stripes;
		share = (share + tile_bytes - 1) / tile_bytes * tile_bytes;
		return share < a.staging_bytes ? share : a.staging_bytes;
	}

	__device__ __forceinline__ u64 counter(u64 which, u32 rank) const
	{
		return here + a.block.counters + rank * sizeof(sw_message_counters) + which;
	}
	__device__ __forceinline__ u64 counter(u64 which) const { return counter(which, peer); }
	__device__ __forceinline__ u64 items() const
	{
		return counter(offsetof(sw_message_counters, items) + (receives ? 8 : 0), own);
	}
	__device__ __forceinline__ u64 item() const
	{
		return here + a.block.items +
		       ((receives ? world.size : 0) + own) * static_cast<u64>(SW_MESSAGE_ITEM_BYTES);
	}
	__device__ __forceinline__ u64 done(u32 b) const
	{
		return here + a.block.done + (((receives ? world.size : 0) + own) * static_cast<u64>(a.blocks) + b) * 8;
	}
	// The word at which the peer looks before it blames this rank.
	__device__ __forceinline__ u64 moved() const
	{
		return here + a.block.control + world.rank * SW_CONTROL_ALIGN + offsetof(sw_control, moved);
	}

	// Leaves word of what has become of a message.
	__device__ __forceinline__ void fail(u32 kind, u64 number, u64 tag, u64 sent, u64 expected) const
	{
		give_up(world, kind, peer, number, !receives, sent, expected, tag, SW_MESSAGE_FAULT);
	}
};

// A deed is the next thing that the threads of a leader do.
enum class deed : u32 { end, write, push, read, pull, drain };

struct task {
	deed what;
	u32 entry;
	u64 number, claim, from;
	u32 stripes, peer;
	bool last; // the other blocks have nothing to do after it
};

constexpr u32 boxes_seen = 64; // of a sender's answers, in the beginning

// A leader's first thread shares the task with the others, and keeps the rest. All threads have read it together in the
// beginning, because a small message takes little more than the loads that wait for each other.
struct leader_board {
	task now;
	u64 numbers[SW_MOST_MESSAGES]; // by entry; 0 when nothing is to be done for it, or nothing yet
	u64 item;                      // the last that the other blocks were given
	bool alone;                    // the other blocks have left
	u64 answers[boxes_seen];       // of a sender, by box: the first word of the answer
	u64 low[SW_MAX_RANKS];         // of a receiver, by rank: it is through with all of its messages before it,
	u64 early[SW_MAX_RANKS];       // and with this number of those behind it
};

// ---- small messages, whose packets have the message's number for their flag --------------------------------------

template <bool few> __device__ __forceinline__ void write_small(const messenger &m, const task &t)
{
	const sw_message_entry &e = m.entry(t.entry);
	u64 place = m.there + m.of_box(m.a.block.payload, m.world.rank, t.number, m.a.payload_bytes);
	u32 flag = packet::flag(t.number), lane = threadIdx.x & 31;
	for (u32 group = threadIdx.x / 32; group < packet_groups(e.bytes); group += leader_threads<few> / 32) {
		part p(place, e.address, e.bytes, group, lane);
		quad q;
		if (p.whole)
			q.load(e.address + p.at, p.left);
		else
			q = load_odd(e.address + p.at, p.left);
#pragma unroll
		for (int k = 0; k < 4; k++)
			q.put(p.wire, k, flag);
	}
}

// The header has come, so the packets are on their way. False when this thread has given them up.
template <bool few> __device__ __forceinline__ bool read_small(const messenger &m, const task &t)
{
	const sw_message_entry &e = m.entry(t.entry);
	u64 place = m.here + m.of_box(m.a.block.payload, m.peer, t.number, m.a.payload_bytes);
	u32 flag = packet::flag(t.number), lane = threadIdx.x & 31;
	wait w;
	for (u32 group = threadIdx.x / 32; group < packet_groups(e.bytes); group += leader_threads<few> / 32) {
		part p(place, e.address, e.bytes, group, lane);
		quad q;
		for (int k = 0; k < 4; k++)
			while (!q.get(p.wire, k, flag))
				if (!w.slow(m.world)) {
					m.fail(w.kind, t.number, e.tag, e.bytes, 0);
					return false;
				}
		if (p.whole)
			q.store(e.address + p.at, p.left);
		else
			store_odd(q, e.address + p.at, p.left);
	}
	return true;
}

// ---- large messages, of which each block carries a stripe --------------------------------------------------------

// A large message as all blocks of a messenger see it.
struct haul {
	deed what;
	u64 address, from;
	i64 bytes;
	u64 claim;
	u32 stripes, peer;
	bool last;
};

// Waits with the whole block for a line to have a number.
__device__ __forceinline__ bool await_chunk(const messenger &m, const haul &h, u64 line, u64 number)
{
	bool late = false;
	if (threadIdx.x == 0) {
		wait w;
		while (!late && load_acquire_sys(line) < number)
			if (!w.slow(m.world)) {
				m.fail(w.kind, h.claim, 0, h.bytes, 1);
				late = true;
			}
	}
	return !__syncthreads_or(late);
}

// This block's stripe. Chunks of what the receiver cannot read go through staging, block by block: a block's slots are
// those of the block with its number at the peer. False when the block has given up.
__device__ __noinline__ bool carry(const messenger &m, const haul &h)
{
	u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	if (m.block >= h.stripes)
		return true;
	pace when;
	when.moved = m.moved();
	if (h.what == deed::pull) {
		move(h.address, h.from, h.bytes, warp * h.stripes + m.block, message_warps * h.stripes, lane, when);
		return true;
	}
	i64 chunk = m.chunk_of(h.bytes, h.stripes);
	u32 turns = static_cast<u32>((chunk / tile_bytes + message_warps - 1) / message_warps);
	if (h.what == deed::push) { // loads from a link keep to its rate by themselves
		u32 step = m.a.interval / (message_warps * h.stripes);
		when.interval = m.a.interval,
		when.due = static_cast<u32>(clock()) + (warp * h.stripes + m.block) * step;
	}
	for (u64 k = 0;; k++, when.due += turns * when.interval) {
		i64 at = static_cast<i64>(m.block + k * h.stripes) * chunk;
		if (at >= h.bytes)
			return true;
		i64 n = h.bytes - at < chunk ? h.bytes - at : chunk;
		if (h.what == deed::push) {
			u64 drained = m.here + m.of_block(m.a.block.drained, m.peer);
			if (k >= SW_STAGING_SLOTS &&
			    !await_chunk(m, h, drained, seq(h.claim, k + 1 - SW_STAGING_SLOTS)))
				return false;
			move(m.there + m.staging_of(m.world.rank, k), h.address + at, n, warp, message_warps, lane,
			     when);
			__syncthreads();
			if (threadIdx.x == 0) {
				fence_acq_rel_sys();
				store_relaxed_sys(m.there + m.of_block(m.a.block.filled, m.world.rank),
				                  seq(h.claim, k + 1));
			}
			continue;
		}
		if (!await_chunk(m, h, m.here + m.of_block(m.a.block.filled, m.peer), seq(h.claim, k + 1)))
			return false;
		move(h.address + at, m.here + m.staging_of(m.peer, k), n, warp, message_warps, lane, when);
		__syncthreads(); // what a thread has stored it has loaded
		if (threadIdx.x == 0)
			store_relaxed_sys(m.there + m.of_block(m.a.block.drained, m.world.rank), seq(h.claim, k + 1));
	}
}

// An item: what the other blocks of a messenger are to do, in packets that have its number for their flag, so that a
// block has all of it with the first look that finds it.
__device__ __forceinline__ void put_item(u64 at, u64 number, const haul &h)
{
	u32 flag = packet::flag(number), order = static_cast<u32>(h.what) | (h.last ? 8 : 0) | h.stripes << 4;
	u64 bytes = static_cast<u64>(h.bytes);
	packet::put(at, flag, h.address, order);
	packet::put(at + 16, flag, h.from, static_cast<u32>(bytes));
	packet::put(at + 32, flag, h.claim, static_cast<u32>(bytes >> 32) | h.peer << 16);
}

// True when it is there. A block that has it sees all that the leader has seen before.
__device__ __forceinline__ bool get_item(u64 at, u64 number, haul &h)
{
	u32 flag = packet::flag(number);
	packet p = packet::get(at), q = packet::get(at + 16), r{load16_acquire_sys(at + 32)};
	if (!p.has(flag) || !q.has(flag) || !r.has(flag))
		return false;
	h.what = static_cast<deed>(p.word(2) & 7), h.last = (p.word(2) & 8) != 0, h.stripes = p.word(2) >> 4;
	h.address = p.low(), h.from = q.low(), h.claim = r.low(), h.peer = r.word(2) >> 16;
	h.bytes = static_cast<i64>(static_cast<u64>(r.word(2) & 0xffff) << 32 | q.word(2));
	return true;
}

// The leader's first thread gives the others something to do. They have done what they were given before. Those blocks
// that staging is laid out for, but not launched, have done all.
__device__ __forceinline__ void give(const messenger &m, leader_board &b, const haul &h)
{
	u64 number = ++b.item;
	fence_acq_rel_sys();
	put_item(m.item(), number, h);
	store_relaxed_sys(m.items(), number);
	if (!h.last)
		return;
	b.alone = true;
	for (u32 k = m.blocks; k < m.a.blocks; k++)
		store_relaxed_sys(m.done(k), number << 1);
}

// All threads of the leader. True when all blocks have carried their stripes. Each block is a thread's to wait for: one
// look after another, by one thread, takes 20 us for 32 blocks.
__device__ __forceinline__ bool carry_together(const messenger &m, leader_board &b, const haul &h)
{
	if (threadIdx.x == 0 && m.blocks > 1)
		give(m, b, h);
	bool good = carry(m, h);
	__syncthreads();
	u64 item = b.item;
	for (u32 k = threadIdx.x; k < m.blocks; k += SW_MESSAGE_THREADS) {
		if (k == 0)
			continue;
		u64 v;
		while ((v = load_acquire_sys(m.done(k))) >> 1 < item) // its own waits are bounded
			__nanosleep(20);
		good = good && (v & 1) == 0;
	}
	return !__syncthreads_or(!good);
}

// The leader's first thread lets the other blocks go, if they have not left.
__device__ __forceinline__ void dismiss(const messenger &m, leader_board &b)
{
	if (m.blocks > 1 && !b.alone)
		give(m, b, {deed::end, 0, 0, 0, 0, 0, m.peer, true});
}

// A block that is not the leader.
__device__ __forceinline__ void follow(messenger &m)
{
	SW_SHARED(haul, h);
	u64 seen = load_relaxed_sys(m.done(m.block)) >> 1;
	for (;;) {
		seen++;
		if (threadIdx.x == 0)
			while (!get_item(m.item(), seen, h)) // the leader's waits are bounded
				__nanosleep(20);
		__syncthreads();
		haul now = h;
		if (m.turns)
			m.turn_to(now.peer);
		bool good = now.what == deed::end || carry(m, now);
		__syncthreads(); // what a thread has stored it has loaded
		if (threadIdx.x == 0)
			store_relaxed_sys(m.done(m.block), seen << 1 | (good ? 0 : 1));
		if (now.last)
			return;
	}
}

} // namespace sw
