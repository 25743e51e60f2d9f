// The instructions that CUDA C++ has no words for. A test runs the kernels on a processor, with words of its own in
// place of these.
#pragma once

#include "float8.cuh"

#define SW_SHARED(type, name) __shared__ type name
#define SW_DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint64_t name[]
// The same for bulk copies: what does not begin at a line of shared memory crosses in more pieces.
#define SW_DYNAMIC_LINES(name) extern __shared__ __align__(128) uint64_t name[]

namespace sw {

// 16 bytes that arrive as a whole: PTX makes .b128 accesses with a scope single-copy atomic (PTX ISA 8.3, sm_70 on).
__device__ __forceinline__ pair64 load16_relaxed_sys(u64 p)
{
	pair64 v;
	asm volatile("{ .reg .b128 t; ld.relaxed.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
	             : "=l"(v.a), "=l"(v.b)
	             : "l"(p)
	             : "memory");
	return v;
}

__device__ __forceinline__ pair64 load16_acquire_sys(u64 p)
{
	pair64 v;
	asm volatile("{ .reg .b128 t; ld.acquire.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
	             : "=l"(v.a), "=l"(v.b)
	             : "l"(p)
	             : "memory");
	return v;
}

__device__ __forceinline__ void store16_relaxed_sys(u64 p, u64 a, u64 b)
{
	asm volatile("{ .reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t; }" ::"l"(p), "l"(a),
	             "l"(b)
	             : "memory");
}

__device__ __forceinline__ u64 load_relaxed_sys(u64 p)
{
	u64 v;
	asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}

__device__ __forceinline__ void store_relaxed_sys(u64 p, u64 v)
{
	asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 load_acquire_sys(u64 p)
{
	u64 v;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}

__device__ __forceinline__ u32 load32_relaxed_gpu(u64 p)
{
	u32 v;
	asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

__device__ __forceinline__ u32 load32_acquire_sys(u64 p)
{
	u32 v;
	asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ u64 now_ns()
{
	u64 t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

// The next kernel of the stream may be set up while this one runs, and this one while its predecessor runs, if they
// were launched so. await_stream returns when the predecessor has ended.
__device__ __forceinline__ void await_stream()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_stream()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Words in shared memory between the warps of a block, as atomics, so that racecheck knows that they are meant to be
// shared. A write of a thread before store_release_cta is seen by one that has read the new value. The release is
// a fence, which waits for the thread's own stores, also those to peers; the acquire waits for nothing.
__device__ __forceinline__ u32 shared_address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

template <typename T> __device__ __forceinline__ T atom_acquire_cta(T *p)
{
	T v;
	if constexpr (sizeof(T) == 4)
		asm volatile("atom.acquire.cta.shared.add.u32 %0, [%1], 0;"
		             : "=r"(v)
		             : "r"(shared_address(p))
		             : "memory");
	else
		asm volatile("atom.acquire.cta.shared.cas.b64 %0, [%1], 0, 0;"
		             : "=l"(v)
		             : "r"(shared_address(p))
		             : "memory");
	return v;
}

// load_acquire_cta is the same for a word on the way of the data: it costs less, and racecheck takes it for a hazard.
__device__ __forceinline__ u64 load_acquire_cta(const u64 *p)
{
	u64 v;
	asm volatile("ld.acquire.cta.shared.u64 %0, [%1];" : "=l"(v) : "r"(shared_address(p)) : "memory");
	return v;
}

// store_relaxed_cta is for a word that only tells what the thread has seen: loads come before it by themselves, and it
// waits for nothing that the thread has stored.
template <typename T> __device__ __forceinline__ void store_relaxed_cta(T *p, T v)
{
	asm volatile("" ::: "memory");
	if constexpr (sizeof(T) == 4)
		atomicExch(reinterpret_cast<u32 *>(p), v);
	else
		atomicExch(reinterpret_cast<unsigned long long *>(p), static_cast<unsigned long long>(v));
}

template <typename T> __device__ __forceinline__ void store_release_cta(T *p, T v)
{
	asm volatile("fence.acq_rel.cta;" ::: "memory");
	store_relaxed_cta(p, v);
}

// 0: blocks have no second dimension. Never known to be that, nor to be the same in all lanes.
__device__ __forceinline__ u32 zero_of_lane()
{
	u32 y;
	asm volatile("mov.u32 %0, %%tid.y;" : "=r"(y));
	return y;
}

// A barrier object in shared memory, at which warps report and do not wait. Unlike a fence, reporting does not wait for
// the stores that it comes after.
struct reports {
	u64 state;

	__device__ __forceinline__ void expect(u32 warps)
	{
		asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(warps) : "memory");
	}

	// One thread of a warp, after __syncwarp.
	__device__ __forceinline__ void report()
	{
		[[maybe_unused]] u64 ignored;
		asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
		             : "=l"(ignored)
		             : "r"(shared_address(&state))
		             : "memory");
	}

	// True when all warps have reported n+1 times; to be asked before any reports once more.
	__device__ __forceinline__ bool all(u32 n)
	{
		u32 yes;
		asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
		             : "=r"(yes)
		             : "r"(shared_address(&state)), "r"(n & 1)
		             : "memory");
		return yes != 0;
	}
};

// barrier of a part of the block's threads; id 0 is __syncthreads.
__device__ __forceinline__ void part_sync(u32 id, u32 threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ uint4 load_vector(u64 p)
{
	uint4 v;
	asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
	             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
	             : "l"(p)
	             : "memory");
	return v;
}

__device__ __forceinline__ void store_vector(u64 p, uint4 v)
{
	asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
	             : "memory");
}

// The same where a condition holds. Without branches, so that the compiler keeps a batch of them together.
__device__ __forceinline__ uint4 load_vector_if(bool on, u64 p)
{
	uint4 v = make_uint4(0, 0, 0, 0);
	asm volatile(
	    "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
	    : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
	    : "l"(p), "r"(static_cast<u32>(on))
	    : "memory");
	return v;
}

__device__ __forceinline__ void store_vector_if(bool on, u64 p, uint4 v)
{
	asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(p),
	             "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<u32>(on))
	             : "memory");
}

__device__ __forceinline__ u32 add_acq_rel_gpu(u32 *p, u32 n)
{
	u32 before;
	asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(n) : "memory");
	return before;
}

// Arrivals in shared memory by bulk copies: a barrier object that counts bytes. One thread expects, any thread
// awaits.
struct arrivals {
	u64 state;

	__device__ __forceinline__ void init()
	{
		asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&state)) : "memory");
	}

	// Begins a phase that ends when `bytes` bytes have come.
	__device__ __forceinline__ void expect([[maybe_unused]] u32 bytes)
	{
#if __CUDA_ARCH__ >= 900
		asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
		             "r"(bytes)
		             : "memory");
#else
		[[maybe_unused]] u64 ignored;
		asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
		             : "=l"(ignored)
		             : "r"(shared_address(&state))
		             : "memory");
#endif
	}

	// Returns when phase n has ended; to be asked before phase n+1 has.
	__device__ __forceinline__ void await(u32 n)
	{
		u32 yes = 0;
#pragma unroll 1
		while (yes == 0)
			asm volatile(
			    "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
			    : "=r"(yes)
			    : "r"(shared_address(&state)), "r"(n & 1)
			    : "memory");
	}
};

// Bulk copies between global and shared memory, of multiples of 16 bytes at multiples of 16. Before Hopper, where there
// are none, the thread copies by itself. A load is awaited at its barrier object, which expects it before; stores are
// awaited by the thread that has issued them.
__device__ __forceinline__ void bulk_load(void *to, u64 from, u32 bytes, [[maybe_unused]] arrivals *at)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
			 shared_address(to)),
	             "l"(from), "r"(bytes), "r"(shared_address(&at->state))
	             : "memory");
#else
	for (u32 i = 0; i < bytes; i += 16)
		*reinterpret_cast<uint4 *>(static_cast<u8 *>(to) + i) = load_vector(from + i);
#endif
}

// The same for data that is read once.
__device__ __forceinline__ void bulk_load_once(void *to, u64 from, u32 bytes, [[maybe_unused]] arrivals *at)
{
#if __CUDA_ARCH__ >= 900
	u64 policy;
	asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
	asm volatile(
	    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
		"r"(shared_address(to)),
	    "l"(from), "r"(bytes), "r"(shared_address(&at->state)), "l"(policy)
	    : "memory");
#else
	bulk_load(to, from, bytes, at);
#endif
}

__device__ __forceinline__ void bulk_store(u64 to, const void *from, u32 bytes)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
	             "r"(bytes)
	             : "memory");
#else
	for (u32 i = 0; i < bytes; i += 16)
		store_vector(to + i, *reinterpret_cast<const uint4 *>(static_cast<const u8 *>(from) + i));
#endif
}

// Ends a group of the thread's stores.
__device__ __forceinline__ void bulk_commit()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Returns when all of the thread's groups but the last `but` have read shared memory.
template <int but> __device__ __forceinline__ void bulk_await_read()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(but) : "memory");
#endif
}

// Returns when all of the thread's groups but the last `but` are written.
template <int but> __device__ __forceinline__ void bulk_await_written()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.wait_group %0;" ::"n"(but) : "memory");
#endif
}

// Returns when everything that the thread has stored so is written.
__device__ __forceinline__ void bulk_await()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Orders the thread's ordinary accesses and bulk copies with each other.
__device__ __forceinline__ void fence_bulk()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_vector2(u64 p, uint2 v)
{
	asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// Numbers of 16 and 8 bits. Rounding is to nearest even.
__device__ __forceinline__ float float_of_f16(u32 low16)
{
	float f;
	asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(low16 & 0xffff));
	return f;
}

__device__ __forceinline__ u32 bf16x2_of(float low, float high)
{
	u32 v;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
	return v;
}

__device__ __forceinline__ u32 f16x2_of(float low, float high)
{
	u32 v;
	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
	return v;
}

// Two numbers as float8 e4m3 in the low 16 bits; what is too large becomes 448.
__device__ __forceinline__ u32 e4m3x2_of(float low, float high)
{
#if __CUDA_ARCH__ >= 890
	unsigned short v;
	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
	return v;
#else
	return e4m3_of_float(low) | e4m3_of_float(high) << 8;
#endif
}

// The numbers that the low 16 bits are as float8 e4m3.
__device__ __forceinline__ void floats_of_e4m3x2(u32 pair, float &low, float &high)
{
#if __CUDA_ARCH__ >= 890
	u32 h;
	asm("{ .reg .b16 p; cvt.u16.u32 p, %1; cvt.rn.f16x2.e4m3x2 %0, p; }" : "=r"(h) : "r"(pair));
	low = float_of_f16(h), high = float_of_f16(h >> 16);
#else
	low = e4m3_to_float(pair & 0xff), high = e4m3_to_float(pair >> 8 & 0xff);
#endif
}

// The larger 16-bit numbers of two pairs.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b)
{
#if __CUDA_ARCH__ >= 900
	u32 v;
	asm("max.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
	return v;
#else
	return __vmaxu2(a, b);
#endif
}

} // namespace sw
