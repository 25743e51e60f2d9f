// All that a dispatch has left on this rank is copied to memory of the caller: all parts in one launch, which waits for
// nobody and tells nobody. How many rows came is read here, so that the host need not know and a graph can replay the
// copy. A copy that belongs to the call of its dispatch begins while that runs, and takes rows as they come.
//
// A dispatch that this rank has given up brought no row: a routing is then one of tokens that went nowhere, and not
// what the memory happened to hold.
#include "dispatch/signals.cuh"
#include "result_parts.cuh"

namespace sw {

// Copies a stretch of memory, by a warp.
__device__ __forceinline__ void copy_stretch(u64 to, u64 from, u64 bytes)
{
	tile t;
	t.lane = threadIdx.x & 31;
	tiles all{from, static_cast<i64>(bytes)};
#pragma unroll 1
	for (i64 k = 0; all.has(k); k++) {
		t.load(all.src + all.begin(k), all.length(k));
		t.store(to + all.begin(k));
	}
}

struct results_board {
	u32 first[SW_MAX_RANKS + 1]; // of all ranks' blocks, counted one after the other
};

// The rows of a dispatch to tokens' ranks, which follow one another in this rank's output, and what lies next to them,
// on their way to memory of the caller. A wait here ends with the dispatch, which gives up for itself and says why:
// then all is there, or none of it counts.
struct rows_taker {
	const sw_take_result_args &t;
	const sw_dispatch_args &a;
	results_board &b;
	u64 epoch;
	wait w;
	bool ended = false, failed = false; // whether the dispatch has, as this thread knows

	__device__ __forceinline__ rows_taker(const sw_take_result_args &t, results_board &b, u64 epoch)
	    : t(t), a(t.call), b(b), epoch(epoch)
	{
		w.epoch = epoch;
	}

	__device__ __forceinline__ bool fault() const
	{
		return load32_relaxed_gpu(own_segment(a.world) + a.world.control + offsetof(sw_control, fault)) !=
		       SW_FAULT_NONE;
	}

	// Waits until f finds what it looks for. False where that does not come.
	template <typename F> __device__ __forceinline__ bool until(F f)
	{
#pragma unroll 1
		while (!f()) {
			if (ended)
				return false;
			if (w.slow(a.world) && !(w.looked() && fault()))
				continue;
			await_stream();
			ended = true, failed = fault();
		}
		return !failed;
	}

	// Copies rows from one on of a part that has some for each row of the output, as far as there is room. A warp.
	__device__ __forceinline__ void copy(const sw_result_part &p, u64 first, u64 rows)
	{
		u64 at = first * p.row;
		if (at < p.bytes)
			copy_stretch(p.to + at, p.from + at, min(rows * p.row, p.bytes - at));
	}

	// Copies rows as their ranks' blocks say that they are there, and what lies next to those of a block when all
	// are. Warps of all blocks share the ranks' blocks.
	__device__ __forceinline__ void run()
	{
		u32 n = a.world.size, me = a.world.rank, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
		if (threadIdx.x == 0) {
			b.first[0] = 0;
#pragma unroll 1
			for (u32 src = 0; src < n; src++) {
				u64 line = begin_line(a, me, src, epoch);
				pair64 v{};
				bool there = until([&] { return (v = load16_acquire_sys(line)).a >= epoch; });
				b.first[src + 1] = b.first[src] + (there && op_of(v.b) == a.op ? blocks_of(v.b) : 0);
			}
		}
		__syncthreads();
		u32 blocks = b.first[n], all = blockDim.x / 32 * gridDim.x, each = max(all / max(blocks, 1u), 1u),
		    groups = all / each, mine = warp * gridDim.x + blockIdx.x, member = mine % each;
#pragma unroll 1
		for (u32 i = mine / each < groups ? mine / each : blocks; i < blocks; i += groups) {
			u32 src = 0;
#pragma unroll 1
			while (i >= b.first[src + 1])
				src++;
			u64 place = done_word(a, me, src, i - b.first[src], epoch), word = 0;
			bool there = true;
#pragma unroll 1
			for (u32 r = member;; r += each) {
				if (!is_all(word) && rows_of(word) <= r) {
					if (lane == 0)
						there = until([&] {
							pair64 v = load16_acquire_sys(place);
							word = v.a >= epoch ? v.b : 0;
							return is_all(word) || rows_of(word) > r;
						});
					word = __shfl_sync(~0u, static_cast<unsigned long long>(word), 0);
					if (__any_sync(~0u, !there))
						return;
					__syncwarp(); // what lane 0 has seen, all of them have
				}
				if (is_bad(word) || rows_of(word) <= r)
					break;
				if (t.rows != 0)
					copy(t.results.parts[0], first_of(word) + r, 1);
			}
#pragma unroll 1
			for (u32 k = t.rows + member; k < t.taken && !is_bad(word); k += each)
				copy(t.results.parts[k], first_of(word), rows_of(word));
		}
	}
};

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_RESULT_THREADS) copy_results(const __grid_constant__ sw_result_args a)
{
	using namespace sw;
	SW_SHARED(parts_board, b);
	parts_copier c(a, 0, b);
	await_stream();
	release_stream(); // what comes behind takes no room while the dispatch runs
	c.run(a);
}

// Rows as they come, and everything else behind the dispatch, which runs in front of it. This kernel counts the call,
// unless one that tells of counts, between them, has counted it.
extern "C" __global__ void __launch_bounds__(SW_TAKE_RESULT_THREADS, 1)
    take_results(const __grid_constant__ sw_take_result_args t)
{
	using namespace sw;
	SW_SHARED(results_board, b);
	SW_SHARED(parts_board, parts);
	parts_copier c(t.results, t.taken, parts);
	bool told = (t.call.mode & SW_DISPATCH_TOLD) != 0;
	call now = call::look(t.call.world);
	u64 epoch = told ? now.begun() : now.epoch();
	bool good = now.begins();
	if (good && !told)
		now.advance_by_last();
	if (good)
		rows_taker{t, b, epoch}.run();
	release_stream();
	await_stream();
	c.run(t.results);
}
