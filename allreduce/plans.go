package allreduce

import (
	"fmt"
	"math"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// validatePlans checks that the plans are for this world.
func (o *Options) validatePlans(size int) error {
	for i, p := range o.Plans {
		switch {
		case p == nil:
			return invalid("Options.Plans has nil at place %d", i)
		case p.Plan.Ranks != size:
			return invalid("plan %q is for %d ranks, the group has %d", p.Plan.Name, p.Plan.Ranks, size)
		}
		for _, a := range kernels.ReduceAlgorithms() {
			if a.String() == p.Plan.Name {
				return invalid("a plan is called %q, as an algorithm is", p.Plan.Name)
			}
		}
		if planOf(o.Plans[:i], p.Plan.Name) != nil {
			return invalid("two plans are called %q", p.Plan.Name)
		}
	}
	return nil
}

// plan is the first plan of a name, nil without one.
func (o *Options) plan(name string) *plan.Checked { return planOf(o.Plans, name) }

func planOf(plans []*plan.Checked, name string) *plan.Checked {
	for _, p := range plans {
		if p != nil && p.Plan.Name == name {
			return p
		}
	}
	return nil
}

// planNames are the plans in the fingerprint of options.
func (o *Options) planNames() string {
	var b strings.Builder
	for _, p := range o.Plans {
		fmt.Fprintf(&b, ", plan %q of digest %016x", p.Plan.Name, p.Digest)
	}
	return b.String()
}

// unfit says why a plan cannot do a call, nothing if it can.
func unfit(p *plan.Checked, c *kernels.ReduceCall) string {
	switch {
	case string(p.Plan.Collective) != c.Collective.String():
		return "it does another collective"
	case c.Shape != 0:
		return "the slices have different lengths"
	case c.Collective.Reduces() && !p.RoundsOnce && c.DType.PartialSize() != c.DType.Size():
		return "it hands partial results on, and floats of 16 and 8 bits are rounded once"
	}
	return ""
}

// forces is the option that all ways of a call must have, empty if any will do: the option may name a plan that cannot do the call, or an
// algorithm for a call that only plans do.
func (s *selector) forces(c *kernels.ReduceCall) string {
	p := planOf(s.plans, s.forced)
	if p != nil && unfit(p, c) != "" || p == nil && c.Collective == kernels.AllToAll {
		return ""
	}
	return s.forced
}

// inputBytes is the length of a rank's input.
func inputBytes(r *kernels.Reduction) int64 {
	n := r.Call.Count * r.Call.DType.Size()
	if r.Call.Collective == kernels.AllGather {
		n /= int64(r.Family.Size)
	}
	return n
}

// A plan has a multiprocessor of a GPU for each planShare bytes of the longer buffer, up to mostPlanBlocks: as many fill a link.
const (
	planShare      = 32 << 10
	mostPlanBlocks = 32
)

func planBlocks(r *kernels.Reduction) int {
	return int(min(max(r.Call.Count*r.Call.DType.Size()/planShare, 1), mostPlanBlocks))
}

// planCost is the estimate of the call's plan.
func planCost(r *kernels.Reduction) (us float64, why string) {
	if why = unfit(r.Plan, &r.Call); why != "" {
		return math.Inf(1), why
	}
	if us = r.Plan.Plan.Estimate(inputBytes(r)); math.IsInf(us, 1) {
		return us, "the plan has no times"
	}
	return us, "as the plan says"
}
