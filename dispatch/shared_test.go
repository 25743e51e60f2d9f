package dispatch_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// alone is how much memory for rows a dispatcher wants.
func (r *rank) alone(o dispatch.Options) int64 {
	var s dispatch.Shared
	o.Shared = &s
	d := r.dispatcher(o)
	n := s.Bytes()
	require.NoError(r, d.Close(r.Ctx))
	require.Zero(r, s.Bytes())
	return n
}

// shapes are dispatchers that take turns, made one after the other while the others make calls.
type shapes struct {
	r       *rank
	s       dispatch.Shared
	d       []*dispatch.Dispatcher
	o       []dispatch.Options
	largest int64
}

func (x *shapes) add(o dispatch.Options) {
	if !o.OwnRows {
		x.largest = max(x.largest, x.r.alone(o))
	}
	o.Shared = &x.s
	x.d, x.o = append(x.d, x.r.dispatcher(o)), append(x.o, o)
	require.Equal(x.r, x.largest, x.s.Bytes(), "the memory is that of the largest")
}

// A dispatch with what its rows are for, between calls of the others: some ranks are slow, some calls go by routings that are kept.
func (x *shapes) call(rng, own *rand.Rand, stream device.Stream) {
	r := x.r
	begin := func() *side {
		i := rng.IntN(len(x.d))
		s := &side{r: r, d: x.d[i], b: randomBatch(rng, x.o[i], r.Size(), false), halves: x.o[i].OwnRows && rng.IntN(2) == 0}
		s.dispatch(stream)
		return s
	}
	s := begin()
	s.checkRows()
	if rng.IntN(3) == 0 {
		next := *s.b
		other := randomBatch(rng, s.b.o, r.Size(), false)
		for src := range next.x {
			next.x[src] = append(other.x[src], next.x[src]...)[:len(next.x[src])]
			next.scales[src] = append(other.scales[src], next.scales[src]...)[:len(next.scales[src])]
		}
		s.redispatch(stream, &next)
		s.checkRows()
	}
	_, came := s.place(s.b.groups(s.me()))
	s.checkCopy(stream, own.IntN(came+3))
	if rng.IntN(3) == 0 {
		s.h.Release()
		s.b = randomBatch(rng, s.b.o, r.Size(), false)
		length := own.IntN(came + 3)
		if own.IntN(2) == 0 {
			length = s.d.MaxRows() // all rows are looked at
		}
		if s.dispatchTo(stream, length) {
			s.checkRows()
		}
	}
	if own.IntN(4) == 0 {
		time.Sleep(time.Duration(own.IntN(400)) * time.Microsecond)
	}
	var between []*side
	for range rng.IntN(3) {
		between = append(between, begin())
	}
	if rng.IntN(3) == 0 {
		s.reroute(stream)
	}
	for _, s := range append(between, s) {
		c := combineWith{weighting: dispatch.Weighting(rng.IntN(4)), sums: rng.IntN(3) == 0, ready: rng.IntN(4) == 0, biases: rng.IntN(3)}
		if s.b.byToken() {
			c.weighting = 0
		}
		rows := s.view(s.ownMade())
		s.combine(stream, rows, c)
		if c.weighting == dispatch.TokenWeights {
			c.weighting = dispatch.GivenWeights
		}
		if rng.IntN(2) == 0 {
			s.combineBackward(stream, s.view(nans(len(s.ownMade()))), rows, c)
		}
		if rng.IntN(2) == 0 {
			s.dispatchBackward(stream, s.view(s.made(func(q routed) []float32 { return s.b.dMade(s.me(), q) })), rng.IntN(2) == 0)
		}
		s.h.Release()
	}
}

// takeTurns makes calls of random dispatchers that share memory, which grows meanwhile.
func takeTurns(r *rank, seed uint64, count, calls int) {
	stream := r.stream()
	for i := range uint64(count) {
		rng, own := rand.New(rand.NewPCG(seed+i, 3)), rand.New(rand.NewPCG(seed+i, uint64(r.Rank.Rank())+50))
		before := r.Heap.Stats().InUse
		x := &shapes{r: r}
		for len(x.d) < 4 {
			o := randomOptions(rng, r.Size(), r.Device.Kind())
			o.Handles, o.MaxSMs, o.OwnRows = 3, 0, len(x.d) > 0 && rng.IntN(3) == 0 && r.Device.Kind() == device.HostKind
			if o.Layout == dispatch.Slab {
				o.MaxTokens = min(o.MaxTokens, 16)
			}
			x.add(o)
			for range calls {
				if r.gpu != nil {
					r.gpu.reuse()
				}
				st := stream
				if own.IntN(3) == 0 {
					st = nil
				}
				x.call(rng, own, st)
			}
		}
		for _, d := range x.d {
			require.NoError(r, d.Close(r.Ctx))
		}
		require.Equal(r, before, r.Heap.Stats().InUse)
	}
	require.NoError(r, stream.Close())
}

func TestDispatchersThatShareMemoryTakeTurns(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			local(t, n, func(r *rank) { takeTurns(r, uint64(100*n), 3, 3) })
		})
	}
}

func TestDispatchersOfProcessesThatShareMemoryTakeTurns(t *testing.T) {
	processes(t, 2, func(r *rank) { takeTurns(r, 7, 2, 2) })
}

// As large as the largest, in bytes: eight dispatchers of one size want what one does, but for their words.
func TestSharedMemoryIsThatOfTheLargest(t *testing.T) {
	local(t, 2, func(r *rank) {
		o := dispatch.Options{Experts: 8, TopK: 2, Hidden: 512, MaxTokens: 256, DType: kernels.BFloat16, Layout: dispatch.TokenMajor, Handles: 1}
		x := &shapes{r: r}
		x.add(o)
		one := r.Heap.Stats().InUse
		for hidden := range 7 {
			o.Hidden = 512 - 8*hidden
			x.add(o)
		}
		words := (r.Heap.Stats().InUse - one) / 7
		require.Less(r, words, x.s.Bytes()/20)
		o.MaxTokens *= 20 // a rank comes with 20 times as many
		x.add(o)
		require.Greater(r, x.s.Bytes(), 18*x.largest/20)
		s := &side{r: r, d: x.d[8], b: batchOf(rand.New(rand.NewPCG(1, 1)), o, []int{0, o.MaxTokens}, false, true)}
		s.dispatch(nil)
		s.checkRows()
		s.combine(nil, s.view(s.ownMade()), combineWith{})
		s.h.Release()
		for _, d := range x.d {
			require.NoError(r, d.Close(r.Ctx))
		}
	})
}

// Views of what another dispatcher has overwritten are refused, before anything is enqueued.
func TestWhatAnotherDispatcherHasOverwrittenIsRefused(t *testing.T) {
	local(t, 2, func(r *rank) {
		x := &shapes{r: r}
		x.add(small(dispatch.Options{Layout: dispatch.TokenMajor}))
		x.add(small(dispatch.Options{}))
		h, input, idx, _ := dispatchSmall(r, x.d[0], nil, 2)
		rows, copied := h.Rows().Slice(0, 16*int64(r.counts(h).Rows)), rowsFor(r.counts(h).Rows)
		_, err := h.CopyTo(nil, dispatch.Result{Length: r.counts(h).Rows, Rows: copied})
		require.NoError(r, err)
		require.NoError(r, x.d[0].Combine(nil, r.empty(2), rows, h, plain))
		roundTrip(r, x.d[1], nil, 3)
		for _, call := range []func() error{
			func() error { return x.d[0].Combine(nil, r.empty(2), rows, h, plain) },
			func() error { return x.d[0].Redispatch(nil, h, rows.Slice(0, 32), none) },
			func() error { return x.d[0].CombineBackward(nil, copied, none, r.empty(2), rows, h, plain) },
			func() error {
				_, err := h.CopyTo(nil, dispatch.Result{Length: 1, Rows: rowsFor(1)})
				return err
			},
			func() error {
				_, err := h.CopyTo(nil, dispatch.Result{Length: 1, Indices: memory.Host(make([]byte, 16))})
				return err
			},
			func() error {
				_, err := x.d[0].Dispatch(nil, dispatch.Tokens{X: rows.Slice(0, 32), Experts: numbers(idx)})
				return err
			},
		} {
			err := call()
			require.ErrorIs(r, err, dispatch.ErrInvalid)
			require.ErrorContains(r, err, "lies in Options.Shared, where another dispatcher has made a call since: copy results before")
		}
		require.NoError(r, x.d[0].Combine(nil, r.empty(2), copied, h, plain))
		require.NoError(r, x.d[0].Redispatch(nil, h, input, none)) // which writes them again, but for indices
		require.NoError(r, x.d[0].Combine(nil, r.empty(2), rows, h, plain))
		_, err = h.CopyTo(nil, dispatch.Result{Length: 1, Indices: memory.Host(make([]byte, 16))})
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		_, err = x.d[0].DispatchSend(nil, r.tokens(input, idx, nil))
		require.ErrorIs(r, err, comm.ErrUnsupported)
		require.ErrorIs(r, x.d[0].CombineSend(nil, r.empty(2), copied, h, plain), comm.ErrUnsupported)
		require.ErrorIs(r, x.d[0].RedispatchSend(nil, h, input, none), comm.ErrUnsupported)
		h.Release()
		for _, d := range x.d {
			require.NoError(r, d.Close(r.Ctx))
		}
	})
}

// Ranks in calls of different dispatchers hear of both, nothing moves, and the next right call works: also where one of them, or each, has memory
// of its own.
func TestRanksInCallsOfDifferentDispatchersHearOfBoth(t *testing.T) {
	for own := range 4 {
		first, second := own&1 != 0, own&2 != 0
		t.Run(fmt.Sprintf("own rows %v, %v", first, second), func(t *testing.T) {
			local(t, 3, func(r *rank) { inDifferentCalls(r, first, second) })
		})
	}
}

func inDifferentCalls(r *rank, first, second bool) {
	st := r.stream()
	x := &shapes{r: r}
	x.add(small(dispatch.Options{OwnRows: first}))
	o := small(dispatch.Options{OwnRows: second, Layout: dispatch.TokenMajor})
	o.Experts, o.MaxTokens = 9, 20
	x.add(o)
	kept, _, _, _ := dispatchSmall(r, x.d[1], nil, 2)
	for range 3 {
		wrong := x.d[0]
		if r.Rank.Rank() == 1 {
			wrong = x.d[1]
		}
		input, idx, _ := smallBatch(r, 2)
		calls := []func() (*dispatch.Handle, error){func() (*dispatch.Handle, error) { return wrong.Dispatch(nil, r.tokens(input, idx, nil)) }}
		if first && second {
			calls = append(calls, func() (*dispatch.Handle, error) { return wrong.DispatchSend(nil, r.tokens(input, idx, nil)) })
		}
		for _, call := range calls {
			_, err := call()
			var order *kernels.OrderError
			require.ErrorAs(r, err, &order)
			require.Equal(r, 1, order.Rank)
			require.ErrorIs(r, err, comm.ErrMismatch)
			require.ErrorContains(r, err, "(Experts 4, MaxTokens 8, ")
			require.ErrorContains(r, err, "(Experts 9, MaxTokens 20, ")
		}
		require.NoError(r, x.d[1].Combine(nil, r.empty(2), rowsFor(r.counts(kept).Rows), kept, plain))
		roundTrip(r, x.d[0], st, 2)
		roundTrip(r, x.d[1], st, 1)
	}
	kept.Release()
	for _, d := range x.d {
		require.NoError(r, d.Close(r.Ctx))
	}
	require.Zero(r, r.Heap.Stats().InUse)
}

// Ranks that do not make the same dispatcher hear why, and the next one is made.
func TestRanksThatShareMemoryMakeTheSameDispatchers(t *testing.T) {
	local(t, 2, func(r *rank) {
		odd := r.Rank.Rank() == 1
		x := &shapes{r: r}
		x.add(small(dispatch.Options{}))
		var another dispatch.Shared
		for _, c := range []struct {
			what string
			is   error
			odd  func(o *dispatch.Options)
		}{
			{"Hidden 4; rank 1 has Hidden 8", comm.ErrMismatch, func(o *dispatch.Options) { o.Hidden = 8 }},
			{"OwnRows false; rank 1 has OwnRows true", comm.ErrMismatch, func(o *dispatch.Options) { o.OwnRows = true }},
			{"made with this Options.Shared", comm.ErrMismatch, func(o *dispatch.Options) { o.Shared = &another }},
			{"", comm.ErrMismatch, func(o *dispatch.Options) { o.Shared = nil }},
			{"TopK is 65", dispatch.ErrInvalid, func(o *dispatch.Options) { o.TopK = 65 }},
			{"Shared and Masks are both set", dispatch.ErrInvalid, func(o *dispatch.Options) { o.Masks = true }},
		} {
			o := small(dispatch.Options{Shared: &x.s})
			o.MaxTokens = 4000
			if odd {
				c.odd(&o)
			}
			_, err := dispatch.New(r.Ctx, r.Heap, o)
			require.ErrorIs(r, err, c.is, c.what)
			if !strings.Contains(c.what, "this Options.Shared") || odd {
				require.ErrorContains(r, err, c.what)
			}
			require.Equal(r, x.largest, x.s.Bytes())
			require.Zero(r, another.Bytes())
			roundTrip(r, x.d[0], nil, 2)
		}
		_, err := dispatch.New(r.Ctx, r.Heap, small(dispatch.Options{OwnRows: true}))
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		require.ErrorContains(r, err, "Options.OwnRows is set without Shared")
		x.add(small(dispatch.Options{Layout: dispatch.TokenMajor}))
		roundTrip(r, x.d[1], nil, 2)
		for _, d := range x.d {
			require.NoError(r, d.Close(r.Ctx))
		}
		require.Zero(r, r.Heap.Stats().InUse)
	})
}

// Without room for more, the memory stays as it was, on all ranks.
func TestSharedMemoryStaysWhereItCannotGrow(t *testing.T) {
	local(t, 2, func(r *rank) {
		x := &shapes{r: r}
		x.add(small(dispatch.Options{}))
		o := small(dispatch.Options{Shared: &x.s})
		o.Hidden, o.MaxTokens = 1<<27, 1<<12
		_, err := dispatch.New(r.Ctx, r.Heap, o)
		require.ErrorIs(r, err, memory.ErrOutOfMemory)
		require.Equal(r, x.largest, x.s.Bytes())
		roundTrip(r, x.d[0], nil, 2)
		require.NoError(r, x.d[0].Close(r.Ctx))
		require.Zero(r, r.Heap.Stats().InUse)
	})
}

// Ranks of which one is in a call and another makes a dispatcher hear of both at once, nothing moves, and the next right call works. Results that are
// alive stay, also where they are between halves.
func TestRanksInACallAndInNewHearOfBoth(t *testing.T) {
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprintf("own rows %v", own), func(t *testing.T) {
			local(t, 3, func(r *rank) { inACallAndInNew(r, own) })
		})
	}
}

func inACallAndInNew(r *rank, own bool) {
	st := r.stream()
	x := &shapes{r: r}
	x.add(small(dispatch.Options{OwnRows: own}))
	kept, _, _, _ := dispatchSmall(r, x.d[0], nil, 2)
	var half *dispatch.Handle
	input, idx, _ := smallBatch(r, 2)
	if own {
		var err error
		half, err = x.d[0].DispatchSend(nil, r.tokens(input, idx, nil))
		require.NoError(r, err)
	}
	inUse, me := r.Heap.Stats().InUse, r.Rank.Rank()
	other := small(dispatch.Options{Shared: &x.s, Layout: dispatch.TokenMajor, DType: kernels.BFloat16})
	other.Experts, other.Hidden = 9, 8
	bad := slices.Clone(idx)
	bad[1] = 99
	on := func(s device.Stream, idx []int32) error {
		h, err := x.d[0].Dispatch(s, r.tokens(input, idx, nil))
		if s != nil && err == nil {
			err = s.Synchronize()
		}
		if h != nil {
			h.Release()
		}
		return err
	}
	for i, call := range []func() error{
		func() error { return on(nil, idx) },
		func() error { return on(r.stream(), idx) },
		func() error { return on(nil, bad) },
		func() error { return x.d[0].Combine(nil, r.empty(2), r.rows(kept, 16), kept, plain) },
	} {
		all := 1<<r.Size() - 1
		for makes := 1; makes <= all; makes++ {
			var err error
			if makes>>me&1 != 0 {
				o := other
				if makes == all && me == 2 {
					o.Hidden = 16
				}
				_, err = dispatch.New(r.Ctx, r.Heap, o)
			} else {
				err = call()
			}
			require.ErrorIs(r, err, comm.ErrMismatch, "call %d", i)
			if makes == all {
				require.ErrorContains(r, err, "rank 0 has Hidden 8; rank 2 has Hidden 16")
			} else {
				var order *kernels.OrderError
				require.ErrorAs(r, err, &order)
				require.ErrorContains(r, err, "in the making of a dispatcher (Experts 9, Hidden 8, DType bfloat16, ")
				require.ErrorContains(r, err, " (Experts 4, Hidden 4, DType float32, ")
			}
			require.Equal(r, inUse, r.Heap.Stats().InUse)
			roundTrip(r, x.d[0], st, 2)
		}
	}
	for range 2 { // another call of the control plane
		var err error
		if me == 1 {
			err = r.Heap.Grow(r.Ctx, 1<<20)
		} else {
			_, err = dispatch.New(r.Ctx, r.Heap, other)
		}
		require.ErrorIs(r, err, comm.ErrMismatch)
		require.NoError(r, r.Group.Barrier(r.Ctx))
		roundTrip(r, x.d[0], st, 2)
	}
	require.NoError(r, x.d[0].Combine(nil, r.empty(2), rowsFor(r.counts(kept).Rows), kept, plain))
	if own {
		require.NoError(r, x.d[0].DispatchReceive(nil, half))
		half.Release()
	}
	kept.Release()
	x.add(dispatch.Options{Experts: 6, TopK: 2, Hidden: 4, MaxTokens: 8, OwnRows: !own})
	roundTrip(r, x.d[0], st, 2)
	for _, d := range x.d {
		require.NoError(r, d.Close(r.Ctx))
	}
	require.Zero(r, r.Heap.Stats().InUse)
}

// A rank can come with fewer tokens than others, and all have room for the most. All else is compared as without it.
func TestRanksAgreeOnTheMostTokens(t *testing.T) {
	local(t, 3, func(r *rank) {
		o := small(dispatch.Options{Layout: dispatch.TokenMajor, AgreeMaxTokens: true})
		o.MaxTokens = []int{3, 40, 5}[r.Rank.Rank()]
		d := r.dispatcher(o)
		require.Equal(r, 40, d.MaxTokens())
		require.Equal(r, 120, d.MaxRows())
		roundTrip(r, d, nil, 40)
		require.NoError(r, d.Close(r.Ctx))
		for _, c := range []struct {
			want string
			odd  func(o *dispatch.Options)
		}{
			{"MaxTokens 3, AgreeMaxTokens true, MaxRows 9; rank 1 has MaxTokens 40, AgreeMaxTokens false, MaxRows 120", func(o *dispatch.Options) { o.AgreeMaxTokens = false }},
			{"rank 0 has MaxRows 120; rank 1 has MaxRows 100", func(o *dispatch.Options) { o.MaxRows = 100 }},
			{"rank 0 has Hidden 4; rank 1 has Hidden 8", func(o *dispatch.Options) { o.Hidden = 8 }},
		} {
			o := o
			if r.Rank.Rank() == 1 {
				c.odd(&o)
			}
			_, err := dispatch.New(r.Ctx, r.Heap, o)
			require.ErrorIs(r, err, comm.ErrMismatch)
			require.ErrorContains(r, err, c.want)
		}
		require.Zero(r, r.Heap.Stats().InUse)
	})
}
