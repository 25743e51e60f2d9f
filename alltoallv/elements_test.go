package alltoallv_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Ranks that send each other as many bytes of different elements both hear of both, whichever way the bytes go. The others hear nothing, and the next call
// works.
func TestF3_ElementsThatDisagree(t *testing.T) {
	for _, validate := range []bool{false, true} {
		for _, inHeap := range []bool{false, true} {
			t.Run(fmt.Sprintf("validate %v, in the heap %v", validate, inHeap), func(t *testing.T) {
				worldtest.Local(t, 4, 64<<20, func(r *worldtest.Rank) { elementsThatDisagree(r, validate, inHeap) })
			})
		}
	}
	t.Run("hosts", func(t *testing.T) {
		worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) { elementsThatDisagree(r, false, false) })
	})
	t.Run("hosts in the heap", func(t *testing.T) {
		worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) { elementsThatDisagree(r, false, true) })
	})
}

func elementsThatDisagree(r *worldtest.Rank, validate, inHeap bool) {
	x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{EagerBytes: 8 << 10, SlotBytes: 64 << 10, Validate: validate, Timeout: time.Minute})
	r.Must(err)
	src, dst := memory.Host(make([]byte, 4<<20)), memory.Host(make([]byte, 4<<20))
	if inHeap {
		from, err := r.Heap.Alloc(src.Len())
		r.Must(err)
		to, err := r.Heap.Alloc(src.Len())
		r.Must(err)
		src, dst = from.View(), to.View()
	}
	as := []func(memory.View) memory.View{memory.As[float32], memory.As[int32], func(v memory.View) memory.View { return v }, memory.As[float32]}[r.Rank()]
	for i, bytes := range []int64{8, 600, 20 << 10, 1 << 20} {
		splits := &alltoallv.Splits{Send: []int64{bytes, bytes, bytes, bytes}, Recv: []int64{bytes, bytes, bytes, bytes}}
		splits.Send[r.Rank()], splits.Recv[r.Rank()] = 0, 0
		err := x.Exchange(nil, as(dst), as(src), splits)
		switch {
		case r.Rank() == 2 && !validate:
			r.Must(err)
		case r.Rank() == 1 && !validate: // of two ranks, one is named
			require.ErrorIs(r.T, err, comm.ErrMismatch)
			require.ErrorContains(r.T, err, "float32")
			require.ErrorContains(r.T, err, "int32")
		default:
			require.ErrorIs(r.T, err, comm.ErrMismatch)
			said := fmt.Sprintf("rank 0 sends %d bytes to rank 1, which expects %d (sent as float32, expected as int32)", bytes, bytes)
			if !validate {
				var bad *kernels.CountMismatchError
				require.ErrorAs(r.T, err, &bad)
				me := kernels.CountMismatchError{Src: r.Rank(), Dst: 1, Sent: uint64(bytes), Expected: uint64(bytes), Epoch: bad.Epoch,
					SentElements: kernels.ElementsOf(kernels.Float32, false), ExpectedElements: kernels.ElementsOf(kernels.Int32, false)}
				if bad.Dst == r.Rank() {
					me.Src, me.Dst, me.SentElements, me.ExpectedElements = 1, r.Rank(), me.ExpectedElements, me.SentElements
				}
				require.Equal(r.T, me, *bad)
				said = "float32"
			}
			require.ErrorContains(r.T, err, said)
		}
		// As bytes, or as unsigned numbers next to signed ones, they go. Nothing at all has no elements.
		sizes := [][]int64{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 1000, 11, 12}, {13, 14, 70000, 16}}
		r.Must(exchange(r, x, nil, dst, src, sizes, 1, i))
		unsigned := []func(memory.View) memory.View{memory.As[uint32], memory.As[int32], memory.As[uint32], memory.As[int32]}[r.Rank()]
		r.Must(x.Exchange(nil, unsigned(dst), unsigned(src), splits))
		none := make([]int64, 4)
		r.Must(x.Exchange(nil, as(dst), as(src), &alltoallv.Splits{Send: none, Recv: none}))
	}
	r.Must(x.Close(r.Ctx))
}

// A rank that only sends has done its part before its receiver looks, if the message is small. It hears of the elements by the end of the next call.
func TestF3_ElementsOfASmallMessageThatDisagree(t *testing.T) {
	for _, bytes := range []int64{8, 600} {
		worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
			r.Must(err)
			src, dst := memory.Host(make([]byte, 1<<10)), memory.Host(make([]byte, 1<<10))
			as := []func(memory.View) memory.View{memory.As[float32], memory.As[int32]}[r.Rank()]
			splits := &alltoallv.Splits{Send: []int64{0, bytes}, Recv: []int64{0, 0}}
			if r.Rank() == 1 {
				splits.Send, splits.Recv = []int64{0, 0}, []int64{bytes, 0}
			}
			first := x.Exchange(nil, as(dst), as(src), splits)
			second := x.Exchange(nil, dst, src, splits)
			err = errors.Join(first, second)
			require.True(r.T, (first == nil) != (second == nil) && (r.Rank() == 0 || first != nil), "%v, %v", first, second)
			require.ErrorIs(r.T, err, comm.ErrMismatch)
			require.ErrorContains(r.T, err, fmt.Sprintf("call 1: rank 0 sends %d bytes to rank 1, which expects %d (sent as float32, expected as int32)", bytes, bytes))
			r.Must(x.Exchange(nil, as(dst), as(src), &alltoallv.Splits{Send: []int64{0, 0}, Recv: []int64{0, 0}}))
			r.Must(x.Close(r.Ctx))
		})
	}
}

// Splits in memory say how many bytes go, and the views what they are.
func TestF3_ElementsOfLiveSplitsThatDisagree(t *testing.T) {
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
		r.Must(err)
		src, dst := memory.Host(make([]byte, 1<<18)), memory.Host(make([]byte, 1<<18))
		as := []func(memory.View) memory.View{memory.As[float32], memory.As[int32]}[r.Rank()]
		for _, n := range []int64{8, 1 << 16} {
			live := []int64{n, n, 0, n, n, n, 0, n}
			splits := &alltoallv.Splits{Live: memory.Host(shm.Bytes(live))}
			err := x.Exchange(nil, as(dst), as(src), splits)
			require.ErrorIs(r.T, err, comm.ErrMismatch)
			require.ErrorContains(r.T, err, "float32")
			require.ErrorContains(r.T, err, "int32")
			r.Must(x.Exchange(nil, dst, src, splits))
		}
		r.Must(x.Close(r.Ctx))
	})
}
