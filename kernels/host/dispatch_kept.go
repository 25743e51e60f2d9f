package host

import (
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// The routing part of a handle's State, see kernels.Layout: the epoch of the dispatch (0: it failed), the number of tokens, the first row
// of each group and one more, the rows of each, how many came from each rank; then the first routed row of each token and one more, and
// the routed rows.

// keptWords are the 64-bit words before the tokens.
func keptWords(m *kernels.DispatchBounds) int64 {
	groups := int64(max(m.MostLocal(), m.Ranks))
	return 2 + 2*groups + 1 + int64(m.Ranks)
}

// keptBytes is the size of the routing part.
func keptBytes(m *kernels.DispatchBounds) int64 {
	tokens := int64(m.MaxTokens)
	return kernels.AlignUp(8*keptWords(m)+4*(tokens+1)+20*tokens*int64(m.TopK), kernels.LineBytes)
}

// kept is the routing part of this rank's State.
func (m *dispatching) kept() []byte {
	return m.e.space.Range(m.e.space.Rank, m.h.State.Place+m.block.keptAt, keptBytes(m.m))
}

// keep writes the routing of a dispatch, which failed if ok is false, for those who copy it.
func (m *dispatching) keep(ok bool) {
	r, to := m.r, m.kept()
	words := shm.View[int64](to[:8*keptWords(m.m)])
	words[0], words[1] = 0, int64(r.tokens())
	if !ok {
		return
	}
	words[0], words = int64(r.call), words[2:]
	words = words[copy(words, r.offsets):]
	words = words[copy(words, r.groups):]
	copy(words, r.from)
	numbers := shm.View[int32](to[8*keptWords(m.m):])
	numbers = numbers[copy(numbers, r.first):]
	for i, row := range r.rows {
		n := numbers[5*i:][:5]
		n[0], n[1], n[2], n[3] = row.rank, row.slot, row.row, row.choice
		shm.View[float32](shm.Bytes(n[4:]))[0] = row.weight
	}
}

// recall has the call go by a routing that was copied from the part of a State.
func (m *dispatching) recall(from []byte) {
	r, x := m.r, m.m
	words := shm.View[int64](from[:8*keptWords(x)])
	r.call, r.err = uint64(words[0]), nil
	if tokens := words[1]; r.call == 0 || tokens != int64(m.call.Tokens) {
		r.err = &kernels.RoutingError{Tokens: m.call.Tokens}
		return
	}
	words = words[2:]
	words = words[copy(r.offsets, words):]
	words = words[copy(r.groups, words):]
	copy(r.from, words)
	numbers := shm.View[int32](from[8*keptWords(x):])
	r.first = append(r.first[:0], numbers[:m.call.Tokens+1]...)
	numbers, r.rows = numbers[m.call.Tokens+1:], r.rows[:0]
	for i := range int(r.first[m.call.Tokens]) {
		n := numbers[5*i:][:5]
		r.rows = append(r.rows, routedRow{rank: n[0], slot: n[1], row: n[2], choice: n[3], weight: shm.View[float32](shm.Bytes(n[4:]))[0]})
	}
}
