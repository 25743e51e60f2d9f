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

bool run()
{
	world w(1 + draw(5));
	trouble t(w.size);
	auto begin = [&](u32 r, u64) -> std::vector<emu::block *> {
		sw_rollcall_args a{w.seen_by(r, w.block.control, t.timeout_ns), w.block};
		return {launch(r, 0, 1, SW_ROLLCALL_THREADS, 0, [a] { rollcall(a); })};
	};
	return make_calls(w, t, 1 + draw(6), begin, [](u32, u64) { return true; });
}

} // namespace

int main(int count, char **words) { return run_all(count, words, {{"roll calls", run}}); }
