// Runs the copy of what a dispatch has left on a processor, with random parts and random orders of its threads, and
// compares every byte that it may write, and those around them.
//
//	emulate SEED ROUNDS
#include "../../internal/cuda/layout/args.h"

#define SW_RESULT_THREADS 64
#define SW_TAKE_RESULT_THREADS 64

#include "results.cu"

#include "fibers.h"

namespace {

constexpr u8 untouched = 0x5a;
constexpr u64 around = 64; // bytes before and behind a part

// A part with its memory: what is copied, and what should be written.
struct part {
	std::vector<u8> from, to, want;
	sw_result_part p{};
};

part random_part(bool failed, u64 came)
{
	part m;
	bool by_rows = draw(3) != 0;
	u64 columns = by_rows && draw(3) == 0 ? 1 + draw(4) : 1, row = 4 * (1 + draw(draw(3) == 0 ? 600 : 6)),
	    most = came + draw(3), room = draw(3) == 0 ? came : draw(static_cast<u32>(most) + 4);
	m.p.row = by_rows ? row : 0, m.p.columns = static_cast<u32>(columns), m.p.fills = draw(2),
	m.p.behind = static_cast<u32>(draw(256)) * 0x01010101;
	m.p.bytes = row * room, m.p.pitch = row * (by_rows ? std::max(most, room) : room);
	u64 shift = draw(2) == 0 ? 0 : 4 * draw(4);
	m.from.resize(columns * m.p.pitch + 2 * around), m.to.assign(columns * m.p.bytes + 2 * around, untouched);
	for (u8 &b : m.from)
		b = static_cast<u8>(draw(256));
	// Both begin at a multiple of 4 bytes.
	m.p.from = (reinterpret_cast<u64>(m.from.data()) + 15) / 16 * 16 + shift;
	m.p.to = (reinterpret_cast<u64>(m.to.data()) + 15) / 16 * 16 + 4 * draw(4);
	m.want = m.to;
	u64 first = m.p.to - reinterpret_cast<u64>(m.to.data()), n = by_rows
	                                                                 ? std::min(failed ? 0 : came * row, m.p.bytes)
	                                                             : failed && m.p.fills != 0 ? 0
	                                                                                        : m.p.bytes;
	for (u64 c = 0; c < columns; c++)
		for (u64 i = 0; i < m.p.bytes; i++)
			if (i < n)
				m.want[first + c * m.p.bytes + i] = at<u8>(m.p.from + c * m.p.pitch + i);
			else if (m.p.fills != 0)
				m.want[first + c * m.p.bytes + i] = static_cast<u8>(m.p.behind);
	return m;
}

bool copies()
{
	bool failed = draw(4) == 0;
	u32 rows = draw(4) == 0 ? 0 : draw(40), fault = failed ? SW_FAULT_INDEX : SW_FAULT_NONE;
	std::vector<part> parts(1 + draw(SW_RESULT_PARTS));
	sw_result_args a{};
	a.fault = failed && draw(2) == 0 ? 0 : reinterpret_cast<u64>(&fault), a.rows = reinterpret_cast<u64>(&rows);
	for (part &m : parts)
		m = random_part(failed, rows), a.parts[a.count++] = m.p;
	std::vector<emu::block *> blocks;
	u32 grid = 1 + draw(3);
	bool begun = false;
	auto go_on = [&](u32) {
		for (u32 b = 0; b < grid && !begun; b++)
			blocks.push_back(launch(0, b, grid, SW_RESULT_THREADS, 0, [&a] { copy_results(a); }));
		begun = true;
		return blocks.empty() || ended(blocks) ? at_work::no : at_work::yes;
	};
	if (!run_ranks(1, go_on, [](u32) { return 1; }, {}))
		return false;
	for (size_t i = 0; i < parts.size(); i++)
		for (size_t k = 0; k < parts[i].to.size(); k++)
			if (parts[i].to[k] != parts[i].want[k]) {
				printf("part %zu: byte %zu of %zu is %u, want %u\n", i, k, parts[i].to.size(),
				       parts[i].to[k], parts[i].want[k]);
				return false;
			}
	return true;
}

} // namespace

int main(int count, char **words) { return run_all(count, words, {{"copies", copies}}); }
