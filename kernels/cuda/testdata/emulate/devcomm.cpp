// Runs a kernel of a user's, the all-gather of examples/kernels, on a processor in random orders of its threads: calls
// in a row, of any counts and numbers of blocks, with ranks that are missing, aborts, and kernels of another version.
//
//	emulate SEED ROUNDS
#include "device.cuh"

#define SWITCHYARD_PRIMITIVES "switchyard_primitives.h"
#include "all_gather.cu"

#include "fibers.h"

#define SAME(a, b) static_assert(a == b)
SAME(offsetof(switchyard::detail::control, calls), offsetof(sw_control, epoch));
SAME(offsetof(switchyard::detail::control, readers), offsetof(sw_control, readers));
SAME(offsetof(switchyard::detail::control, fault), offsetof(sw_control, fault));
SAME(offsetof(switchyard::detail::record, kind), offsetof(sw_fault, kind));
SAME(offsetof(switchyard::detail::record, peer), offsetof(sw_fault, peer));
SAME(offsetof(switchyard::detail::record, call), offsetof(sw_fault, epoch));
SAME(offsetof(switchyard::detail::record, kernels), offsetof(sw_fault, sent));
SAME(offsetof(switchyard::detail::record, librarys), offsetof(sw_fault, expected));
SAME(offsetof(switchyard::detail::record, stop), offsetof(sw_fault, stop));
SAME(u32{switchyard::detail::late}, SW_FAULT_TIMEOUT);
SAME(u32{switchyard::detail::aborted}, SW_FAULT_ABORTED);

namespace {

constexpr u64 most = 300; // words of a part
constexpr u32 blocks = 3, signals = 2 * blocks;

struct world : segments {
	u64 control = 65536, lines = control + 4096, output;

	explicit world(u32 ranks)
	{
		output = lines + ranks * signals * switchyard::detail::line_bytes;
		take(ranks, (output + ranks * most * 8 + 4095) / 4096 * 4096);
	}
};

u64 value(u64 number, u32 src, u64 i) { return (number * 64 + src) << 32 | i; }

struct rank_state {
	std::vector<u64> input;
	switchyard::communicator seen;
};

bool run(bool behind)
{
	world w(2 + draw(3));
	u64 calls = 1 + draw(4), seed = draw(1 << 20);
	trouble t(w.size, behind);
	u64 old = t.away == w.size && !behind && draw(3) == 0 ? 1 + draw(static_cast<u32>(calls))
	                                                      : 0; // the call of an old kernel
	u32 grid = 1 + draw(blocks), threads = 32 * (1 + draw(3));
	std::vector<rank_state> ranks(w.size);
	auto count_of = [&](u64 number) { return (seed + number * 7919) % most; };
	for (u32 r = 0; r < w.size; r++)
		ranks[r].seen = {SWITCHYARD_VERSION,
		                 signals,
		                 r,
		                 w.size,
		                 w.base,
		                 w.stride,
		                 0,
		                 w.control,
		                 w.lines,
		                 SW_ABORT_OFFSET,
		                 reinterpret_cast<u64>(&w.faults[r]),
		                 t.timeout_ns};
	// Whether a call has left on a rank what it should, once its launch has ended.
	auto right = [&](u32 r, u64 number) {
		u64 n = count_of(number);
		if (number == old) { // refused: the host says why, and forgets it
			sw_fault &f = w.faults[r];
			u32 &fault = at<sw_control>(w.segment(r) + w.control).fault;
			if (f.kind != switchyard::detail::other_version || fault != f.kind || f.peer != r ||
			    f.sent != SWITCHYARD_VERSION || f.expected != SWITCHYARD_VERSION + 1) {
				printf("rank %u: an old kernel left fault %u, versions %llu and %llu\n", r, f.kind,
				       static_cast<unsigned long long>(f.sent),
				       static_cast<unsigned long long>(f.expected));
				return false;
			}
			f.kind = fault = 0;
			return true;
		}
		if (w.fault(r) != SW_FAULT_NONE)
			return t.away < w.size;
		for (u32 src = 0; src < w.size; src++)
			for (u64 i = 0; i < n; i++)
				if (at<u64>(w.segment(r) + w.output + (src * n + i) * 8) != value(number, src, i))
					return wrong(r, number, i, src);
		return true;
	};
	auto begin = [&](u32 r, u64 number) {
		rank_state &m = ranks[r];
		u64 n = count_of(number);
		m.input.resize(most);
		for (u64 i = 0; i < n; i++)
			m.input[i] = value(number, r, i);
		m.seen.version = SWITCHYARD_VERSION + (number == old ? 1 : 0);
		all_gather_args a{&m.seen, reinterpret_cast<uint64_t *>(w.segment(r) + w.output), m.input.data(), n};
		std::vector<emu::block *> all;
		for (u32 b = 0; b < grid; b++)
			all.push_back(launch(r, b, grid, threads, 0, [a] { all_gather(a); }));
		return all;
	};
	if (!make_calls(w, t, calls, begin, right))
		return false;
	for (u32 r = 0; r < w.size; r++)
		if (t.away == w.size && at<sw_control>(w.segment(r) + w.control).epoch != calls)
			return false;
	return true;
}

} // namespace

int main(int count, char **words)
{
	return run_all(count, words,
	               {
			   {"kernels of a user's", [] { return run(false); }},
			   {"last looks", [] { return run(true); }},
		       },
	               [](u64 i) { return i % 4 == 3 ? 1 : 0; });
}
