// Rows of numbers: 16 bytes of a row as float32 and back, and float8 with scales by the rule of kernels.Scales.
//
// Code that sums, scales or quantises rows calls this. It works on registers, and on the shared memory that its caller
// names.
#pragma once

#include "../device.cuh"

namespace sw {

enum class kind { f32, bf16, f16 };

// 16 bytes of a row. Products and sums are rounded one by one, so that they are those of the host.
template <kind type> struct numbers;

template <> struct numbers<kind::f32> {
	static constexpr u32 count = 4, size = 4;

	static __device__ __forceinline__ void unpack(uint4 v, float *f)
	{
		const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
		for (int i = 0; i < 4; i++)
			f[i] = __uint_as_float(w[i]);
	}
	static __device__ __forceinline__ uint4 pack(const float *f)
	{
		return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
		                  __float_as_uint(f[3]));
	}
	// The largest magnitude as bits of a float32: a NaN is above all.
	static __device__ __forceinline__ u32 most(uint4 v)
	{
		return max(max(v.x & 0x7fffffff, v.y & 0x7fffffff), max(v.z & 0x7fffffff, v.w & 0x7fffffff));
	}
	static __device__ __forceinline__ float round(float f) { return f; }
};

template <> struct numbers<kind::bf16> {
	static constexpr u32 count = 8, size = 2;

	static __device__ __forceinline__ void unpack(uint4 v, float *f)
	{
		const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
		for (int i = 0; i < 4; i++)
			f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000);
	}
	static __device__ __forceinline__ uint4 pack(const float *f)
	{
		return make_uint4(bf16x2_of(f[0], f[1]), bf16x2_of(f[2], f[3]), bf16x2_of(f[4], f[5]),
		                  bf16x2_of(f[6], f[7]));
	}
	static __device__ __forceinline__ u32 most(uint4 v)
	{
		u32 m = max_u16x2(max_u16x2(v.x & 0x7fff7fff, v.y & 0x7fff7fff),
		                  max_u16x2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
		return max(m << 16, m & 0xffff0000);
	}
	static __device__ __forceinline__ float round(float f) { return __uint_as_float(bf16x2_of(f, 0) << 16); }
};

template <> struct numbers<kind::f16> {
	static constexpr u32 count = 8, size = 2;

	static __device__ __forceinline__ void unpack(uint4 v, float *f)
	{
		const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
		for (int i = 0; i < 4; i++)
			f[2 * i] = float_of_f16(w[i]), f[2 * i + 1] = float_of_f16(w[i] >> 16);
	}
	static __device__ __forceinline__ uint4 pack(const float *f)
	{
		return make_uint4(f16x2_of(f[0], f[1]), f16x2_of(f[2], f[3]), f16x2_of(f[4], f[5]),
		                  f16x2_of(f[6], f[7]));
	}
	static __device__ __forceinline__ u32 most(uint4 v)
	{
		u32 m = max_u16x2(max_u16x2(v.x & 0x7fff7fff, v.y & 0x7fff7fff),
		                  max_u16x2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
		return __float_as_uint(float_of_f16(max(m & 0xffff, m >> 16))) & 0x7fffffff;
	}
	static __device__ __forceinline__ float round(float f) { return float_of_f16(f16x2_of(f, 0)); }
};

// The scale of a block whose largest magnitude has these bits, and what its elements are multiplied by.
struct scaling {
	float factor;
	u32 word; // a float32, or a biased exponent

	// mode is that of the launch, or 0 for float32 scales of any value.
	__device__ __forceinline__ scaling(u32 most, u32 mode)
	{
		float a = __uint_as_float(max(most, 0x38d1b717u)), scale = __fdiv_rn(a, 448.f); // 1e-4 at least
		if ((mode & (SW_DISPATCH_EXPONENTS | SW_DISPATCH_POWERS)) == 0) {
			word = __float_as_uint(scale);
			factor = __fdiv_rn(448.f, a);
			return;
		}
		u32 b = __float_as_uint(scale), e = (b >> 23) + ((b & 0x7fffff) != 0 ? 1 : 0);
		word = (mode & SW_DISPATCH_EXPONENTS) != 0 ? min(e, 255u) : e >= 255 ? 0x7fc00000 : e << 23;
		factor = e >= 255 ? 0 : __uint_as_float((254 - e) << 23);
	}
};

// 4 or 8 numbers times a factor as float8: as many bytes in low and high.
template <u32 count> __device__ __forceinline__ void narrow(const float *f, float factor, u32 &low, u32 &high)
{
	low = e4m3x2_of(__fmul_rn(f[0], factor), __fmul_rn(f[1], factor)) |
	      e4m3x2_of(__fmul_rn(f[2], factor), __fmul_rn(f[3], factor)) << 16;
	high = 0;
	if constexpr (count == 8)
		high = e4m3x2_of(__fmul_rn(f[4], factor), __fmul_rn(f[5], factor)) |
		       e4m3x2_of(__fmul_rn(f[6], factor), __fmul_rn(f[7], factor)) << 16;
}

// The same for 16 bytes of numbers.
template <kind type> __device__ __forceinline__ void narrow(uint4 v, float factor, u32 &low, u32 &high)
{
	float f[numbers<type>::count];
	numbers<type>::unpack(v, f);
	narrow<numbers<type>::count>(f, factor, low, high);
}

// The largest of the lanes that differ from this one in the bits of `span-1`.
__device__ __forceinline__ u32 most_of(u32 most, u32 span)
{
#pragma unroll 1
	for (u32 by = 1; by < span; by *= 2)
		most = max(most, __shfl_xor_sync(~0u, most, by));
	return most;
}

// A warp turns `bytes` of a row in shared memory into float8 in their place, and the words of its scales, blocks of 128
// elements or all of it.
template <kind type>
__device__ __forceinline__ void quantise(u8 *row, u32 bytes, u32 *scales, u32 block, u32 mode, u32 lane)
{
	using number = numbers<type>;
	constexpr u32 each = 128 * number::size / 16; // vectors of a block of 128: 16 or 32
	constexpr u32 vectors = 4;
	u32 count = bytes / 16;
	if (block == 128) {
		// 4 lanes share a block of 16 vectors (8 lanes one of 32), 4 vectors each, which avoids banks that
		// collide.
		constexpr u32 lanes = each / vectors, blocks = 32 / lanes;
#pragma unroll 1
		for (u32 first = 0; first < count; first += blocks * each) {
			u32 of = lane / lanes, turn = number::size == 2 ? of & 1 : 0;
			uint4 v[vectors];
			u32 most = 0, at[vectors];
#pragma unroll
			for (u32 j = 0; j < vectors; j++) {
				at[j] = first + of * each + (j ^ turn) * lanes + lane % lanes;
				v[j] = at[j] < count ? *reinterpret_cast<const uint4 *>(row + 16 * at[j])
				                     : make_uint4(0, 0, 0, 0);
				most = max(most, number::most(v[j]));
			}
#pragma unroll
			for (u32 by = 1; by < lanes; by *= 2)
				most = max(most, __shfl_xor_sync(~0u, most, by));
			scaling s(most, mode);
			__syncwarp(); // all have read what is overwritten now
#pragma unroll
			for (u32 j = 0; j < vectors; j++) {
				u32 low, high;
				narrow<type>(v[j], s.factor, low, high);
				if (at[j] >= count)
					continue;
				if constexpr (number::count == 8)
					*reinterpret_cast<uint2 *>(row + 8 * at[j]) = make_uint2(low, high);
				else
					*reinterpret_cast<u32 *>(row + 4 * at[j]) = low;
			}
			if (lane % lanes == 0 && first + of * each < count)
				scales[first / each + of] = s.word;
		}
		__syncwarp();
		return;
	}
	u32 most = 0;
#pragma unroll 1
	for (u32 i = lane; i < count; i += 32)
		most = max(most, number::most(*reinterpret_cast<const uint4 *>(row + 16 * i)));
	scaling s(most_of(most, 32), mode);
#pragma unroll 1
	for (u32 first = 0; first < count; first += 32) {
		u32 i = first + lane, low, high;
		uint4 v = i < count ? *reinterpret_cast<const uint4 *>(row + 16 * i) : make_uint4(0, 0, 0, 0);
		narrow<type>(v, s.factor, low, high);
		__syncwarp();
		if (i < count) {
			if constexpr (number::count == 8)
				*reinterpret_cast<uint2 *>(row + 8 * i) = make_uint2(low, high);
			else
				*reinterpret_cast<u32 *>(row + 4 * i) = low;
		}
	}
	if (lane == 0)
		scales[0] = s.word;
	__syncwarp();
}

// Word i of what a row's scales are in memory: a float32, or four exponents.
__device__ __forceinline__ u32 scale_word(const u32 *scales, u32 i, u32 count, bool exponents)
{
	if (!exponents)
		return scales[i];
	u32 w = 0;
#pragma unroll
	for (u32 k = 0; k < 4; k++)
		if (4 * i + k < count)
			w |= scales[4 * i + k] << (8 * k);
	return w;
}

// A partial sum as float8: stretches of SW_DISPATCH_STRETCH elements, each behind the float32 scales of its blocks of
// 128.
struct float8_sum {
	static constexpr u32 scales = SW_DISPATCH_STRETCH / 128 * 4, stretch = scales + SW_DISPATCH_STRETCH; // bytes

	// Where an element lies, and its scale.
	static __device__ __forceinline__ u32 at(u32 element)
	{
		return element / SW_DISPATCH_STRETCH * stretch + scales + element % SW_DISPATCH_STRETCH;
	}
	static __device__ __forceinline__ u32 scale_at(u32 element)
	{
		return element / SW_DISPATCH_STRETCH * stretch + element % SW_DISPATCH_STRETCH / 128 * 4;
	}
};

} // namespace sw
