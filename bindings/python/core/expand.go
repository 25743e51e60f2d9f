package core

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// ExpandCall makes of rows one for each token rows one for each choice, in memory of the host and without another rank, as C callers
// describe it: expert by expert, each from a multiple of Align on, in the order of tokens. Padding is zero.
type ExpandCall struct {
	// Indices are [tokens, TopK] of int64, the expert of each choice, -1 for none. Slots are a result of that shape, of int32: the row of each
	// choice, -1 for none and for one behind the last row.
	Indices, Slots Buffer
	// Rows and Scales are copied to ToRows and ToScales, which have Length of them, as ToWeights has. Weights are [tokens, TopK] of float32.
	// Those without bytes are not there.
	Rows, ToRows, Scales, ToScales, Weights, ToWeights Buffer
	TopK, Experts, Align, Length                       int64
}

// FoldCall is the inverse, as C callers describe it: Sums [tokens, hidden] of the Rows of each token's choices, which Slots [tokens, TopK]
// have as in an ExpandCall, in float32 and in the order of choices. Type is a kernels.DType: a float of 16 or 32 bits.
type FoldCall struct {
	Rows, Slots, Sums Buffer
	TopK, Type        int64
}

// Expansion is the memory of an ExpandCall.
type Expansion struct {
	Indices                                            []int64
	Slots                                              []int32
	Rows, ToRows, Scales, ToScales, Weights, ToWeights []byte
}

// Expand makes a call.
func (c *ExpandCall) Expand(m *Expansion) error {
	k, length := int(c.TopK), int(c.Length)
	if k < 1 || c.Experts < 0 || c.Align < 1 || length < 0 || len(m.Indices)%k != 0 || len(m.Slots) != len(m.Indices) {
		return fmt.Errorf("core: %w: %d choices, %d a token, of %d experts in %d rows", ErrInvalid, len(m.Indices), k, c.Experts, length)
	}
	next := make([]int64, c.Experts)
	for _, e := range m.Indices {
		if e >= c.Experts {
			return fmt.Errorf("core: %w: expert %d of %d", ErrInvalid, e, c.Experts)
		}
		if e >= 0 {
			next[e]++
		}
	}
	gaps := [][2]int{}
	at := int64(0)
	for e, n := range next {
		next[e] = at
		end := at + n
		at = kernels.AlignUp(end, c.Align)
		gaps = append(gaps, [2]int{min(int(end), length), min(int(at), length)})
	}
	gaps = append(gaps, [2]int{min(int(at), length), length})
	for i, e := range m.Indices {
		m.Slots[i] = -1
		if e >= 0 {
			if next[e] < c.Length {
				m.Slots[i] = int32(next[e])
			}
			next[e]++
		}
	}
	tokens := len(m.Indices) / k
	for _, part := range [...]struct {
		to, from []byte
		each     int // rows of from that a token has
	}{{m.ToRows, m.Rows, 1}, {m.ToScales, m.Scales, 1}, {m.ToWeights, m.Weights, k}} {
		if len(part.to) == 0 {
			continue
		}
		size := len(part.to) / length
		if len(part.from) != tokens*part.each*size {
			return fmt.Errorf("core: %w: %d bytes of %d tokens for rows of %d", ErrInvalid, len(part.from), tokens, size)
		}
		for i, slot := range m.Slots {
			if slot >= 0 {
				copy(part.to[int(slot)*size:][:size], part.from[i*part.each/k*size:])
			}
		}
		for _, gap := range gaps {
			clear(part.to[gap[0]*size : gap[1]*size])
		}
	}
	return nil
}

// Fold makes a call in memory.
func (c *FoldCall) Fold(rows, sums []byte, slots []int32) error {
	if c.TopK < 1 || len(slots)%int(c.TopK) != 0 {
		return fmt.Errorf("core: %w: %d choices, %d a token", ErrInvalid, len(slots), c.TopK)
	}
	switch kernels.DType(c.Type) {
	case kernels.Float16:
		return fold(shm.View[vec.Float16](rows), shm.View[vec.Float16](sums), slots, int(c.TopK))
	case kernels.BFloat16:
		return fold(shm.View[vec.BFloat16](rows), shm.View[vec.BFloat16](sums), slots, int(c.TopK))
	case kernels.Float32:
		return fold(shm.View[float32](rows), shm.View[float32](sums), slots, int(c.TopK))
	}
	return fmt.Errorf("core: %w: sums of type %d", ErrInvalid, c.Type)
}

func fold[T vec.Float](rows, sums []T, slots []int32, k int) error {
	tokens := len(slots) / k
	if tokens == 0 {
		return nil
	}
	hidden := len(sums) / tokens
	some, ones := make([][]T, 0, k), make([]float32, k)
	for i := range ones {
		ones[i] = 1
	}
	for t := range tokens {
		some = some[:0]
		for _, slot := range slots[t*k:][:k] {
			if slot < 0 {
				continue
			}
			if (int(slot)+1)*hidden > len(rows) {
				return fmt.Errorf("core: %w: row %d of %d", ErrInvalid, slot, len(rows)/hidden)
			}
			some = append(some, rows[int(slot)*hidden:][:hidden])
		}
		vec.WeightedSum(sums[t*hidden:][:hidden], some, ones[:len(some)])
	}
	return nil
}
