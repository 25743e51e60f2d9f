package allreduce_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/plans"
	"github.com/switchyard-moe/switchyard/test/reference"
)

// likeTheHost makes random calls of plans, of which half are drawn, and keeps the outputs by device: numbers are rounded, so their sums depend
// on the order.
type likeTheHost struct {
	ranks, jobs int
	limit       int64 // bytes of a buffer
	seed        uint64

	mu      sync.Mutex
	outputs map[device.Kind]map[string][]byte
}

func (l *likeTheHost) run(r *worldtest.Rank) {
	drawn := rand.New(rand.NewPCG(l.seed, 1))
	all := allPlans(r)
	for i := range all {
		if drawn.IntN(2) == 0 {
			all[i] = checkedPlan(r, plans.Random(drawn, all[i].Plan.Collective, l.ranks))
		}
		all[i].Plan.Name = fmt.Sprint("plan ", i)
		all[i].Plan.Bytes, all[i].Plan.Microseconds = []int64{1 << 10, 4 << 10}, []float64{1e-12, 1e-9}
	}
	all[1].Plan.Microseconds = []float64{1e-9, 1e-12} // the other all-reduce, which is for large calls
	o := allreduce.Options{Plans: all, MaxSMs: 3, StagingBytes: 40 << 10, OneShotBytes: 1 << 10, Slots: 2, Timeout: 20 * time.Second}
	if r.Device.Kind() == device.HostKind {
		o.Slots, o.SlotBytes = 2, 4096
	}
	x, err := allreduce.New(r.Ctx, r.Heap, o)
	r.Must(err)
	y := newYard(r, l.limit+64)
	mine := rand.New(rand.NewPCG(l.seed, uint64(2+r.Rank())))
	for number := 0; number < l.jobs; {
		j := draw(drawn, l.ranks, l.limit, number)
		if j.counts != nil {
			for i := range j.counts {
				j.counts[i] = j.counts[0]
			}
			j.plain, j.count = true, j.counts[0]*int64(l.ranks)
			if drawn.IntN(3) == 0 {
				j.coll, j.op = kernels.AllToAll, kernels.Sum
			}
		}
		d, err := x.Explain(j.coll, j.count, j.dt)
		r.Must(err)
		if d.Algorithm != "plan" && j.coll.Reduces() && j.dt.PartialSize() != j.dt.Size() { // the plan hands partial results on
			continue
		}
		if d.Algorithm != "plan" || (d.Blocks > 0) != (r.Device.Kind() == device.CUDAKind) {
			r.Must(fmt.Errorf("%v takes %v", j, d))
		}
		out := l.perform(x, y, j, place{mine.IntN(3) == 0, mine.IntN(2), mine.IntN(2), mine.Int64N(3) * mine.Int64N(17), mine.Int64N(3) * mine.Int64N(17)})
		l.mu.Lock()
		l.outputs[r.Device.Kind()][fmt.Sprintf("%v by %s, rank %d", j, d.Way, r.Rank())] = out
		l.mu.Unlock()
		number++
	}
	r.Must(x.Close(r.Ctx))
	y.close()
}

// perform makes a call with numbers that rounding changes, on the yard's stream.
func (l *likeTheHost) perform(x *allreduce.Reducer, y *yard, j job, p place) []byte {
	var dst, src memory.View
	if j.coll == kernels.AllToAll {
		n := j.count * j.dt.Size()
		src, dst = y.in[p.in].Slice(p.inAt, n), y.out[p.out].Slice(p.outAt, n)
		if p.inPlace {
			dst = src
		}
	} else {
		dst, src, _ = y.buffers(j, p)
	}
	rnd := rand.New(rand.NewPCG(l.seed+uint64(j.number), uint64(y.r.Rank())))
	y.write(dst, bytes.Repeat([]byte{0xa5}, int(dst.Len())))
	b := make([]byte, src.Len())
	for i := range src.Len() / j.dt.Size() {
		v := (rnd.Float64() - 0.5) * 8
		if j.dt == kernels.Uint8 {
			v = float64(rnd.IntN(256))
		}
		reference.Put(b, j.dt, i, v)
	}
	y.write(src, b)
	y.r.Must(y.s.Synchronize())
	if j.coll == kernels.AllToAll {
		y.r.Must(x.AllToAll(y.s, dst, src, j.dt))
	} else {
		y.r.Must(j.call(x, y.s, dst, src))
	}
	y.r.Must(y.s.Synchronize())
	if err := x.Fault(); err != nil {
		y.r.Must(fmt.Errorf("%v, %v: %w", j, p, err))
	}
	return y.read(dst)
}

func (l *likeTheHost) compare(t *testing.T) {
	t.Helper()
	for _, of := range l.outputs {
		require.Equal(t, l.ranks*l.jobs, len(of))
	}
	for what, want := range l.outputs[device.HostKind] {
		require.True(t, bytes.Equal(want, l.outputs[device.CUDAKind][what]), what)
	}
}

func newLikeTheHost(ranks, jobs int, limit int64, seed uint64) *likeTheHost {
	return &likeTheHost{ranks: ranks, jobs: jobs, limit: limit, seed: seed, outputs: map[device.Kind]map[string][]byte{device.HostKind: {}, device.CUDAKind: {}}}
}

// The kernel of plans on the emulated driver gives the host's bits: every collective, type and operator, buffers in the heap and outside it, at
// any alignment, in place and not, in parts and at once.
func TestR2_PlansOfTheKernelAreTheHostsBitForBit(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	rounds := 6
	if testing.Short() || proctest.Race {
		rounds = 2
	}
	for i := range rounds {
		l := newLikeTheHost(2+i%3, 25, 30<<10, uint64(i))
		worldtest.GPUHeaps(t, l.ranks, memory.Options{SegmentBytes: 1 << 20}, l.run)
		worldtest.Local(t, l.ranks, 4<<20, l.run)
		l.compare(t)
	}
	worldtest.GPUHeaps(t, 2, memory.Options{SegmentBytes: 1 << 20}, planFaults)
}

func TestCUDA_R2_PlansAreTheHostsBitForBit(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8} {
		for seed := range uint64(3) {
			l := newLikeTheHost(n, 60, 1<<20, seed)
			worldtest.GPUs(t, n, 64<<20, l.run) // skips where there is no GPU
			worldtest.Local(t, n, 64<<20, l.run)
			l.compare(t)
		}
	}
}

func TestCUDA_F1_PlansAfterDifferentCallsAndLateRanks(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, planFaults)
}

// planFaults makes ranks that call different things hear of it and go on (F3), and a rank that waits until its timeout name the other (F1).
func planFaults(r *worldtest.Rank) {
	p := checkedPlan(r, plans.RingAllReduce(2))
	o := allreduce.Options{Plans: []*plan.Checked{p}, Algorithm: p.Plan.Name, MaxSMs: 3, StagingBytes: 40 << 10, OneShotBytes: 1 << 10, Slots: 2}
	x, err := allreduce.New(r.Ctx, r.Heap, o)
	r.Must(err)
	o.Timeout = 500 * time.Microsecond // the emulated clock goes 50 ns in every turn of the threads
	impatient, err := allreduce.New(r.Ctx, r.Heap, o)
	r.Must(err)
	y := newYard(r, 64<<10)
	for range 2 {
		n := 40_000 + int64(4*r.Rank())
		var differ *kernels.CallMismatchError
		err = x.AllReduce(nil, y.out[1].Slice(0, n), y.in[0].Slice(0, n), f32, kernels.Sum)
		require.ErrorAs(r.T, err, &differ)
		require.Equal(r.T, []int64{10_000 + int64(r.Rank()), 10_001 - int64(r.Rank())}, []int64{differ.Mine.Count, differ.Theirs.Count})
		r.Barrier()
		j := job{coll: kernels.AllReduce, dt: f32, count: 9000}
		r.Must(j.check(y.perform(x, j, place{in: 1}), r.Rank(), 2, 0))
		r.Barrier()
	}
	if r.Rank() == 0 {
		var missing *comm.PeerError
		err = impatient.AllReduce(nil, y.out[0], y.in[0], f32, kernels.Sum)
		if !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &missing) || missing.Rank != 1 {
			r.Must(fmt.Errorf("rank 1 does not come: %w", err))
		}
	}
	r.Barrier()
	r.Must(impatient.Close(r.Ctx))
	r.Must(x.Close(r.Ctx))
	y.close()
}

// A graph with a plan replays with other data each time.
func TestCUDA_PlansReplay(t *testing.T) {
	for _, n := range []int{2, 4} {
		worldtest.GPUs(t, n, 64<<20, func(r *worldtest.Rank) {
			p := checkedPlan(r, plans.RingAllReduce(n))
			x, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Plans: []*plan.Checked{p}, Algorithm: p.Plan.Name, MaxSMs: 4, StagingBytes: 256 << 10, Timeout: 20 * time.Second})
			r.Must(err)
			y := newYard(r, 1<<20)
			for where := range 2 {
				j := job{coll: kernels.AllReduce, dt: f32, op: kernels.Sum, count: 100_003}
				dst, src, first := y.buffers(j, place{in: where, out: where})
				y.load(j, dst, src, first)
				g, err := y.s.(*device.CUDAStream).Capture(func() error {
					return errors.Join(j.call(x, y.s, dst, src), j.call(x, y.s, dst, src))
				})
				r.Must(err)
				r.Barrier() // to make a graph may wait in the driver for a kernel on that GPU, which may wait for this rank
				for replay := range 20 {
					j.number = 100*where + replay
					y.load(j, dst, src, first)
					r.Must(g.Launch(y.s))
					r.Must(y.s.Synchronize())
					r.Must(j.check(y.read(dst), r.Rank(), n, 0))
				}
				r.Must(g.Close())
			}
			r.Must(x.Fault())
			r.Must(x.Close(r.Ctx))
			y.close()
		})
	}
}
