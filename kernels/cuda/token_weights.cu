// Weights of a combine that the tokens' ranks give: each rank writes those of its tokens where the ranks look for them
// that the tokens went to, in one call of its own in front of the combine. Only a rank's own kernels read what lies
// there, and those of earlier calls have ended when it begins this one, so its peers wait for that before they write.
// The first kernel of the combine waits for what all blocks of the peers have written (await_free_staging).
#include "dispatch/state.cuh"

#include "dispatch/signals.cuh"

namespace sw {

// Writes the weights of this block's tokens: next to the row of a token on a rank, those of the choices there.
__device__ __forceinline__ void write_token_weights(const sw_dispatch_args &a)
{
	u32 n = a.world.size, choices = a.tokens * a.top_k;
	const int *who = state::who(a), *places = state::places(a);
	for (u32 i = blockIdx.x * SW_TOKEN_WEIGHTS_THREADS + threadIdx.x; i < choices;
	     i += gridDim.x * SW_TOKEN_WEIGHTS_THREADS) {
		int to = who[i];
		u32 t = i / a.top_k, k = i - t * a.top_k;
		if (to < 0)
			continue;
		u64 row = static_cast<u64>(places[static_cast<u64>(t) * n + to]);
		*view<volatile float>(segment(a.world, to) + a.state.weights + (row * a.top_k + k) * 4) =
		    a.send.weights[i];
	}
}

} // namespace sw

extern "C" __global__ void __launch_bounds__(SW_TOKEN_WEIGHTS_THREADS, 1)
    token_weights(const __grid_constant__ sw_dispatch_args a)
{
	using namespace sw;
	call now = call::open(a.world);
	if (!now.begins())
		return;
	u64 epoch = now.epoch(), word = 0, place;
	now.advance_by_last();
	u32 peer = threadIdx.x;
	bool talks = peer < a.world.size && peer != a.world.rank;
	// Each rank says that it has begun, and how many blocks it has.
	if (talks && blockIdx.x == 0)
		signal_begin(a, peer, epoch, gridDim.x);
	if (__syncthreads_or(talks && !await_begin(a, peer, epoch, word, place)))
		return;
	write_token_weights(a);
	// A block's weights are there when all of its threads have written theirs (X4).
	__threadfence_system();
	__syncthreads();
	if (talks)
		store16_relaxed_sys(done_word(a, peer, a.world.rank, blockIdx.x, epoch), epoch, done(0, 0, true));
}
