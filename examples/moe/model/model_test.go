package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/nn"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/memory"
)

// tiny is a config small enough for differences one parameter at a time.
func tiny() config.Config {
	return config.Config{
		Ranks: 1, Experts: 4, TopK: 2, Layers: 2, Hidden: 12, Inner: 10, Context: 3, Embed: 5,
		Batch: 24, Steps: 10, Rate: 1e-2, Seed: 7,
	}
}

// alone makes a whole model on one rank.
func alone(t *testing.T, c config.Config) *Model {
	gs, err := comm.Local(1)
	require.NoError(t, err)
	h, err := memory.NewHeap(t.Context(), gs[0], device.Host(), memory.Options{})
	require.NoError(t, err)
	d, err := dispatch.New(t.Context(), h, dispatch.Options{
		Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden, MaxTokens: c.Batch, Handles: c.Layers, HostCounts: true,
	})
	require.NoError(t, err)
	var made []memory.View
	for range c.Layers {
		b, err := h.Alloc(4 * int64(d.MaxRows()*c.Hidden))
		require.NoError(t, err)
		made = append(made, b.View())
	}
	var grads [][]float32
	for _, n := range StageSizes(c) {
		grads = append(grads, make([]float32, n))
	}
	t.Cleanup(func() {
		ctx := context.Background() // t's is over by now
		require.NoError(t, errors.Join(d.Close(ctx), h.Close(ctx), gs[0].Close()))
	})
	return New(c, 0, d, grads, made)
}

func TestDenseSize(t *testing.T) {
	for _, c := range []config.Config{config.Defaults(), tiny()} {
		sum := 0
		for _, n := range StageSizes(c) {
			sum += n
		}
		require.InDelta(t, float64(sum), c.DenseSize(), 0)
	}
}

// The gradients of all kinds of weights are what differences of the loss say. A step along a random direction in one
// tensor changes the loss by the inner product of the direction and the gradient.
func TestGradients(t *testing.T) {
	for _, topk := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("top-%d", topk), func(t *testing.T) {
			c := tiny()
			c.TopK = topk
			from := make([]byte, text.Least)
			for i := range from {
				from[i] = "abcdefgh \n"[i*i%89%10]
			}
			m, at := alone(t, c), make([]int, c.Batch)
			text.Batch(at, from, c.Context, c.Seed, 1)

			var moved bool // a token went to other experts than at first: the loss has a step there
			var routes [][]int32
			loss := func() float64 {
				require.NoError(t, m.Forward(from, at))
				m.Release()
				for i, l := range m.Layers {
					moved = moved || !slices.Equal(routes[i], l.chosen)
				}
				return m.Loss(from, at) / float64(c.Batch)
			}
			require.NoError(t, m.Forward(from, at))
			m.Loss(from, at)
			require.NoError(t, m.Backward(func(int) error { return nil }))

			for _, l := range m.Layers {
				routes = append(routes, slices.Clone(l.chosen))
			}

			weights := map[string]nn.Tensor{
				"embedding": m.embed, "input": m.mix.W, "input bias": m.mix.B,
				"last norm": m.final.Gain, "output": m.out.W, "output bias": m.out.B,
			}
			for i, l := range m.Layers {
				weights[fmt.Sprintf("router %d", i)] = l.router.W
				weights[fmt.Sprintf("norm %d", i)] = l.norm.Gain
				for e, x := range l.experts {
					weights[fmt.Sprintf("expert %d of layer %d, first", e, i)] = x.w1
					weights[fmt.Sprintf("expert %d of layer %d, second", e, i)] = x.w2
				}
			}
			n := 0
			r := rand.New(rand.NewPCG(5, 6))
			for name, x := range weights {
				grad := append([]float32(nil), x.G...)
				before := append([]float32(nil), x.W...)
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
					moved = false
					along := func(s float64) float64 {
						for i := range x.W {
							x.W[i] = before[i] + float32(s*direction[i])
						}
						defer copy(x.W, before)
						return loss()
					}
					// Two differences without the term in h^2.
					got := (8*(along(h/2)-along(-h/2)) - (along(h) - along(-h))) / (6 * h)
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
