package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/memory"
)

// Options say what a Stack has. All ranks pass the same, those that join later included.
type Options struct {
	// Heap is how the heap is made.
	Heap memory.Options
	// Exchanger, Reducer and Dispatcher are opened where their options are set.
	Exchanger  *alltoallv.Options
	Reducer    *allreduce.Options
	Dispatcher *dispatch.Options
}

// Stack is one rank's end of what runs on a group. What was not asked for is nil. Its parts belong to it and are closed by it;
// the group and the device do not.
type Stack struct {
	Group      *comm.Group
	Device     device.Device
	Heap       *memory.Heap
	Exchanger  *alltoallv.Exchanger
	Reducer    *allreduce.Reducer
	Dispatcher *dispatch.Dispatcher
	// Moves are the experts whose parameters ranks need that did not have them in the stack before, the same list on every rank: the
	// caller sends them, or loads those that are lost.
	Moves []dispatch.Move

	options Options
}

// Open makes a stack on g. It is collective: every rank of g calls Open or, if it has a stack on the group before, Reopen. What
// fails on one rank is an error on all, and nothing is left.
//
// A rank that is admitted to a group that has stacks calls Open with the options of the others; the experts that it gets are those
// of Moves.
func Open(ctx context.Context, g *comm.Group, d device.Device, o Options) (*Stack, error) {
	return open(ctx, g, d, o, past{Rank: -1})
}

// Reopen closes s and makes a stack with the same options on g, a group that has come of that of s by Shrink or Admit. It is
// collective on g, and needs no rank that is not in g, if the group of s has failed. Views, buffers, registrations and handles of s are
// dead; what they held is to be copied out before.
//
// Experts stay where they are as far as their ranks are in g: see [dispatch.Placement.Follow], and Moves for the rest.
func (s *Stack) Reopen(ctx context.Context, g *comm.Group) (*Stack, error) {
	was := past{Rank: s.Group.Rank()}
	if s.Dispatcher != nil {
		was.Experts = s.Dispatcher.Placement().Ranks
	}
	if err := s.Close(ctx); err != nil {
		return nil, fmt.Errorf("stack: reopen: %w", err)
	}
	return open(ctx, g, s.Device, s.options, was)
}

// past is what a rank brings from the stack before: its number there, -1 for none, and where the experts were.
type past struct {
	Rank    int
	Experts [][]int
}

func open(ctx context.Context, g *comm.Group, d device.Device, o Options, was past) (*Stack, error) {
	s := &Stack{Group: g, Device: d, options: o}
	if err := s.open(ctx, was); err != nil {
		return nil, fmt.Errorf("stack: open: %w", errors.Join(err, s.abandon()))
	}
	return s, nil
}

func (s *Stack) open(ctx context.Context, was past) error {
	placement, err := s.follow(ctx, was)
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
	if o := s.options.Dispatcher; o != nil {
		with := *o
		if placement != nil {
			with.Placement = placement
		}
		if s.Dispatcher, err = dispatch.New(ctx, s.Heap, with); err != nil {
			return err
		}
	}
	return nil
}

// follow finds out where experts are now: nil where there was no stack before.
func (s *Stack) follow(ctx context.Context, mine past) (*dispatch.Placement, error) {
	msg, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	all, err := s.Group.AllGather(ctx, msg)
	if err != nil {
		return nil, err
	}
	was := make([]int, len(all))
	var before *dispatch.Placement
	for r, b := range all {
		var p past
		if err := json.Unmarshal(b, &p); err != nil {
			return nil, fmt.Errorf("rank %d: malformed: %w", r, err)
		}
		if was[r] = p.Rank; p.Rank >= 0 && p.Experts != nil && before == nil {
			before = &dispatch.Placement{Ranks: p.Experts}
		}
	}
	if before == nil || s.options.Dispatcher == nil {
		return nil, nil
	}
	now, moves := before.Follow(was)
	s.Moves = moves
	return now, nil
}

// Close closes the parts, last opened first. It is collective and idempotent. After a failure of the group it waits for nobody;
// otherwise it ends with ctx at the latest, and what this rank holds is released then too.
func (s *Stack) Close(ctx context.Context) error {
	var err error
	if s.Dispatcher != nil {
		err = errors.Join(err, s.Dispatcher.Close(ctx))
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
