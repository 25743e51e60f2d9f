// The pass that spreads the gradients of tokens over the rows of their experts.
//
// experts_spread calls this. It reads staging and the caller's rows and writes their gradients and those of their
// weights.
#pragma once

#include "experts.cuh"

namespace sw {

// The gradients of rows by expert: from those of their tokens, which lie in staging. A warp has a whole row.
template <kind type> __device__ __forceinline__ void spread_gradients(const sw_dispatch_args &a, staged_rows &staged)
{
	using number = numbers<type>;
	await_stream();
	if (threadIdx.x == 0)
		staged.make(a, state::arrived(a));
	if (!call::look(a.world).begins())
		return;
	u32 lane = threadIdx.x & 31, all = staged.first[a.world.size];
	bool dots = a.sum.from_weights != 0 || a.sum.weights != 0;
	u64 own = own_segment(a.world);
	const int *spread = state::spread(a);
#pragma unroll 1
	for (u32 task = threadIdx.x / 32 * gridDim.x + blockIdx.x; task < all * a.top_k;
	     task += blockDim.x / 32 * gridDim.x) {
		u32 i = task / a.top_k, k = task - i * a.top_k, src, at = staged.at(a, i, src);
		u64 j = static_cast<u64>(at) * a.top_k + k;
		int r = spread[j];
		float w = r < 0 ? 1 : weight_of(a, j, r);
		float chain[8];
#pragma unroll
		for (u32 c = 0; c < 8; c++)
			chain[c] = 0;
		u64 dy = own + a.send.to_rows + static_cast<u64>(at) * a.row_bytes,
		    row = a.out.rows + static_cast<u64>(max(r, 0)) * a.row_bytes,
		    out = a.sum.y + static_cast<u64>(max(r, 0)) * a.row_bytes;
		constexpr u32 vectors = 8 / number::count; // of 8 neighbouring elements
#pragma unroll 1
		for (u32 e = lane * 8; r >= 0 && e * number::size < a.row_bytes; e += 256)
#pragma unroll
			for (u32 v = 0; v < vectors; v++) {
				u32 o = e * number::size + 16 * v;
				if (o >= a.row_bytes)
					continue;
				float g[number::count], x[number::count], p[number::count];
				number::unpack(load_vector(dy + o), g);
				if (dots)
					number::unpack(load_vector(row + o), x);
#pragma unroll
				for (u32 c = 0; c < number::count; c++) {
					if (dots)
						chain[v * number::count + c] =
						    __fadd_rn(chain[v * number::count + c], __fmul_rn(x[c], g[c]));
					p[c] = __fmul_rn(g[c], w);
				}
				store_vector(out + o, number::pack(p));
			}
		// the order of kernels.DotChains
#pragma unroll
		for (u32 by = 4; by >= 1; by /= 2)
#pragma unroll
			for (u32 c = 0; c < by; c++)
				chain[c] = __fadd_rn(chain[c], chain[c + by]);
		float dot = chain[0];
#pragma unroll
		for (u32 by = 16; by >= 1; by /= 2)
			dot = __fadd_rn(dot, __shfl_down_sync(~0u, dot, by));
		if (lane == 0) {
			if (a.sum.from_weights != 0)
				view<float>(own + a.sum.from_weights)[j] = r < 0 ? 0 : dot;
			if (a.sum.weights != 0 && r >= 0)
				a.sum.weights[r] = dot;
		}
	}
	zero_padding(a, a.sum.y, a.row_bytes, nullptr, nullptr, a.out.counts, a.out.offsets);
	release_stream();
}

} // namespace sw
