package curve

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheNextLargerWorldSpeaksForOne(t *testing.T) {
	for ranks, want := range map[int]int{1: 2, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 64: 8} {
		require.Equal(t, want, nearest(ranks, []int{8, 2, 4, 2}), "%d ranks", ranks)
	}
	require.Zero(t, nearest(2, nil))
	self := func(n int) int { return n }
	require.Equal(t, []int{2, 2}, ForWorld([]int{8, 2, 4, 2}, 1, self))
	require.Empty(t, ForWorld(nil, 1, self))
}

// More multiprocessors have to be worth it, and where only more were measured the time grows as they shrink.
func TestTheBestSettingOfEachSize(t *testing.T) {
	few := Measured{Setting{SMs: 8}, []int64{1 << 10, 1 << 20}, []float64{4, 100}}
	more := Measured{Setting{SMs: 16, Rate: 350}, []int64{1 << 10, 1 << 20}, []float64{3.95, 60}}
	points := Best([]Measured{more, few}, 2, 32)
	require.Len(t, points, 2)
	us, s := points.At(9) // 512 bytes leave a rank of 2
	require.InDelta(t, 4, us, 1e-9)
	require.Equal(t, Setting{SMs: 8}, s, "1% is not worth 8 multiprocessors")
	us, s = points.At(19)
	require.InDelta(t, 60, us, 1e-9)
	require.Equal(t, Setting{SMs: 16, Rate: 350}, s)
	us, _ = points.At(14) // half-way in logarithms
	require.InDelta(t, math.Sqrt(4*60), us, 1e-9)
	us, _ = points.At(0)
	require.InDelta(t, 4, us, 1e-9, "below the first it stays")
	us, _ = points.At(21)
	require.InDelta(t, 240, us, 1e-9, "above the last the rate stays")
	points = Best([]Measured{more}, 2, 8)
	us, s = points.At(19)
	require.InDelta(t, 120, us, 1e-9)
	require.Equal(t, Setting{SMs: 8}, s)
}

func TestFiguresThatCannotBe(t *testing.T) {
	good := Measured{Setting{SMs: 1}, []int64{1, 2}, []float64{1, 1}}
	require.NoError(t, good.Validate("bytes"))
	for want, m := range map[string]Measured{
		"-1 multiprocessors": {Setting{SMs: -1}, good.Sizes, good.Microseconds},
		"rate -2":            {Setting{Rate: -2}, good.Sizes, good.Microseconds},
		"0 sizes":            {},
		"1 times":            {Setting{}, good.Sizes, []float64{1}},
		"for 1 bytes at":     {Setting{}, []int64{2, 1}, good.Microseconds},
		"NaN us":             {Setting{}, good.Sizes, []float64{1, math.NaN()}},
	} {
		require.ErrorContains(t, m.Validate("bytes"), want)
	}
}
