// A kernel for tests and benchmarks: the blocks of a rank send chunks to ranks of other hosts by rings, and take
// theirs.
#include "rings.cuh"

namespace sw {

constexpr u32 trial_rings = 8;

struct trial {
	sw_world world;
	sw_rail rail;
	u64 peers, chunks, seed;
	u64 wrong;                                 // address of a word: bytes that are not what was sent
	sw_ring out[trial_rings], in[trial_rings]; // by peer, then by block
};

__device__ __forceinline__ u8 trial_byte(u64 seed, u64 from, u64 to, u64 call, u64 block, u64 chunk, u64 i)
{
	u64 z = ((seed * 31 + from * 17 + to * 5 + block) * 131 + call * 4096 + chunk) * 0x9e3779b97f4a7c15 +
	        (i + 1) * 0xbf58476d1ce4e5b9;
	return static_cast<u8>(z >> 40);
}

} // namespace sw

extern "C" __global__ void __launch_bounds__(1024, 1) ring_trial(const __grid_constant__ sw::trial a)
{
	using namespace sw;
	SW_SHARED(u64, at); // of a slot
	SW_SHARED(u32, go_on);
	call now = call::open(a.world);
	if (!now.begins())
		return;
	u64 epoch = now.epoch();
	__syncthreads();
	if (threadIdx.x == 0)
		now.advance();
	for (u32 chunk = 0; chunk < a.chunks; chunk++) {
		for (u32 p = 0; p < a.peers; p++) {
			const sw_ring &r = a.out[p * gridDim.x + blockIdx.x];
			ring_out out(a.world, a.rail, r, epoch);
			if (threadIdx.x == 0)
				at = out.await_slot();
			__syncthreads();
			if (at == 0)
				return;
			for (u32 i = threadIdx.x; i < r.slot_bytes; i += blockDim.x)
				store_byte(at + i,
				           trial_byte(a.seed, a.world.rank, r.peer, epoch, blockIdx.x, chunk, i));
			__syncthreads();
			if (threadIdx.x == 0) {
				go_on = out.send(r.slot_bytes);
				out.keep();
			}
			__syncthreads();
			if (go_on == 0)
				return;
		}
		for (u32 p = 0; p < a.peers; p++) {
			const sw_ring &r = a.in[p * gridDim.x + blockIdx.x];
			ring_in in(a.world, a.rail, r, epoch);
			if (threadIdx.x == 0)
				at = in.await_chunk();
			__syncthreads();
			if (at == 0)
				return;
			u32 bad = 0;
			for (u32 i = threadIdx.x; i < r.slot_bytes; i += blockDim.x)
				bad += load_byte(at + i) !=
				       trial_byte(a.seed, r.peer, a.world.rank, epoch, blockIdx.x, chunk, i);
			if (bad != 0)
				atomicAdd(reinterpret_cast<unsigned long long *>(a.wrong),
				          static_cast<unsigned long long>(bad));
			__syncthreads();
			if (threadIdx.x == 0) {
				go_on = in.give_back();
				in.keep();
			}
			__syncthreads();
			if (go_on == 0)
				return;
		}
	}
	if (threadIdx.x == 0 && blockIdx.x == 0 && gridDim.x == 1)
		put_queue{a.rail.queue}.end_kernel();
}
