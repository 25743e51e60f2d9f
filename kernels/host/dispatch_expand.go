package host

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// expandRows makes rows one for each choice. An expert that is none is an error, before anything is written.
func expandRows(a *kernels.Expand) error {
	indices, counts, slots := shm.View[int64](a.Indices.Mem), shm.View[int32](a.Counts.Mem), shm.View[int32](a.Slots.Mem)
	experts := int64(len(counts))
	for _, e := range indices {
		if e >= experts {
			return fmt.Errorf("kernels: expand: expert %d of %d", e, experts)
		}
	}
	next, gaps := make([]int64, experts), make([][2]int, 0, experts+1)
	rooms := shm.View[int64](a.Rooms.Mem)
	at := int64(0)
	for e, n := range counts {
		next[e] = at
		end := at + int64(n)
		at = kernels.AlignUp(end, int64(a.Align))
		gaps = append(gaps, [2]int{min(int(end), a.Length), min(int(at), a.Length)})
		if len(rooms) > 0 {
			rooms[e] = min(at, int64(a.Length)) - min(next[e], int64(a.Length))
		}
	}
	if len(rooms) > 0 {
		if rooms[experts] = 0; at > int64(a.Length) {
			rooms[experts] = 1
		}
	}
	gaps = append(gaps, [2]int{min(int(at), a.Length), a.Length})
	for i, e := range indices {
		slots[i] = -1
		if e >= 0 {
			if next[e] < int64(a.Length) {
				slots[i] = int32(next[e])
			}
			next[e]++
		}
	}
	for _, part := range [...]struct {
		to, from kernels.Buffer
		each     int // rows of from that a token has
	}{{a.ToRows, a.Rows, 1}, {a.ToScales, a.Scales, 1}, {a.ToWeights, a.Weights, a.TopK}} {
		if part.to.Bytes == 0 {
			continue
		}
		size := int(part.to.Bytes) / a.Length
		for i, slot := range slots {
			if slot >= 0 {
				copy(part.to.Mem[int(slot)*size:][:size], part.from.Mem[i*part.each/a.TopK*size:])
			}
		}
		for _, gap := range gaps {
			clear(part.to.Mem[gap[0]*size : gap[1]*size])
		}
	}
	return nil
}

// foldRows sums the rows of choices.
func foldRows(a *kernels.Fold) error {
	if slots := shm.View[int32](a.Slots.Mem); a.ToWeights.Bytes > 0 {
		from, to := shm.View[float32](a.Weights.Mem), shm.View[float32](a.ToWeights.Mem)
		for i, slot := range slots {
			if int(slot) >= len(from) {
				return fmt.Errorf("kernels: fold: row %d of %d", slot, len(from))
			}
			if to[i] = 0; slot >= 0 {
				to[i] = from[slot]
			}
		}
	}
	switch a.Type {
	case kernels.Float16:
		return foldOf[vec.Float16](a)
	case kernels.BFloat16:
		return foldOf[vec.BFloat16](a)
	default:
		return foldOf[float32](a)
	}
}

func foldOf[T vec.Float](a *kernels.Fold) error {
	rows, sums, slots, k := shm.View[T](a.Rows.Mem), shm.View[T](a.Sums.Mem), shm.View[int32](a.Slots.Mem), a.TopK
	tokens := a.Tokens()
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
				return fmt.Errorf("kernels: fold: row %d of %d", slot, len(rows)/hidden)
			}
			some = append(some, rows[int(slot)*hidden:][:hidden])
		}
		vec.WeightedSum(sums[t*hidden:][:hidden], some, ones[:len(some)])
	}
	return nil
}
