// The warps of a block that deal with peers: one watches what they write, two fence and signal what the working warps
// have written.
//
// The last three warps of the exchange through memory run it. Reads the peers' lines in this rank's segment; writes
// this rank's lines in theirs.
#pragma once

#include "working.cuh"

namespace sw {

struct reduce_signaller {
	const sw_reduce_args &a;
	u64 epoch;
	reduce_board &b;
	u32 lane;

	// How many chunks all warps have reported, of those from `from` to `end`. At least one more than from; 0 when
	// the block gives up.
	__device__ __forceinline__ u32 await(reports *r, u32 from, u32 end)
	{
		u32 to = from;
		if (lane == 0)
#pragma unroll 1
			for (;;) {
				while (to < end && to < from + a.slots && r[to % a.slots].all(to / a.slots))
					to++;
				if (to > from)
					break;
				if (atom_acquire_cta(&b.over) != 0) {
					to = 0;
					break;
				}
				__nanosleep(20);
			}
		return __shfl_sync(~0u, to, 0);
	}

	// Tells the ranks of a mask, each of at most as many chunks as it has.
	__device__ __forceinline__ void tell(u64 ranks, u64 word, u32 chunks, bool own)
	{
		reduce_lines lines{a, epoch, b, word};
		fence_acq_rel_sys(); // X4: what the warps wrote comes before the signal
#pragma unroll 1
		for (u32 p = lane; p < a.world.size; p += 32)
			if (ranks >> p & 1)
				lines.signal(p, own ? chunks : min(chunks, chunks_of(a, span(a, p).bytes)));
	}

	// Signals chunks of inputs that have been pushed.
	__device__ __forceinline__ void run_inputs()
	{
		u32 most = b.pushes != 0 ? most_chunks(a, all_peers(a)) : 0;
#pragma unroll 1
		for (u32 j = 0; j < most;) {
			if ((j = await(b.pushed, j, most)) == 0)
				return;
			tell(all_peers(a), inputs_pushed, j, false);
		}
	}

	// Signals chunks of results, and the end of all work on peers' memory.
	__device__ __forceinline__ void run_results()
	{
		u32 mine = b.handing != 0 ? chunks_of(a, span(a, a.world.rank).bytes) : 0;
#pragma unroll 1
		for (u32 j = 0; j < mine;) {
			if ((j = await(b.reduced, j, mine)) == 0)
				break;
			tell(b.handing, results_pushed, j, true);
		}
		b.end_work();
		if (b.touching == 0 || atom_acquire_cta(&b.over) != 0)
			return;
		reduce_lines lines{a, epoch, b, all_done};
		if (b.stores != 0) // loads have been used by now, and need none
			fence_acq_rel_sys();
#pragma unroll 1
		for (u32 p = lane; p < a.world.size; p += 32)
			if (b.touching >> p & 1)
				lines.signal(p);
	}
};

struct reduce_watch {
	const sw_reduce_args &a;
	u64 epoch;
	reduce_board &b;
	u32 lane;
	u32 given_inputs = 0, given_results = 0; // chunks whose slots have been given back

	__device__ __forceinline__ reduce_watch(const sw_reduce_args &a, u64 epoch, reduce_board &b, u32 lane)
	    : a(a), epoch(epoch), b(b), lane(lane)
	{
	}

	// How many chunks of this call a peer's word tells of.
	__device__ __forceinline__ u32 chunks(u64 word) const
	{
		return word >= seq(epoch, 0) ? static_cast<u32>(word - seq(epoch, 0)) : 0;
	}

	// Raises a word that says how far all peers are. The same for all lanes: the least that any brings, where that
	// is more than before.
	__device__ __forceinline__ bool raise(u32 *word, u32 &before, u32 mine)
	{
		u32 least = ~__reduce_max_sync(~0u, ~mine);
		if (least == no_limit || least <= before)
			return false;
		before = least;
		if (lane == 0)
			store_relaxed_cta(word, least);
		return true;
	}

	// Gives a slot back to the ranks of a mask when the warps have emptied it. Of the last chunks nobody waits for
	// it.
	__device__ __forceinline__ bool give(reports *r, u32 &given, u32 end, u64 ranks, u64 word)
	{
		u32 empty =
		    ranks != 0 && given + a.slots < end && lane == 0 ? r[given % a.slots].all(given / a.slots) : 0;
		if (__shfl_sync(~0u, empty, 0) == 0)
			return false;
		given++;
		reduce_lines lines{a, epoch, b, word}; // X3: what the warps have read they have stored
#pragma unroll 1
		for (u32 p = lane; p < a.world.size; p += 32)
			if (ranks >> p & 1)
				lines.signal(p, given);
		return true;
	}

	// Runs until the peers are done with this rank's memory, and it has all that comes from them, or the block
	// gives up.
	__device__ __forceinline__ void run()
	{
		if (b.any_staged())
			watch_staging();
		reduce_lines lines{a, epoch, b, all_done};
#pragma unroll 1
		for (u32 p = lane; p < a.world.size; p += 32)
			if ((b.touched >> p & 1) && !lines.await(p)) {
				store_release_cta(&b.over, 1u);
				return;
			}
	}

	// Runs until nothing more is to come through staging, or the block gives up.
	__device__ __forceinline__ void watch_staging()
	{
		u32 mine = chunks_of(a, span(a, a.world.rank).bytes), most = most_chunks(a, b.taking);
		u32 ready = 0, room = 0, push_room = 0;
		wait w;
#pragma unroll 1
		for (;;) {
			u32 inputs = no_limit, outputs = no_limit, pushes = no_limit, missing = no_limit;
			bool fresh = false;
#pragma unroll 1
			for (u32 p = lane; p < a.world.size; p += 32) {
				if (p == a.world.rank)
					continue;
				u64 line = line_of(a, a.world.rank, p);
				pair64 written = load16_relaxed_sys(line),
				       taken = load16_relaxed_sys(line + inputs_taken);
				u32 theirs = chunks_of(a, span(a, p).bytes);
				if (b.pushing >> p & 1) {
					u32 c = chunks(written.a);
					if (c > ready)
						load_acquire_sys(line + inputs_pushed); // no older than that: what it
						                                        // tells of is seen behind it
					if (c < mine)
						missing = p;
					inputs = min(inputs, c);
				}
				if (b.handing >> p & 1) {
					u32 c = chunks(taken.b) + a.slots;
					if (c < mine)
						missing = p;
					outputs = min(outputs, c);
				}
				if (b.pushes != 0) {
					u32 c = chunks(taken.a) + a.slots;
					if (c < theirs) {
						missing = p;
						pushes = min(pushes, c);
					} else {
						pushes = min(pushes, no_limit - 1);
					}
				}
				if (b.taking >> p & 1) {
					u32 c = chunks(written.b);
					if (c > b.results[p]) {
						load_acquire_sys(line + results_pushed);
						store_relaxed_cta(&b.results[p], c);
						fresh = true;
					}
					if (c < theirs)
						missing = p;
				}
			}
			fresh = __any_sync(~0u, fresh) != 0;
			fresh |= raise(&b.ready, ready, inputs);
			fresh |= raise(&b.room, room, outputs);
			fresh |= raise(&b.push_room, push_room, pushes);
			fresh |= give(b.reduced, given_inputs, mine, b.pushing, inputs_taken);
			fresh |= give(b.taken, given_results, most, b.taking, results_taken);
			bool giving = (b.pushing != 0 && given_inputs + a.slots < mine) ||
			              (b.taking != 0 && given_results + a.slots < most);
			u32 someone = __ballot_sync(~0u, missing != no_limit);
			if (someone == 0 && !giving)
				return;
			if (fresh) {
				w = wait();
				continue;
			}
			u32 whom = __shfl_sync(~0u, missing, someone == 0 ? 0 : __ffs(someone) - 1), go = 1;
			if (lane == 0 && !w.slow(a.world)) {
				give_up(a.world, w.kind, someone == 0 ? a.world.rank : whom, epoch, false);
				store_release_cta(&b.over, 1u);
				go = 0;
			}
			if (__shfl_sync(~0u, go, 0) == 0)
				return;
		}
	}
};

} // namespace sw
