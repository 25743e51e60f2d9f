package allreduce_test

import (
	"fmt"
	"testing"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// A rate is the buffer's bytes over the time of the call, for ranks that share this machine's cores.
func BenchmarkAllReduce(b *testing.B) {
	for _, n := range []int{2, 4} {
		for _, algorithm := range algorithms[1:] {
			for _, where := range []string{"symmetric", "foreign"} {
				for _, size := range []int64{1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20} {
					if algorithm == "one-shot" && size > 256<<10 {
						continue
					}
					b.Run(fmt.Sprintf("ranks=%d/%s/%s/%d", n, algorithm, where, size), func(b *testing.B) {
						b.SetBytes(size)
						worldtest.Local(b, n, 128<<20, func(r *worldtest.Rank) {
							x := newReducer(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 256 << 10})
							v := hostBuf(size)
							if where == "symmetric" {
								buf, err := r.Heap.Alloc(size)
								r.Must(err)
								v = buf.View()
							}
							r.Must(x.AllReduce(nil, v, v, f32, kernels.Max))
							r.Barrier()
							if r.Rank() == 0 {
								b.ResetTimer()
							}
							for range b.N {
								r.Must(x.AllReduce(nil, v, v, f32, kernels.Sum))
							}
							if r.Rank() == 0 {
								b.StopTimer()
							}
							r.Must(x.Close(r.Ctx))
						})
					})
				}
			}
		}
	}
}

func BenchmarkDTypes(b *testing.B) {
	const size = 4 << 20
	for _, dt := range dtypes {
		b.Run(dt.String(), func(b *testing.B) {
			b.SetBytes(size)
			worldtest.Local(b, 2, 64<<20, func(r *worldtest.Rank) {
				x := newReducer(r, allreduce.Options{})
				buf, err := r.Heap.Alloc(size)
				r.Must(err)
				for range b.N {
					r.Must(x.AllReduce(nil, buf.View(), buf.View(), dt, kernels.Sum))
				}
				r.Must(x.Close(r.Ctx))
			})
		})
	}
}

// For orientation: one thread copies a buffer of that size.
func BenchmarkCopy(b *testing.B) {
	for _, size := range []int64{1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			b.SetBytes(size)
			var dst, src memory.View = hostBuf(size), hostBuf(size)
			for b.Loop() {
				copy(dst.Bytes(), src.Bytes())
			}
		})
	}
}
