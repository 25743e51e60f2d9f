package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
)

// tiny is a config small enough for differences one parameter at a time.
func tiny() config {
	return config{
		Ranks: 1, Experts: 4, TopK: 2, Layers: 2, Hidden: 12, Inner: 10, Context: 3, Embed: 5,
		Batch: 24, Steps: 10, Rate: 1e-2, Seed: 7,
	}
}

// babble is a text with some order in it.
func babble(n int) *corpus {
	r := rand.New(rand.NewPCG(3, 4))
	text := make([]byte, n)
	for i := range text {
		text[i] = "abcdefgh \n"[r.IntN(10)]
		if i > 0 && text[i-1] == 'a' {
			text[i] = 'b'
		}
	}
	c := &corpus{name: "babble", files: 1}
	c.train, c.heldout = split(text)
	return c
}

func oneRank(t *testing.T, c config, text *corpus) *worker {
	g, err := comm.Local(1)
	require.NoError(t, err)
	w, err := newWorker(t.Context(), g[0], c, text, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, w.close(context.Background())) // t's is over by now
		require.NoError(t, g[0].Close())
	})
	return w
}

// The gradients of all kinds of weights are what differences of the loss say. A step along a random direction in one
// tensor changes the loss by the inner product of the direction and the gradient.
func TestGradients(t *testing.T) {
	for _, topk := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("top-%d", topk), func(t *testing.T) {
			c := tiny()
			c.TopK = topk
			text := babble(minText)
			w := oneRank(t, c, text)
			m := w.model
			batchOf(w.at, text.train, c.Context, c.Seed, 1)

			var moved bool // a token went to other experts than at first: the loss has a step there
			var routes [][]int32
			loss := func() float64 {
				require.NoError(t, m.forward(text.train, w.at))
				m.release()
				for i, l := range m.layers {
					moved = moved || !slices.Equal(routes[i], l.idx)
				}
				return m.loss(text.train, w.at) / float64(c.Batch)
			}
			require.NoError(t, m.forward(text.train, w.at))
			m.loss(text.train, w.at)
			require.NoError(t, m.backward(func(int) error { return nil }))

			for _, l := range m.layers {
				routes = append(routes, slices.Clone(l.idx))
			}

			weights := map[string]tensor{
				"embedding": m.embed, "input": m.mix.w, "input bias": m.mix.b,
				"last norm": m.final.gain, "output": m.out.w, "output bias": m.out.b,
			}
			for i, l := range m.layers {
				weights[fmt.Sprintf("router %d", i)] = l.router.w
				weights[fmt.Sprintf("norm %d", i)] = l.norm.gain
				for e, x := range l.experts {
					weights[fmt.Sprintf("expert %d of layer %d, first", e, i)] = x.w1
					weights[fmt.Sprintf("expert %d of layer %d, second", e, i)] = x.w2
				}
			}
			n := 0
			r := rand.New(rand.NewPCG(5, 6))
			for name, x := range weights {
				grad := append([]float32(nil), x.g...)
				before := append([]float32(nil), x.w...)
				var size float64
				for _, v := range grad {
					size += float64(v) * float64(v)
				}
				require.Greater(t, size, 0.0, name)
				size = math.Sqrt(size)
				checked := false
				for h := 1e-2; h > 1e-3 && !checked; h /= 2 {
					// Half along the gradient, so that there is something to see, half at random.
					direction := make([]float64, len(grad))
					var slope float64
					for i, v := range grad {
						direction[i] = float64(v)/size + r.NormFloat64()/math.Sqrt(float64(len(grad)))
						slope += direction[i] * float64(v)
					}
					at := func(s float64) float64 {
						for i := range x.w {
							x.w[i] = before[i] + float32(s*direction[i])
						}
						defer copy(x.w, before)
						return loss()
					}
					moved = false
					// Two differences without the term in h^2.
					got := (8*(at(h/2)-at(-h/2)) - (at(h) - at(-h))) / (6 * h)
					if !moved {
						checked = true
						require.InDelta(t, slope, got, 2e-3*size+1e-6/h, name)
					}
				}
				if checked {
					n++
				}
			}
			require.Greater(t, n, 3*len(weights)/4, "most weights can be checked without a token that changes its experts")
		})
	}
}
