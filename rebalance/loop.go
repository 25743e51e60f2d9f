package rebalance

import (
	"context"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Loop is one rank's end of a loop from load to placement. Its methods are collective and are not called from several goroutines at once.
type Loop struct {
	options Options
	group   *comm.Group
	d       *dispatch.Dispatcher
	x       *alltoallv.Exchanger
	tensors []memory.View
	sizes   []int64 // of an expert in each tensor
	slots   int
	shadow  *memory.Buffer // where tensors come, with a place for each expert slot
	places  []memory.View  // of the tensors in it
	steps   int
	last    []int64 // choices by expert when the window began
}

// Change is what came of a look at the load.
type Change struct {
	// Load is the number of choices by expert in the window, of all ranks.
	Load []int64
	// Before is the imbalance of that load under the placement which the window had: the busiest rank's load over the mean. After is that
	// of the same load under the placement which is in force now.
	Before, After float64
	// Moves are the experts that have come to ranks which did not have them; From is the rank that sent the weights.
	Moves []dispatch.Move
}

// Moved says whether experts have moved. It is false for nil.
func (c *Change) Moved() bool { return c != nil && len(c.Moves) > 0 }

// New makes a loop for the experts of a dispatcher. It is collective, with equal options.
//
// tensors are the parameters of this rank's experts, and what else moves with them, such as an optimizer's moments: each has an equal part
// for every expert slot, in the order of d.Placement().Local. They are memory of the heap's device. Step writes them; they stay the
// caller's. All ranks have equally many experts, and parts of equal sizes. The loop takes as much of the heap as the tensors, which
// grows if it has no room.
func New(ctx context.Context, h *memory.Heap, d *dispatch.Dispatcher, tensors []memory.View, o Options) (*Loop, error) {
	l := &Loop{group: h.Group(), d: d, tensors: tensors}
	var err error
	l.slots, l.sizes, err = o.validate(d, l.group, h, tensors)
	l.options = o
	claim := agree.Claim{Op: "rebalance.New", Must: []agree.Value{
		agree.Named("Options", fmt.Sprintf("%+v", o)), agree.Named("sizes of an expert", l.sizes), agree.Named("experts of a rank", l.slots),
	}}
	if _, err := agree.On(ctx, l.group, claim, err); err != nil {
		return nil, fmt.Errorf("rebalance: new: %w", err)
	}
	if l.x, err = alltoallv.New(ctx, h, alltoallv.Options{}); err != nil {
		return nil, fmt.Errorf("rebalance: new: %w", err)
	}
	bytes := int64(0)
	for _, n := range l.sizes {
		bytes += kernels.AlignUp(n*int64(l.slots), kernels.LineBytes)
	}
	l.shadow, err = h.Alloc(bytes)
	if errors.Is(err, memory.ErrOutOfMemory) {
		if err = h.Grow(ctx, bytes); err == nil {
			l.shadow, err = h.Alloc(bytes)
		}
	}
	if err == nil {
		err = l.begin()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("rebalance: new: %w", err), l.Close(ctx))
	}
	at := int64(0)
	for _, n := range l.sizes {
		l.places = append(l.places, l.shadow.View().Slice(at, n*int64(l.slots)))
		at += kernels.AlignUp(n*int64(l.slots), kernels.LineBytes)
	}
	return l, nil
}

// begin starts a window.
func (l *Loop) begin() error {
	c, err := l.d.Counters()
	l.last, l.steps = c.Choices, 0
	return err
}

// Step counts a step. At the end of a window it looks at the load, and moves experts if that is worth it. It is collective: every rank calls
// it between the same two steps, with calls of the dispatcher complete or on s. In other steps, and where nothing was dispatched, the
// change is nil, and Step talks to nobody.
//
// With a nil stream, on the host, all is complete on return. On a GPU s is the stream of the caller's steps, and Step waits for it.
//
// On every rank the tensors and the dispatcher's placement agree, also after an error: tensors change only once all ranks have theirs. After
// the loss of a rank in Step some ranks may have the new placement and others the old one.
func (l *Loop) Step(ctx context.Context, s device.Stream) (*Change, error) {
	if l.steps++; l.steps < l.options.Window {
		return nil, nil
	}
	c, err := l.look(ctx, s)
	if err != nil {
		return nil, fmt.Errorf("rebalance: %w", err)
	}
	return c, nil
}

func (l *Loop) look(ctx context.Context, s device.Stream) (*Change, error) {
	if s != nil {
		if err := s.Synchronize(); err != nil {
			return nil, err
		}
	}
	load, err := l.load(ctx)
	if err != nil {
		return nil, err
	}
	c, all := &Change{Load: load}, make([]float64, len(load))
	sum := int64(0)
	for e, n := range load {
		all[e] = float64(n)
		sum += n
	}
	if sum == 0 {
		return nil, nil
	}
	now, bounds := l.d.Placement(), l.options.bounds(l.group, l.slots)
	c.Before = now.Imbalance(all, l.group.Size())
	c.After = c.Before
	if c.Before < l.options.Above {
		return c, nil
	}
	next, err := dispatch.Balance(all, bounds)
	if err != nil {
		return nil, err
	}
	next = stay(now, next, bounds.Ranks, bounds.Nodes)
	after := next.Imbalance(all, l.group.Size())
	if c.Before-after < l.options.Gain*(c.Before-1) {
		return c, nil
	}
	if err := l.apply(ctx, s, now, next, bounds.Nodes, c); err != nil {
		return nil, err
	}
	c.After = after
	l.tell(c)
	return c, nil
}

// tell has those who look on see a change.
func (l *Loop) tell(c *Change) {
	rank, members := l.group.Flight()
	told := flight.Change{Group: l.group.Name(), Layer: l.d.Layer(), Before: c.Before, After: c.After}
	for _, m := range c.Moves {
		told.Moves = append(told.Moves, flight.Move{Expert: m.Expert, From: members[m.From], To: members[m.To]})
	}
	rank.Changed(told)
}

// load is how often each expert was chosen in the window, on all ranks. A new window begins.
func (l *Loop) load(ctx context.Context) ([]int64, error) {
	before := l.last
	if err := l.begin(); err != nil {
		return nil, err
	}
	mine := make([]int64, len(l.last))
	for e := range mine {
		mine[e] = l.last[e] - before[e]
	}
	all, err := l.group.AllGather(ctx, memory.Wrap(mine).Bytes())
	if err != nil {
		return nil, err
	}
	sum := make([]int64, len(mine))
	for r, b := range all {
		if len(b) != 8*len(sum) {
			return nil, fmt.Errorf("%w: rank %d has the load of %d experts, want %d", comm.ErrMismatch, r, len(b)/8, len(sum))
		}
		for e, n := range memory.Of[int64](memory.Host(b)) {
			sum[e] += n
		}
	}
	return sum, nil
}

// apply brings weights to a new placement: first next to the old ones, and over these once every rank has them and the dispatcher has the
// placement.
func (l *Loop) apply(ctx context.Context, s device.Stream, now, next *dispatch.Placement, nodes int, c *Change) error {
	all := transfers(now, next, l.group.Size(), nodes)
	for _, round := range rounds(all) {
		for i, t := range l.tensors {
			if err := l.x.Exchange(s, l.places[i], t, l.splits(round, l.sizes[i])); err != nil {
				return err
			}
		}
	}
	if s != nil {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	if err := l.x.Fault(); err != nil {
		return err
	}
	if err := l.d.SetPlacement(ctx, next); err != nil {
		return err
	}
	for _, t := range all {
		if t.from != t.to {
			c.Moves = append(c.Moves, dispatch.Move{Expert: t.expert, From: t.from, To: t.to})
		}
		if t.to != l.group.Rank() {
			continue
		}
		for i, n := range l.sizes {
			at := int64(t.toSlot) * n
			if err := memory.Copy(s, l.tensors[i].Slice(at, n), l.places[i].Slice(at, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// splits are this rank's part of a round: an element is an expert, so displacements are expert slots.
func (l *Loop) splits(round []transfer, size int64) *alltoallv.Splits {
	n := l.group.Size()
	p := &alltoallv.Splits{ElemSize: size, Send: make([]int64, n), Recv: make([]int64, n), SendDispls: make([]int64, n), RecvDispls: make([]int64, n)}
	for _, t := range round {
		if t.from == l.group.Rank() {
			p.Send[t.to], p.SendDispls[t.to] = 1, int64(t.fromSlot)
		}
		if t.to == l.group.Rank() {
			p.Recv[t.from], p.RecvDispls[t.from] = 1, int64(t.toSlot)
		}
	}
	return p
}

// Close gives the loop's memory back. It is collective, and idempotent. The caller closes the loop before dispatcher and heap.
func (l *Loop) Close(ctx context.Context) error {
	if l.x == nil {
		return nil
	}
	err := l.x.Close(ctx)
	if l.shadow != nil {
		err = errors.Join(err, l.shadow.Free())
		l.shadow = nil
	}
	l.x = nil
	return err
}
