// Reductions by multicast, for calls that ask for it: they have never run on hardware. Two kernels that differ in who
// works together (allreduce/multicast.cuh): the warp pipeline has all steps of a group in one block, the block pipeline
// one step in a block. Both work on the buffers themselves where all ranks have them at the same places. The third is
// for small all-reduces and all-gathers, by packets (allreduce/multicast_packets.cuh).
//
// They share the control block and the numbers of calls with the other reductions (allreduce.cu), so that ranks which
// take different kernels, because their calls differ, hear of it.
#include "allreduce/multicast_packets.cuh"

extern "C" __global__ void __launch_bounds__(SW_MULTICAST_THREADS, 1)
    allreduce_multicast_warps(const __grid_constant__ sw_multicast_args m)
{
	sw::run_multicast<false>(m);
}

extern "C" __global__ void __launch_bounds__(SW_MULTICAST_THREADS, 1)
    allreduce_multicast_blocks(const __grid_constant__ sw_multicast_args m)
{
	sw::run_multicast<true>(m);
}

extern "C" __global__ void __launch_bounds__(SW_MULTICAST_THREADS, 1)
    allreduce_multicast_packets(const __grid_constant__ sw_multicast_args m)
{
	sw::run_multicast_packets(m);
}
