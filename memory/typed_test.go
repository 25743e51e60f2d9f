package memory

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
)

func TestOfAndWrap(t *testing.T) {
	numbers := []float32{1, 2, 3, 4}
	v := Wrap(numbers)
	require.Equal(t, int64(16), v.Len())
	require.True(t, v.OnHost())
	got := Of[float32](v.Slice(4, 8))
	require.Equal(t, []float32{2, 3}, got)
	require.Equal(t, 2, cap(got), "it ends where the view ends")
	got[0] = 9
	require.Equal(t, float32(9), numbers[1], "the memory is shared")
	require.Equal(t, []uint32{math.Float32bits(1)}, Of[uint32](v.Slice(0, 4)))

	require.Empty(t, Of[float64](View{}))
	require.Empty(t, Of[float64](Wrap([]float64(nil))))
	require.Nil(t, Of[float32](Device(4096, 64)), "memory of a GPU")

	require.PanicsWithValue(t, `memory: a view of 6 bytes at address `+hex(v.Ptr())+` is not made of float32, which have 4 bytes`,
		func() { Of[float32](v.Slice(0, 6)) })
	require.Panics(t, func() { Of[float32](v.Slice(1, 4)) }, "misaligned")
	require.Panics(t, func() { Of[int64](v.Slice(4, 8)) }, "misaligned for longer numbers")
	require.NotPanics(t, func() { Of[int8](v.Slice(1, 3)) })
}

// A view that says what it consists of is not read as numbers of another size.
func TestElementsAreKnown(t *testing.T) {
	v := Wrap([]int64{1, -1})
	require.Equal(t, "int64", v.Element())
	require.PanicsWithValue(t, "memory: a view of int64, which have 8 bytes, is not made of int32, which have 4 bytes", func() { Of[int32](v.Slice(0, 8)) })
	require.Equal(t, []uint64{1, math.MaxUint64}, Of[uint64](v))
	require.Len(t, Of[uint8](v), 16)
	_, err := MatrixOf[float32](v, 2)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "a view of int64, which have 8 bytes, has no rows of float32, which have 4")

	for _, c := range []struct {
		v      View
		is     string
		holds  []kernels.DType
		cannot []kernels.DType
	}{
		{Host(make([]byte, 8)), "bytes", []kernels.DType{kernels.Uint8, kernels.Int32, kernels.Float64}, nil},
		{Wrap(make([]byte, 8)), "bytes", []kernels.DType{kernels.Float8E5M2, kernels.Int64}, nil},
		{Wrap(make([]int32, 2)), "int32", []kernels.DType{kernels.Int32}, []kernels.DType{kernels.Float32, kernels.Int64, kernels.Uint8}},
		{Wrap(make([]uint16, 2)), "int16", []kernels.DType{kernels.Float16, kernels.BFloat16}, []kernels.DType{kernels.Float32, kernels.Float8E4M3}},
		{Wrap(make([]BFloat16, 2)), "bfloat16", []kernels.DType{kernels.BFloat16}, []kernels.DType{kernels.Float16}},
		{Wrap(make([]Float8E4M3, 2)), "float8_e4m3", []kernels.DType{kernels.Float8E4M3}, []kernels.DType{kernels.Float8E5M2}},
		{NewMatrix[float64](1, 2).View(), "float64", []kernels.DType{kernels.Float64}, []kernels.DType{kernels.Float32, kernels.Int64}},
		{As[float32](Device(4096, 8)).Slice(4, 4), "float32", []kernels.DType{kernels.Float32}, []kernels.DType{kernels.Int32}},
	} {
		require.Equal(t, c.is, c.v.Element())
		for _, d := range c.holds {
			require.True(t, c.v.Holds(d), "%s holds %v", c.is, d)
		}
		for _, d := range c.cannot {
			require.False(t, c.v.Holds(d), "%s holds %v", c.is, d)
		}
	}
}

// Integers are alike whatever their sign, until they are compared.
func TestElementsAreCompared(t *testing.T) {
	i8, u8, i16, bf16 := Wrap(make([]int8, 8)), Wrap(make([]byte, 8)), Wrap(make([]int16, 4)), Wrap(make([]BFloat16, 4))
	i32, u32, f32, f64 := Wrap(make([]int32, 2)), Wrap(make([]uint32, 2)), Wrap(make([]float32, 2)), Wrap(make([]float64, 1))
	require.Equal(t, []string{"int8", "bytes", "uint32"}, []string{i8.Element(), u8.Element(), u32.Element()})
	for _, same := range [][2]View{{i8, u8}, {u8, f64}, {i8, f32}, {i16, bf16}, {bf16, i16}, {i32, u32}, {f64, f64}, {View{}, f32}} {
		require.True(t, same[0].Alike(same[1]), "%s, %s", same[0].Element(), same[1].Element())
	}
	for _, other := range [][2]View{{i16, i32}, {f32, i16}, {i32, f32}, {f32, f64}, {bf16, Wrap(make([]Float16, 4))}} {
		require.False(t, other[0].Alike(other[1]), "%s, %s", other[0].Element(), other[1].Element())
	}
	for _, v := range []View{i8, u32, Wrap(make([]uint64, 1)), f32} {
		require.False(t, v.Orders(kernels.Uint8) && v.Orders(kernels.Int32) && v.Orders(kernels.Int64), v.Element())
	}
	require.True(t, u8.Orders(kernels.Uint8) && i32.Orders(kernels.Int32) && i8.Orders(kernels.Float8E4M3) && f32.Orders(kernels.Float32))
	require.True(t, u8.Whole(3) && f32.Whole(8) && f32.Whole(0) && i16.Whole(2))
	require.False(t, f32.Whole(6) || i16.Whole(1) || f64.Whole(4))
}

func hex(p uintptr) string {
	const digits = "0123456789abcdef"
	s := ""
	for ; p > 0; p /= 16 {
		s = string(digits[p%16]) + s
	}
	return "0x" + s
}

func TestTypesOfSixteenBits(t *testing.T) {
	require.Equal(t, BFloat16(0x3f80), ToBFloat16(1))
	require.Equal(t, float32(-2), ToBFloat16(-2).Float32())
	require.Equal(t, Float16(0x3c00), ToFloat16(1))
	require.Equal(t, int64(6), Wrap([]BFloat16{1, 2, 3}).Len())
	require.Equal(t, int64(2), Wrap([]Float8E4M3{1, 2}).Len())
}

func TestMatrix(t *testing.T) {
	m := NewMatrix[BFloat16](3, 4)
	require.Equal(t, [2]int{3, 4}, [2]int{m.Rows(), m.Cols()})
	require.Equal(t, int64(24), m.View().Len())
	for i := range m.Rows() {
		for j := range m.Row(i) {
			m.Row(i)[j] = ToBFloat16(float32(10*i + j))
		}
	}
	require.Equal(t, float32(23), m.Data()[11].Float32())
	require.Equal(t, 4, cap(m.Row(1)), "a row does not reach into the next")
	s := m.Slice(1, 3)
	require.Equal(t, 2, s.Rows())
	require.Equal(t, float32(20), s.Row(1)[0].Float32())
	require.Equal(t, m.View().Ptr()+8, s.View().Ptr())
	require.Equal(t, int64(16), s.View().Len())
	require.Zero(t, m.Slice(3, 3).Rows())
	for _, r := range [][2]int{{-1, 1}, {2, 1}, {0, 4}} {
		require.Panics(t, func() { m.Slice(r[0], r[1]) })
	}
	require.Panics(t, func() { m.Row(3) })
	require.ErrorIs(t, m.Free(), ErrInvalid)
	for _, size := range [][2]int{{-1, 2}, {-2, -3}, {math.MinInt, math.MinInt}, {1 << 32, 1 << 32}, {1, math.MaxInt}} {
		require.PanicsWithValue(t, fmt.Sprintf("memory: a matrix of %d rows of %d", size[0], size[1]), func() { NewMatrix[float32](size[0], size[1]) })
	}
	require.Zero(t, Matrix[float32]{}.Rows())

	same, err := MatrixOf[BFloat16](m.View(), 6)
	require.NoError(t, err)
	require.Equal(t, 2, same.Rows())
	same.Row(1)[5] = 7
	require.Equal(t, BFloat16(7), m.Row(2)[3])
	gpu, err := MatrixOf[float32](Device(4096, 240), 6)
	require.NoError(t, err)
	require.Equal(t, 10, gpu.Rows())
	require.Nil(t, gpu.Data())
	require.Equal(t, uintptr(4096+24), gpu.Slice(1, 4).View().Ptr())
	for _, v := range []View{m.View().Slice(0, 10), m.View().Slice(1, 12), Device(4097, 12)} {
		_, err = MatrixOf[BFloat16](v, 6)
		require.ErrorIs(t, err, ErrInvalid)
	}
	for _, cols := range []int{0, -1, 1 << 62, 1<<62 + 6, math.MaxInt} {
		_, err = MatrixOf[float32](m.View(), cols)
		require.ErrorIs(t, err, ErrInvalid, cols)
	}
}

func TestAllocMatrix(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	m, err := AllocMatrix[float32](h, 5, 7)
	require.NoError(t, err)
	_, ok := m.View().Symmetric(h)
	require.True(t, ok, "peers write it in place")
	_, ok = m.Slice(1, 3).View().Symmetric(h)
	require.True(t, ok)
	m.Row(4)[6] = 1
	require.Len(t, m.Data(), 35)
	require.ErrorIs(t, m.Slice(0, 2).Free(), ErrInvalid, "a part is not what was allocated")
	require.NoError(t, m.Free())
	require.ErrorIs(t, m.Free(), ErrFreed)

	calls := h.Stats().Calls
	for _, shape := range [][2]int{{-1, 2}, {2, -1}, {math.MaxInt, 2}, {1 << 40, 1 << 30}} {
		_, err := AllocMatrix[float32](h, shape[0], shape[1])
		require.ErrorIs(t, err, ErrInvalid)
	}
	require.Equal(t, calls, h.Stats().Calls, "what is refused is not a call")
	empty, err := AllocMatrix[float64](h, 0, 7)
	require.NoError(t, err)
	require.NoError(t, empty.Free())
}

// Views and slices that a layer makes of a buffer on every call cost no allocation.
func TestTypedMemoryAllocatesNothing(t *testing.T) {
	numbers := make([]float32, 64)
	var sum float32
	require.Zero(t, testing.AllocsPerRun(100, func() {
		m, err := MatrixOf[float32](Wrap(numbers), 8)
		if err != nil {
			panic(err)
		}
		sum += m.Row(3)[1] + Of[float32](m.Slice(1, 2).View())[0]
	}))
	require.Zero(t, sum)
}
