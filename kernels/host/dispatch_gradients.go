package host

import (
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

func (m *dispatching) gradients(a *kernels.CombineBackward) error {
	r := m.r
	if err := undone(a.Op, r); err != nil {
		return err
	}
	if err := m.begin(); err != nil {
		return err
	}
	size := m.m.SumBytes()
	given := a.Weighting == kernels.GivenWeights
	weighted := a.Weighting != kernels.Unweighted // so somebody may read the rows
	have, need, ok := m.shortest(size, a.DRows.Mem)
	if ok && weighted {
		have, need, ok = m.shortest(size, a.Rows.Mem)
	}
	if ok && given {
		have, need, ok = m.shortest(4, a.RowWeights.Mem)
		if ok && a.DWeights.Bytes > 0 {
			have, need, ok = m.shortest(4, a.DWeights.Mem)
		}
	}
	word := refuse(have, need)
	var stageDRows, stageDWeights bool
	var dRows, dWeights int64
	if ok {
		rows, stageRows := staged(a.Rows, m.block.rows(m.h, 0))
		weights, stageWeights := staged(a.RowWeights, m.block.weights(m.h, 0))
		dRows, stageDRows = staged(a.DRows, m.block.rows(m.h, 1))
		if stageRows && weighted {
			m.copyRows(size, m.stage(rows, m.m.Rows*size), a.Rows.Mem)
		}
		if stageWeights {
			m.copyRows(4, m.stage(weights, m.m.Rows*4), a.RowWeights.Mem)
		}
		if given {
			dWeights, stageDWeights = staged(a.DWeights, m.block.weights(m.h, 1))
		}
		word = notice{
			call: m.m.CallWord(a.Op, a.Weighting, r.call), read: uint64(rows), write: uint64(dRows),
			readWeights: uint64(weights), writeWeights: uint64(dWeights),
		}
	}
	failed, err := m.meet(word, nil)
	switch {
	case err != nil:
		return err
	case failed != nil:
		return failed
	}
	if !given {
		clear(a.DWeights.Mem) // of masked choices
	}
	if m.b != nil {
		if err := m.sendGradients(a); err != nil {
			return err
		}
	}
	switch m.m.SumType {
	case kernels.Float16:
		err = m.f16.spread(m, a)
	case kernels.BFloat16:
		err = m.bf16.spread(m, a)
	default:
		err = m.f32.spread(m, a)
	}
	if err != nil {
		return err
	}
	m.eachPadding(func(from, to int64) { clear(a.DRows.Mem[from*size : to*size]) })
	if weighted {
		for p, rows := range r.from {
			m.sent(p, rows*size)
		}
	}
	if err := m.finish(); err != nil {
		return err
	}
	if stageDRows {
		m.copyRows(size, a.DRows.Mem, m.stage(dRows, m.m.Rows*size))
	}
	if stageDWeights {
		m.copyRows(4, a.DWeights.Mem, m.stage(dWeights, m.m.Rows*4))
	}
	return nil
}

// spread writes the gradient of every row to its rank, and computes those of the weights.
func (g *gatherer[T]) spread(m *dispatching, a *kernels.CombineBackward) error {
	r, x := m.r, m.m
	g.begin(m, len(r.rows))
	defer g.end()
	byToken, given, hidden := x.Layout.ByToken(), a.Weighting == kernels.GivenWeights, x.Hidden
	dWeights := shm.View[float32](a.DWeights.Mem)
	g.rows, g.weights = append(g.rows[:0], nil), append(g.weights[:0], 0)
	m.wrote = sized(m.wrote, x.Ranks)
	clear(m.wrote)
	for t := range a.Tokens {
		dy := shm.View[T](a.DY.Mem[int64(t)*g.size:][:g.size])
		var wide []float32
		if given || len(dWeights) > 0 {
			wide = widen(dy, g.widths[:hidden])
		}
		g.rows[0] = dy
		last := int32(-1)
		for i := r.first[t]; i < r.first[t+1]; i++ {
			row := &r.rows[i]
			if byToken && row.rank == last || m.at(int(row.rank)) < 0 {
				continue
			}
			last = row.rank
			dw := g.gradient(a, row, g.weight(a.Weighting, row), wide, len(dWeights) > 0)
			if !given && len(dWeights) > 0 {
				dWeights[t*x.TopK+int(row.choice)] = dw
			}
			m.wrote[row.rank] += g.size
		}
	}
	for p, bytes := range m.wrote {
		m.sent(p, bytes)
	}
	if m.b != nil {
		return g.spreadBeyond(a)
	}
	return nil
}

// gradient writes the gradient of a row, which g.rows has and wide in float32, and returns that of its weight if anybody asks: itself where
// weights are given, or else the token's rank.
func (g *gatherer[T]) gradient(a *kernels.CombineBackward, row *routedRow, weight float32, wide []float32, asks bool) (dw float32) {
	m, n, hidden := g.m, &g.m.r.notices[row.rank], g.m.m.Hidden
	given := a.Weighting == kernels.GivenWeights
	if given && n.writeWeights != 0 || !given && asks {
		y := shm.View[T](g.bytes(row.rank, n.read, row.row))
		dw = m.sums.dot(widen(y, g.widths[hidden:2*hidden]), wide)
		if given {
			*g.shownWeight(row.rank, n.writeWeights, int64(row.row)) = dw
		}
	}
	g.weights[0] = weight
	write(g, g.bytes(row.rank, n.write, row.row), g.rows, g.weights)
	return dw
}

// widen is row in float32: itself, or in buf.
func widen[T float32 | vec.Float16 | vec.BFloat16](row []T, buf []float32) []float32 {
	if f, ok := any(row).([]float32); ok {
		return f
	}
	vec.Load(buf, row)
	return buf
}

// sums is scratch of dot.
type sums struct {
	chains, products [kernels.DotChains]float32
}

// dot is the inner product as kernels.DotChains says.
func (s *sums) dot(a, b []float32) float32 {
	c := &s.chains
	clear(c[:])
	for len(a) > 0 {
		n := min(len(a), len(c))
		vec.Mul(s.products[:n], a[:n], b[:n])
		vec.Add(c[:n], c[:n], s.products[:n])
		a, b = a[n:], b[n:]
	}
	for j := 0; j < len(c); j += 8 {
		e := c[j : j+8 : j+8]
		e[0], e[1], e[2], e[3] = e[0]+e[4], e[1]+e[5], e[2]+e[6], e[3]+e[7]
		e[0], e[1] = e[0]+e[2], e[1]+e[3]
		e[0] += e[1]
	}
	for stride := 128; stride >= 8; stride /= 2 {
		for j := 0; j < stride; j += 8 {
			c[j] += c[j+stride]
		}
	}
	return c[0]
}
