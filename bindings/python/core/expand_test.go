package core

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

func TestExpandPutsRowsByExpert(t *testing.T) {
	call := ExpandCall{TopK: 2, Experts: 3, Align: 2, Length: 5}
	m := Expansion{
		Indices: []int64{2, 0, -1, 2, 0, -1, 2, -1}, Slots: make([]int32, 8),
		Rows: []byte{1, 1, 2, 2, 3, 3, 4, 4}, ToRows: []byte("0123456789"),
		Weights: shm.Bytes([]float32{1, 2, 3, 4, 5, 6, 7, 8}), ToWeights: shm.Bytes([]float32{9, 9, 9, 9, 9}),
	}
	require.NoError(t, call.Expand(&m))
	require.Equal(t, []int32{2, 0, -1, 3, 1, -1, 4, -1}, m.Slots)
	require.Equal(t, []byte{1, 1, 3, 3, 1, 1, 2, 2, 4, 4}, m.ToRows)
	require.Equal(t, []float32{2, 5, 1, 4, 7}, shm.View[float32](m.ToWeights))

	call.Align, m.Weights, m.ToWeights = 4, nil, nil
	require.NoError(t, call.Expand(&m))
	require.Equal(t, []int32{4, 0, -1, -1, 1, -1, -1, -1}, m.Slots, "rows behind the last are dropped")
	require.Equal(t, []byte{1, 1, 3, 3, 0, 0, 0, 0, 1, 1}, m.ToRows, "padding is zero")

	m.Indices[3] = 3
	require.ErrorIs(t, call.Expand(&m), ErrInvalid)
	m.Indices[3], m.Rows = 2, m.Rows[:6]
	require.ErrorIs(t, call.Expand(&m), ErrInvalid)
	call.TopK = 3
	require.ErrorIs(t, call.Expand(&m), ErrInvalid)
}

func TestFoldSumsRowsOfTokens(t *testing.T) {
	call := FoldCall{TopK: 2, Type: int64(kernels.Float32)}
	rows, sums := []float32{1, 2, 10, 20, 100, 200}, make([]float32, 6)
	require.NoError(t, call.Fold(shm.Bytes(rows), shm.Bytes(sums), []int32{2, 0, -1, 1, -1, -1}))
	require.Equal(t, []float32{101, 202, 10, 20, 0, 0}, sums)

	require.ErrorIs(t, call.Fold(shm.Bytes(rows), shm.Bytes(sums), []int32{2, 0, -1, 3, -1, -1}), ErrInvalid)
	require.ErrorIs(t, call.Fold(shm.Bytes(rows), shm.Bytes(sums), []int32{2, 0, -1}), ErrInvalid)
	call.Type = int64(kernels.Int32)
	require.ErrorIs(t, call.Fold(shm.Bytes(rows), shm.Bytes(sums), []int32{2, 0, -1, 1, -1, -1}), ErrInvalid)
}
