package alltoallv_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

func init() { worldtest.Unseen() }

// backwards is a user's algorithm: a ring the other way round, for skewed traffic only.
type backwards struct{ broken bool }

func (backwards) Name() string { return "backwards" }
func (b backwards) Order(rank, size int) []int {
	order := alltoallv.Rotation(rank, size)
	for i, j := 0, len(order)-1; i < j; i, j = i+1, j-1 {
		order[i], order[j] = order[j], order[i]
	}
	if b.broken && rank == 1 {
		order[0], order[1] = order[1], order[0]
	}
	return order
}
func (backwards) Schedule(*alltoallv.Traffic) alltoallv.Schedule {
	return alltoallv.Schedule{Window: 1, ChunkBytes: 1000}
}
func (backwards) Cost(t *alltoallv.Traffic) (float64, string) {
	if t.Skew < 2 {
		return math.Inf(1), fmt.Sprintf("skew %.1f", t.Skew)
	}
	return 0, "skewed"
}

func TestOwnAlgorithmIsSelected(t *testing.T) {
	worldtest.Local(t, 4, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{backwards{}}})
		r.Must(err)
		dst, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		src := memory.Host(make([]byte, 1<<20))
		even := [][]int64{{9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}}
		skewed := [][]int64{{0, 1, 50000, 1}, {1, 0, 50000, 1}, {1, 50000, 0, 1}, {1, 1, 50000, 0}}
		for call, m := range [][][]int64{even, skewed, skewed, even} {
			me := r.Rank()
			d, err := x.Explain(&alltoallv.Splits{Send: m[me], Recv: column(m, me)}, true)
			r.Must(err)
			if want := call == 1 || call == 2; (d.Algorithm == "backwards") != want {
				r.Must(fmt.Errorf("call %d: %v", call, d))
			}
			r.Must(exchange(r, x, nil, dst.View(), src, m, 1, call))
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestX8_OrdersThatDoNotPairUpAreRefused(t *testing.T) {
	worldtest.Local(t, 4, 32<<20, func(r *worldtest.Rank) {
		_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithms: []alltoallv.Algorithm{backwards{broken: true}}})
		require.ErrorIs(r.T, err, alltoallv.ErrInvalid)
		require.ErrorContains(r.T, err, "both send to rank")
		_, err = alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: "fastest"})
		require.ErrorContains(r.T, err, "fastest")
		// One rank's mistake is every rank's error.
		o := alltoallv.Options{}
		if r.Rank() == 3 {
			o.Slots = -1
		}
		_, err = alltoallv.New(r.Ctx, r.Heap, o)
		require.ErrorContains(r.T, err, "Options.Slots is -1")
	})
}

func TestExplainSaysWhy(t *testing.T) {
	worldtest.Local(t, 2, 64<<20, func(r *worldtest.Rank) {
		for _, force := range []string{"", "ring"} {
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: force})
			r.Must(err)
			me := r.Rank()
			explain := func(n int64, inPlace bool) alltoallv.Decision {
				sp := &alltoallv.Splits{Send: []int64{n, n}, Recv: []int64{n, n}}
				_, err := x.Explain(sp, inPlace)
				r.Must(err)
				d, err := x.Explain(sp, inPlace)
				r.Must(err)
				if !d.Cached || len(d.Candidates) != 5 {
					r.Must(fmt.Errorf("rank %d: %+v", me, d))
				}
				return d
			}
			want := map[bool]string{true: "ring", false: ""}[force != ""]
			for _, c := range []struct {
				n       int64
				inPlace bool
				name    string
			}{{16, false, "packet"}, {4000, false, "direct"}, {4 << 20, true, "direct"}, {4 << 20, false, "direct"}} {
				name := c.name
				if want != "" {
					name = want
				}
				if d := explain(c.n, c.inPlace); d.Algorithm != name || d.Forced != (force != "") || d.String() == "" {
					r.Must(fmt.Errorf("%d bytes, in place %v: %v", c.n, c.inPlace, d))
				}
			}
			r.Must(x.Close(r.Ctx))
		}
	})
}

func TestExchangeAllocatesNothingOnceWarm(t *testing.T) {
	for _, staged := range []bool{false, true} {
		worldtest.Local(t, 2, 64<<20, func(r *worldtest.Rank) {
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{CacheEntries: 4})
			r.Must(err)
			buf, err := r.Heap.Alloc(2 << 20)
			r.Must(err)
			dst := buf.View()
			if staged {
				dst = memory.Host(make([]byte, 2<<20))
			}
			src := memory.Host(make([]byte, 2<<20))
			var sets []*alltoallv.Splits
			for _, n := range []int64{10, 5000, 900000} {
				sets = append(sets, &alltoallv.Splits{Send: []int64{n, n}, Recv: []int64{n, n}})
			}
			one := func() {
				for _, sp := range sets {
					err = errors.Join(err, x.Exchange(nil, dst, src, sp))
				}
			}
			one()
			// Both ranks count, one after the other's warm-up; the counter is of the whole process.
			r.Barrier()
			if n := testing.AllocsPerRun(50, one); n != 0 && err == nil && !proctest.Race {
				err = fmt.Errorf("%v allocations a run", n)
			}
			r.Must(err)
			r.Must(x.Close(r.Ctx))
		})
	}
}

func TestX9_MessagesOfTooManyChunksAreRefused(t *testing.T) {
	worldtest.Local(t, 2, 256<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{SlotBytes: 128})
		r.Must(err)
		const n = 128<<20 + 1 // more than 2^20 chunks of 128 bytes
		sp := &alltoallv.Splits{Send: []int64{0, 0}, Recv: []int64{0, 0}}
		sp.Send[1-r.Rank()], sp.Recv[1-r.Rank()] = n, n
		src, dst := memory.Host(make([]byte, n)), memory.Host(make([]byte, n))
		err = x.Exchange(nil, dst, src, sp)
		require.ErrorIs(r.T, err, alltoallv.ErrInvalid)
		require.ErrorContains(r.T, err, "128")
		r.Must(x.Close(r.Ctx))
	})
}
