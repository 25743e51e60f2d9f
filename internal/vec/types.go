package vec

import "math"

// The floating-point types that Go lacks, by their bits.
type (
	// Float16 is IEEE 754 binary16.
	Float16 uint16
	// BFloat16 is the upper half of a float32.
	BFloat16 uint16
	// Float8E4M3 is OCP's "fn" flavour: four bits of exponent, three of mantissa, no infinity, greatest value 448.
	Float8E4M3 uint8
	// Float8E5M2 is five bits of exponent and two of mantissa, the upper half of a Float16, with infinity.
	Float8E5M2 uint8
)

// Float is an element that is reduced in float32.
type Float interface {
	float32 | Float16 | BFloat16 | Float8E4M3 | Float8E5M2
}

// Wide is an element that is reduced in its own type. Integers wrap.
type Wide interface {
	float64 | int64 | int32 | uint8
}

// Element is any element.
type Element interface{ Float | Wide }

type kind uint8

const (
	kindFloat32 kind = iota
	kindFloat16
	kindBFloat16
	kindFloat8E4M3
	kindFloat8E5M2
	kindFloat64
	kindInt64
	kindInt32
	kindUint8
)

func kindOf[T Element]() kind {
	var zero T
	switch any(zero).(type) {
	case float32:
		return kindFloat32
	case Float16:
		return kindFloat16
	case BFloat16:
		return kindBFloat16
	case Float8E4M3:
		return kindFloat8E4M3
	case Float8E5M2:
		return kindFloat8E5M2
	case float64:
		return kindFloat64
	case int64:
		return kindInt64
	case int32:
		return kindInt32
	}
	return kindUint8
}

const (
	signBit   = 1 << 31
	infBits   = 0x7f800000
	quietBits = 0x7fc00000
)

// ToFloat16 rounds to nearest, ties to even. Above 65504 and half a place is infinity.
func ToFloat16(f float32) Float16 {
	b := math.Float32bits(f)
	sign := Float16(b >> 16 & 0x8000)
	b &^= signBit
	switch {
	case b > infBits:
		return sign | 0x7e00 | Float16(b>>13&0x3ff)
	case b >= 143<<23: // 65536
		return sign | 0x7c00
	case b < 113<<23: // 2^-14: the last place of 1/2 is that of a subnormal
		return sign | Float16(math.Float32bits(math.Float32frombits(b)+0.5)-126<<23)
	}
	return sign | Float16((b-112<<23+0xfff+b>>13&1)>>13)
}

// Float32 is exact; a signalling NaN becomes a quiet one.
func (h Float16) Float32() float32 {
	sign := uint32(h) << 16 & signBit
	b := uint32(h) & 0x7fff
	switch {
	case b > 0x7c00:
		return math.Float32frombits(sign | quietBits | b<<13)
	case b == 0x7c00:
		return math.Float32frombits(sign | infBits)
	case b < 0x400: // zero and subnormals: b places of 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(b)*(1.0/(1<<24))))
	}
	return math.Float32frombits(sign | (b<<13 + 112<<23))
}

// ToBFloat16 rounds to nearest, ties to even. Every NaN becomes 0x7fc0.
func ToBFloat16(f float32) BFloat16 {
	if f != f {
		return 0x7fc0
	}
	b := math.Float32bits(f)
	return BFloat16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 is exact.
func (h BFloat16) Float32() float32 { return math.Float32frombits(uint32(h) << 16) }

// ToFloat8E4M3 rounds to nearest, ties to even. Values that round above 448, infinities and NaN become NaN (0x7f and a sign),
// as in PyTorch: the conversion does not saturate.
func ToFloat8E4M3(f float32) Float8E4M3 {
	b := math.Float32bits(f)
	sign := Float8E4M3(b >> 24 & 0x80)
	b &^= signBit
	switch {
	case b >= 1087<<20: // 480
		return sign | 0x7f
	case b < 121<<23: // 2^-6: the last place of 2^14 is that of a subnormal
		return sign | Float8E4M3(math.Float32bits(math.Float32frombits(b)+1<<14)-141<<23)
	}
	return sign | Float8E4M3((b-120<<23+0x7ffff+b>>20&1)>>20)
}

// Float32 is exact.
func (h Float8E4M3) Float32() float32 {
	sign := uint32(h) << 24 & signBit
	b := uint32(h) & 0x7f
	switch {
	case b == 0x7f:
		return math.Float32frombits(sign | 0x7ff00000)
	case b < 8: // places of 2^-9
		return math.Float32frombits(sign | math.Float32bits(float32(b)*(1.0/(1<<9))))
	}
	return math.Float32frombits(sign | (b<<20 + 120<<23))
}

// ToFloat8E5M2 rounds to nearest, ties to even. Values that round above 57344 become infinity, NaN becomes 0x7f and a sign,
// as in PyTorch.
func ToFloat8E5M2(f float32) Float8E5M2 {
	b := math.Float32bits(f)
	sign := Float8E5M2(b >> 24 & 0x80)
	b &^= signBit
	switch {
	case b > infBits:
		return sign | 0x7f
	case b >= 143<<23: // 65536
		return sign | 0x7c
	case b < 113<<23: // 2^-14: the last place of 2^7 is that of a subnormal
		return sign | Float8E5M2(math.Float32bits(math.Float32frombits(b)+1<<7)-134<<23)
	}
	return sign | Float8E5M2((b-112<<23+0xfffff+b>>21&1)>>21)
}

// Float32 is exact; a signalling NaN becomes a quiet one.
func (h Float8E5M2) Float32() float32 { return (Float16(h) << 8).Float32() }
