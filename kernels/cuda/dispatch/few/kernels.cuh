// The kernels of few tokens.
//
// dispatch.cu has them, and dispatch_masked.cu once more, for calls that can go on without ranks.
#pragma once

#include "combine.cuh"
#include "dispatch.cuh"

// One kernel for rows by token, and one for rows by expert, so that neither has code of the other on its way.
#define SW_DISPATCH_FEW(name, wire, by_expert) \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_FEW_THREADS, 1) \
	    name(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_DYNAMIC_LINES(memory); \
		SW_SHARED(few_board, b); \
		few_dispatch<wire, by_expert>(a, b, memory); \
	}

SW_DISPATCH_FEW(dispatch_few, few_dense, false)
SW_DISPATCH_FEW(dispatch_few_f32, few_narrow<kind::f32>, false)
SW_DISPATCH_FEW(dispatch_few_bf16, few_narrow<kind::bf16>, false)
SW_DISPATCH_FEW(dispatch_few_f16, few_narrow<kind::f16>, false)
SW_DISPATCH_FEW(dispatch_few_by_expert, few_dense, true)
SW_DISPATCH_FEW(dispatch_few_by_expert_f32, few_narrow<kind::f32>, true)
SW_DISPATCH_FEW(dispatch_few_by_expert_bf16, few_narrow<kind::bf16>, true)
SW_DISPATCH_FEW(dispatch_few_by_expert_f16, few_narrow<kind::f16>, true)

// Float8: partial sums cross as float8.
#define SW_COMBINE_FEW(suffix, type, float8) \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_FEW_SUM_THREADS, 1) \
	    combine_few_##suffix(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_SHARED(u32, shared); \
		few_combine<type, float8, false>(a, &shared); \
	} \
	extern "C" __global__ void __launch_bounds__(SW_DISPATCH_FEW_SUM_THREADS, 1) \
	    combine_few_by_expert_##suffix(const __grid_constant__ sw_dispatch_args a) \
	{ \
		using namespace sw; \
		SW_SHARED(u32, shared); \
		few_combine<type, float8, true>(a, &shared); \
	}

SW_COMBINE_FEW(f32, kind::f32, false)
SW_COMBINE_FEW(bf16, kind::bf16, false)
SW_COMBINE_FEW(f16, kind::f16, false)
SW_COMBINE_FEW(f32_float8, kind::f32, true)
SW_COMBINE_FEW(bf16_float8, kind::bf16, true)
SW_COMBINE_FEW(f16_float8, kind::f16, true)
