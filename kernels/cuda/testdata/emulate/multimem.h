// Multicast for one processor: functions over all ranks' segments. Nothing lies at a multicast address, so that any other access ends the
// program. The ranks' memory is read one by one, and others may go on between.
#pragma once

#include "emulated.h"

namespace emu {

// The addresses of multicast: those of the segments of so many ranks, which lie at equal distances.
struct multicast_range {
	u64 at, segments, stride;
	u32 ranks;

	// What a multimem instruction may use: whole vectors of a segment's memory.
	void check(u64 p) const
	{
		if (p % 16 != 0 || p < at || p + 16 > at + stride) {
			printf("multimem at %#llx: multicast has %#llx to %#llx\n", static_cast<unsigned long long>(p), static_cast<unsigned long long>(at),
			       static_cast<unsigned long long>(at + stride));
			exit(1);
		}
	}
	u64 of(u32 rank, u64 p) const { return segments + rank * stride + (p - at); }
};
inline multicast_range multicast;

} // namespace emu

namespace sw {

inline void fence_alias() {}

inline void multimem_store(u64 p, uint4 v)
{
	emu::multicast.check(p);
	for (u32 r = 0; r < emu::multicast.ranks; r++) {
		at<uint4>(emu::multicast.of(r, p)) = v;
		emu::yield_seldom();
	}
}

// The sums of all ranks' numbers, in the order of ranks.
template <typename Wide, int count, typename Get, typename Put> uint4 multimem_fold(u64 p, Get get, Put put)
{
	emu::multicast.check(p);
	Wide sum[count];
	for (u32 r = 0; r < emu::multicast.ranks; r++) {
		uint4 v = at<uint4>(emu::multicast.of(r, p));
		for (int i = 0; i < count; i++)
			sum[i] = r == 0 ? get(v, i) : static_cast<Wide>(sum[i] + get(v, i));
		emu::yield_seldom();
	}
	uint4 v{};
	for (int i = 0; i < count; i++)
		put(v, i, sum[i]);
	return v;
}

template <typename T> uint4 multimem_own(u64 p)
{
	return multimem_fold<T, 16 / sizeof(T)>(
	    p,
	    [](const uint4 &v, int i) {
		    T x;
		    memcpy(&x, reinterpret_cast<const u8 *>(&v) + i * sizeof(T), sizeof(T));
		    return x;
	    },
	    [](uint4 &v, int i, T x) { memcpy(reinterpret_cast<u8 *>(&v) + i * sizeof(T), &x, sizeof(T)); });
}

template <typename Widen, typename Narrow> uint4 multimem_wide(u64 p, Widen widen, Narrow narrow)
{
	return multimem_fold<float, 8>(
	    p,
	    [widen](const uint4 &v, int i) {
		    uint16_t x;
		    memcpy(&x, reinterpret_cast<const u8 *>(&v) + 2 * i, 2);
		    return widen(x);
	    },
	    [narrow](uint4 &v, int i, float f) {
		    auto x = static_cast<uint16_t>(narrow(f));
		    memcpy(reinterpret_cast<u8 *>(&v) + 2 * i, &x, 2);
	    });
}

template <u32 type> uint4 multimem_sum(u64 p)
{
	if constexpr (type == SW_TYPE_FLOAT32)
		return multimem_own<float>(p);
	else if constexpr (type == SW_TYPE_FLOAT64)
		return multimem_own<double>(p);
	else if constexpr (type == SW_TYPE_INT32)
		return multimem_own<u32>(p);
	else if constexpr (type == SW_TYPE_INT64)
		return multimem_own<u64>(p);
	else if constexpr (type == SW_TYPE_FLOAT16)
		return multimem_wide(p, [](u32 x) { return float_of_f16(x); }, [](float f) { return f16_of(f); });
	else
		return multimem_wide(p, [](u32 x) { return __uint_as_float(x << 16); }, [](float f) { return bf16_of(f); });
}

} // namespace sw
