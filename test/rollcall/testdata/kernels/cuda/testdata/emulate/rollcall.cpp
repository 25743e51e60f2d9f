// Runs roll calls on a processor, in random worlds and random orders of their threads: a rank leaves a call when all
// ranks have begun it.
//
//	emulate SEED ROUNDS
#include "rollcall.cu"

#include "fibers.h"

namespace {

struct world : segments {
	sw_rollcall_block block;

	explicit world(u32 ranks) : block(sw_lay_rollcall_block(65536, ranks))
	{
		take(ranks, (block.end + 4095) / 4096 * 4096);
	}
};

// Every rank but one, or all of them, make some calls. Those without that rank give up at their deadline, or when they
// are told to.
bool run()
{
	world w(1 + draw(5));
	bool aborted = draw(2) != 0;
	u32 away = w.size > 1 && draw(3) == 0 ? draw(w.size) : w.size;
	u64 calls = 1 + draw(6), timeout_ns = away == w.size || aborted ? u64{1} << 50 : 500'000;
	std::vector<u64> begun(w.size), left(w.size);
	std::vector<std::vector<emu::block *>> blocks(w.size);
	auto go_on = [&](u32 r) {
		if (!blocks[r].empty() && ended(blocks[r])) {
			left[r]++;
			for (u32 q = 0; q < w.size; q++)
				if (w.fault(r) == SW_FAULT_NONE && begun[q] < left[r]) {
					printf("rank %u left a call before rank %u began it\n", r, q);
					return at_work::stop;
				}
		}
		if (blocks[r].empty() && r != away && begun[r] < calls) {
			begun[r]++;
			auto a = std::make_shared<sw_rollcall_args>();
			a->world = w.seen_by(r, w.block.control, timeout_ns), a->block = w.block;
			blocks[r].push_back(launch(r, 0, 1, SW_ROLLCALL_THREADS, 0, [a] { rollcall(*a); }));
		}
		return blocks[r].empty() ? at_work::no : at_work::yes;
	};
	auto each_sweep = away < w.size && aborted ? abort_in(w) : std::function<void(u64)>{};
	if (!run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank; }, each_sweep))
		return false;
	if (away < w.size)
		return gave_up(w, away, aborted);
	return std::all_of(w.faults.begin(), w.faults.end(), [](const sw_fault &f) { return f.kind == SW_FAULT_NONE; });
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words, {{"roll calls", run}}, [](u64) { return 0; });
}
