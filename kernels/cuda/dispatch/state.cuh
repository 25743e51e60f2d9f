// Typed views of a handle's state: what lies at its places in this rank's segment. args.h says how long each is.
//
// All kernels of MoE dispatch call this. It only tells addresses.
#pragma once

#include "../device.cuh"

namespace sw {

// The value at an address.
template <typename T> __device__ __forceinline__ T *view(u64 address) { return reinterpret_cast<T *>(address); }

// The words of kernels.DispatchHandle.Mapped from word `first` behind its ticket on, or null.
__device__ __forceinline__ u32 *mapped_words(const sw_dispatch_args &a, u32 first)
{
	return a.send.mapped == 0 ? nullptr : view<u32>(a.send.mapped) + 2 + first;
}

namespace state {

template <typename T> __device__ __forceinline__ T *own(const sw_dispatch_args &a, u64 place)
{
	return view<T>(own_segment(a.world) + place);
}

__device__ __forceinline__ u32 *making(const sw_dispatch_args &a) { return own<u32>(a, a.state.making); }
__device__ __forceinline__ u32 *arrived(const sw_dispatch_args &a) { return own<u32>(a, a.state.arrived); }
__device__ __forceinline__ int *places(const sw_dispatch_args &a) { return own<int>(a, a.state.places); }
__device__ __forceinline__ int *who(const sw_dispatch_args &a) { return own<int>(a, a.state.who); }
__device__ __forceinline__ int *spread(const sw_dispatch_args &a) { return own<int>(a, a.state.spread); }
__device__ __forceinline__ u64 *indices(const sw_dispatch_args &a) { return own<u64>(a, a.state.indices); }
__device__ __forceinline__ float *weights(const sw_dispatch_args &a) { return own<float>(a, a.state.weights); }
__device__ __forceinline__ u64 *sources(const sw_dispatch_args &a) { return own<u64>(a, a.state.sources); }
__device__ __forceinline__ u32 *wiped(const sw_dispatch_args &a) { return own<u32>(a, a.state.wiped); }

} // namespace state

} // namespace sw
