package allreduce_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/plans"
	"github.com/switchyard-moe/switchyard/test/reference"
)

// readingReduceScatter has every rank read its slice at all others, in chunks: nothing but reads of inputs, and of semaphores above 0.
func readingReduceScatter(ranks, chunks int) *plan.Plan {
	p := &plan.Plan{Name: "reading", Collective: plan.ReduceScatter, Ranks: ranks, Chunks: chunks, Programs: make([][]plan.Step, ranks)}
	for rank := range ranks {
		for c := range chunks {
			var from []plan.Place
			for peer := range ranks {
				at := plan.At(plan.Input, rank*chunks+c)
				if peer != rank {
					at = at.Of(peer)
				}
				from = append(from, at)
			}
			to := plan.At(plan.Output, c)
			p.Programs[rank] = append(p.Programs[rank], plan.Step{Do: plan.Reduce, From: from, To: &to})
		}
		for _, do := range []plan.Kind{plan.Signal, plan.Wait} {
			for i := 1; i < ranks; i++ {
				peer := (rank + i) % ranks
				p.Programs[rank] = append(p.Programs[rank], plan.Step{Do: do, Peer: &peer, Semaphore: 2})
			}
		}
	}
	return p
}

func checkedPlan(r *worldtest.Rank, p *plan.Plan) *plan.Checked {
	c, err := plan.Check(p)
	r.Must(err)
	return c
}

// allPlans are plans for every collective, by name.
func allPlans(r *worldtest.Rank) (all []*plan.Checked) {
	n := r.Size()
	for _, p := range []*plan.Plan{plans.OneShotAllReduce(n), plans.RingAllReduce(n), readingReduceScatter(n, 3), plans.RingAllGather(n), plans.DirectAllToAll(n)} {
		all = append(all, checkedPlan(r, p))
	}
	return all
}

// plannedJobs runs random calls of one plan's collective through it.
func plannedJobs(r *worldtest.Rank, p *plan.Checked, seed uint64, jobs int, limit int64) {
	x := newReducer(r, allreduce.Options{Plans: allPlans(r), Algorithm: p.Plan.Name, SlotBytes: 512, OneShotBytes: 100})
	a := newArena(r, limit, seed)
	s, err := r.Heap.Device().NewStream()
	r.Must(err)
	rnd := rand.New(rand.NewPCG(seed, 98))
	for number := 0; number < jobs; {
		j := draw(rnd, r.Size(), limit, number)
		if p.Plan.Collective == plan.AllToAll {
			r.Must(allToAll(r, x, a, number, j.dt, j.count/int64(r.Size())))
			number++
			continue
		}
		if j.coll.String() != string(p.Plan.Collective) || !j.plain && j.coll != kernels.AllReduce {
			continue
		}
		d, err := x.Explain(j.coll, j.count, j.dt)
		r.Must(err)
		planned := !j.coll.Reduces() || p.RoundsOnce || j.dt.PartialSize() == j.dt.Size()
		if planned != (d.Algorithm == "plan") || planned != d.Forced || planned && d.Way != "plan "+p.Plan.Name {
			r.Must(fmt.Errorf("%v takes %v", j, d))
		}
		r.Must(j.run(r, x, nil, a))
		r.Must(j.run(r, x, s, a))
		number++
	}
	r.Must(s.Close())
	r.Must(x.Close(r.Ctx))
	a.free(r)
}

// allToAll makes one call with count elements for each rank, and checks every element.
func allToAll(r *worldtest.Rank, x *allreduce.Reducer, a *arena, number int, dt kernels.DType, count int64) error {
	es, n := dt.Size(), int64(r.Size())
	src := a.pick(false, n*count*es)
	dst := src
	if a.rnd.IntN(3) > 0 {
		dst = a.pick(true, n*count*es)
	}
	for i := range n * count {
		reference.Put(src.Bytes(), dt, i, value(number, r.Rank(), i, dt, kernels.Sum))
	}
	if err := x.AllToAll(nil, dst, src, dt); err != nil {
		return err
	}
	for i := range n * count {
		want := make([]byte, es)
		reference.Put(want, dt, 0, value(number, int(i/max(count, 1)), int64(r.Rank())*count+i%max(count, 1), dt, kernels.Sum))
		if got := dst.Bytes()[i*es : (i+1)*es]; string(got) != string(want) {
			return fmt.Errorf("all-to-all %d of %d %v: rank %d has %x at %d, want %x", number, count, dt, r.Rank(), got, i, want)
		}
	}
	return nil
}

func TestR2_PlansAgainstReference(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for _, n := range []int{2, 3, 4, 6} {
		for i := range 5 {
			t.Run(fmt.Sprintf("ranks=%d/%d", n, i), func(t *testing.T) {
				worldtest.Local(t, n, segment, func(r *worldtest.Rank) { plannedJobs(r, allPlans(r)[i], seed, 12, 20<<10) })
			})
		}
	}
}

// Chunks of more than a slot move in parts.
func TestR2_PlansOfLargeCalls(t *testing.T) {
	for i := range 5 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			worldtest.Local(t, 3, segment, func(r *worldtest.Rank) { plannedJobs(r, allPlans(r)[i], 5, 3, 3<<20) })
		})
	}
}

func TestR2_PlansAcrossProcesses(t *testing.T) {
	worldtest.Procs(t, 3, segment, func(r *worldtest.Rank) {
		for i, p := range allPlans(r) {
			plannedJobs(r, p, uint64(i), 6, 1<<20)
		}
	})
}

// Without an algorithm that is forced the times of plans are compared with all other estimates.
func TestSizesChooseAmongPlans(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		small, large, untimed := plans.OneShotAllReduce(2), plans.RingAllReduce(2), plans.RingAllGather(2)
		small.Bytes, small.Microseconds = []int64{64, 4096}, []float64{.1, 1e6}
		large.Bytes, large.Microseconds = []int64{64, 1 << 20}, []float64{1e6, .1}
		x := newReducer(r, allreduce.Options{Plans: []*plan.Checked{checkedPlan(r, small), checkedPlan(r, large), checkedPlan(r, untimed)}})
		for _, c := range []struct {
			coll  kernels.Collective
			count int64
			want  string
		}{
			{kernels.AllReduce, 16, "plan " + small.Name},
			{kernels.AllReduce, 1 << 18, "plan " + large.Name},
			{kernels.AllReduce, 1 << 14, "two-shot"},
			{kernels.AllGather, 16, "one-shot"}, // its plan has no times
		} {
			d, err := x.Explain(c.coll, c.count, f32)
			r.Must(err)
			if d.Way != c.want {
				r.Must(fmt.Errorf("%v of %d takes %q, want %q: %v", c.coll, c.count, d.Way, c.want, d))
			}
		}
		_, err := x.Explain(kernels.AllToAll, 16, f32)
		if want := "all-to-all of 16 float32: no plan of 3 does that"; err == nil || !strings.Contains(err.Error(), want) {
			r.Must(fmt.Errorf("%v, want %s", err, want))
		}
		r.Must(x.Close(r.Ctx))
	})
}

// Ranks with other plans do not make a Reducer, and the error names both.
func TestPlansAreCompared(t *testing.T) {
	errs := make([]error, 2)
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		p := plans.RingAllReduce(2)
		if r.Rank() == 1 {
			p.Bytes, p.Microseconds = []int64{8}, []float64{1}
		}
		_, errs[r.Rank()] = allreduce.New(r.Ctx, r.Heap, allreduce.Options{Plans: []*plan.Checked{checkedPlan(r, p)}})
	})
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.Regexp(t, `plan "all-reduce-ring-2" of digest [0-9a-f]{16}.*plan "all-reduce-ring-2" of digest [0-9a-f]{16}`, err.Error())
	}
}

func TestPlansAreForTheWorld(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		two, three := checkedPlan(r, plans.RingAllReduce(2)), checkedPlan(r, plans.RingAllReduce(3))
		for _, c := range []struct {
			want  string
			plans []*plan.Checked
		}{
			{`plan "all-reduce-ring-3" is for 3 ranks, the group has 2`, []*plan.Checked{three}},
			{`two plans are called "all-reduce-ring-2"`, []*plan.Checked{two, two}},
			{"Options.Plans has nil at place 0", []*plan.Checked{nil}},
		} {
			_, err := allreduce.New(r.Ctx, r.Heap, allreduce.Options{Plans: c.plans})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				r.Must(fmt.Errorf("%v, want %s", err, c.want))
			}
		}
	})
}

// Ranks that make different calls hear of it before a buffer is written, and the next call works.
func TestF3_PlansAfterDifferentCalls(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		p := checkedPlan(r, plans.RingAllReduce(3))
		x := newReducer(r, allreduce.Options{Plans: []*plan.Checked{p}, Algorithm: p.Plan.Name})
		n := int64(64)
		if r.Rank() == 1 {
			n = 32
		}
		buf := memory.Host(make([]byte, 4*n))
		err := x.AllReduce(nil, buf, buf, f32, kernels.Sum)
		var mismatch *kernels.CallMismatchError
		if !errors.As(err, &mismatch) || mismatch.Mine.Count+mismatch.Theirs.Count != 96 && mismatch.Mine.Count != mismatch.Theirs.Count {
			r.Must(fmt.Errorf("got %v", err))
		}
		a := newArena(r, 4096, 1)
		j := job{coll: kernels.AllReduce, dt: f32, count: 1000}
		r.Must(j.run(r, x, nil, a))
		a.free(r)
		r.Must(x.Close(r.Ctx))
	})
}

// A rank that does not come is named.
func TestF1_PlansNameTheLateRank(t *testing.T) {
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		p := checkedPlan(r, plans.RingAllGather(3))
		x := newReducer(r, allreduce.Options{Plans: []*plan.Checked{p}, Algorithm: p.Plan.Name, Timeout: time.Second})
		if r.Rank() != 2 {
			err := x.AllGather(nil, hostBuf(3*64), hostBuf(64), f32)
			var late *comm.PeerError
			if !errors.As(err, &late) || late.Rank != 2 {
				r.Must(fmt.Errorf("rank %d: %v", r.Rank(), err))
			}
		}
		r.Must(x.Close(r.Ctx))
	})
}
