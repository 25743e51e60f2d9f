package dispatch_test

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Experts move: later dispatches go to their new places, a handle of before stays good.
func TestSetPlacement(t *testing.T) {
	first := &dispatch.Placement{Ranks: [][]int{{0}, {0, 1}, {1}, {2}, {2}}}
	second := &dispatch.Placement{Ranks: [][]int{{2}, {1}, {0, 1}, {2}, {0}}}
	o := dispatch.Options{Experts: 5, TopK: 3, Hidden: 8, MaxTokens: 20, Align: 4, Placement: first, HostCounts: true, Handles: 2}
	local(t, 3, func(r *rank) {
		d := r.dispatcher(o)
		require.Equal(r, first, d.Placement())
		rng := rand.New(rand.NewPCG(4, 4))
		before := &side{r: r, d: d, b: randomBatch(rng, o, 3, false)}
		before.dispatch(nil)

		st := r.stream()
		pending := &side{r: r, d: d, b: randomBatch(rng, o, 3, false)}
		h, err := d.Dispatch(st, pending.tokens()) // which SetPlacement waits for
		require.NoError(r, err)
		pending.h = h
		require.NoError(r, d.SetPlacement(r.Ctx, second))
		require.Equal(r, second, d.Placement())
		pending.checkRows()
		h.Release()

		moved := o
		moved.Placement = second
		after := &side{r: r, d: d, b: randomBatch(rng, moved, 3, false)}
		after.dispatch(nil)
		for _, s := range []*side{before, after} {
			s.checkRows()
			s.combine(nil, s.view(s.ownMade()), combineWith{})
			s.h.Release()
		}

		err = d.SetPlacement(r.Ctx, &dispatch.Placement{Ranks: [][]int{{0}, {0}, {0}, {1}, {2}}})
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		require.ErrorContains(r, err, "slots [0 3 4 5], the dispatcher was made with [0 2 4 6]")
		require.ErrorIs(r, d.SetPlacement(r.Ctx, nil), dispatch.ErrInvalid)
		odd := first
		if r.Group.Rank() == 1 {
			odd = second
		}
		require.ErrorIs(r, d.SetPlacement(r.Ctx, odd), comm.ErrMismatch)
		require.Equal(r, second, d.Placement())
		require.NoError(r, st.Close())
		require.NoError(r, d.Close(r.Ctx))
		require.ErrorIs(r, d.SetPlacement(r.Ctx, first), dispatch.ErrClosed)
	})
}

// Counters say what each expert was asked for, what crossed, and who was waited for.
func TestCounters(t *testing.T) {
	const late = 400 * time.Millisecond
	local(t, 3, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Placement: &dispatch.Placement{Ranks: [][]int{{0}, {1}, {2}, {2}}}}))
		require.NoError(r, r.Group.Barrier(r.Ctx))
		if r.Group.Rank() == 1 {
			time.Sleep(late)
		}
		roundTrip(r, d, nil, 5) // experts 0 and 3
		c := r.counters(d)
		require.Equal(r, []int64{5, 0, 0, 5}, c.Choices)
		sent := []int64{80, 0, 80} // 5 rows to experts 0 and 3
		switch r.Group.Rank() {
		case 0, 2: // 15 rows came from all ranks and were read again
			for p := range sent {
				sent[p] += 80
			}
		}
		require.Equal(r, sent, c.Bytes)
		if r.Group.Rank() != 1 {
			require.Greater(r, c.Waited[1], late/8)
			require.Less(r, c.Waited[1], 100*late)
		}
		require.Zero(r, c.Waited[r.Group.Rank()])
		require.NoError(r, d.Close(r.Ctx))
		_, err := d.Counters()
		require.ErrorIs(r, err, dispatch.ErrClosed)
	})
}

// Micro-batches are under way at the same time, between the halves of their calls, and do not touch each other.
func TestHalvesOfSeveralHandlesInterleave(t *testing.T) {
	for _, layout := range layouts {
		t.Run(layout.String(), func(t *testing.T) { interleave(t, layout, 1) })
		t.Run(layout.String()+" of two in one order", func(t *testing.T) { interleave(t, layout, 2) })
	}
}

func interleave(t *testing.T, layout dispatch.Layout, dispatchers int) {
	o := dispatch.Options{Experts: 6, TopK: 2, Hidden: 12, MaxTokens: 6, Layout: layout, DType: kernels.BFloat16, Handles: 3, HostCounts: true}
	local(t, 3, func(r *rank) {
		st := r.stream()
		var order dispatch.Shared
		var all []*dispatch.Dispatcher
		for range dispatchers {
			o := o
			if dispatchers > 1 {
				o.Shared, o.OwnRows = &order, true
			}
			all = append(all, r.dispatcher(o))
		}
		streams := []device.Stream{nil, st}
		rng, own := rand.New(rand.NewPCG(6, uint64(layout))), rand.New(rand.NewPCG(7, uint64(r.Group.Rank())))
		nap := func() {
			if own.IntN(8) == 0 {
				time.Sleep(time.Duration(own.IntN(200)) * time.Microsecond)
			}
		}
		// Each rank draws the streams for itself, all draw the same order of calls.
		for range 60 {
			type flight struct {
				*side
				y     memory.View
				stage int
				rows  memory.View
			}
			var flights []*flight
			for range 3 {
				flights = append(flights, &flight{side: &side{r: r, d: all[rng.IntN(dispatchers)], b: randomBatch(rng, o, 3, false)}})
			}
			var err error
			for left := 4 * len(flights); left > 0; {
				f := flights[rng.IntN(len(flights))]
				if f.stage == 4 {
					continue
				}
				s := streams[own.IntN(2)]
				nap()
				switch f.stage {
				case 0:
					f.h, err = f.d.DispatchSend(s, f.tokens())
				case 1:
					err = f.d.DispatchReceive(s, f.h)
					f.sync(s)
					f.checkRows()
					f.rows = f.view(f.ownMade())
				case 2:
					f.y = f.view(nans(len(f.b.dy[f.me()])))
					err = f.d.CombineSend(s, f.y, f.rows, f.h, plain)
				case 3:
					err = f.d.CombineReceive(s, f.h)
					f.sync(s)
					got := wide(kernels.BFloat16, f.y.Bytes())
					for i := range f.b.tokens(f.me()) {
						require.Equal(r, f.b.combined(f.me(), i, f.b.weight, f.b.made), got[i*o.Hidden:][:o.Hidden])
					}
					f.h.Release()
				}
				require.NoError(r, err)
				f.stage++
				left--
			}
		}
		require.NoError(r, st.Close())
		for _, d := range all {
			require.NoError(r, d.Close(r.Ctx))
		}
	})
}

// A second half needs a first, and between the halves a handle can be used for nothing else.
func TestHalvesPairUp(t *testing.T) {
	local(t, 2, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Handles: 1}))
		x, idx, weights := smallBatch(r, 3)
		h, err := d.DispatchSend(nil, tokens(x, idx, weights))
		require.NoError(r, err)
		y := rowsFor(3)
		err = d.Combine(nil, y, h.Rows(), h, plain)
		require.ErrorIs(r, err, dispatch.ErrHalf)
		require.ErrorContains(r, err, "the handle is in a dispatch, of which the second half is missing")
		require.ErrorIs(r, d.CombineReceive(nil, h), dispatch.ErrHalf)
		require.ErrorIs(r, d.RedispatchSend(nil, h, x, none), dispatch.ErrHalf)
		require.NoError(r, d.DispatchReceive(nil, h))
		require.ErrorIs(r, d.DispatchReceive(nil, h), dispatch.ErrHalf)
		require.NoError(r, d.CombineSend(nil, y, h.Rows(), h, plain))
		require.ErrorIs(r, d.DispatchReceive(nil, h), dispatch.ErrHalf)
		require.NoError(r, d.CombineReceive(nil, h))
		h.Release()
		require.ErrorIs(r, d.CombineReceive(nil, h), dispatch.ErrReleased)

		h, err = d.DispatchSend(nil, tokens(x, idx, weights))
		require.NoError(r, err)
		require.NoError(r, r.Group.Barrier(r.Ctx))
		h.Release() // on all ranks: what has been sent is dropped
		roundTrip(r, d, nil, 4)

		// A first half that failed has no second, without a stream; on one the second fails as well.
		st := r.stream()
		bad := tokens(x, []int32{0, 1, 9, 0, 0, 0}, weights)
		_, err = d.DispatchSend(nil, bad)
		var index *dispatch.IndexError
		require.ErrorAs(r, err, &index)
		h, err = d.DispatchSend(st, bad)
		require.NoError(r, err)
		require.ErrorAs(r, st.Synchronize(), &index)
		require.NoError(r, d.DispatchReceive(st, h))
		require.ErrorAs(r, st.Synchronize(), &index)
		h.Release()
		roundTrip(r, d, st, 4)
		require.NoError(r, st.Close())
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Calls that are given up between their halves leave nothing behind, however late the ranks are.
func TestHalvesGivenUp(t *testing.T) {
	o := small(dispatch.Options{Handles: 1, Landed: true})
	local(t, 3, func(r *rank) {
		d := r.dispatcher(o)
		own := rand.New(rand.NewPCG(1, uint64(r.Group.Rank())))
		for round := range 150 {
			x, idx, weights := smallBatch(r, 1+round%8)
			for range 2 {
				h, err := d.DispatchSend(nil, tokens(x, idx, weights))
				require.NoError(r, err)
				h.Release()
				if own.IntN(4) == 0 {
					time.Sleep(time.Duration(own.IntN(100)) * time.Microsecond)
				}
			}
			h, err := d.Dispatch(nil, tokens(x, idx, weights))
			require.NoError(r, err)
			landed := shm.View[uint32](h.Landed().Bytes())
			for i, n := range r.counts(h).Counts {
				require.EqualValues(r, n, landed[i])
			}
			require.NoError(r, d.CombineSend(nil, rowsFor(1+round%8), h.Rows(), h, plain))
			h.Release()
			roundTrip(r, d, nil, 3)
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

// A choice that is no expert is an error on every rank, with the entry, and the next call works.
func TestIndexErrorOnEveryRank(t *testing.T) {
	for _, index := range []kernels.DType{kernels.Int32, kernels.Int64} {
		local(t, 3, func(r *rank) {
			d := r.dispatcher(small(dispatch.Options{IndexType: index}))
			for _, e := range []int64{4, -2, math.MaxInt32} {
				idx := []int64{0, 3, 1, 2, 0, 0}
				if r.Group.Rank() == 1 {
					idx[3] = e
				}
				in := dispatch.Tokens{X: rowsFor(3), Experts: numbers(idx)}
				if index == kernels.Int32 {
					short := make([]int32, len(idx))
					for i := range idx {
						short[i] = int32(idx[i])
					}
					in.Experts = numbers(short)
				}
				_, err := d.Dispatch(nil, in)
				var bad *dispatch.IndexError
				require.ErrorAs(r, err, &bad)
				require.Equal(r, dispatch.IndexError{Call: bad.Call, Rank: 1, Token: 1, Choice: 1, Expert: e, Experts: 4}, *bad)
			}
			if index == kernels.Int32 {
				roundTrip(r, d, nil, 5)
			}
			require.NoError(r, d.Close(r.Ctx))
		})
	}
}

// Counts are there for the host before the rows are, and waiting for them ends when the dispatch fails or the caller gives up.
func TestHostCounts(t *testing.T) {
	local(t, 2, func(r *rank) {
		d, st := r.dispatcher(small(dispatch.Options{Align: 4})), r.stream()
		x, idx, weights := smallBatch(r, 3)
		h, err := d.DispatchSend(st, tokens(x, idx, weights))
		require.NoError(r, err)
		c, err := h.HostCounts(r.Ctx)
		require.NoError(r, err)
		require.Equal(r, 8, c.Rows)
		require.Equal(r, [][]int32{{6, 0}, {0, 6}}[r.Group.Rank()], c.Counts)
		require.Equal(r, [][]int32{{0, 8, 8}, {0, 0, 8}}[r.Group.Rank()], c.Offsets)
		require.Equal(r, []int32{3, 3}, c.RankCounts)
		require.NoError(r, d.DispatchReceive(st, h))
		require.NoError(r, st.Synchronize())
		h.Release()
		_, err = h.HostCounts(r.Ctx)
		require.ErrorIs(r, err, dispatch.ErrReleased)

		idx[0] = 77
		h, err = d.Dispatch(st, tokens(x, idx, weights))
		require.NoError(r, err)
		_, err = h.HostCounts(r.Ctx)
		var index *dispatch.IndexError
		require.ErrorAs(r, err, &index)
		require.ErrorAs(r, st.Synchronize(), &index)
		h.Release()

		idx[0] = 0
		if r.Group.Rank() == 0 { // the other rank is late
			h, err = d.Dispatch(st, tokens(x, idx, weights))
			require.NoError(r, err)
			ctx, cancel := context.WithTimeout(r.Ctx, 10*time.Millisecond)
			_, err = h.HostCounts(ctx)
			require.ErrorIs(r, err, context.DeadlineExceeded)
			cancel()
			require.NoError(r, r.Group.Barrier(r.Ctx))
		} else {
			require.NoError(r, r.Group.Barrier(r.Ctx))
			h, err = d.Dispatch(st, tokens(x, idx, weights))
			require.NoError(r, err)
		}
		_, err = h.HostCounts(r.Ctx)
		require.NoError(r, err)
		require.NoError(r, st.Synchronize())
		h.Release()
		require.NoError(r, st.Close())
		require.NoError(r, d.Close(r.Ctx))

		d = r.dispatcher(dispatch.Options{Experts: 4, TopK: 2, Hidden: 4})
		h, _, _, _ = dispatchSmall(r, d, nil, 1)
		_, err = h.HostCounts(r.Ctx)
		require.ErrorIs(r, err, dispatch.ErrInvalid)
		h.Release()
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Landed words count what has arrived before the dispatch is complete. With one choice a token that is everything.
func TestLandedBeforeReceive(t *testing.T) {
	o := dispatch.Options{Experts: 5, TopK: 1, Hidden: 16, MaxTokens: 600, Landed: true, HostCounts: true, Layout: dispatch.Slab}
	local(t, 3, func(r *rank) {
		d := r.dispatcher(o)
		for round := range 3 {
			s := &side{r: r, d: d, b: randomBatch(rand.New(rand.NewPCG(1, uint64(round))), o, 3, false)}
			var err error
			s.h, err = d.DispatchSend(nil, s.tokens())
			require.NoError(r, err)
			counts, landed := r.counts(s.h).Counts, s.h.Landed().Bytes()
			for start := time.Now(); ; {
				all := true
				for i, n := range counts {
					all = all && shm.Word32(landed, 4*int64(i)).Load() == uint32(n)
				}
				if all {
					break
				}
				require.Less(r, time.Since(start), time.Minute)
				time.Sleep(time.Millisecond)
			}
			s.checkRows()
			require.NoError(r, d.DispatchReceive(nil, s.h))
			s.checkRows()
			s.h.Release()
		}
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Rows go back when the caller marks them, with what they hold then, in the heap or not; one that is never marked is waited for
// until the timeout.
func TestRowsGoBackWhenMarked(t *testing.T) {
	for _, layout := range []dispatch.Layout{dispatch.Flat, dispatch.Padded, dispatch.TokenMajor} {
		o := dispatch.Options{
			Experts: 7, TopK: 3, Hidden: 16, MaxTokens: 12, HostCounts: true, Layout: layout, DType: kernels.BFloat16, Timeout: time.Minute,
		}
		local(t, 3, func(r *rank) {
			d, st := r.dispatcher(o), r.stream()
			s := &side{r: r, d: d, b: randomBatch(rand.New(rand.NewPCG(3, 1)), o, 3, false)}
			s.dispatch(nil)
			made := narrow(s.b.sumType(), s.ownMade())
			for _, rows := range []memory.View{s.h.Rows().Slice(0, int64(len(made))), memory.Host(make([]byte, len(made)))} {
				groups := s.b.groups(s.me())
				first, _ := s.place(groups)
				words := make([]uint32, len(groups))
				for i := range rows.Bytes() {
					rows.Bytes()[i] = 0xff // NaN
				}
				y := s.view(nans(len(s.b.dy[s.me()])))
				require.NoError(r, d.Combine(st, y, rows, s.h, dispatch.CombineOptions{Ready: numbers(words)}))
				size := o.Hidden * 2
				for i, g := range slices.Backward(groups) {
					time.Sleep(300 * time.Microsecond)
					at := first[i] * size
					copy(rows.Bytes()[at:at+len(g)*size], made[at:])
					atomic.AddUint32(&words[i], uint32(len(g)))
				}
				require.NoError(r, st.Synchronize())
				got := wide(s.b.sumType(), y.Bytes())
				for i := range s.b.tokens(s.me()) {
					require.Equal(r, s.b.combined(s.me(), i, s.b.weight, s.b.made), got[i*o.Hidden:][:o.Hidden], "token %d", i)
				}
			}
			s.h.Release()
			require.NoError(r, st.Close())
			require.NoError(r, d.Close(r.Ctx))
		})
	}
	local(t, 2, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Timeout: 2 * time.Second}))
		h, _, _, _ := dispatchSmall(r, d, nil, 3)
		words := []uint32{6, 6}
		if r.Group.Rank() == 1 {
			words[1] = 5
		}
		err := d.Combine(nil, rowsFor(3), h.Rows(), h, dispatch.CombineOptions{Ready: numbers(words)})
		require.ErrorIs(r, err, comm.ErrTimeout)
		var peer *comm.PeerError
		require.ErrorAs(r, err, &peer)
		require.Equal(r, 1, peer.Rank)
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Weights that one rank asks for and another does not show are an error on both.
func TestMissingWeightsAreAnErrorOnEveryRank(t *testing.T) {
	local(t, 2, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{}))
		h, _, _, _ := dispatchSmall(r, d, nil, 3)
		var o dispatch.CombineOptions
		if r.Group.Rank() == 0 {
			o.Weights, o.SumWeights = numbers(make([]float32, 6)), numbers(make([]float32, 6))
		}
		err := d.Combine(nil, rowsFor(3), h.Rows(), h, o)
		var short *kernels.ShortError
		require.ErrorAs(r, err, &short)
		require.Equal(r, kernels.ShortError{Call: 2, Rank: 1, Have: 0, Need: 24}, *short)

		o = dispatch.CombineOptions{Weighting: dispatch.GivenWeights, Weights: numbers(make([]float32, 6))}
		if r.Group.Rank() == 1 {
			o.Weights = o.Weights.Slice(0, 20)
		}
		require.ErrorAs(r, d.Combine(nil, rowsFor(3), h.Rows(), h, o), &short)
		require.Equal(r, kernels.ShortError{Call: 3, Rank: 1, Have: 20, Need: 24}, *short)

		o = dispatch.CombineOptions{}
		if r.Group.Rank() == 1 {
			o.Weighting = dispatch.Unweighted
		}
		var order *kernels.OrderError
		err = d.Combine(nil, rowsFor(3), h.Rows(), h, o)
		require.ErrorAs(r, err, &order)
		require.ErrorContains(r, err, "rank 0 is in combine with dispatched weights of dispatch 1, rank 1 in combine with no weights of dispatch 1")
		h.Release()
		roundTrip(r, d, nil, 2)
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Worlds at the ends of what is allowed.
func TestExtremes(t *testing.T) {
	for name, o := range map[string]dispatch.Options{
		"64 choices of 3 experts":  {Experts: 3, TopK: 64, Hidden: 8, MaxTokens: 5, Align: 16},
		"64 choices, token-major":  {Experts: 200, TopK: 64, Hidden: 8, MaxTokens: 5, Layout: dispatch.TokenMajor, DType: kernels.BFloat16},
		"one expert":               {Experts: 1, TopK: 1, Hidden: 4, MaxTokens: 30, Layout: dispatch.Slab, Landed: true},
		"fewer experts than ranks": {Experts: 2, TopK: 2, Hidden: 4, MaxTokens: 30, Layout: dispatch.RankPadded, IndexType: kernels.Int64},
		"long rows of float8":      {Experts: 4, TopK: 2, Hidden: 2880, MaxTokens: 6, Quantize: true, DType: kernels.BFloat16, Float8Combine: true},
	} {
		t.Run(name, func(t *testing.T) {
			o.HostCounts, o.Handles = true, 2
			local(t, 3, func(r *rank) {
				st := r.stream()
				for seed := range uint64(2) {
					rng := rand.New(rand.NewPCG(seed, 9))
					randomWorld(r, o, rng, rand.New(rand.NewPCG(seed, uint64(r.Group.Rank()))), st)
				}
				require.NoError(r, st.Close())
			})
		})
	}
}

// A NaN or an infinity makes its block NaN and nothing else; zeros stay zeros.
func TestQuantizedSpecials(t *testing.T) {
	for _, format := range []dispatch.ScaleFormat{dispatch.Float32Scales, dispatch.UE8M0Scales, dispatch.PowerScales} {
		local(t, 1, func(r *rank) {
			o := dispatch.Options{Experts: 1, TopK: 1, Hidden: 512, Quantize: true, ScaleFormat: format, HostCounts: true}
			d := r.dispatcher(o)
			x := make([]float32, o.Hidden)
			x[5], x[128+7], x[256+9] = float32(math.NaN()), float32(math.Inf(-1)), 3e38
			h, err := d.Dispatch(nil, dispatch.Tokens{X: numbers(x), Experts: numbers([]int32{0})})
			require.NoError(r, err)
			row, scales := wide(kernels.Float8E4M3, h.Rows().Bytes()[:o.Hidden]), shm.View[uint32](h.Scales().Bytes())
			for block := range 4 {
				scale := math.Float32frombits(scales[block%len(scales)])
				if format == dispatch.UE8M0Scales {
					scale = float32(math.Ldexp(1, int(scales[0]>>(8*block)&0xff)-127))
					if block < 2 {
						require.EqualValues(r, 255, scales[0]>>(8*block)&0xff)
						continue
					}
				}
				for i := range 128 {
					at := 128*block + i
					switch v := float64(row[at] * scale); {
					case block < 2:
						require.True(r, math.IsNaN(v), "element %d is %v", at, v)
					case x[at] == 0:
						require.Zero(r, v)
					default:
						require.InEpsilon(r, float64(x[at]), v, 1.0/16)
					}
				}
			}
			h.Release()
			require.NoError(r, d.Close(r.Ctx))
		})
	}
}

// Scales that a caller gives are float32, or words of exponents.
func TestScalesOfTokensHaveTheElementsOfTheirFormat(t *testing.T) {
	float, words := memory.As[float32](numbers([]float32{1})), memory.As[int32](numbers([]int32{127}))
	for format, right := range map[dispatch.ScaleFormat]memory.View{
		dispatch.Float32Scales: float, dispatch.PowerScales: float, dispatch.UE8M0Scales: words,
	} {
		local(t, 1, func(r *rank) {
			d := r.dispatcher(dispatch.Options{Experts: 1, TopK: 1, Hidden: 128, DType: kernels.Float8E4M3, ScaleFormat: format})
			for _, scales := range []memory.View{float, words} {
				h, err := d.Dispatch(nil, dispatch.Tokens{X: memory.Host(make([]byte, 128)), Experts: numbers([]int32{0}), Scales: scales})
				if scales.Element() != right.Element() {
					require.ErrorIs(r, err, dispatch.ErrInvalid, "format %d", format)
					continue
				}
				require.NoError(r, err, "format %d", format)
				h.Release()
			}
			require.NoError(r, d.Close(r.Ctx))
		})
	}
}

func TestF3_TokenWeightsThatAreRefused(t *testing.T) {
	local(t, 1, func(r *rank) {
		for _, layout := range []dispatch.Layout{dispatch.Flat, dispatch.TokenMajor} {
			d := r.dispatcher(dispatch.Options{Experts: 2, TopK: 2, Hidden: 4, MaxTokens: 3, Layout: layout})
			h, err := d.Dispatch(nil, r.tokens(numbers(make([]float32, 8)), []int32{0, 1, 1, 0}, nil))
			require.NoError(r, err)
			y, weights := numbers(make([]float32, 8)), numbers(make([]float32, 4))
			o := dispatch.CombineOptions{Weighting: dispatch.TokenWeights, TokenWeights: weights}
			back := func(o dispatch.CombineOptions) error { return d.Combine(nil, y, h.Rows(), h, o) }
			if layout == dispatch.TokenMajor {
				require.ErrorContains(r, back(o), "weights of tokens in the token-major layout, where rows are not weighted")
			} else {
				require.NoError(r, back(o))
				require.ErrorContains(r, d.CombineBackward(nil, h.Rows(), memory.View{}, y, h.Rows(), h, o), "combine backward by weights of tokens")
				require.ErrorContains(r, back(dispatch.CombineOptions{TokenWeights: weights}), "there are token weights, but CombineOptions.Weighting is dispatched weights")
				o.TokenWeights = weights.Slice(0, 12)
				require.ErrorContains(r, back(o), "token weights has 12 bytes, want 16")
			}
			h.Release()
			require.NoError(r, d.Close(r.Ctx))
		}
	})
}

func TestF3_NumbersThatAreRefused(t *testing.T) {
	local(t, 1, func(r *rank) {
		for layout, refused := range map[dispatch.Layout]string{
			dispatch.Flat: "numbers has 16 bytes, want 32", dispatch.TokenMajor: "there are numbers in the token-major layout, which has none",
		} {
			d := r.dispatcher(dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, MaxTokens: 3, Layout: layout})
			tokens := r.tokens(numbers(make([]float32, 8)), []int32{0, 1}, nil)
			tokens.Numbers = memory.As[int32](memory.Host(make([]byte, 4*d.NumberWords())))
			if layout == dispatch.Flat {
				tokens.Numbers = tokens.Numbers.Slice(0, 16)
			}
			_, err := d.Dispatch(nil, tokens)
			require.ErrorIs(r, err, dispatch.ErrInvalid)
			require.ErrorContains(r, err, refused)
			require.NoError(r, d.Close(r.Ctx))
		}
	})
}
