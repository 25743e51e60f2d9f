package dispatch_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Rows of tokens become rows of choices, expert by expert, and their sums are those of the rows of each token's choices.
func expandAndFold(r *rank, seed uint64) {
	const topK, hidden = 3, 32
	rng := rand.New(rand.NewPCG(seed, uint64(r.Rank.Rank())))
	d := r.dispatcher(dispatch.Options{Experts: 4 * r.Size(), TopK: topK, Hidden: hidden, MaxTokens: 8, Layout: dispatch.TokenMajor})
	for _, s := range []device.Stream{nil, r.stream()} {
		for range 6 {
			if r.gpu != nil {
				r.gpu.reuse()
			}
			tokens, align := rng.IntN(40), 1+rng.IntN(4)
			indices, counts := make([]int64, tokens*topK), make([]int32, 4)
			for i := range indices {
				if indices[i] = int64(rng.IntN(5)) - 1; indices[i] >= 0 {
					counts[indices[i]]++
				}
			}
			next, at, wantRooms := make([]int32, 4), int32(0), make([]int64, 5)
			for e, n := range counts {
				next[e] = at
				at = int32(kernels.AlignUp(int64(at+n), int64(align)))
				wantRooms[e] = int64(at - next[e])
			}
			length := int(at)
			rows, weights := make([]float32, tokens*hidden), make([]float32, tokens*topK)
			for i := range rows {
				rows[i] = float32(rng.IntN(1000))
			}
			for i := range weights {
				weights[i] = rng.Float32()
			}
			wantSlots, wantRows, wantWeights := make([]int32, len(indices)), make([]float32, length*hidden), make([]float32, length)
			wantSums, wantBack := make([]float32, tokens*hidden), make([]float32, tokens*topK)
			for i, e := range indices {
				wantSlots[i] = -1
				if e < 0 {
					continue
				}
				slot := next[e]
				next[e]++
				wantSlots[i], wantWeights[slot], wantBack[i] = slot, weights[i], weights[i]
				row := rows[i/topK*hidden:][:hidden]
				copy(wantRows[int(slot)*hidden:], row)
				for k, x := range row {
					wantSums[i/topK*hidden+k] += x
				}
			}
			e := dispatch.Expansion{
				Indices: r.up(shm.Bytes(indices)), Counts: r.up(shm.Bytes(counts)), Slots: r.up(make([]byte, 4*len(indices))), Rooms: r.up(make([]byte, 40)), Rows: r.up(shm.Bytes(rows)),
				ToRows: r.up(make([]byte, 4*length*hidden)), Weights: r.up(shm.Bytes(weights)), ToWeights: r.up(make([]byte, 4*length)), Align: align, Length: length,
			}
			f := dispatch.Folding{
				Rows: e.ToRows, Slots: e.Slots, Sums: r.up(make([]byte, 4*len(wantSums))), Type: kernels.Float32, Weights: e.ToWeights, ToWeights: r.up(make([]byte, 4*len(wantBack))),
			}
			require.NoError(r, d.Expand(s, e))
			require.NoError(r, d.Fold(s, f))
			if s != nil {
				require.NoError(r, s.Synchronize())
			}
			require.Equal(r, string(shm.Bytes(wantSlots)), string(r.down(e.Slots)))
			require.Equal(r, string(shm.Bytes(wantRooms)), string(r.down(e.Rooms)))
			require.Equal(r, string(shm.Bytes(wantRows)), string(r.down(e.ToRows)))
			require.Equal(r, string(shm.Bytes(wantWeights)), string(r.down(e.ToWeights)))
			require.Equal(r, string(shm.Bytes(wantSums)), string(r.down(f.Sums)))
			require.Equal(r, string(shm.Bytes(wantBack)), string(r.down(f.ToWeights)))
			if r.gpu == nil {
				continue
			}
			for i := range wantSlots { // they have no rows
				wantSlots[i] = int32(length + i)
				if i%2 == 0 {
					wantSlots[i] = math.MinInt32
				}
			}
			f.Slots = r.up(shm.Bytes(wantSlots))
			require.NoError(r, d.Fold(s, f))
			if s != nil {
				require.NoError(r, s.Synchronize())
			}
			require.Equal(r, string(make([]byte, f.Sums.Len())), string(r.down(f.Sums)))
			require.Equal(r, string(make([]byte, f.ToWeights.Len())), string(r.down(f.ToWeights)))
		}
	}
	require.NoError(r, d.Close(r.Ctx))
}

func TestExpandAndFold(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { local(t, 2, func(r *rank) { expandAndFold(r, seed) }) })
	}
}

func TestCUDA_ExpandAndFold(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { gpus(t, 2, func(r *rank) { expandAndFold(r, seed) }) })
	}
}

// Wrong arguments are refused with their values, and the dispatcher goes on.
func TestF3_ExpansionsThatAreRefused(t *testing.T) {
	local(t, 1, func(r *rank) {
		d := r.dispatcher(dispatch.Options{Experts: 4, TopK: 2, Hidden: 8, MaxTokens: 8, Layout: dispatch.TokenMajor})
		good := func() dispatch.Expansion {
			return dispatch.Expansion{
				Indices: numbers([]int64{0, 1, 2, -1}), Counts: numbers([]int32{1, 1, 1, 0}), Slots: numbers(make([]int32, 4)),
				Rows: numbers(make([]float32, 16)), ToRows: numbers(make([]float32, 24)), Align: 1, Length: 3,
			}
		}
		require.NoError(r, d.Expand(nil, good()))
		for text, change := range map[string]func(e *dispatch.Expansion){
			"multiples of 0":           func(e *dispatch.Expansion) { e.Align = 0 },
			"-1 rows":                  func(e *dispatch.Expansion) { e.Length = -1 },
			"top-2 of":                 func(e *dispatch.Expansion) { e.Indices = numbers([]int64{0, 1, 2}) },
			"slots has 12 bytes":       func(e *dispatch.Expansion) { e.Slots = numbers(make([]int32, 3)) },
			"to weights has 0 bytes":   func(e *dispatch.Expansion) { e.Weights = numbers(make([]float32, 4)) },
			"rows of 2 tokens have 60": func(e *dispatch.Expansion) { e.Rows = numbers(make([]float32, 15)) },
			"counts has 0 bytes":       func(e *dispatch.Expansion) { e.Counts = memory.View{} },
		} {
			e := good()
			change(&e)
			require.ErrorContains(r, d.Expand(nil, e), text)
		}
		few := good()
		few.Length, few.ToRows, few.Rooms = 2, numbers(make([]float32, 16)), numbers(make([]int64, 5))
		require.NoError(r, d.Expand(nil, few))
		require.Equal(r, shm.Bytes([]int64{1, 1, 0, 0, 1}), few.Rooms.Bytes())
		few.Rooms = numbers(make([]int64, 4))
		require.ErrorContains(r, d.Expand(nil, few), "rooms has 32 bytes")
		fold := dispatch.Folding{Rows: numbers(make([]float32, 24)), Slots: numbers([]int32{0, 1, 2, -1}), Sums: numbers(make([]float32, 16)), Type: kernels.Float32}
		require.NoError(r, d.Fold(nil, fold))
		fold.Type = kernels.Int32
		require.ErrorContains(r, d.Fold(nil, fold), "sums of int32")
		e := good()
		e.Indices = numbers([]int64{0, 1, 4, -1})
		require.ErrorContains(r, d.Expand(nil, e), "expert 4 of 4")
		require.NoError(r, d.Expand(nil, good()))
		require.NoError(r, d.Close(r.Ctx))
	})
}
