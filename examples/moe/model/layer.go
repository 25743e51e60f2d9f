package model

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/memory"
)

// Layer is a mixture of experts. It adds to every token what its TopK experts make of it:
//
//	x += sum over k of p[k] * expert[k](norm(x))
//
// A router scores the experts; p is the softmax of all scores. The experts are spread over the ranks, so that four calls of a
// dispatch.Dispatcher are around the arithmetic. Forward: Dispatch carries each token to the ranks of its experts, Combine brings the
// weighted sum of what they made back. Backward: CombineBackward carries the gradient of that sum to the experts, DispatchBackward brings
// the gradients of the tokens back. The handle that Dispatch returns has the routing of all four.
type Layer struct {
	cfg        config.Config
	clock      *phase.Clock
	dispatcher *dispatch.Dispatcher
	carrier    *Carrier // nil on the host

	norm    nn.Norm
	router  nn.Linear
	experts []expert // of this rank, in the order of the dispatcher's slots

	// Balance keeps experts equally busy: it is added to the scores when experts are chosen, and only then. Rebalance changes it.
	Balance []float32
	// Load is how many tokens of this rank chose each expert in the last forward.
	Load []float32

	// A forward leaves these for its backward.
	handle         *dispatch.Handle
	rows           dispatch.HostCounts // which rows of the experts' input are whose
	normed         []float32           // [tokens, Hidden]
	probs          []float32           // [tokens, Experts]
	chosen         []int32             // [tokens, TopK]
	weights        []float32           // [tokens, TopK]: the probabilities of the chosen
	y              []float32           // [tokens, Hidden]
	dnormed        []float32           // gradients
	dprobs, dtoken []float32

	// made is what the experts made of the rows they got. It lies in the symmetric heap, where the ranks whose tokens these are fetch it
	// without a copy.
	made memory.View
}

// Forward adds the layer's output to x, [tokens, Hidden].
func (l *Layer) Forward(x []float32, tokens int) error {
	c := l.cfg
	l.normed = nn.Grow(l.normed, tokens*c.Hidden)
	l.norm.Forward(l.normed, x, tokens)
	l.route(tokens)

	// Every token goes to the ranks of its experts. How many rows came is known when the handle's counts are.
	l.clock.Enter(phase.Dispatch)
	h, err := l.send(dispatch.Tokens{X: memory.Wrap(l.normed), Experts: memory.Wrap(l.chosen), Weights: memory.Wrap(l.weights)})
	if err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}
	l.handle = h
	if l.rows, err = h.HostCounts(context.Background()); err != nil {
		return fmt.Errorf("dispatch: %w", err)
	}
	rows, made := h.Rows(), l.made
	if l.carrier != nil {
		if rows, made, err = l.carrier.land(rows.Slice(0, 4*int64(l.rows.Rows*c.Hidden))); err != nil {
			return fmt.Errorf("dispatch: %w", err)
		}
	}

	// The experts of this rank work on the rows of all ranks.
	l.clock.Enter(phase.Experts)
	for slot := range l.experts {
		l.experts[slot].forward(l.part(made, slot), l.part(rows, slot), int(l.rows.Counts[slot]))
	}

	// Every token gets the sum of what its experts made of it, by their weights.
	l.clock.Enter(phase.Combine)
	l.y = nn.Grow(l.y, tokens*c.Hidden)
	if err := l.bring(l.y, h); err != nil {
		return fmt.Errorf("combine: %w", err)
	}

	l.clock.Enter(phase.Dense)
	nn.Add(x, l.y)
	return nil
}

// send is a dispatch, and bring a combine, from where the dispatcher is.
func (l *Layer) send(t dispatch.Tokens) (*dispatch.Handle, error) {
	if l.carrier != nil {
		return l.carrier.dispatch(l.dispatcher, t)
	}
	return l.dispatcher.Dispatch(nil, t)
}

func (l *Layer) bring(y []float32, h *dispatch.Handle) error {
	if l.carrier != nil {
		return l.carrier.combine(l.dispatcher, y, l.made, h)
	}
	return l.dispatcher.Combine(nil, memory.Wrap(y), l.made, h, dispatch.CombineOptions{})
}

// Backward turns dx, the gradient of the output, into the gradient of the input. Those of the weights are complete then: the experts have
// seen the gradients of all tokens of all ranks.
func (l *Layer) Backward(dx []float32, tokens int) error {
	c, h := l.cfg, l.handle
	defer l.Release()

	// The gradient of every token's sum goes to its experts, and takes the place of what they made. The gradient of a weight comes back.
	l.clock.Enter(phase.Combine)
	l.dtoken = nn.Grow(l.dtoken, tokens*c.TopK)
	err := l.dispatcher.CombineBackward(nil, l.made, memory.Wrap(l.dtoken), memory.Wrap(dx), l.made, h, dispatch.CombineOptions{})
	if err != nil {
		return fmt.Errorf("combine backward: %w", err)
	}

	// The experts turn it into the gradient of the rows that they got, in the place of those.
	l.clock.Enter(phase.Experts)
	for slot := range l.experts {
		l.experts[slot].backward(l.part(l.made, slot), l.part(h.Rows(), slot), int(l.rows.Counts[slot]))
	}

	// Every token gets the sum of the gradients of its rows.
	l.clock.Enter(phase.Dispatch)
	l.dnormed = nn.Grow(l.dnormed, tokens*c.Hidden)
	if err := l.dispatcher.DispatchBackward(nil, memory.Wrap(l.dnormed), memory.View{}, h.Rows(), memory.View{}, h); err != nil {
		return fmt.Errorf("dispatch backward: %w", err)
	}

	l.clock.Enter(phase.Dense)
	l.routeBackward(tokens)
	l.norm.Backward(dx, l.dnormed, tokens)
	return nil
}

// Release ends a forward that has no backward.
func (l *Layer) Release() {
	l.handle.Release()
	l.handle = nil
}

// part is the rows of a buffer laid out like Handle.Rows that belong to the expert in a slot.
func (l *Layer) part(rows memory.View, slot int) []float32 {
	lo, n := int(l.rows.Offsets[slot]), int(l.rows.Counts[slot])
	return memory.Of[float32](rows)[lo*l.cfg.Hidden : (lo+n)*l.cfg.Hidden]
}

// route chooses the experts of every token, and their weights.
func (l *Layer) route(tokens int) {
	c := l.cfg
	l.probs = nn.Grow(l.probs, tokens*c.Experts)
	l.router.Forward(l.probs, l.normed, tokens)
	l.weights = nn.Grow(l.weights, tokens*c.TopK)
	l.chosen = slices.Grow(l.chosen[:0], tokens*c.TopK)[:tokens*c.TopK]
	clear(l.Load)
	for t := range tokens {
		p := l.probs[t*c.Experts : (t+1)*c.Experts]
		top := l.chosen[t*c.TopK : (t+1)*c.TopK]
		l.choose(top, p)
		nn.Softmax(p)
		for k, e := range top {
			l.weights[t*c.TopK+k] = p[e]
			l.Load[e]++
		}
	}
}

// choose finds the experts with the highest score plus balance, best first.
func (l *Layer) choose(top []int32, score []float32) {
	for k := range top {
		best := int32(-1)
		for e := range score {
			if slices.Contains(top[:k], int32(e)) {
				continue
			}
			if best < 0 || score[e]+l.Balance[e] > score[best]+l.Balance[best] {
				best = int32(e)
			}
		}
		top[k] = best
	}
}

// routeBackward adds the router's part to dnormed: the gradients of the weights, through the softmax, to the scores.
func (l *Layer) routeBackward(tokens int) {
	c := l.cfg
	l.dprobs = nn.Grow(l.dprobs, tokens*c.Experts)
	clear(l.dprobs)
	for t := range tokens {
		p, dp := l.probs[t*c.Experts:(t+1)*c.Experts], l.dprobs[t*c.Experts:(t+1)*c.Experts]
		for k, e := range l.chosen[t*c.TopK : (t+1)*c.TopK] {
			dp[e] = l.dtoken[t*c.TopK+k]
		}
		nn.SoftmaxBackward(dp, p)
	}
	l.router.Backward(l.dnormed, l.dprobs, tokens, true)
}

// balanceRate is how much the balance of an expert that got no token rises in a step.
const balanceRate = 0.1

// Rebalance raises the balance of experts with less than their share of the tokens, and lowers that of others. load is how many tokens
// chose each expert on all ranks, so all come to the same.
func (l *Layer) Rebalance(load []float32, tokens int) {
	share := float32(tokens*l.cfg.TopK) / float32(l.cfg.Experts)
	for e, n := range load {
		l.Balance[e] += balanceRate * min(1, (share-n)/share)
	}
}

// expert is a small network for the rows that are sent to it: relu(x w1)² w2.
type expert struct {
	hidden, inner int
	w1, w2        nn.Tensor
	pre, act, d   []float32 // [rows, inner]
}

func (e *expert) forward(y, x []float32, rows int) {
	e.pre, e.act = nn.Grow(e.pre, rows*e.inner), nn.Grow(e.act, rows*e.inner)
	nn.MatMul(e.pre, x, e.w1.W, rows, e.inner, e.hidden)
	nn.ReLU2(e.act, e.pre)
	nn.MatMul(y, e.act, e.w2.W, rows, e.hidden, e.inner)
}

// backward takes dy and the x of forward, and leaves dx in the place of x.
func (e *expert) backward(dy, x []float32, rows int) {
	e.d = nn.Grow(e.d, rows*e.inner)
	nn.MatMulTA(e.w2.G, e.act, dy, e.inner, e.hidden, rows)
	nn.MatMulTB(e.d, dy, e.w2.W, rows, e.inner, e.hidden, false)
	nn.ReLU2Backward(e.d, e.pre)
	nn.MatMulTA(e.w1.G, x, e.d, e.hidden, e.inner, rows)
	nn.MatMulTB(x, e.d, e.w1.W, rows, e.hidden, e.inner, false)
}

// takeDense takes what every rank has a copy of out of a slab: the norm and the router.
func (l *Layer) takeDense(s *nn.Slab) {
	l.router = nn.TakeLinear(s, l.cfg.Hidden, l.cfg.Experts, false)
	l.norm = nn.TakeNorm(s, l.cfg.Hidden)
}

// takeExperts makes the experts of this rank. Their weights depend on the seed, the layer and the expert.
func (l *Layer) takeExperts(s *nn.Slab, layer int, mine []int) {
	c := l.cfg
	l.Balance, l.Load = make([]float32, c.Experts), make([]float32, c.Experts)
	for _, e := range mine {
		x := expert{hidden: c.Hidden, inner: c.Inner, w1: s.Take(c.Hidden * c.Inner), w2: s.Take(c.Inner * c.Hidden)}
		r := rand.New(rand.NewPCG(c.Seed, uint64(1+layer*c.Experts+e)))
		nn.Normal(x.w1.W, 1/math.Sqrt(float64(c.Hidden)), r)
		nn.Normal(x.w2.W, 1/math.Sqrt(float64(c.Inner)), r)
		l.experts = append(l.experts, x)
	}
}
