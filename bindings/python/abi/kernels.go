package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
	"github.com/switchyard-moe/switchyard/memory/devcomm"
)

// switchyard_kernels_open makes what kernels of users on a GPU have of the other ranks, together with all of them. The ticket's value is its
// handle.
//
//export switchyard_kernels_open
func switchyard_kernels_open(communicator, gpu C.uint64_t, signals C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		g, err := core.Get[*core.GPU](handles, uint64(gpu))
		if err != nil {
			return 0, err
		}
		return g.OpenKernels(int(signals), put[*core.Kernels])
	})
}

// switchyard_kernels_argument is the address, on the GPU, of the struct switchyard::communicator that kernels take.
//
//export switchyard_kernels_argument
func switchyard_kernels_argument(kernels C.uint64_t, address *C.uint64_t) C.int32_t {
	return guard(func() error {
		k, err := core.Get[*core.Kernels](handles, uint64(kernels))
		if err == nil {
			*address = C.uint64_t(k.Argument())
		}
		return err
	})
}

// switchyard_kernels_load finds a kernel by its name in a cubin, a fatbin or PTX.
//
//export switchyard_kernels_load
func switchyard_kernels_load(kernels C.uint64_t, image unsafe.Pointer, bytes C.int64_t, name *C.char, kernel *C.int64_t) C.int32_t {
	return guard(func() error {
		k, err := core.Get[*core.Kernels](handles, uint64(kernels))
		if err != nil {
			return err
		}
		if err := length("bytes of an image", bytes); err != nil {
			return err
		}
		n, err := k.Load(unsafe.Slice((*byte)(image), int(bytes)), C.GoString(name))
		*kernel = C.int64_t(n)
		return err
	})
}

// switchyard_kernels_launch enqueues a kernel on a CUstream: blocks of threads with bytes of shared memory each, and its one parameter.
//
//export switchyard_kernels_launch
func switchyard_kernels_launch(kernels, stream C.uint64_t, kernel, blocks, threads, shared C.int64_t, args unsafe.Pointer, bytes C.int64_t) C.int32_t {
	return guard(func() error {
		k, err := core.Get[*core.Kernels](handles, uint64(kernels))
		if err != nil {
			return err
		}
		if err := length("bytes of arguments", bytes); err != nil {
			return err
		}
		grid := devcomm.Grid{Blocks: int(blocks), Threads: int(threads), SharedBytes: int(shared)}
		return k.Launch(uintptr(stream), int(kernel), grid, unsafe.Slice((*byte)(args), int(bytes)))
	})
}
