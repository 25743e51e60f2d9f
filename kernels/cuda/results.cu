// All that a dispatch has left on this rank is copied to memory of the caller: all parts in one launch, which waits for
// nobody and tells nobody. How many rows came is read here, so that the host need not know and a graph can replay the
// copy.
//
// A dispatch that this rank has given up brought no row: a routing is then one of tokens that went nowhere, and not
// what the memory happened to hold.
#include "tiles.cuh"

namespace sw {

// The bytes of each column that are copied.
__device__ __forceinline__ u64 copied(const sw_result_part &p, bool failed, u64 came)
{
	if (p.row == 0)
		return failed && p.fills != 0 ? 0 : p.bytes;
	u64 bytes = came * p.row;
	return bytes < p.bytes ? bytes : p.bytes;
}

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_RESULT_THREADS) copy_results(const __grid_constant__ sw_result_args a)
{
	using namespace sw;
	bool failed = a.fault == 0 || load32_relaxed_gpu(a.fault) != SW_FAULT_NONE;
	u64 came = failed ? 0 : load32_relaxed_gpu(a.rows);
	u32 thread = blockIdx.x * SW_RESULT_THREADS + threadIdx.x, threads = gridDim.x * SW_RESULT_THREADS;
	tile t;
	t.lane = threadIdx.x & 31;
	for (u32 i = 0; i < a.count; i++) {
		const sw_result_part &p = a.parts[i];
		u64 n = copied(p, failed, came);
		for (u32 c = 0; c < p.columns; c++) {
			u64 to = p.to + c * p.bytes;
			tiles all{p.from + c * p.pitch, static_cast<i64>(n)};
			for (i64 k = thread / 32; all.has(k); k += threads / 32) {
				t.load(all.src + all.begin(k), all.length(k));
				t.store(to + all.begin(k));
			}
			for (u64 at = n + 4ull * thread; p.fills != 0 && at < p.bytes; at += 4ull * threads)
				*reinterpret_cast<u32 *>(to + at) = p.behind;
		}
	}
}
