// The words of ranks about a call with a handle. A rank says in one line that it begins, what it does and where
// its rows may be read, or written if no gaps are between them; and each of its blocks says in a word how many of its
// rows are there. Numbers that are wanted early carry the low half of the call's number with them.
//
// All kernels of MoE dispatch call this. It touches the parts of struct sw_dispatch_block that are named so: begins and
// dones by peers, and words that carry the call's number. A line has one writer. Lines and words of begins, dones,
// counts of slots and rows of ranks for ranks exist for even and odd calls: a rank may begin the next call while a peer
// still reads those of this one, but not the call after, since it waits for every peer in every call.
#pragma once

#include "masks.cuh"

namespace sw {

// The line of a rank: what the call is, how many blocks it has, whether its output may be written from now
// on, and whether its rows are made while peers read them. A call whose second half is a launch of its own says 0
// blocks; the first of them says how many there are.
__device__ __forceinline__ u64 begin_word(const sw_dispatch_args &a, u32 blocks)
{
	return a.op | static_cast<u64>(a.mode & SW_DISPATCH_FREE) << 8 | static_cast<u64>(blocks) << 16 |
	       static_cast<u64>((a.mode & SW_DISPATCH_BESIDE) != 0) << 32;
}
__device__ __forceinline__ u32 op_of(u64 word) { return word & 0xff; }
__device__ __forceinline__ bool frees(u64 word) { return (word >> 8 & SW_DISPATCH_FREE) != 0; }
__device__ __forceinline__ u32 blocks_of(u64 word) { return word >> 16 & 0xffff; }
__device__ __forceinline__ bool makes(u64 word) { return (word >> 32 & 1) != 0; }

// Next to these, in the upper 31 bits, how many rows a rank takes where it says that it wants them.
constexpr u32 most_room = ~0u >> 1;
__device__ __forceinline__ u32 room_of(u64 word) { return static_cast<u32>(word >> 33); }

// The word of a block: how many of its rows are there, the place of the first among those of its rank (in an output
// without gaps among all), and whether that is all. The highest bit says in place of that which choice is no expert
// (each_choice).
constexpr u64 done_all = 1ull << 62;
__device__ __forceinline__ u64 done(u32 rows, u32 first, bool all)
{
	return rows | static_cast<u64>(first) << 24 | (all ? done_all : 0);
}
__device__ __forceinline__ u32 rows_of(u64 word) { return word & 0xffffff; }
__device__ __forceinline__ u32 first_of(u64 word) { return word >> 24 & 0xffffff; }
__device__ __forceinline__ bool is_all(u64 word) { return word >> 62 != 0; }
__device__ __forceinline__ bool is_bad(u64 word) { return word >> 63 != 0; }

__device__ __forceinline__ u64 begin_line(const sw_dispatch_args &a, u32 dst, u32 src, u64 epoch)
{
	return segment(a.world, dst) + a.state.begins + ((epoch & 1) * a.world.size + src) * SW_LINE_BYTES;
}
__device__ __forceinline__ u64 done_word(const sw_dispatch_args &a, u32 dst, u32 src, u32 block, u64 epoch)
{
	return segment(a.world, dst) + a.state.dones +
	       (((epoch & 1) * a.world.size + src) * SW_DISPATCH_MAX_BLOCKS + block) * 16;
}

// How many rows src has for a slot, where dst looks.
__device__ __forceinline__ u64 slot_count(const sw_dispatch_args &a, u32 dst, u32 src, u32 slot, u64 epoch)
{
	return segment(a.world, dst) + a.state.slot_counts + (((epoch & 1) * a.world.size + src) * a.slots + slot) * 8;
}

// How many rows src has for dst, where a rank looks.
__device__ __forceinline__ u64 rank_total(const sw_dispatch_args &a, u32 rank, u32 src, u32 dst, u64 epoch)
{
	return segment(a.world, rank) + a.state.rank_totals +
	       (((epoch & 1) * a.world.size + src) * a.world.size + dst) * 8;
}

// Next to a number of rows of a block or rank: a choice of its tokens is no expert.
constexpr u32 some_wrong = 1u << 31;

// A number behind the low half of a call's. Each is in a word of its own and written once a call.
__device__ __forceinline__ u64 numbered(u64 epoch, u32 n) { return epoch << 32 | n; }
__device__ __forceinline__ bool is_of(u64 word, u64 epoch)
{
	return static_cast<u32>(word >> 32) == static_cast<u32>(epoch);
}

// Tells one peer, and where this rank's rows are, or where it wants those that go to it, and how many of them.
__device__ __forceinline__ void signal_begin(const sw_dispatch_args &a, u32 peer, u64 epoch, u32 blocks, u64 rows,
                                             u64 room = 0)
{
	u64 line = begin_line(a, peer, a.world.rank, epoch);
	store16_relaxed_sys(line + 16, epoch, rows);
	store16_relaxed_sys(line, epoch, begin_word(a, blocks) | room << 33);
}
__device__ __forceinline__ void signal_begin(const sw_dispatch_args &a, u32 peer, u64 epoch, u32 blocks)
{
	signal_begin(a, peer, epoch, blocks, a.sum.from_rows);
}

// Waits that a thread makes for a peer, with what it has cost.
struct patience {
	const sw_dispatch_args &a;
	u32 peer;
	wait w;
	u64 since;
	masks::patient without; // the peer, when it is masked

	__device__ __forceinline__ patience(const sw_dispatch_args &a, u32 peer) : a(a), peer(peer), since(0) {}
	// One that also ends when the ranks' calls turn out to differ.
	__device__ __forceinline__ patience(const sw_dispatch_args &a, u32 peer, u64 epoch) : patience(a, peer)
	{
		w.epoch = epoch;
	}

	// After a failed poll. False when the wait goes on without the peer, or is given up, which is recorded.
	__device__ __forceinline__ bool more(u64 epoch, bool sending)
	{
		if (since == 0)
			since = now_ns();
		if (without.more(a, w, peer))
			return true;
		if (without.gone)
			return false;
		give_up(a.world, w.kind, peer, epoch, sending);
		return false;
	}

	// Counts the time that has been waited.
	__device__ __forceinline__ void count() const
	{
		if (since != 0 && a.counters != 0 && peer != a.world.rank)
			atomicAdd(a.counters + a.experts + a.world.size + peer,
			          static_cast<unsigned long long>(now_ns() - since));
	}
};

// A word that carries the call's number: its number, when it has come; 0 where the peer is masked, which `gone` has
// then. False when the wait was given up.
__device__ __forceinline__ bool await_number(const sw_dispatch_args &a, u64 place, u64 epoch, u32 peer, u32 &n,
                                             u32 &gone)
{
	patience p(a, peer, epoch);
	u64 v;
#pragma unroll 1
	while (!is_of(v = load_relaxed_sys(place), epoch))
		if (!p.more(epoch, false)) {
			n = 0;
			gone |= p.without.gone ? 1u << peer : 0;
			return p.without.gone;
		}
	n = static_cast<u32>(v);
	return true;
}

// The same of this rank's own.
__device__ __forceinline__ bool await_number(const sw_dispatch_args &a, u64 place, u64 epoch, u32 peer, u32 &n)
{
	u32 gone = 0;
	return await_number(a, place, epoch, peer, n, gone);
}

// Calls f with each two ranks and how many rows the first has for the second, where some_wrong may be, too. The threads
// of a block share them. False when a wait was given up.
template <typename F> __device__ __forceinline__ bool each_rank_total(const sw_dispatch_args &a, u64 epoch, F f)
{
	u32 n = a.world.size;
	bool good = true;
#pragma unroll 1
	for (u32 i = threadIdx.x; i < n * n; i += blockDim.x) {
		u32 src = i / n, d = i - src * n, rows;
		if (await_number(a, rank_total(a, a.world.rank, src, d, epoch), epoch, src, rows))
			f(src, d, rows);
		else
			good = false;
	}
	return good;
}

// Whether the rows for each rank fit outputs without gaps, which all ranks find alike. The first that do not are an
// error of the call. One thread.
__device__ __forceinline__ bool all_fit(const sw_dispatch_args &a, const u32 *total, u64 epoch)
{
#pragma unroll 1
	for (u32 d = 0; d < a.world.size; d++)
		if (total[d] > a.out.most) {
			give_up(a.world, SW_FAULT_OVERFLOW, d, epoch, false, total[d], ~0ull,
			        static_cast<u64>(a.out.most));
			return false;
		}
	return true;
}

// Calls f with each rank and how many rows it has for a slot, in order: 0 for those that the call does without, and for
// those that are masked before they have told, which `gone` has then. False when a wait was given up.
template <typename F>
__device__ __forceinline__ bool each_slot_count(const sw_dispatch_args &a, u32 slot, u64 epoch, u32 out, u32 &gone, F f)
{
	constexpr u32 batch = 4; // that are on their way together
	bool good = true;
#pragma unroll 1
	for (u32 first = 0; first < a.world.size; first += batch) {
		u64 v[batch];
#pragma unroll
		for (u32 j = 0; j < batch; j++)
			v[j] = first + j < a.world.size
			           ? load_relaxed_sys(slot_count(a, a.world.rank, first + j, slot, epoch))
			           : 0;
#pragma unroll
		for (u32 j = 0; j < batch; j++) {
			u32 src = first + j, rows = static_cast<u32>(v[j]);
			if (src >= a.world.size)
				continue;
			if (src < SW_MASKED_RANKS && (out >> src & 1) != 0)
				rows = 0;
			else if (!is_of(v[j], epoch))
				good &= await_number(a, slot_count(a, a.world.rank, src, slot, epoch), epoch, src, rows,
				                     gone);
			f(src, rows);
		}
	}
	return good;
}

// Waits until a peer has begun the call, and reads where its rows are, or are to be. Its earlier writes are visible
// then. False when the wait was given up, the peer makes another call, or is masked: gone says whether that is it.
__device__ __forceinline__ bool await_begin(const sw_dispatch_args &a, u32 peer, u64 epoch, u64 &word, u64 &place,
                                            bool &gone)
{
	u64 line = begin_line(a, a.world.rank, peer, epoch);
	patience p(a, peer);
	pair64 first, second;
#pragma unroll 1
	while (second = load16_relaxed_sys(line + 16), first = load16_acquire_sys(line),
	       first.a < epoch || second.a < epoch)
		if (!p.more(epoch, false)) {
			gone = p.without.gone;
			return false;
		}
	gone = false;
	p.count();
	word = first.b;
	place = second.b;
	if (op_of(word) == a.op)
		return true;
	give_up(a.world, SW_FAULT_ORDER, peer, epoch, false, op_of(word), a.op);
	return false;
}

// The same where no call goes on without ranks.
__device__ __forceinline__ bool await_begin(const sw_dispatch_args &a, u32 peer, u64 epoch, u64 &word, u64 &place)
{
	bool gone;
	return await_begin(a, peer, epoch, word, place, gone);
}

// A peer's lines, read before it is known which call this is.
struct begun {
	pair64 even, odd;

	__device__ __forceinline__ void load(const sw_dispatch_args &a, u32 peer)
	{
		even = load16_relaxed_sys(begin_line(a, a.world.rank, peer, 0)),
		odd = load16_relaxed_sys(begin_line(a, a.world.rank, peer, 1));
	}
	__device__ __forceinline__ pair64 of(u64 epoch) const { return (epoch & 1) == 0 ? even : odd; }
};

// Waits until a peer's output may be written: it has begun this call, or said at the one before that it is through with
// it.
__device__ __forceinline__ bool await_room(const sw_dispatch_args &a, u32 peer, u64 epoch, const begun &seen)
{
	patience p(a, peer);
	pair64 line = seen.of(epoch), before = seen.of(epoch - 1);
	if (before.a + 1 == epoch && frees(before.b))
		return true;
#pragma unroll 1
	while (line.a < epoch) {
		if (!p.more(epoch, true))
			return false;
		line = load16_relaxed_sys(begin_line(a, a.world.rank, peer, epoch));
	}
	p.count();
	return true;
}

// Waits until a block of a rank has more than this number of rows there, or all. False when the wait was given up; a
// rank that is masked before is gone, and has none.
__device__ __forceinline__ bool await_rows_of(const sw_dispatch_args &a, u32 peer, u32 block, u64 epoch, u32 rows,
                                              u64 &word, bool &gone)
{
	u64 place = done_word(a, a.world.rank, peer, block, epoch);
	patience p(a, peer, epoch);
	pair64 v;
#pragma unroll 1
	while (v = load16_acquire_sys(place), v.a < epoch || (!is_all(v.b) && rows_of(v.b) <= rows))
		if (!p.more(epoch, false)) {
			gone = p.without.gone;
			word = 0;
			return gone;
		}
	gone = false;
	word = v.b;
	return true;
}

__device__ __forceinline__ bool await_rows_of(const sw_dispatch_args &a, u32 peer, u32 block, u64 epoch, u32 rows,
                                              u64 &word)
{
	bool gone;
	return await_rows_of(a, peer, block, epoch, rows, word, gone);
}

// Waits for all of them.
__device__ __forceinline__ bool await_done(const sw_dispatch_args &a, u32 peer, u32 block, u64 epoch, u64 &word)
{
	return await_rows_of(a, peer, block, epoch, ~0u, word);
}

// Ends the waits of this rank in a call that ranks do not make together.
__device__ __forceinline__ void end_waits(const sw_dispatch_args &a, u64 epoch)
{
	store_relaxed_sys(own_segment(a.world) + a.world.control + offsetof(sw_control, mismatched), epoch);
}

} // namespace sw
