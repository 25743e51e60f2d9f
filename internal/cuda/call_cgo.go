//go:build cgo && linux

package cuda

/*
#cgo LDFLAGS: -ldl
#cgo noescape sw_call
#cgo nocallback sw_call
#cgo noescape sw_submit
#cgo nocallback sw_submit
#include "swcuda.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

type table = *C.sw_driver

func openTable() (table, error) {
	var t table
	why := make([]byte, 256)
	r := C.sw_open(&t, (*C.char)(unsafe.Pointer(&why[0])), C.size_t(len(why)))
	if r != 0 {
		return nil, fmt.Errorf("%w: %s", ErrUnavailable, text(why))
	}
	return t, nil
}

func closeTable(t table) { C.sw_close(t) }

func invoke(t table, ctx uintptr, o op, a *args, p unsafe.Pointer) Code {
	return Code(C.sw_call(t, C.uint64_t(ctx), C.int32_t(o), (*C.uint64_t)(unsafe.Pointer(a)), p))
}

func submit(t table, ctx uintptr, streams []uintptr, commands []byte) (Code, int64) {
	var at C.int64_t
	r := C.sw_submit(t, C.uint64_t(ctx), (*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(streams))), C.int32_t(len(streams)),
		unsafe.Pointer(unsafe.SliceData(commands)), C.int64_t(len(commands)), &at)
	return Code(r), int64(at)
}

func errorName(t table, c Code) string {
	if t == nil {
		return ""
	}
	return C.GoString(C.sw_error_name(t, C.sw_result(c)))
}

// operationName is the C side's name of an operation, for the test that the two tables agree.
func operationName(o op) string { return C.GoString(C.sw_op_name(C.int32_t(o))) }

// commandLayout is the C side's sizes and offsets of the commands, for the test that Go encodes them alike.
func commandLayout() (launchBytes, wordsBytes, function, grid, flags, argBytes uintptr) {
	var l C.sw_cmd_launch
	return C.sizeof_sw_cmd_launch, C.sizeof_sw_cmd_words, unsafe.Offsetof(l.function), unsafe.Offsetof(l.grid),
		unsafe.Offsetof(l.flags), unsafe.Offsetof(l.arg_bytes)
}
