package main

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
)

// moeShape is what one rank's layer looks like.
type moeShape struct {
	Tokens, Hidden, Experts, TopK int
	Zipf                          bool // experts are popular in unequal parts
	// MaxVio is how much more popular than the mean the most popular expert is, where popularities are lognormal; 0: they are not.
	MaxVio float64
	// Spares is how many copies of busy experts each rank has besides its share of the experts, by dispatch.Balance.
	Spares int
}

// moeModel is the input of all ranks, and what dispatch and combine make of it. Rows are stretches of two patterns, so that it costs
// little to know every element of all of them.
type moeModel struct {
	moeShape
	ranks   int
	o       dispatch.Options
	at      *dispatch.Placement
	idx     [][]int32   // [tokens, TopK] by rank
	weights [][]float32 // in the order of choices
	place   [][][]int32 // [rank][source rank][token]: the row there of a token-major layout, or -1
	spread  [][][]int32 // [rank][source rank][token, TopK]: the row of each choice in an expert-major layout, or -1
	rows    [][]placed  // by rank: its rows
	pattern []byte      // of tokens
	made    []byte      // of what experts make, bfloat16
	counts  [][]int32   // by rank: choices of each local expert
}

// placed is one row of a rank.
type placed struct{ row, src, token int32 }

const moePattern = 1 << 16 // elements of a pattern before it comes again

// newMoEModel draws the routing. Every rank draws the same.
func newMoEModel(s moeShape, ranks int, o dispatch.Options) (m *moeModel, err error) {
	m = &moeModel{moeShape: s, ranks: ranks, o: o}
	rnd := rand.New(rand.NewPCG(uint64(s.Tokens), uint64(s.Hidden)))
	popularity := make([]float64, s.Experts)
	for i, e := range rnd.Perm(s.Experts) {
		popularity[e] = 1
		if s.Zipf {
			popularity[e] = 1 / float64(i+1)
		}
	}
	if s.MaxVio > 0 {
		popularity = lognormal(rnd, s.Experts, s.MaxVio)
	}
	for range ranks {
		idx, weights := make([]int32, 0, s.Tokens*s.TopK), make([]float32, s.Tokens*s.TopK)
		for range s.Tokens {
			idx = append(idx, draw(rnd, popularity, s.TopK)...)
		}
		for i := range weights {
			weights[i] = rnd.Float32() + 0.5
		}
		m.idx, m.weights = append(m.idx, idx), append(m.weights, weights)
	}
	element := int(m.tokenType().Size())
	m.pattern, m.made = make([]byte, element*(moePattern+s.Hidden)), make([]byte, 2*(moePattern+s.Hidden))
	fill := func(b []byte, element int) {
		for i := range moePattern {
			switch element {
			case 1: // no NaN
				b[i] = byte(rnd.Uint32()&0x80) | byte(rnd.IntN(0x7f))
			default:
				shm.View[vec.BFloat16](b)[i] = vec.ToBFloat16(float32(rnd.NormFloat64()))
			}
		}
		copy(b[element*moePattern:], b)
	}
	fill(m.pattern, element)
	fill(m.made, 2)
	if m.at, err = m.placement(); err != nil {
		return nil, err
	}
	m.lay()
	return m, nil
}

// lognormal is n popularities exp(sigma*z), z normal, with a sigma by which the largest is above the mean by maxVio times the mean.
func lognormal(rnd *rand.Rand, n int, maxVio float64) []float64 {
	z, p := make([]float64, n), make([]float64, n)
	for i := range z {
		z[i] = rnd.NormFloat64()
	}
	low, high := 0.0, 8.0
	for range 50 {
		most, sum := 0.0, 0.0
		for i := range z {
			p[i] = math.Exp((low + high) / 2 * z[i])
			most, sum = max(most, p[i]), sum+p[i]
		}
		if most/(sum/float64(n))-1 < maxVio {
			low = (low + high) / 2
		} else {
			high = (low + high) / 2
		}
	}
	return p
}

// placement is where experts and their copies are.
func (m *moeModel) placement() (*dispatch.Placement, error) {
	if m.Spares == 0 {
		return dispatch.Contiguous(m.Experts, m.ranks), nil
	}
	load := make([]float64, m.Experts)
	for _, idx := range m.idx {
		for _, e := range idx {
			load[e]++
		}
	}
	return dispatch.Balance(load, dispatch.BalanceOptions{Ranks: m.ranks, Slots: (m.Experts+m.ranks-1)/m.ranks + m.Spares})
}

// draw is k different experts, each as likely as it is popular.
func draw(rnd *rand.Rand, popularity []float64, k int) []int32 {
	// The k largest of u^(1/p), by their logarithms.
	best, keys := make([]int32, 0, k), make([]float64, 0, k)
	for e, p := range popularity {
		key := math.Log(rnd.Float64()) / p
		if len(best) == k && key <= keys[k-1] {
			continue
		}
		if len(best) < k {
			best, keys = append(best, 0), append(keys, 0)
		}
		i := len(best) - 1
		for ; i > 0 && keys[i-1] < key; i-- {
			best[i], keys[i] = best[i-1], keys[i-1]
		}
		best[i], keys[i] = int32(e), key
	}
	return best
}

func (m *moeModel) tokenType() kernels.DType { return m.o.DType }

func (m *moeModel) rowType() kernels.DType {
	if m.o.Quantize {
		return kernels.Float8E4M3
	}
	return m.o.DType
}

func (m *moeModel) scaleWords() int {
	if m.rowType() != kernels.Float8E4M3 {
		return 0
	}
	return (m.Hidden + 127) / 128
}

// lay finds the row of every token or choice on every rank.
func (m *moeModel) lay() {
	align := int32(max(m.o.Align, 1))
	if m.o.Align == 0 && m.o.Layout == dispatch.Slab && (m.o.Quantize || m.o.DType == kernels.Float8E4M3) {
		align = 64 // Options.Align says so
	}
	for r := range m.ranks {
		here, local := m.at.Local(r), make([]int, m.Experts)
		for i, e := range here {
			local[e] = i
		}
		counts, next, at := make([]int32, len(here)), make([]int32, len(here)), int32(0)
		for src := range m.ranks {
			for i, e := range m.idx[src] {
				if m.at.Rank(src, i/m.TopK, int(e)) == r {
					counts[local[e]]++
				}
			}
		}
		m.counts = append(m.counts, counts)
		for i, c := range counts { // the first row of each expert
			next[i] = at
			if m.o.Layout == dispatch.Slab {
				c = int32(m.ranks * m.o.MaxTokens)
			}
			at += (c + align - 1) / align * align
		}
		place, spread, row := make([][]int32, m.ranks), make([][]int32, m.ranks), int32(0)
		var rows []placed
		for src := range m.ranks {
			if m.o.Layout == dispatch.RankPadded {
				row = int32(src * m.o.MaxTokens)
			}
			place[src], spread[src] = make([]int32, m.Tokens), make([]int32, m.Tokens*m.TopK)
			for t := range m.Tokens {
				place[src][t] = -1
				for k, e := range m.idx[src][t*m.TopK:][:m.TopK] {
					to := &spread[src][t*m.TopK+k]
					if *to = -1; m.at.Rank(src, t, int(e)) != r {
						continue
					}
					if place[src][t] < 0 {
						place[src][t] = row
						row++
						if m.o.Layout.ByToken() {
							rows = append(rows, placed{place[src][t], int32(src), int32(t)})
						}
					}
					*to = next[local[e]]
					next[local[e]]++
					if !m.o.Layout.ByToken() {
						rows = append(rows, placed{*to, int32(src), int32(t)})
					}
				}
			}
		}
		m.place, m.spread, m.rows = append(m.place, place), append(m.spread, spread), append(m.rows, rows)
	}
}

// mostRows is the most rows that a rank gets.
func (m *moeModel) mostRows() (most int) {
	for _, rows := range m.rows {
		for _, p := range rows {
			most = max(most, int(p.row)+1)
		}
	}
	return most
}

// pairs is how many of rank src's tokens go to rank dst.
func (m *moeModel) pairs(src, dst int) (n int64) {
	for _, at := range m.place[dst][src] {
		if at >= 0 {
			n++
		}
	}
	return n
}

// busiest is the most tokens that a rank sends to others or gets from others, and with those that stay on it.
func (m *moeModel) busiest() (link, all int64) {
	for r := range m.ranks {
		var sent, got int64
		for p := range m.ranks {
			if p != r {
				sent += m.pairs(r, p)
				got += m.pairs(p, r)
			}
		}
		link, all = max(link, sent, got), max(all, max(sent, got)+m.pairs(r, r))
	}
	return link, all
}

// stretch is where in a pattern a row begins: different for neighbours, and not aligned to them.
func stretch(rank, i int) int {
	h := uint64(rank+1)*0x9e3779b97f4a7c15 ^ uint64(i+1)*0xbf58476d1ce4e5b9
	h ^= h >> 31
	h *= 0x94d049bb133111eb
	return int(h >> 33 % moePattern)
}

// token is token t of a rank.
func (m *moeModel) token(rank, t int) []byte {
	size := int(m.tokenType().Size())
	return m.pattern[stretch(rank, t)*size:][:m.Hidden*size]
}

// scale is scale i of token t of a rank, where tokens come with them.
func (m *moeModel) scale(rank, t, i int) float32 { return 1 + float32((rank*31+t*7+i)%1021)/1024 }

// row is row i of what a rank's experts make.
func (m *moeModel) row(rank, i int) []byte { return m.made[stretch(rank+64, i)*2:][:m.Hidden*2] }

// each runs f for 0 to n-1 on all cores, with scratch of f's own for each of them; the first error ends it.
func each(n int, f func() func(i int) error) error {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		first error
	)
	workers := min(runtime.GOMAXPROCS(0), 16)
	for w := range workers {
		wg.Go(func() {
			one := f()
			for i := w; i < n; i += workers {
				if err := one(i); err != nil {
					mu.Lock()
					if first == nil {
						first = err
					}
					mu.Unlock()
					return
				}
			}
		})
	}
	wg.Wait()
	return first
}

// checkDispatch compares all rows of rank me with their scales.
func (m *moeModel) checkDispatch(me int, rows, scales []byte, counts []int32) error {
	for i, c := range m.counts[me] {
		if counts[i] != c {
			return fmt.Errorf("local expert %d has %d rows, want %d", i, counts[i], c)
		}
	}
	words := m.scaleWords()
	size := m.Hidden * int(m.rowType().Size())
	return each(len(m.rows[me]), func() func(int) error {
		wide, want := make([]float32, m.Hidden), make([]byte, m.Hidden)
		return func(i int) error {
			p := m.rows[me][i]
			src, t := int(p.src), int(p.token)
			row := m.token(src, t)
			var scale [1024]float32
			switch {
			case m.o.Quantize:
				vec.Load(wide, shm.View[vec.BFloat16](row))
				for b := range words {
					part := wide[b*128 : min((b+1)*128, m.Hidden)]
					most := float32(1e-4)
					for _, v := range part {
						most = max(most, float32(math.Abs(float64(v))))
					}
					scale[b] = most / 448
					vec.Scale(part, part, 448/most)
				}
				vec.Store(shm.View[vec.Float8E4M3](want), wide, 1)
				row = want
			case words > 0:
				for b := range words {
					scale[b] = m.scale(src, t, b)
				}
			}
			if got := rows[int(p.row)*size:][:size]; !bytes.Equal(got, row) {
				return fmt.Errorf("row %d, token %d of rank %d, is another one", p.row, t, src)
			}
			if got := scales[int(p.row)*4*words:][:4*words]; !bytes.Equal(got, shm.Bytes(scale[:words])) {
				return fmt.Errorf("the scales of row %d, token %d of rank %d, are others", p.row, t, src)
			}
			return nil
		}
	})
}

// checkCombine compares all sums of rank me, of the rows that m.row makes.
func (m *moeModel) checkCombine(me int, y []byte) error {
	return each(m.Tokens, func() func(int) error {
		sum, partial, wide, want := make([]float32, m.Hidden), make([]float32, m.Hidden), make([]float32, m.Hidden), make([]byte, 2*m.Hidden)
		return func(t int) error {
			clear(sum)
			for r := range m.ranks {
				at := m.place[r][me][t]
				switch {
				case at < 0:
					continue
				case m.o.Layout.ByToken():
					vec.Load(partial, shm.View[vec.BFloat16](m.row(r, int(at))))
				default:
					clear(partial)
					for k, to := range m.spread[r][me][t*m.TopK:][:m.TopK] {
						if to < 0 {
							continue
						}
						vec.Load(wide, shm.View[vec.BFloat16](m.row(r, int(to))))
						w := m.weights[me][t*m.TopK+k]
						for i, v := range wide {
							partial[i] += float32(v * w)
						}
					}
					vec.Store(shm.View[vec.BFloat16](want), partial, 1)
					vec.Load(partial, shm.View[vec.BFloat16](want))
				}
				for i, v := range partial {
					sum[i] += v
				}
			}
			vec.Store(shm.View[vec.BFloat16](want), sum, 1)
			if got := y[2*m.Hidden*t:][:2*m.Hidden]; !bytes.Equal(got, want) {
				return fmt.Errorf("the sum of token %d is another one", t)
			}
			return nil
		}
	})
}
