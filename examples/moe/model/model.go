// Package model is a language model with mixture-of-experts layers, of which each rank has a part.
package model

import (
	"math"
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/phase"
	"github.com/switchyard-moe/switchyard/memory"
)

// Model predicts a byte from the bytes before it. Their embeddings, side by side, are projected to one token of width
// Hidden; mixture-of-experts layers add to it; a last projection gives the logits of the 256 bytes.
//
// Embedding, projections, norms and routers are the dense part: every rank has a copy and sums its gradients with the
// others'. The experts are spread over the ranks; see Layer.
type Model struct {
	cfg   config.Config
	Clock phase.Clock // of what this rank is busy with

	Slabs []*nn.Slab // of the dense part by stage of backward, then of this rank's experts

	embed  nn.Tensor // [256, Embed]
	mix    nn.Linear // [Context*Embed, Hidden]
	Layers []*Layer
	final  nn.Norm
	out    nn.Linear // [Hidden, 256]

	context  []byte    // [rows, Context] of the last forward
	embedded []float32 // [rows, Context*Embed]
	x        []float32 // [rows, Hidden]
	normed   []float32
	Logits   []float32 // [rows, 256]

	dembedded, dx, dnormed []float32
}

// takeDense takes the dense part out of a slab for every stage of backward: the output, each layer from the last to the
// first, the input. The gradients of a stage are final, and can travel, while backward goes on with the next.
func (m *Model) takeDense(stages []*nn.Slab) {
	c, layers, last := m.cfg, len(m.Layers), len(m.Layers)+1
	m.out = nn.TakeLinear(stages[0], c.Hidden, 256, true)
	m.final = nn.TakeNorm(stages[0], c.Hidden)
	for i, l := range m.Layers {
		l.takeDense(stages[layers-i])
	}
	m.mix = nn.TakeLinear(stages[last], c.Context*c.Embed, c.Hidden, true)
	m.embed = stages[last].Take(256 * c.Embed)
}

// blank is a model without weights.
func blank(c config.Config) *Model {
	m := &Model{cfg: c}
	for range c.Layers {
		m.Layers = append(m.Layers, &Layer{cfg: c, clock: &m.Clock})
	}
	return m
}

// StageSizes is the number of parameters of the dense part by stage of backward.
func StageSizes(c config.Config) []int {
	stages := make([]*nn.Slab, c.Layers+2)
	for i := range stages {
		stages[i] = new(nn.Slab)
	}
	blank(c).takeDense(stages)
	sizes := make([]int, len(stages))
	for i, s := range stages {
		sizes[i] = s.Taken()
	}
	return sizes
}

// New makes this rank's part of a model. The weights depend on the seed, not on the number of ranks. grads is memory
// for the gradients of each stage, nil for a model that is not trained; made is for what the experts of each layer make.
func New(c config.Config, rank int, d *dispatch.Dispatcher, grads [][]float32, made []memory.View) *Model {
	m := blank(c)
	mine := d.Placement().Local(rank)
	size := c.Layers * len(mine) * c.ExpertSize()
	experts := nn.WeightsAlone(size)
	if grads != nil {
		experts = nn.NewSlab(make([]float32, size))
		for _, g := range grads {
			m.Slabs = append(m.Slabs, nn.NewSlab(g))
		}
	} else {
		for _, n := range StageSizes(c) {
			m.Slabs = append(m.Slabs, nn.WeightsAlone(n))
		}
	}
	m.takeDense(m.Slabs)
	m.Slabs = append(m.Slabs, experts)
	for i, l := range m.Layers {
		l.dispatcher, l.made = d, made[i]
		l.takeExperts(experts, i, mine)
	}

	r := rand.New(rand.NewPCG(c.Seed, 0))
	nn.Normal(m.embed.W, 1, r)
	nn.Normal(m.mix.W.W, 1/math.Sqrt(float64(m.mix.In)), r)
	for _, l := range m.Layers {
		nn.Fill(l.norm.Gain.W, 1)
		nn.Normal(l.router.W.W, 1/math.Sqrt(float64(c.Hidden)), r)
	}
	nn.Fill(m.final.Gain.W, 1)
	nn.Normal(m.out.W.W, 1/math.Sqrt(float64(c.Hidden)), r)
	return m
}

// Forward computes the logits of the bytes at the given places of the text.
func (m *Model) Forward(text []byte, at []int) error {
	c, rows := m.cfg, len(at)
	m.Clock.Enter(phase.Dense)
	m.context = m.context[:0]
	m.embedded = nn.Grow(m.embedded, rows*m.mix.In)[:0]
	for _, i := range at {
		m.context = append(m.context, text[i-c.Context:i]...)
	}
	for _, b := range m.context {
		m.embedded = append(m.embedded, m.embed.W[int(b)*c.Embed:(int(b)+1)*c.Embed]...)
	}
	m.x = nn.Grow(m.x, rows*c.Hidden)
	m.mix.Forward(m.x, m.embedded, rows)
	for _, l := range m.Layers {
		if err := l.Forward(m.x, rows); err != nil {
			return err
		}
	}
	m.normed = nn.Grow(m.normed, rows*c.Hidden)
	m.final.Forward(m.normed, m.x, rows)
	m.Logits = nn.Grow(m.Logits, rows*256)
	m.out.Forward(m.Logits, m.normed, rows)
	return nil
}

// Loss returns the summed loss of the last forward in nats and leaves the gradient of the logits for backward: that of the
// mean over the batch of all ranks.
func (m *Model) Loss(text []byte, at []int) float64 {
	var sum float64
	scale := 1 / float32(m.cfg.Batch)
	for r, i := range at {
		row, right := m.Logits[r*256:(r+1)*256], text[i]
		logit := row[right]
		sum += float64(nn.Softmax(row) - logit)
		row[right]--
		for i := range row {
			row[i] *= scale
		}
	}
	return sum
}

// Backward computes all gradients. It calls ready(i) when those of stage i of the dense part are final.
func (m *Model) Backward(ready func(stage int) error) error {
	c, rows := m.cfg, len(m.context)/m.cfg.Context
	m.Clock.Enter(phase.Dense)
	m.dnormed, m.dx = nn.Grow(m.dnormed, rows*c.Hidden), nn.Grow(m.dx, rows*c.Hidden)
	m.out.Backward(m.dnormed, m.Logits, rows, false)
	clear(m.dx)
	m.final.Backward(m.dx, m.dnormed, rows)
	if err := ready(0); err != nil {
		return err
	}
	for stage := 1; stage <= c.Layers; stage++ {
		if err := m.Layers[c.Layers-stage].Backward(m.dx, rows); err != nil {
			return err
		}
		if err := ready(stage); err != nil {
			return err
		}
	}
	m.dembedded = nn.Grow(m.dembedded, rows*m.mix.In)
	m.mix.Backward(m.dembedded, m.dx, rows, false)
	clear(m.embed.G)
	for i, b := range m.context {
		g := m.embed.G[int(b)*c.Embed : (int(b)+1)*c.Embed]
		nn.Add(g, m.dembedded[i*c.Embed:(i+1)*c.Embed])
	}
	return ready(c.Layers + 1)
}

// Release ends a forward that has no backward.
func (m *Model) Release() {
	for _, l := range m.Layers {
		l.Release()
	}
}

// Dense is the weights of the dense part and their moments.
func (m *Model) Dense() (parts [][]float32) {
	for _, s := range m.Slabs[:len(m.Slabs)-1] {
		parts = append(parts, s.W, s.M, s.V)
	}
	return parts
}

// Experts is the slab of the experts of this rank.
func (m *Model) Experts() *nn.Slab { return m.Slabs[len(m.Slabs)-1] }

// Weights is the weights of the dense part alone, by stage of backward.
func (m *Model) Weights() (parts [][]float32) {
	for _, s := range m.Slabs[:len(m.Slabs)-1] {
		parts = append(parts, s.W)
	}
	return parts
}

// ExpertWeights is the weights of the expert in a slot alone, layer by layer.
func (m *Model) ExpertWeights(slot int) (parts [][]float32) {
	n := m.cfg.ExpertSize()
	for i, l := range m.Layers {
		at := (i*len(l.experts) + slot) * n
		parts = append(parts, m.Experts().W[at:at+n])
	}
	return parts
}

// Expert is the weights of the expert in a slot and their moments, layer by layer.
func (m *Model) Expert(slot int) (parts [][]float32) {
	n, s := m.cfg.ExpertSize(), m.Experts()
	for i, l := range m.Layers {
		at := (i*len(l.experts) + slot) * n
		parts = append(parts, s.W[at:at+n], s.M[at:at+n], s.V[at:at+n])
	}
	return parts
}
