package alltoallv_test

import (
	"fmt"
	"testing"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
)

// BenchmarkExchange is the time of a call with nothing but its own overhead (1 rank) and of small exchanges.
func BenchmarkExchange(b *testing.B) {
	for _, n := range []int{1, 2, 4} {
		for _, bytes := range []int64{0, 64, 4096} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%d", n, bytes), func(b *testing.B) {
				worldtest.Local(b, n, 32<<20, func(r *worldtest.Rank) {
					x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
					r.Must(err)
					src, err := r.Heap.Alloc(1 << 20)
					r.Must(err)
					dst, err := r.Heap.Alloc(1 << 20)
					r.Must(err)
					sp := &alltoallv.Splits{}
					for range n {
						sp.Send, sp.Recv = append(sp.Send, bytes), append(sp.Recv, bytes)
					}
					for range b.N {
						if err := x.Exchange(nil, dst.View(), src.View(), sp); err != nil {
							r.Must(err)
						}
					}
					r.Must(x.Close(r.Ctx))
				})
			})
		}
	}
}
