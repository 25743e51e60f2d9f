package main

// #include "switchyard.h"
import "C"

import (
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
)

// switchyard_observe tells the state of ranks: 0 asks for those of this process and 1 for those of all processes of this user on this host, as JSON,
// 2 for the latter as a table, 3 for the last calls of all of them as JSON. text holds room bytes and gets the answer, 0-terminated, if that has room; needed gets its length with the 0.
//
//export switchyard_observe
func switchyard_observe(what C.int32_t, text *C.char, room C.int64_t, needed *C.int64_t) C.int32_t {
	return guard(func() error {
		answer, err := core.Observe(core.Observed(what))
		if err != nil {
			return err
		}
		if *needed = C.int64_t(len(answer) + 1); room >= *needed {
			out := unsafe.Slice((*byte)(unsafe.Pointer(text)), int(room))
			out[copy(out, answer)] = 0
		}
		return nil
	})
}
