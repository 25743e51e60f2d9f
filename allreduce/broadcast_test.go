package allreduce_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Every rank is the root in turn, with buffers in the heap and outside, of lengths that fit no chunk, by every algorithm.
func TestBroadcast(t *testing.T) {
	for _, algorithm := range algorithms {
		for _, n := range []int{1, 2, 3, 5} {
			worldtest.Local(t, n, segment, func(r *worldtest.Rank) {
				x := newReducer(r, allreduce.Options{Algorithm: algorithm, OneShotBytes: 256 << 10, SlotBytes: 4 << 10})
				a := newArena(r, 200_000, 7)
				for call, length := range []int64{0, 1, 17, 4095, 4096, 100_001, 200_000} {
					root := call % n
					buf := a.pick(true, length)
					for i := range buf.Bytes() {
						buf.Bytes()[i] = worldtest.Element(call, r.Rank(), 0, int64(i))
					}
					r.Must(x.Broadcast(nil, buf, root))
					r.Must(worldtest.Check(buf.Bytes(), call, root, 0))
				}
				r.Must(x.Close(r.Ctx))
				a.free(r)
			})
		}
	}
}

func TestBroadcastOnAStreamAndAcrossProcesses(t *testing.T) {
	worldtest.Procs(t, 3, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		s, err := device.Host().NewStream()
		r.Must(err)
		a := newArena(r, 1<<20, 3)
		for call := range 6 {
			buf := a.pick(call%2 == 0, 1<<20-7)
			for i := range buf.Bytes() {
				buf.Bytes()[i] = worldtest.Element(call, r.Rank(), 0, int64(i))
			}
			r.Must(x.Broadcast(s, buf, call%3))
			r.Must(s.Synchronize())
			r.Must(worldtest.Check(buf.Bytes(), call, call%3, 0))
		}
		r.Must(x.Close(r.Ctx))
		r.Must(s.Close())
		a.free(r)
	})
}

// A rank that does not know its elements finds out that two others have different ones, and so is not left alone by them. Alone it fits any.
func TestF3_ElementsOfABroadcastThatDisagree(t *testing.T) {
	test := func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		b := hostBuf(100)
		views := []memory.View{b, memory.As[float32](b), memory.As[int32](b), b}
		err := x.Broadcast(nil, views[r.Rank()], 0)
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "100 bytes (float32)")
		require.ErrorContains(r.T, err, "100 bytes (int32)")
		views[2] = memory.As[float32](b)
		r.Must(x.Broadcast(nil, views[r.Rank()], 0))
		r.Must(x.Close(r.Ctx))
	}
	worldtest.Local(t, 4, segment, test)
	worldtest.Hosts(t, 4, 2, 64<<20, test)
}

func TestBroadcastRefusesRoots(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := newReducer(r, allreduce.Options{})
		a := newArena(r, 100, 1)
		for _, root := range []int{-1, 2, 1 << 40, -1 << 40} {
			err := x.Broadcast(nil, a.pick(true, 100), root)
			require.ErrorIs(r.T, err, allreduce.ErrInvalid)
			require.ErrorContains(r.T, err, fmt.Sprintf("broadcast from rank %d, want 0 to 1", root))
		}
		r.Must(x.Broadcast(nil, a.pick(true, 100), 1))
		d, err := x.Explain(kernels.Broadcast, 1<<20, kernels.Uint8)
		r.Must(err)
		require.Equal(r.T, "two-shot", d.Algorithm)
		r.Must(x.Close(r.Ctx))
		a.free(r)
	})
}
