package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_alloc takes symmetric memory of a place for work on stream. The ticket's value is a block.
//
//export switchyard_alloc
func switchyard_alloc(communicator, place, stream C.uint64_t, bytes C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		return p.Alloc(uintptr(stream), int64(bytes), put[*core.Block])
	})
}

// switchyard_block is where a block is: its address here, on the host or a GPU, and its offset in every rank's segment.
//
//export switchyard_block
func switchyard_block(block C.uint64_t, addr *C.uint64_t, offset *C.int64_t) C.int32_t {
	return guard(func() error {
		b, err := core.Get[*core.Block](handles, uint64(block))
		if err != nil {
			return err
		}
		*addr, *offset = C.uint64_t(b.Addr()), C.int64_t(b.Offset())
		return nil
	})
}

// switchyard_free gives a block back, one on a GPU once stream has run what it has been given.
//
//export switchyard_free
func switchyard_free(communicator, block, stream C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		b, err := core.Get[*core.Block](handles, uint64(block))
		if err != nil {
			return 0, err
		}
		handles.Drop(uint64(block))
		return b.Free(uintptr(stream))
	})
}

// switchyard_verify compares the ranks' allocations in a place.
//
//export switchyard_verify
func switchyard_verify(communicator, place C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		return p.Verify()
	})
}
