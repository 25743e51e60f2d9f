package rebalance

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// Weights in memory of a device come along with their experts, between steps on a stream.
func TestWeightsMoveOnDevices(t *testing.T) {
	worldtest.Devices(t, 256<<20, weightsMove, 2, 4)
}

func weightsMove(r *worldtest.Rank) {
	const part = 4099 // bytes of an expert
	n, me, s := r.Size(), r.Rank(), r.Stream()
	copied := func(dst, src memory.View) {
		r.Must(memory.Copy(s, dst, src))
		r.Must(s.Synchronize())
	}
	d, err := dispatch.New(r.Ctx, r.Heap, dispatch.Options{Experts: 2 * n, TopK: 1, Hidden: hidden, MaxTokens: tokens})
	r.Must(err)
	weights, x, experts := r.Alloc(2*part), r.Alloc(4*tokens*hidden), r.Alloc(4*tokens)
	of := func() (all []byte) { // the weights that the placement wants here
		for _, e := range d.Placement().Local(me) {
			all = append(all, bytes.Repeat([]byte{byte(e + 1)}, part)...)
		}
		return all
	}
	copied(weights, memory.Host(of()))
	chosen := make([]int32, tokens)
	for i := range chosen {
		chosen[i] = int32(i % 2) // both of rank 0
	}
	copied(x, memory.Host(make([]byte, x.Len())))
	copied(experts, memory.Host(shm.Bytes(chosen)))
	l, err := New(r.Ctx, r.Heap, d, []memory.View{weights}, Options{Window: 3})
	r.Must(err)
	r.Barrier()
	var change *Change
	for step := range 6 {
		h, err := d.Dispatch(s, dispatch.Tokens{X: x, Experts: experts})
		r.Must(err)
		h.Release()
		c, err := l.Step(r.Ctx, s)
		r.Must(err)
		if step == 2 {
			change = c
		}
	}
	require.True(r.T, change.Moved())
	require.Equal(r.T, float64(n), change.Before)
	require.Equal(r.T, float64(n)/2, change.After)
	got := make([]byte, weights.Len())
	copied(memory.Host(got), weights)
	require.True(r.T, bytes.Equal(of(), got), "rank %d has %v of experts %v", me, []byte{got[0], got[part]}, d.Placement().Local(me))
	r.Must(l.Close(r.Ctx))
	r.Must(d.Close(r.Ctx))
}
