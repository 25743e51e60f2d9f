package dispatch_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A copy that belongs to the call of its dispatch takes rows as they come: of few and of many tokens, with scales and without, and with room
// for fewer rows than come.
func TestCUDA_ResultsAreTakenBesideTheirDispatch(t *testing.T) {
	for _, layout := range layouts {
		for i := range 6 {
			n, few, most := 1+i/2, i%2 == 1, []int{600, 40}[i%2]
			t.Run(fmt.Sprintf("%v, %d ranks, few: %v", layout, n, few), func(t *testing.T) {
				gpus(t, n, func(r *rank) {
					rng := rand.New(rand.NewPCG(9, uint64(layout)))
					o := dispatch.Options{
						Experts: 6, TopK: 3, Hidden: 512, MaxTokens: most, Layout: layout, DType: kernels.BFloat16, Quantize: true, Sources: true,
						LowLatency: few, RowWeights: layout != dispatch.TokenMajor && layout != dispatch.RankPadded,
					}
					if layout == dispatch.Padded {
						o.Capacity = o.MaxTokens * n * o.TopK
					}
					d, st := r.dispatcher(o), r.gpuStream()
					s := &side{r: r, d: d, b: randomBatch(rng, o, n, false)}
					s.dispatch(st)
					for i := range 8 {
						s.h.Release()
						r.gpu.reuse()
						s.b = randomBatch(rng, o, n, i == 3)
						length := rng.IntN(d.MaxRows() + 2)
						if i%2 == 0 {
							length = d.MaxRows()
						}
						if s.dispatchTo(st, length) {
							s.checkRows()
						}
					}
					s.h.Release()
					require.NoError(r, d.Close(r.Ctx))
					require.NoError(r, st.Close())
				})
			})
		}
	}
}
