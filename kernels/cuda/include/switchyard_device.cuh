// Device functions by which kernels of others run next to a dispatch or a combine: to begin with rows that have landed,
// and to have rows sent back as they are made. It includes nothing of Switchyard, and no object of it.
//
//	words landed{got.landed, got.counts, expert_of_tile};   // from the dispatcher, which was made with landed
//	if (!switchyard::wait_rows(landed, tile))
//		return;                                          // the deadline has passed
//	... reads the tile's rows, writes its results ...
//	switchyard::rows_done(ready, expert_of_tile, tile, rows); // ready goes to combine
//
// A word counts rows. Today there is one for each expert of the rank, so a tile waits for all rows of its expert; a
// null pointer in place of `word_of` says that each tile has a word of its own.
//
// Memory order. A block that writes rows adds to their word with release at system scope; wait_rows reads it with
// acquire at system scope and then meets the threads of the block, so every thread reads what was written. rows_done
// meets the threads of the block, and then one adds with release at system scope, so a thread that sees the sum sees
// the rows of all threads, also on another GPU. Rows that were read before by a thread may be in its L1 cache: read
// them once, after the wait.
//
// A kernel that waits must leave room for those that it waits for. They are launched before it, and it has at most
// free_multiprocessors blocks of which none shares a multiprocessor.
//
// Load kernels before one of them waits, for example with cudaFuncGetAttributes: the driver loads a kernel when it is
// first launched, and that waits for kernels which run.
#pragma once

#include <cstdint>

// It grows when the meaning of a word changes.
#define SWITCHYARD_DEVICE_VERSION 1

#ifndef __CUDACC__ // a processor, on which a thread is a block: tests
#include <chrono>
#define SWITCHYARD_FUNCTION inline
#else
#define SWITCHYARD_FUNCTION __device__ __forceinline__
#endif

namespace switchyard {

struct words {
	const uint32_t *have;   // how many rows are there, by word
	const uint32_t *want;   // how many there will be; ~0 until that is known
	const int32_t *word_of; // by tile; null: the tile itself
};

namespace detail {

SWITCHYARD_FUNCTION uint32_t word_of(const int32_t *words, uint32_t tile)
{
	return words == nullptr ? tile : static_cast<uint32_t>(words[tile]);
}

#ifdef __CUDACC__

SWITCHYARD_FUNCTION uint32_t load_acquire(const uint32_t *p)
{
	uint32_t v;
	asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

SWITCHYARD_FUNCTION void add_release(uint32_t *p, uint32_t n)
{
	asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}

SWITCHYARD_FUNCTION uint64_t now_ns()
{
	uint64_t t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

SWITCHYARD_FUNCTION bool first_thread() { return threadIdx.x + threadIdx.y + threadIdx.z == 0; }
SWITCHYARD_FUNCTION bool meet(bool failed) { return __syncthreads_or(failed) != 0; }

#else

SWITCHYARD_FUNCTION uint32_t load_acquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
SWITCHYARD_FUNCTION void add_release(uint32_t *p, uint32_t n) { __atomic_fetch_add(p, n, __ATOMIC_RELEASE); }
SWITCHYARD_FUNCTION uint64_t now_ns()
{
	return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
SWITCHYARD_FUNCTION bool first_thread() { return true; }
SWITCHYARD_FUNCTION bool meet(bool failed) { return failed; }

#endif

} // namespace detail

// Whether a tile's rows are there. One thread; it may read them if they are, others have to meet it first.
SWITCHYARD_FUNCTION bool rows_landed(const words &w, uint32_t tile)
{
	uint32_t i = detail::word_of(w.word_of, tile), want = detail::load_acquire(w.want + i);
	return want != ~0u && detail::load_acquire(w.have + i) == want;
}

// Waits until a tile's rows are there. All threads of the block call it and get the same: false after timeout_ns, with
// which the caller gives up; 0 is forever.
SWITCHYARD_FUNCTION bool wait_rows(const words &w, uint32_t tile, uint64_t timeout_ns = 10000000000ull)
{
	bool failed = false;
	if (detail::first_thread()) {
		uint64_t since = 0;
		bool late = false; // the next look is the last one
		for (uint32_t polls = 1; !failed && !rows_landed(w, tile); polls++)
			if (late) {
				failed = true;
			} else if (polls % 256 == 0 && timeout_ns != 0) {
				uint64_t t = detail::now_ns();
				since = since == 0 ? t : since;
				late = t - since > timeout_ns;
			}
	}
	return !detail::meet(failed);
}

// Says that the block has written this number of rows of a tile. All threads of the block call it. The words are zero
// before the first tile.
SWITCHYARD_FUNCTION void rows_done(uint32_t *ready, const int32_t *word_of, uint32_t tile, uint32_t rows)
{
	detail::meet(false);
	if (detail::first_thread())
		detail::add_release(ready + detail::word_of(word_of, tile), rows);
}

// How many of a GPU's multiprocessors calls of a dispatcher leave to others. max_sms is what it was made with; 0, the
// default, leaves 36. A call may take fewer than it may.
#ifdef __CUDACC__
__host__ __device__
#endif
inline uint32_t free_multiprocessors(uint32_t all, uint32_t max_sms)
{
	uint32_t taken = max_sms != 0 ? max_sms : all > 36 ? all - 36 : 1;
	return all > taken ? all - taken : 0;
}

} // namespace switchyard
