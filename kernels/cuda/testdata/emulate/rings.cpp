// Runs rings of chunks between ranks of different hosts on a processor, in random orders of their threads: calls in a
// row, of any numbers of chunks, slots and descriptors, with ranks or proxies that are missing, and aborts. Between the
// sweeps of the threads proxies read queues and rails deliver.
//
//	emulate SEED ROUNDS
#include "rings.cu"

#include "fibers.h"
#include "proxies.h"

namespace {

constexpr u32 most_blocks = 2;

struct rank_state {
	std::vector<u64> state;
	u64 calls = 0;
	std::vector<emu::block *> blocks;
	std::shared_ptr<trial> args;
};

struct world : segments {
	u32 blocks, slots, gives, chunks;
	u64 slot_bytes, seed;
	rails rail;
	std::vector<rank_state> ranks;
	u64 wrong_bytes = 0;

	explicit world(u32 size) : ranks(size)
	{
		take(size, 72 << 10);
		blocks = 1 + draw(most_blocks), slots = 1 + draw(3), gives = 1 + draw(slots), chunks = 1 + draw(6);
		slot_bytes = 1 + draw(200), seed = draw(1 << 20);
		rail.lay(size, words(), words() + 2 * ring_count() * slots * slot_bytes, static_cast<i64>(slot_bytes));
		for (rank_state &r : ranks)
			r.state.assign(2 * ring_count(), 0);
	}

	// Rings are numbered by the other rank and the block: both as this rank's to others and as others' to it.
	u64 ring_count() const { return static_cast<u64>(size) * blocks; }
	u64 words() const { return 2 * 8 * ring_count(); }
	u64 number(u32 other, u32 block) const { return static_cast<u64>(other) * blocks + block; }
	u64 landed(u32 from, u32 block) const { return 8 * number(from, block); }
	u64 given(u32 to, u32 block) const { return 8 * (ring_count() + number(to, block)); }
	u64 slots_of(u32 from, u32 block) const { return words() + number(from, block) * slots * slot_bytes; }
	u64 sources_of(u32 to, u32 block) const
	{
		return words() + (ring_count() + number(to, block)) * slots * slot_bytes;
	}

	sw_ring ring(u32 rank, u32 from, u32 to, u32 block)
	{
		u32 other = rank == from ? to : from;
		u64 at = (rank == from ? 0 : ring_count()) + number(other, block);
		return {slots_of(from, block),
		        sources_of(to, block),
		        landed(from, block),
		        given(to, block),
		        reinterpret_cast<u64>(&ranks[rank].state[at]),
		        static_cast<i64>(slot_bytes),
		        slots,
		        gives,
		        other,
		        other};
	}

	std::shared_ptr<trial> arguments(u32 rank, u64 timeout_ns)
	{
		auto a = std::make_shared<trial>();
		a->world = seen_by(rank, 65536, timeout_ns);
		a->rail = rail.seen_by(rank, reinterpret_cast<u64>(rail.ends[rank].next));
		a->chunks = chunks, a->seed = seed, a->wrong = reinterpret_cast<u64>(&wrong_bytes);
		for (u32 i = 1; i < size; i++) {
			u32 peer = (rank + i) % size;
			for (u32 b = 0; b < blocks; b++) {
				a->out[a->peers * blocks + b] = ring(rank, rank, peer, b);
				a->in[a->peers * blocks + b] = ring(rank, peer, rank, b);
			}
			a->peers++;
		}
		return a;
	}
};

bool run()
{
	world w(2 + draw(3));
	u64 calls = 1 + draw(3);
	bool aborted = draw(2) != 0;
	u32 away = draw(3) == 0 ? draw(w.size) : w.size;
	bool proxy_only = away < w.size && draw(2) != 0; // its kernels come
	u64 timeout_ns = away == w.size || aborted ? u64{1} << 50 : 500'000;
	auto go_on = [&](u32 r) {
		rank_state &m = w.ranks[r];
		if (w.wrong_bytes != 0 || w.rail.broken)
			return at_work::stop;
		if (!m.blocks.empty() && !ended(m.blocks))
			return at_work::yes;
		if (m.calls == calls || w.fault(r) != SW_FAULT_NONE || (r == away && !proxy_only))
			return at_work::no;
		m.calls++;
		m.args = w.arguments(r, timeout_ns);
		for (u32 b = 0; b < w.blocks; b++)
			m.blocks.push_back(launch(r, b, w.blocks, 32, 0, [a = m.args] { ring_trial(*a); }));
		return at_work::yes;
	};
	auto aborts = away < w.size && aborted ? abort_in(w) : std::function<void(u64)>{};
	auto each_sweep = [&](u64 sweep) {
		if (aborts)
			aborts(sweep);
		for (u32 r = 0; r < w.size; r++)
			if (r != away && draw(3) != 0)
				w.rail.proxy(r);
	};
	bool ran = run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank; }, each_sweep);
	if (w.wrong_bytes != 0)
		printf("chunks have %llu wrong bytes\n", static_cast<unsigned long long>(w.wrong_bytes));
	if (!ran || w.wrong_bytes != 0 || w.rail.broken)
		return false;
	if (away < w.size) {
		for (u32 r = 0; r < w.size; r++) // who has room for all chunks needs its own proxy for nothing
			if (r != away && w.fault(r) != (aborted ? SW_FAULT_ABORTED : SW_FAULT_TIMEOUT)) {
				printf("rank %u was away: rank %u has fault %u\n", away, r, w.fault(r));
				return false;
			}
		return true;
	}
	for (u32 r = 0; r < w.size; r++)
		if (w.fault(r) != SW_FAULT_NONE || (w.blocks == 1 && w.rail.ran(r) != calls)) {
			printf("rank %u has fault %u and has ended %llu calls\n", r, w.fault(r),
			       static_cast<unsigned long long>(w.rail.ran(r)));
			return false;
		}
	return true;
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words, {{"rings", run}}, [](u64) { return 0; });
}
