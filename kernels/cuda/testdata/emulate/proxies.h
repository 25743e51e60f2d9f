// The rails of ranks on several hosts, and the proxies that read their queues: bytes leave and land late and in any
// order, and a word counts puts once they have landed with all before them. They promise nothing else.
#pragma once

#include "fibers.h"

#include <deque>

static_assert(offsetof(sw_put, number) == SW_PUT_NUMBER && sizeof(sw_put) == SW_PUT_BYTES);

namespace {

// A put that the proxy has read.
struct put {
	sw_put d;
	u64 seq;        // of those of this rank that name the word
	u32 landed = 0; // halves of its bytes
	bool left = false;
	std::vector<u8> bytes;
};

// One rank's end.
struct rail_end {
	std::vector<u8> segment;
	std::vector<u64> queue;
	u64 next[2] = {0, 0}, read = 0;
	std::deque<put> puts; // that are not done, or have not landed
	u64 done = 0;
	std::map<std::pair<u64, u64>, u64> sent;               // by rank and word
	std::map<std::pair<u64, u64>, std::vector<u64>> early; // of puts to this rank, by rank and word
};

struct rails {
	u64 descriptors, bytes, words; // bytes of a segment, of which those of words come first
	i64 longest;                   // put
	std::vector<rail_end> ends;
	bool broken = false;

	// Makes the ends of that many ranks.
	void lay(u32 ranks, u64 words_bytes, u64 all_bytes, i64 longest_put)
	{
		descriptors = 1 + draw(6);
		words = words_bytes, bytes = all_bytes, longest = longest_put;
		ends.resize(ranks);
		for (rail_end &r : ends) {
			r.segment.assign(bytes + 16, 0xEE);
			std::fill(r.segment.begin(), r.segment.begin() + static_cast<i64>(words), u8{0});
			r.queue.assign((SW_QUEUE_HEAD_BYTES + descriptors * SW_PUT_BYTES) / 8, 0);
		}
	}

	sw_rail seen_by(u32 rank, u64 next)
	{
		rail_end &r = ends[rank];
		return {{reinterpret_cast<u64>(r.queue.data()), next, descriptors},
		        reinterpret_cast<u64>(r.segment.data())};
	}

	u64 ran(u32 rank) const { return ends[rank].queue[SW_QUEUE_RAN / 8]; }

	void wrong(const char *what, u32 rank)
	{
		printf("the proxy of rank %u reads a descriptor with a wrong %s\n", rank, what);
		broken = true;
	}

	// The proxy of a rank reads what has come, and the rail goes on.
	void proxy(u32 rank)
	{
		rail_end &r = ends[rank];
		const u8 *all = reinterpret_cast<const u8 *>(r.queue.data()) + SW_QUEUE_HEAD_BYTES;
		while (draw(3) != 0) {
			const auto *d = reinterpret_cast<const sw_put *>(all + r.read % descriptors * SW_PUT_BYTES);
			if (d->number != r.read + 1)
				break;
			if (d->peer >= ends.size() || d->peer == rank)
				return wrong("rank", rank);
			if (d->bytes < 0 || d->bytes > longest || d->source > bytes - d->bytes ||
			    d->place > bytes - d->bytes || (d->bytes != 0 && d->place < words) || d->signal % 8 != 0 ||
			    d->signal >= words)
				return wrong("place", rank);
			r.read++;
			r.puts.push_back({*d, ++r.sent[{d->peer, d->signal}], 0, false, {}});
		}
		u64 number = r.done;
		bool all_left = true;
		for (put &p : r.puts) {
			if (!p.left && draw(6) == 0) {
				p.left = true;
				const u8 *from = r.segment.data() + p.d.source;
				p.bytes.assign(from, from + p.d.bytes);
			}
			if (p.left && p.landed < 2 && draw(6) == 0)
				land(p, rank);
			all_left = all_left && p.left;
			if (all_left)
				number = p.d.number;
		}
		r.done = std::max(r.done, number);
		if (draw(2) != 0)
			r.queue[SW_QUEUE_DONE / 8] = r.done;
		while (!r.puts.empty() && r.puts.front().landed == 2 && r.puts.front().d.number <= r.done)
			r.puts.pop_front();
	}

	void land(put &p, u32 from)
	{
		rail_end &to = ends[p.d.peer];
		u64 half = p.bytes.size() / 2, first = p.landed == 0 ? 0 : half,
		    end = p.landed == 0 ? half : p.bytes.size();
		std::copy(p.bytes.begin() + static_cast<i64>(first), p.bytes.begin() + static_cast<i64>(end),
		          to.segment.begin() + static_cast<i64>(p.d.place + first));
		if (++p.landed < 2)
			return;
		auto &early = to.early[{from, p.d.signal}];
		early.push_back(p.seq);
		u64 &word = *reinterpret_cast<u64 *>(to.segment.data() + p.d.signal);
		for (auto i = early.begin(); (i = std::find(early.begin(), early.end(), word + 1)) != early.end();)
			word++;
	}
};

} // namespace
