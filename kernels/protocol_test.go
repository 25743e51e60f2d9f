package kernels

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAPlaceIsFoundByArithmeticByTableOrByAlias(t *testing.T) {
	s := &Space{Base: 1 << 40, Stride: 1 << 30, Rank: 1, Size: 3, Aliases: new(Aliases)}
	require.EqualValues(t, 1<<40+2<<30+5, s.Addr(2, 5))
	require.Zero(t, s.SegmentTable())

	place := int64(AliasPlace | 7<<AliasShift)
	require.Positive(t, place, "-1 says that there is none")
	require.Zero(t, s.Addr(2, place), "nothing is registered there")
	s.Aliases.Set(7, []uintptr{100, 200, 300})
	require.EqualValues(t, 300, s.Addr(2, place))
	require.EqualValues(t, 100+9, s.Addr(0, place+9))
	require.EqualValues(t, 200+1<<47, s.Addr(1, place+1<<47))
	require.Zero(t, s.Addr(2, AliasPlace|6<<AliasShift))
	require.Nil(t, s.Aliases.Row(maxAliases))
	s.Aliases.Set(7, nil)
	require.Zero(t, s.Addr(2, place))

	s.Segments = []uintptr{10, 1<<40 + 1<<30, 30}
	require.EqualValues(t, 30+5, s.Addr(2, 5))
	require.Equal(t, s.Base+uintptr(s.Stride)+SegmentsOffset, s.SegmentTable())
}

func TestTheTablesFitTheHeader(t *testing.T) {
	for size := 1; size <= 64; size++ {
		require.LessOrEqual(t, SegmentsOffset+8*size, AliasOffset)
		require.LessOrEqual(t, AliasOffset+8*size*AliasRows(size), HeaderBytes)
		require.GreaterOrEqual(t, AliasRows(size), 112)
		require.LessOrEqual(t, AliasOffset+8*size*(AliasRows(size)+ShareRows(size)), HeaderBytes)
	}
	require.Equal(t, 256, AliasRows(28))
	require.Equal(t, 64, ShareRows(22))
	require.Equal(t, 0, ShareRows(28))
	require.Less(t, maxAliases, 1<<(62-AliasShift))
}
