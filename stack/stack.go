package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
	id      uint64        // of this rank, as long as it has a stack
	age     int           // how many stacks there were before
	ids     []uint64      // of the ranks
	had     map[int][]int // this rank's experts when it left its earlier stacks, by their ages
}

// Open makes a stack on g. It is collective: every rank of g calls Open or, if it has a stack on the group before, Reopen. A failure on
// one rank is an error on all, and nothing is left. A ctx that ends while ranks wait for each other may leave the group out of step, as in
// memory.NewHeap: call Open again on what Group.Shrink makes of it.
//
// A rank that is admitted to a group with stacks calls Open with the options of the others; Moves lists the experts that it gets.
func Open(ctx context.Context, g *comm.Group, d device.Device, o Options) (*Stack, error) {
	s := &Stack{Group: g, Device: d, options: o, id: rand.Uint64()}
	return s.openAfter(ctx, nil)
}

// Reopen closes s and makes a stack with the same options on g, a group derived from s.Group by Shrink or Admit. It is collective on g,
// and if s.Group has failed it needs no rank outside g. Views, buffers, registrations and handles of s are dead; the caller copies their
// contents out before.
//
// Experts stay on the ranks that have them now, also after [dispatch.Dispatcher.SetPlacement], if these are in g, see
// [dispatch.Placement.Follow]; Moves lists the others. Where a rank was lost while experts moved, ranks can have different placements: a rank
// then has the experts of its own. A rank keeps the parameters of experts that it gives away until a call on the new stack has ended. If another
// rank is lost during Reopen, some ranks have a new stack and others still have s. Each then reopens the stack it has, on the next group, and
// Moves counts from the last stack that all had.
//
// On several hosts, where a link drops the packets of UCX, s is closed within 2 s, and the new heap is refused [comm.Config.PeerTimeout] later.
func (s *Stack) Reopen(ctx context.Context, g *comm.Group) (*Stack, error) {
	if err := s.Close(ctx); err != nil {
		return nil, fmt.Errorf("stack: reopen: %w", err)
	}
	next := &Stack{Group: g, Device: s.Device, options: s.options, id: s.id}
	return next.openAfter(ctx, s)
}

// openAfter opens s after last, the stack that this rank had before, nil if it had none.
func (s *Stack) openAfter(ctx context.Context, last *Stack) (*Stack, error) {
	if err := s.openAll(ctx, last); err != nil {
		return nil, fmt.Errorf("stack: open: %w", errors.Join(err, s.abandon()))
	}
	return s, nil
}

func (s *Stack) openAll(ctx context.Context, last *Stack) error {
	placement, err := s.follow(ctx, last)
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
	}
	return nil
}

// follow finds out where experts are, from what every rank brings of its stack before, and where they come to be; nil where no rank had one.
func (s *Stack) follow(ctx context.Context, last *Stack) (*dispatch.Placement, error) {
	mine := past{ID: s.id}
	if last != nil {
		mine = last.leave()
	}
	msg, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	all, err := s.Group.AllGather(ctx, msg)
	if err != nil {
		return nil, err
	}
	pasts := make([]past, len(all))
	for r, b := range all {
		if err := json.Unmarshal(b, &pasts[r]); err != nil {
			return nil, fmt.Errorf("rank %d: malformed: %w", r, err)
		}
		s.ids = append(s.ids, pasts[r].ID)
		s.age = max(s.age, pasts[r].Age+1)
	}
	before, was, age := together(pasts)
	if before == nil || s.options.Dispatcher == nil {
		return nil, nil
	}
	s.had = mine.Had
	maps.DeleteFunc(s.had, func(at int, _ []int) bool { return at < age })
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
