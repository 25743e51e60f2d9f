package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"encoding/json"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// handles names everything that callers hold.
var handles = core.NewHandles()

// abiVersion changes when a function does. The Python package refuses another than its own.
const abiVersion = 20

// guard runs the body of an export: it turns errors and panics into a code and keeps the text for the thread. An export
// runs on the thread of its caller, so that is whose text it is.
func guard(f func() error) (code C.int32_t) {
	defer func() {
		if p := recover(); p != nil {
			code = report(fmt.Errorf("switchyard: %w: %v", core.ErrPanic, p))
		}
	}()
	if err := f(); err != nil {
		return report(err)
	}
	return C.int32_t(core.OK)
}

func report(err error) C.int32_t {
	code, rank := core.Classify(err)
	text, detail := err.Error(), core.DetailOf(err)
	C.switchyard_set_error((*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.uint64_t(len(text)), C.int32_t(rank),
		(*C.struct_switchyard_detail)(unsafe.Pointer(&detail)))
	return C.int32_t(code)
}

// options reads a call's options, which are JSON.
func options(text *C.char, into any) error {
	if err := json.Unmarshal([]byte(C.GoString(text)), into); err != nil {
		return fmt.Errorf("switchyard: options: %w: %v", core.ErrInvalid, err)
	}
	return nil
}

// newWords is zeroed memory for a queue's words. It is never freed: a caller may look at it as long as it lives.
func newWords() []byte {
	p := C.calloc(2, core.WordBytes) // and aligned to what one cache line needs
	addr := (uintptr(p) + core.WordBytes - 1) &^ (core.WordBytes - 1)
	return shm.At(addr, core.WordBytes)
}

func put[T any](v T) uint64 { return handles.Put(v) }

func buffer(p unsafe.Pointer, n C.int64_t) core.Buffer {
	return core.Buffer{Addr: uintptr(p), Bytes: int64(n)}
}

// numbers are those of a caller's array, none where it is NULL or its length no length.
func numbers(p *C.int64_t, n C.int64_t) []int64 {
	if p == nil || n < 0 {
		return nil
	}
	return unsafe.Slice((*int64)(unsafe.Pointer(p)), int(n))
}

// length refuses what is no number of a caller's things.
func length(of string, n C.int64_t) error {
	if n < 0 {
		return fmt.Errorf("switchyard: %w: %d %s", core.ErrInvalid, int64(n), of)
	}
	return nil
}

// hostStream refuses streams of GPUs where only the host does the work. 0 is the communicator's own.
func hostStream(stream C.uint64_t) error {
	if stream != 0 {
		return fmt.Errorf("switchyard: %w: stream %#x on the host, which has none", core.ErrInvalid, uint64(stream))
	}
	return nil
}

// placeOf is a communicator, which stands for the host, or one of its GPUs.
func placeOf(place C.uint64_t) (core.Place, error) {
	return core.Get[core.Place](handles, uint64(place))
}

// Structures of callers are those of package core.
var (
	_ [unsafe.Sizeof(core.Detail{})]byte       = [C.sizeof_struct_switchyard_detail]byte{}
	_ [unsafe.Sizeof(core.ShapeHead{})]byte    = [C.sizeof_struct_switchyard_shape_head]byte{}
	_ [unsafe.Sizeof(core.DispatchCall{})]byte = [C.sizeof_struct_switchyard_dispatch_call]byte{}
	_ [unsafe.Sizeof(core.CombineCall{})]byte  = [C.sizeof_struct_switchyard_combine_call]byte{}
	_ [unsafe.Sizeof(core.ResultCall{})]byte   = [C.sizeof_struct_switchyard_result_call]byte{}
	_ [unsafe.Sizeof(core.ExpandCall{})]byte   = [C.sizeof_struct_switchyard_expand_call]byte{}
	_ [unsafe.Sizeof(core.FoldCall{})]byte     = [C.sizeof_struct_switchyard_fold_call]byte{}
	_ [unsafe.Sizeof(core.RouteCall{})]byte    = [C.sizeof_struct_switchyard_route_call]byte{}
	_ [unsafe.Sizeof(core.BackwardCall{})]byte = [C.sizeof_struct_switchyard_backward_call]byte{}
	_ [unsafe.Sizeof(core.MessageCall{})]byte  = [C.sizeof_struct_switchyard_message_call]byte{}
	_ [unsafe.Sizeof(core.TransferCall{})]byte = [C.sizeof_struct_switchyard_transfer_call]byte{}
)

func shapeOf(p core.Place, shape *C.struct_switchyard_shape_head) (core.Shape, error) {
	head := (*core.ShapeHead)(unsafe.Pointer(shape))
	if err := head.Check(); err != nil {
		return core.Shape{}, err
	}
	behind := unsafe.Add(unsafe.Pointer(shape), unsafe.Sizeof(*head))
	return core.Shape{ShapeHead: head, Ranks: unsafe.Slice((*int64)(behind), head.Behind(p.Size()))}, nil
}

// guarded is guard for what may also have to be asked again.
func guarded(f func() (core.Code, error)) C.int32_t {
	code := core.OK
	if failed := guard(func() (err error) { code, err = f(); return err }); failed != C.int32_t(core.OK) {
		return failed
	}
	return C.int32_t(code)
}

// on submits an operation on a communicator, hands out its ticket and waits for it for wait microseconds. The code is
// Again when that was not enough.
func on(id C.uint64_t, ticket *C.uint64_t, wait C.int64_t, submit func(*core.Comm) (core.Ticket, error)) C.int32_t {
	return guarded(func() (core.Code, error) {
		c, err := core.Get[*core.Comm](handles, uint64(id))
		if err != nil {
			return 0, err
		}
		t, err := submit(c)
		if err != nil {
			return 0, err
		}
		return await(c, t, ticket, wait)
	})
}

// at submits an operation at a place, as switchyard_all_to_all describes.
func at(place C.uint64_t, ticket *C.uint64_t, wait C.int64_t, submit func(core.Place) (core.Ticket, error)) C.int32_t {
	return guarded(func() (core.Code, error) {
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		t, err := submit(p)
		c, host := p.(*core.Comm)
		if err != nil || !host {
			return core.OK, err
		}
		return await(c, t, ticket, wait)
	})
}

// await hands out a ticket and waits for it for wait microseconds.
func await(c *core.Comm, t core.Ticket, ticket *C.uint64_t, wait C.int64_t) (core.Code, error) {
	*ticket = C.uint64_t(t)
	done, _, err := c.Wait(t, core.Microseconds(int64(wait)))
	if err == nil && !done {
		return core.Again, nil
	}
	return core.OK, err
}

// switchyard_abi_version is the version of this ABI.
//
//export switchyard_abi_version
func switchyard_abi_version() C.int32_t { return abiVersion }

// switchyard_threads is how many threads Go runs code on at a time.
//
//export switchyard_threads
func switchyard_threads() C.int32_t { return C.int32_t(runtime.GOMAXPROCS(0)) }

// switchyard_live is how many handles are in use.
//
//export switchyard_live
func switchyard_live() C.int64_t { return C.int64_t(handles.Len()) }

// switchyard_wait waits wait microseconds for a ticket and gets its value and error. It may return Again sooner.
//
//export switchyard_wait
func switchyard_wait(communicator, ticket C.uint64_t, wait C.int64_t, value *C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err != nil {
			return 0, err
		}
		done, v, err := c.Wait(core.Ticket(ticket), core.Microseconds(int64(wait)))
		if err == nil && !done {
			return core.Again, nil
		}
		*value = C.int64_t(v)
		return core.OK, err
	})
}

// switchyard_drop forgets a handle that the caller no longer needs.
//
//export switchyard_drop
func switchyard_drop(handle C.uint64_t) C.int32_t {
	return guard(func() error { handles.Drop(uint64(handle)); return nil })
}
