// The board of a block, by which its warps tell one another how far they are: one table in shared memory, worked out by
// all threads while the kernel before still runs.
//
// The halves of a block (sending.cuh, receiving.cuh) read what peers have said from it, the watching warps
// (watching.cuh) write that. Touches shared memory only.
#pragma once

#include "stripes.cuh"

namespace sw {

constexpr u32 send_warps = SW_SEND_THREADS / 32, recv_warps = SW_RECV_THREADS / 32;
constexpr u32 send_part = 1; // named barrier
constexpr u32 chunks_ahead = 32;
constexpr u32 tellers = 2; // warps that signal chunks in a block that only sends; each has its word
constexpr u64 skip_message =
    SW_NOWHERE - 1; // a place: the receiver expects another size or has refused its splits, send nothing
constexpr u32 all_chunks = (1u << chunk_bits) - 1; // of an item that has arrived: last_seq
constexpr u32 no_chunks = ~0u;                     // of an item that will not: its sender has another size in mind

// A block's share of one stripe of a message that it sends, and of one that it receives. They are worked out before the
// call begins, because one warp takes long for that.
struct stripe_out {
	u64 src, to;         // of the message; in place, it goes to `to` plus the place that the receiver tells
	u64 slots;           // the receiver's staging
	u64 line;            // signal_line
	u64 room;            // stripe_credit
	i64 all;             // bytes of the message
	i64 at, bytes;       // the stripe itself, where it goes through staging
	u32 stripe, stripes; // in place, the stripe's tiles are those of the message with the same remainder
	u32 step, chunks;    // chunks is 0 when the stripe is not used
};

struct stripe_in {
	u64 to, slots, line, room;
	i64 bytes;
	u32 step, chunks;
};

static_assert(sizeof(stripe_out) + sizeof(stripe_in) == SW_ITEM_BYTES);

// Where some blocks send and others copy out of staging, there are as many of each, and they count from 0 alike.
__device__ __forceinline__ u32 alike(const sw_exchange_args &a) { return a.senders != 0 ? a.senders : gridDim.x; }
__device__ __forceinline__ u32 among_alike(const sw_exchange_args &a)
{
	return blockIdx.x < alike(a) ? blockIdx.x : blockIdx.x - alike(a);
}

// Item i of a block is stripe block+i/peers*blocks of the message of step i%peers.
struct items {
	u32 peers, mine, count;

	__device__ __forceinline__ items(const sw_exchange_args &a)
	    : peers(a.world.size - 1), mine((a.stripes - among_alike(a) + alike(a) - 1) / alike(a)), count(peers * mine)
	{
	}
};

// The items in the order in which a block sends them: all stripes of a step, then those of the next one.
struct walk {
	u32 peers, mine, start;

	__device__ __forceinline__ walk(u32 peers, u32 mine, u32 start) : peers(peers), mine(mine), start(start) {}
	__device__ __forceinline__ walk(const sw_exchange_args &a, const items &all)
	    : peers(all.peers), mine(all.mine), start((a.flags & SW_FLAG_MESH) != 0 ? among_alike(a) % all.peers : 0)
	{
	}

	__device__ __forceinline__ u32 operator[](u32 i) const
	{
		u32 steps = i / mine, step = start + steps;
		return (step < peers ? step : step - peers) + (i - steps * mine) * peers;
	}
};

// How many warps of a block send, and how many copy messages out of staging.
__device__ __forceinline__ u32 senders(const sw_exchange_args &a)
{
	return a.senders != 0 ? send_warps + recv_warps - tellers : send_warps;
}
__device__ __forceinline__ u32 takers(const sw_exchange_args &a)
{
	return a.senders != 0 ? send_warps + recv_warps : recv_warps;
}

// A word that other warps write, the same for all lanes.
__device__ __forceinline__ u32 read_by_one(u32 *word, u32 lane)
{
	u32 v = lane == 0 ? atom_acquire_cta(word) : 0;
	return __shfl_sync(~0u, v, 0);
}

// The board of a block.
struct board {
	u64 place[SW_MAX_RANKS]; // by step: where the receiver wants the message, from its segment on; 0 before it has
	                         // said
	reports written[chunks_ahead]; // the sending warps have written staged chunk k, of all those with the same
	                               // remainder
	u64 moved;                     // moved_word
	u32 told;                      // staged chunks that are signalled, or about to be
	u32 written_all;               // everything is written, and its signals are on their way
	u32 begin;                     // clock when the first receiver had said where it wants its message
	u32 begin_staged;              // and when the first warp had come to those through staging
	u32 failed;                    // a sending warp has not written all of its tiles
	u32 over;                      // the block has given up
	u32 packets;                   // 1: some are to be sent; 2: some are to be received

	// By item, in dynamic shared memory:
	stripe_out *out;
	stripe_in *in;
	reports *taken; // [slot]: the receiving warps have copied a chunk out
	u32 *room;      // chunks that the receiver has taken out of staging
	u32 *arrived;   // chunks that are in staging here
	u32 *given;     // chunks that have been given back to the sender
	u32 *next;      // [warp that copies out of staging]: the chunk that it wants, 0 when there is none

	// The threads of the block make it, and meet before the first use.
	__device__ __forceinline__ void make(const sw_exchange_args &a, gathered r, u64 *memory, const items &all)
	{
		u32 peers = all.peers, count = all.count;
		stripe_out *o = reinterpret_cast<stripe_out *>(memory);
		stripe_in *n = reinterpret_cast<stripe_in *>(o + count);
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
				o[k] = {a.src + m.send_offset,
				        segment(a.world, m.to),
				        stripe_slots(a, m.to, a.world.rank, l),
				        signal_line(a, m.to, a.world.rank, l),
				        stripe_credit(a, a.world.rank, m.to, l),
				        bytes,
				        begin,
				        length,
				        l,
				        part.count,
				        s,
				        chunks};
			else
				n[k] = {a.dst + m.recv_offset + begin,
				        stripe_slots(a, a.world.rank, m.from, l),
				        signal_line(a, a.world.rank, m.from, l),
				        stripe_credit(a, m.from, a.world.rank, l),
				        length,
				        s,
				        chunks};
		}
		for (u32 i = threadIdx.x; i < count * a.slot_count; i += blockDim.x)
			t[i].expect(takers(a));
		for (u32 i = threadIdx.x; i < 3 * count; i += blockDim.x)
			words[i] = 0;
		if (threadIdx.x < chunks_ahead)
			written[threadIdx.x].expect(senders(a));
		if (threadIdx.x < SW_MAX_RANKS) {
			place[threadIdx.x] = 0;
			if (threadIdx.x < peers) {
				i64 sends = r[threadIdx.x].send_bytes;
				u32 some = (sends > 0 && sends <= a.packet_bytes ? 1 : 0) |
				           (r[threadIdx.x].recv_bytes <= a.packet_bytes ? 2 : 0);
				if (some != 0)
					atomicOr(&packets, some);
			}
		}
		if (threadIdx.x == 0) {
			moved = moved_word(a.world, a.world.rank);
			told = written_all = failed = over = begin = begin_staged = 0;
			out = o, in = n, taken = t;
			room = words, arrived = words + count, given = words + 2 * count, next = words + 3 * count;
		}
	}

	// place[step] as all lanes of the warp see it.
	__device__ __forceinline__ u64 seen(u32 step)
	{
		u64 p = load_acquire_cta(&place[step]);
		return __any_sync(~0u, p == 0) != 0 ? 0 : p;
	}

	// The clock when the first place was told. To be asked after one has been seen.
	__device__ __forceinline__ u32 began(u32 lane) { return read_by_one(&begin, lane); }

	// Waits until what another warp writes is at least want, which is not 0, and returns it. 0 when the block gives
	// up.
	__device__ __forceinline__ u32 await(u32 *word, u32 want, u32 lane)
	{
		return await_warp(word, want, &over, lane);
	}
};

// Waits until the receivers of the steps that the lanes name have said where they want their messages. False when the
// block gives up.
__device__ __forceinline__ bool await_place(board &b, bool wanted, u32 step, u64 &place)
{
#pragma unroll 1
	while (__any_sync(~0u, wanted && (place = load_acquire_cta(&b.place[step])) == 0) != 0) {
		if (__any_sync(~0u, atom_acquire_cta(&b.over) != 0) != 0)
			return false;
		__nanosleep(20);
	}
	return true;
}

} // namespace sw
