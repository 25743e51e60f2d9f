// Runs transfers between two ranks on a processor, in random orders of their threads. In every round each rank puts
// bytes to each other and signals, waits for all signals, finds the bytes, gets others, and tells that it has read
// them.
//
//	emulate SEED ROUNDS
#include "p2p.cu"

#include "fibers.h"

namespace {

constexpr u64 room = 72 << 10, semaphores = 2;

struct world : segments {
	sw_point_block block;
	u64 inbox, got;

	explicit world(u32 ranks) : block(sw_lay_point_block(65536, ranks, semaphores))
	{
		inbox = (block.end + 4095) / 4096 * 4096, got = inbox + ranks * room;
		take(ranks, got + ranks * room);
	}
	u64 place(u32 rank, u64 of, u32 peer) const { return segment(rank) + of + peer * room; }
};

u8 value(u64 round, u32 src, u32 dst, u64 i)
{
	u64 z = (round * 131 + src * 17 + dst * 5 + 1) * 0x9e3779b97f4a7c15 + (i + 1) * 0xbf58476d1ce4e5b9;
	return static_cast<u8>(z >> 40);
}

// The data that src puts to dst in a round.
struct part {
	u64 off, n, shift;
};

part part_of(u64 seed, u64 round, u32 src, u32 dst)
{
	std::mt19937_64 rnd(seed * 1009 + round * 101 + src * 11 + dst);
	u64 n = rnd() % (1ull << (1 + rnd() % 16));
	return {rnd() % 64, n, rnd() % 64};
}

enum class does { put, signal, wait, check, get, compare };

struct step {
	does what;
	u32 peer;
	u64 round, semaphore;
};

struct rank_state {
	std::vector<step> steps;
	size_t at = 0;
	std::vector<emu::block *> blocks;
	std::vector<u8> source;
};

bool run(bool behind)
{
	world w(2 + draw(3));
	u64 seed = draw(1 << 20), rounds = 1 + draw(4);
	trouble t(w.size, behind);
	std::vector<rank_state> ranks(w.size);
	for (u32 r = 0; r < w.size; r++) {
		ranks[r].source.resize(room);
		for (u64 round = 1; round <= rounds && r != t.away; round++) {
			auto all = [&](std::vector<does> list, u64 semaphore) {
				u32 first = draw(w.size);
				for (u32 i = 0; i < w.size; i++)
					for (does d : list)
						if (u32 p = (first + i) % w.size; p != r)
							ranks[r].steps.push_back({d, p, round, semaphore});
			};
			all({does::put, does::signal}, 0);
			all({does::wait, does::check, does::get, does::compare}, 0);
			all({does::signal}, 1);
			all({does::wait}, 1);
		}
	}
	auto same = [&](u32 r, u64 from, const step &s, u32 src, u32 dst) {
		part c = part_of(seed, s.round, src, dst);
		for (u64 i = 0; i < c.n; i++)
			if (at<u8>(from + c.off + i) != value(s.round, src, dst, i))
				return wrong(r, s.round, i, src);
		return true;
	};
	auto go_on = [&](u32 r) {
		rank_state &m = ranks[r];
		if (!m.blocks.empty() && !ended(m.blocks))
			return at_work::yes;
		while (m.at < m.steps.size() && w.fault(r) == SW_FAULT_NONE) {
			step s = m.steps[m.at++];
			auto a = std::make_shared<sw_point_args>();
			a->world = w.seen_by(r, w.block.control + s.peer * SW_CONTROL_ALIGN, t.timeout_ns),
			a->block = w.block;
			a->peer = s.peer, a->semaphore = static_cast<u32>(s.semaphore), a->semaphores = semaphores;
			switch (s.what) {
			case does::signal:
				m.blocks.push_back(launch(r, 0, 1, SW_POINT_WAITERS, 0, [a] { p2p_signal(*a); }));
				return at_work::yes;
			case does::wait:
				m.blocks.push_back(launch(r, 0, 1, SW_POINT_WAITERS, 0, [a] { p2p_wait(*a); }));
				return at_work::yes;
			case does::put:
			case does::get: {
				u32 src = r, dst = s.peer;
				part c;
				if (s.what == does::put) {
					c = part_of(seed, s.round, src, dst);
					for (u64 i = 0; i < c.n; i++)
						m.source[c.shift + i] = value(s.round, src, dst, i);
					a->src = reinterpret_cast<u64>(m.source.data()) + c.shift;
					a->dst = w.place(dst, w.inbox, src) + c.off;
				} else { // what this rank has put to the peer, which it still holds
					c = part_of(seed, s.round, src, dst);
					a->src = w.place(dst, w.inbox, src) + c.off;
					a->dst = w.place(r, w.got, s.peer) + c.off;
				}
				a->bytes = static_cast<i64>(c.n);
				u32 grid = 1 + draw(3);
				for (u32 b = 0; b < grid; b++)
					m.blocks.push_back(
					    launch(r, b, grid, SW_POINT_THREADS, 0, [a] { p2p_move(*a); }));
				return at_work::yes;
			}
			case does::check:
				if (!same(r, w.place(r, w.inbox, s.peer), s, s.peer, r))
					return at_work::stop;
				break;
			case does::compare:
				if (!same(r, w.place(r, w.got, s.peer), s, r, s.peer))
					return at_work::stop;
				break;
			}
		}
		return at_work::no;
	};
	return run_in(w, t, go_on,
	              [&](u32 r) { return ranks[r].at == ranks[r].steps.size() && ranks[r].blocks.empty(); });
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words,
	               {
			   {"transfers", [] { return run(false); }},
			   {"last looks", [] { return run(true); }},
		       },
	               [](u64 i) { return i % 4 == 3 ? 1 : 0; });
}
