package dispatch_test

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// BenchmarkDispatchCombine is 4096 tokens on each of 4 ranks in this process, hidden 1024, float32, top-2 of 8 experts:
// one Dispatch and one Combine on every rank, alternating with the copying of the same bytes, rows there and rows back,
// by as many goroutines with copy. It reports the medians and their ratio.
func BenchmarkDispatchCombine(b *testing.B) {
	const ranks, each, hidden, topK, experts = 4, 4096, 1024, 2, 8
	var meet barrier
	meet.init(ranks)
	var moved, copied []time.Duration
	local(b, ranks, func(r *rank) {
		d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: experts, TopK: topK, Hidden: hidden, MaxTokens: each, Handles: 1})
		require.NoError(r, err)
		rng := rand.New(rand.NewPCG(1, uint64(r.Group.Rank())))
		var idx []int32
		for range each {
			for _, e := range rng.Perm(experts)[:topK] {
				idx = append(idx, int32(e))
			}
		}
		weights := randomFloats(rng, len(idx))
		x := memory.Host(shm.Bytes(randomFloats(rng, each*hidden)))
		y := memory.Host(make([]byte, each*hidden*4))
		// The copy moves as many rows as this rank has, there and back.
		there, back := make([]byte, 4*hidden*len(idx)), make([]byte, 4*hidden*len(idx))
		copy(there, shm.Bytes(randomFloats(rng, len(there)/4)))

		step := func() {
			h, err := d.Dispatch(nil, tokens(x, idx, weights))
			require.NoError(r, err)
			require.NoError(r, d.Combine(nil, y, h.Rows(), h, plain))
			h.Release()
		}
		timed := func(to *[]time.Duration, f func()) {
			meet.wait()
			start := time.Now()
			f()
			meet.wait()
			if r.Group.Rank() == 0 {
				*to = append(*to, time.Since(start))
			}
		}
		var warm []time.Duration
		for i := range b.N + 2 {
			m, c := &moved, &copied
			if i < 2 {
				m, c = &warm, &warm
			}
			timed(m, step)
			timed(c, func() {
				copy(back, there)
				copy(there, back)
			})
		}
		require.NoError(r, d.Close(r.Ctx))
	})
	slices.Sort(moved)
	slices.Sort(copied)
	m, c := moved[len(moved)/2], copied[len(copied)/2]
	b.ReportMetric(float64(m.Microseconds())/1e3, "ms/step")
	b.ReportMetric(float64(c.Microseconds())/1e3, "ms/copy")
	b.ReportMetric(float64(m)/float64(c), "ratio")
	b.ReportMetric(0, "ns/op")
}

// barrier lets goroutines start together.
type barrier struct {
	mu      sync.Mutex
	all     sync.Cond
	n, here int
	round   int
}

func (b *barrier) init(n int) { b.n, b.all.L = n, &b.mu }

func (b *barrier) wait() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.here++; b.here == b.n {
		b.here, b.round = 0, b.round+1
		b.all.Broadcast()
		return
	}
	for r := b.round; r == b.round; {
		b.all.Wait()
	}
}
