package dispatch_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// So many rows of such a length are written around the caches.
func TestLongRows(t *testing.T) {
	o := dispatch.Options{Experts: 5, TopK: 3, Hidden: 1031, MaxTokens: 400, DType: kernels.Float32, Align: 4, Placement: dispatch.Contiguous(5, 2)}
	local(t, 2, func(r *rank) {
		d := r.dispatcher(o)
		s := &side{r: r, d: d, b: randomBatch(rand.New(rand.NewPCG(8, 7)), o, 2, false)}
		s.dispatch(nil)
		s.checkRows()
		rows := s.ownMade()
		s.combine(nil, s.view(rows), combineWith{})
		s.combineBackward(nil, s.view(rows), s.view(rows), combineWith{})
		s.h.Release()
		require.NoError(r, d.Close(r.Ctx))
	})
}

// dispatcher makes one.
func (r *rank) dispatcher(o dispatch.Options) *dispatch.Dispatcher {
	d, err := dispatch.New(r.Ctx, r.Heap, o)
	require.NoError(r, err)
	return d
}

// small is a world for tests of other things than rows: 4 experts, top-2, 4 elements.
func small(o dispatch.Options) dispatch.Options {
	o.Experts, o.TopK, o.Hidden, o.MaxTokens, o.HostCounts = 4, 2, 4, 8, true
	return o
}

// rowsFor is a buffer of n rows of a small world.
func rowsFor(n int) memory.View { return memory.Host(make([]byte, 16*n)) }

// empty is memory of the rank's device for n rows of a small world.
func (r *rank) empty(n int) memory.View { return r.up(make([]byte, 16*n)) }

// roundTrip dispatches tokens to experts 0 and 3 and combines them: a token with weights 1 comes back twice itself.
func roundTrip(r *rank, d *dispatch.Dispatcher, st device.Stream, n int) {
	h, x, idx, weights := dispatchSmall(r, d, st, n)
	y := r.empty(n)
	require.NoError(r, d.Combine(st, y, h.Rows(), h, plain))
	h.Release()
	if st != nil {
		require.NoError(r, st.Synchronize())
		require.NoError(r, d.Fault())
	}
	require.Len(r, weights, len(idx))
	got := wide(kernels.Float32, r.down(y))
	for i, v := range wide(kernels.Float32, r.down(x)) {
		require.Equal(r, 2*v, got[i])
	}
}

func dispatchSmall(r *rank, d *dispatch.Dispatcher, st device.Stream, n int) (*dispatch.Handle, memory.View, []int32, []float32) {
	x, idx, weights := smallBatch(r, n)
	h, err := d.Dispatch(st, r.tokens(x, idx, weights))
	require.NoError(r, err)
	if st != nil {
		require.NoError(r, st.Synchronize())
		require.NoError(r, d.Fault())
	}
	return h, x, idx, weights
}

func smallBatch(r *rank, n int) (memory.View, []int32, []float32) {
	values := make([]float32, 4*n)
	for i := range values {
		values[i] = float32(100*r.Group.Rank() + i)
	}
	var idx []int32
	var weights []float32
	for range n {
		idx, weights = append(idx, 0, 3), append(weights, 1, 1)
	}
	return r.up(narrow(kernels.Float32, values)), idx, weights
}

// Which memory a dispatch gets does not depend on the order of releases, nor on a call that was refused where it was launched. GPUs need
// that: there each handle counts its calls.
func TestMemoryIsTakenInTurn(t *testing.T) {
	local(t, 1, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Handles: 3}))
		place := map[uintptr]int{}
		var handles []*dispatch.Handle
		take := func() int {
			h, _, _, _ := dispatchSmall(r, d, nil, 1)
			handles = append(handles, h)
			at := h.Rows().Ptr()
			if _, known := place[at]; !known {
				place[at] = len(place)
			}
			return place[at]
		}
		require.Equal(r, []int{0, 1, 2}, []int{take(), take(), take()})
		for _, order := range [][]int{{0, 1, 2}, {2, 0, 1}, {1, 2, 0}} {
			for _, i := range order {
				handles[i].Release()
			}
			handles = nil
			require.Equal(r, []int{0, 1, 2}, []int{take(), take(), take()})
		}
		handles[2].Release()
		handles[0].Release()
		require.Equal(r, []int{0, 2}, []int{take(), take()})
		handles[1].Release()
		handles[3].Release()
		x, idx, weights := smallBatch(r, 1)
		idx[0] = 99 // which the engine refuses
		_, err := d.Dispatch(nil, r.tokens(x, idx, weights))
		var index *dispatch.IndexError
		require.ErrorAs(r, err, &index)
		require.Equal(r, []int{0, 1}, []int{take(), take()})
	})
}

// X1: a call ends only when all ranks have made it, also where nothing is sent.
func TestX1_EveryPairMeetsForNoTokens(t *testing.T) {
	const late = 30 * time.Millisecond
	var waiting [3]sync.WaitGroup // for each call the ranks that have begun it, as the last rank then does
	for i := range waiting {
		waiting[i].Add(2)
	}
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		for range 200 {
			roundTrip(r, d, nil, 0)
		}
		calls := []func(h *dispatch.Handle) error{
			func(h *dispatch.Handle) error { return d.Combine(nil, rowsFor(0), h.Rows(), h, plain) },
			func(h *dispatch.Handle) error {
				return d.CombineBackward(nil, rowsFor(0), none, rowsFor(0), h.Rows(), h, plain)
			},
			func(h *dispatch.Handle) error { return d.DispatchBackward(nil, rowsFor(0), none, h.Rows(), none, h) },
		}
		for i, call := range calls {
			h, _, _, _ := dispatchSmall(r, d, nil, 0)
			require.NoError(r, r.Group.Barrier(r.Ctx))
			start := time.Now()
			if r.Group.Rank() == 1 {
				waiting[i].Wait()
				time.Sleep(late)
			} else {
				waiting[i].Done()
			}
			require.NoError(r, call(h))
			require.GreaterOrEqual(r, time.Since(start), late)
			h.Release()
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

// X3: rows that a slow rank still uses are not overwritten by the next call, with a single output to use again and again.
func TestX3_SlowExpertsKeepTheirRows(t *testing.T) {
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Handles: 1}))
		rng := rand.New(rand.NewPCG(3, uint64(r.Group.Rank())))
		for call := range 100 {
			x := make([]float32, 32)
			for i := range x {
				x[i] = float32(1000*call + 100*r.Group.Rank() + i)
			}
			idx, weights := make([]int32, 16), make([]float32, 16)
			for i := range idx {
				idx[i], weights[i] = int32(i%2*3), 1
			}
			h, err := d.Dispatch(nil, tokens(memory.Host(narrow(kernels.Float32, x)), idx, weights))
			require.NoError(r, err)
			if rng.IntN(3) == 0 {
				time.Sleep(time.Duration(rng.IntN(500)) * time.Microsecond)
			}
			for _, v := range wide(kernels.Float32, r.rows(h, 16).Bytes()) {
				require.Equal(r, call, int(v)/1000)
			}
			y := rowsFor(8)
			require.NoError(r, d.Combine(nil, y, h.Rows(), h, plain))
			clear(h.Rows().Bytes()) // all ranks have read them
			h.Release()
			for i, v := range wide(kernels.Float32, y.Bytes()) {
				require.Equal(r, 2*x[i], v)
			}
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Each token crosses once to a rank, whatever the number of its experts there.
func TestTokensCrossOncePerRank(t *testing.T) {
	local(t, 2, func(r *rank) {
		d := r.dispatcher(dispatch.Options{Experts: 6, TopK: 3, Hidden: 4, MaxTokens: 8, HostCounts: true})
		var idx []int32
		if r.Group.Rank() == 0 {
			idx = []int32{3, 4, 5, 5, 0, -1} // three experts on rank 1; one there and one here
		}
		h, err := d.Dispatch(nil, tokens(rowsFor(len(idx)/3), idx, make([]float32, len(idx))))
		require.NoError(r, err)
		require.Equal(r, [][]int64{{16, 32}, {0, 0}}[r.Group.Rank()], r.counters(d).Bytes)
		require.Equal(r, [][]int32{{1, 0, 0}, {1, 1, 2}}[r.Group.Rank()], r.counts(h).Counts)
		h.Release()
		require.NoError(r, d.Close(r.Ctx))
	})
}

// A dispatch that does not fit is the same error on every rank, and the next call works.
func TestOverflowIsAnErrorOnEveryRank(t *testing.T) {
	for name, c := range map[string]struct {
		o    dispatch.Options
		want dispatch.OverflowError
	}{
		"padded": {small(dispatch.Options{Layout: dispatch.Padded, Capacity: 15}), dispatch.OverflowError{Rank: 1, Expert: 3, Rows: 16, Limit: 15}},
		"flat":   {small(dispatch.Options{Align: 2, MaxRows: 15}), dispatch.OverflowError{Rank: 0, Expert: -1, Rows: 16, Limit: 15}},
		"tokens": {small(dispatch.Options{Layout: dispatch.TokenMajor, MaxRows: 15}), dispatch.OverflowError{Rank: 0, Expert: -1, Rows: 16, Limit: 15}},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "padded" { // put expert 0 where it does not overflow first
				c.o.Placement = &dispatch.Placement{Ranks: [][]int{{0, 1}, {0}, {1}, {1}}}
			}
			local(t, 2, func(r *rank) {
				d := r.dispatcher(c.o)
				st, err := device.Host().NewStream()
				require.NoError(r, err)
				for i := range 3 {
					roundTrip(r, d, st, 7)
					x, idx, weights := smallBatch(r, 8)
					var s device.Stream
					if i == 2 {
						s = st
					}
					h, err := d.Dispatch(s, tokens(x, idx, weights))
					if s != nil {
						require.NoError(r, err)
						err = s.Synchronize()
						var overflow *dispatch.OverflowError
						require.ErrorAs(r, d.Combine(nil, rowsFor(8), h.Rows(), h, plain), &overflow, "the handle has failed")
						_, cerr := h.HostCounts(r.Ctx)
						require.ErrorAs(r, cerr, &overflow)
						h.Release()
					}
					var overflow *dispatch.OverflowError
					require.ErrorAs(r, err, &overflow)
					want := c.want
					want.Call = overflow.Call
					require.Equal(r, want, *overflow)
					require.ErrorContains(r, err, "16 rows")
					require.ErrorContains(r, err, "15")
				}
				roundTrip(r, d, nil, 7)
				require.NoError(r, st.Close())
				require.NoError(r, d.Close(r.Ctx))
			})
		})
	}
}

// Ranks in different calls, or with handles of different dispatches, all learn it and can go on.
func TestDifferentCallsAreAnErrorOnEveryRank(t *testing.T) {
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		h1, _, _, _ := dispatchSmall(r, d, nil, 3)
		h2, _, _, _ := dispatchSmall(r, d, nil, 3)
		odd := r.Group.Rank() == 2
		var order *kernels.OrderError

		err := func() error {
			if odd {
				return d.DispatchBackward(nil, rowsFor(3), none, h1.Rows(), none, h1)
			}
			return d.Combine(nil, rowsFor(3), h1.Rows(), h1, plain)
		}()
		require.ErrorAs(r, err, &order)
		require.Equal(r, 2, order.Rank)
		require.ErrorContains(r, err, "rank 0 is in combine with dispatched weights of dispatch 1, rank 2 in dispatch backward of dispatch 1")

		h := h1
		if odd {
			h = h2
		}
		err = d.Combine(nil, rowsFor(3), h.Rows(), h, plain)
		require.ErrorAs(r, err, &order)
		require.ErrorContains(r, err, "rank 2 in combine with dispatched weights of dispatch 2")

		if odd {
			_, err = d.Dispatch(nil, tokens(none, nil, nil))
		} else {
			err = d.CombineBackward(nil, h1.Rows(), numbers(make([]float32, 6)), rowsFor(3), h1.Rows(), h1, plain)
		}
		require.ErrorAs(r, err, &order)

		h1.Release()
		h2.Release()
		roundTrip(r, d, nil, 5)
		require.NoError(r, d.Close(r.Ctx))
	})
}

// A buffer of rows that is too small on one rank is an error on every rank.
func TestShortRowsAreAnErrorOnEveryRank(t *testing.T) {
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		h, _, _, _ := dispatchSmall(r, d, nil, 3)
		rows, dRows := r.rows(h, 16), rowsFor(r.counts(h).Rows)
		if r.Group.Rank() == 0 {
			rows = rows.Slice(0, rows.Len()-1)
		}
		var short *kernels.ShortError
		want := kernels.ShortError{Rank: 0, Have: 9*16 - 1, Need: 9 * 16}
		for i, call := range []func() error{
			func() error { return d.Combine(nil, rowsFor(3), rows, h, plain) },
			func() error { return d.DispatchBackward(nil, rowsFor(3), none, rows, none, h) },
			func() error {
				return d.CombineBackward(nil, dRows, numbers(make([]float32, 6)), rowsFor(3), rows, h, plain)
			},
			func() error {
				return d.CombineBackward(nil, rows, numbers(make([]float32, 6)), rowsFor(3), dRows, h, plain)
			},
		} {
			err := call()
			require.ErrorAs(r, err, &short)
			want.Call = uint64(i) + 2
			require.Equal(r, want, *short)
		}
		h.Release()
		roundTrip(r, d, nil, 5)
		require.NoError(r, d.Close(r.Ctx))
	})
}

// F3: what is wrong with a rank's arguments is said there, with the values, and nothing has happened.
func TestF3_BadArgumentsAreRefused(t *testing.T) {
	local(t, 2, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Handles: 1}))
		other := r.dispatcher(small(dispatch.Options{}))
		foreign, _, _, _ := dispatchSmall(r, other, nil, 0)
		freed, err := r.Heap.Alloc(1 << 10)
		require.NoError(r, err)
		require.NoError(r, freed.Free())

		x := rowsFor(8)
		two := []float32{1, 1}
		odd := memory.Host(make([]byte, 64)[1:])
		for _, c := range []struct {
			dispatch.Tokens
			is   error
			text string
		}{
			{tokens(x, []int32{0, 1, 2}, []float32{1, 1, 1}), dispatch.ErrInvalid, "experts has 12 bytes, which is no number of tokens with top-2 of int32"},
			{tokens(x, []int32{0, 1}, []float32{1}), dispatch.ErrInvalid, "weights has 4 bytes, want 8"},
			{tokens(x, make([]int32, 18), make([]float32, 18)), dispatch.ErrInvalid, "9 tokens, Options.MaxTokens is 8"},
			{tokens(rowsFor(1), []int32{0, 1, 0, 1}, []float32{1, 1, 1, 1}), dispatch.ErrInvalid, "x has 16 bytes, 2 tokens of 4 x float32 need 32"},
			{tokens(memory.Device(1<<20, 1<<10), []int32{0, 1}, two), dispatch.ErrInvalid, "x is not host memory"},
			{tokens(freed.View(), []int32{0, 1}, two), memory.ErrFreed, "x"},
			{dispatch.Tokens{X: x, Experts: memory.Device(1<<20, 8)}, dispatch.ErrInvalid, "experts is not host memory"},
			{dispatch.Tokens{X: x, Experts: odd.Slice(0, 8)}, dispatch.ErrInvalid, "experts is not aligned to its elements of 4 bytes"},
			{dispatch.Tokens{X: odd, Experts: numbers([]int32{0, 1})}, dispatch.ErrInvalid, "x is not aligned to its elements of 4 bytes"},
			{dispatch.Tokens{X: rowsFor(1), Experts: numbers([]int32{0, 1}), Scales: rowsFor(1)}, dispatch.ErrInvalid, "there are scales for tokens of float32"},
			{tokens(rowsFor(2), []int32{0, 1}, two), dispatch.ErrInvalid, "x has 32 bytes, 1 tokens of 4 x float32 need 16"},
			{dispatch.Tokens{X: x}, dispatch.ErrInvalid, "x has 128 bytes, 0 tokens of 4 x float32 need 0 (experts has 0 tokens"},
			{tokens(memory.Wrap(make([]float64, 4)), []int32{0, 1}, two), dispatch.ErrInvalid, "x has elements of float64, want float32"},
			{tokens(memory.Wrap(make([]memory.BFloat16, 4)), []int32{0, 1}, two), dispatch.ErrInvalid, "x has elements of bfloat16, want float32"},
			{dispatch.Tokens{X: x, Experts: memory.Wrap([]int64{0, 1})}, dispatch.ErrInvalid, "experts has elements of int64, want int32 (Options.IndexType)"},
			{dispatch.Tokens{X: x, Experts: memory.Wrap([]int32{0, 1}), Weights: memory.Wrap([]float64{1})}, dispatch.ErrInvalid, "weights has elements of float64, want float32"},
		} {
			_, err := d.Dispatch(nil, c.Tokens)
			require.ErrorIs(r, err, c.is)
			require.ErrorContains(r, err, c.text)
		}

		h, _, _, _ := dispatchSmall(r, d, nil, 2)
		_, err = d.Dispatch(nil, tokens(none, nil, nil))
		require.ErrorIs(r, err, dispatch.ErrNoHandle)
		require.ErrorContains(r, err, "all 1 are alive")

		require.ErrorIs(r, d.Combine(nil, x, h.Rows(), nil, plain), dispatch.ErrReleased)
		require.ErrorIs(r, d.Combine(nil, x, h.Rows(), foreign, plain), dispatch.ErrReleased)
		require.ErrorContains(r, d.Combine(nil, rowsFor(1), h.Rows(), h, plain), "y has 16 bytes, 2 tokens of 4 x float32 need 32")
		require.ErrorContains(r, d.Combine(nil, h.Rows(), h.Rows(), h, plain), "overlap")
		require.ErrorContains(r, d.Combine(nil, memory.Wrap(make([]float64, 8)), h.Rows(), h, plain), "y has elements of float64, want float32")
		require.Panics(r, func() { memory.Of[int64](h.Counts()) }, "counts are int32")
		require.ErrorIs(r, d.Combine(nil, x, freed.View(), h, plain), memory.ErrFreed)
		require.ErrorContains(r, d.DispatchBackward(nil, rowsFor(1), none, h.Rows(), none, h), "dx has 16 bytes")
		require.ErrorContains(r, d.CombineBackward(nil, h.Rows(), numbers(two), x, h.Rows(), h, plain), "dWeights has 8 bytes, 2 tokens with top-2 have 4 weights")
		for _, c := range []struct {
			o    dispatch.CombineOptions
			text string
		}{
			{dispatch.CombineOptions{SumWeights: numbers(two), Weights: numbers(two)}, "sum weights has 8 bytes, want 16"},
			{dispatch.CombineOptions{Weights: numbers(two)}, "there are weights, but CombineOptions.Weighting is dispatched weights"},
			{dispatch.CombineOptions{Weighting: 7}, "CombineOptions.Weighting is 7"},
			{dispatch.CombineOptions{Bias: [2]memory.View{none, rowsFor(1)}}, "bias 1 has 16 bytes, 2 tokens of 4 x float32 need 32"},
			{dispatch.CombineOptions{Ready: numbers(two[:1])}, "ready has 4 bytes, want 8"},
			{dispatch.CombineOptions{Weighting: dispatch.GivenWeights}, "CombineOptions.Weighting is given weights and CombineOptions.Weights is empty, for "},
			{dispatch.CombineOptions{Weighting: dispatch.GivenWeights, Weights: odd}, "weights is not aligned"},
			{dispatch.CombineOptions{Weighting: dispatch.GivenWeights, Weights: freed.View()}, "weights"},
		} {
			require.ErrorContains(r, d.Combine(nil, x, h.Rows(), h, c.o), c.text)
		}
		unweighted := dispatch.CombineOptions{Weighting: dispatch.Unweighted}
		require.ErrorContains(r, d.CombineBackward(nil, h.Rows(), numbers(make([]float32, 4)), x, h.Rows(), h, unweighted), "the rows are not weighted")
		ready := dispatch.CombineOptions{Ready: numbers(two)}
		require.ErrorContains(r, d.CombineBackward(nil, h.Rows(), none, x, h.Rows(), h, ready), "takes no options but")
		given := dispatch.CombineOptions{Weighting: dispatch.GivenWeights}
		require.ErrorContains(r, d.CombineBackward(nil, h.Rows(), none, x, h.Rows(), h, given), "CombineOptions.Weights is empty")
		require.ErrorContains(r, d.Redispatch(nil, h, rowsFor(1), none), "x has 16 bytes")
		require.ErrorContains(r, d.Redispatch(nil, h, h.Rows().Slice(0, 32), none), "overlap")
		require.ErrorIs(r, d.DispatchReceive(nil, h), dispatch.ErrHalf)
		require.ErrorIs(r, d.CombineReceive(nil, h), dispatch.ErrHalf)
		require.ErrorContains(r, d.CombineBackward(nil, h.Rows(), numbers(make([]float32, 4)), rowsFor(1), h.Rows(), h, plain), "dy has 16 bytes")
		big := rowsFor(20)
		require.ErrorContains(r, d.CombineBackward(nil, big.Slice(16, 160), numbers(make([]float32, 4)), x, big.Slice(0, 160), h, plain), "overlaps")

		require.NoError(r, d.Combine(nil, x, h.Rows(), h, plain))
		h.Release()
		h.Release()
		require.ErrorIs(r, d.Combine(nil, x, h.Rows(), h, plain), dispatch.ErrReleased)
		roundTrip(r, d, nil, 8)
		foreign.Release()
		require.NoError(r, other.Close(r.Ctx))
		require.NoError(r, d.Close(r.Ctx))
		require.NoError(r, d.Close(r.Ctx))
		_, err = d.Dispatch(nil, tokens(none, nil, nil))
		require.ErrorIs(r, err, dispatch.ErrClosed)
	})
}

// F3: ranks that were configured differently learn it from New, with both values.
func TestF3_OptionsAreCompared(t *testing.T) {
	local(t, 3, func(r *rank) {
		try := func(o dispatch.Options) error {
			_, err := dispatch.New(r.Ctx, r.Heap, o)
			return err
		}
		odd := r.Group.Rank() == 2
		o := small(dispatch.Options{})
		if odd {
			o.Hidden = 8
		}
		err := try(o)
		require.ErrorIs(r, err, comm.ErrMismatch)
		require.ErrorContains(r, err, "rank 0 has Hidden 4; rank 2 has Hidden 8")

		o = small(dispatch.Options{})
		if odd {
			o.Placement = &dispatch.Placement{Ranks: [][]int{{0}, {0}, {1}, {1, 2}}}
		}
		err = try(o)
		require.ErrorIs(r, err, comm.ErrMismatch)
		require.ErrorContains(r, err, "rank 0 has Placement 0:[0] 1:[0] 2:[1] 3:[2]; rank 2 has Placement 0:[0] 1:[0] 2:[1] 3:[1 2]")

		o = small(dispatch.Options{})
		if odd {
			o.Align = -1
		}
		err = try(o)
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		require.ErrorContains(r, err, "Options.Align is -1")
		require.NoError(r, r.Heap.Verify(r.Ctx))
	})
}

func TestBadOptions(t *testing.T) {
	local(t, 1, func(r *rank) {
		for _, c := range []struct {
			o    dispatch.Options
			text string
		}{
			{dispatch.Options{}, "Options.Experts is 0"},
			{dispatch.Options{Experts: 2, TopK: 65, Hidden: 1}, "Options.TopK is 65, want 1 to 64"},
			{dispatch.Options{Experts: 2, TopK: 1}, "Options.Hidden is 0"},
			{small(dispatch.Options{DType: kernels.Int32}), "Options.DType is int32"},
			{small(dispatch.Options{Layout: 9}), "Options.Layout is 9"},
			{small(dispatch.Options{Layout: dispatch.Padded, Capacity: 1 << 31}), "Options.Capacity is 2147483648, want 0 to 2147483647"},
			{small(dispatch.Options{Layout: dispatch.Padded, Capacity: 1<<62 + 8}), "Options.Capacity is 4611686018427387912"},
			{small(dispatch.Options{Layout: dispatch.Padded, Capacity: math.MaxInt32}), "rows in one call, at most 2147483647 can be counted"},
			{dispatch.Options{Experts: 1<<20 + 1, TopK: 1, Hidden: 1}, "Options.Experts is 1048577, want 1 to 1048576"},
			{dispatch.Options{Experts: 1 << 20, TopK: 1, Hidden: 1, Layout: dispatch.Slab, MaxTokens: math.MaxInt32, Align: math.MaxInt32}, "at most 2147483647 can be counted"},
			{dispatch.Options{Experts: 2, TopK: 1, Hidden: math.MaxInt32, MaxTokens: 1 << 20}, "are more than 2^46 elements: lower MaxTokens"},
			{dispatch.Options{Experts: 2, TopK: 1, Hidden: 1 << 10, Handles: 1 << 14, MaxTokens: 1 << 24}, "outputs of 16384 handles of"},
			{small(dispatch.Options{Handles: 1<<14 + 1}), "Options.Handles is 16385, want 1 to 16384"},
			{small(dispatch.Options{MaxRows: -1}), "Options.MaxRows is -1, want at least 0"},
			{small(dispatch.Options{Layout: dispatch.Slab, Capacity: 3}), "Options.Capacity is 3, but the layout is slab"},
			{small(dispatch.Options{Layout: dispatch.RankPadded, MaxRows: 3}), "Options.MaxRows is 3, but the layout is rank-padded"},
			{small(dispatch.Options{Layout: dispatch.TokenMajor, Landed: true}), "Options.Landed is set, but the layout is token-major"},
			{small(dispatch.Options{IndexType: kernels.Float32}), "Options.IndexType is float32"},
			{small(dispatch.Options{CombineDType: kernels.Float8E4M3}), "Options.CombineDType is float8_e4m3"},
			{small(dispatch.Options{DType: kernels.Float8E4M3, Quantize: true}), "DType is float8_e4m3 already"},
			{small(dispatch.Options{ScalePerToken: true}), "options for scales, but rows are float32"},
			{small(dispatch.Options{Quantize: true, ScaleFormat: 7}), "Options.ScaleFormat is 7"},
			{small(dispatch.Options{MaxSMs: -1}), "Options.MaxSMs is -1"},
			{small(dispatch.Options{Capacity: 3}), "Options.Capacity is 3, but the layout is flat"},
			{small(dispatch.Options{Layout: dispatch.Padded, Align: 2}), "Options.Align is 2, but the layout is padded"},
			{small(dispatch.Options{Handles: -1}), "Options.Handles is -1"},
			{small(dispatch.Options{Timeout: -1}), "Options.Timeout is -1ns"},
			{small(dispatch.Options{Placement: &dispatch.Placement{}}), "the placement has 0 experts, Options.Experts is 4"},
			{small(dispatch.Options{Placement: &dispatch.Placement{Ranks: [][]int{{0}, {0}, {}, {0}}}}), "expert 2 on no rank"},
			{small(dispatch.Options{Placement: &dispatch.Placement{Ranks: [][]int{{0}, {0}, {1}, {0}}}}), "expert 2 on rank 1 of 1"},
			{small(dispatch.Options{Placement: &dispatch.Placement{Ranks: [][]int{{0}, {0, 0}, {0}, {0}}}}), "expert 1 twice on rank 0"},
			{dispatch.Options{Experts: 8, TopK: 8, Hidden: 1, MaxTokens: 1 << 29}, "at most 2147483647 can be counted"},
		} {
			_, err := dispatch.New(r.Ctx, r.Heap, c.o)
			require.ErrorIs(r, err, dispatch.ErrInvalid)
			require.ErrorContains(r, err, c.text)
			require.Equal(r, 1, strings.Count(err.Error(), "invalid argument"), err)
		}
		_, err := dispatch.New(r.Ctx, nil, small(dispatch.Options{}))
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		require.ErrorContains(r, err, "the heap is nil")
	})
}

// One rank has no room where the others have, or has its room elsewhere.
func TestF3_OneRanksLackOfMemoryIsEveryRanksError(t *testing.T) {
	local(t, 3, func(r *rank) {
		odd := func(n int64) error {
			if r.Rank.Rank() == 1 {
				b, err := r.Heap.Alloc(n)
				require.NoError(r, err)
				defer func() { require.NoError(r, b.Free()) }()
			}
			_, err := dispatch.New(r.Ctx, r.Heap, small(dispatch.Options{}))
			return err
		}
		err := odd(r.Heap.Stats().LargestFree)
		require.ErrorIs(r, err, memory.ErrOutOfMemory)
		require.ErrorContains(r, err, "rank 1")
		err = odd(1000)
		require.ErrorIs(r, err, comm.ErrMismatch)
		require.ErrorContains(r, err, "offset")
		require.Zero(r, r.Heap.Stats().InUse)
	})
}

// F1, F2: a rank that does not come is named within the timeout; the dispatcher is then good for Close only.
func TestF1_AHungRankIsNamed(t *testing.T) {
	const timeout = 2 * time.Second
	var waited sync.WaitGroup
	waited.Add(2)
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Timeout: timeout}))
		roundTrip(r, d, nil, 3)
		if r.Group.Rank() == 1 {
			waited.Wait()
		} else {
			func() {
				defer waited.Done()
				start := time.Now()
				x, idx, weights := smallBatch(r, 2)
				_, err := d.Dispatch(nil, tokens(x, idx, weights))
				require.ErrorIs(r, err, comm.ErrTimeout)
				var peer *comm.PeerError
				require.ErrorAs(r, err, &peer)
				require.Equal(r, 1, peer.Rank)
				require.Equal(r, "dispatch", peer.Op)
				require.EqualValues(r, 3, peer.Epoch)
				require.Greater(r, time.Since(start), timeout*9/10)
				require.Less(r, time.Since(start), time.Minute)
				_, err = d.Dispatch(nil, tokens(x, idx, weights))
				require.ErrorIs(r, err, comm.ErrTimeout)
				require.ErrorContains(r, err, "an earlier call failed")
			}()
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

// F2: a dead rank ends the others' waits at once, in calls on a stream too.
func TestF2_ALostRankIsNamed(t *testing.T) {
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		st, err := device.Host().NewStream()
		require.NoError(r, err)
		h, _, _, _ := dispatchSmall(r, d, st, 2)
		if r.Group.Rank() == 1 {
			require.NoError(r, r.Group.Barrier(r.Ctx)) // the others wait in their combine
			r.Group.Kill()
		} else {
			require.NoError(r, d.Combine(st, rowsFor(2), h.Rows(), h, plain))
			_ = r.Group.Barrier(r.Ctx) // which rank 1's death may overtake
			start := time.Now()
			err = st.Synchronize()
			require.ErrorIs(r, err, comm.ErrPeerLost)
			require.ErrorContains(r, err, "rank 1")
			require.Less(r, time.Since(start), time.Minute)
			require.ErrorIs(r, d.Combine(nil, rowsFor(2), h.Rows(), h, plain), comm.ErrPeerLost)
		}
		require.NoError(r, st.Close())
		require.NoError(r, d.Close(r.Ctx))
	})
}

// A rank that is slow in every other call is waited for.
func TestSlowRank(t *testing.T) {
	local(t, 4, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		for i := range 12 {
			if i%4 == r.Group.Rank() {
				time.Sleep(10 * time.Millisecond)
			}
			roundTrip(r, d, nil, 1+i%8)
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

func TestManyRanks(t *testing.T) {
	local(t, 64, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		for i := range 3 {
			roundTrip(r, d, nil, (i+r.Group.Rank())%9)
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Calls on several streams and without one run in the order in which they were made.
func TestStreamsAreOrdered(t *testing.T) {
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Handles: 2}))
		var streams [3]device.Stream
		for i := range 2 {
			var err error
			streams[i], err = device.Host().NewStream()
			require.NoError(r, err)
		}
		x, idx, weights := smallBatch(r, 8)
		for i := range 30 {
			// Nothing is waited for between the calls.
			h, err := d.Dispatch(streams[i%3], tokens(x, idx, weights))
			require.NoError(r, err)
			y, rows := rowsFor(8), memory.Host(make([]byte, 16*d.MaxRows()))
			for j := range rows.Bytes() {
				rows.Bytes()[j] = byte(i) // the same number in all elements
			}
			require.NoError(r, d.Combine(streams[(i+i/3)%3], y, rows, h, plain))
			h.Release()
			if i%5 == 4 {
				for _, s := range streams[:2] {
					require.NoError(r, s.Synchronize())
				}
				want := wide(kernels.Float32, rows.Bytes()[:4])[0]
				for _, v := range wide(kernels.Float32, y.Bytes()) {
					require.Equal(r, 2*want, v)
				}
			}
		}
		require.NoError(r, d.Close(r.Ctx))
		for _, s := range streams[:2] {
			require.NoError(r, s.Close())
		}
	})
}

func TestPlacement(t *testing.T) {
	p := dispatch.Contiguous(10, 4)
	require.Equal(t, "0:[0] 1:[0] 2:[0] 3:[1] 4:[1] 5:[1] 6:[2] 7:[2] 8:[3] 9:[3]", p.String())
	require.Equal(t, []int{3, 4, 5}, p.Local(1))
	p = dispatch.Contiguous(2, 4)
	require.Equal(t, "0:[0] 1:[1]", p.String())
	require.Empty(t, p.Local(3))

	p = &dispatch.Placement{Ranks: [][]int{{2, 0, 1}}}
	load := map[int]int{}
	for token := range 30 {
		load[p.Rank(1, token, 0)]++
	}
	require.Equal(t, map[int]int{0: 10, 1: 10, 2: 10}, load, "tokens of one rank")
	load = map[int]int{}
	for src := range 3 {
		load[p.Rank(src, 0, 0)]++
	}
	require.Equal(t, map[int]int{0: 1, 1: 1, 2: 1}, load, "one token of every rank")
}

// The gradients are those of a loss, by central differences. Experts are squares, for which these are exact but for
// rounding; token t of a rank matters for row t of y alone, so all tokens are moved at once.
func TestGradientsNumerically(t *testing.T) {
	const eps = 1e-2
	o := dispatch.Options{Experts: 5, TopK: 3, Hidden: 6, MaxTokens: 9, DType: kernels.Float32, Align: 4, HostCounts: true}
	local(t, 3, func(r *rank) {
		d, n := r.dispatcher(o), 3
		b := randomBatch(rand.New(rand.NewPCG(11, 11)), o, n, false)
		me := r.Group.Rank()
		rng := rand.New(rand.NewPCG(1, uint64(me)))
		idx, weights, x, c := make([]int32, len(b.idx[me])), randomFloats(rng, len(b.idx[me])), randomFloats(rng, len(b.x[me])), b.dy[me]
		for i, e := range b.idx[me] {
			idx[i] = int32(e)
		}
		count := len(x) / o.Hidden
		s := &side{r: r, b: b, d: d}
		// eachElement calls f with every element of every row and its expert.
		eachElement := func(f func(e, i int)) {
			counts := r.counts(s.h)
			for slot, e := range s.h.LocalExperts() {
				first := int(counts.Offsets[slot]) * o.Hidden
				for i := range int(counts.Counts[slot]) * o.Hidden {
					f(e, first+i)
				}
			}
		}
		// losses is the inner product of y and c, token by token.
		losses := func(x, weights []float32) ([]float64, memory.View, []float32) {
			var err error
			s.h, err = d.Dispatch(nil, tokens(s.view(x), idx, weights))
			require.NoError(r, err)
			in := wide(o.DType, r.rows(s.h, 4*o.Hidden).Bytes())
			made := nans(len(in))
			eachElement(func(e, i int) { made[i] = in[i] * in[i] * float32(1+e) / 4 })
			rows := s.view(made)
			y := s.view(x)
			require.NoError(r, d.Combine(nil, y, rows, s.h, plain))
			sums := make([]float64, count)
			for i, v := range wide(o.DType, y.Bytes()) {
				sums[i/o.Hidden] += float64(v) * float64(c[i])
			}
			return sums, rows, in
		}
		moved := func(v []float32, at, stride int, by float32) []float32 {
			v = append([]float32(nil), v...)
			for i := at; i < len(v); i += stride {
				v[i] += by
			}
			return v
		}

		_, rows, in := losses(x, weights)
		dRows, dWeights := s.view(make([]float32, len(in))), make([]float32, len(weights))
		require.NoError(r, d.CombineBackward(nil, dRows, numbers(dWeights), s.view(c), rows, s.h, plain))
		grads := wide(o.DType, dRows.Bytes())
		eachElement(func(e, i int) { grads[i] *= 2 * in[i] * float32(1+e) / 4 })
		dx := s.view(x)
		require.NoError(r, d.DispatchBackward(nil, dx, none, s.view(grads), none, s.h))
		s.h.Release()

		check := func(name string, grad []float32, stride int, move func(at int, by float32) ([]float32, []float32)) {
			for at := range stride {
				up, _, _ := losses(move(at, eps))
				s.h.Release()
				down, _, _ := losses(move(at, -eps))
				s.h.Release()
				for t := range count {
					want := (up[t] - down[t]) / (2 * eps)
					require.InDelta(r, want, float64(grad[t*stride+at]), 1e-2*math.Max(1, math.Abs(want)), "%s, token %d, %d", name, t, at)
				}
			}
		}
		check("dx", wide(o.DType, dx.Bytes()), o.Hidden, func(at int, by float32) ([]float32, []float32) { return moved(x, at, o.Hidden, by), weights })
		check("dWeights", dWeights, o.TopK, func(at int, by float32) ([]float32, []float32) { return x, moved(weights, at, o.TopK, by) })
		require.NoError(r, d.Close(r.Ctx))
	})
}

// The data plane allocates nothing once warm.
func TestNoAllocationOnceWarm(t *testing.T) {
	for _, dtype := range []kernels.DType{kernels.Float32, kernels.BFloat16} {
		local(t, 2, func(r *rank) {
			o := small(dispatch.Options{DType: dtype, Placement: dispatch.Contiguous(4, 2)})
			o.TopK = 4
			d := r.dispatcher(o)
			b := randomBatch(rand.New(rand.NewPCG(5, 5)), o, 2, false)
			me := r.Group.Rank()
			x, dy := memory.Host(narrow(dtype, b.x[me])), memory.Host(narrow(dtype, b.dy[me]))
			idx := make([]int32, len(b.idx[me]))
			for i, e := range b.idx[me] {
				idx[i] = int32(e)
			}
			y, dw := memory.Host(make([]byte, x.Len())), numbers(make([]float32, len(idx)))
			rows := memory.Host(make([]byte, int64(d.MaxRows())*int64(o.Hidden)*dtype.Size()))
			in := tokens(x, idx, b.weights[me])
			step := func() {
				h, err := d.DispatchSend(nil, in)
				if err == nil {
					err = d.DispatchReceive(nil, h)
				}
				if err == nil {
					_, err = h.HostCounts(r.Ctx)
				}
				if err == nil {
					err = d.Combine(nil, y, rows, h, plain)
				}
				if err == nil {
					err = d.CombineBackward(nil, rows, dw, dy, rows, h, plain)
				}
				if err == nil {
					err = d.DispatchBackward(nil, y, none, rows, none, h)
				}
				if err != nil {
					panic(err)
				}
				h.Release()
			}
			r.AllocatesNothing(step)
			require.NoError(r, d.Close(r.Ctx))
		})
	}
}
