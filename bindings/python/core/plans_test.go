package core

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
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
		ticket, err := c.AllToAllByPlan(buf(dst), buf(src))
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

// All ranks hear what is wrong with the plan of one, also those that would still wait when the first has left.
func TestAPlanIsRefusedOnAllRanks(t *testing.T) {
	const ranks = 5
	bad := plans.OneShotAllReduce(ranks)
	bad.Programs[0] = bad.Programs[0][:len(bad.Programs[0])-1]
	for _, s := range []PlanSource{source(t, bad), {Path: "nowhere.json"}, {Text: json.RawMessage(`{"name":3}`)}} {
		groups, err := comm.Local(ranks)
		require.NoError(t, err)
		errs := make([]error, ranks)
		var wg sync.WaitGroup
		for r, g := range groups {
			wg.Go(func() {
				o := Options{TimeoutSeconds: 20}
				if r == 1 {
					o.Plans = []PlanSource{s}
				}
				c, err := open(o, words(), func(context.Context) (*comm.Group, error) { return g, nil })
				if err == nil {
					_, err = await(c, 1, nil)
				}
				errs[r] = err
				c.Abandon(0, false)
			})
		}
		wg.Wait()
		for r, err := range errs {
			code, _ := Classify(err)
			require.Equal(t, Invalid, code, "rank %d: %v", r, err)
			if r != 1 {
				require.ErrorContains(t, err, fmt.Sprintf("rank 1 refused: %v", errs[1]))
			}
		}
	}
}
