// The elements that reductions combine: how 16 bytes of a type become values to compute with, how these are combined,
// and how they become 16 bytes again. Floats of 16 and 8 bits are combined in float32 and rounded once (R2); integers
// wrap.
//
// The folds and packets call this. Touches no memory.
#pragma once

#include <type_traits>

#include "../device.cuh"

namespace sw {

// Floats without instructions of their own, as internal/vec converts them.
__device__ __forceinline__ u32 float_to_e4m3(float f)
{
	u32 b = __float_as_uint(f), sign = b >> 24 & 0x80;
	b &= 0x7fffffffu;
	if (b >= 1087u << 20) // 480
		return sign | 0x7f;
	if (b < 121u << 23) // 2^-6: the last place of 2^14 is that of a subnormal
		return sign | ((__float_as_uint(__uint_as_float(b) + 16384.0f) - (141u << 23)) & 0xff);
	return sign | ((b - (120u << 23) + 0x7ffff + (b >> 20 & 1)) >> 20);
}

__device__ __forceinline__ u32 float_to_e5m2(float f)
{
	u32 b = __float_as_uint(f), sign = b >> 24 & 0x80;
	b &= 0x7fffffffu;
	if (b > 0x7f800000u)
		return sign | 0x7f;
	if (b >= 143u << 23) // 65536
		return sign | 0x7c;
	if (b < 113u << 23) // 2^-14: the last place of 2^7 is that of a subnormal
		return sign | ((__float_as_uint(__uint_as_float(b) + 128.0f) - (134u << 23)) & 0xff);
	return sign | ((b - (112u << 23) + 0xfffff + (b >> 21 & 1)) >> 21);
}

// element<type> is 16 bytes of the type: `per` values of `value`.
template <u32 type> struct element;

template <> struct element<SW_TYPE_FLOAT32> {
	using value = float;
	static constexpr int per = 4;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z),
		x[3] = __uint_as_float(v.w);
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
		                  __float_as_uint(x[3]));
	}
};

template <> struct element<SW_TYPE_BFLOAT16> {
	using value = float;
	static constexpr int per = 8;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
		for (int i = 0; i < 4; i++)
			x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		return make_uint4(bf16x2_of(x[0], x[1]), bf16x2_of(x[2], x[3]), bf16x2_of(x[4], x[5]),
		                  bf16x2_of(x[6], x[7]));
	}
};

template <> struct element<SW_TYPE_FLOAT16> {
	using value = float;
	static constexpr int per = 8;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
		for (int i = 0; i < 4; i++)
			x[2 * i] = float_of_f16(w[i] & 0xffff), x[2 * i + 1] = float_of_f16(w[i] >> 16);
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		return make_uint4(f16x2_of(x[0], x[1]), f16x2_of(x[2], x[3]), f16x2_of(x[4], x[5]),
		                  f16x2_of(x[6], x[7]));
	}
};

// Types of one byte; `one` converts.
template <typename T, typename one> struct bytes_of {
	using value = T;
	static constexpr int per = 16;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
		for (int i = 0; i < 16; i++)
			x[i] = one::wide(w[i / 4] >> (8 * (i & 3)) & 0xff);
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		u32 w[4] = {0, 0, 0, 0};
#pragma unroll
		for (int i = 0; i < 16; i++)
			w[i / 4] |= one::byte(x[i]) << (8 * (i & 3));
		return make_uint4(w[0], w[1], w[2], w[3]);
	}
};

struct byte_uint8 {
	static __device__ __forceinline__ u32 wide(u32 b) { return b; }
	static __device__ __forceinline__ u32 byte(u32 x) { return x & 0xff; }
};
struct byte_e4m3 {
	static __device__ __forceinline__ float wide(u32 b) { return e4m3_to_float(b); }
	static __device__ __forceinline__ u32 byte(float x) { return float_to_e4m3(x); }
};
struct byte_e5m2 {
	static __device__ __forceinline__ float wide(u32 b) { return float_of_f16(b << 8); }
	static __device__ __forceinline__ u32 byte(float x) { return float_to_e5m2(x); }
};

template <> struct element<SW_TYPE_UINT8> : bytes_of<u32, byte_uint8> {};
template <> struct element<SW_TYPE_FLOAT8E4M3> : bytes_of<float, byte_e4m3> {};
template <> struct element<SW_TYPE_FLOAT8E5M2> : bytes_of<float, byte_e5m2> {};

template <> struct element<SW_TYPE_INT32> {
	using value = int32_t;
	static constexpr int per = 4;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		x[0] = static_cast<value>(v.x), x[1] = static_cast<value>(v.y), x[2] = static_cast<value>(v.z),
		x[3] = static_cast<value>(v.w);
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		return make_uint4(static_cast<u32>(x[0]), static_cast<u32>(x[1]), static_cast<u32>(x[2]),
		                  static_cast<u32>(x[3]));
	}
};

__device__ __forceinline__ u64 joined(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
__device__ __forceinline__ uint4 parted(u64 a, u64 b)
{
	return make_uint4(static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(b),
	                  static_cast<u32>(b >> 32));
}

template <> struct element<SW_TYPE_INT64> {
	using value = i64;
	static constexpr int per = 2;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		x[0] = static_cast<i64>(joined(v.x, v.y)), x[1] = static_cast<i64>(joined(v.z, v.w));
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		return parted(static_cast<u64>(x[0]), static_cast<u64>(x[1]));
	}
};

template <> struct element<SW_TYPE_FLOAT64> {
	using value = double;
	static constexpr int per = 2;
	static __device__ __forceinline__ void widen(value *x, uint4 v)
	{
		x[0] = __longlong_as_double(static_cast<long long>(joined(v.x, v.y))),
		x[1] = __longlong_as_double(static_cast<long long>(joined(v.z, v.w)));
	}
	static __device__ __forceinline__ uint4 narrow(const value *x)
	{
		return parted(static_cast<u64>(__double_as_longlong(x[0])),
		              static_cast<u64>(__double_as_longlong(x[1])));
	}
};

// Sums and products of integers wrap.
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }
__device__ __forceinline__ u32 plus(u32 a, u32 b) { return a + b; }
__device__ __forceinline__ int32_t plus(int32_t a, int32_t b)
{
	return static_cast<int32_t>(static_cast<u32>(a) + static_cast<u32>(b));
}
__device__ __forceinline__ i64 plus(i64 a, i64 b)
{
	return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b));
}
__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ double times(double a, double b) { return a * b; }
__device__ __forceinline__ u32 times(u32 a, u32 b) { return a * b; }
__device__ __forceinline__ int32_t times(int32_t a, int32_t b)
{
	return static_cast<int32_t>(static_cast<u32>(a) * static_cast<u32>(b));
}
__device__ __forceinline__ i64 times(i64 a, i64 b)
{
	return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b));
}

// a = a op v. Min and Max take the new element where it is less (greater) or not a number.
template <typename E, bool sums> __device__ __forceinline__ void combine(typename E::value *a, uint4 v, u32 op)
{
	typename E::value x[E::per];
	E::widen(x, v);
	if (sums || op == SW_OP_SUM || op == SW_OP_AVG) {
#pragma unroll
		for (int i = 0; i < E::per; i++)
			a[i] = plus(a[i], x[i]);
	} else if (op == SW_OP_MIN) {
#pragma unroll
		for (int i = 0; i < E::per; i++)
			a[i] = x[i] < a[i] || x[i] != x[i] ? x[i] : a[i];
	} else if (op == SW_OP_MAX) {
#pragma unroll
		for (int i = 0; i < E::per; i++)
			a[i] = x[i] > a[i] || x[i] != x[i] ? x[i] : a[i];
	} else {
#pragma unroll
		for (int i = 0; i < E::per; i++)
			a[i] = times(a[i], x[i]);
	}
}

// The last step of a reduction: averages of n ranks divide.
struct ending {
	u32 op;
	float n, inverse;

	__device__ __forceinline__ ending(u32 op, u32 ranks)
	    : op(op), n(static_cast<float>(ranks)), inverse(1 / static_cast<float>(ranks))
	{
	}
	__device__ __forceinline__ ending() {}

	// a/n rounded to nearest like a division, for n up to 64 and quotients that are not subnormal, in fewer
	// instructions.
	__device__ __forceinline__ float divided(float a) const
	{
		float q = a * inverse, y = fmaf(fmaf(-q, n, a), inverse, q);
		return fabsf(a) < __uint_as_float(0x7f800000u) && a != 0 ? y : a;
	}
};

// The values as they go out. Only floats are averaged.
template <typename E> __device__ __forceinline__ uint4 result(typename E::value *a, const ending &end)
{
	if constexpr (std::is_same_v<typename E::value, double>) {
		if (end.op == SW_OP_AVG)
			a[0] /= static_cast<double>(end.n), a[1] /= static_cast<double>(end.n);
	} else if constexpr (std::is_same_v<typename E::value, float>) {
		if (end.op == SW_OP_AVG) {
#pragma unroll
			for (int i = 0; i < E::per; i++)
				a[i] = end.divided(a[i]);
		}
	}
	return E::narrow(a);
}

} // namespace sw
