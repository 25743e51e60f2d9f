package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_gpu_open makes a communicator's end on a GPU, together with all its ranks. The ticket's value is its handle.
//
//export switchyard_gpu_open
func switchyard_gpu_open(communicator C.uint64_t, opts *C.char, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		var o core.GPUOptions
		if err := options(opts, &o); err != nil {
			return 0, err
		}
		return c.OpenGPU(o, put[*core.GPU])
	})
}

// switchyard_gpu_reducer makes a GPU ready for reductions and gathers, together with all ranks. Once is enough.
//
//export switchyard_gpu_reducer
func switchyard_gpu_reducer(communicator, gpu C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		g, err := core.Get[*core.GPU](handles, uint64(gpu))
		if err != nil {
			return 0, err
		}
		return g.OpenReducer()
	})
}

// arenas are the pools that torch's allocator may ask, by the number of their functions.
var arenas [C.SWITCHYARD_POOLS]atomic.Pointer[core.Arena]

func putArena(a *core.Arena) (uint64, error) {
	for k := range arenas {
		if arenas[k].CompareAndSwap(nil, a) {
			return uint64(k), nil
		}
	}
	return 0, fmt.Errorf("switchyard: %w: this process has %d pools already", core.ErrInvalid, len(arenas))
}

// switchyard_gpu_pool takes symmetric memory of a GPU for an allocator of torch, together with all ranks. The ticket's value
// k says which functions that allocator calls: switchyard_pool_alloc_k and switchyard_pool_free_k.
//
//export switchyard_gpu_pool
func switchyard_gpu_pool(communicator, gpu, stream C.uint64_t, bytes C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		g, err := core.Get[*core.GPU](handles, uint64(gpu))
		if err != nil {
			return 0, err
		}
		return g.NewArena(uintptr(stream), int64(bytes), putArena)
	})
}

// switchyard_pool_take takes memory of a pool, NULL when it has none of that device. It is not called from outside.
//
//export switchyard_pool_take
func switchyard_pool_take(pool C.int32_t, bytes C.int64_t, device C.int32_t) (p unsafe.Pointer) {
	_ = guard(func() error {
		a := arenas[pool].Load()
		if a == nil || a.Device() != int(device) {
			return nil
		}
		addr := a.Alloc(int64(bytes))
		p = *(*unsafe.Pointer)(unsafe.Pointer(&addr)) // of a GPU: Go never follows it
		return nil
	})
	return p
}

// switchyard_pool_give gives memory back to a pool. An error has nobody to go to. It is not called from outside.
//
//export switchyard_pool_give
func switchyard_pool_give(pool C.int32_t, p unsafe.Pointer) {
	_ = guard(func() error {
		if a := arenas[pool].Load(); a != nil {
			return a.Free(uintptr(p))
		}
		return nil
	})
}
