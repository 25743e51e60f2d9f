package core

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/test/plans"
)

func source(t *testing.T, p *plan.Plan) PlanSource {
	var b bytes.Buffer
	require.NoError(t, p.Write(&b))
	return PlanSource{Text: json.RawMessage(b.Bytes())}
}

// A Comm takes plans, and what comes from it has those for its ranks.
func TestPlansOfAComm(t *testing.T) {
	one := plans.OneShotAllReduce(2)
	o := Options{TimeoutSeconds: 20, Plans: []PlanSource{source(t, one), source(t, plans.DirectAllToAll(2))}, Algorithm: one.Name}
	eachWith(t, 2, o, func(c *Comm) error {
		why, err := c.ExplainReduction(kernels.AllReduce, 16, kernels.Int64)
		if err != nil {
			return err
		}
		require.Contains(t, why, "plan "+one.Name+" (forced)")
		_, err = c.ExplainReduction(kernels.AllReduce, 15, kernels.Int64)
		require.ErrorIs(t, err, ErrInvalid)
		rank, _, err := c.Rank()
		if err != nil {
			return err
		}
		src, dst := []int64{int64(10 * rank), int64(10*rank + 1)}, make([]int64, 2)
		ticket, err := c.AllToAllByPlan(0, buf(dst), buf(src))
		if _, err = await(c, ticket, err); err != nil {
			return err
		}
		require.Equal(t, []int64{int64(rank), int64(10 + rank)}, dst)

		require.Len(t, c.bequeath(2).inherited, 2)
		require.Equal(t, one.Name, c.bequeath(2).Algorithm)
		require.Empty(t, c.bequeath(1).inherited)
		require.Empty(t, c.bequeath(1).Algorithm)
		return nil
	})
}

// A Comm's GPU has its plans and what is registered for GPUs, and not what is registered for the host.
func TestPlansOfAGPU(t *testing.T) {
	if !emulated.Kernels(t, "../../../kernels/cuda") {
		return
	}
	one, registered := plans.OneShotAllReduce(2), plans.RingAllGather(2)
	registered.Bytes, registered.Microseconds = []int64{1}, []float64{1e-9}
	gathers, reduces := registered, plans.OneShotAllReduce(2) // the GPU's of the same name, and one that only GPUs have
	reduces.Name = "gpu"
	reduces.Bytes, reduces.Microseconds = registered.Bytes, registered.Microseconds
	o := Options{TimeoutSeconds: 60, Plans: []PlanSource{source(t, one), source(t, plans.DirectAllToAll(2)), source(t, registered), source(t, gathers), source(t, reduces)}}
	for i := range o.Plans[2:] {
		o.Plans[2+i].Registered = true
	}
	o.Plans[3].Device, o.Plans[4].Device = OnGPUs, OnGPUs
	for _, side := range []Side{OnHost, OnGPUs} {
		o.Exchanges = append(o.Exchanges, ExchangeSource{alltoallv.List{
			Name: string("mine" + side), Orders: [][]int{{1}, {0}}, Window: 1, Bytes: []int64{64}, Microseconds: []float64{0.001},
		}, side})
	}
	for _, algorithm := range []string{one.Name, reduces.Name, "", "minecuda"} {
		o.Algorithm = algorithm
		plansOfAGPU(t, o, one.Name, registered.Name)
	}
}

func plansOfAGPU(t *testing.T, o Options, one, registered string) {
	eachWith(t, 2, o, func(c *Comm) error {
		g, err := openGPU(c, GPUOptions{Device: ownGPU(c), MaxSMs: 2})
		if err != nil {
			return err
		}
		_, err = g.ExplainReduction(kernels.AllReduce, 16, kernels.Int64)
		require.ErrorIs(t, err, ErrInvalid)
		ticket, err := g.OpenReducer()
		if _, err = await(c, ticket, err); err != nil {
			return err
		}
		why, err := g.ExplainReduction(kernels.AllReduce, 16, kernels.Int64)
		if err != nil {
			return err
		}
		switch o.Algorithm {
		case one, "gpu":
			require.Contains(t, why, "plan "+o.Algorithm+" (forced)")
		default:
			require.Contains(t, why, "plan gpu (")
			require.NotContains(t, why, "forced")
		}
		why, err = g.ExplainReduction(kernels.AllGather, 16, kernels.Uint8)
		if err != nil {
			return err
		}
		require.Contains(t, why, "plan "+registered+" (")
		why, err = c.ExplainReduction(kernels.AllReduce, 16, kernels.Int64)
		if err != nil {
			return err
		}
		require.NotContains(t, why, "plan gpu")
		require.Equal(t, o.Algorithm == one, strings.Contains(why, "(forced)"), why)
		large := Shape{&ShapeHead{Row: 1, DstBytes: 2 << 20, SrcBytes: 2 << 20}, slices.Repeat([]int64{1 << 20}, 4)}
		if why, err = c.Explain(buf(make([]byte, 2<<20)).Addr, large); err != nil {
			return err
		}
		require.True(t, strings.HasPrefix(why, "mine ("), why)
		if why, err = g.Explain(1<<40, large); err != nil {
			return err
		}
		require.True(t, strings.HasPrefix(why, "minecuda ("), why)
		require.Equal(t, o.Algorithm == "minecuda", strings.Contains(why, "forced"), why)

		s, err := g.dev.NewStream()
		if err != nil {
			return err
		}
		cuda, handle := g.dev.Context(), s.(*device.CUDAStream).Handle()
		memory, err := cuda.MemAlloc(64)
		if err != nil {
			return err
		}
		rank, _, err := c.Rank()
		if err != nil {
			return err
		}
		src, dst := Buffer{memory, 16}, Buffer{memory + 32, 16}
		back := make([]int64, 2)
		read := func() {
			require.NoError(t, s.Synchronize())
			require.NoError(t, g.Fault())
			require.NoError(t, cuda.Read(0, shm.Bytes(back), dst.Addr))
		}
		require.NoError(t, cuda.Write(0, src.Addr, shm.Bytes([]int64{int64(10 * rank), int64(10*rank + 1)})))
		_, err = g.AllToAllByPlan(handle, dst, src)
		require.NoError(t, err)
		read()
		require.Equal(t, []int64{int64(rank), int64(10 + rank)}, back)
		_, err = g.AllReduce(handle, dst, src, kernels.Int64, kernels.Sum)
		require.NoError(t, err)
		read()
		require.Equal(t, []int64{10, 12}, back)
		require.NoError(t, s.Close())
		require.NoError(t, cuda.MemFree(memory))
		ticket, err = c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

// A registered plan is there in the groups that have as many ranks, and passes by others.
func TestRegisteredPlans(t *testing.T) {
	const name = "registered"
	for2, for3 := plans.OneShotAllReduce(2), plans.OneShotAllReduce(3)
	for2.Name, for3.Name = name, name
	two, three := source(t, for2), source(t, for3)
	two.Registered, three.Registered = true, true
	o := Options{TimeoutSeconds: 20, Plans: []PlanSource{three, two}, Algorithm: name}
	eachWith(t, 2, o, func(c *Comm) error {
		why, err := c.ExplainReduction(kernels.AllReduce, 16, kernels.Int64)
		if err != nil {
			return err
		}
		require.Contains(t, why, "plan "+name+" (forced)")
		for _, size := range []int{2, 3} {
			next := c.bequeath(size)
			require.Empty(t, next.inherited)
			require.Len(t, next.Plans, 2)
			require.Equal(t, name, next.Algorithm)
		}
		require.Empty(t, c.bequeath(1).Algorithm, "no plan of that name is for one rank")
		return nil
	})
}

// The groups that have as many ranks take a registered algorithm of exchanges.
func TestRegisteredExchanges(t *testing.T) {
	list := func(orders ...[]int) ExchangeSource {
		return ExchangeSource{List: alltoallv.List{Name: "mine", Orders: orders, Bytes: []int64{64}, Microseconds: []float64{0.001}}}
	}
	two, three := list([]int{1}, []int{0}), list([]int{1, 2}, []int{2, 0}, []int{0, 1})
	o := Options{TimeoutSeconds: 20, Exchanges: []ExchangeSource{three, two}, Plans: []PlanSource{source(t, plans.OneShotAllReduce(2))}}
	require.NoError(t, o.CheckAlgorithms())
	for _, algorithm := range []string{"", "mine", "ring"} { // ring is one of reductions
		o.Algorithm = algorithm
		eachWith(t, 2, o, func(c *Comm) error {
			shape := Shape{&ShapeHead{Row: 1, DstBytes: 2 << 20, SrcBytes: 2 << 20}, slices.Repeat([]int64{1 << 20}, 4)}
			why, err := c.Explain(buf(make([]byte, 2<<20)).Addr, shape)
			if err != nil {
				return err
			}
			require.Contains(t, why, map[bool]string{false: "mine (lowest estimate)", true: "mine (forced)"}[algorithm == "mine"])
			why, err = c.ExplainReduction(kernels.AllReduce, 16, kernels.Int64)
			if err != nil {
				return err
			}
			require.Equal(t, algorithm == "ring", strings.Contains(why, "(forced)"), why)
			for _, size := range []int{2, 3} {
				require.Len(t, c.bequeath(size).Exchanges, 2)
				require.Equal(t, algorithm, c.bequeath(size).Algorithm)
			}
			require.Equal(t, algorithm == "ring", c.bequeath(4).Algorithm != "", "no algorithm of that name is for 4 ranks")
			return nil
		})
	}
	three.Orders[2] = []int{0, 0}
	require.ErrorContains(t, o.CheckAlgorithms(), "the order [0 0] of rank 2 does not name every other rank once")
	o.Exchanges = []ExchangeSource{two}
	o.Exchanges[0].Name = "one-shot"
	require.ErrorContains(t, o.CheckAlgorithms(), `an algorithm of exchanges is called "one-shot", as one of reductions is`)
	o.Plans[0].Text = json.RawMessage(`{"name":3}`)
	require.ErrorContains(t, o.CheckAlgorithms(), "cannot unmarshal number")
}

// refused makes a group of ranks with other options each, and returns what becomes of it on each.
func refused(t *testing.T, ranks int, set func(rank int, o *Options)) []error {
	groups, err := comm.Local(ranks)
	require.NoError(t, err)
	errs := make([]error, ranks)
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			o := Options{TimeoutSeconds: 20}
			set(r, &o)
			c, err := open(o, words(), func(context.Context) (*comm.Group, error) { return g, nil })
			if err == nil {
				_, err = await(c, 1, nil)
			}
			errs[r] = err
			c.Abandon(0, false)
		})
	}
	wg.Wait()
	return errs
}

// All ranks hear of both algorithms, also those that would still wait when the first has left.
func TestOtherExchangesAreRefusedOnAllRanks(t *testing.T) {
	const ranks = 5
	orders := make([][]int, ranks)
	for r := range orders {
		orders[r] = alltoallv.Rotation(r, ranks)
	}
	for range 20 {
		errs := refused(t, ranks, func(r int, o *Options) {
			o.Exchanges = []ExchangeSource{{List: alltoallv.List{Name: "mine", Orders: orders, Window: r % 2, Bytes: []int64{1}, Microseconds: []float64{1}}}}
		})
		for r, err := range errs {
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
			require.Regexp(t, `mine of digest .*mine of digest `, err.Error(), "rank %d", r)
		}
	}
}

// All ranks hear what is wrong with the plan of one, also those that would still wait when the first has left.
func TestAPlanIsRefusedOnAllRanks(t *testing.T) {
	const ranks = 5
	bad := plans.OneShotAllReduce(ranks)
	bad.Programs[0] = bad.Programs[0][:len(bad.Programs[0])-1]
	for _, s := range []PlanSource{source(t, bad), {Path: "nowhere.json"}, {Text: json.RawMessage(`{"name":3}`)}} {
		errs := refused(t, ranks, func(r int, o *Options) {
			if r == 1 {
				o.Plans = []PlanSource{s}
			}
		})
		for r, err := range errs {
			code, _ := Classify(err)
			require.Equal(t, Invalid, code, "rank %d: %v", r, err)
			if r != 1 {
				require.ErrorContains(t, err, fmt.Sprintf("rank 1 refused: %v", errs[1]))
			}
		}
	}
}
