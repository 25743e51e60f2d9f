package main

import (
	"math"
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// model predicts a byte from the bytes before it. Their embeddings, side by side, are projected to one token of width
// Hidden; mixture-of-experts layers add to it; a last projection gives the logits of the 256 bytes.
//
// Embedding, projections, norms and routers are the dense part: every rank has a copy and sums its gradients with the
// others'. The experts are spread over the ranks; see moeLayer.
type model struct {
	cfg   config
	clock *clock

	slabs []*slab // of the dense part by stage of backward, then of this rank's experts

	embed  tensor // [256, Embed]
	mix    linear // [Context*Embed, Hidden]
	layers []*moeLayer
	final  norm
	out    linear // [Hidden, 256]

	context  []byte    // [rows, Context] of the last forward
	embedded []float32 // [rows, Context*Embed]
	x        []float32 // [rows, Hidden]
	normed   []float32
	logits   []float32 // [rows, 256]

	dembedded, dx, dnormed []float32
}

// takeDense takes the dense part out of a slab for every stage of backward: the output, each layer from the last to the
// first, the input. The gradients of a stage are final, and can travel, while backward goes on with the next.
func (m *model) takeDense(stages []*slab) {
	c, layers, last := m.cfg, len(m.layers), len(m.layers)+1
	m.out = takeLinear(stages[0], c.Hidden, 256, true)
	m.final = takeNorm(stages[0], c.Hidden)
	for i, l := range m.layers {
		l.takeDense(stages[layers-i])
	}
	m.mix = takeLinear(stages[last], c.Context*c.Embed, c.Hidden, true)
	m.embed = stages[last].take(256 * c.Embed)
}

func blankModel(c config) *model {
	m := &model{cfg: c, clock: new(clock)}
	for range c.Layers {
		m.layers = append(m.layers, &moeLayer{cfg: c, clock: m.clock})
	}
	return m
}

// stageSizes is the number of parameters of the dense part by stage of backward.
func stageSizes(c config) []int {
	stages := make([]*slab, c.Layers+2)
	for i := range stages {
		stages[i] = new(slab)
	}
	blankModel(c).takeDense(stages)
	sizes := make([]int, len(stages))
	for i, s := range stages {
		sizes[i] = s.n
	}
	return sizes
}

// newModel makes this rank's part of a model. The weights depend on the seed, not on the number of ranks. grads is memory
// for the gradients of each stage, made for what the experts of each layer make.
func newModel(c config, rank int, d *dispatch.Dispatcher, grads [][]float32, made []memory.View) *model {
	m := blankModel(c)
	for _, g := range grads {
		m.slabs = append(m.slabs, newSlab(g))
	}
	m.takeDense(m.slabs)
	mine := d.Placement().Local(rank)
	experts := newSlab(make([]float32, c.Layers*len(mine)*expertSize(c)))
	m.slabs = append(m.slabs, experts)
	for i, l := range m.layers {
		l.moving, l.made = d, made[i]
		l.takeExperts(experts, i, mine)
	}

	r := rand.New(rand.NewPCG(c.Seed, 0))
	normal(m.embed.w, 1, r)
	normal(m.mix.w.w, 1/math.Sqrt(float64(m.mix.in)), r)
	for _, l := range m.layers {
		fill(l.norm.gain.w, 1)
		normal(l.router.w.w, 1/math.Sqrt(float64(c.Hidden)), r)
	}
	fill(m.final.gain.w, 1)
	normal(m.out.w.w, 1/math.Sqrt(float64(c.Hidden)), r)
	return m
}

// forward computes the logits of the bytes at the given places of the text.
func (m *model) forward(text []byte, at []int) error {
	c, rows := m.cfg, len(at)
	m.clock.enter(computingDense)
	m.context = m.context[:0]
	m.embedded = grow(m.embedded, rows*m.mix.in)[:0]
	for _, i := range at {
		m.context = append(m.context, text[i-c.Context:i]...)
	}
	for _, b := range m.context {
		m.embedded = append(m.embedded, m.embed.w[int(b)*c.Embed:(int(b)+1)*c.Embed]...)
	}
	m.x = grow(m.x, rows*c.Hidden)
	m.mix.forward(m.x, m.embedded, rows)
	for _, l := range m.layers {
		if err := l.forward(m.x, rows); err != nil {
			return err
		}
	}
	m.normed = grow(m.normed, rows*c.Hidden)
	m.final.forward(m.normed, m.x, rows)
	m.logits = grow(m.logits, rows*256)
	m.out.forward(m.logits, m.normed, rows)
	return nil
}

// loss returns the summed loss of the last forward in nats and leaves the gradient of the logits for backward: that of the
// mean over the batch of all ranks.
func (m *model) loss(text []byte, at []int) float64 {
	var sum float64
	scale := 1 / float32(m.cfg.Batch)
	for r, i := range at {
		row, right := m.logits[r*256:(r+1)*256], text[i]
		logit := row[right]
		sum += float64(softmax(row) - logit)
		row[right]--
		for i := range row {
			row[i] *= scale
		}
	}
	return sum
}

// backward computes all gradients. It calls ready(i) when those of stage i of the dense part are final.
func (m *model) backward(ready func(stage int) error) error {
	c, rows := m.cfg, len(m.context)/m.cfg.Context
	m.clock.enter(computingDense)
	m.dnormed, m.dx = grow(m.dnormed, rows*c.Hidden), grow(m.dx, rows*c.Hidden)
	m.out.backward(m.dnormed, m.logits, rows, false)
	clear(m.dx)
	m.final.backward(m.dx, m.dnormed, rows)
	if err := ready(0); err != nil {
		return err
	}
	for stage := 1; stage <= c.Layers; stage++ {
		if err := m.layers[c.Layers-stage].backward(m.dx, rows); err != nil {
			return err
		}
		if err := ready(stage); err != nil {
			return err
		}
	}
	m.dembedded = grow(m.dembedded, rows*m.mix.in)
	m.mix.backward(m.dembedded, m.dx, rows, false)
	clear(m.embed.g)
	for i, b := range m.context {
		g := m.embed.g[int(b)*c.Embed : (int(b)+1)*c.Embed]
		addTo(g, m.dembedded[i*c.Embed:(i+1)*c.Embed])
	}
	return ready(c.Layers + 1)
}

// release ends a forward that has no backward.
func (m *model) release() {
	for _, l := range m.layers {
		l.release()
	}
}
