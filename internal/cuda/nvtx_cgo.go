//go:build cgo && linux

package cuda

/*
#cgo LDFLAGS: -ldl
#cgo noescape sw_nvtx_start
#cgo nocallback sw_nvtx_start
#cgo nocallback sw_nvtx_end
#include <stdlib.h>
#include "nvtx.h"
*/
import "C"

import "unsafe"

func openProfiler(path string) bool {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	return C.sw_nvtx_open(p) != 0
}

func rangeStart(name string, bytes int64) uint64 {
	return uint64(C.sw_nvtx_start((*C.char)(unsafe.Pointer(unsafe.StringData(name))), C.size_t(len(name)), C.int64_t(bytes)))
}

func rangeEnd(id uint64) { C.sw_nvtx_end(C.uint64_t(id)) }
