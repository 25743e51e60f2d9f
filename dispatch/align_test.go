package dispatch_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A slab has room for whole blocks of 64 rows where its rows have scales, and for as many as the caller says.
func TestAlignOfSlabs(t *testing.T) {
	local(t, 2, func(r *rank) {
		for _, c := range []struct {
			o    dispatch.Options
			rows int // of an expert
		}{
			{dispatch.Options{}, 10},
			{dispatch.Options{Align: 4}, 12},
			{dispatch.Options{Quantize: true}, 64},
			{dispatch.Options{DType: kernels.Float8E4M3}, 64},
			{dispatch.Options{Quantize: true, Align: 1}, 10},
			{dispatch.Options{Quantize: true, Align: 128}, 128},
		} {
			c.o.Experts, c.o.TopK, c.o.Hidden, c.o.MaxTokens, c.o.Layout = 4, 2, 128, 5, dispatch.Slab
			d, err := dispatch.New(r.Ctx, r.Heap, c.o)
			require.NoError(r, err)
			require.Equal(r, 2*c.rows, d.MaxRows(), "%+v", c.o)
			require.NoError(r, d.Close(r.Ctx))
		}
	})
}
