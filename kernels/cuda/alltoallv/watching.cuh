// The warps of a block that watch what peers write, so that no other warp has to, and signal for the others.
//
// Two warps of the exchange kernel run send_watch and recv_watch, and more are tellers in a block that only sends.
// Reads credit, room and signal lines in this rank's segment; writes signals of staged chunks and room lines in the
// peers' segments, and the board.
#pragma once

#include "receiving.cuh"

namespace sw {

// A warp that watches what peers write for the block, so that no other warp has to: many that poll one line hold up the
// write that they wait for. It also tells peers what the other warps have done, because the fence before that takes
// long.
struct watch {
	const sw_exchange_args &a;
	gathered r;
	u64 epoch;
	board &b;
	u32 lane;
	u32 missing = 0; // somebody that this lane waits for: the rank plus 1, and whether this rank is sending to it
	bool fresh = false; // something has come since the last round
	wait w;

	__device__ __forceinline__ watch(const sw_exchange_args &a, gathered r, u64 epoch, board &b, u32 lane)
	    : a(a), r(r), epoch(epoch), b(b), lane(lane)
	{
	}

	__device__ __forceinline__ void wait_for(u32 peer, bool sending)
	{
		missing = (peer + 1) << 1 | static_cast<u32>(sending);
	}

	// How many chunks of this call a peer's word tells of.
	__device__ __forceinline__ u32 chunks(u64 word) const
	{
		return word >= seq(epoch, 0) ? static_cast<u32>(word - seq(epoch, 0)) : 0;
	}

	// Ends a round of which something is open. False when the block gives up.
	__device__ __forceinline__ bool go_on()
	{
		bool any = __any_sync(~0u, fresh) != 0;
		u32 someone = __ballot_sync(~0u, missing != 0),
		    whom = __shfl_sync(~0u, missing, someone == 0 ? 0 : __ffs(someone) - 1), go = 1;
		missing = 0, fresh = false;
		if (any) {
			w = wait();
			return true;
		}
		if (lane == 0 && (atom_acquire_cta(&b.over) != 0 || !w.slow(a.world))) {
			give_up(a.world, w.kind, whom == 0 ? a.world.rank : (whom >> 1) - 1, epoch, (whom & 1) != 0);
			store_release_cta(&b.over, 1u);
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
	u32 mine = 0;           // chunks so far
	u32 at = 0, before = 0; // an item, in order, and the chunks before it

	__device__ __forceinline__ teller(const sw_exchange_args &a, gathered r, u64 epoch, board &b, u32 lane,
	                                  u32 word)
	    : a(a), r(r), epoch(epoch), b(b), lane(lane), word(word), alone(a.senders == 0)
	{
	}

	// Signals the staged chunks that all warps have written and no other teller has taken on. False when there are
	// none.
	__device__ __forceinline__ bool tell(const items &all)
	{
		u32 from = alone ? mine : read_by_one(&b.told, lane);
		u32 k = from + lane, ready = __ballot_sync(~0u, b.written[k % chunks_ahead].all(k / chunks_ahead));
		u32 end = from + (ready == ~0u ? 32 : __ffs(~ready) - 1); // in order
		if (end == from ||
		    (!alone && __shfl_sync(~0u, lane == 0 ? atomicCAS(&b.told, from, end) : 0, 0) != from))
			return false;
		fence_acq_rel_sys(); // X4: what the warps wrote comes before the signal, also what was written before
		                     // these chunks
		if (alone && lane == 0)
			store_relaxed_cta(&b.told, end);
		mine = end;
		walk order(a, all);
#pragma unroll 1
		for (;; at++) {
			const stripe_out &o = b.out[order[at]];
			u32 chunks = b.place[o.step] == SW_NOWHERE ? o.chunks : 0;
			if (chunks != 0 && before + chunks > from && lane == 0)
				signal(o, min(chunks, end - before)); // of a stripe's chunks the last one is told of
			if (before + chunks >= end)
				return true;
			before += chunks;
		}
	}

	__device__ __forceinline__ void signal(const stripe_out &o, u32 chunk)
	{
		stripe_line line{a, epoch, o.line};
		u64 number = chunk == o.chunks ? last_seq(epoch) : seq(epoch, chunk);
		if (word == 0)
			line.signal(number, static_cast<u64>(r[o.step].send_bytes));
		else
			line.signal_word(other_teller, number);
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

	// True while the credit of a step has not come. It is not awaited where the block sends nothing of the message.
	__device__ __forceinline__ bool await_credit(u32 s)
	{
		if (b.place[s] != 0 || b.out[s].chunks == 0)
			return false;
		u64 n = static_cast<u64>(r[s].send_bytes);
		credit x = credit::look(a, r[s].to);
		bool past = x.past(epoch);
		if (!past && !x.is_of(epoch)) {
			wait_for(r[s].to, true);
			return true;
		}
		atomicCAS(&b.begin, 0u, static_cast<u32>(clock()) | 1u);
		store_relaxed_cta(&b.place[s],
		                  !past && x.expected.b == n ? resolve(a.world, r[s].to, x.place.b) : skip_message);
		if (past)
			hear_why(a, r[s].to, epoch, true);
		else if (x.expected.b != n)
			disagree(a, r[s].to, epoch, true, n, x.expected.b);
		fresh = true;
		return false;
	}

	// Looks how many chunks the receiver of a staged message has room for.
	__device__ __forceinline__ void look_for_room(u32 i)
	{
		const stripe_out &o = b.out[i];
		if (o.chunks <= b.room[i] + a.slot_count)
			return;
		u32 c = chunks(load_relaxed_sys(o.room));
		if (c > b.room[i]) {
			store_relaxed_cta(&b.room[i], c);
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
		const stripe_in &o = b.in[i];
		if (o.chunks == 0 || b.arrived[i] >= all_chunks)
			return false;
		u32 p = r[o.step].from;
		i64 n = r[o.step].recv_bytes;
		stripe_line line{a, epoch, o.line};
		pair64 v = line.look(), w = line.look(end_of_staged);
		u64 last = max(v.a, max(w.a, w.b));
		u32 c = chunks(last);
		if (c > b.arrived[i]) {
			line.see(last == v.a ? 0 : last == w.a ? end_of_staged : other_teller);
			if (last == v.a && !in.right_size(v.b, p, n))
				c = no_chunks;
			store_relaxed_cta(&b.arrived[i], c);
			fresh = true;
		} else if (doubt && in.other_size(p, n)) {
			store_relaxed_cta(&b.arrived[i], c = no_chunks);
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
				empty = k + a.slot_count <= b.in[i].chunks &&
				        b.taken[i * a.slot_count + k % a.slot_count].all((k - 1) / a.slot_count);
			}
			if (empty) { // X3: what the warps have read they have stored, so no fence need see to it
				store16_relaxed_sys(b.in[i].room, seq(epoch, k), 0);
				b.given[i] = k;
				fresh = true;
			}
		}
	}

	// Runs until everything has arrived in staging. The last chunks do not, before the slots that they need are
	// given back.
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
