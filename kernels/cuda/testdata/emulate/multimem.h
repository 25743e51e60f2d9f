// Multicast for one processor: functions over all ranks' segments. Nothing lies at a multicast address, so that any
// other access ends the program. The ranks' memory is read one by one, and others may go on between.
#pragma once

#include "emulated.h"

namespace emu {

// Where the ranks' memory behind a multicast address is, in the order of ranks. The program that runs the kernels
// knows, and ends at any other address.
inline std::vector<u64> (*multicast)(u64 p);

// The same for an instruction, which may use what is aligned.
inline std::vector<u64> reached(u64 p, u32 bytes)
{
	if (p % bytes != 0) {
		printf("multimem at %#llx\n", static_cast<unsigned long long>(p));
		exit(1);
	}
	return multicast(p);
}

} // namespace emu

namespace sw {

inline void fence_alias() {}

inline void multimem_store(u64 p, uint4 v)
{
	for (u64 to : emu::reached(p, 16)) {
		at<uint4>(to) = v;
		emu::yield_seldom();
	}
}

inline void multimem_store_packet(u64 p, u64 v)
{
	for (u64 to : emu::reached(p, 8)) {
		at<u64>(to) = v;
		emu::yield_seldom();
	}
}

// The sums of all ranks' numbers, in the order of ranks.
template <typename Wide, int count, typename Get, typename Put> uint4 multimem_fold(u64 p, Get get, Put put)
{
	Wide sum[count];
	bool first = true;
	for (u64 from : emu::reached(p, 16)) {
		uint4 v = at<uint4>(from);
		for (int i = 0; i < count; i++)
			sum[i] = first ? get(v, i) : static_cast<Wide>(sum[i] + get(v, i));
		first = false;
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
		return multimem_wide(
		    p, [](u32 x) { return __uint_as_float(x << 16); }, [](float f) { return bf16_of(f); });
}

} // namespace sw
