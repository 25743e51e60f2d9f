package rebalance

import (
	"fmt"
	"math"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// Options of a Loop. All ranks pass the same.
type Options struct {
	// Window is the number of steps between two looks at the load; default 100.
	Window int
	// Above is the imbalance from which experts move: the load of the busiest rank over the mean. Default 1.05.
	Above float64
	// Gain is how much of the imbalance beyond 1 a placement must take away to be worth the moves; default 0.2.
	Gain float64
	// Groups is the number of groups of experts that stay on one host, as in dispatch.BalanceOptions; default 1 on one host, the number
	// of hosts on several.
	Groups int
}

func invalid(format string, args ...any) error { return comm.Invalid("rebalance", format, args...) }

// validate sets defaults, and returns the number of expert slots of each rank and the size of an expert's part of each tensor.
func (o *Options) validate(d *dispatch.Dispatcher, g *comm.Group, h *memory.Heap, tensors []memory.View) (slots int, sizes []int64, err error) {
	hosts := max(1, g.Topology().Hosts)
	if o.Window == 0 {
		o.Window = 100
	}
	if o.Above == 0 {
		o.Above = 1.05
	}
	if o.Gain == 0 {
		o.Gain = 0.2
	}
	if o.Groups == 0 {
		o.Groups = hosts
	}
	p := d.Placement()
	slots = len(p.Local(g.Rank()))
	switch {
	case o.Window < 1:
		return 0, nil, invalid("Options.Window is %d, want at least 1", o.Window)
	case !(o.Above >= 1) || math.IsInf(o.Above, 0) || !(o.Gain > 0 && o.Gain <= 1):
		return 0, nil, invalid("Options.Above is %v, want at least 1; Gain is %v, want more than 0 and at most 1", o.Above, o.Gain)
	case len(tensors) == 0:
		return 0, nil, invalid("there are no tensors: the experts have no weights that could move")
	}
	for r := range g.Size() {
		if n := len(p.Local(r)); n != slots || n == 0 {
			return 0, nil, invalid("rank %d has %d experts and rank %d has %d: every rank needs equally many", g.Rank(), slots, r, n)
		}
	}
	for i, t := range tensors {
		if t.Len() == 0 || t.Len()%int64(slots) != 0 {
			return 0, nil, invalid("tensor %d has %d bytes for %d experts, want equal parts", i, t.Len(), slots)
		}
		if part := t.Len() / int64(slots); !t.Whole(part) {
			return 0, nil, invalid("tensor %d has %d bytes for %d experts, whose parts of %d bytes cut an element of %s", i, t.Len(), slots, part, t.Element())
		}
		if !h.Serves(t) {
			return 0, nil, invalid("tensor %d is not memory of %v", i, h.Device())
		}
		sizes = append(sizes, t.Len()/int64(slots))
	}
	// A placement that Balance refuses is refused now.
	if _, err := dispatch.Balance(make([]float64, len(p.Ranks)), o.bounds(g, slots)); err != nil {
		return 0, nil, fmt.Errorf("rebalance: %w", err)
	}
	return slots, sizes, nil
}

func (o *Options) bounds(g *comm.Group, slots int) dispatch.BalanceOptions {
	return dispatch.BalanceOptions{Ranks: g.Size(), Slots: slots, Nodes: max(1, g.Topology().Hosts), Groups: o.Groups}
}
