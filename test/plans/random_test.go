package plans_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels/plan"
	"github.com/switchyard-moe/switchyard/test/plans"
)

func TestRandomPlansAreRight(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 3))
	for range 200 {
		for _, c := range []plan.Collective{plan.AllReduce, plan.ReduceScatter, plan.AllGather, plan.AllToAll} {
			_, err := plan.Check(plans.Random(rnd, c, 2+rnd.IntN(5)))
			require.NoError(t, err)
		}
	}
}
