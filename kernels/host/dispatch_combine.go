package host

import (
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// shortest is the length of the first buffer of rows that is too small for the dispatch, and how many bytes it would need; ok
// says that none is.
func (m *dispatching) shortest(rowBytes int64, bufs ...[]byte) (have, need int64, ok bool) {
	need = m.r.rowsUsed() * rowBytes
	for _, b := range bufs {
		if int64(len(b)) < need {
			return int64(len(b)), need, false
		}
	}
	return 0, 0, true
}

func refuse(have, need int64) notice {
	return notice{call: kernels.CallWord(kernels.OpRefused, 0, refusedShort), read: uint64(have), write: uint64(need)}
}

// copyGroup copies the rows of one group, without padding, between buffers of rows of the size.
func (m *dispatching) copyGroup(g int, size int64, dst, src []byte) {
	first, n := m.r.offsets[g]*size, m.r.groups[g]*size
	copy(dst[first:first+n], src[first:])
	m.w.moved(n)
}

// copyRows copies the rows of all groups.
func (m *dispatching) copyRows(size int64, dst, src []byte) {
	for g := range m.r.groups {
		m.copyGroup(g, size, dst, src)
	}
}

// staged is where peers reach b: in place, or at the place in staging.
func staged(b kernels.Buffer, at int64) (place int64, stage bool) {
	if b.Reach || b.Bytes == 0 {
		return b.Place, false
	}
	return at, true
}

// stage is n bytes of staging.
func (m *dispatching) stage(at, n int64) []byte { return m.e.space.Range(m.e.space.Rank, at, n) }

// show is the first half of a combine: it tells the peers where this rank's rows are.
func (m *dispatching) show(a *kernels.Combine) (err error) {
	defer func() { m.r.half = err }()
	if err := undone(a.Op, m.r); err != nil {
		return err
	}
	if err := m.begin(); err != nil {
		return err
	}
	size, beside := m.m.SumBytes(), 4*int64(m.m.WeightsPerRow())
	have, need, ok := m.shortest(size, a.Rows.Mem)
	none := a.RowWeights.Bytes == 0
	if ok && (!none || a.Weighting == kernels.GivenWeights) {
		have, need, ok = m.shortest(beside, a.RowWeights.Mem)
	}
	word := refuse(have, need)
	if ok {
		rows, stageRows := staged(a.Rows, m.block.rows(m.h, 0))
		weights, stageWeights := staged(a.RowWeights, m.block.weights(m.h, 0))
		if a.Ready.Bytes == 0 {
			if stageRows {
				m.copyRows(size, m.stage(rows, m.m.Rows*size), a.Rows.Mem)
			}
			if stageWeights {
				m.copyRows(beside, m.stage(weights, m.m.Rows*beside), a.RowWeights.Mem)
			}
		}
		word = notice{call: m.m.CallWord(a.Op, a.Weighting, m.r.call), read: uint64(rows), readWeights: uint64(weights)}
		if a.Ready.Bytes > 0 {
			word.flags |= flagReady
		}
		if a.SumWeights.Bytes > 0 {
			word.flags |= flagAsks
		}
		if used := m.r.rowsUsed(); none && used > 0 {
			word.flags |= flagHasNone
			word.writeWeights = uint64(used * beside)
		}
	}
	failed, err := m.meet(word, nil)
	if err == nil {
		err = failed
	}
	if err == nil && m.b != nil {
		err = m.askBeyond(a)
	}
	return err
}

// gather is the second half of a combine: it reads the rows of this rank's tokens and sums them.
func (m *dispatching) gather(a *kernels.Combine) error {
	if m.r.half != nil {
		return m.r.half
	}
	var err error
	switch m.m.SumType {
	case kernels.Float16:
		err = m.f16.combine(m, a)
	case kernels.BFloat16:
		err = m.bf16.combine(m, a)
	default:
		err = m.f32.combine(m, a)
	}
	if err != nil {
		return err
	}
	for p, rows := range m.r.from {
		m.sent(p, rows*m.m.SumBytes())
	}
	return m.finish()
}

// gatherer works on rows of one type. Its fields are scratch.
type gatherer[T float32 | vec.Float16 | vec.BFloat16] struct {
	m       *dispatching
	size    int64 // bytes of a row
	rows    [][]T
	weights []float32
	// The rows of one rank, and the partial sums of ranks.
	some        [][]T
	someWeights []float32
	partials    []T
	// The biases, and behind them partial sums as they are after crossing as float8.
	wide   [][]float32
	ones   []float32
	widths []float32
	// stream says that results are made in out and then written around the caches.
	stream bool
	out    []T
	// Of several hosts: a token's choices on this one, and their sum.
	here     []routedRow
	hostSum  []T
	hostWide []float32
}

// begin prepares for writing n rows.
func (g *gatherer[T]) begin(m *dispatching, n int) {
	x := m.m
	g.m, g.size = m, x.SumBytes()
	g.out = sized(g.out, x.Hidden)
	g.partials = sized(g.partials, x.Hidden*(min(x.TopK, x.Ranks)+2))
	g.widths = sized(g.widths, x.Hidden*(min(x.TopK, x.Ranks)+2))
	g.stream = m.e.streams(n, g.size)
}

// end makes what was written visible to whom this rank signals, and lets go of it.
func (g *gatherer[T]) end() {
	if g.stream {
		shm.Fence()
	}
	clear(g.rows[:cap(g.rows)])
	clear(g.some[:cap(g.some)])
	g.m = nil
}

// bytes are those of row i of the rows that rank p shows at off.
func (g *gatherer[T]) bytes(p int32, off uint64, i int32) []byte {
	return g.m.e.space.Range(g.m.at(int(p)), int64(off)+int64(i)*g.size, g.size)
}

// shownWeight is entry i of the weights that rank p shows at off.
func (g *gatherer[T]) shownWeight(p int32, off uint64, i int64) *float32 {
	return &shm.View[float32](g.m.e.space.Range(g.m.at(int(p)), int64(off)+4*i, 4))[0]
}

// write stores the weighted sum of rows in dst.
func write[T, S float32 | vec.Float16 | vec.BFloat16](g *gatherer[T], dst []byte, rows [][]S, weights []float32) {
	if g.stream {
		vec.WeightedSum(g.out, rows, weights)
		shm.CopyStream(dst, shm.Bytes(g.out))
	} else {
		vec.WeightedSum(shm.View[T](dst), rows, weights)
	}
}

// combine sums the rows of every token.
func (g *gatherer[T]) combine(m *dispatching, a *kernels.Combine) error {
	r := m.r
	g.begin(m, a.Tokens)
	defer g.end()
	if m.b != nil {
		return g.combineBeyond(a)
	}
	if !m.anyReady() {
		for t := range a.Tokens {
			g.token(a, t)
		}
		return nil
	}
	m.idle = m.idle[:0]
	for t := range a.Tokens {
		m.idle = append(m.idle, int32(t))
	}
	return m.whenReady(a, func(t int) { g.token(a, t) }, func(t int) (rows []routedRow, src int) {
		return r.rows[r.first[t]:r.first[t+1]], m.m.Rank
	})
}

// token sums the rows of one token.
func (g *gatherer[T]) token(a *kernels.Combine, t int) {
	m, r := g.m, g.m.r
	rows := m.present(r.rows[r.first[t]:r.first[t+1]])
	float8 := m.m.Float8Partials
	g.biases(a, t)
	if _, exact := any(g.out).([]float32); float8 || !exact || !g.direct(a, t, rows) {
		g.sumRanks(a, t, rows)
	}
	if a.SumWeights.Bytes > 0 {
		g.sumWeights(a, t, rows)
	}
	y := a.Y.Mem[int64(t)*g.size:][:g.size]
	if float8 {
		write(g, y, g.wide, g.ones)
	} else {
		write(g, y, g.rows, g.weights)
	}
}

// biases begins the lists of what is summed for a token.
func (g *gatherer[T]) biases(a *kernels.Combine, t int) {
	g.rows, g.weights, g.wide, g.ones = g.rows[:0], g.weights[:0], g.wide[:0], g.ones[:0]
	for _, bias := range a.Bias {
		if bias.Bytes == 0 {
			continue
		}
		b := shm.View[T](bias.Mem[int64(t)*g.size:][:g.size])
		if g.m.m.Float8Partials {
			wide := g.widths[len(g.wide)*g.m.m.Hidden:][:g.m.m.Hidden]
			vec.Load(wide, b)
			g.wide, g.ones = append(g.wide, wide), append(g.ones, 1)
		} else {
			g.rows, g.weights = append(g.rows, b), append(g.weights, 1)
		}
	}
}

// weightOf is what a row of token t is multiplied by in a combine.
func (g *gatherer[T]) weightOf(a *kernels.Combine, t int, row *routedRow) float32 {
	switch {
	case t < 0 && a.Weighting != kernels.GivenWeights: // a token of another host, which has sent it
		return row.weight
	case a.Weighting == kernels.TokenWeights:
		return shm.View[float32](a.TokenWeights.Mem)[t*g.m.m.TopK+int(row.choice)]
	}
	return g.weight(a.Weighting, row)
}

// weight is what a row is multiplied by, if its rank knows.
func (g *gatherer[T]) weight(w kernels.Weighting, row *routedRow) float32 {
	switch w {
	case kernels.DispatchedWeights:
		return row.weight
	case kernels.GivenWeights:
		return *g.shownWeight(row.rank, g.m.r.notices[row.rank].readWeights, int64(row.row))
	}
	return 1
}

// direct lists a token's rows of float32 to be summed at once, behind the biases, and reports whether that has the same bits as the sum
// of the ranks' partial sums: no rank has several of them, but for the first where there are no biases.
func (g *gatherer[T]) direct(a *kernels.Combine, t int, rows []routedRow) bool {
	biases := len(g.rows)
	byToken, notices := g.m.m.Layout.ByToken(), g.m.r.notices
	for i := range rows {
		row := &rows[i]
		if i > 0 && row.rank == rows[i-1].rank {
			if byToken {
				continue
			}
			if row.rank != rows[0].rank || biases > 0 {
				g.rows, g.weights = g.rows[:biases], g.weights[:biases]
				return false
			}
		}
		g.rows = append(g.rows, shm.View[T](g.bytes(row.rank, notices[row.rank].read, row.row)))
		g.weights = append(g.weights, g.weightOf(a, t, row))
	}
	return true
}

// sumRanks makes the partial sums of a token, and lists them as rows of weight 1 behind the biases.
func (g *gatherer[T]) sumRanks(a *kernels.Combine, t int, rows []routedRow) {
	m := g.m
	byToken, notices := m.m.Layout.ByToken(), m.r.notices
	for i := 0; i < len(rows); {
		end := i + 1
		for end < len(rows) && rows[end].rank == rows[i].rank {
			end++
		}
		g.some, g.someWeights = g.some[:0], g.someWeights[:0]
		for j := i; j < end; j++ {
			row := &rows[j]
			g.some = append(g.some, shm.View[T](g.bytes(row.rank, notices[row.rank].read, row.row)))
			g.someWeights = append(g.someWeights, g.weightOf(a, t, row))
			if byToken {
				break
			}
		}
		switch {
		case m.m.Float8Partials:
			sum := g.widths[len(g.wide)*m.m.Hidden:][:m.m.Hidden]
			vec.WeightedSum(sum, g.some, g.someWeights)
			m.token.roundTrip(sum)
			g.wide, g.ones = append(g.wide, sum), append(g.ones, 1)
		case len(g.some) == 1 && g.someWeights[0] == 1:
			g.rows, g.weights = append(g.rows, g.some[0]), append(g.weights, 1)
		default:
			sum := g.partials[len(g.rows)*m.m.Hidden:][:m.m.Hidden]
			vec.WeightedSum(sum, g.some, g.someWeights)
			g.rows, g.weights = append(g.rows, sum), append(g.weights, 1)
		}
		i = end
	}
}

// sumWeights fetches the weights of the rows of a token.
func (g *gatherer[T]) sumWeights(a *kernels.Combine, t int, rows []routedRow) {
	x := g.m.m
	sums := shm.View[float32](a.SumWeights.Mem)[t*x.TopK : (t+1)*x.TopK]
	clear(sums)
	for _, row := range rows {
		at := int64(row.row)
		if x.Layout.ByToken() {
			at = at*int64(x.TopK) + int64(row.choice)
		}
		sums[row.choice] = *g.shownWeight(row.rank, g.m.r.notices[row.rank].readWeights, at)
	}
}

// anyReady reports whether a rank of this host shows its rows by and by.
func (m *dispatching) anyReady() bool {
	for q := range m.e.space.Size {
		if m.r.notices[m.name(q)].flags&flagReady != 0 {
			return true
		}
	}
	return false
}

// whenReady calls do for every token in m.idle once the rows of all its choices on this host may be read. rowsOf are these choices and the
// rank of the token. Meanwhile it passes on what this rank's caller marks as done.
func (m *dispatching) whenReady(a *kernels.Combine, do func(t int), rowsOf func(t int) (rows []routedRow, src int)) error {
	x, r, me := m.m, m.r, m.m.Rank
	groups := max(x.MostLocal(), x.Ranks)
	m.open = sized(m.open, x.Ranks*groups)
	for p, n := range r.notices {
		for g := range groups {
			m.open[p*groups+g] = n.flags&flagReady == 0
		}
	}
	shown := 0 // own groups
	if a.Ready.Bytes == 0 {
		shown = len(r.groups)
	}
	isOpen := func(row *routedRow, src int) bool {
		p, group := int(row.rank), int(row.slot-x.First[row.rank])
		if x.Layout.ByToken() {
			group = src
		}
		if m.at(p) < 0 {
			return true
		}
		open := &m.open[p*groups+group]
		if !*open {
			*open = m.e.word(m.at(p), m.block.ready(m.peer(p), group)).Load() >= kernels.LastSeq(r.epoch)
		}
		if !*open && m.m.Masks && m.without(p) {
			m.lost |= 1 << p
			return true
		}
		return *open
	}
	var idleFor int
	for len(m.idle) > 0 || shown < len(r.groups) {
		moved := false
		if n := m.showReady(a); n > 0 {
			shown, moved = shown+n, true
		}
		left, waitFor := m.idle[:0], me
	tokens:
		for _, t := range m.idle {
			rows, src := rowsOf(int(t))
			for i := range rows {
				if !isOpen(&rows[i], src) {
					left = append(left, t)
					waitFor = int(rows[i].rank)
					continue tokens
				}
			}
			do(int(t))
			m.w.moved(m.m.SumBytes() * int64(len(rows)))
		}
		moved = moved || len(left) < len(m.idle)
		m.idle = left
		if moved {
			if m.w.polls > 0 {
				m.waited(idleFor, time.Since(m.w.since))
			}
			m.w.busy()
			continue
		}
		if err := m.unmasked(); err != nil {
			return err
		}
		idleFor = waitFor
		late := m.e.near(m.at(waitFor))
		if err := m.w.idle(late); err != nil {
			return m.w.fail(late, err)
		}
	}
	return nil
}

// showReady lets peers read the groups that the caller has marked as done since it was called last. It returns how many those are.
func (m *dispatching) showReady(a *kernels.Combine) (n int) {
	if a.Ready.Bytes == 0 {
		return 0
	}
	size, beside := m.m.SumBytes(), 4*int64(m.m.WeightsPerRow())
	for g, rows := range m.r.groups {
		word := m.e.word(m.e.space.Rank, m.block.ready(m.h, g))
		if word.Load() >= kernels.LastSeq(m.r.epoch) || int64(shm.Word32(a.Ready.Mem, 4*int64(g)).Load()) < rows {
			continue
		}
		if at, stage := staged(a.Rows, m.block.rows(m.h, 0)); stage {
			m.copyGroup(g, size, m.stage(at, m.m.Rows*size), a.Rows.Mem)
		}
		if at, stage := staged(a.RowWeights, m.block.weights(m.h, 0)); stage {
			m.copyGroup(g, beside, m.stage(at, m.m.Rows*beside), a.RowWeights.Mem)
		}
		word.Store(kernels.LastSeq(m.r.epoch))
		n++
	}
	if n > 0 {
		for i := 1; i < m.e.space.Size; i++ {
			m.e.ring(m.e.peer(i))
		}
	}
	return n
}
