// Warps that wait for long leave what they wait for to a few others, and so give their multiprocessors to whatever else
// the rank is to run (X10): the peers may wait for just that. All of a call's sends come before its waits, so a kernel
// that has few multiprocessors sends all the same: its blocks begin as others leave.
//
// Kernels for few tokens call this. It writes crew and left of the handle's state, once a warp has waited for long.
#pragma once

#include "wire.cuh"

namespace sw {

constexpr u32 stayers = SW_DISPATCH_STAYERS; // blocks that do not leave: 128 tokens take them 20 us
constexpr u32 no_task = ~0u;

// A wait of a warp for a part of a row.
struct few_wait : wait {
	u32 first = 0; // when the kernel's first wait was looked at, in 256 ns
	bool late = false, failed = false, stays = false;

	__device__ __forceinline__ bool slow(const sw_world &w)
	{
		if ((polls & 63) == 63 && !stays) {
			u32 t = static_cast<u32>(now_ns() >> 8) | 1;
			first = first == 0 ? t : first;
			if (t - first > late_ns >> 8) {
				late = true;
				return false;
			}
		}
		failed = !wait::slow(w);
		return !failed;
	}

	// Whether waits of the warp's lanes have ended only because they were long.
	__device__ __forceinline__ bool is_late() const { return __any_sync(~0u, late) && !__any_sync(~0u, failed); }
};

// The word crew has the low bits of the call's number, how many warps stay, and how many tasks have been left to them
// and taken by them. A warp that stays does so until it finds no task that has been left.
struct crew {
	unsigned long long *word;
	u64 left; // address of what has been left
	u64 epoch;

	static constexpr u32 staying = 24, leaving = 12, bits = 12;

	__device__ __forceinline__ crew(const sw_dispatch_args &a, u64 epoch)
	    : word(state::own<unsigned long long>(a, a.state.crew)), left(own_segment(a.world) + a.state.left),
	      epoch(epoch)
	{
	}

	static __device__ __forceinline__ u32 field(u64 v, u32 at)
	{
		return static_cast<u32>(v >> at) & ((1u << bits) - 1);
	}

	// Changes the word by what f says of it, and returns what it was. One thread.
	template <typename F> __device__ __forceinline__ u64 change(F f) const
	{
		u64 tag = epoch << 36, seen = load_relaxed_sys(reinterpret_cast<u64>(word));
#pragma unroll 1
		for (;;) {
			u64 now = seen >> 36 == tag >> 36 ? seen : tag,
			    was = atomicCAS(word, static_cast<unsigned long long>(seen),
			                    static_cast<unsigned long long>(now + f(now)));
			if (was == seen)
				return now;
			seen = was;
		}
	}

	// Whether warps that have waited for long stay. Else each leaves its task. One thread.
	__device__ __forceinline__ bool stay(u32 warps, u32 &first) const
	{
		auto stays = [](u64 now) { return blockIdx.x < stayers || field(now, staying) == 0; };
		u64 was = change([&](u64 now) { return static_cast<u64>(warps) << (stays(now) ? staying : leaving); });
		first = field(was, leaving);
		return stays(was);
	}
	__device__ __forceinline__ void leave(u32 i, u32 task) const
	{
		store_relaxed_sys(left + i * 8, numbered(epoch, task));
	}

	// Whether a warp that has waited for long at a task goes on with it. Else it has left it.
	__device__ __forceinline__ bool stay_with(u32 task) const
	{
		u32 goes_on = 0, i;
		if ((threadIdx.x & 31) == 0 && (goes_on = stay(1, i)) == 0)
			leave(i, task);
		return __shfl_sync(~0u, goes_on, 0) != 0;
	}

	// A task that somebody has left, or no_task: the warp stays no longer. A warp that stays.
	__device__ __forceinline__ u32 take_over() const
	{
		u32 task = no_task;
		if ((threadIdx.x & 31) == 0) {
			auto none = [](u64 now) { return field(now, 0) == field(now, leaving); };
			u64 was = change([&](u64 now) { return none(now) ? -(u64{1} << staying) : 1; }), v = 0;
			if (!none(was)) {
#pragma unroll 1
				while (!is_of(v = load_relaxed_sys(left + field(was, 0) * 8), epoch))
					; // it is being written
				task = static_cast<u32>(v);
			}
		}
		return __shfl_sync(~0u, task, 0);
	}
};

} // namespace sw
