package host

import (
	"fmt"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// routedRow is one token's row for one of its choices. In a token-major layout the choices on one rank share their row.
type routedRow struct {
	rank   int32 // whose output it is in
	slot   int32 // of all ranks together
	row    int32 // its number among this rank's rows there; when they have been sent, its row in the output
	choice int32
	weight float32
}

// routing is where the tokens of the last dispatch of a handle go, and what the call that it is in needs in both halves.
type routing struct {
	// rows[first[t]:first[t+1]] are those of token t, ordered by rank and then by choice.
	first []int32
	rows  []routedRow
	// counts are the rows for each slot; behind those, in a token-major layout, for each rank.
	counts []int32
	rankOf []int32 // of slots
	call   uint64  // epoch of the dispatch
	err    error   // why it failed

	// Of this rank's output: the first row of each group, and one more behind its last; the rows of each, without padding; and
	// how many came from each rank.
	offsets, groups, from []int64

	epoch      uint64
	half       error    // of the call's Send
	unreceived bool     // a dispatch had its Send, and no Receive yet
	notices    []notice // by rank
	cast       uint64   // with Masks: bits of the ranks that take part in the call,
	came       []int32  // and how many rows each rank has for each slot of this one

	// Of a call on several hosts: its number among those that went on, whether it is a redispatch, whether what other hosts have sent has
	// been taken, and how many answers of each rank it waits for.
	beyond uint64
	again  bool
	taken  bool
	awaits []uint64
	asked  []message // by other hosts, in a combine
}

func (r *routing) init(m *kernels.DispatchBounds, rankOf []int32) {
	r.rankOf = rankOf
	groups := m.Groups(m.Rank)
	r.first = make([]int32, 1, m.MaxTokens+1)
	r.rows = make([]routedRow, 0, m.MaxTokens*m.TopK)
	r.counts = make([]int32, m.Slots()+m.Ranks)
	r.offsets, r.groups, r.from = make([]int64, groups+1), make([]int64, groups), make([]int64, m.Ranks)
}

// rowsUsed is the length of the output, padding inside it included.
func (r *routing) rowsUsed() int64 { return r.offsets[len(r.offsets)-1] }

func (r *routing) tokens() int { return len(r.first) - 1 }

// undone is the error of a call on a dispatch that failed. Every rank has it, so none begins the call.
func undone(op kernels.DispatchOp, r *routing) error {
	if r.err == nil {
		return nil
	}
	return fmt.Errorf("kernels: %v: its dispatch failed: %w", op, r.err)
}

// badIndex is a choice that is no expert.
type badIndex struct {
	token, choice int
	expert        int64
}

// route reads the choices of a dispatch.
func (m *dispatching) route(a *kernels.Dispatch) (badIndex, bool) {
	weights := shm.View[float32](a.Weights.Mem)
	masked := uint64(0)
	if m.m.Masks {
		masked = m.maskedRanks()
	}
	if m.m.IndexBytes == 8 {
		return route(m.m, m.r, shm.View[int64](a.Experts.Mem)[:a.Tokens*m.m.TopK], weights, masked)
	}
	return route(m.m, m.r, shm.View[int32](a.Experts.Mem)[:a.Tokens*m.m.TopK], weights, masked)
}

// route passes over copies of experts on masked ranks.
func route[I int32 | int64](m *kernels.DispatchBounds, r *routing, idx []I, weights []float32, masked uint64) (badIndex, bool) {
	table := shm.View[int32](m.Placement.Mem)
	copies, at := table[:m.Experts+1], table[m.Experts+1:]
	r.first, r.rows = append(r.first[:0], 0), r.rows[:0]
	clear(r.counts)
	topK, byToken, perRank := m.TopK, m.Layout.ByToken(), r.counts[m.Slots():]
	rankOf := r.rankOf
	for t := range len(idx) / topK {
		begin := len(r.rows)
		for k, e := range idx[t*topK : (t+1)*topK] {
			if e == -1 {
				continue
			}
			if e < 0 || int64(e) >= int64(m.Experts) {
				return badIndex{t, k, int64(e)}, true
			}
			slot := at[copies[e]]
			if n := copies[e+1] - copies[e]; n > 1 {
				slot = at[copies[e]+int32(m.Rank+t)%n]
				for i := int32(1); i < n && masked>>rankOf[slot]&1 != 0; i++ {
					slot = at[copies[e]+(int32(m.Rank+t)+i)%n]
				}
			}
			if masked>>rankOf[slot]&1 != 0 {
				continue // no rank has it
			}
			row := routedRow{rank: rankOf[slot], slot: slot, row: r.counts[slot], choice: int32(k), weight: 1}
			if len(weights) > 0 {
				row.weight = weights[t*topK+k]
			}
			r.counts[slot]++
			i := len(r.rows)
			r.rows = append(r.rows, row)
			for ; i > begin && r.rows[i-1].rank > row.rank; i-- {
				r.rows[i] = r.rows[i-1]
			}
			r.rows[i] = row
		}
		if byToken {
			for i := begin; i < len(r.rows); i++ {
				row := &r.rows[i]
				if i > begin && r.rows[i-1].rank == row.rank {
					row.row = r.rows[i-1].row
				} else {
					row.row = perRank[row.rank]
					perRank[row.rank]++
				}
			}
		}
		r.first = append(r.first, int32(len(r.rows)))
	}
	return badIndex{}, false
}

// countsOf is where src tells rank p its counts.
func (m *dispatching) countsOf(p, src int) []int32 {
	return shm.View[int32](m.e.space.Range(p, m.block.counts(m.r.epoch, src), 4*int64(len(m.r.counts))))
}

// place computes from the counts of all ranks where every row goes. The error is the same on all of them.
func (m *dispatching) place() error {
	if m.m.Layout.ByToken() {
		return m.placeTokens()
	}
	x, r, me, n := m.m, m.r, m.m.Rank, m.m.Ranks
	each := len(r.counts)
	m.base = sized(m.base, x.Slots())
	clear(r.from)
	for p := range n {
		at := int64(0)
		for s := int(x.First[p]); s < int(x.First[p+1]); s++ {
			first := at
			for src := range n {
				if src == me {
					m.base[s] = at
				}
				count := int64(m.counts[src*each+s])
				at += count
				if p == me {
					r.from[src] += count
				}
			}
			rows := at - first
			if x.Layout.Fixed() {
				if rows > x.Capacity {
					return &kernels.OverflowError{Call: r.epoch, Rank: p, Expert: int(m.expert(s)), Rows: rows, Limit: x.Capacity}
				}
				at = first + x.Capacity
			} else {
				at = kernels.AlignUp(at, x.Align)
			}
			if p == me {
				i := s - int(x.First[me])
				r.offsets[i], r.groups[i] = first, rows
			}
		}
		if at > x.Rows {
			return &kernels.OverflowError{Call: r.epoch, Rank: p, Expert: -1, Rows: at, Limit: x.Rows}
		}
		if p == me {
			r.offsets[len(r.groups)] = at
		}
	}
	return nil
}

func (m *dispatching) placeTokens() error {
	x, r, me := m.m, m.r, m.m.Rank
	each, slots := len(r.counts), x.Slots()
	m.base = sized(m.base, x.Ranks)
	for p := range x.Ranks {
		at := int64(0)
		for src := range x.Ranks {
			if x.Layout.Fixed() {
				at = int64(src) * int64(x.MaxTokens)
			}
			if src == me {
				m.base[p] = at
			}
			rows := int64(m.counts[src*each+slots+p])
			if p == me {
				r.offsets[src], r.groups[src], r.from[src] = at, rows, rows
			}
			at += rows
		}
		if at > x.Rows {
			return &kernels.OverflowError{Call: r.epoch, Rank: p, Expert: -1, Rows: at, Limit: x.Rows}
		}
		if p == me {
			if x.Layout.Fixed() {
				at = x.Rows
			}
			r.offsets[x.Ranks] = at
		}
	}
	return nil
}

// rankCounts are the places of how many rows came from each rank, the last empty where the host is not told.
func (m *dispatching) rankCounts() (places [2][]int32) {
	places[0] = shm.View[int32](m.h.RankCounts.Mem)
	if n := len(m.h.Mapped.Mem) / 4; n > 0 {
		places[1] = shm.View[int32](m.h.Mapped.Mem)[n-m.m.Ranks:]
	}
	return places
}

// expert is the one in a slot.
func (m *dispatching) expert(slot int) int32 {
	table := shm.View[int32](m.m.Placement.Mem)
	return table[m.m.Experts+1+m.m.Slots()+slot]
}

// publish writes the counts of a dispatch to its handle. Those of one that failed are zero, and nobody is told of them.
func (m *dispatching) publish(a *kernels.Dispatch, ok bool) {
	x, r := m.m, m.r
	counts, offsets, from := shm.View[int32](m.h.Counts.Mem), shm.View[int32](m.h.Offsets.Mem), shm.View[int32](m.h.RankCounts.Mem)
	m.noteCame()
	clear(counts)
	for src := range x.Ranks {
		for i, n := range m.counts[src*len(r.counts)+int(x.First[x.Rank]):][:len(counts)] {
			counts[i] += n
		}
	}
	for i, at := range r.offsets {
		offsets[i] = int32(at)
	}
	for i, n := range r.from {
		from[i] = int32(n)
	}
	tell := func(words []byte) {
		to := shm.View[int32](words)[2:]
		to = to[copy(to, counts):]
		to = to[copy(to, offsets):]
		copy(to, from)
	}
	if len(a.Numbers.Mem) > 0 {
		tell(a.Numbers.Mem)
	}
	if ok && len(m.h.Mapped.Mem) > 0 {
		tell(m.h.Mapped.Mem)
		shm.Word(m.h.Mapped.Mem, 0).Store(a.Ticket)
	}
	m.countChoices()
}

// countChoices adds to the counters of experts.
func (m *dispatching) countChoices() {
	for s, n := range m.r.counts[:m.m.Slots()] {
		if n > 0 {
			m.counter(int(m.expert(s))).Add(uint64(n))
		}
	}
}

// landedWords are those of a handle on rank p.
func (m *dispatching) landedWord(p int, h *kernels.DispatchHandle, i int) *atomic.Uint32 {
	return shm.Word32(m.e.space.Mem, int64(p)*m.e.space.Stride+h.Landed.Place+4*int64(i))
}
