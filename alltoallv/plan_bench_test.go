package alltoallv

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// randomSplits are count splits of about that many bytes a rank for each of n ranks, no two alike: even, but for some noise, or
// skewed by popularity.
func randomSplits(n, count int, bytes int64, skewed bool) []*Splits {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	all := make([]*Splits, count)
	for i := range all {
		sp := &Splits{ElemSize: 2}
		perm := rng.Perm(n)
		for k := range n {
			part := bytes / int64(2*n)
			if skewed {
				part = bytes / int64(3*(1+perm[k]))
			}
			sp.Send, sp.Recv = append(sp.Send, part-part/8+rng.Int64N(part/4+1)), append(sp.Recv, part-part/8+rng.Int64N(part/4+1))
		}
		sp.Recv[0] = sp.Send[0]
		all[i] = sp
	}
	return all
}

func benchPlanner(b *testing.B, kind device.Kind, n int) *planner {
	engine, traits := kernels.Engine(new(host.Engine)), kernels.Traits{Pulls: true}
	if kind == device.CUDAKind {
		engine, traits = new(cuda.Engine), gpu
	}
	var o Options
	c, err := o.complete(n, engine, kind)
	require.NoError(b, err)
	r, err := newRegistry(&o, 0, n, kind)
	require.NoError(b, err)
	r.traits = traits
	return &planner{registry: r, cache: newCache(o.CacheEntries), bounds: &c}
}

// BenchmarkPlan is what a call spends on its plan: a hit has had these splits before, a miss never has.
func BenchmarkPlan(b *testing.B) {
	for _, kind := range []device.Kind{device.HostKind, device.CUDAKind} {
		for _, n := range []int{2, 4, 8} {
			for _, bytes := range []int64{8 << 10, 8 << 20, 128 << 20} {
				for _, skewed := range []bool{false, true} {
					for _, what := range []string{"hit", "miss"} {
						b.Run(fmt.Sprintf("%v/ranks=%d/KiB=%d/skewed=%v/%s", kind, n, bytes>>10, skewed, what), func(b *testing.B) {
							k, all := benchPlanner(b, kind, n), randomSplits(n, 1024, bytes, skewed)
							mask := 1023
							if what == "hit" {
								mask = 127
							}
							for i := range 2048 { // all memory has been taken
								p, err := k.of(all[i&mask])
								require.NoError(b, err)
								k.ready(p, i&2048 == 0)
							}
							b.ReportAllocs()
							i := 0
							for b.Loop() {
								p, err := k.of(all[i&mask])
								if err != nil {
									b.Fatal(err)
								}
								k.ready(p, false)
								i++
							}
						})
					}
				}
			}
		}
	}
}
