package main

// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_expand makes a core.ExpandCall: enqueued on a GPU, at once on the host.
//
//export switchyard_expand
func switchyard_expand(dispatcher, stream C.uint64_t, call *C.struct_switchyard_expand_call) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		large(d, &call.ToRows)
		return d.Expand(uintptr(stream), (*core.ExpandCall)(unsafe.Pointer(call)))
	})
}

// switchyard_fold makes a core.FoldCall as switchyard_expand does.
//
//export switchyard_fold
func switchyard_fold(dispatcher, stream C.uint64_t, call *C.struct_switchyard_fold_call) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		large(d, &call.Sums)
		return d.Fold(uintptr(stream), (*core.FoldCall)(unsafe.Pointer(call)))
	})
}

// large has the pages of a result on the host be large.
func large(d *core.Dispatcher, b *C.struct_switchyard_buffer) {
	if !d.OnGPU() {
		C.switchyard_large(b.Addr, b.Bytes)
	}
}
