// The instructions that reach the memory of all ranks at once, at multicast addresses: switches add what the ranks have
// there, and store a value on every rank. They exist from Hopper on. No other instruction may touch such an address.
//
// A test runs the kernels on a processor, with words of its own in place of these (testdata/emulate/multimem.h).
#pragma once

#include "device.cuh"

#ifdef SW_EMULATED
#include "multimem.h"
#else

namespace sw {

// Orders accesses to the same memory by its own address and by a multicast address.
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// 16 bytes on every rank.
__device__ __forceinline__ void multimem_store([[maybe_unused]] u64 p, [[maybe_unused]] uint4 v)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
	             "r"(v.z), "r"(v.w)
	             : "memory");
#endif
}

// 8 bytes on every rank, where they arrive as a whole: PTX has scalars of 64 bits single-copy atomic, and of a vector
// no more than its elements.
__device__ __forceinline__ void multimem_store_packet([[maybe_unused]] u64 p, [[maybe_unused]] u64 v)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("multimem.st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#endif
}

// Outputs that are written before the address has been used for the last time are marked so.
//
// multimem_sum<type> is 16 bytes, each element the sum of all ranks'. Those of 16 bits are added in float32 and rounded
// once.
template <u32 type> __device__ __forceinline__ uint4 multimem_sum(u64 p);

#if __CUDA_ARCH__ >= 900
#define SW_SUM_4(type, how) \
	template <> __device__ __forceinline__ uint4 multimem_sum<type>(u64 p) \
	{ \
		uint4 v; \
		asm volatile("multimem.ld_reduce.relaxed.sys.global.add." how " {%0, %1, %2, %3}, [%4];" \
		             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) \
		             : "l"(p) \
		             : "memory"); \
		return v; \
	}
#define SW_SUM_2(type, how) \
	template <> __device__ __forceinline__ uint4 multimem_sum<type>(u64 p) \
	{ \
		u64 a, b; \
		asm volatile("multimem.ld_reduce.relaxed.sys.global.add." how \
		             " %0, [%2]; multimem.ld_reduce.relaxed.sys.global.add." how " %1, [%2+8];" \
		             : "=&l"(a), "=&l"(b) \
		             : "l"(p) \
		             : "memory"); \
		return make_uint4(static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(b), \
		                  static_cast<u32>(b >> 32)); \
	}
SW_SUM_4(SW_TYPE_FLOAT32, "v4.f32")
SW_SUM_4(SW_TYPE_FLOAT16, "acc::f32.v4.f16x2")
SW_SUM_4(SW_TYPE_BFLOAT16, "acc::f32.v4.bf16x2")
SW_SUM_2(SW_TYPE_INT64, "u64")
#undef SW_SUM_4
#undef SW_SUM_2
template <> __device__ __forceinline__ uint4 multimem_sum<SW_TYPE_INT32>(u64 p)
{
	uint4 v;
	asm volatile(
	    "multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%4]; multimem.ld_reduce.relaxed.sys.global.add.u32 %1, [%4+4]; "
	    "multimem.ld_reduce.relaxed.sys.global.add.u32 %2, [%4+8]; multimem.ld_reduce.relaxed.sys.global.add.u32 %3, [%4+12];"
	    : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
	    : "l"(p)
	    : "memory");
	return v;
}
template <> __device__ __forceinline__ uint4 multimem_sum<SW_TYPE_FLOAT64>(u64 p)
{
	double a, b;
	asm volatile(
	    "multimem.ld_reduce.relaxed.sys.global.add.f64 %0, [%2]; multimem.ld_reduce.relaxed.sys.global.add.f64 %1, [%2+8];"
	    : "=&d"(a), "=&d"(b)
	    : "l"(p)
	    : "memory");
	u64 x = static_cast<u64>(__double_as_longlong(a)), y = static_cast<u64>(__double_as_longlong(b));
	return make_uint4(static_cast<u32>(x), static_cast<u32>(x >> 32), static_cast<u32>(y),
	                  static_cast<u32>(y >> 32));
}
#else
template <u32 type> __device__ __forceinline__ uint4 multimem_sum(u64) { return make_uint4(0, 0, 0, 0); }
#endif

} // namespace sw

#endif
