// Runs the kernels of exchanges, of reductions, of plans, of rings, between two ranks and one of a user's, for the
// emulated driver (internal/cuda/emulated): what streams are told to launch, each stream's in their order, those of
// different streams at the same time, in a random order of all threads. A thread of the process does nothing else.
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#define exit(code) (fflush(stdout), _exit(code)) // the process has other threads, which use what an exit would destroy

#include "across_kernels.h"
#include "allreduce.cu"
#include "messages_kernels.h"
#include "multicast.cu"
#include "p2p.cu"
#include "plans_kernels.h"
#include "rings.cu"

#define SWITCHYARD_PRIMITIVES "switchyard_primitives.h"
#include "all_gather.cu" // of a user's

#include "fibers.h"

#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>
#include <thread>

// Of the driver: where the memory behind a multicast address is; how many devices have some.
extern "C" uint32_t emu_multicast(uint64_t p, uint64_t *to, uint32_t room);

namespace {

struct kernel {
	u32 threads;
	size_t bytes;
	std::function<void(const void *)> run;
	size_t shared = 0; // the most that a block asks for
};

template <typename Args> kernel kernel_of(u32 threads, void (*f)(const Args), size_t shared = 0)
{
	return {threads, sizeof(Args), [f](const void *p) { f(*static_cast<const Args *>(p)); }, shared};
}

const std::map<std::string, kernel> kernels = {
    {"allreduce_packet", kernel_of(SW_REDUCE_PACKET_THREADS, allreduce_packet)},
    {"allreduce", kernel_of(SW_REDUCE_THREADS, allreduce)},
    {"allreduce_multicast_warps", kernel_of(SW_MULTICAST_THREADS, allreduce_multicast_warps)},
    {"allreduce_multicast_blocks", kernel_of(SW_MULTICAST_THREADS, allreduce_multicast_blocks)},
    {"allreduce_multicast_packets", kernel_of(SW_MULTICAST_THREADS, allreduce_multicast_packets)},
    {"plans", kernel_of(SW_PLAN_THREADS, plans)},
    {"all_gather", kernel_of(64, all_gather)},
    {"p2p_move", kernel_of(SW_POINT_THREADS, p2p_move)},
    {"p2p_signal", kernel_of(SW_POINT_WAITERS, p2p_signal)},
    {"p2p_wait", kernel_of(SW_POINT_WAITERS, p2p_wait)},
    {"p2p_messages", kernel_of(SW_MESSAGE_THREADS, p2p_messages)},
    {"p2p_few_messages", kernel_of(SW_FEW_MESSAGE_THREADS, p2p_few_messages)},
    {"ring_trial", kernel_of(64, ring_trial)},
    {"alltoallv_packet", kernel_of(SW_PACKET_THREADS, alltoallv_packet)},
    {"alltoallv", kernel_of(SW_SEND_THREADS + SW_WATCH_THREADS + SW_RECV_THREADS, alltoallv, 96 << 10)},
    {"alltoallv_across", kernel_of(SW_ACROSS_THREADS, alltoallv_across)},
    {"alltoallv_home", kernel_of(SW_ACROSS_HOME_THREADS, alltoallv_home)},
};

struct launched {
	const kernel *what;
	u32 device, grid;
	std::vector<u64> args;
};

struct queue {
	std::deque<launched> waiting;
	std::vector<emu::block *> blocks;
	std::vector<u64> args; // of the blocks
	u64 put = 0, ran = 0;
	bool running = false;
};

// Never destroyed: the thread that runs kernels waits for them to the end of the process.
std::mutex &queues_lock = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;
std::map<u64, queue> &queues = *new std::map<u64, queue>;

std::vector<u64> reached(u64 p)
{
	u64 to[64];
	u32 n = emu_multicast(p, to, 64);
	if (n == 0) {
		printf("multimem at %#llx, where no memory is bound\n", static_cast<unsigned long long>(p));
		exit(1);
	}
	return {to, to + n};
}

// Starts what can be started. True while something runs.
bool advance()
{
	bool busy = false;
	for (auto &q : queues) {
		queue &s = q.second;
		if (s.running && ended(s.blocks)) {
			s.running = false;
			s.ran++;
			changed.notify_all();
		}
		if (!s.running && !s.waiting.empty()) {
			launched l = std::move(s.waiting.front());
			s.waiting.pop_front();
			s.args = std::move(l.args);
			const void *args = s.args.data();
			for (u32 i = 0; i < l.grid; i++)
				s.blocks.push_back(launch(l.device, i, l.grid, l.what->threads, l.what->shared,
				                          [k = l.what, args] { k->run(args); }));
			s.running = true;
		}
		busy = busy || s.running;
	}
	return busy;
}

void run_for_ever()
{
	sigset_t all;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, nullptr); // fibers have small stacks
	emu::multicast = reached;
	for (;;) {
		{
			std::unique_lock<std::mutex> guard(queues_lock);
			while (!advance())
				changed.wait(guard);
		}
		sweep_once([](u32) { return 1; });
	}
}

} // namespace

extern "C" {

// Enqueues a launch. Kernels of other families do nothing.
void emu_enqueue(uint64_t stream, uint32_t device, const char *name, uint32_t grid, const void *args)
{
	auto k = kernels.find(name);
	if (k == kernels.end())
		return;
	launched l{&k->second, device, grid, std::vector<u64>(k->second.bytes / 8)};
	memcpy(l.args.data(), args, k->second.bytes);
	std::unique_lock<std::mutex> guard(queues_lock);
	static std::thread *runner = new std::thread(run_for_ever);
	(void)runner;
	queue &s = queues[stream];
	s.waiting.push_back(std::move(l));
	s.put++;
	changed.notify_all();
}

// How many launches a stream has had.
uint64_t emu_put(uint64_t stream)
{
	std::unique_lock<std::mutex> guard(queues_lock);
	return queues[stream].put;
}

// Whether this number have run, now or after a wait.
int emu_ran(uint64_t stream, uint64_t n, int wait)
{
	std::unique_lock<std::mutex> guard(queues_lock);
	queue &s = queues[stream];
	while (wait != 0 && s.ran < n)
		changed.wait(guard);
	return s.ran >= n;
}

} // extern "C"
