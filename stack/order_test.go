package stack_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// Where the heap is closed first, every later call of what was made on it says so, and touches no memory that is gone.
func TestCallsAfterTheHeapIsClosed(t *testing.T) {
	ctx := t.Context()
	gs, err := comm.Local(2)
	require.NoError(t, err)
	var ranks sync.WaitGroup
	errs := make([]error, len(gs))
	for i, g := range gs {
		ranks.Go(func() {
			errs[i] = func() error {
				h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
				x, e1 := alltoallv.New(ctx, h, alltoallv.Options{})
				r, e2 := allreduce.New(ctx, h, allreduce.Options{})
				p, e3 := p2p.New(ctx, h, p2p.Options{})
				shared := &dispatch.Shared{}
				d, e4 := dispatch.New(ctx, h, dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, Shared: shared})
				b, e5 := h.Alloc(8)
				if err := errors.Join(err, e1, e2, e3, e4, e5); err != nil {
					return err
				}
				handle, err := d.Dispatch(nil, dispatch.Tokens{})
				if err := errors.Join(err, h.Close(ctx)); err != nil {
					return err
				}
				mine := func() memory.View { return memory.Host(make([]byte, 8)) }
				_, counters := d.Counters()
				_, dispatched := d.Dispatch(nil, dispatch.Tokens{})
				_, explained := r.Explain(kernels.AllReduce, 1, kernels.Float32)
				for call, err := range map[string]error{
					"exchange":      x.Exchange(nil, mine(), mine(), &alltoallv.Splits{Send: []int64{4, 4}, Recv: []int64{4, 4}}),
					"counts":        x.Counts(nil, make([]int64, 2), make([]int64, 2)),
					"barrier":       x.Barrier(nil),
					"reduce":        r.AllReduce(nil, mine(), mine(), kernels.Float32, kernels.Sum),
					"explain":       explained,
					"dispatch":      dispatched,
					"combine":       d.Combine(nil, memory.View{}, memory.View{}, handle, dispatch.CombineOptions{}),
					"set placement": d.SetPlacement(ctx, dispatch.Contiguous(2, 2)),
					"counters":      counters,
					"send":          p.Send(nil, 1-g.Rank(), 0, mine()),
					"put":           p.Put(nil, 1-g.Rank(), b.View(), mine()),
					"clear":         b.Clear(0, 8),
					"free":          b.Free(),
				} {
					if !errors.Is(err, comm.ErrClosed) {
						t.Errorf("rank %d: %s: %v, want %v", g.Rank(), call, err, comm.ErrClosed)
					}
				}
				return errors.Join(x.Close(ctx), r.Close(ctx), p.Close(ctx), d.Close(ctx), h.Close(ctx), g.Close())
			}()
		})
	}
	ranks.Wait()
	require.NoError(t, errors.Join(errs...))
}
