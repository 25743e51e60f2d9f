package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
	"github.com/switchyard-moe/switchyard/kernels"
)

// switchyard_all_to_all exchanges memory of a place: a communicator, which stands for the host, or one of its GPUs. shape is
// a core.Shape, which the caller may change afterwards. On a GPU the exchange is enqueued on a stream, a CUstream, and waits
// for nothing; what becomes of it a later call or switchyard_fault tells. On the host, where the stream is 0, it is
// submitted as the calls below are.
//
//export switchyard_all_to_all
func switchyard_all_to_all(place, stream C.uint64_t, dst, src unsafe.Pointer, shape *C.struct_switchyard_shape_head, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		s, err := shapeOf(p, shape)
		if err != nil {
			return 0, err
		}
		return p.AllToAll(uintptr(stream), uintptr(dst), uintptr(src), s)
	})
}

// switchyard_explain says how an exchange into dst would be carried. text holds room bytes and gets as much of the answer as
// fits, 0-terminated.
//
//export switchyard_explain
func switchyard_explain(place C.uint64_t, dst unsafe.Pointer, shape *C.struct_switchyard_shape_head, text *C.char, room C.int64_t) C.int32_t {
	return guard(func() error {
		p, err := placeOf(place)
		if err != nil {
			return err
		}
		s, err := shapeOf(p, shape)
		if err != nil {
			return err
		}
		why, err := p.Explain(uintptr(dst), s)
		if err == nil {
			fit(text, room, why)
		}
		return err
	})
}

// switchyard_explain_reduction says how a collective (kernels.Collective) of dtype would be carried on a place, a GPU once that has a reducer.
// bytes are those of its larger buffer. text and room are as for switchyard_explain.
//
//export switchyard_explain_reduction
func switchyard_explain_reduction(place C.uint64_t, collective, bytes, dtype C.int64_t, text *C.char, room C.int64_t) C.int32_t {
	return guard(func() error {
		p, err := placeOf(place)
		if err != nil {
			return err
		}
		of, err := core.Numbered[kernels.Collective]("collective", int64(collective))
		if err != nil {
			return err
		}
		t, err := core.Numbered[kernels.DType]("dtype", int64(dtype))
		if err != nil {
			return err
		}
		why, err := p.ExplainReduction(of, int64(bytes), t)
		if err == nil {
			fit(text, room, why)
		}
		return err
	})
}

// fit writes as much of an answer to a caller's room bytes as they hold, 0-terminated.
func fit(text *C.char, room C.int64_t, answer string) {
	if room > 0 {
		out := unsafe.Slice((*byte)(unsafe.Pointer(text)), int(room))
		out[copy(out[:room-1], answer)] = 0
	}
}

// switchyard_fault is the error that exchanges of a place which have run by now have come to and that no ticket tells.
//
//export switchyard_fault
func switchyard_fault(place C.uint64_t) C.int32_t {
	return guard(func() error {
		p, err := placeOf(place)
		if err != nil {
			return err
		}
		return p.Fault()
	})
}

// switchyard_refuse tells ranks that compare their calls that this one does not make the next one, because of an error with this code and
// text. It always fails: with that error, or on the host, where it does not wait, with Again.
//
//export switchyard_refuse
func switchyard_refuse(place C.uint64_t, code C.int32_t, text *C.char, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, 0, func(p core.Place) (core.Ticket, error) {
		return p.Refuse(core.Refusal(core.Code(code), C.GoString(text)))
	})
}

// switchyard_all_reduce combines src of all ranks into every rank's dst, which may be src. The place, the stream and the ticket are as
// in switchyard_all_to_all.
//
//export switchyard_all_reduce
func switchyard_all_reduce(place, stream C.uint64_t, dst, src unsafe.Pointer, bytes, dtype, op, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		t, o, err := reduction(dtype, op)
		if err != nil {
			return 0, err
		}
		return p.AllReduce(uintptr(stream), buffer(dst, bytes), buffer(src, bytes), t, o)
	})
}

// reduction is a data type and an operator of a caller.
func reduction(dtype, op C.int64_t) (kernels.DType, kernels.ReduceOp, error) {
	t, err := core.Numbered[kernels.DType]("dtype", int64(dtype))
	if err != nil {
		return 0, 0, err
	}
	o, err := core.Numbered[kernels.ReduceOp]("op", int64(op))
	return t, o, err
}

// switchyard_reduce_scatter combines src of all ranks and leaves this rank's slice in dst. place, stream, wait and ticket are as for
// switchyard_all_reduce.
//
//export switchyard_reduce_scatter
func switchyard_reduce_scatter(place, stream C.uint64_t, dst unsafe.Pointer, dstBytes C.int64_t, src unsafe.Pointer, srcBytes C.int64_t,
	dtype, op, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		t, o, err := reduction(dtype, op)
		if err != nil {
			return 0, err
		}
		return p.ReduceScatter(uintptr(stream), buffer(dst, dstBytes), buffer(src, srcBytes), t, o)
	})
}

// switchyard_all_gather puts src of rank k into slice k of every rank's dst. place, stream, wait and ticket are as for
// switchyard_all_reduce.
//
//export switchyard_all_gather
func switchyard_all_gather(place, stream C.uint64_t, dst unsafe.Pointer, dstBytes C.int64_t, src unsafe.Pointer, srcBytes C.int64_t,
	wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.AllGather(uintptr(stream), buffer(dst, dstBytes), buffer(src, srcBytes))
	})
}

// switchyard_broadcast copies bytes of rank root to all ranks. place, stream, wait and ticket are as for switchyard_all_reduce.
//
//export switchyard_broadcast
func switchyard_broadcast(place, stream C.uint64_t, data unsafe.Pointer, bytes, root, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.Broadcast(uintptr(stream), buffer(data, bytes), int(root))
	})
}

// switchyard_all_to_all_by_plan puts slice k of rank r's src into slice r of rank k's dst, by a plan of the communicator. dst may be src; place,
// stream, wait and ticket are as for switchyard_all_reduce.
//
//export switchyard_all_to_all_by_plan
func switchyard_all_to_all_by_plan(place, stream C.uint64_t, dst, src unsafe.Pointer, bytes, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.AllToAllByPlan(uintptr(stream), buffer(dst, bytes), buffer(src, bytes))
	})
}

// switchyard_barrier completes once all ranks have submitted it. This call and those below submit an operation on a stream, 0 for the
// communicator's own, and wait for it for wait microseconds; Again says that it is still under way, and its buffers are in use until the
// ticket is complete.
//
//export switchyard_barrier
func switchyard_barrier(communicator, stream C.uint64_t, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, wait, func(c *core.Comm) (core.Ticket, error) {
		if err := hostStream(stream); err != nil {
			return 0, err
		}
		return c.Barrier()
	})
}
