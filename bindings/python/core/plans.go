package core

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// PlanSource says where a plan of package kernels/plan is: in the file Path, or in Text, the JSON itself. A registered one is in Text. It is for
// the groups that have as many ranks on one host, and others go without it.
type PlanSource struct {
	Path       string
	Text       json.RawMessage
	Registered bool
}

// head is what decides whether a group has a registered plan.
func (s *PlanSource) head() (name string, ranks int) {
	var p struct {
		Name  string
		Ranks int
	}
	_ = json.Unmarshal(s.Text, &p) // load says what is wrong
	return p.Name, p.Ranks
}

// load reads the plan and checks it.
func (s *PlanSource) load() (*plan.Checked, error) {
	var p *plan.Checked
	var err error
	if s.Path != "" {
		p, err = plan.Load(s.Path)
	} else {
		p, err = plan.Read(bytes.NewReader(s.Text))
	}
	if err != nil && !errors.Is(err, comm.ErrInvalid) { // no such file, or no JSON
		err = fmt.Errorf("core: %w: %w", comm.ErrInvalid, err)
	}
	return p, err
}

// makeReducer checks the plans of the options and makes the reducer of the host. If the options of one rank are wrong, all ranks get an error.
func (c *Comm) makeReducer(ctx context.Context, g *comm.Group) error {
	err := c.loadPlans(ctx, g)
	if err == nil {
		c.reducer, err = allreduce.New(ctx, c.heap, allreduce.Options{
			Timeout: c.within(), Validate: c.options.Validate,
			Plans: slices.Concat(c.plans, c.registered), Algorithm: c.options.Algorithm,
		})
	}
	var cut *agree.CutError
	if err != nil && !errors.As(err, &cut) {
		_ = g.Barrier(ctx) // a rank that leaves aborts the calls of those that do not have their error yet
	}
	return err
}

func (c *Comm) loadPlans(ctx context.Context, g *comm.Group) error {
	c.plans = c.options.inherited
	c.registered = nil
	var wrong error
	for _, s := range c.options.Plans {
		if _, ranks := s.head(); s.Registered && (ranks != g.Size() || g.Topology().Hosts > 1) {
			continue
		}
		p, err := s.load()
		if err != nil {
			wrong = err
			break
		}
		if s.Registered {
			c.registered = append(c.registered, p)
		} else {
			c.plans = append(c.plans, p)
		}
	}
	_, err := agree.On(ctx, g, agree.Claim{}, wrong)
	return err
}

// bequeath makes the options of a Comm of size ranks that comes from this one. It has the plans for as many ranks, and the algorithm if that
// is not a plan which it lacks.
func (c *Comm) bequeath(size int) Options {
	o := c.options
	o.TimeoutSeconds = c.within().Seconds()
	o.inherited = slices.DeleteFunc(slices.Clone(c.plans), func(p *plan.Checked) bool { return p.Plan.Ranks != size })
	o.Plans = slices.DeleteFunc(slices.Clone(o.Plans), func(s PlanSource) bool { return !s.Registered })
	named := func(p *plan.Checked) bool { return p.Plan.Name == o.Algorithm }
	if !slices.ContainsFunc(slices.Concat(c.plans, c.registered), named) || slices.ContainsFunc(o.inherited, named) {
		return o
	}
	if !slices.ContainsFunc(o.Plans, func(s PlanSource) bool {
		name, ranks := s.head()
		return name == o.Algorithm && ranks == size
	}) {
		o.Algorithm = ""
	}
	return o
}

// AllToAllByPlan submits an all-to-all of equal slices that a plan does: slice k of src goes to rank k, and slice k of dst comes from there.
// dst may be src.
func (c *Comm) AllToAllByPlan(dst, src Buffer) (Ticket, error) {
	return c.reduction(opAllToAllByPlan, 0, dst, src, kernels.Uint8, kernels.Sum)
}

// ExplainReduction says how the reducer would carry a collective whose larger buffer has n bytes.
func (c *Comm) ExplainReduction(collective kernels.Collective, n int64, dt kernels.DType) (string, error) {
	if _, _, err := c.ready(); err != nil {
		return "", err
	}
	if !dt.Valid() || n%dt.Size() != 0 {
		return "", fmt.Errorf("core: %w: %d bytes of %v", ErrInvalid, n, dt)
	}
	decision, err := c.reducer.Explain(collective, n/dt.Size(), dt)
	if err != nil {
		return "", err
	}
	return decision.String(), nil
}
