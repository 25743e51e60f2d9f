package dispatch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// worldSizes are 1 to 4 ranks, and 8 where there are as many GPUs.
func worldSizes() []int {
	sizes := []int{1, 2, 3, 4}
	if n, err := device.CUDACount(); err == nil && n >= 8 {
		sizes = append(sizes, 8)
	}
	return sizes
}

func TestCUDA_RandomWorlds(t *testing.T) {
	worlds := 12
	if testing.Short() {
		worlds = 4
	}
	for _, n := range worldSizes() {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			gpus(t, n, func(r *rank) { randomWorlds(r, uint64(1000*n), worlds) })
		})
	}
}

func TestCUDA_RandomWorldsAcrossProcesses(t *testing.T) {
	worldtest.GPUProcs(t, 2, memory.Options{SegmentBytes: gpuPart + 160<<20}, func(w *worldtest.Rank) {
		gpuTest(w, func(r *rank) { randomWorlds(r, 1, 4) })
	})
}

// Where the driver exports no descriptors.
func TestCUDA_RandomWorldsOverLegacyIPC(t *testing.T) {
	o := memory.Options{SegmentBytes: 2*gpuPart + 512<<20, LegacyIPC: true}
	worldtest.GPUHeaps(t, 2, o, func(w *worldtest.Rank) {
		gpuTest(w, func(r *rank) { randomWorlds(r, 17, 3) })
	})
}

// identity is a model of experts that return what they get.
func (b *batch) identity(_ int, q routed) []float32 { return b.input(q) }

// checkIdentity compares y with a combine of the rows as they came.
func (s *side) checkIdentity(y memory.View) {
	b, me, hidden := s.b, s.me(), s.b.o.Hidden
	got := wide(b.sumType(), s.r.down(y))
	for t := range b.tokens(me) {
		require.Equal(s.r, b.combined(me, t, b.weight, b.identity), got[t*hidden:][:hidden], "token %d of rank %d", t, me)
	}
}

// fixedBuffers are the inputs of a graph.
type fixedBuffers struct {
	t dispatch.Tokens
	y memory.View
}

func (r *rank) fixed(b *batch) *fixedBuffers {
	me := r.Group.Rank()
	x, experts, weights, scales := b.bytes(me)
	size := int64(len(b.x[me])) * b.sumType().Size()
	return &fixedBuffers{dispatch.Tokens{X: r.up(x), Experts: r.up(experts), Weights: r.up(weights), Scales: r.up(scales)}, r.up(make([]byte, size))}
}

func (f *fixedBuffers) load(r *rank, b *batch) {
	x, experts, weights, scales := b.bytes(r.Group.Rank())
	r.write(f.t.X, x)
	r.write(f.t.Experts, experts)
	r.write(f.t.Weights, weights)
	r.write(f.t.Scales, scales)
}

func (r *rank) gpuStream() *device.CUDAStream {
	g := r.gpu
	require.NotEmpty(r, g.calls, "a test has more streams than mostStreams")
	s := g.calls[0]
	g.calls = g.calls[1:]
	return s.(*device.CUDAStream)
}

// capture makes a graph, and all ranks theirs: to make one may wait in the driver for a kernel on that GPU, which may wait for this rank.
func (r *rank) capture(s *device.CUDAStream, f func() error) *device.Graph {
	g, err := s.Capture(f)
	require.NoError(r, err)
	r.Barrier()
	return g
}

// replay runs graphs one after the other, with work between them.
func (r *rank) replay(s *device.CUDAStream, d *dispatch.Dispatcher, graphs ...*device.Graph) {
	for _, g := range graphs {
		require.NoError(r, g.Launch(s))
	}
	require.NoError(r, s.Synchronize())
	require.NoError(r, d.Fault())
}

// graphOptions are dispatchers whose calls are captured.
func graphOptions(n int) map[string]dispatch.Options {
	o := dispatch.Options{Experts: 3*n + 1, TopK: 3, Hidden: 272, MaxTokens: 40, DType: kernels.BFloat16, Handles: 2, HostCounts: true, Sources: true, RowWeights: true, IndexType: kernels.Int64, Timeout: 20 * time.Second}
	all := map[string]dispatch.Options{}
	for _, l := range layouts {
		o := o
		o.Layout = l
		if l == dispatch.Flat {
			o.Align = 8
		}
		all[l.String()] = o
		o.MaxTokens, o.LowLatency, o.Handles = 20, true, 3
		all[l.String()+", few"] = o
	}
	return all
}

func TestCUDA_GraphsReplayWithOtherRouting(t *testing.T) {
	const replays = 50
	for _, n := range []int{1, 2, 4} {
		for name, o := range graphOptions(n) {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, name), func(t *testing.T) {
				gpus(t, n, func(r *rank) {
					d, s := r.dispatcher(o), r.gpuStream()
					rng := rand.New(rand.NewPCG(21, 21))
					tokens := make([]int, n)
					for i := range tokens {
						tokens[i] = o.MaxTokens - 3*i
					}
					next := func(i int) *batch { return batchOf(rng, o, tokens, i%7 == 3, true) }
					f := r.fixed(next(0))
					// One graph for both calls, one for each, and one for each half: every way has a handle that lives as long as its graphs.
					whole, parts := &side{r: r, d: d}, &side{r: r, d: d}
					one := r.capture(s, func() (err error) {
						if whole.h, err = d.Dispatch(s, f.t); err == nil {
							err = d.Combine(s, f.y, whole.h.Rows(), whole.h, plain)
						}
						return err
					})
					halves := []*device.Graph{
						r.capture(s, func() (err error) { parts.h, err = d.DispatchSend(s, f.t); return err }),
						r.capture(s, func() error { return d.DispatchReceive(s, parts.h) }),
						r.capture(s, func() error { return d.CombineSend(s, f.y, parts.h.Rows(), parts.h, plain) }),
						r.capture(s, func() error { return d.CombineReceive(s, parts.h) }),
					}
					for i := range replays {
						b := next(i)
						f.load(r, b)
						r.write(f.y, make([]byte, f.y.Len()))
						who, graphs := whole, []*device.Graph{one}
						if i%3 == 2 {
							who, graphs = parts, halves
						}
						r.replay(s, d, graphs...)
						who.b = b
						who.checkRows()
						who.checkIdentity(f.y)
					}
					whole.h.Release()
					parts.h.Release()
					for _, g := range append(halves, one) {
						require.NoError(r, g.Close())
					}
					require.NoError(r, d.Close(r.Ctx))
					require.NoError(r, s.Close())
				})
			})
		}
	}
}

// Overflow inside a graph is told by Fault on every rank, and the next replay works.
func TestCUDA_OverflowInAGraph(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		o := small(dispatch.Options{Align: 2, MaxRows: 15, Timeout: 5 * time.Second})
		d, s := r.dispatcher(o), r.gpuStream()
		x, idx, weights := smallBatch(r, 8)
		in := r.tokens(x, idx, weights)
		var h *dispatch.Handle
		g := r.capture(s, func() (err error) { h, err = d.Dispatch(s, in); return err })
		for i := range 6 {
			routed := make([]int32, len(idx))
			for k := range routed { // 16 rows for rank 0, or 8
				routed[k] = []int32{0, -1}[k%2]
				if i%2 == 0 && k%2 == 1 {
					routed[k] = 1
				}
			}
			if r.Group.Rank() == 1 && i%2 == 1 {
				for k := range routed {
					routed[k] = -1
				}
			}
			r.write(in.Experts, shm.Bytes(routed))
			require.NoError(r, r.Group.Barrier(r.Ctx))
			require.NoError(r, g.Launch(s))
			require.NoError(r, s.Synchronize())
			err := d.Fault()
			if i%2 == 1 {
				require.NoError(r, err)
				continue
			}
			var overflow *dispatch.OverflowError
			require.ErrorAs(r, err, &overflow)
			require.Equal(r, 0, overflow.Rank)
			require.EqualValues(r, 15, overflow.Limit)
			require.EqualValues(r, 32, overflow.Rows)
			require.NoError(r, d.Fault(), "told once")
		}
		h.Release()
		require.NoError(r, g.Close())
		require.NoError(r, d.Close(r.Ctx))
		require.NoError(r, s.Close())
	})
}

// inFlight is one micro-batch with what it should come to.
type inFlight struct {
	b       *batch
	t       dispatch.Tokens
	y       memory.View
	rows    []byte // of the output
	used    []bool // which of them are defined
	sums    []byte
	h       *dispatch.Handle
	compare func(got []byte) int // the first row that differs, -1
}

func newInFlight(r *rank, d *dispatch.Dispatcher, b *batch) *inFlight {
	s := &side{r: r, d: d, b: b}
	f := r.fixed(b)
	m := &inFlight{b: b, t: f.t, y: f.y}
	size := b.o.Hidden * int(b.rowType().Size())
	m.rows, m.used = make([]byte, d.MaxRows()*size), make([]bool, d.MaxRows())
	s.eachRow(func(at int, q routed) {
		row, _ := b.sent(q)
		copy(m.rows[at*size:], row)
		m.used[at] = true
	}, func(int) {})
	for t := range b.tokens(s.me()) {
		m.sums = append(m.sums, narrow(b.sumType(), b.combined(s.me(), t, b.weight, b.identity))...)
	}
	m.compare = func(got []byte) int {
		for at, used := range m.used {
			if used && string(got[at*size:][:size]) != string(m.rows[at*size:][:size]) {
				return at
			}
		}
		return -1
	}
	return m
}

// Two micro-batches interleaved, each with a handle of its own, in halves and whole, without a wait in between.
func TestCUDA_TwoMicroBatchesInFlight(t *testing.T) {
	rounds := 10_000
	if testing.Short() {
		rounds = 500
	}
	for _, layout := range []dispatch.Layout{dispatch.RankPadded, dispatch.TokenMajor, dispatch.Slab} {
		t.Run(layout.String(), func(t *testing.T) {
			gpus(t, 2, func(r *rank) {
				o := dispatch.Options{
					Experts: 8, TopK: 3, Hidden: 64, MaxTokens: 12, DType: kernels.BFloat16, Layout: layout, Handles: 2, LowLatency: true,
					MaxSMs: 8, Timeout: 20 * time.Second,
				}
				d, s := r.dispatcher(o), r.gpuStream()
				rng := rand.New(rand.NewPCG(77, 7))
				var all []*inFlight
				for range 16 {
					all = append(all, newInFlight(r, d, randomBatch(rng, o, 2, false)))
				}
				for round := range rounds {
					one, other := all[rng.IntN(8)], all[8+rng.IntN(8)]
					halves := rng.IntN(4) > 0
					begin := func(m *inFlight) {
						var err error
						if m.h, err = d.DispatchSend(s, m.t); err == nil && !halves {
							err = d.DispatchReceive(s, m.h)
						}
						require.NoError(r, err)
					}
					arrive := func(m *inFlight) {
						if halves {
							require.NoError(r, d.DispatchReceive(s, m.h))
						}
						require.NoError(r, d.CombineSend(s, m.y, m.h.Rows(), m.h, plain))
					}
					begin(one)
					begin(other)
					if rng.IntN(2) == 0 {
						one, other = other, one
					}
					arrive(one)
					arrive(other)
					require.NoError(r, d.CombineReceive(s, one.h))
					require.NoError(r, d.CombineReceive(s, other.h))
					require.NoError(r, s.Synchronize())
					require.NoError(r, d.Fault(), "round %d", round)
					for i, m := range []*inFlight{one, other} {
						require.Equal(r, -1, m.compare(r.down(m.h.Rows())), "round %d, batch %d: a row", round, i)
						if m.y.Len() > 0 {
							require.True(r, string(m.sums) == string(r.down(m.y)), "round %d, batch %d: the sums", round, i)
							r.write(m.y, make([]byte, m.y.Len()))
						}
					}
					one.h.Release()
					other.h.Release()
				}
				require.NoError(r, d.Close(r.Ctx))
				require.NoError(r, s.Close())
			})
		})
	}
}

// late are the ways in which a call that fails on a GPU tells: with no stream at once, on one by Fault or by the next call.
var late = map[string]func(r *rank, d *dispatch.Dispatcher, s device.Stream, call func(s device.Stream) error) error{
	"no stream": func(r *rank, d *dispatch.Dispatcher, s device.Stream, call func(s device.Stream) error) error {
		return call(nil)
	},
	"fault": func(r *rank, d *dispatch.Dispatcher, s device.Stream, call func(s device.Stream) error) error {
		require.NoError(r, call(s))
		require.NoError(r, s.Synchronize())
		return d.Fault()
	},
	"next call": func(r *rank, d *dispatch.Dispatcher, s device.Stream, call func(s device.Stream) error) error {
		require.NoError(r, call(s))
		require.NoError(r, s.Synchronize())
		x, idx, weights := smallBatch(r, 1)
		_, err := d.Dispatch(s, r.tokens(x, idx, weights))
		return err
	},
}

// Rows that do not fit, and an index that is no expert, are the same error on every rank. The handle can only be released; the next call works.
func TestCUDA_RefusedDispatchesAreErrorsOnEveryRank(t *testing.T) {
	type refused struct {
		o     dispatch.Options
		idx   func(r *rank, idx []int32)
		check func(r *rank, err error)
	}
	spread := &dispatch.Placement{Ranks: [][]int{{0, 1}, {0}, {1}, {1}}}
	overflow := func(want dispatch.OverflowError) func(r *rank, err error) {
		return func(r *rank, err error) {
			var got *dispatch.OverflowError
			require.ErrorAs(r, err, &got)
			want := want
			want.Call = got.Call
			require.Equal(r, want, *got)
		}
	}
	index := func(r *rank, err error) {
		var got *dispatch.IndexError
		require.ErrorAs(r, err, &got)
		require.Equal(r, dispatch.IndexError{Call: got.Call, Rank: 1, Token: 5, Choice: 1, Expert: 4, Experts: 4}, *got)
	}
	broken := func(r *rank, idx []int32) {
		if r.Group.Rank() == 1 {
			idx[11] = 4
		}
	}
	oneRank := func(_ *rank, idx []int32) {
		for i := range idx {
			idx[i] = int32(i % 2)
		}
	}
	cases := map[string]refused{
		"padded":             {o: dispatch.Options{Layout: dispatch.Padded, Capacity: 15, Placement: spread}, check: overflow(dispatch.OverflowError{Rank: 1, Expert: 3, Rows: 16, Limit: 15})},
		"flat":               {o: dispatch.Options{Align: 2, MaxRows: 15}, check: overflow(dispatch.OverflowError{Rank: 0, Expert: -1, Rows: 16, Limit: 15})},
		"token":              {o: dispatch.Options{Layout: dispatch.TokenMajor, MaxRows: 15}, idx: oneRank, check: overflow(dispatch.OverflowError{Rank: 0, Expert: -1, Rows: 16, Limit: 15})},
		"token, few":         {o: dispatch.Options{Layout: dispatch.TokenMajor, MaxRows: 15, LowLatency: true}, idx: oneRank, check: overflow(dispatch.OverflowError{Rank: 0, Expert: -1, Rows: 16, Limit: 15})},
		"index":              {o: dispatch.Options{}, idx: broken, check: index},
		"index, token-major": {o: dispatch.Options{Layout: dispatch.TokenMajor}, idx: broken, check: index},
		"index, token, few":  {o: dispatch.Options{Layout: dispatch.TokenMajor, LowLatency: true}, idx: broken, check: index},
		"index, few":         {o: dispatch.Options{Layout: dispatch.RankPadded, LowLatency: true}, idx: broken, check: index},
		"index, slab":        {o: dispatch.Options{Layout: dispatch.Slab, LowLatency: true}, idx: broken, check: index},
	}
	for name, c := range cases {
		for way, tell := range late {
			t.Run(name+", "+way, func(t *testing.T) {
				gpus(t, 2, func(r *rank) {
					c := c
					c.o.Timeout = 10 * time.Second
					d, s := r.dispatcher(small(c.o)), r.gpuStream()
					for range 3 {
						works(r, d, s, c.o.Layout)
						x, idx, weights := smallBatch(r, 8)
						if c.idx != nil {
							c.idx(r, idx)
						}
						var h *dispatch.Handle
						err := tell(r, d, s, func(s device.Stream) (err error) {
							h, err = d.Dispatch(s, r.tokens(x, idx, weights))
							return err
						})
						c.check(r, err)
						if h != nil {
							c.check(r, d.Combine(s, r.empty(8), h.Rows(), h, plain))
							_, err = h.HostCounts(r.Ctx)
							c.check(r, err)
							h.Release()
						}
						require.NoError(r, d.Fault(), "told once")
						require.NoError(r, r.Group.Barrier(r.Ctx))
					}
					works(r, d, s, c.o.Layout)
					require.NoError(r, d.Close(r.Ctx))
					require.NoError(r, s.Close())
				})
			})
		}
	}
}

// An error of an index of 64 bits has all of them.
func TestCUDA_AnIndexThatIsNoExpertIsNamedWhole(t *testing.T) {
	for name, o := range map[string]dispatch.Options{
		"many": {}, "token-major": {Layout: dispatch.TokenMajor}, "token-major, few": {Layout: dispatch.TokenMajor, LowLatency: true},
		"few": {Layout: dispatch.RankPadded, LowLatency: true}, "slab": {Layout: dispatch.Slab, LowLatency: true},
	} {
		t.Run(name, func(t *testing.T) {
			gpus(t, 2, func(r *rank) {
				o := o
				o.Timeout, o.IndexType = 10*time.Second, kernels.Int64
				d, s := r.dispatcher(small(o)), r.gpuStream()
				x, narrow, weights := smallBatch(r, 8)
				idx := make([]int64, len(narrow))
				send := func() error {
					h, err := d.Dispatch(s, dispatch.Tokens{X: x, Experts: r.up(shm.Bytes(idx)), Weights: r.up(shm.Bytes(weights))})
					if err == nil {
						err = s.Synchronize()
						h.Release()
					}
					return errors.Join(err, d.Fault())
				}
				for _, e := range []int64{4, -2, 1 << 32, 1<<40 + 1, -1 << 40, math.MaxInt64, math.MinInt64} {
					for i, n := range narrow {
						idx[i] = int64(n)
					}
					require.NoError(r, send())
					require.NoError(r, r.Group.Barrier(r.Ctx))
					if r.Group.Rank() == 1 {
						idx[11] = e
					}
					var got *dispatch.IndexError
					require.ErrorAs(r, send(), &got)
					require.Equal(r, dispatch.IndexError{Call: got.Call, Rank: 1, Token: 5, Choice: 1, Expert: e, Experts: 4}, *got)
					require.NoError(r, r.Group.Barrier(r.Ctx))
				}
				require.NoError(r, d.Close(r.Ctx))
				require.NoError(r, s.Close())
			})
		})
	}
}

// works makes a round trip of tokens that fit.
func works(r *rank, d *dispatch.Dispatcher, s device.Stream, l dispatch.Layout) {
	if !l.ByToken() {
		roundTrip(r, d, s, 7)
		return
	}
	h, x, _, _ := dispatchSmall(r, d, s, 7)
	y := r.empty(7)
	require.NoError(r, d.Combine(s, y, h.Rows(), h, plain))
	require.NoError(r, s.Synchronize())
	require.NoError(r, d.Fault())
	h.Release()
	got := wide(kernels.Float32, r.down(y))
	for i, v := range wide(kernels.Float32, r.down(x)) {
		require.Equal(r, 2*v, got[i]) // of two ranks
	}
}

// The copy of a dispatch that failed is the same on every rank, whether the failure is known there or not: no rows. The next call tells it.
func TestCUDA_F3_ResultsOfADispatchThatFailedAreNone(t *testing.T) {
	for name, o := range map[string]dispatch.Options{
		"many": {Layout: dispatch.TokenMajor}, "few": {Layout: dispatch.RankPadded, LowLatency: true},
		"few, token-major": {Layout: dispatch.TokenMajor, LowLatency: true},
	} {
		t.Run(name, func(t *testing.T) {
			gpus(t, 2, func(r *rank) {
				o := o
				o.Timeout = 10 * time.Second
				d, s := r.dispatcher(small(o)), r.gpuStream()
				for range 3 {
					works(r, d, s, o.Layout)
					x, idx, weights := smallBatch(r, 8)
					if r.Group.Rank() == 1 {
						idx[11] = 4
					}
					h, err := d.Dispatch(s, r.tokens(x, idx, weights))
					require.NoError(r, err)
					copied := func(on device.Stream) {
						to := dispatch.Result{
							Length: 5, Indices: r.untouched(5 * 16), Counts: r.untouched(h.Counts().Len()),
							Routing: r.untouched(d.RoutingBytes() + kernels.LineBytes),
						}
						to.Routing = to.Routing.Slice(int64(-to.Routing.Ptr()%kernels.LineBytes), d.RoutingBytes())
						_, err := h.CopyTo(on, to)
						require.NoError(r, err)
						require.NoError(r, s.Synchronize())
						require.Equal(r, bytes.Repeat([]byte{0xff}, 5*16), r.down(to.Indices))
						require.Equal(r, make([]byte, to.Counts.Len()), r.down(to.Counts))
					}
					if r.Group.Rank() == 0 {
						copied(s) // this rank may not know
					}
					require.NoError(r, s.Synchronize())
					copied(nil)
					require.NoError(r, r.Group.Barrier(r.Ctx))
					var index *dispatch.IndexError
					_, err = d.Dispatch(s, r.tokens(x, idx, weights))
					require.ErrorAs(r, err, &index)
					copied(s)
					h.Release()
					require.NoError(r, r.Group.Barrier(r.Ctx))
				}
				works(r, d, s, o.Layout)
				require.NoError(r, d.Close(r.Ctx))
				require.NoError(r, s.Close())
			})
		})
	}
}

// Ranks in different calls both learn it and can go on.
func TestCUDA_DifferentCallsAreAnErrorOnEveryRank(t *testing.T) {
	few := dispatch.Options{Layout: dispatch.RankPadded, LowLatency: true}
	for way, tell := range late {
		both(t, way, few, func(t *testing.T, o dispatch.Options) {
			gpus(t, 2, func(r *rank) {
				o := o
				o.Timeout = 10 * time.Second
				d, s := r.dispatcher(small(o)), r.gpuStream()
				for range 3 {
					h, _, _, _ := dispatchSmall(r, d, s, 3)
					err := tell(r, d, s, func(s device.Stream) error {
						if r.Group.Rank() == 1 {
							return d.DispatchBackward(s, r.empty(3), none, h.Rows(), none, h)
						}
						return d.Combine(s, r.empty(3), h.Rows(), h, plain)
					})
					var order *kernels.OrderError
					require.ErrorAs(r, err, &order)
					require.Equal(r, 1, order.Rank)
					require.Equal(r, kernels.OpCombine, kernels.CalledOp(order.First))
					require.Equal(r, kernels.OpDispatchBackward, kernels.CalledOp(order.Here))
					require.ErrorAs(r, d.Combine(s, r.empty(3), h.Rows(), h, plain), &order, "the handle has failed")
					h.Release()
					require.NoError(r, r.Group.Barrier(r.Ctx))
					works(r, d, s, o.Layout)
				}
				require.NoError(r, d.Close(r.Ctx))
				require.NoError(r, s.Close())
			})
		})
	}
}

// Ranks release in different orders, and their next dispatches find each other.
func TestCUDA_RanksReleaseInDifferentOrders(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		d, s := r.dispatcher(small(dispatch.Options{Handles: 3, Timeout: 10 * time.Second})), r.gpuStream()
		for i := range 9 {
			var handles []*dispatch.Handle
			for range 3 {
				h, _, _, _ := dispatchSmall(r, d, s, 3)
				handles = append(handles, h)
			}
			for k := range handles {
				handles[(k*(1+r.Group.Rank())+i)%3].Release()
			}
			roundTrip(r, d, s, 5)
		}
		require.NoError(r, d.Close(r.Ctx))
		require.NoError(r, s.Close())
	})
}

// both runs a test with the options, and without.
func both(t *testing.T, name string, o dispatch.Options, f func(t *testing.T, o dispatch.Options)) {
	t.Run(name, func(t *testing.T) { f(t, dispatch.Options{}) })
	t.Run(name+", "+o.Layout.String(), func(t *testing.T) { f(t, o) })
}

// F1: a rank that does not come is named within the timeout; the dispatcher is then good for Close only.
func TestCUDA_F1_AHungRankIsNamed(t *testing.T) {
	const timeout = 300 * time.Millisecond
	for name, o := range map[string]dispatch.Options{
		"flat": {}, "token-major": {Layout: dispatch.TokenMajor}, "few": {Layout: dispatch.RankPadded, LowLatency: true}, "slab": {Layout: dispatch.Slab, LowLatency: true},
		"few, token-major": {Layout: dispatch.TokenMajor, LowLatency: true},
	} {
		t.Run(name, func(t *testing.T) {
			o.Timeout = timeout
			gpus(t, 3, func(r *rank) {
				d, s := r.dispatcher(small(o)), r.gpuStream()
				h, _, _, _ := dispatchSmall(r, d, s, 3)
				require.NoError(r, r.Group.Barrier(r.Ctx))
				if r.Group.Rank() != 1 {
					start := time.Now()
					x, idx, weights := smallBatch(r, 2)
					_, err := d.Dispatch(nil, r.tokens(x, idx, weights))
					require.ErrorIs(r, err, comm.ErrTimeout)
					var peer *comm.PeerError
					require.ErrorAs(r, err, &peer)
					require.Equal(r, 1, peer.Rank)
					require.Equal(r, "dispatch", peer.Op)
					require.Less(r, time.Since(start), 10*timeout)
					require.ErrorIs(r, d.Combine(s, r.empty(3), h.Rows(), h, plain), comm.ErrTimeout)
				}
				require.NoError(r, r.Group.Barrier(r.Ctx))
				require.NoError(r, d.Close(r.Ctx))
				require.NoError(r, s.Close())
			})
		})
	}
}

// F2: the group's abort ends waits on GPUs, in calls on a stream too.
func TestCUDA_F2_AbortEndsWaits(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		d, s := r.dispatcher(small(dispatch.Options{Timeout: time.Minute})), r.gpuStream()
		h, _, _, _ := dispatchSmall(r, d, s, 2)
		require.NoError(r, r.Group.Barrier(r.Ctx))
		if r.Group.Rank() == 1 {
			time.Sleep(100 * time.Millisecond)
			r.Group.Abort(errors.New("pulled the plug"))
			require.NoError(r, errors.Join(d.Close(r.Ctx), s.Close()))
			return
		}
		start := time.Now()
		require.NoError(r, d.Combine(s, r.empty(2), h.Rows(), h, plain))
		require.NoError(r, s.Synchronize())
		var peer *comm.PeerError
		require.ErrorAs(r, d.Fault(), &peer)
		require.Equal(r, 1, peer.Rank)
		require.Less(r, time.Since(start), 10*time.Second)
		require.NoError(r, errors.Join(d.Close(r.Ctx), s.Close()))
	})
}

// Many ranks on each GPU, whose kernels run side by side.
func TestCUDA_SixteenRanksOnAGPU(t *testing.T) {
	count, err := device.CUDACount()
	if err != nil || count == 0 {
		t.Skipf("no GPU: %v", err)
	}
	n := 16 * min(count, 2)
	worldtest.GPUs(t, n, 32<<20, func(w *worldtest.Rank) {
		o := dispatch.Options{
			Experts: 40, TopK: 4, Hidden: 64, MaxTokens: 8, DType: kernels.BFloat16, Layout: dispatch.RankPadded, LowLatency: true, Handles: 1,
			Timeout: 30 * time.Second, MaxSMs: 4,
		}
		buffer, err := w.Heap.Alloc(4 << 20)
		w.Must(err)
		copies, err := w.Device.NewStream()
		w.Must(err)
		r := &rank{Rank: w}
		r.gpu = &gpuMemory{r: r, c: w.Device.(*device.CUDADevice).Context(), copies: copies, marks: copies, parts: [2]memory.View{buffer.View().Slice(0, 2<<20), buffer.View().Slice(2<<20, 2<<20)}}
		d := r.dispatcher(o)
		rng := rand.New(rand.NewPCG(16, 16))
		for range 20 {
			r.gpu.reuse()
			s := &side{r: r, d: d, b: randomBatch(rng, o, n, false)}
			s.dispatch(nil)
			s.checkRows()
			y := r.fixed(s.b).y
			require.NoError(r, d.Combine(nil, y, s.h.Rows(), s.h, plain))
			s.checkIdentity(y)
			s.h.Release()
		}
		require.NoError(r, d.Close(r.Ctx))
		require.NoError(r, copies.Close())
	})
}

// Counts reach the host by a mapped word, while the stream is still held up behind the dispatch.
func TestCUDA_HostCountsDoNotSynchronize(t *testing.T) {
	for _, layout := range layouts {
		t.Run(layout.String(), func(t *testing.T) {
			gpus(t, 2, func(r *rank) {
				o := dispatch.Options{Experts: 5, TopK: 3, Hidden: 64, MaxTokens: 30, DType: kernels.BFloat16, Layout: layout, HostCounts: true, Handles: 1, Timeout: 20 * time.Second}
				d, s, other := r.dispatcher(o), r.gpuStream(), r.gpuStream()
				word := r.up(make([]byte, 8))
				rng := rand.New(rand.NewPCG(3, 3))
				c := r.gpu.c
				behind, err := c.NewEvent(false)
				require.NoError(r, err)
				for i := range 20 {
					m := &side{r: r, d: d, b: randomBatch(rng, o, 2, false)}
					in := m.tokens()
					var err error
					m.h, err = d.Dispatch(s, in)
					require.NoError(r, err)
					require.NoError(r, c.WaitValue(cuda.Stream(s.Handle()), word.Ptr(), uint64(i+1)))
					ctx, cancel := context.WithTimeout(r.Ctx, 10*time.Second)
					counts, err := m.h.HostCounts(ctx)
					cancel()
					require.NoError(r, err)
					require.NoError(r, c.Record(behind, cuda.Stream(s.Handle())))
					done, err := c.EventDone(behind)
					require.NoError(r, err)
					require.False(r, done, "the stream is held up")
					_, length := m.place(m.b.groups(m.me()))
					require.Equal(r, length, counts.Rows)
					require.NoError(r, c.WriteValue(cuda.Stream(other.Handle()), word.Ptr(), uint64(i+1)))
					m.sync(s)
					m.checkRows()
					m.h.Release()
				}
				require.NoError(r, d.Close(r.Ctx))
				require.NoError(r, c.DestroyEvent(behind))
				require.NoError(r, s.Close())
				require.NoError(r, other.Close())
			})
		})
	}
}

// Counters can be read while a stream is held up.
func TestCUDA_Counters(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		d, s, other := r.dispatcher(dispatch.Options{Experts: 6, TopK: 3, Hidden: 4, MaxTokens: 8, Timeout: 10 * time.Second}), r.gpuStream(), r.gpuStream()
		var idx []int32
		if r.Group.Rank() == 0 {
			idx = []int32{3, 4, 5, 5, 0, -1} // three experts on rank 1; one there and one here
		}
		h, err := d.Dispatch(s, r.tokens(r.empty(len(idx)/3), idx, make([]float32, len(idx))))
		require.NoError(r, err)
		require.NoError(r, s.Synchronize())
		word, c := r.up(make([]byte, 8)), r.gpu.c
		require.NoError(r, c.WaitValue(cuda.Stream(s.Handle()), word.Ptr(), 1))
		got, err := d.Counters()
		require.NoError(r, err)
		require.NoError(r, c.WriteValue(cuda.Stream(other.Handle()), word.Ptr(), 1))
		me := r.Group.Rank()
		require.Equal(r, [][]int64{{1, 0, 0, 1, 1, 2}, make([]int64, 6)}[me], got.Choices)
		require.Equal(r, [][]int64{{16, 32}, {0, 0}}[me], got.Bytes)
		h.Release()
		require.NoError(r, s.Synchronize())
		require.NoError(r, d.Close(r.Ctx))
		_, err = d.Counters()
		require.ErrorIs(r, err, dispatch.ErrClosed)
		require.NoError(r, s.Close())
		require.NoError(r, other.Close())
	})
}

// Options that a GPU cannot serve are refused with the reason, on every rank, before anything is enqueued.
func TestCUDA_F3_WhatGPUsRefuse(t *testing.T) {
	gpus(t, 2, func(r *rank) {
		for _, c := range []struct {
			o    dispatch.Options
			text string
		}{
			{dispatch.Options{Experts: 4, TopK: 2, Hidden: 3, MaxTokens: 8}, "rows of GPUs are multiples of 16 bytes"},
			{dispatch.Options{Experts: 4, TopK: 2, Hidden: 8, MaxTokens: 8, DType: kernels.Float8E4M3}, "rows of GPUs are multiples of 16 bytes"},
		} {
			_, err := dispatch.New(r.Ctx, r.Heap, c.o)
			require.ErrorIs(r, err, dispatch.ErrInvalid)
			require.ErrorContains(r, err, c.text)
		}
		d := r.dispatcher(small(dispatch.Options{Timeout: 10 * time.Second}))
		x, idx, weights := smallBatch(r, 2)
		in := r.tokens(x, idx, weights)
		odd := r.empty(9).Slice(4, 32)
		for text, c := range map[string]dispatch.Tokens{
			"x is not cuda memory":           {X: rowsFor(2), Experts: in.Experts},
			"experts is not cuda memory":     {X: x, Experts: numbers(idx)},
			"x is not aligned to 16 bytes":   {X: odd, Experts: in.Experts},
			"weights is not cuda memory":     {X: x, Experts: in.Experts, Weights: numbers(weights)},
			"x has 16 bytes, 2 tokens":       {X: x.Slice(0, 16), Experts: in.Experts},
			"9 tokens, Options.MaxTokens is": {X: x, Experts: r.up(make([]byte, 72))},
		} {
			_, err := d.Dispatch(nil, c)
			require.ErrorIs(r, err, dispatch.ErrInvalid)
			require.ErrorContains(r, err, text)
		}
		h, _, _, _ := dispatchSmall(r, d, nil, 2)
		require.ErrorContains(r, d.Combine(nil, odd, h.Rows(), h, plain), "y is not aligned to 16 bytes")
		require.ErrorContains(r, d.Combine(nil, r.empty(2), h.Rows().Slice(4, 64), h, plain), "rows is not aligned to 16 bytes")
		h.Release()
		roundTrip(r, d, nil, 8)
		require.NoError(r, d.Close(r.Ctx))
	})
}

// Opening and closing dispatchers leaves memory where it was, pinned memory included.
func TestCUDA_DispatchersLeaveNothing(t *testing.T) {
	gpus(t, 1, func(r *rank) {
		once := func() {
			d := r.dispatcher(small(dispatch.Options{}))
			h, _, _, _ := dispatchSmall(r, d, nil, 2)
			require.NoError(r, d.Close(r.Ctx))
			_, err := h.HostCounts(r.Ctx)
			require.ErrorIs(r, err, dispatch.ErrClosed)
			r.gpu.reuse()
		}
		once()
		free, _, err := r.gpu.c.MemInfo()
		require.NoError(r, err)
		in := r.Heap.Stats().InUse
		for range 50 {
			once()
		}
		after, _, err := r.gpu.c.MemInfo()
		require.NoError(r, err)
		require.Equal(r, in, r.Heap.Stats().InUse)
		require.GreaterOrEqual(r, after, free-4<<20)
	})
}
