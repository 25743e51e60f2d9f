// The sending half of a block: messages that are written in place, then those through staging.
//
// The first warps of the exchange kernel run it. Writes the peers' outputs and staging slots, and at the end of all
// sends this rank's signal lines in their segments; reads nothing that peers write, since send_watch tells it through
// the board.
#pragma once

#include "board.cuh"

namespace sw {

// A warp sends its part of the messages that are written in place: of the tiles of all of a block's items in a row it
// takes every warps-th, so that a message without work for it costs it nothing. A message whose receiver wants it
// through staging is passed over. With an interval each tile has its time, counted from when the first receiver was
// ready: ranks that begin together stay in step. False when the block gives up.
__device__ __noinline__ bool write_in_place(board &b, u32 peers, u32 each, u32 start, u32 warp, u32 warps, u32 lane,
                                            u32 interval)
{
	walk order(peers, each, start);
	u32 mine = warp, before = 0,
	    begin = 0; // the warp's next tile; the tiles of the items that have been looked at; when tile 0 is due
#pragma unroll 1
	for (u32 first = 0; first < peers * each; first += 32) {
		u32 count = 0, item = 0;
		if (first + lane < peers * each) {
			item = order[first + lane];
			const stripe_out &o = b.out[item];
			u32 whole = tiles{o.src, o.all}.count();
			count = o.chunks != 0 && o.stripe < whole ? (whole - o.stripe + o.stripes - 1) / o.stripes : 0;
		}
		u32 end = before + running_sum(count, lane), last = before, step = 0;
		before = __shfl_sync(~0u, end, 31);
		u64 cur = 0, low = 0, high = 0, to = 0,
		    place = 0; // the tile and the message in src; what to add to get to where it goes
		i64 stride = 0;
#pragma unroll 1
		for (; mine < before; mine += warps, cur += stride) {
			if (mine >= last) {
				u32 who = __popc(__ballot_sync(~0u, end <= mine));
				last = __shfl_sync(~0u, end, who);
				const stripe_out &o = b.out[__shfl_sync(~0u, item, who)];
				step = o.step, low = o.src, high = low + o.all, to = o.to - low;
				stride = o.stripes * tile_bytes;
				cur = (low & ~127ull) + o.stripe * tile_bytes +
				      (mine - last + __shfl_sync(~0u, count, who)) * stride;
				stride *= warps;
				place = b.seen(step);
				if (place >= skip_message) {
					mine += (last - 1 - mine) / warps * warps; // and one more by the loop
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
					mine += (last - 1 - mine) / warps * warps;
					continue;
				}
				to += place;
			}
			if (interval != 0 && begin == 0)
				begin = b.began(lane);
			if (interval != 0)
				await_clock(begin + mine * interval);
			t.store(from + to);
			tell_tile(b.moved, mine, lane);
		}
	}
	return true;
}

// A warp sends its part of the messages that go through staging: of the tiles of all of a block's items in a row it
// takes every warps-th, and each has its time, counted from when the first warp came here. The warps report chunk
// by chunk. False when the block gives up.
__device__ __noinline__ bool write_staged(board &b, walk order, u32 items, i64 slot_bytes, u32 slots, u32 warp,
                                          u32 warps, u32 lane, u32 interval)
{
	u32 each = static_cast<u32>((slot_bytes + tile_bytes - 1) /
	                            tile_bytes); // tiles of a chunk, but for the last one of an item
	u32 mine = warp, before = 0, begin = 0;
	u32 written = 0,
	    told = 0; // chunks that the warp has reported; those that have been signalled, as far as it knows
	auto report = [&] {
		if (written >= chunks_ahead + told &&
		    (told = b.await(&b.told, written - chunks_ahead + 1, lane)) == 0) // others are that far behind
			return false;
		__syncwarp();
		if (lane == 0)
			b.written[written % chunks_ahead].report();
		if (warp == 0 && lane == 0)
			tell_moved(b.moved);
		written++;
		return true;
	};
	tile t;
	t.lane = lane;
#pragma unroll 1
	for (u32 i = 0; i < items; i++) {
		u32 item = order[i];
		const stripe_out &o = b.out[item];
		if (o.chunks == 0 || load_acquire_cta(&b.place[o.step]) != SW_NOWHERE)
			continue;
		u64 src = o.src + o.at, dst = o.slots + (1 % slots) * slot_bytes; // of chunk c
		i64 left = o.bytes;                                               // from its beginning on
		u32 c = 1, slot = 1 % slots, first = before, room = 0;            // first is its first tile
		before += (o.chunks - 1) * each +
		          static_cast<u32>((left - (o.chunks - 1) * slot_bytes + tile_bytes - 1) / tile_bytes);
#pragma unroll 1
		for (; mine < before; mine += warps) {
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

// The sending half of a block. Its warps go along the same messages in the same order, each with tiles of its own, and
// do not wait for one another: while some wait for memory others store. Messages that are written in place come first;
// the others begin when all receivers are ready, which keeps the ranks in step.
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
		return write_in_place(b, all.peers, all.mine, order.start, warp, senders(a), lane, a.interval) &&
		       await_credits(all, any) &&
		       (!any || write_staged(b, order, all.count, a.slot_bytes, a.slot_count, warp, senders(a), lane,
		                             a.interval));
	}

	__device__ __forceinline__ void run()
	{
		items all(a);
		if (!write(all) && lane == 0)
			store_release_cta(&b.failed, 1u);
		part_sync(send_part, 32 * senders(a));
		if (warp == 0 && b.failed == 0)
			finish(all);
	}

	// All messages are there: one fence for all of them. Tellers need not end theirs.
	__device__ __forceinline__ void finish(const items &all)
	{
		if (lane == 0)
			store_relaxed_cta(&b.written_all, 1u);
#pragma unroll 1
		for (u32 first = 0; first < all.count; first += 32) {
			u64 even = 0, bytes = 0;
			bool staged = false;
			if (first + lane < all.count) {
				const stripe_out &o = b.out[first + lane];
				u64 place = load_acquire_cta(&b.place[o.step]);
				staged = place == SW_NOWHERE;
				if (o.chunks != 0 && place != skip_message)
					even = o.line, bytes = static_cast<u64>(r[o.step].send_bytes);
			}
			if (first == 0)
				fence_acq_rel_sys();
			stripe_line line{a, epoch, even};
			if (even != 0 && staged)
				line.signal_word(end_of_staged, last_seq(epoch));
			else if (even != 0)
				line.signal(bytes);
		}
	}
};

} // namespace sw
