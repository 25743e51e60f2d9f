// Blocks of fibers, and the random order in which they run.
#pragma once

#include <algorithm>
#include <string>
#include <sys/mman.h>

#undef clock

asm(R"(
.text
.globl emu_switch
emu_switch:
	pushq %rbp
	pushq %rbx
	pushq %r12
	pushq %r13
	pushq %r14
	pushq %r15
	movq %rsp, (%rdi)
	movq %rsi, %rsp
	popq %r15
	popq %r14
	popq %r13
	popq %r12
	popq %rbx
	popq %rbp
	ret
)");

namespace {

using namespace sw;
using emu::draw;

constexpr size_t stack_bytes = 64 << 10;
std::vector<char *> free_stacks;
std::vector<emu::block *> running;

void fiber_main()
{
	emu::fiber &f = *emu::current;
	emu::block &b = *f.block;
	b.kernel();
	f.done = true;
	emu::warp &w = b.warps[f.thread / 32];
	auto leave = [](emu::meeting &m, u32 &alive) { // the others need not wait for this thread
		if (--alive > 0 && m.here == alive) {
			m.here = 0;
			m.rounds++;
		}
	};
	leave(w.met, w.alive);
	leave(b.met, b.alive);
	emu::emu_switch(&f.stack_pointer, emu::scheduler);
	abort();
}

emu::block *launch(u32 rank, u32 id, u32 grid, u32 threads, size_t shared_bytes, std::function<void()> kernel)
{
	auto *b = new emu::block;
	b->rank = rank, b->id = id, b->grid = grid, b->threads = b->alive = threads;
	b->warps.resize(threads / 32);
	b->dynamic.assign(shared_bytes / 8 + 1, 0xEEEEEEEEEEEEEEEE);
	b->kernel = std::move(kernel);
	b->fibers.resize(threads);
	for (u32 t = 0; t < threads; t++) {
		if (free_stacks.empty()) {
			char *p = static_cast<char *>(mmap(nullptr, 256 * stack_bytes, PROT_READ | PROT_WRITE,
			                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
			for (int i = 0; i < 256; i++)
				free_stacks.push_back(p + i * stack_bytes);
		}
		char *stack = free_stacks.back();
		free_stacks.pop_back();
		void **top =
		    reinterpret_cast<void **>(stack + stack_bytes) - 8; // six registers, where to go, and alignment
		std::fill(top, top + 6, nullptr);
		top[6] = reinterpret_cast<void *>(fiber_main);
		b->fibers[t] = {top, stack, t, b, false};
	}
	running.push_back(b);
	return b;
}

void retire(emu::block *b)
{
	running.erase(std::find(running.begin(), running.end(), b));
	for (emu::fiber &f : b->fibers)
		free_stacks.push_back(f.stack);
	for (auto &s : b->statics)
		free(s.second);
	delete b;
}

// One sweep: every block that is awake lets each of its threads go on once. pace is how often a rank's blocks run.
template <typename Pace> void sweep_once(Pace pace)
{
	emu::time_ns += 50;
	for (emu::block *b : running) {
		if (b->asleep > 0) {
			b->asleep--;
			continue;
		}
		if (draw(300) == 0)
			b->asleep = draw(400);
		if (draw(4) == 0 || draw(pace(b->rank)) != 0)
			continue;
		u32 first = draw(b->threads);
		for (u32 i = 0; i < b->threads; i++) {
			emu::fiber &f = b->fibers[(first + i) % b->threads];
			if (f.done)
				continue;
			emu::current = &f;
			emu::emu_switch(&emu::scheduler, f.stack_pointer);
		}
	}
}

// True when all blocks of a list have ended, which are then gone.
inline bool ended(std::vector<emu::block *> &blocks)
{
	if (!std::all_of(blocks.begin(), blocks.end(), [](emu::block *b) { return b->alive == 0; }))
		return false;
	std::for_each(blocks.begin(), blocks.end(), retire);
	blocks.clear();
	return true;
}

// Tells who is still running after more sweeps than a correct run takes.
inline bool hangs(u64 sweep)
{
	if (sweep <= 500'000)
		return false;
	for (emu::block *b : running)
		printf("rank %u, block %u: %u threads are still there\n", b->rank, b->id, b->alive);
	return true;
}

// The state of a rank in a sweep: it has blocks, it has none, or the run is to end.
enum class at_work { yes, no, stop };

// Sweeps until no rank is at work; go_on retires the blocks of a rank that have ended, and launches what comes next.
// False where a rank stops the run, or nothing moves.
template <typename GoOn, typename Pace>
bool run_ranks(u32 ranks, GoOn go_on, Pace pace, const std::function<void(u64)> &each_sweep)
{
	for (u64 sweep = 0;; sweep++) {
		bool busy = false;
		for (u32 r = 0; r < ranks; r++) {
			at_work now = go_on(r);
			if (now == at_work::stop)
				return false;
			busy = busy || now == at_work::yes;
		}
		if (!busy)
			return true;
		if (hangs(sweep))
			return false;
		if (each_sweep)
			each_sweep(sweep);
		sweep_once(pace);
	}
}

// The segments of all ranks, and the records of their faults.
struct segments {
	u32 size;
	u64 heap, stride, base;
	std::vector<u8> memory;
	std::vector<sw_fault> faults;

	// Gives each of the ranks its bytes.
	void take(u32 ranks, u64 bytes)
	{
		size = ranks, stride = bytes;
		memory.assign(stride * size + 4096, 0);
		base = (reinterpret_cast<u64>(memory.data()) + 4095) / 4096 * 4096;
		faults.resize(size);
	}

	u64 segment(u32 rank) const { return base + rank * stride; }
	u32 fault(u32 rank) const { return faults[rank].kind; }
	sw_world seen_by(u32 rank, u64 control, u64 timeout_ns) const
	{
		return {base, stride, 0, control, reinterpret_cast<u64>(&faults[rank]), timeout_ns, rank, size};
	}
};

// Sets the abort words, or the host's.
inline void end_waits(segments &w, bool by_host)
{
	for (u32 r = 0; r < w.size; r++)
		if (by_host)
			w.faults[r].stop = 1;
		else
			at<u64>(w.segment(r) + SW_ABORT_OFFSET) = 1;
}

// For every sweep of a run: in one of the first, waits are to end.
inline std::function<void(u64)> abort_in(segments &w)
{
	return [&w, when = draw(3000), by_host = draw(2) != 0](u64 sweep) {
		if (sweep == when)
			end_waits(w, by_host);
	};
}

// For every sweep of a run: waits are to end when all ranks but one are through. That one has all that it waits for.
inline std::function<void(u64)> abort_behind(segments &w, std::function<bool(u32)> through)
{
	return [&w, through, by_host = draw(2) != 0](u64) {
		u32 open = 0;
		for (u32 r = 0; r < w.size; r++)
			open += through(r) ? 0 : 1;
		if (open == 1)
			end_waits(w, by_host);
	};
}

// True when every rank but the one that was away has given up and says why.
inline bool gave_up(const segments &w, u32 away, bool aborted)
{
	for (u32 r = 0; r < w.size; r++)
		if (r != away && w.fault(r) != (aborted ? SW_FAULT_ABORTED : SW_FAULT_TIMEOUT)) {
			printf("rank %u was away: rank %u has fault %u\n", away, r, w.fault(r));
			return false;
		}
	return true;
}

// Says which element of what a call has left is wrong.
inline bool wrong(u32 rank, u64 call, u64 i, u32 from)
{
	printf("rank %u, call %llu: element %llu from rank %u\n", rank, static_cast<unsigned long long>(call),
	       static_cast<unsigned long long>(i), from);
	return false;
}

// The trouble of a run. In a third of the runs one rank stays away: the others give up at their deadline, or when they
// are told to. Or all come, and are told to give up when there is nothing more to wait for.
struct trouble {
	bool aborted = draw(2) != 0, behind;
	u32 away; // the number of ranks: none
	u64 timeout_ns;

	explicit trouble(u32 ranks, bool behind = false)
	    : behind(behind), away(!behind && draw(3) == 0 ? draw(ranks) : ranks),
	      timeout_ns(away == ranks || aborted ? u64{1} << 50 : 500'000)
	{
	}
};

// Is run_ranks, and requires that all ranks have given up where one was away, and none else. through says whether a
// rank has made all of its calls.
template <typename GoOn> bool run_in(segments &w, const trouble &t, GoOn go_on, const std::function<bool(u32)> &through)
{
	std::function<void(u64)> each_sweep;
	if (t.behind)
		each_sweep = abort_behind(w, through);
	else if (t.away < w.size && t.aborted)
		each_sweep = abort_in(w);
	if (!run_ranks(w.size, go_on, [](u32 rank) { return 1 + rank; }, each_sweep))
		return false;
	if (t.away < w.size)
		return gave_up(w, t.away, t.aborted);
	return std::all_of(w.faults.begin(), w.faults.end(), [](const sw_fault &f) { return f.kind == SW_FAULT_NONE; });
}

// Has all ranks make calls, numbered from 1. begin returns the blocks of a rank's call; end says whether it has left
// what it should. A rank that leaves a call before all ranks have begun it stops the run, unless its kernel gave up.
template <typename Begin, typename End> bool make_calls(segments &w, const trouble &t, u64 calls, Begin begin, End end)
{
	std::vector<u64> begun(w.size);
	std::vector<std::vector<emu::block *>> blocks(w.size);
	auto go_on = [&](u32 r) {
		if (!blocks[r].empty()) {
			if (!ended(blocks[r]))
				return at_work::yes;
			for (u32 q = 0; q < w.size; q++)
				if (w.fault(r) == SW_FAULT_NONE && begun[q] < begun[r]) {
					printf("rank %u left a call before rank %u began it\n", r, q);
					return at_work::stop;
				}
			if (!end(r, begun[r]))
				return at_work::stop;
		}
		if (r == t.away || begun[r] == calls || w.fault(r) != SW_FAULT_NONE)
			return at_work::no;
		blocks[r] = begin(r, ++begun[r]);
		return at_work::yes;
	};
	return run_in(w, t, go_on, [&](u32 r) { return begun[r] == calls && blocks[r].empty(); });
}

struct scenario {
	const char *name;
	std::function<bool()> run;
};

// Runs rounds of scenarios. `which` picks each by its seed, counted from 0, so that a failure comes again from its seed
// and one round.
inline int run_all(
    int count, char **words, const std::vector<scenario> &scenarios,
    const std::function<size_t(u64)> &which = [](u64) { return 0; })
{
	u64 seed = count > 1 ? strtoull(words[1], nullptr, 10) : 1,
	    rounds = count > 2 ? strtoull(words[2], nullptr, 10) : 100;
	for (u64 i = 0; i < rounds; i++) {
		emu::dice.seed(seed + i);
		auto &s = scenarios[which(seed + i - 1)];
		if (!s.run()) {
			printf("%s, seed %llu\n", s.name, static_cast<unsigned long long>(seed + i));
			return 1;
		}
	}
	return 0;
}

} // namespace
