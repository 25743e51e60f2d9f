package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

var specials = []float32{0, float32(math.Copysign(0, -1)), 1, -1, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()),
	math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, 1e-39, 448, 464, 465, 480, 57344, 61440, 65504, 65520, 0x1p-6, 0x1p-9, 0x1p-10, 0x1p-14, 0x1p-24, 0x1p-25}

// mixed is random numbers of all sizes with special ones among them.
func mixed(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		switch r.IntN(8) {
		case 0:
			x[i] = specials[r.IntN(len(specials))]
		case 1:
			x[i] = math.Float32frombits(r.Uint32())
		default:
			x[i] = float32(r.NormFloat64() * math.Exp2(float64(r.IntN(24)-12)))
		}
	}
	return x
}

// same compares bits, but takes every NaN for the same.
func same[T Element](t *testing.T, want, got []T, name string) {
	t.Helper()
	require.Equal(t, len(want), len(got), name)
	for i, w := range want {
		if g := got[i]; w != g && !(isNaN(w) && isNaN(g)) || math.Signbit(number(w)) != math.Signbit(number(g)) && !isNaN(w) {
			require.Failf(t, "differ", "%s: element %d of %d is %v (%v), want %v (%v)", name, i, len(want), got[i], number(got[i]), w, number(w))
		}
	}
}

func number[T Element](v T) float64 {
	switch v := any(v).(type) {
	case float32:
		return float64(v)
	case Float16:
		return float64(v.Float32())
	case BFloat16:
		return float64(v.Float32())
	case Float8E4M3:
		return float64(v.Float32())
	case Float8E5M2:
		return float64(v.Float32())
	case float64:
		return v
	case int64:
		return float64(v)
	case int32:
		return float64(v)
	case uint8:
		return float64(v)
	}
	return 0
}

func isNaN[T Element](v T) bool { return math.IsNaN(number(v)) }

// lengths are around the vectors, the unrolled loops and the blocks.
var lengths = []int{0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 511, 512, 513, 1027}

// odd copies x to memory that is off bytes past the alignment of its type.
func odd[T any](x []T, off int) []T {
	var zero T
	size := int(unsafe.Sizeof(zero))
	buf := make([]byte, len(x)*size+64)
	skip := int(-uintptr(unsafe.Pointer(&buf[0]))%32) + off
	y := unsafe.Slice((*T)(unsafe.Pointer(&buf[skip])), len(x))
	copy(y, x)
	return y
}

func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

func levels() []level {
	ls := []level{plain}
	for lv := avx2; lv <= cpu; lv++ {
		ls = append(ls, lv)
	}
	return ls
}

func TestVectorLoopsGiveTheBitsOfThePlainOnes(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, n := range append(lengths, chunk+13) {
		a, b := odd(mixed(r, n), 4), odd(mixed(r, n), 1)
		w := float32(r.NormFloat64())
		for name, f := range map[string]func() []float32{
			"Scale": func() []float32 { d := odd(a, 3); Scale(d, b, w); return d },
			"Add":   func() []float32 { d := odd(a, 3); Add(d, d, b); return d },
			"Mul":   func() []float32 { d := odd(a, 3); Mul(d, b, d); return d },
		} {
			var want, got []float32
			at(plain, func() { want = f() })
			at(avx2, func() { got = f() })
			same(t, want, got, fmt.Sprint(name, " ", n))
		}
	}
}

// convert narrows random numbers of all sizes to T.
func convert[T Element](r *rand.Rand, n int) []T {
	x := mixed(r, n)
	y := make([]T, n)
	switch d := any(y).(type) {
	case []float32:
		copy(d, x)
	case []Float16:
		storeGo(d, x, 1)
	case []BFloat16:
		storeGo(d, x, 1)
	case []Float8E4M3:
		storeGo(d, x, 1)
	case []Float8E5M2:
		storeGo(d, x, 1)
	case []float64:
		for i, v := range x {
			d[i] = float64(v)
		}
	case []int64:
		for i := range d {
			d[i] = int64(r.Uint64()) >> r.IntN(64)
		}
	case []int32:
		for i := range d {
			d[i] = int32(r.Uint32()) >> r.IntN(32)
		}
	case []uint8:
		for i := range d {
			d[i] = uint8(r.Uint32())
		}
	}
	return y
}

// fold is ReduceRows by its definition, an element at a time.
func fold[T Element](rows [][]T, i int, op Op, div int) T {
	var out [1]T
	switch any(out[0]).(type) {
	case float64, int64, int32, uint8:
		out[0] = rows[0][i]
		for _, r := range rows[1:] {
			out[0] = one(out[0], r[i], op)
		}
		if div > 1 {
			switch d := any(&out[0]).(type) {
			case *float64:
				*d /= float64(div)
			case *int64:
				*d /= int64(div)
			case *int32:
				*d /= int32(div)
			case *uint8:
				*d = uint8(int(*d) / div)
			}
		}
		return out[0]
	}
	acc := float32(number(rows[0][i]))
	for _, r := range rows[1:] {
		acc = one(acc, float32(number(r[i])), op)
	}
	if div > 1 {
		acc /= float32(div)
	}
	switch d := any(&out[0]).(type) {
	case *float32:
		*d = acc
	case *Float16:
		*d = ToFloat16(acc)
	case *BFloat16:
		*d = ToBFloat16(acc)
	case *Float8E4M3:
		*d = ToFloat8E4M3(acc)
	case *Float8E5M2:
		*d = ToFloat8E5M2(acc)
	}
	return out[0]
}

func one[T Element](a, b T, op Op) T {
	switch op {
	case Sum:
		return a + b
	case Prod:
		return a * b
	case Min:
		if a == a && (b < a || b != b) {
			return b
		}
	case Max:
		if a == a && (b > a || b != b) {
			return b
		}
	}
	return a
}

func testRows[T Element](t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	var zero T
	for _, n := range lengths {
		for _, count := range []int{1, 2, 3, 8} {
			rows := make([][]T, count)
			for i := range rows {
				rows[i] = odd(convert[T](r, n), r.IntN(17))
			}
			for op := Sum; op <= Prod; op++ {
				div := []int{0, 1, 3, count}[r.IntN(4)]
				want := make([]T, n)
				for i := range want {
					want[i] = fold(rows, i, op, div)
				}
				for _, lv := range levels() {
					name := fmt.Sprintf("%T %v of %d rows of %d over %d at level %d", zero, op, count, n, div, lv)
					dst := odd(make([]T, n+1), 5)
					dst[n] = 42
					at(lv, func() { ReduceRows(dst[:n], rows, op, div) })
					same(t, want, dst[:n], name)
					require.EqualValues(t, 42, dst[n], name)
					in := r.IntN(count) // in place of a row
					was := append([]T(nil), rows[in]...)
					at(lv, func() { ReduceRows(rows[in], rows, op, div) })
					same(t, want, rows[in], name+" in place")
					copy(rows[in], was)
				}
			}
		}
	}
}

func TestR2_ReduceRowsFollowsItsDefinition(t *testing.T) {
	testRows[float32](t)
	testRows[Float16](t)
	testRows[BFloat16](t)
	testRows[Float8E4M3](t)
	testRows[Float8E5M2](t)
	testRows[float64](t)
	testRows[int64](t)
	testRows[int32](t)
	testRows[uint8](t)
}

func testAccumulate[T Float](t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for _, n := range append(lengths, chunk+13) {
		src, acc := odd(convert[T](r, n), 1), mixed(r, n)
		for op := Sum; op <= Prod; op++ {
			want := make([]float32, n)
			for i := range want {
				want[i] = one(acc[i], float32(number(src[i])), op)
			}
			for _, lv := range levels() {
				got := odd(acc, 2)
				at(lv, func() { Accumulate(got, src, op) })
				same(t, want, got, fmt.Sprintf("%T %v %d", src, op, n))
			}
		}
		wide, want := make([]float32, n), make([]float32, n)
		for i, v := range src {
			want[i] = float32(number(v))
		}
		for _, lv := range levels() {
			at(lv, func() { Load(wide, src) })
			same(t, want, wide, "Load")
			for _, div := range []int{0, 1, 3} {
				got, want := make([]T, n), make([]T, n)
				storeGo(want, acc, float32(max(div, 1)))
				at(lv, func() { Store(got, acc, div) })
				same(t, want, got, "Store")
			}
		}
	}
}

func TestR2_SmallFloatsAccumulateInFloat32(t *testing.T) {
	testAccumulate[float32](t)
	testAccumulate[Float16](t)
	testAccumulate[BFloat16](t)
	testAccumulate[Float8E4M3](t)
	testAccumulate[Float8E5M2](t)

	// 256 ones and a 2^-8 each: in bfloat16 the sum would stay at 256.
	ones := make([]BFloat16, 8)
	for i := range ones {
		ones[i] = ToBFloat16(1)
	}
	acc := make([]float32, 8)
	for range 1000 {
		Accumulate(acc, ones, Sum)
	}
	require.Equal(t, float32(1000), acc[3])
}

func TestEveryPatternConvertsTheSameInVectors(t *testing.T) {
	half, brain := make([]Float16, 1<<16), make([]BFloat16, 1<<16)
	e4, e5 := make([]Float8E4M3, 256), make([]Float8E5M2, 256)
	for i := range half {
		half[i], brain[i], e4[i&255], e5[i&255] = Float16(i), BFloat16(i), Float8E4M3(i), Float8E5M2(i)
	}
	check := func(n int, f func(acc []float32)) {
		want, got := make([]float32, n), make([]float32, n)
		at(plain, func() { f(want) })
		at(avx2, func() { f(got) })
		for i := range want { // NaN payloads too
			require.Equal(t, math.Float32bits(want[i]), math.Float32bits(got[i]), "%#x", i)
		}
	}
	check(1<<16, func(acc []float32) { Load(acc, half) })
	check(1<<16, func(acc []float32) { Load(acc, brain) })
	check(256, func(acc []float32) { Load(acc, e4) })
	check(256, func(acc []float32) { Load(acc, e5) })
}

func testNarrowing[T Float](t *testing.T, x []float32) {
	want, got := make([]T, len(x)), make([]T, len(x))
	at(plain, func() { Store(want, x, 1) })
	at(avx2, func() { Store(got, x, 1) })
	for i := range want {
		if want[i] != got[i] {
			require.Failf(t, "differ", "%T of %#x is %#x, want %#x", want[i], math.Float32bits(x[i]), got[i], want[i])
		}
	}
}

func TestNarrowingIsTheSameInVectors(t *testing.T) {
	x := make([]float32, 1<<16)
	step := uint64(4099)
	if testing.Short() {
		step = 65537
	}
	for b := uint64(0); b < 1<<32; {
		n := 0
		for ; n < len(x) && b < 1<<32; n++ {
			x[n] = math.Float32frombits(uint32(b))
			b += step
		}
		testNarrowing[Float16](t, x[:n])
		testNarrowing[BFloat16](t, x[:n])
		testNarrowing[Float8E4M3](t, x[:n])
		testNarrowing[Float8E5M2](t, x[:n])
	}
}

func testWeighted[D, S Float](t *testing.T) {
	r := rand.New(rand.NewPCG(15, 16))
	for _, n := range lengths {
		for _, count := range []int{0, 1, 2, 9} {
			rows, w := make([][]S, count), make([]float32, count)
			for i := range rows {
				rows[i], w[i] = odd(convert[S](r, n), r.IntN(9)), float32(r.NormFloat64())
			}
			sums := make([]float32, n)
			for i := range sums {
				for j := range rows {
					sums[i] += float32(w[j] * float32(number(rows[j][i])))
				}
			}
			want := make([]D, n)
			storeGo(want, sums, 1)
			for _, lv := range levels() {
				got := odd(make([]D, n+1), 3)
				got[n] = 42
				at(lv, func() { WeightedSum(got[:n], rows, w) })
				same(t, want, got[:n], fmt.Sprintf("%T from %d rows of %d %T at level %d", want, count, n, rows, lv))
				require.EqualValues(t, 42, got[n])
			}
		}
	}
}

func TestWeightedSum(t *testing.T) {
	testWeighted[float32, float32](t)
	testWeighted[float32, Float16](t)
	testWeighted[float32, BFloat16](t)
	testWeighted[float32, Float8E4M3](t)
	testWeighted[float32, Float8E5M2](t)
	testWeighted[BFloat16, BFloat16](t)
	testWeighted[Float16, Float16](t)
	testWeighted[BFloat16, float32](t)
	testWeighted[BFloat16, Float8E4M3](t)
}

func testReduce[T Wide](t *testing.T) {
	r := rand.New(rand.NewPCG(17, 18))
	for _, n := range append(lengths, chunk+13) {
		a, b := convert[T](r, n), odd(convert[T](r, n), 3)
		for op := Sum; op <= Prod; op++ {
			want := make([]T, n)
			for i := range want {
				want[i] = one(a[i], b[i], op)
			}
			for _, lv := range levels() {
				got := odd(a, 1)
				at(lv, func() { reduce(got, b, op) })
				same(t, want, got, fmt.Sprintf("%T %v %d", want, op, n))
			}
		}
	}
}

func TestReduceInTheirOwnType(t *testing.T) {
	testReduce[float64](t)
	testReduce[int64](t)
	testReduce[int32](t)
	testReduce[uint8](t)
}

func TestBadArgumentsPanicWithTheValues(t *testing.T) {
	x := make([]float32, 8)
	require.PanicsWithValue(t, "vec: Add with slices of 8 and 7", func() { Add(x, x, x[:7]) })
	require.PanicsWithValue(t, "vec: Accumulate with Op(9)", func() { Accumulate(x, x, 9) })
	require.PanicsWithValue(t, "vec: WeightedSum of 1 rows with 2 weights", func() { WeightedSum(x, [][]float32{x}, x[:2]) })
	require.PanicsWithValue(t, "vec: ReduceRows with slices of 8 and 3", func() { ReduceRows(x, [][]float32{x, x[:3]}, Sum, 1) })
	require.Panics(t, func() { ReduceRows(x, nil, Sum, 1) })
}

func TestNothingAllocates(t *testing.T) {
	r := rand.New(rand.NewPCG(19, 20))
	const n = 1000
	a, b, c := random(r, n), random(r, n), random(r, n)
	h, e := convert[BFloat16](r, n), convert[Float8E4M3](r, n)
	rows, hrows, w := [][]float32{a, b, c}, [][]BFloat16{h, h}, []float32{1, 2, 3}
	ints := [][]int64{convert[int64](r, n), convert[int64](r, n)}
	require.Zero(t, testing.AllocsPerRun(10, func() {
		Add(c, a, b)
		Mul(c, a, b)
		Scale(c, a, 2)
		Load(a, h)
		Accumulate(a, e, Max)
		Store(h, a, 3)
		Store(a, b, 3)
		ReduceRows(c, rows, Sum, 3)
		ReduceRows(h, hrows, Sum, 2)
		ReduceRows(ints[0], ints, Prod, 2)
		WeightedSum(c, rows, w)
		WeightedSum(c, hrows, w[:2])
		WeightedSum(h, hrows, w[:2])
	}))
}

func TestAssemblyIsWhatTheGeneratorWrites(t *testing.T) {
	if testing.Short() || runtime.GOOS == "windows" {
		t.Skip("runs the go command")
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command")
	}
	dir := t.TempDir()
	out, err := exec.Command(tool, "run", "./gen", "-dir", dir).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, name := range []string{"vec_amd64.s", "vec_amd64.go"} {
		want, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		got, err := os.ReadFile(name)
		require.NoError(t, err)
		require.True(t, string(want) == string(got), "%s is not what gen writes: run go generate", name)
	}
}
