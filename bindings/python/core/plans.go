package core

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// PlanSource says where a plan of package kernels/plan is: in the file Path, or in Text, the JSON itself. A registered one is in Text. It is for
// the groups that have as many ranks on one host, and others go without it; and for the device whose times it has.
type PlanSource struct {
	Path       string
	Text       json.RawMessage
	Registered bool
	Device     Side
}

// ExchangeSource is a registered algorithm of exchanges, on the device whose times it has.
type ExchangeSource struct {
	alltoallv.List
	Device Side
}

// Side is a kind of device for which an algorithm is registered.
type Side string

// The sides. Their texts are part of the ABI.
const (
	OnHost Side = ""
	OnGPUs Side = "cuda"
)

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

// CheckAlgorithms says what is wrong with plans and exchanges of the options, before there is a group.
func (o *Options) CheckAlgorithms() error {
	for _, s := range o.Plans {
		if _, err := s.load(); err != nil {
			return err
		}
	}
	for i := range o.Exchanges {
		l := &o.Exchanges[i].List
		if err := l.Check(); err != nil {
			return err
		}
		for _, a := range kernels.ReduceAlgorithms() {
			if a.String() == l.Name {
				return fmt.Errorf("core: %w: an algorithm of exchanges is called %q, as one of reductions is", comm.ErrInvalid, l.Name)
			}
		}
	}
	return nil
}

// named says whether Algorithm is one of exchanges of this number of ranks, and of other numbers.
func (o *Options) named(ranks int) (here, elsewhere bool) {
	for i := range o.Exchanges {
		if l := &o.Exchanges[i]; l.Name == o.Algorithm {
			here, elsewhere = here || len(l.Orders) == ranks, elsewhere || len(l.Orders) != ranks
		}
	}
	return here, elsewhere
}

// exchanges are the options of a group's exchanger about algorithms.
func (o *Options) exchanges(g *comm.Group, on Side) (x alltoallv.Options) {
	if g.Topology().Hosts > 1 {
		return x
	}
	for i := range o.Exchanges {
		e := &o.Exchanges[i]
		if e.Device != on || len(e.Orders) != g.Size() {
			continue
		}
		x.Algorithms = append(x.Algorithms, e.Algorithm())
		if e.Name == o.Algorithm {
			x.Algorithm = e.Name
		}
	}
	return x
}

// makeReducer checks the plans of the options, which GPUs have too, and makes the reducer of the host. If the options of one rank are wrong, all ranks get an error.
func (c *Comm) makeReducer(ctx context.Context, g *comm.Group) error {
	if err := c.loadPlans(ctx, g); err != nil {
		return err
	}
	o := allreduce.Options{
		Timeout: c.within(), Validate: c.options.Validate,
		Plans: slices.Concat(c.plans, c.registered[OnHost]), Algorithm: c.options.Algorithm,
	}
	exchange, _ := c.options.named(g.Size())
	if other := exchange && g.Topology().Hosts == 1 || slices.ContainsFunc(c.registered[OnGPUs], c.options.asked); other && !slices.ContainsFunc(o.Plans, c.options.asked) {
		o.Algorithm = ""
	}
	var err error
	c.reducer, err = allreduce.New(ctx, c.heap, o)
	return err
}

func (c *Comm) loadPlans(ctx context.Context, g *comm.Group) error {
	c.plans = c.options.inherited
	c.registered = make(map[Side][]*plan.Checked)
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
			c.registered[s.Device] = append(c.registered[s.Device], p)
		} else {
			c.plans = append(c.plans, p)
		}
	}
	_, err := agree.On(ctx, g, agree.Claim{}, wrong)
	return err
}

// bequeath makes the options of a Comm of size ranks that comes from this one. It has the plans for as many ranks, and the algorithm if that
// is not one of plans or exchanges which it lacks.
func (c *Comm) bequeath(size int) Options {
	o := c.options
	o.TimeoutSeconds = c.within().Seconds()
	o.inherited = slices.DeleteFunc(slices.Clone(c.plans), func(p *plan.Checked) bool { return p.Plan.Ranks != size })
	o.Plans = slices.DeleteFunc(slices.Clone(o.Plans), func(s PlanSource) bool { return !s.Registered })
	here, elsewhere := o.named(size)
	lost := elsewhere || slices.ContainsFunc(slices.Concat(c.plans, c.registered[OnHost], c.registered[OnGPUs]), o.asked) // all reducers have the others
	if here || !lost || slices.ContainsFunc(o.inherited, o.asked) {
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

// asked says whether a plan is the algorithm that calls take.
func (o *Options) asked(p *plan.Checked) bool { return p.Plan.Name == o.Algorithm }

// planned are the options of a GPU's reducer about plans.
func (c *Comm) planned() (o allreduce.Options) {
	if o.Plans = slices.Concat(c.plans, c.registered[OnGPUs]); slices.ContainsFunc(o.Plans, c.options.asked) {
		o.Algorithm = c.options.Algorithm
	}
	return o
}

// AllToAllByPlan submits an all-to-all by a plan, as Place describes.
func (c *Comm) AllToAllByPlan(stream uintptr, dst, src Buffer) (Ticket, error) {
	return c.reduction(opAllToAllByPlan, stream, dst, src, kernels.Uint8, kernels.Sum)
}

// ExplainReduction explains the host's reducer, as Place describes.
func (c *Comm) ExplainReduction(collective kernels.Collective, n int64, dt kernels.DType) (string, error) {
	if _, _, err := c.ready(); err != nil {
		return "", err
	}
	return explained(c.reducer, collective, n, dt)
}

func explained(x *allreduce.Reducer, collective kernels.Collective, n int64, dt kernels.DType) (string, error) {
	if !dt.Valid() || n%dt.Size() != 0 {
		return "", fmt.Errorf("core: %w: %d bytes of %v", ErrInvalid, n, dt)
	}
	decision, err := x.Explain(collective, n/dt.Size(), dt)
	if err != nil {
		return "", err
	}
	return decision.String(), nil
}
