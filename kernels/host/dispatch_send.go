package host

import (
	"sort"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// landEvery is how many tokens are sent between two notes of what has landed.
const landEvery = 256

// send is the first half of a dispatch: it sends this rank's tokens.
func (m *dispatching) send(a *kernels.Dispatch) (err error) {
	defer func() { m.r.half = err }()
	if a.Op == kernels.OpRedispatch {
		if err := undone(a.Op, m.r); err != nil {
			return err
		}
	}
	if m.r.unreceived { // its second half was dropped: peers may still be writing
		if err := m.received(nil); err != nil {
			return err
		}
	}
	if err := m.begin(); err != nil {
		return err
	}
	m.mayWrite(true)
	defer m.mayWrite(false)
	for i := range len(m.h.Landed.Mem) / 4 {
		m.landedWord(m.e.space.Rank, m.h, i).Store(0)
	}
	var failed error
	if a.Op == kernels.OpDispatch {
		failed, err = m.agree(a)
	} else {
		failed, err = m.meet(notice{call: m.m.CallWord(a.Op, 0, m.r.call)}, nil)
	}
	switch {
	case err != nil:
		return err
	case failed != nil:
		return failed
	}
	m.openOutlets()
	if a.Op == kernels.OpDispatch {
		m.number()
		m.keep(true)
	}
	m.scatter(a)
	for i := 1; i < m.e.space.Size; i++ {
		p := m.e.peer(i)
		if !m.in(p) {
			continue
		}
		h := m.peer(m.name(p))
		m.e.word(p, m.block.done(h, m.e.space.Rank)+doneTwins).Store(uint64(m.outlets[m.name(p)].twins))
		m.done(h).signal(p)
	}
	m.r.unreceived = true
	if m.b != nil {
		return m.sendBeyond(a)
	}
	return nil
}

// agree makes the routing and tells it to all ranks, which then know whether it fits.
func (m *dispatching) agree(a *kernels.Dispatch) (failed, err error) {
	r, me, n := m.r, m.m.Rank, m.m.Ranks
	r.call, r.err = r.epoch, nil
	bad, refused := m.route(a)
	each := len(r.counts)
	m.counts = sized(m.counts, n*each)
	copy(m.counts[me*each:], r.counts)
	for i := 1; i < m.e.space.Size; i++ {
		copy(m.countsOf(m.e.peer(i), me), r.counts)
	}
	word := notice{call: m.m.CallWord(kernels.OpDispatch, 0, r.call)}
	if refused {
		word = notice{
			call: kernels.CallWord(kernels.OpRefused, 0, refusedIndex),
			read: uint64(bad.token), write: uint64(bad.expert), readWeights: uint64(bad.choice),
		}
	}
	failed, err = m.meet(word, m.counts)
	if err == nil && failed == nil {
		m.dropOut()
		failed = m.place()
	}
	if err != nil || failed != nil {
		clear(r.offsets)
		clear(r.groups)
		clear(r.from)
		clear(m.counts)
		clear(r.counts)
	}
	if err != nil || failed != nil {
		m.keep(false)
	}
	m.publish(a, err == nil && failed == nil)
	return failed, err
}

// receive is the second half of a dispatch: it makes what peers have sent complete.
func (m *dispatching) receive(a *kernels.Dispatch) error {
	if m.r.half != nil {
		return m.r.half
	}
	m.clearPadding(a.Op == kernels.OpDispatch)
	return m.received(func(peer int) {
		m.makeTwins(m.name(peer), int64(m.e.word(m.e.space.Rank, m.block.done(m.h, peer)+doneTwins).Load()))
	})
}

// received waits for the rows of all peers.
func (m *dispatching) received(arrived func(src int)) error {
	m.rowsComing = true
	err := m.await(m.done(m.h), arrived)
	if err == nil {
		m.lostRows()
	}
	if err == nil && m.b != nil {
		err = m.takeBeyond(m.r, m.h)
	}
	m.r.unreceived = err != nil
	return err
}

// outlet is the output of one rank as this rank writes it.
type outlet struct {
	rows, scales []byte
	sources      []int32
	weights      []float32
	indices      []int64
	twinList     []int32
	twins        int
	tokens       int64 // that have been sent there
}

func (m *dispatching) openOutlets() {
	m.outlets = sized(m.outlets, m.m.Ranks)
	for q := range m.e.space.Size {
		p := m.name(q)
		m.outlets[p] = m.outletOf(q, m.peer(p))
	}
}

// outletOf is that of rank p of the space.
func (m *dispatching) outletOf(p int, h *kernels.DispatchHandle) outlet {
	at := func(b kernels.Buffer) []byte { return m.e.space.Range(p, b.Place, b.Bytes) }
	return outlet{
		rows: at(h.Rows), scales: at(h.Scales), sources: shm.View[int32](at(h.Sources)), weights: shm.View[float32](at(h.Weights)),
		indices:  shm.View[int64](at(h.Indices)),
		twinList: shm.View[int32](m.e.space.Range(p, m.block.twinList(h, m.m.Rank), 8*m.block.twins)),
	}
}

// scatter writes every token to its first row on each of its ranks, and lists or makes the others.
func (m *dispatching) scatter(a *kernels.Dispatch) {
	x, r, size := m.m, m.r, m.m.RowBytes()
	me, byToken := int32(x.Rank), x.Layout.ByToken()
	stream := m.e.streams(len(r.rows), size)
	m.landed = sized(m.landed, x.Slots())
	clear(m.landed)
	words := 4 * int64(x.ScaleWords())
	for t := range r.tokens() {
		if m.m.Landed && t%landEvery == landEvery-1 {
			m.tellLanded(stream)
		}
		if r.first[t] == r.first[t+1] {
			continue
		}
		token, scales := m.tokenRow(a, t, size, words)
		rank, from := int32(-1), int32(0)
		for i := r.first[t]; i < r.first[t+1]; i++ {
			row := &r.rows[i]
			if m.at(int(row.rank)) < 0 {
				continue
			}
			to := &m.outlets[row.rank]
			again := row.rank == rank // it has the token already
			if again && (byToken || rank != me) {
				if !byToken {
					to.twinList[2*to.twins], to.twinList[2*to.twins+1] = from, row.row
					to.twins++
				}
				continue
			}
			if !again {
				to.tokens++
			}
			rank, from = row.rank, row.row
			if dst := to.rows[int64(row.row)*size:][:size]; stream {
				shm.CopyStream(dst, token)
			} else {
				copy(dst, token)
			}
			if len(scales) > 0 {
				m.putScales(to.scales, int64(row.row), scales)
			}
			m.w.moved(size)
			m.landed[row.slot]++
		}
	}
	if m.m.Landed {
		m.tellLanded(stream)
	} else if stream {
		shm.Fence()
	}
	for p := range m.outlets {
		m.sent(p, m.outlets[p].tokens*(size+words))
	}
}

// tokenRow is the row of token t as it is sent, with its scales.
func (m *dispatching) tokenRow(a *kernels.Dispatch, t int, size, words int64) (row, scales []byte) {
	if m.m.Quantizes() {
		n := m.m.TokenBytes()
		return m.token.quantize(m.m, a.X.Mem[int64(t)*n:][:n])
	}
	if words > 0 {
		scales = a.Scales.Mem[int64(t)*words:][:words]
	}
	return a.X.Mem[int64(t)*size:][:size], scales
}

// number gives every row its place, and writes its source and weight there.
func (m *dispatching) number() {
	me, byToken := int32(m.m.Rank), m.m.Layout.ByToken()
	rows, first := m.r.rows, m.r.first
	for t := range m.r.tokens() {
		rank := int32(-1)
		for i := first[t]; i < first[t+1]; i++ {
			row := &rows[i]
			if byToken {
				row.row += int32(m.base[row.rank])
			} else {
				row.row += int32(m.base[row.slot])
			}
			if m.at(int(row.rank)) >= 0 {
				m.describe(&m.outlets[row.rank], row, me, int32(t), row.rank != rank)
			}
			rank = row.rank
		}
	}
}

// describe writes what an output has of a row but the row itself. first says that it is the token's first on its rank.
func (m *dispatching) describe(to *outlet, row *routedRow, src, token int32, first bool) {
	byToken := m.m.Layout.ByToken()
	if byToken {
		m.label(to, row, first)
	} else if len(to.weights) > 0 {
		to.weights[row.row] = row.weight
	}
	if len(to.sources) > 0 && (!byToken || first) {
		to.sources[2*row.row], to.sources[2*row.row+1] = src, token
	}
}

// label writes the index and weight of a choice in a token-major layout. first says that it is the token's first on its rank.
func (m *dispatching) label(to *outlet, row *routedRow, first bool) {
	x := m.m
	at := int(row.row)
	indices, weights := to.indices[at*x.TopK:][:x.TopK], to.weights[at*x.TopK:][:x.TopK]
	if first {
		for k := range indices {
			indices[k] = -1
		}
		clear(weights)
	}
	indices[row.choice] = int64(row.slot - x.First[row.rank])
	weights[row.choice] = row.weight
}

// putScales writes the scales of a row into those of an output.
func (m *dispatching) putScales(to []byte, row int64, scales []byte) {
	if !m.m.Scales.Columns {
		copy(to[row*int64(len(scales)):], scales)
		return
	}
	words, columns := shm.View[uint32](scales), shm.View[uint32](to)
	at, stride := m.column(row)
	for i, w := range words {
		columns[at+int64(i)*stride] = w
	}
}

// column is where the first scale of a row lies in column-major order, in words, and how far it is to the next.
func (m *dispatching) column(row int64) (at, stride int64) {
	x := m.m
	if x.Layout == kernels.PaddedRows || x.Layout == kernels.SlabRows {
		return row/x.Capacity*x.Capacity*int64(x.ScaleWords()) + row%x.Capacity, x.Capacity
	}
	return row, x.Rows
}

// getScales is the inverse of putScales.
func (m *dispatching) getScales(scales, from []byte, row int64) {
	if !m.m.Scales.Columns {
		copy(scales, from[row*int64(len(scales)):])
		return
	}
	words, columns := shm.View[uint32](scales), shm.View[uint32](from)
	at, stride := m.column(row)
	for i := range words {
		words[i] = columns[at+int64(i)*stride]
	}
}

// tellLanded adds what has been written since it did so last to the words of the receivers.
func (m *dispatching) tellLanded(stream bool) {
	if stream {
		shm.Fence()
	}
	for q := range m.e.space.Size {
		p := m.name(q)
		first := m.m.First[p]
		for s := first; s < m.m.First[p+1]; s++ {
			if n := m.landed[s]; n > 0 {
				m.landed[s] = 0
				m.landedWord(q, m.peer(p), int(s-first)).Add(uint32(n))
			}
		}
	}
}

// makeTwins copies rows that src has sent to where else it wants them.
func (m *dispatching) makeTwins(src int, n int64) {
	if n == 0 {
		return
	}
	me, size := m.e.space.Rank, m.m.RowBytes()
	list := shm.View[int32](m.e.space.Range(me, m.block.twinList(m.h, src), 8*n))
	m.token.scales = sized(m.token.scales, 4*m.m.ScaleWords())
	for i := 0; i < len(list); i += 2 {
		from, to := int64(list[i]), int64(list[i+1])
		copy(m.h.Rows.Mem[to*size:][:size], m.h.Rows.Mem[from*size:])
		m.w.moved(size)
		if scales := m.token.scales; len(scales) > 0 {
			m.getScales(scales, m.h.Scales.Mem, from)
			m.putScales(m.h.Scales.Mem, to, scales)
		}
		if m.m.Landed {
			slot := sort.Search(len(m.r.groups), func(g int) bool { return m.r.offsets[g+1] > to })
			m.landedWord(me, m.h, slot).Add(1)
		}
	}
}

// eachPadding calls f with stretches of rows that belong to no token and have to be zero.
func (m *dispatching) eachPadding(f func(from, to int64)) {
	if m.m.Layout != kernels.FlatRows && m.m.Layout != kernels.PaddedRows {
		return
	}
	for g, rows := range m.r.groups {
		if from, to := m.r.offsets[g]+rows, m.r.offsets[g+1]; from < to {
			f(from, to)
		}
	}
}

// clearPadding zeroes padding rows and their scales, and their weights where asked. They have no source.
func (m *dispatching) clearPadding(beside bool) {
	m.eachPadding(func(from, to int64) { m.clearRows(from, to, beside) })
}

// clearRows makes padding of rows.
func (m *dispatching) clearRows(from, to int64, beside bool) {
	size, each := m.m.RowBytes(), int64(m.m.WeightsPerRow())
	sources, weights, indices := shm.View[int32](m.h.Sources.Mem), shm.View[float32](m.h.Weights.Mem), shm.View[int64](m.h.Indices.Mem)
	m.token.scales = sized(m.token.scales, 4*m.m.ScaleWords())
	clear(m.h.Rows.Mem[from*size : to*size])
	if zero := m.token.scales; len(zero) > 0 {
		clear(zero)
		for row := from; row < to; row++ {
			m.putScales(m.h.Scales.Mem, row, zero)
		}
	}
	if beside && len(sources) > 0 {
		for i := 2 * from; i < 2*to; i++ {
			sources[i] = -1
		}
	}
	if beside && len(weights) > 0 {
		clear(weights[from*each : to*each])
	}
	if beside && len(indices) > 0 {
		for i := from * each; i < to*each; i++ {
			indices[i] = -1
		}
	}
}
