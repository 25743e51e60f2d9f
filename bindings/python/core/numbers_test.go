package core

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
)

func TestF3_NumbersAreCheckedAsTheyWereGiven(t *testing.T) {
	dt, err := Numbered[kernels.DType]("dtype", int64(kernels.Float64))
	require.NoError(t, err)
	require.Equal(t, kernels.Float64, dt)
	for _, n := range []int64{-1, 256, 1 << 32, math.MinInt64, 1<<32 + int64(kernels.Float64)} {
		_, err := Numbered[kernels.DType]("dtype", n)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "dtype is ")
		require.ErrorIs(t, Half(n).check(), ErrInvalid)
		_, err = (&Dispatcher{}).CombineBackward(0, &BackwardCall{Weighting: n}, nil)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "Weighting is ")
	}
	_, err = (&Dispatcher{}).Combine(0, &CombineCall{Weighting: 1<<8 + int64(dispatch.DispatchedWeights)}, nil, nil)
	require.ErrorContains(t, err, "Weighting is 256")
	_, err = (&Dispatcher{}).Dispatch(0, &DispatchCall{Half: 2}, nil, false, nil)
	require.ErrorContains(t, err, "half is 2, want 0 or 1")

	require.NoError(t, (&ShapeHead{Row: 1, Placed: 1, NoSMs: 1}).Check())
	for _, h := range []ShapeHead{{}, {Row: -8}, {Row: 1, Placed: -1}, {Row: 1, Placed: 2}, {Row: 1, Placed: math.MinInt64}, {Row: 1, NoSMs: 2}} {
		require.ErrorIs(t, h.Check(), ErrInvalid)
	}

	require.Equal(t, 3*time.Microsecond, Microseconds(3))
	require.Equal(t, -3*time.Microsecond, Microseconds(-3))
	require.Greater(t, Microseconds(math.MaxInt64), 290*365*24*time.Hour)
	require.Less(t, Microseconds(math.MinInt64), time.Duration(0))
}
