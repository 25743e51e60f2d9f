package dispatch_test

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// untouched is memory of the rank's device that a copy has to fill.
func (r *rank) untouched(n int64) memory.View { return r.up(bytes.Repeat([]byte{0xa5}, int(n))) }

// checkCopy compares the side's output, which checkRows knows to be right, with a copy of it that has room for length rows.
func (s *side) checkCopy(st device.Stream, length int) {
	to, check := s.copies(length)
	routing, err := s.h.CopyTo(st, to)
	require.NoError(s.r, err)
	require.Nil(s.r, routing)
	s.sync(st)
	check()
}

// dispatchTo makes a dispatch and such a copy in one call, and says whether the handle has all rows then. The side has made another one before, of
// other tokens.
func (s *side) dispatchTo(st device.Stream, length int) (whole bool) {
	to, check := s.copies(length)
	var err error
	s.h, _, err = s.d.DispatchTo(st, s.tokens(), to)
	require.NoError(s.r, err)
	s.sync(st)
	straight := s.straight(&to)
	if straight {
		rows := s.h.Rows()
		n := min(rows.Len(), to.Rows.Len())
		require.NoError(s.r, memory.Copy(s.r.gpu.copies, rows.Slice(0, n), to.Rows.Slice(0, n)))
		s.sync(s.r.gpu.copies)
	}
	check()
	return !straight || length >= s.d.MaxRows()
}

// straight reports whether rows of a dispatch that is copied may be in the copy alone.
func (s *side) straight(to *dispatch.Result) bool {
	switch {
	case s.r.gpu == nil:
		return false
	case s.b.o.LowLatency:
		return s.b.byToken()
	}
	return s.b.o.Layout == dispatch.TokenMajor && to.Length > 0 && s.r.gpu.reached(to.Rows)
}

// copies is memory for a copy with room for length rows, and the comparison. The handle says how much that is.
func (s *side) copies(length int) (to dispatch.Result, check func()) {
	d, o, h, r := s.d, &s.b.o, s.h, s.r
	words := s.b.scaleWords()
	apart := o.ScaleColumns && (o.Layout == dispatch.Padded || o.Layout == dispatch.Slab)
	if apart {
		length = d.MaxRows()
	}
	row := int64(o.Hidden) * s.b.rowType().Size()
	perRow := func(of memory.View, each int64) memory.View {
		if of.Len() == 0 {
			return memory.View{}
		}
		return r.untouched(int64(length) * each)
	}
	n := int64(1)
	if s.b.byToken() {
		n = int64(o.TopK)
	}
	to = dispatch.Result{
		Length: length, Rows: perRow(h.Rows(), row), Scales: perRow(h.Scales(), 4*int64(words)), Indices: perRow(h.Indices(), 8*n),
		Weights: perRow(h.Weights(), 4*n), Sources: perRow(h.Sources(), 8),
		Counts: r.untouched(h.Counts().Len()), Offsets: r.untouched(h.Offsets().Len()), RankCounts: r.untouched(h.RankCounts().Len()),
	}
	beside := bytes.Repeat([]byte{1, 2, 3}, 25) // of no whole number of words
	to.From, to.To = r.up(beside), r.untouched(int64(len(beside)))
	return to, func() {
		require.Equal(r, beside, r.down(to.To))
		s.compare(to, apart)
	}
}

// compare compares a copy with the output. Scales that lie apart are those of each expert.
func (s *side) compare(to dispatch.Result, apart bool) {
	o, h, r, length := &s.b.o, s.h, s.r, to.Length
	_, came := s.place(s.b.groups(s.me()))
	words := s.b.scaleWords()
	row, n := int64(o.Hidden)*s.b.rowType().Size(), int64(1)
	if s.b.byToken() {
		n = int64(o.TopK)
	}
	require.Equal(r, r.down(h.Counts()), r.down(to.Counts))
	require.Equal(r, r.down(h.Offsets()), r.down(to.Offsets))
	require.Equal(r, r.down(h.RankCounts()), r.down(to.RankCounts))
	same := func(name string, from, to memory.View, each int64, behind byte, columns int) {
		if from.Len() == 0 {
			return
		}
		was, is := r.down(from), r.down(to)
		for c := range columns {
			pitch, width := len(was)/columns, len(is)/columns
			column, used := is[c*width:][:width], min(came, length)*int(each)/columns
			require.Truef(r, bytes.Equal(was[c*pitch:][:used], column[:used]), "%s", name)
			require.Truef(r, bytes.Equal(bytes.Repeat([]byte{behind}, width-used), column[used:]), "%s behind the last", name)
		}
	}
	same("rows", h.Rows(), to.Rows, row, 0xa5, 1)
	same("indices", h.Indices(), to.Indices, 8*n, 0xff, 1)
	same("weights", h.Weights(), to.Weights, 4*n, 0, 1)
	same("sources", h.Sources(), to.Sources, 8, 0xa5, 1)
	switch {
	case apart:
		require.Equal(r, r.down(h.Scales()), r.down(to.Scales))
	case o.ScaleColumns:
		same("scales", h.Scales(), to.Scales, 4*int64(words), 0xa5, words)
	default:
		same("scales", h.Scales(), to.Scales, 4*int64(words), 0xa5, 1)
	}
}

func TestResultsInMemoryOfTheCaller(t *testing.T) {
	const n = 3
	for _, layout := range layouts {
		t.Run(layout.String(), func(t *testing.T) {
			local(t, n, func(r *rank) {
				rng := rand.New(rand.NewPCG(8, uint64(layout)))
				for _, columns := range []bool{false, true} {
					o := dispatch.Options{
						Experts: 5, TopK: 3, Hidden: 160, MaxTokens: 6, Layout: layout, DType: kernels.BFloat16, Quantize: true, ScaleColumns: columns,
						RowWeights: layout != dispatch.TokenMajor && layout != dispatch.RankPadded, Sources: true,
					}
					d, st := r.dispatcher(o), r.stream()
					for i := range 6 {
						s := &side{r: r, d: d, b: randomBatch(rng, o, n, i == 0), halves: i%2 == 0}
						on := []device.Stream{nil, st}[i%2]
						s.dispatch(on)
						s.checkRows()
						_, came := s.place(s.b.groups(s.me()))
						for _, length := range []int{came, 0, came / 2, came + 1, d.MaxRows(), d.MaxRows() + 3} {
							s.checkCopy(on, length)
						}
						s.h.Release()
						s.b = randomBatch(rng, o, n, i == 1)
						require.True(r, s.dispatchTo(on, rng.IntN(d.MaxRows()+2)))
						s.checkRows()
						s.h.Release()
					}
					require.NoError(r, st.Close())
					require.NoError(r, d.Close(r.Ctx))
				}
			})
		})
	}
}

func TestF3_ResultsThatAreRefused(t *testing.T) {
	local(t, 1, func(r *rank) {
		o := dispatch.Options{Experts: 2, TopK: 1, Hidden: 4, MaxTokens: 3, Layout: dispatch.Flat}
		d := r.dispatcher(o)
		h, err := d.DispatchSend(nil, r.tokens(numbers(make([]float32, 8)), []int32{0, 1}, nil))
		require.NoError(r, err)
		room := func(n int) memory.View { return memory.Host(make([]byte, n)) }
		_, err = h.CopyTo(nil, dispatch.Result{})
		require.ErrorIs(r, err, dispatch.ErrHalf)
		require.NoError(r, d.DispatchReceive(nil, h))
		for text, to := range map[string]dispatch.Result{
			"rows has 16 bytes, want 32":               {Length: 2, Rows: room(16)},
			"the handle has no indices":                {Length: 2, Indices: room(16)},
			"counts has 4 bytes, want 8":               {Counts: room(4)},
			"rows has elements of int32, want float32": {Length: 2, Rows: memory.As[int32](room(32))},
			"a result of -1 rows":                      {Length: -1},
			"a result of 2147483648 rows":              {Length: math.MaxInt32 + 1},
			"routing has 5 bytes, want":                {Routing: room(5)},
			"sources":                                  {Length: 1, Sources: room(8)},
			"to has 4 bytes, want 8":                   {From: room(8), To: room(4)},
			"to has 4 bytes, want 0":                   {To: room(4)},
		} {
			_, err = h.CopyTo(nil, to)
			require.ErrorIs(r, err, dispatch.ErrInvalid)
			require.ErrorContains(r, err, text)
		}
		h.Release()
		_, err = h.CopyTo(nil, dispatch.Result{})
		require.ErrorIs(r, err, dispatch.ErrReleased)
		require.NoError(r, d.Close(r.Ctx))
	})
}

// The copy of a dispatch that failed brings no row, also after the failure was told. A combine is refused.
func TestF3_ResultsOfADispatchThatFailedAreNone(t *testing.T) {
	local(t, 1, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Layout: dispatch.Flat}))
		h, _, _, _ := dispatchSmall(r, d, nil, 2)
		failed := &dispatch.IndexError{Experts: 4, Expert: 4}
		require.ErrorIs(r, d.FailsLate(failed, h), failed)
		rows, counts := r.untouched(64), r.untouched(h.Counts().Len())
		_, err := h.CopyTo(nil, dispatch.Result{Length: 4, Rows: rows, Counts: counts})
		require.NoError(r, err)
		require.Equal(r, r.down(r.untouched(64)), r.down(rows))
		require.Equal(r, make([]byte, counts.Len()), r.down(counts))
		require.ErrorIs(r, d.Combine(nil, r.empty(2), h.Rows(), h, plain), failed)
		h.Release()
		roundTrip(r, d, nil, 7)
		require.NoError(r, d.Close(r.Ctx))
		_, err = h.CopyTo(nil, dispatch.Result{})
		require.ErrorIs(r, err, comm.ErrClosed)
	})
}

// Rows are taken as they come by the first copy behind a dispatch that was told of it, and by no other: something may be between the two.
func TestTheCopyRightBehindADispatchTakesRows(t *testing.T) {
	local(t, 1, func(r *rank) {
		d := r.dispatcher(small(dispatch.Options{Handles: 1}))
		x, idx, weights := smallBatch(r, 2)
		tokens := r.tokens(x, idx, weights)
		counts := func(h *dispatch.Handle) {
			_, err := h.CopyTo(nil, dispatch.Result{Counts: r.untouched(h.Counts().Len())})
			require.NoError(r, err)
		}
		for _, taken := range []bool{true, false} {
			tokens.Taken = taken
			h, err := d.Dispatch(nil, tokens)
			require.NoError(r, err)
			require.Equal(r, taken, h.Taken())
			counts(h)
			require.False(r, h.Taken(), "of two copies the second is not right behind the dispatch")
			h.Release()
		}
		tokens.Taken = true
		h, err := d.Dispatch(nil, tokens)
		require.NoError(r, err)
		require.NoError(r, d.Combine(nil, r.empty(2), h.Rows(), h, plain))
		require.False(r, h.Taken(), "a combine is between")
		h.Release()
		h, err = d.DispatchSend(nil, tokens)
		require.NoError(r, err)
		require.NoError(r, d.DispatchReceive(nil, h))
		require.False(r, h.Taken(), "halves")
		h.Release()
		h, _, err = d.DispatchTo(nil, tokens, dispatch.Result{Counts: r.untouched(16)})
		require.NoError(r, err)
		require.False(r, h.Taken(), "the copy is a part of the call")
		h.Release()
	})
}
