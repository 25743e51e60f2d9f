package host

import (
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// settle takes what other hosts have sent in calls whose Receive is still to come.
func (m *dispatching) settle() error {
	for i := range m.b.handles {
		if r := &m.b.handles[i]; r.unreceived {
			if err := m.takeBeyond(r, &m.m.Handles[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendBeyond sends this rank's tokens to other hosts.
func (m *dispatching) sendBeyond(a *kernels.Dispatch) error {
	r, size, words := m.r, m.m.RowBytes(), 4*int64(m.m.ScaleWords())
	r.again, r.taken = a.Op == kernels.OpRedispatch, false
	err := m.sendRecords(m.block.beyond.rowStride, func(t int, to []byte) {
		row, scales := m.tokenRow(a, t, size, words)
		copy(to, row)
		copy(to[m.block.beyond.rowStride-words:], scales)
	}, func(_ int, row *routedRow) float32 { return row.weight }, false)
	r.beyond = m.b.calls
	return err
}

// takeBeyond takes the rows that other hosts have sent for a handle.
func (m *dispatching) takeBeyond(r *routing, h *kernels.DispatchHandle) error {
	if r.taken {
		return nil
	}
	x, me, own := m.m, int32(m.m.Rank), m.outletOf(m.e.space.Rank, h)
	size, stride, words := x.RowBytes(), m.block.beyond.rowStride, 4*int64(x.ScaleWords())
	for _, src := range m.b.others {
		g, err := m.message(src, r.beyond)
		if err != nil {
			return err
		}
		for i, token := range g.tokens {
			bytes, first := g.rows[int64(i)*stride:][:stride], true
			for j := g.first[i]; j < g.first[i+1]; j++ {
				row := g.entry(j)
				if row.rank != me {
					continue
				}
				if !r.again {
					m.describe(&own, &row, int32(src), token, first)
				}
				if first || !x.Layout.ByToken() {
					copy(own.rows[int64(row.row)*size:][:size], bytes)
					if words > 0 {
						m.putScales(own.scales, int64(row.row), bytes[stride-words:])
					}
					m.w.moved(size)
				}
				if x.Landed {
					m.landedWord(m.e.space.Rank, h, int(row.slot-x.First[me])).Add(1)
				}
				first = false
			}
		}
	}
	r.taken = true
	return nil
}

// awaitAnswers notes that this call wants n more answers of a rank of another host.
func (m *dispatching) awaitAnswers(rank, n int) {
	m.r.awaits = sized(m.r.awaits, m.m.Ranks)
	m.b.awaits[rank] += uint64(n)
	m.r.awaits[rank] = m.b.awaits[rank]
}

// answersIn is how many puts the answers to records take, and answersPut how many of them are in one.
func (m *dispatching) answersPut() int { return max(1, chunkOfRows/int(m.block.beyond.answer)) }

func (m *dispatching) answersIn(records int) int {
	return (records + m.answersPut() - 1) / m.answersPut()
}

// askBeyond is the end of a combine's first half: it asks other hosts for their sums, and makes those that they ask for, or has the second
// half make them where ranks of this host show their rows by and by.
func (m *dispatching) askBeyond(a *kernels.Combine) error {
	b := m.b
	err := m.sendRecords(0, nil, func(t int, row *routedRow) float32 {
		switch a.Weighting {
		case kernels.TokenWeights:
			return shm.View[float32](a.TokenWeights.Mem)[t*m.m.TopK+int(row.choice)]
		case kernels.DispatchedWeights:
			return row.weight
		}
		return 1
	}, false)
	if err != nil {
		return err
	}
	for _, p := range b.railPeers {
		m.awaitAnswers(p, m.answersIn(b.records[b.hosts.Host[p]]))
	}
	m.r.asked = m.r.asked[:0]
	for _, src := range b.railPeers {
		g, err := m.message(src, b.calls)
		if err != nil {
			return err
		}
		m.r.asked = append(m.r.asked, g)
	}
	if m.anyReady() {
		for i := range m.r.asked { // the next message goes to the same place
			g := &m.r.asked[i]
			g.first, g.entries = append([]int32(nil), g.first...), append([]int32(nil), g.entries...)
		}
		return nil
	}
	switch m.m.SumType {
	case kernels.Float16:
		return m.f16.answerAll(m, a)
	case kernels.BFloat16:
		return m.bf16.answerAll(m, a)
	}
	return m.f32.answerAll(m, a)
}

// answerAll makes the sums that other hosts have asked for, and sends them.
func (g *gatherer[T]) answerAll(m *dispatching, a *kernels.Combine) error {
	g.begin(m, 0)
	defer g.end()
	for i := range m.r.asked {
		for record := range m.r.asked[i].records() {
			g.answer(a, &m.r.asked[i], record)
		}
	}
	return m.reply()
}

func (g *message) records() int { return len(g.first) - 1 }

// rowsOf are the choices of a record.
func (g *message) rowsOf(record int, rows []routedRow) []routedRow {
	for j := g.first[record]; j < g.first[record+1]; j++ {
		rows = append(rows, g.entry(j))
	}
	return rows
}

// answer makes the answer to a record.
func (g *gatherer[T]) answer(a *kernels.Combine, from *message, record int) {
	m, x, l := g.m, g.m.m, &g.m.block.beyond
	host := m.b.hosts.Host[from.src]
	all := sized(m.b.replies[host], from.records()*int(l.answer))
	m.b.replies[host] = all
	to := all[int64(record)*l.answer:][:l.answer]
	g.here = from.rowsOf(record, g.here[:0])
	g.rows, g.weights, g.wide, g.ones = g.rows[:0], g.weights[:0], g.wide[:0], g.ones[:0]
	g.sumRanks(a, -1, g.here)
	if x.Float8Partials {
		g.hostWide = sized(g.hostWide, x.Hidden)
		vec.WeightedSum(g.hostWide, g.wide, g.ones)
		m.token.narrow(g.hostWide, to[:l.sumBytes])
	} else {
		vec.WeightedSum(shm.View[T](to[:g.size]), g.rows, g.weights)
	}
	if m.r.notices[from.src].flags&flagAsks != 0 {
		weights := shm.View[float32](to[l.weight:])
		for i := range g.here {
			row := &g.here[i]
			weights[row.choice] = *g.weightShown(row)
		}
	}
	m.w.moved(g.size)
}

// weightShown is the weight that a rank of this host shows for a choice.
func (g *gatherer[T]) weightShown(row *routedRow) *float32 {
	at := int64(row.row)
	if g.m.m.Layout.ByToken() {
		at = at*int64(g.m.m.TopK) + int64(row.choice)
	}
	return g.shownWeight(row.rank, g.m.r.notices[row.rank].readWeights, at)
}

// reply sends the answers.
func (m *dispatching) reply() error {
	b, l := m.b, &m.block.beyond
	for i := range m.r.asked {
		g := &m.r.asked[i]
		to := m.block.answers(m.peer(g.src), b.me.host)
		bytes := b.replies[b.hosts.Host[g.src]]
		for from := 0; from < g.records(); from += m.answersPut() {
			end := min(from+m.answersPut(), g.records())
			if err := m.w.put(b.far(g.src), to+int64(from)*l.answer, bytes[int64(from)*l.answer:int64(end)*l.answer], answersWord); err != nil {
				return err
			}
		}
	}
	return nil
}

// combineBeyond is the second half of a combine on several hosts: the sum of each host, rounded, and then the sum of hosts.
func (g *gatherer[T]) combineBeyond(a *kernels.Combine) error {
	m, r, b := g.m, g.m.r, g.m.b
	if m.anyReady() {
		// All tokens and behind them all records of others wait for rows on this host.
		m.idle = m.idle[:0]
		n := a.Tokens
		for i := range r.asked {
			n += r.asked[i].records()
		}
		for t := range n {
			m.idle = append(m.idle, int32(t))
		}
		find := func(t int) (from *message, record int) {
			t -= a.Tokens
			for i := range r.asked {
				if t < r.asked[i].records() {
					return &r.asked[i], t
				}
				t -= r.asked[i].records()
			}
			return nil, 0
		}
		var rows []routedRow
		err := m.whenReady(a, func(t int) {
			if t >= a.Tokens {
				from, record := find(t)
				g.answer(a, from, record)
			}
		}, func(t int) ([]routedRow, int) {
			if t < a.Tokens {
				return r.rows[r.first[t]:r.first[t+1]], m.m.Rank
			}
			from, record := find(t)
			rows = from.rowsOf(record, rows[:0])
			return rows, from.src
		})
		if err == nil {
			err = m.reply()
		}
		if err != nil {
			return err
		}
	}
	answers := make([][]byte, len(b.of)) // those that are to come
	for _, p := range b.railPeers {
		f := b.far(p)
		if err := m.until(f, f.word(answersWord), r.awaits[p]); err != nil {
			return err
		}
		host := b.hosts.Host[p]
		answers[host] = m.e.space.Range(m.e.space.Rank, m.block.answers(m.h, host), m.block.beyond.perHost)
	}
	for t := range a.Tokens {
		g.tokenBeyond(a, t, answers)
	}
	return nil
}

// tokenBeyond sums the rows of one token on all hosts. answers begin with its own, and then with the next token's.
func (g *gatherer[T]) tokenBeyond(a *kernels.Combine, t int, answers [][]byte) {
	m, x, r, l := g.m, g.m.m, g.m.r, &g.m.block.beyond
	rows := r.rows[r.first[t]:r.first[t+1]]
	var sums []float32
	if a.SumWeights.Bytes > 0 {
		sums = shm.View[float32](a.SumWeights.Mem)[t*x.TopK : (t+1)*x.TopK]
		clear(sums)
	}
	// The sum of this host.
	g.here = g.here[:0]
	for i := range rows {
		if m.at(int(rows[i].rank)) >= 0 {
			g.here = append(g.here, rows[i])
			if sums != nil {
				sums[rows[i].choice] = *g.weightShown(&rows[i])
			}
		}
	}
	if len(g.here) > 0 {
		g.rows, g.weights, g.wide, g.ones = g.rows[:0], g.weights[:0], g.wide[:0], g.ones[:0]
		g.sumRanks(a, t, g.here)
		if x.Float8Partials {
			g.hostWide = sized(g.hostWide, x.Hidden)
			vec.WeightedSum(g.hostWide, g.wide, g.ones)
			m.token.roundTrip(g.hostWide)
		} else {
			g.hostSum = sized(g.hostSum, x.Hidden)
			vec.WeightedSum(g.hostSum, g.rows, g.weights)
		}
	}
	g.biases(a, t)
	for host := range answers {
		if host == m.b.me.host {
			if len(g.here) > 0 {
				g.rows, g.weights = append(g.rows, g.hostSum), append(g.weights, 1)
				g.wide, g.ones = append(g.wide, g.hostWide), append(g.ones, 1)
			}
			continue
		}
		there := false
		for i := range rows {
			if m.b.hosts.Host[rows[i].rank] == host {
				there = true
				if sums != nil {
					sums[rows[i].choice] = shm.View[float32](answers[host][l.weight:l.answer])[rows[i].choice]
				}
			}
		}
		if !there {
			continue
		}
		if x.Float8Partials {
			wide := g.widths[len(g.wide)*x.Hidden:][:x.Hidden]
			m.token.widen(wide, answers[host][:l.sumBytes])
			g.wide, g.ones = append(g.wide, wide), append(g.ones, 1)
		} else {
			g.rows, g.weights = append(g.rows, shm.View[T](answers[host][:g.size])), append(g.weights, 1)
		}
		answers[host] = answers[host][l.answer:]
	}
	y := a.Y.Mem[int64(t)*g.size:][:g.size]
	if x.Float8Partials {
		write(g, y, g.wide, g.ones)
	} else {
		write(g, y, g.rows, g.weights)
	}
}

// sendGradients sends the gradients of this rank's tokens to other hosts.
func (m *dispatching) sendGradients(a *kernels.CombineBackward) error {
	size := m.m.SumBytes()
	asks := a.Weighting != kernels.GivenWeights && a.DWeights.Bytes > 0
	err := m.sendRecords(m.block.beyond.sumStride, func(t int, to []byte) { copy(to, a.DY.Mem[int64(t)*size:][:size]) },
		func(_ int, row *routedRow) float32 {
			if a.Weighting == kernels.DispatchedWeights {
				return row.weight
			}
			return 1
		}, asks)
	if err != nil || !asks {
		return err
	}
	there := make([]int, m.m.Ranks) // 1 for ranks that have rows
	for i := range m.r.rows {
		there[m.r.rows[i].rank] = 1
	}
	for _, p := range m.b.others {
		m.awaitAnswers(p, there[p])
	}
	return nil
}

// spreadBeyond makes the gradients of this rank's rows whose tokens are on other hosts, and answers with those of weights.
func (g *gatherer[T]) spreadBeyond(a *kernels.CombineBackward) error {
	m, x, b, me := g.m, g.m.m, g.m.b, int32(g.m.m.Rank)
	given, stride := a.Weighting == kernels.GivenWeights, m.block.beyond.sumStride
	for _, src := range b.others {
		from, err := m.message(src, b.calls)
		if err != nil {
			return err
		}
		dots := b.dots[src][:0]
		for i := range from.tokens {
			last := false
			for j := from.first[i]; j < from.first[i+1]; j++ {
				row := from.entry(j)
				if row.rank != me || last && x.Layout.ByToken() {
					continue
				}
				last = true
				dy := shm.View[T](from.rows[int64(i)*stride:][:g.size])
				var wide []float32
				if given || from.asks {
					wide = widen(dy, g.widths[:x.Hidden])
				}
				g.rows[0] = dy
				weight := row.weight
				if given {
					weight = g.weight(a.Weighting, &row)
				}
				dots = append(dots, g.gradient(a, &row, weight, wide, from.asks))
			}
		}
		b.dots[src] = dots
		if from.asks && len(dots) > 0 {
			if err := m.w.put(b.far(src), m.block.ownAnswers(m.peer(src), m.m.Rank), shm.Bytes(dots), answersWord); err != nil {
				return err
			}
		}
	}
	if given || a.DWeights.Bytes == 0 {
		return nil
	}
	dWeights := shm.View[float32](a.DWeights.Mem)
	for _, p := range b.others {
		f := b.far(p)
		if err := m.until(f, f.word(answersWord), m.r.awaits[p]); err != nil {
			return err
		}
		dots := shm.View[float32](m.e.space.Range(m.e.space.Rank, m.block.ownAnswers(m.h, p), m.block.beyond.perRank))
		for t := range a.Tokens {
			for i := m.r.first[t]; i < m.r.first[t+1]; i++ {
				if row := &m.r.rows[i]; int(row.rank) == p {
					dWeights[t*x.TopK+int(row.choice)], dots = dots[0], dots[1:]
				}
			}
		}
	}
	return nil
}

// rest returns when all that was put here has landed.
func (f *dispatches) rest(e *Engine) error {
	if f.beyond == nil {
		return nil
	}
	_, err := f.beyond.rest(e, f.block.beyondLine(0), f.block.beyondLine(f.block.n))
	return err
}
