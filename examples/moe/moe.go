package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/memory"
)

// moeLayer adds to every token what its TopK experts make of it:
//
//	x += sum over k of p[k] * expert[k](norm(x))
//
// A router scores the experts; p is the softmax of all scores. Dispatch carries each token to the ranks of its experts,
// combine brings the weighted sum back, and backward goes the same two ways in reverse.
type moeLayer struct {
	cfg    config
	clock  *clock
	moving *dispatch.Dispatcher

	norm    norm
	router  linear
	experts []expert // of this rank, in the order of the dispatcher's slots

	// Balance keeps experts equally busy: it is added to the scores when experts are chosen, and only then. After every step
	// it rises for those with less than their share of the tokens of all ranks, and falls for the others.
	balance []float32

	h       *dispatch.Handle // of the last forward, until its backward
	rows    dispatch.HostCounts
	idx     []int32   // [rows, TopK] chosen experts
	weights []float32 // [rows, TopK] their p
	load    []float32 // tokens of this rank that chose each expert

	normed, dnormed []float32 // [rows, Hidden]
	y               []float32
	probs, dlogits  []float32 // [rows, Experts]
	dweights        []float32 // [rows, TopK]

	// What the experts made of the rows they got. It lies in the symmetric heap, where the ranks whose tokens these are fetch
	// it without a copy.
	made memory.View
}

const balanceRate = 0.1

func (l *moeLayer) takeDense(s *slab) {
	l.router = takeLinear(s, l.cfg.Hidden, l.cfg.Experts, false)
	l.norm = takeNorm(s, l.cfg.Hidden)
}

// takeExperts makes this rank's experts. Their weights depend on the seed, the layer and the expert.
func (l *moeLayer) takeExperts(s *slab, layer int, mine []int) {
	c := l.cfg
	l.balance, l.load = make([]float32, c.Experts), make([]float32, c.Experts)
	for _, e := range mine {
		x := expert{hidden: c.Hidden, inner: c.Inner, w1: s.take(c.Hidden * c.Inner), w2: s.take(c.Inner * c.Hidden)}
		r := rand.New(rand.NewPCG(c.Seed, uint64(1+layer*c.Experts+e)))
		normal(x.w1.w, 1/math.Sqrt(float64(c.Hidden)), r)
		normal(x.w2.w, 1/math.Sqrt(float64(c.Inner)), r)
		l.experts = append(l.experts, x)
	}
}

// forward adds the layer's output to x, of so many rows.
func (l *moeLayer) forward(x []float32, rows int) error {
	c := l.cfg
	l.normed = grow(l.normed, rows*c.Hidden)
	l.norm.forward(l.normed, x, rows)
	l.route(rows)

	l.clock.enter(dispatching)
	h, err := l.moving.Dispatch(nil, dispatch.Tokens{
		X: view(l.normed), Experts: memory.Host(shm.Bytes(l.idx)), Weights: view(l.weights),
	})
	if err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}
	l.h = h
	if l.rows, err = h.HostCounts(context.Background()); err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}

	l.clock.enter(computingExperts)
	for slot := range l.experts {
		l.experts[slot].forward(l.part(l.made, slot), l.part(h.Rows(), slot), int(l.rows.Counts[slot]))
	}

	l.clock.enter(combining)
	l.y = grow(l.y, rows*c.Hidden)
	if err := l.moving.Combine(nil, view(l.y), l.made, h, dispatch.CombineOptions{}); err != nil {
		return fmt.Errorf("combine: %w", err)
	}

	l.clock.enter(computingDense)
	vec.Add(x[:len(l.y)], x[:len(l.y)], l.y)
	return nil
}

// route chooses the experts of every row of normed.
func (l *moeLayer) route(rows int) {
	c := l.cfg
	l.probs = grow(l.probs, rows*c.Experts)
	l.router.forward(l.probs, l.normed, rows)
	l.weights = grow(l.weights, rows*c.TopK)
	if cap(l.idx) < rows*c.TopK {
		l.idx = make([]int32, rows*c.TopK)
	}
	l.idx = l.idx[:rows*c.TopK]
	clear(l.load)
	for r := range rows {
		p := l.probs[r*c.Experts : (r+1)*c.Experts]
		top := l.idx[r*c.TopK : (r+1)*c.TopK]
		l.choose(top, p)
		vec.Softmax(p, p)
		for k, e := range top {
			l.weights[r*c.TopK+k] = p[e]
			l.load[e]++
		}
	}
}

// choose finds the experts with the highest score plus balance, best first.
func (l *moeLayer) choose(top []int32, score []float32) {
	for k := range top {
		best := int32(-1)
		for e := range score {
			if contains(top[:k], int32(e)) {
				continue
			}
			if best < 0 || score[e]+l.balance[e] > score[best]+l.balance[best] {
				best = int32(e)
			}
		}
		top[k] = best
	}
}

func contains(s []int32, v int32) bool {
	for _, w := range s {
		if v == w {
			return true
		}
	}
	return false
}

// part is the rows of a buffer laid out like Handle.Rows that belong to one expert.
func (l *moeLayer) part(rows memory.View, slot int) []float32 {
	lo, n := int(l.rows.Offsets[slot]), int(l.rows.Counts[slot])
	return floats(rows)[lo*l.cfg.Hidden : (lo+n)*l.cfg.Hidden]
}

// release gives the handle of a forward back that has no backward.
func (l *moeLayer) release() {
	l.h.Release()
	l.h = nil
}

// backward turns dx, the gradient of the output, into the gradient of the input.
func (l *moeLayer) backward(dx []float32, rows int) error {
	c, h := l.cfg, l.h
	defer l.release()

	// Gradients take the place of what they are the gradient of: first of what the experts made, then of what they got.
	l.clock.enter(combining)
	l.dweights = grow(l.dweights, rows*c.TopK)
	if err := l.moving.CombineBackward(nil, l.made, view(l.dweights), view(dx), l.made, h, dispatch.CombineOptions{}); err != nil {
		return fmt.Errorf("combine backward: %w", err)
	}

	l.clock.enter(computingExperts)
	for slot := range l.experts {
		l.experts[slot].backward(l.part(l.made, slot), l.part(h.Rows(), slot), int(l.rows.Counts[slot]))
	}

	l.clock.enter(dispatching)
	l.dnormed = grow(l.dnormed, rows*c.Hidden)
	if err := l.moving.DispatchBackward(nil, view(l.dnormed), memory.View{}, h.Rows(), memory.View{}, h); err != nil {
		return fmt.Errorf("dispatch backward: %w", err)
	}

	l.clock.enter(computingDense)
	l.dlogits = grow(l.dlogits, rows*c.Experts)
	clear(l.dlogits)
	for r := range rows {
		p, dp := l.probs[r*c.Experts:(r+1)*c.Experts], l.dlogits[r*c.Experts:(r+1)*c.Experts]
		for k, e := range l.idx[r*c.TopK : (r+1)*c.TopK] {
			dp[e] = l.dweights[r*c.TopK+k]
		}
		vec.SoftmaxGrad(dp, p, dp)
	}
	l.router.backward(l.dnormed, l.dlogits, rows, true)
	l.norm.backward(dx, l.dnormed, rows)
	return nil
}

// rebalance takes the tokens that chose each expert, on all ranks together.
func (l *moeLayer) rebalance(load []float32, tokens int) {
	share := float32(tokens*l.cfg.TopK) / float32(l.cfg.Experts)
	for e, n := range load {
		l.balance[e] += balanceRate * min(1, (share-n)/share)
	}
}

// expert is a small network for the tokens that are sent to it: silu(x w1) w2.
type expert struct {
	hidden, inner int
	w1, w2        tensor
	pre, act, d   []float32 // [rows, inner]
}

// expertSize is the number of parameters of an expert.
func expertSize(c config) int { return 2 * c.Hidden * c.Inner }

func (e *expert) forward(y, x []float32, rows int) {
	e.pre, e.act = grow(e.pre, rows*e.inner), grow(e.act, rows*e.inner)
	vec.MatMul(e.pre, x, e.w1.w, rows, e.inner, e.hidden, false)
	vec.SiLU(e.act, e.pre)
	vec.MatMul(y, e.act, e.w2.w, rows, e.hidden, e.inner, false)
}

// backward takes dy and the x of forward, and leaves dx in the place of x.
func (e *expert) backward(dy, x []float32, rows int) {
	e.d = grow(e.d, rows*e.inner)
	vec.MatMulTA(e.w2.g, e.act, dy, e.inner, e.hidden, rows, false)
	vec.MatMulTB(e.d, dy, e.w2.w, rows, e.inner, e.hidden, false)
	vec.SiLUGrad(e.d, e.pre, e.d)
	vec.MatMulTA(e.w1.g, x, e.d, e.hidden, e.inner, rows, false)
	vec.MatMulTB(x, e.d, e.w1.w, rows, e.hidden, e.inner, false)
}

func view(f []float32) memory.View   { return memory.Host(shm.Bytes(f)) }
func floats(v memory.View) []float32 { return shm.View[float32](v.Bytes()) }
