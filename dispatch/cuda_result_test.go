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
		for _, n := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("%v, %d ranks", layout, n), func(t *testing.T) {
				gpus(t, n, func(r *rank) {
					rng := rand.New(rand.NewPCG(9, uint64(layout)))
					o := dispatch.Options{
						Experts: 6, TopK: 3, Hidden: 512, MaxTokens: 600, Layout: layout, DType: kernels.BFloat16, Quantize: true, Sources: true,
						RowWeights: layout != dispatch.TokenMajor && layout != dispatch.RankPadded,
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
						s.dispatchTo(st, rng.IntN(d.MaxRows()+2))
						s.checkRows()
					}
					s.h.Release()
					require.NoError(r, d.Close(r.Ctx))
					require.NoError(r, st.Close())
				})
			})
		}
	}
}
