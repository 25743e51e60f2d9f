package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"context"
	"errors"
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
	"github.com/switchyard-moe/switchyard/dispatch"
)

// switchyard_dispatcher makes a dispatcher of a place. opts is a core.DispatcherOptions. The ticket's value is its handle.
//
//export switchyard_dispatcher
func switchyard_dispatcher(communicator, place C.uint64_t, opts *C.char, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		var o core.DispatcherOptions
		if err := options(opts, &o); err != nil {
			return 0, err
		}
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		return p.NewDispatcher(o, put[*core.Dispatcher])
	})
}

// switchyard_dispatcher_info is the most tokens that a rank has in a call, the most rows that this rank can get, how many dispatches are alive, the
// bytes of a routing, and this rank's experts, of which there are experts and room for room in expert.
//
//export switchyard_dispatcher_info
func switchyard_dispatcher_info(dispatcher C.uint64_t, maxTokens, maxRows, alive, routing, experts, expert *C.int64_t, room C.int64_t) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		local := d.Experts()
		*maxTokens, *maxRows, *alive = C.int64_t(d.MaxTokens()), C.int64_t(d.MaxRows()), C.int64_t(d.Alive())
		*routing, *experts = C.int64_t(d.RoutingBytes()), C.int64_t(len(local))
		out := numbers(expert, room)
		for i, e := range local[:min(len(local), len(out))] {
			out[i] = int64(e)
		}
		return nil
	})
}

// switchyard_dispatcher_counters is what this rank has done so far: for each of experts how many choices of its tokens that got, and for
// each of ranks the bytes of rows sent there and the nanoseconds waited for it.
//
//export switchyard_dispatcher_counters
func switchyard_dispatcher_counters(dispatcher C.uint64_t, choices *C.int64_t, experts C.int64_t, bytes, waited *C.int64_t, ranks C.int64_t) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		c, err := d.Counters()
		if err != nil {
			return err
		}
		copy(numbers(choices, experts), c.Choices)
		copy(numbers(bytes, ranks), c.Bytes)
		out := numbers(waited, ranks)
		for i, w := range c.Waited[:min(len(c.Waited), len(out))] {
			out[i] = w.Nanoseconds()
		}
		return nil
	})
}

// switchyard_dispatcher_mask has the calls of all ranks go on without a rank. It waits for nothing.
//
//export switchyard_dispatcher_mask
func switchyard_dispatcher_mask(dispatcher C.uint64_t, rank C.int64_t) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err == nil {
			err = d.Mask(int(rank))
		}
		return err
	})
}

// switchyard_dispatcher_masked is the ranks that are masked, a bit for each, as this rank knows.
//
//export switchyard_dispatcher_masked
func switchyard_dispatcher_masked(dispatcher C.uint64_t, ranks *C.uint64_t) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		bits, err := d.Masked()
		*ranks = C.uint64_t(bits)
		return err
	})
}

// switchyard_dispatcher_unmask submits that the other ranks take this one in again, for which it waits within microseconds, 0 for the
// communicator's timeout. The ticket's value is how many calls they have made by then.
//
//export switchyard_dispatcher_unmask
func switchyard_dispatcher_unmask(communicator, dispatcher C.uint64_t, within C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return 0, err
		}
		return d.Unmask(core.Microseconds(int64(within)))
	})
}

// switchyard_dispatcher_close ends a dispatcher.
//
//export switchyard_dispatcher_close
func switchyard_dispatcher_close(communicator, dispatcher C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return 0, err
		}
		handles.Drop(uint64(dispatcher))
		return d.Close()
	})
}

// dispatching makes a call of a dispatcher, as switchyard_all_to_all describes for a place.
func dispatching(dispatcher C.uint64_t, ticket *C.uint64_t, wait C.int64_t, handle uint64, call func(*core.Dispatcher, *core.Handle) (core.Ticket, error)) C.int32_t {
	return guarded(func() (core.Code, error) {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return 0, err
		}
		var h *core.Handle
		if handle != 0 {
			if h, err = core.Get[*core.Handle](handles, handle); err != nil {
				return 0, err
			}
		}
		t, err := call(d, h)
		if err != nil || d.OnGPU() {
			return core.OK, err
		}
		return await(d.Comm(), t, ticket, wait)
	})
}

// switchyard_dispatch makes a core.DispatchCall. It is enqueued or submitted as switchyard_all_to_all describes. The ticket's value is a
// handle of the dispatch, which is in the call where that was enqueued.
//
//export switchyard_dispatch
func switchyard_dispatch(dispatcher, stream C.uint64_t, call *C.struct_switchyard_dispatch_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.DispatchCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, c.Handle, func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.Dispatch(uintptr(stream), c, h, false, put[*core.Handle])
	})
}

// switchyard_deliver makes a new dispatch as switchyard_dispatch does. Where there is room for counts it waits for them: numbers as those of
// switchyard_counts, one after the other. Where there are results it copies these as switchyard_results does; their Handle is this dispatch's.
// Without them the caller's switchyard_results of the handle comes next on the stream: copies take rows as they come (dispatch.Tokens.Taken).
// The handle's name and the place of its rows are in the call, on the host too, and no name where the results have released it. Again says
// that wait was too short: for the dispatch if the call has no name, whose ticket is as for switchyard_dispatch, else for the counts. Then
// nothing was copied. On a GPU a dispatch whose results are copied without a wait for counts is one call with the copy.
//
//export switchyard_deliver
func switchyard_deliver(dispatcher, stream C.uint64_t, call *C.struct_switchyard_dispatch_call, results *C.struct_switchyard_result_call, wait C.int64_t, ticket *C.uint64_t, counts *C.int64_t, room C.int64_t) C.int32_t {
	c := (*core.DispatchCall)(unsafe.Pointer(call))
	return guarded(func() (core.Code, error) {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return 0, err
		}
		r := (*core.ResultCall)(unsafe.Pointer(results))
		if r != nil && room == 0 && d.OnGPU() {
			return core.OK, d.Deliver(uintptr(stream), c, r, put[*core.Handle], put[*core.Routing])
		}
		t, err := d.Dispatch(uintptr(stream), c, nil, true, put[*core.Handle])
		if err != nil {
			return 0, err
		}
		if !d.OnGPU() {
			*ticket = C.uint64_t(t)
			done, made, err := d.Comm().Wait(t, core.Microseconds(int64(wait)))
			switch {
			case err != nil:
				return 0, err
			case !done:
				return core.Again, nil
			}
			c.Made = uint64(made)
		}
		h, err := core.Get[*core.Handle](handles, c.Made)
		if err != nil {
			return 0, err
		}
		c.Rows = h.Place()
		if room > 0 {
			code, err := counted(h, wait, func(n dispatch.HostCounts) {
				to := numbers(counts, room)
				to[0], to = int64(n.Rows), to[1:]
				for _, part := range [...][]int32{n.Counts, n.Offsets, n.RankCounts} {
					widen(to, part)
					to = to[min(len(part), len(to)):]
				}
			})
			if code != core.OK || err != nil {
				return code, err
			}
		}
		if r == nil {
			return core.OK, nil
		}
		r.Handle = c.Made
		return core.OK, copied(d, uintptr(stream), r, h, &c.Made)
	})
}

// copied makes a core.ResultCall. made is the name of the handle, which goes with its release.
func copied(d *core.Dispatcher, stream uintptr, r *core.ResultCall, h *core.Handle, made *uint64) error {
	err := d.Results(stream, r, h, put[*core.Routing])
	if err == nil && r.Release != 0 {
		handles.Drop(*made)
		*made = 0
	}
	return err
}

// counted hands the counts of a dispatch over, for which it waits wait microseconds.
func counted(h *core.Handle, wait C.int64_t, tell func(dispatch.HostCounts)) (core.Code, error) {
	ctx, cancel := context.WithTimeout(context.Background(), core.Microseconds(int64(wait)))
	defer cancel()
	c, err := h.HostCounts(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return core.Again, nil
	}
	if err != nil {
		return 0, err
	}
	tell(c)
	return core.OK, nil
}

// switchyard_combine makes a core.CombineCall; wait and ticket are as for switchyard_dispatch.
//
//export switchyard_combine
func switchyard_combine(dispatcher, stream C.uint64_t, call *C.struct_switchyard_combine_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.CombineCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, c.Handle, func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		var r *core.Routing
		if c.Routing != 0 {
			var err error
			if r, err = core.Get[*core.Routing](handles, c.Routing); err != nil {
				return 0, err
			}
		}
		return d.Combine(uintptr(stream), c, h, r)
	})
}

// switchyard_combine_backward makes a core.BackwardCall; wait and ticket are as for switchyard_dispatch.
//
//export switchyard_combine_backward
func switchyard_combine_backward(dispatcher, stream C.uint64_t, call *C.struct_switchyard_backward_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.BackwardCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, c.Handle, func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.CombineBackward(uintptr(stream), c, h)
	})
}

// switchyard_receive makes the second half of the dispatch, or of the combine, that a handle is in; wait and ticket are as
// for switchyard_dispatch.
//
//export switchyard_receive
func switchyard_receive(dispatcher, stream, handle C.uint64_t, combine C.int32_t, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return dispatching(dispatcher, ticket, wait, uint64(handle), func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.Receive(uintptr(stream), h, combine != 0)
	})
}

// switchyard_results copies what the dispatch of a core.ResultCall has left: enqueued on a GPU, at once on the host.
//
//export switchyard_results
func switchyard_results(dispatcher, stream C.uint64_t, call *C.struct_switchyard_result_call) C.int32_t {
	return guard(func() error {
		c := (*core.ResultCall)(unsafe.Pointer(call))
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		h, err := core.Get[*core.Handle](handles, c.Handle)
		if err != nil {
			return err
		}
		return copied(d, uintptr(stream), c, h, &c.Handle)
	})
}

// switchyard_route takes a handle that goes by the routing in a core.RouteCall; wait, ticket and the handle's name are as for
// switchyard_dispatch.
//
//export switchyard_route
func switchyard_route(dispatcher, stream C.uint64_t, call *C.struct_switchyard_route_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.RouteCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, 0, func(d *core.Dispatcher, _ *core.Handle) (core.Ticket, error) {
		r, err := core.Get[*core.Routing](handles, c.Routing)
		if err != nil {
			return 0, err
		}
		return d.Route(uintptr(stream), c, r, put[*core.Handle])
	})
}

// switchyard_output is where what a dispatch leaves lies, as core.Handle.Output has it: an address and bytes for each of 9 parts.
//
//export switchyard_output
func switchyard_output(handle C.uint64_t, out *C.int64_t) C.int32_t {
	return guard(func() error {
		h, err := core.Get[*core.Handle](handles, uint64(handle))
		if err != nil {
			return err
		}
		to := numbers(out, 18)
		for i, b := range h.Output() {
			to[2*i], to[2*i+1] = int64(b.Addr), b.Bytes
		}
		return nil
	})
}

// switchyard_counts waits wait microseconds for how many rows a dispatch brought, and else returns Again: the length of the output, and
// for each of local experts how many, for each of groups the first row and one behind the last, and for each of ranks how many came from
// there.
//
//export switchyard_counts
func switchyard_counts(handle C.uint64_t, wait C.int64_t, rows, counts *C.int64_t, local C.int64_t, offsets *C.int64_t, groups C.int64_t, rankCounts *C.int64_t, ranks C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		h, err := core.Get[*core.Handle](handles, uint64(handle))
		if err != nil {
			return 0, err
		}
		return counted(h, wait, func(c dispatch.HostCounts) {
			*rows = C.int64_t(c.Rows)
			widen(numbers(counts, local), c.Counts)
			widen(numbers(offsets, groups+1), c.Offsets)
			widen(numbers(rankCounts, ranks), c.RankCounts)
		})
	})
}

func widen(to []int64, from []int32) {
	for i, v := range from[:min(len(from), len(to))] {
		to[i] = int64(v)
	}
}

// switchyard_release gives the output of a dispatch back, or forgets a routing. Calls that go by that go on.
//
//export switchyard_release
func switchyard_release(handle C.uint64_t) C.int32_t {
	return guard(func() error {
		if _, err := core.Get[*core.Routing](handles, uint64(handle)); err == nil {
			handles.Drop(uint64(handle))
			return nil
		}
		h, err := core.Get[*core.Handle](handles, uint64(handle))
		if err == nil {
			handles.Drop(uint64(handle))
			h.Release()
		}
		return err
	})
}
