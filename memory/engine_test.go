package memory

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// Plans get from a heap its engine, and views as operations take them.
func TestAHeapHasAnEngineAndOperands(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		h := heapOf(t, g, Options{})
		c := kernels.ExchangeBounds{Size: 2}
		h.Engine().Defaults(&c)
		require.Positive(t, c.Slots)
		layout, err := h.Engine().Layout(&c)
		require.NoError(t, err)
		require.Positive(t, layout.Zero)
		require.GreaterOrEqual(t, layout.Bytes, layout.Zero)

		b, err := h.Alloc(100)
		require.NoError(t, err)
		v := b.View().Slice(10, 50)
		require.True(t, h.Serves(v) && h.Serves(Host(make([]byte, 3))) && h.Serves(View{}))
		require.False(t, h.Serves(Device(4096, 8)), "kernels of this heap run on the host")
		o := h.SymmetricOperand(v)
		require.True(t, o.Reach)
		require.Equal(t, b.Offset()+10, o.Place)
		require.EqualValues(t, 50, o.Bytes)
		require.Equal(t, v.Ptr(), o.Ptr)
		require.Equal(t, &v.Bytes()[0], &o.Mem[0])
		require.False(t, h.Operand(v).Reach, "nobody has asked where it is")
		require.False(t, h.SymmetricOperand(Host(make([]byte, 3))).Reach)
		require.Zero(t, h.Operand(View{}))

		for i := range b.View().Bytes() {
			b.View().Bytes()[i] = 7
		}
		require.NoError(t, b.Clear(20, 30))
		for i, x := range b.View().Bytes() {
			require.Equal(t, i >= 20 && i < 50, x == 0, "byte %d", i)
		}
		require.ErrorIs(t, b.Clear(90, 11), ErrInvalid)
		require.ErrorIs(t, b.Clear(-1, 1), ErrInvalid)
		require.NoError(t, b.Free())
		require.NoError(t, h.Close(t.ctx))
	})
}
