package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_messages sends and receives n messages at the same time. At a communicator, which stands for the host, stream is 0 and it waits
// for them for wait microseconds. The code is Again when that was not enough: then request names them until it is dropped, and their memory is
// in use until they are over. Otherwise from, which may be NULL, gets for each the rank that it was received from. On a GPU they are enqueued
// on the stream, from is memory there, which receives write in the order of the stream, and request stays as it is.
//
//export switchyard_messages
func switchyard_messages(place, stream C.uint64_t, calls *C.struct_switchyard_message_call, n, wait C.int64_t, from *C.int64_t, request *C.uint64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		if err := length("messages", n); err != nil {
			return core.OK, err
		}
		q, err := p.Messages(uintptr(stream), unsafe.Slice((*core.MessageCall)(unsafe.Pointer(calls)), int(n)), uintptr(unsafe.Pointer(from)))
		if q == nil || err != nil {
			return core.OK, err
		}
		return meet(q, wait, from, request)
	})
}

// switchyard_transfer makes a put, a get, a signal or a wait. At a communicator, which stands for the host, stream is 0 and only a wait can be
// under way when it returns, as in switchyard_messages. On a GPU it is enqueued on the stream.
//
//export switchyard_transfer
func switchyard_transfer(place, stream C.uint64_t, call *C.struct_switchyard_transfer_call, wait C.int64_t, request *C.uint64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		q, err := p.Transfer(uintptr(stream), (*core.TransferCall)(unsafe.Pointer(call)))
		if q == nil || err != nil {
			return core.OK, err
		}
		return meet(q, wait, nil, request)
	})
}

// switchyard_request waits for a request for wait microseconds, as switchyard_messages does.
//
//export switchyard_request
func switchyard_request(request C.uint64_t, wait C.int64_t, from *C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		q, err := core.Get[*core.Request](handles, uint64(request))
		if err != nil {
			return 0, err
		}
		return meet(q, wait, from, nil)
	})
}

// meet waits for a request, and names it if it is not over by then and name is not nil.
func meet(q *core.Request, wait C.int64_t, from *C.int64_t, name *C.uint64_t) (core.Code, error) {
	over, ranks, err := q.Wait(core.Microseconds(int64(wait)))
	switch {
	case err != nil:
		return 0, err
	case !over && name != nil:
		*name = C.uint64_t(put(q))
		fallthrough
	case !over:
		return core.Again, nil
	}
	if from != nil {
		for i, r := range ranks {
			numbers(from, C.int64_t(len(ranks)))[i] = int64(r)
		}
	}
	return core.OK, nil
}
