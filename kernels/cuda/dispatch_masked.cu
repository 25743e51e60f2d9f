// MoE dispatch and combine of few tokens, by calls that can go on without ranks (dispatch/masks.cuh). The kernels are
// those of dispatch.cu.
#define SW_DISPATCH_MASKS

#include "dispatch/few/kernels.cuh"

// A rank is masked, on all ranks.
extern "C" __global__ void __launch_bounds__(32, 1) dispatch_mask(const __grid_constant__ sw_mask_args a)
{
	if (threadIdx.x == 0)
		sw::masks::tell(a);
}

// This rank takes part again.
extern "C" __global__ void __launch_bounds__(32, 1) dispatch_unmask(const __grid_constant__ sw_mask_args a)
{
	if (threadIdx.x == 0)
		sw::masks::join(a);
}
