// Kernels of one's own work with those of other ranks by peers' addresses, signals, waits that end, and the number of
// the call. This header includes nothing of Switchyard, and no object of it.
//
//	extern "C" __global__ void everybody(const switchyard::communicator *c)
//	{
//		switchyard::call call(c);
//		if (!call.begun())
//			return;
//		for (uint32_t peer = 0; peer < call.size(); peer++)
//			call.signal(peer, 0);
//		for (uint32_t peer = 0; peer < call.size(); peer++)
//			if (!call.wait(peer, 0))
//				return;
//	}
//
// All ranks launch the same kernels of a communicator in the same order, and on one rank one follows the other. A
// launch is a call: its number is one more than that of the last, also when a graph replays it. Grids and blocks have
// one dimension. All blocks of a launch that wait must run at the same time.
//
// Every thread of a block makes the same calls of these functions, for they meet the block's threads. A thread of a
// peer that comes back from a wait sees what all threads of the block have written before they signalled, in whatever
// memory (release and acquire at system scope). Rows that a thread has read before may be in its L1 cache: read what
// peers write once, after the wait.
//
// A wait ends without a signal when the communicator's deadline has passed, when the group has failed, or when another
// wait of this rank has ended so; it looks once more then. The kernel then returns. The rank that was waited for is in
// the error that the communicator has from then on, and later launches do nothing.
#pragma once

#include <cstdint>

// It grows when the meaning of a word changes. A communicator refuses kernels with another one: begun() is false.
#define SWITCHYARD_VERSION 1

#ifdef SWITCHYARD_PRIMITIVES // those of a processor: tests
#include SWITCHYARD_PRIMITIVES
#else

namespace switchyard::detail {

__device__ __forceinline__ uint64_t load_relaxed(uint64_t at)
{
	uint64_t v;
	asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
	return v;
}

__device__ __forceinline__ uint64_t load_acquire(uint64_t at)
{
	uint64_t v;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
	return v;
}

__device__ __forceinline__ void store_relaxed(uint64_t at, uint64_t v)
{
	asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ uint64_t now_ns()
{
	uint64_t t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

} // namespace switchyard::detail

#endif

namespace switchyard {

// The words of a communicator, in memory of the GPU: a launch gets their address. They keep their places in later
// versions. A place is a distance from the beginning of a rank's segment of the symmetric heap.
struct communicator {
	uint32_t version; // SWITCHYARD_VERSION of the library
	uint32_t signals; // from each rank to each other
	uint32_t rank, size;
	uint64_t base, stride; // segment r is at base + r * stride,
	uint64_t segments;   // or, where this is not 0, at the r-th address of the table here, and this rank's as above
	uint64_t control;    // place of a rank's detail::control
	uint64_t lines;      // place of its signals: by the rank that signals and by index, 32 bytes each
	uint64_t abort;      // place of a word that is not 0 when the rank's waits are to end
	uint64_t record;     // address of this rank's detail::record
	uint64_t timeout_ns; // of every wait
};

namespace detail {

struct control {          // of which only its own rank writes
	uint64_t calls;   // so far
	uint32_t readers; // blocks of the running launch that have read calls
	uint32_t fault;   // not 0: launches do nothing
};

struct record { // of the first fault, in memory of the host; kind is written last
	uint32_t kind, peer;
	uint64_t call, kernels, librarys;
	uint64_t others[6];
	uint64_t stop; // the host's word: the rank's waits are to end
};

enum : uint32_t { late = 1, aborted = 2, other_version = 100 };

constexpr uint32_t line_bytes = 32;

} // namespace detail

class call {
      public:
	// Begins a launch, first of all in it.
	__device__ __forceinline__ explicit call(const communicator *c, uint32_t version = SWITCHYARD_VERSION)
	    : c(*c), own(c->base + c->rank * c->stride)
	{
		uint64_t at = own + c->control;
		uint64_t calls = detail::load_relaxed(at), readers_and_fault = detail::load_relaxed(at + 8);
		good = readers_and_fault >> 32 == 0;
		it = calls + 1;
		// Behind the last load of the block. A fault may be written just now: all threads go on, or none.
		good = __syncthreads_or(!good) == 0;
		if (threadIdx.x == 0) {
			auto *words = reinterpret_cast<detail::control *>(at);
			if (gridDim.x == 1 || count_reader(words) == gridDim.x - 1) {
				words->readers = 0;
				detail::store_relaxed(at, it);
			}
			if (good && c->version != version)
				give_up(detail::other_version, c->rank, version);
		}
		good = good && c->version == version;
	}

	// Whether the launch goes on. False after a fault, and in a kernel that was built for another version.
	__device__ __forceinline__ bool begun() const { return good; }

	__device__ __forceinline__ uint32_t rank() const { return c.rank; }
	__device__ __forceinline__ uint32_t size() const { return c.size; }
	// How many indexes of signals there are for each pair of ranks.
	__device__ __forceinline__ uint32_t signals() const { return c.signals; }
	// The number of the call, from 1 on.
	__device__ __forceinline__ uint64_t number() const { return it; }

	// Where a rank has what lies in symmetric memory of this one.
	template <typename T> __device__ __forceinline__ T *at(uint32_t peer, T *mine) const
	{
		return reinterpret_cast<T *>(segment(peer) + (reinterpret_cast<uint64_t>(mine) - own));
	}

	// Tells a rank, by the signal of this index, that the block has come so far. Once a call for each rank and
	// index, so blocks take indexes of their own. A rank may signal itself.
	__device__ __forceinline__ void signal(uint32_t peer, uint32_t index) const
	{
		__syncthreads();
		if (threadIdx.x == 0) {
			detail::fence();
			detail::store_relaxed(segment(peer) + line(c.rank, index), it);
		}
	}

	// Waits for a rank's signal of this call. False: the kernel returns.
	__device__ __forceinline__ bool wait(uint32_t peer, uint32_t index) const
	{
		bool failed = false;
		if (threadIdx.x == 0) {
			uint64_t word = own + line(peer, index), since = 0;
			uint32_t over = 0; // why the wait ends, with the next look
			for (uint32_t polls = 1; !failed && detail::load_acquire(word) < it; polls++)
				if (over != 0) {
					give_up(over, peer);
					failed = true;
				} else if (polls % look_every == 0) {
					failed = given_up();
					over = reason(since);
				}
		}
		return __syncthreads_or(failed) == 0;
	}

      private:
	static constexpr uint32_t look_every =
	    256; // polls of a wait between two looks at the clock and the words of aborts

	communicator c;
	uint64_t own, it;
	bool good;

	__device__ __forceinline__ uint64_t segment(uint32_t rank) const
	{
		if (c.segments != 0 && rank != c.rank)
			return reinterpret_cast<const uint64_t *>(c.segments)[rank];
		return c.base + rank * c.stride;
	}

	__device__ __forceinline__ uint64_t line(uint32_t from, uint32_t index) const
	{
		return c.lines + (from * static_cast<uint64_t>(c.signals) + index) * detail::line_bytes;
	}

	// How many blocks have counted before this one. The block counts behind its loads.
	static __device__ __forceinline__ uint32_t count_reader(detail::control *words)
	{
		__threadfence();
		uint32_t before = atomicAdd(&words->readers, 1u);
		__threadfence();
		return before;
	}

	// Whether somebody of this rank has given up and said why.
	__device__ __forceinline__ bool given_up() const
	{
		return detail::load_relaxed(own + c.control + 8) >> 32 != 0;
	}

	// Why a wait is to end; 0 where it goes on.
	__device__ __noinline__ uint32_t reason(uint64_t &since) const
	{
		if (detail::load_relaxed(own + c.abort) != 0 ||
		    detail::load_relaxed(c.record + __builtin_offsetof(detail::record, stop)) != 0)
			return detail::aborted;
		uint64_t t = detail::now_ns();
		since = since == 0 ? t : since;
		return t - since <= c.timeout_ns ? 0 : detail::late;
	}

	// Records the first fault of the rank.
	__device__ __noinline__ void give_up(uint32_t kind, uint32_t peer, uint64_t version = 0) const
	{
		auto *words = reinterpret_cast<detail::control *>(own + c.control);
		if (atomicCAS(&words->fault, 0u, kind) != 0)
			return;
		auto *r = reinterpret_cast<volatile detail::record *>(c.record);
		r->peer = peer;
		r->call = it;
		r->kernels = version;
		r->librarys = c.version;
		__threadfence_system();
		r->kind = kind;
		__threadfence_system();
	}
};

} // namespace switchyard
