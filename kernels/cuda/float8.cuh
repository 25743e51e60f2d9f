// Float8 where a processor has no instruction for it: before Hopper, and in the emulation.
//
// The words of ptx.cuh, and those in their place, call this.
#pragma once

namespace sw {

// A number as float8 e4m3 in software: nearest even, 448 where it is too large, NaN where it is none.
__device__ __forceinline__ u32 e4m3_of_float(float f)
{
	u32 bits;
	memcpy(&bits, &f, 4);
	u32 sign = bits >> 24 & 0x80, mag = bits & 0x7fffffff;
	if (mag > 0x7f800000)
		return 0x7f | sign;
	if (mag >= 0x43e80000) // 464 and above: past the middle between 448 and what would come next
		return 0x7e | sign;
	if (mag < 0x3c800000) { // below 2^-6 in steps of 2^-9
		float a;
		memcpy(&a, &mag, 4);
		float scaled = a * 512;
		u32 n = static_cast<u32>(scaled);
		float rest = scaled - static_cast<float>(n);
		n += rest > 0.5f || (rest == 0.5f && (n & 1) != 0) ? 1 : 0;
		return n | sign;
	}
	u32 r = mag + 0x7ffff + (mag >> 20 & 1); // 3 bits of mantissa are left
	return min(r - 0x3c000000 >> 20, 0x7eu) | sign;
}

__device__ __forceinline__ float e4m3_to_float(u32 b)
{
	u32 sign = (b & 0x80) << 24, low = b & 0x7f;
	u32 bits =
	    low == 0x7f ? 0x7ff00000u : __float_as_uint(__uint_as_float(low << 20) * 1.329227995784916e36f); // 2^120
	return __uint_as_float(sign | bits);
}

} // namespace sw
