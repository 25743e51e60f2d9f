package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// Options say what a Stack has. All ranks pass the same, also those that join later.
type Options struct {
	// Heap are the options of the heap.
	Heap memory.Options
	// Exchanger, Reducer, Endpoint and Dispatcher are opened if their options are not nil.
	Exchanger  *alltoallv.Options
	Reducer    *allreduce.Options
	Endpoint   *p2p.Options
	Dispatcher *dispatch.Options
}

// Stack is one rank's end of the objects that run on a group. A field that Options do not ask for is nil. The stack owns and closes
// them, but not the group and the device.
type Stack struct {
	Group      *comm.Group
	Device     device.Device
	Heap       *memory.Heap
	Exchanger  *alltoallv.Exchanger
	Reducer    *allreduce.Reducer
	Endpoint   *p2p.Endpoint
	Dispatcher *dispatch.Dispatcher
	// Moves are the experts that have come to a rank which did not have them in the last stack, the same list on every rank. The caller
	// sends their parameters there, or loads those that are lost.
	Moves []dispatch.Move

	options Options
	id      uint64     // of this rank, as long as it has a stack
	age     int        // how many stacks there were before
	experts [][]uint64 // which ranks have them, by their ids
}

// Open makes a stack on g. It is collective: every rank of g calls Open or, if it has a stack on the group before, Reopen. A failure on
// one rank is an error on all, and nothing is left. A ctx that ends while ranks wait for each other may leave the group out of step, as in
// memory.NewHeap: call Open again on what Group.Shrink makes of it.
//
// A rank that is admitted to a group with stacks calls Open with the options of the others; Moves lists the experts that it gets.
func Open(ctx context.Context, g *comm.Group, d device.Device, o Options) (*Stack, error) {
	s := &Stack{Group: g, Device: d, options: o, id: rand.Uint64()}
	return s.open(ctx)
}

// Reopen closes s and makes a stack with the same options on g, a group derived from s.Group by Shrink or Admit. It is collective on g,
// and if s.Group has failed it needs no rank outside g. Views, buffers, registrations and handles of s are dead; the caller copies their
// contents out before.
//
// Experts stay on their ranks if these are in g, see [dispatch.Placement.Follow]; Moves lists the others. A rank keeps the parameters of
// experts that it gives away until a call on the new stack has ended. If another rank is lost during Reopen, some ranks have a new stack
// and others still have s. Each then reopens the stack it has, on the next group, and Moves counts from the last stack that all had.
func (s *Stack) Reopen(ctx context.Context, g *comm.Group) (*Stack, error) {
	if err := s.Close(ctx); err != nil {
		return nil, fmt.Errorf("stack: reopen: %w", err)
	}
	next := &Stack{Group: g, Device: s.Device, options: s.options, id: s.id, age: s.age, experts: s.experts}
	return next.open(ctx)
}

// past is what a rank brings from the stack before. Without experts it had none.
type past struct {
	ID      uint64
	Age     int
	Experts [][]uint64
}

func (s *Stack) open(ctx context.Context) (*Stack, error) {
	if err := s.openAll(ctx); err != nil {
		return nil, fmt.Errorf("stack: open: %w", errors.Join(err, s.abandon()))
	}
	return s, nil
}

func (s *Stack) openAll(ctx context.Context) error {
	placement, ids, err := s.follow(ctx)
	if err != nil {
		return err
	}
	if s.Heap, err = memory.NewHeap(ctx, s.Group, s.Device, s.options.Heap); err != nil {
		return err
	}
	if o := s.options.Exchanger; o != nil {
		if s.Exchanger, err = alltoallv.New(ctx, s.Heap, *o); err != nil {
			return err
		}
	}
	if o := s.options.Reducer; o != nil {
		if s.Reducer, err = allreduce.New(ctx, s.Heap, *o); err != nil {
			return err
		}
	}
	if o := s.options.Endpoint; o != nil {
		if s.Endpoint, err = p2p.New(ctx, s.Heap, *o); err != nil {
			return err
		}
	}
	if o := s.options.Dispatcher; o != nil {
		with := *o
		if placement != nil {
			with.Placement = placement
		}
		if s.Dispatcher, err = dispatch.New(ctx, s.Heap, with); err != nil {
			return err
		}
		s.experts = nil
		for _, at := range s.Dispatcher.Placement().Ranks {
			var on []uint64
			for _, r := range at {
				on = append(on, ids[r])
			}
			s.experts = append(s.experts, on)
		}
	}
	return nil
}

// follow finds out where experts are now, nil where no rank had a stack before, and the ranks' ids. Ranks may come from
// different stacks, when one was lost while others were being opened: what counts is the oldest, which all have had.
func (s *Stack) follow(ctx context.Context) (*dispatch.Placement, []uint64, error) {
	msg, err := json.Marshal(past{s.id, s.age, s.experts})
	if err != nil {
		return nil, nil, err
	}
	all, err := s.Group.AllGather(ctx, msg)
	if err != nil {
		return nil, nil, err
	}
	ids, fresh := make([]uint64, len(all)), make([]bool, len(all))
	var oldest *past
	for r, b := range all {
		var p past
		if err := json.Unmarshal(b, &p); err != nil {
			return nil, nil, fmt.Errorf("rank %d: malformed: %w", r, err)
		}
		ids[r], fresh[r] = p.ID, p.Experts == nil
		s.age = max(s.age, p.Age)
		if p.Experts != nil && (oldest == nil || p.Age < oldest.Age) {
			oldest = &p
		}
	}
	s.age++
	if oldest == nil || s.options.Dispatcher == nil {
		return nil, ids, nil
	}
	// The ranks that had experts get numbers, in any order.
	number := make(map[uint64]int)
	before := &dispatch.Placement{Ranks: make([][]int, len(oldest.Experts))}
	for e, at := range oldest.Experts {
		for _, id := range at {
			if _, ok := number[id]; !ok {
				number[id] = len(number)
			}
			before.Ranks[e] = append(before.Ranks[e], number[id])
		}
	}
	was := make([]int, len(ids))
	unknown := len(number)
	for r, id := range ids {
		n, ok := number[id]
		switch {
		case ok:
			was[r] = n
		case fresh[r]:
			was[r] = -1
		default: // it was there, without experts
			was[r] = unknown
			unknown++
		}
	}
	now, moves := before.Follow(was)
	s.Moves = moves
	return now, ids, nil
}

// Close closes the parts, last opened first. It is collective and idempotent. After a failure of the group it waits for nobody;
// otherwise it ends with ctx at the latest, and what this rank holds is released then too.
func (s *Stack) Close(ctx context.Context) error {
	var err error
	if s.Dispatcher != nil {
		err = errors.Join(err, s.Dispatcher.Close(ctx))
	}
	if s.Endpoint != nil {
		err = errors.Join(err, s.Endpoint.Close(ctx))
	}
	if s.Reducer != nil {
		err = errors.Join(err, s.Reducer.Close(ctx))
	}
	if s.Exchanger != nil {
		err = errors.Join(err, s.Exchanger.Close(ctx))
	}
	if s.Heap != nil {
		err = errors.Join(err, s.Heap.Close(ctx))
	}
	return err
}

// abandon closes what was opened before something failed, on every rank in the same way.
func (s *Stack) abandon() error {
	ctx, cancel := context.WithTimeout(context.Background(), comm.DefaultPeerTimeout)
	defer cancel()
	return s.Close(ctx)
}
