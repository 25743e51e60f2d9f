package main

// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_expand makes a core.ExpandCall, before it returns.
//
//export switchyard_expand
func switchyard_expand(call *C.struct_switchyard_expand_call) C.int32_t {
	return guard(func() error {
		c := (*core.ExpandCall)(unsafe.Pointer(call))
		C.switchyard_large(call.ToRows.Addr, call.ToRows.Bytes)
		return c.Expand(&core.Expansion{
			Indices: memory[int64](c.Indices), Slots: memory[int32](c.Slots),
			Rows: memory[byte](c.Rows), ToRows: memory[byte](c.ToRows), Scales: memory[byte](c.Scales), ToScales: memory[byte](c.ToScales),
			Weights: memory[byte](c.Weights), ToWeights: memory[byte](c.ToWeights),
		})
	})
}

// switchyard_fold makes a core.FoldCall, before it returns.
//
//export switchyard_fold
func switchyard_fold(call *C.struct_switchyard_fold_call) C.int32_t {
	return guard(func() error {
		c := (*core.FoldCall)(unsafe.Pointer(call))
		C.switchyard_large(call.Sums.Addr, call.Sums.Bytes)
		return c.Fold(memory[byte](c.Rows), memory[byte](c.Sums), memory[int32](c.Slots))
	})
}

// memory is a caller's, none where it has no bytes.
func memory[T int64 | int32 | byte](b core.Buffer) []T {
	var each T
	if b.Addr == 0 || b.Bytes <= 0 {
		return nil
	}
	at := *(*unsafe.Pointer)(unsafe.Pointer(&b.Addr)) // which is no address of Go's
	return unsafe.Slice((*T)(at), b.Bytes/int64(unsafe.Sizeof(each)))
}
