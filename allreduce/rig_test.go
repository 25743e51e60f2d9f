package allreduce_test

import (
	"fmt"
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/reference"
)

var dtypes = []kernels.DType{kernels.Uint8, kernels.Int32, kernels.Int64, kernels.Float16, kernels.BFloat16, kernels.Float32,
	kernels.Float64, kernels.Float8E4M3, kernels.Float8E5M2}

var ops = []kernels.ReduceOp{kernels.Sum, kernels.Avg, kernels.Min, kernels.Max, kernels.Prod}

var algorithms = []string{"", "one-shot", "two-shot", "ring"}

// value is what a rank has at an element: numbers so small that float32 adds and multiplies them exactly, in any order,
// and every type holds them.
func value(call, rank int, i int64, dt kernels.DType, op kernels.ReduceOp) float64 {
	h := worldtest.Element(call, rank, 0, i)
	v := float64(h%7) + 1
	if op == kernels.Prod {
		v = float64(int(1) << (h % 2))
	}
	if h >= 128 && dt != kernels.Uint8 {
		v = -v
	}
	return v
}

// expect is what the ranks' values make.
func expect(call, ranks int, i int64, dt kernels.DType, op kernels.ReduceOp) float64 {
	return reference.Reduced(op, ranks, func(rank int) float64 { return value(call, rank, i, dt, op) })
}

// job is one call, the same on every rank.
type job struct {
	coll   kernels.Collective
	dt     kernels.DType
	op     kernels.ReduceOp
	counts []int64 // slices, for reduce-scatter and all-gather
	count  int64   // of all slices
	plain  bool    // equal slices, called without counts
	number int
}

func (j job) String() string {
	return fmt.Sprintf("call %d: %v (%v) of %d %v, slices %v", j.number, j.coll, j.op, j.count, j.dt, j.counts)
}

// draw makes a job of at most limit bytes.
func draw(rnd *rand.Rand, n int, limit int64, number int) job {
	j := job{coll: []kernels.Collective{kernels.AllReduce, kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather}[rnd.IntN(4)],
		dt: dtypes[rnd.IntN(len(dtypes))], number: number}
	if j.coll.Reduces() {
		for j.op = ops[rnd.IntN(len(ops))]; !j.op.Reducible(j.dt); {
			j.op = ops[rnd.IntN(len(ops))]
		}
	}
	size := func(most int64) int64 {
		if rnd.IntN(2) == 0 {
			return min([]int64{0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 127, 1000}[rnd.IntN(14)], most)
		}
		return rnd.Int64N(most + 1)
	}
	most := limit / j.dt.Size()
	if j.coll == kernels.AllReduce {
		j.count = size(most)
		return j
	}
	most /= int64(n)
	j.plain = rnd.IntN(2) == 0
	c := size(most)
	for range n {
		j.counts = append(j.counts, c)
		j.count += c
		if !j.plain {
			c = size(most)
		}
	}
	return j
}

// arena is memory of one rank that jobs take their buffers from.
type arena struct {
	foreign  []byte
	src, dst *memory.Buffer
	rnd      *rand.Rand // this rank's own: ranks place their buffers differently
}

func newArena(r *worldtest.Rank, limit int64, seed uint64) *arena {
	a := &arena{foreign: make([]byte, 2*limit+256), rnd: rand.New(rand.NewPCG(seed, uint64(r.Rank())))}
	var err error
	a.src, err = r.Heap.Alloc(limit + 128)
	r.Must(err)
	a.dst, err = r.Heap.Alloc(limit + 128)
	r.Must(err)
	return a
}

func (a *arena) free(r *worldtest.Rank) {
	r.Must(a.src.Free())
	r.Must(a.dst.Free())
}

// pick places n bytes in the half of the arena for sources or for destinations, symmetric or foreign, at any alignment.
func (a *arena) pick(dst bool, n int64) memory.View {
	shift := []int64{0, 0, 64, a.rnd.Int64N(64)}[a.rnd.IntN(4)]
	if a.rnd.IntN(2) == 0 {
		if dst {
			return a.dst.View().Slice(shift, n)
		}
		return a.src.View().Slice(shift, n)
	}
	if dst {
		shift += int64(len(a.foreign) / 2)
	}
	return memory.Host(a.foreign[shift : shift+n])
}

// slice is where the part of a rank begins among all elements, and how long it is; in an all-reduce it is everything.
func (j job) slice(rank int) (at, count int64) {
	if j.coll == kernels.AllReduce {
		return 0, j.count
	}
	for _, c := range j.counts[:rank] {
		at += c
	}
	return at, j.counts[rank]
}

// run makes the call on s with buffers placed at random and checks every element.
func (j job) run(r *worldtest.Rank, x *allreduce.Reducer, s device.Stream, a *arena) error {
	es, me := j.dt.Size(), r.Rank()
	at, mine := j.slice(me)
	in, out := j.count, mine
	if !j.coll.Reduces() {
		in, out = mine, j.count
	}
	var src, dst memory.View
	switch inPlace := a.rnd.IntN(3) == 0; {
	case inPlace && j.coll.Gathers():
		dst = a.pick(true, out*es)
		src = dst
		if j.coll == kernels.AllGather {
			src = dst.Slice(at*es, mine*es)
		}
	case inPlace:
		src = a.pick(false, in*es)
		dst = src.Slice(at*es, mine*es)
	default:
		src, dst = a.pick(false, in*es), a.pick(true, out*es)
		for i := range dst.Bytes() {
			dst.Bytes()[i] = 0xa5
		}
	}
	first := int64(0) // number of the element of src at index 0
	if !j.coll.Reduces() {
		first = at
	}
	for i := range in {
		reference.Put(src.Bytes(), j.dt, i, value(j.number, me, first+i, j.dt, j.op))
	}
	if err := j.call(x, s, dst, src); err != nil {
		return err
	}
	if s != nil {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	return j.check(dst.Bytes(), me, r.Size(), at)
}

func (j job) call(x *allreduce.Reducer, s device.Stream, dst, src memory.View) error {
	switch {
	case j.coll == kernels.AllReduce:
		return x.AllReduce(s, dst, src, j.dt, j.op)
	case j.coll == kernels.ReduceScatter && j.plain:
		return x.ReduceScatter(s, dst, src, j.dt, j.op)
	case j.coll == kernels.ReduceScatter:
		return x.ReduceScatterV(s, dst, src, j.counts, j.dt, j.op)
	case j.plain:
		return x.AllGather(s, dst, src, j.dt)
	default:
		return x.AllGatherV(s, dst, src, j.counts, j.dt)
	}
}

// check compares every element of dst with the reference. at is the number of this rank's first element.
func (j job) check(dst []byte, me, ranks int, at int64) error {
	var owner int
	var end int64
	if j.coll == kernels.AllGather {
		owner, end = -1, 0
	}
	for i := range int64(len(dst)) / j.dt.Size() {
		var want float64
		switch j.coll {
		case kernels.AllReduce:
			want = expect(j.number, ranks, i, j.dt, j.op)
		case kernels.ReduceScatter:
			want = expect(j.number, ranks, at+i, j.dt, j.op)
		default:
			for i >= end {
				owner++
				end += j.counts[owner]
			}
			want = value(j.number, owner, i, j.dt, j.op)
		}
		var w [8]byte
		reference.Put(w[:], j.dt, 0, want)
		if got := dst[i*j.dt.Size():][:j.dt.Size()]; string(got) != string(w[:j.dt.Size()]) {
			return fmt.Errorf("%v: rank %d has %x (%v) at %d, want %x (%v)", j, me, got, reference.Get(dst, j.dt, i), i, w[:j.dt.Size()], want)
		}
	}
	return nil
}
