package vec

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// format describes a small float by its definition: exponent and mantissa bits, bias.
type format struct {
	name         string
	exp, man     int
	bias         int
	fn           bool // no infinity, one NaN
	widen        func(uint32) float32
	narrow       func(float32) uint32
	overflow     uint32 // what the values out of range become
	canonicalNaN uint32 // 0: the payload is kept
}

func formats() []format {
	return []format{
		{"Float16", 5, 10, 15, false, func(b uint32) float32 { return Float16(b).Float32() }, func(f float32) uint32 { return uint32(ToFloat16(f)) }, 0x7c00, 0},
		{"BFloat16", 8, 7, 127, false, func(b uint32) float32 { return BFloat16(b).Float32() }, func(f float32) uint32 { return uint32(ToBFloat16(f)) }, 0x7f80, 0x7fc0},
		{"Float8E4M3", 4, 3, 7, true, func(b uint32) float32 { return Float8E4M3(b).Float32() }, func(f float32) uint32 { return uint32(ToFloat8E4M3(f)) }, 0x7f, 0x7f},
		{"Float8E5M2", 5, 2, 15, false, func(b uint32) float32 { return Float8E5M2(b).Float32() }, func(f float32) uint32 { return uint32(ToFloat8E5M2(f)) }, 0x7c, 0x7f},
	}
}

// value is the number that the bits mean by the definition.
func (f format) value(b uint32) float64 {
	e, m := int(b>>f.man)&(1<<f.exp-1), float64(b&(1<<f.man-1))
	v := 0.0
	switch {
	case f.fn && b&(1<<(f.exp+f.man)-1) == 1<<(f.exp+f.man)-1:
		return math.NaN()
	case !f.fn && e == 1<<f.exp-1 && m != 0:
		return math.NaN()
	case !f.fn && e == 1<<f.exp-1:
		v = math.Inf(1)
	case e == 0:
		v = math.Ldexp(m, 1-f.bias-f.man)
	default:
		v = math.Ldexp(m+float64(int(1)<<f.man), e-f.bias-f.man)
	}
	if b>>(f.exp+f.man)&1 == 1 {
		return -v
	}
	return v
}

func TestSmallFloatsMeanWhatTheirFormatSays(t *testing.T) {
	for _, f := range formats() {
		for b := range uint32(1) << (1 + f.exp + f.man) {
			want, got := f.value(b), f.widen(b)
			if want != want {
				require.True(t, got != got, "%s %#x", f.name, b)
				n := f.narrow(got)
				require.True(t, f.value(n) != f.value(n), "%s %#x: NaN stays NaN", f.name, b)
				continue
			}
			require.Equal(t, want, float64(got), "%s %#x", f.name, b)
			require.Equal(t, math.Signbit(want), math.Signbit(float64(got)), "%s %#x", f.name, b)
			require.Equal(t, b, f.narrow(got), "%s %#x there and back", f.name, b)
		}
	}
}

func TestSmallFloatsRoundToNearestEven(t *testing.T) {
	for _, f := range formats() {
		top := f.overflow // the first positive pattern that is not a number, or the NaN of fn
		for b := range top {
			lo := f.value(b)
			hi := f.value(b + 1)
			if b+1 == top { // the value that would come next
				hi = 2*lo - f.value(b-1)
			}
			mid := float32((lo + hi) / 2) // exact: one more bit
			even := b + b&1
			require.Equal(t, even, f.narrow(mid), "%s between %#x and the next", f.name, b)
			require.Equal(t, b, f.narrow(math.Nextafter32(mid, 0)), "%s below the middle after %#x", f.name, b)
			require.Equal(t, b+1, f.narrow(math.Nextafter32(mid, math.MaxFloat32)), "%s above the middle after %#x", f.name, b)
			sign := uint32(1) << (f.exp + f.man)
			require.Equal(t, even|sign, f.narrow(-mid), "%s between %#x and the next, negative", f.name, b)
		}
		inf := float32(math.Inf(1))
		require.Equal(t, f.overflow, f.narrow(inf), f.name)
		require.Equal(t, f.overflow, f.narrow(math.MaxFloat32), f.name)
		nan := float32(math.NaN())
		require.True(t, math.IsNaN(f.value(f.narrow(nan))), f.name)
		if f.canonicalNaN != 0 {
			require.Equal(t, f.canonicalNaN, f.narrow(nan), f.name)
		}
		require.Equal(t, uint32(0), f.narrow(math.SmallestNonzeroFloat32)&^1, f.name)
	}
}
