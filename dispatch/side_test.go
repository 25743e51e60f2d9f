package dispatch_test

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// The calls of one rank, on the host or a GPU, each compared with the model.

// side is one rank's part in a batch.
type side struct {
	r      *rank
	b      *batch
	d      *dispatch.Dispatcher
	h      *dispatch.Handle
	halves bool // use them
	// between runs between the halves of a call.
	between func()
}

func (s *side) me() int { return s.r.Group.Rank() }

func (s *side) view(v []float32) memory.View { return s.r.up(narrow(s.b.sumType(), v)) }

func (s *side) sync(st device.Stream) {
	if st != nil {
		require.NoError(s.r, st.Synchronize())
		require.NoError(s.r, s.d.Fault())
	}
}

func (s *side) half() {
	if s.between != nil {
		s.between()
	}
}

// tokens is this rank's input.
func (s *side) tokens() dispatch.Tokens {
	b, me := s.b, s.me()
	x, experts, weights, scales := b.bytes(me)
	return dispatch.Tokens{X: s.r.up(x), Experts: s.r.up(experts), Weights: s.r.up(weights), Scales: s.r.up(scales)}
}

func (s *side) dispatch(st device.Stream) {
	var err error
	t := s.tokens()
	if !s.b.byToken() && (s.r.gpu == nil || !s.b.o.HostCounts) {
		t.Numbers = memory.As[int32](s.r.untouched(4 * int64(s.d.NumberWords())))
	}
	if s.halves {
		s.h, err = s.d.DispatchSend(st, t)
		require.NoError(s.r, err)
		s.half()
		err = s.d.DispatchReceive(st, s.h)
	} else {
		s.h, err = s.d.Dispatch(st, t)
	}
	require.NoError(s.r, err)
	s.sync(st)
	if t.Numbers.Len() > 0 {
		numbers := slices.Concat(s.r.down(s.h.Counts()), s.r.down(s.h.Offsets()), s.r.down(s.h.RankCounts()))
		require.Equal(s.r, numbers, s.r.down(t.Numbers)[8:])
	}
}

// redispatch sends what next has, the same ways.
func (s *side) redispatch(st device.Stream, next *batch) {
	s.b = next
	t := s.tokens()
	if s.halves {
		require.NoError(s.r, s.d.RedispatchSend(st, s.h, t.X, t.Scales))
		s.half()
		require.NoError(s.r, s.d.DispatchReceive(st, s.h))
	} else {
		require.NoError(s.r, s.d.Redispatch(st, s.h, t.X, t.Scales))
	}
	s.sync(st)
}

// slabRows is how many rows an expert has in a slab.
func (b *batch) slabRows() int {
	align := b.o.Align
	if align == 0 {
		align = b.o.DefaultAlign()
	}
	return (b.n*b.o.MaxTokens + align - 1) / align * align
}

// place finds the first row of each group, and the length of the output.
func (s *side) place(groups [][]routed) (first []int, length int) {
	o := &s.b.o
	for _, g := range groups {
		if o.Layout == dispatch.Flat {
			length = (length + o.Align - 1) / o.Align * o.Align
		}
		first = append(first, length)
		switch o.Layout {
		case dispatch.Padded:
			length += o.Capacity
		case dispatch.Slab:
			length += s.b.slabRows()
		case dispatch.RankPadded:
			length += o.MaxTokens
		default:
			length += len(g)
		}
	}
	if o.Layout == dispatch.Flat {
		length = (length + o.Align - 1) / o.Align * o.Align
	}
	return first, length
}

// eachRow calls f with every row that this rank should have, and padding with those that have to be zero.
func (s *side) eachRow(f func(at int, q routed), padding func(at int)) {
	groups := s.b.groups(s.me())
	first, length := s.place(groups)
	used := make([]bool, length)
	for i, g := range groups {
		for j, q := range g {
			used[first[i]+j] = true
			f(first[i]+j, q)
		}
	}
	for at, u := range used {
		if !u && s.b.zeroPadding() {
			padding(at)
		}
	}
}

// scalesOf reads the scales of a row of the output in all of them.
func (s *side) scalesOf(all []uint32, at int) []uint32 {
	words := s.b.scaleWords()
	if words == 0 {
		return nil
	}
	if !s.b.o.ScaleColumns {
		return all[at*words : (at+1)*words]
	}
	rows := s.d.MaxRows()
	switch s.b.o.Layout {
	case dispatch.Padded:
		rows = s.b.o.Capacity
	case dispatch.Slab:
		rows = s.b.slabRows()
	}
	group, i := at/rows, at%rows
	var scales []uint32
	for w := range words {
		scales = append(scales, all[(group*words+w)*rows+i])
	}
	return scales
}

// checkRows compares everything in the handle.
func (s *side) checkRows() {
	b, o, me := s.b, &s.b.o, s.me()
	groups := b.groups(me)
	first, length := s.place(groups)
	local := b.placement().Local(me)
	require.Equal(s.r, local, append([]int(nil), s.h.LocalExperts()...))
	counts, offsets, from := make([]int32, len(local)), make([]int32, 0, len(first)+1), make([]int32, b.n)
	for _, at := range first {
		offsets = append(offsets, int32(at))
	}
	offsets = append(offsets, int32(length))
	for _, g := range groups {
		for _, q := range g {
			from[q.src]++
		}
	}
	for src := range b.n {
		for t := range b.tokens(src) {
			for _, k := range b.choices(me, src, t) {
				i, _ := slices.BinarySearch(local, b.expertOf(routed{src, t, k}))
				counts[i]++
			}
		}
	}
	int32s := func(v memory.View) []int32 { return shm.View[int32](s.r.down(v)) }
	require.Equal(s.r, counts, append([]int32{}, int32s(s.h.Counts())...), "counts")
	require.Equal(s.r, offsets, int32s(s.h.Offsets()), "offsets")
	require.Equal(s.r, from, int32s(s.h.RankCounts()), "rank counts")
	if o.HostCounts {
		c := s.r.counts(s.h)
		require.Equal(s.r, length, c.Rows)
		require.Equal(s.r, counts, append([]int32{}, c.Counts...))
		require.Equal(s.r, offsets, c.Offsets)
		require.Equal(s.r, from, c.RankCounts)
	}
	if o.Landed {
		require.Equal(s.r, counts, append([]int32{}, int32s(s.h.Landed())...), "landed")
	}
	require.Equal(s.r, o.Sources, s.h.Sources().Len() > 0)
	require.Equal(s.r, o.RowWeights || b.byToken(), s.h.Weights().Len() > 0)
	size := o.Hidden * int(b.rowType().Size())
	rows, sources, weights := s.r.down(s.h.Rows()), int32s(s.h.Sources()), shm.View[float32](s.r.down(s.h.Weights()))
	indices, allScales := shm.View[int64](s.r.down(s.h.Indices())), shm.View[uint32](s.r.down(s.h.Scales()))
	s.eachRow(func(at int, q routed) {
		row, scales := b.sent(q)
		require.Equal(s.r, row, rows[at*size:][:size], "row %d is %+v", at, q)
		require.Equal(s.r, scales, s.scalesOf(allScales, at), "scales of row %d, %+v", at, q)
		if o.Sources {
			require.Equal(s.r, []int32{int32(q.src), int32(q.token)}, sources[2*at:2*at+2], "source of row %d", at)
		}
		if !b.byToken() {
			if o.RowWeights {
				require.Equal(s.r, b.weight(q), weights[at], "weight of row %d", at)
			}
			return
		}
		wantIndices, wantWeights := make([]int64, o.TopK), make([]float32, o.TopK)
		for k := range wantIndices {
			wantIndices[k] = -1
		}
		for _, k := range b.choices(me, q.src, q.token) {
			c := routed{q.src, q.token, k}
			i, _ := slices.BinarySearch(local, b.expertOf(c))
			wantIndices[k], wantWeights[k] = int64(i), b.weight(c)
		}
		require.Equal(s.r, wantIndices, indices[at*o.TopK:][:o.TopK], "indices of row %d", at)
		require.Equal(s.r, wantWeights, weights[at*o.TopK:][:o.TopK], "weights of row %d", at)
	}, func(at int) {
		require.Equal(s.r, make([]byte, size), rows[at*size:][:size], "padding row %d", at)
		if o.Sources {
			require.Equal(s.r, []int32{-1, -1}, sources[2*at:2*at+2], "source of padding row %d", at)
		}
		if o.RowWeights {
			require.Zero(s.r, weights[at], "weight of padding row %d", at)
		}
		for _, v := range s.scalesOf(allScales, at) {
			require.Zero(s.r, v, "scale of padding row %d", at)
		}
	})
}

// made is what this rank gives to a combine; the rows' padding is NaN, which nobody may read.
func (s *side) made(row func(q routed) []float32) []float32 {
	_, length := s.place(s.b.groups(s.me()))
	hidden := s.b.o.Hidden
	out := nans(length * hidden)
	s.eachRow(func(at int, q routed) { copy(out[at*hidden:], row(q)) }, func(int) {})
	return out
}

// perRow is float32 for the rows of this rank, per each.
func (s *side) perRow(of func(q routed) float32) []float32 {
	_, length := s.place(s.b.groups(s.me()))
	per := 1
	if s.b.byToken() {
		per = s.b.o.TopK
	}
	out := nans(length * per)
	s.eachRow(func(at int, q routed) {
		if per == 1 && !s.b.byToken() {
			out[at] = of(q)
			return
		}
		for _, k := range s.b.choices(s.me(), q.src, q.token) {
			out[at*per+k] = of(routed{q.src, q.token, k})
		}
	}, func(int) {})
	return out
}

func (s *side) ownMade() []float32 {
	return s.made(func(q routed) []float32 { return s.b.made(s.me(), q) })
}

// combineWith says how side.combine calls.
type combineWith struct {
	weighting   dispatch.Weighting
	sums, ready bool
	biases      int
}

// weight is what the options make rows be weighted with.
func (b *batch) weighting(c combineWith) func(routed) float32 {
	switch c.weighting {
	case dispatch.Unweighted:
		return one
	case dispatch.GivenWeights, dispatch.TokenWeights:
		return b.givenWeight
	}
	return b.weight
}

// combine checks Combine of the experts' output in rows.
func (s *side) combine(st device.Stream, rows memory.View, c combineWith) {
	b, me, hidden := s.b, s.me(), s.b.o.Hidden
	o := dispatch.CombineOptions{Weighting: c.weighting}
	if c.weighting == dispatch.GivenWeights || c.sums {
		o.Weights = s.floats(s.perRow(b.givenWeight))
	}
	if c.weighting == dispatch.TokenWeights {
		o.TokenWeights = s.floats(b.given[me])
	}
	if c.sums {
		o.SumWeights = s.floats(nans(len(b.idx[me])))
	}
	for i := range c.biases {
		o.Bias[i] = s.view(b.bias[i][me])
	}
	marked := func() {}
	if c.ready {
		o.Ready, marked = s.mark()
	}
	y := s.view(nans(len(b.dy[me])))
	if s.halves {
		require.NoError(s.r, s.d.CombineSend(st, y, rows, s.h, o))
		s.half()
		require.NoError(s.r, s.d.CombineReceive(st, s.h))
	} else {
		require.NoError(s.r, s.d.Combine(st, y, rows, s.h, o))
	}
	s.sync(st)
	marked()
	got := wide(b.sumType(), s.r.down(y))
	for t := range b.tokens(me) {
		var bias [][]float32
		for i := range c.biases {
			bias = append(bias, b.row(b.bias[i], me, t))
		}
		require.Equal(s.r, b.combined(me, t, b.weighting(c), b.made, bias...), got[t*hidden:][:hidden], "%+v of token %d of rank %d", c, t, me)
	}
	if c.sums {
		for i, w := range s.floatsOf(o.SumWeights) {
			want := b.given[me][i]
			if b.idx[me][i] < 0 {
				want = 0
			}
			require.Equal(s.r, want, w, "sum of weights %d", i)
		}
	}
}

// mark marks the groups of this rank as done one by one, during the call. done waits until that is over.
func (s *side) mark() (words memory.View, done func()) {
	groups := s.b.groups(s.me())
	counts := make([]uint32, len(groups))
	words = s.r.up(shm.Bytes(counts))
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := len(groups) - 1; i >= 0; i-- {
			if s.r.gpu != nil {
				s.r.gpu.mark(words.Slice(4*int64(i), 4), uint32(len(groups[i])))
				continue
			}
			for range groups[i] {
				atomic.AddUint32(&counts[i], 1)
			}
		}
	})
	return words, wg.Wait
}

// floats is memory with numbers, floatsOf are those of a memory.
func (s *side) floats(v []float32) memory.View { return s.r.up(shm.Bytes(v)) }

func (s *side) floatsOf(v memory.View) []float32 { return shm.View[float32](s.r.down(v)) }

// combineBackward checks both gradients.
func (s *side) combineBackward(st device.Stream, dRows, rows memory.View, c combineWith) {
	b, o, hidden, me := s.b, &s.b.o, s.b.o.Hidden, s.me()
	co := dispatch.CombineOptions{Weighting: c.weighting}
	given := c.weighting == dispatch.GivenWeights
	var dWeights memory.View
	switch {
	case c.weighting == dispatch.Unweighted || b.byToken():
	case given:
		co.Weights = s.floats(s.perRow(b.givenWeight))
		dWeights = s.floats(nans(int(co.Weights.Len() / 4)))
	default:
		dWeights = s.floats(nans(len(b.idx[me])))
	}
	if (c.weighting == dispatch.Unweighted || b.byToken()) && c.sums {
		rows = none // nobody needs them
	}
	require.NoError(s.r, s.d.CombineBackward(st, dRows, dWeights, s.view(b.dy[me]), rows, s.h, co))
	s.sync(st)
	got, dw := wide(b.sumType(), s.r.down(dRows)), s.floatsOf(dWeights)
	s.eachRow(func(at int, q routed) {
		require.Equal(s.r, b.dRow(q, b.weighting(c)), got[at*hidden:][:hidden], "gradient of row %d, %+v", at, q)
		if given && len(dw) > 0 {
			require.Equal(s.r, dot(b.made(me, q), b.row(b.dy, q.src, q.token)), dw[at], "gradient of the weight of row %d", at)
		}
	}, func(at int) {
		require.Equal(s.r, make([]float32, hidden), got[at*hidden:][:hidden], "padding row %d", at)
	})
	if given || len(dw) == 0 {
		return
	}
	for i, v := range dw {
		want := float32(0)
		if q := (routed{me, i / o.TopK, i % o.TopK}); b.expertOf(q) >= 0 {
			want = dot(b.made(b.placement().Rank(me, q.token, b.expertOf(q)), q), b.row(b.dy, me, q.token))
		}
		require.Equal(s.r, want, v, "gradient of weight %d", i)
	}
}

// dispatchBackward checks the gradients of x and of the weights.
func (s *side) dispatchBackward(st device.Stream, dRows memory.View, weights bool) {
	b, hidden, me := s.b, s.b.o.Hidden, s.me()
	dx := s.view(nans(len(b.dy[me])))
	var dWeights, dRowWeights memory.View
	if weights {
		dWeights, dRowWeights = s.floats(nans(len(b.idx[me]))), s.floats(s.perRow(b.givenWeight))
	}
	require.NoError(s.r, s.d.DispatchBackward(st, dx, dWeights, dRows, dRowWeights, s.h))
	s.sync(st)
	got := wide(b.sumType(), s.r.down(dx))
	for t := range b.tokens(me) {
		require.Equal(s.r, b.combined(me, t, one, b.dMade), got[t*hidden:][:hidden], "gradient of token %d of rank %d", t, me)
	}
	if weights {
		for i, w := range s.floatsOf(dWeights) {
			want := b.given[me][i]
			if b.idx[me][i] < 0 {
				want = 0
			}
			require.Equal(s.r, want, w, "gradient of weight %d", i)
		}
	}
}
