package dispatch_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
)

func TestCUDA_DispatchersThatShareMemoryTakeTurns(t *testing.T) {
	for _, n := range worldSizes() {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			gpus(t, n, func(r *rank) { takeTurns(r, uint64(100*n), 3, 3) })
		})
	}
}

// A graph keeps the memory that its calls had, while others grow.
func TestCUDA_AGraphKeepsTheMemoryThatOthersHaveOutgrown(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		x, s := &shapes{r: r}, r.gpuStream()
		o := graphOptions(2)[dispatch.TokenMajor.String()]
		x.add(o)
		rng := rand.New(rand.NewPCG(2, 2))
		next := func(o dispatch.Options) *batch { return batchOf(rng, o, []int{o.MaxTokens, 3}, false, true) }
		f := r.fixed(next(o))
		who := &side{r: r, d: x.d[0]}
		g := r.capture(s, func() (err error) {
			if who.h, err = who.d.Dispatch(s, f.t); err == nil {
				err = who.d.Combine(s, f.y, who.h.Rows(), who.h, plain)
			}
			return err
		})
		more := o
		for range 3 {
			more.MaxTokens *= 2
			x.add(more)
			other := &side{r: r, d: x.d[len(x.d)-1], b: next(more)}
			other.dispatch(s)
			other.checkRows()
			b := next(o)
			f.load(r, b)
			r.write(f.y, make([]byte, f.y.Len()))
			r.replay(s, who.d, g)
			who.b = b
			who.checkIdentity(f.y)
			other.checkRows() // which lie elsewhere
			other.h.Release()
		}
		who.h.Release()
		require.NoError(r, g.Close())
		for _, d := range x.d {
			require.NoError(r, d.Close(r.Ctx))
		}
		require.NoError(r, s.Close())
	})
}
