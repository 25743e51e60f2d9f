package alltoallv_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// swaps is a list for ranks that are a power of two: in step i rank r exchanges with rank r xor i.
func swaps(ranks int) *alltoallv.List {
	l := &alltoallv.List{Name: "swaps", Window: 1, Bytes: []int64{1000, 3000}, Microseconds: []float64{1e6, 0.01}}
	for r := range ranks {
		var order []int
		for i := 1; i < ranks; i++ {
			order = append(order, r^i)
		}
		l.Orders = append(l.Orders, order)
	}
	return l
}

func TestAListIsChosenBySize(t *testing.T) {
	for _, more := range []alltoallv.List{{Window: 1}, {Window: 2, Staged: true}, {ChunkBytes: 1000}} {
		worldtest.Local(t, 4, 64<<20, func(r *worldtest.Rank) {
			l := swaps(4)
			l.Window, l.Staged, l.ChunkBytes = more.Window, more.Staged, more.ChunkBytes
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{l.Algorithm()}})
			r.Must(err)
			out, err := r.Heap.Alloc(1 << 20)
			r.Must(err)
			src := memory.Host(make([]byte, 1<<20))
			small := [][]int64{{9, 0, 9, 1}, {9, 7, 9, 0}, {0, 9, 9, 3}, {1, 9, 9, 9}}
			// Rank 2 gets most, and rank 3 sends and receives little: it makes another choice than the others.
			large := [][]int64{{0, 3001, 70000, 0}, {5000, 0, 70000, 1}, {0, 70000, 0, 0}, {0, 1, 0, 0}}
			for call, m := range [][][]int64{small, large, large, small, large} {
				me := r.Rank()
				d, err := x.Explain(&alltoallv.Splits{Send: m[me], Recv: column(m, me)}, true)
				r.Must(err)
				if want := m[0][2] == 70000 && me != 3; (d.Algorithm == "swaps") != want {
					r.Must(fmt.Errorf("call %d: %v", call, d))
				}
				dst := out.View()
				if call == 2 { // outside the heap
					dst = memory.Host(make([]byte, 1<<20))
				}
				r.Must(exchange(r, x, nil, dst, src, m, 1, call))
			}
			r.Must(x.Close(r.Ctx))
		})
	}
}

// Check and New refuse with both values what is no algorithm.
func TestListsThatAreNoAlgorithm(t *testing.T) {
	for _, c := range []struct {
		said  string
		wrong func(l *alltoallv.List)
	}{
		{"an algorithm has no name", func(l *alltoallv.List) { l.Name = "" }},
		{`two algorithms are called "ring"`, func(l *alltoallv.List) { l.Name = "ring" }},
		{`algorithm "swaps" has a window of 4 peers, want 0 to 3`, func(l *alltoallv.List) { l.Window = 4 }},
		{`algorithm "swaps" has a window of -1 peers, want 0 to 3`, func(l *alltoallv.List) { l.Window = -1 }},
		{`algorithm "swaps" has chunks of -5 bytes`, func(l *alltoallv.List) { l.ChunkBytes = -5 }},
		{`algorithm "swaps": 1 sizes and 2 times`, func(l *alltoallv.List) { l.Bytes = l.Bytes[:1] }},
		{"algorithm swaps orders 2 peers of rank 1 among 4 ranks", func(l *alltoallv.List) { l.Orders[1] = l.Orders[1][:2] }},
		{"the order [2 1 1] of rank 3 does not name every other rank once", func(l *alltoallv.List) { l.Orders[3] = []int{2, 1, 1} }},
		{"the order [2 1 4] of rank 3 does not name every other rank once", func(l *alltoallv.List) { l.Orders[3] = []int{2, 1, 4} }},
		{"ranks 0 and 2 both send to rank 1 in step 0", func(l *alltoallv.List) { l.Orders[2] = []int{1, 0, 3} }},
	} {
		l := swaps(4)
		c.wrong(l)
		require.ErrorContains(t, l.Check(), c.said)
		require.ErrorIs(t, l.Check(), alltoallv.ErrInvalid)
		worldtest.Local(t, 4, 32<<20, func(r *worldtest.Rank) {
			_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{l.Algorithm()}})
			require.ErrorContains(r.T, err, c.said)
			require.ErrorIs(r.T, err, alltoallv.ErrInvalid)
		})
	}
	require.ErrorContains(t, swaps(1).Check(), "has orders of 1 ranks, want at least 2")
	require.NoError(t, swaps(2).Check())
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{swaps(4).Algorithm()}})
		require.ErrorContains(r.T, err, "algorithm swaps orders 0 peers of rank 0 among 2 ranks")
	})
}

// another is a user's algorithm whose orders are those of its field.
type another struct {
	backwards
	turned bool
}

func (a another) Order(rank, size int) []int {
	order := a.backwards.Order(rank, size)
	if a.turned {
		slices.Reverse(order)
	}
	return order
}

// Ranks whose algorithms of one name differ would send in orders that do not pair up.
func TestF3_RanksWithOtherAlgorithmsAreRefused(t *testing.T) {
	slower := func(l *alltoallv.List) { l.Microseconds = []float64{1e6, 2} }
	for _, change := range []func(l *alltoallv.List){func(l *alltoallv.List) { l.Window = 2 }, func(l *alltoallv.List) { l.Staged = true }, slower} {
		worldtest.Local(t, 4, 32<<20, func(r *worldtest.Rank) {
			l := swaps(4)
			if r.Rank() == 2 {
				change(l)
			}
			_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{l.Algorithm()}})
			require.ErrorIs(r.T, err, comm.ErrMismatch)
			require.Regexp(r.T, `rank 0 has .*swaps of digest [0-9a-f]{16}.*rank 2 has .*swaps of digest [0-9a-f]{16}`, err.Error())
		})
	}
	worldtest.Local(t, 4, 32<<20, func(r *worldtest.Rank) {
		_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{another{turned: r.Rank() == 1}}})
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.Regexp(r.T, `backwards of digest .* backwards of digest `, err.Error())
	})
}
