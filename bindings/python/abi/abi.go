package main

// #include <stdlib.h>
// #include "switchyard.h"
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/switchyard-moe/switchyard/bindings/python/core"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// handles names everything that callers hold.
var handles = core.NewHandles()

// abiVersion changes when a function does. The Python package refuses another than its own.
const abiVersion = 6

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
	text := err.Error()
	C.switchyard_set_error((*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.uint64_t(len(text)), C.int32_t(rank))
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

func numbers(p *C.int64_t, n C.int64_t) []int64 {
	if p == nil {
		return nil
	}
	return unsafe.Slice((*int64)(unsafe.Pointer(p)), int(n))
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
	_ [unsafe.Sizeof(core.ShapeHead{})]byte    = [C.sizeof_struct_switchyard_shape_head]byte{}
	_ [unsafe.Sizeof(core.DispatchCall{})]byte = [C.sizeof_struct_switchyard_dispatch_call]byte{}
	_ [unsafe.Sizeof(core.CombineCall{})]byte  = [C.sizeof_struct_switchyard_combine_call]byte{}
	_ [unsafe.Sizeof(core.BackwardCall{})]byte = [C.sizeof_struct_switchyard_backward_call]byte{}
)

func shapeOf(p core.Place, shape *C.struct_switchyard_shape_head) core.Shape {
	head := (*core.ShapeHead)(unsafe.Pointer(shape))
	behind := unsafe.Add(unsafe.Pointer(shape), unsafe.Sizeof(*head))
	return core.Shape{ShapeHead: head, Ranks: unsafe.Slice((*int64)(behind), head.Behind(p.Size()))}
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
	done, _, err := c.Wait(t, time.Duration(wait)*time.Microsecond)
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

// switchyard_listen opens this rank's socket and writes its address, 0-terminated, to addr, which holds room bytes.
//
//export switchyard_listen
func switchyard_listen(opts *C.char, listener *C.uint64_t, addr *C.char, room C.int64_t) C.int32_t {
	return guard(func() error {
		var o core.Options
		if err := options(opts, &o); err != nil {
			return err
		}
		l, err := core.Listen(o)
		if err != nil {
			return err
		}
		text := l.Addr()
		if len(text) >= int(room) {
			_ = l.Close()
			return fmt.Errorf("switchyard: listen: %w: room for %d bytes, the address has %d", core.ErrInvalid, int64(room), len(text))
		}
		out := unsafe.Slice((*byte)(unsafe.Pointer(addr)), int(room))
		out[copy(out, text)] = 0
		*listener = C.uint64_t(put(l))
		return nil
	})
}

// switchyard_unlisten gives an address up that was not joined with.
//
//export switchyard_unlisten
func switchyard_unlisten(listener C.uint64_t) C.int32_t {
	return guard(func() error {
		l, err := core.Get[*comm.Listener](handles, uint64(listener))
		if err != nil {
			return err
		}
		handles.Drop(uint64(listener))
		return l.Close()
	})
}

// switchyard_open makes a communicator and begins its join, whose ticket is 1. words is where the number of its
// operations that have run is kept, 64 bits.
//
//export switchyard_open
func switchyard_open(opts *C.char, communicator *C.uint64_t, words *C.uint64_t) C.int32_t {
	return guard(func() error {
		var o core.Options
		if err := options(opts, &o); err != nil {
			return err
		}
		var l *comm.Listener
		if o.Listener != 0 {
			var err error
			if l, err = core.Get[*comm.Listener](handles, o.Listener); err != nil {
				return err
			}
			handles.Drop(o.Listener)
		}
		w := newWords()
		c, err := core.Open(o, l, w)
		if err != nil {
			return err
		}
		*communicator, *words = C.uint64_t(put(c)), C.uint64_t(shm.Addr(w))
		return nil
	})
}

// switchyard_rank is who this rank is, once the join is complete.
//
//export switchyard_rank
func switchyard_rank(communicator C.uint64_t, rank, size *C.int32_t) C.int32_t {
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err != nil {
			return err
		}
		r, n, err := c.Rank()
		*rank, *size = C.int32_t(r), C.int32_t(n)
		return err
	})
}

// switchyard_wait waits wait microseconds for a ticket and gets its value and error. It may return Again sooner.
//
//export switchyard_wait
func switchyard_wait(communicator, ticket C.uint64_t, wait C.int64_t, value *C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err != nil {
			return 0, err
		}
		done, v, err := c.Wait(core.Ticket(ticket), time.Duration(wait)*time.Microsecond)
		if err == nil && !done {
			return core.Again, nil
		}
		*value = C.int64_t(v)
		return core.OK, err
	})
}

// switchyard_all_to_all exchanges memory of a place: a communicator, which stands for the host, or one of its GPUs. shape is
// a core.Shape, which the caller may change afterwards. On a GPU the exchange is enqueued on a stream, a CUstream, and waits
// for nothing; what becomes of it a later call or switchyard_fault tells. On the host, where the stream is 0, it is
// submitted as the calls below are.
//
//export switchyard_all_to_all
func switchyard_all_to_all(place, stream C.uint64_t, dst, src unsafe.Pointer, shape *C.struct_switchyard_shape_head, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.AllToAll(uintptr(stream), uintptr(dst), uintptr(src), shapeOf(p, shape))
	})
}

// switchyard_explain says how an exchange into dst would be carried. text holds room bytes and gets as much of the answer as
// fits, 0-terminated.
//
//export switchyard_explain
func switchyard_explain(place C.uint64_t, dst unsafe.Pointer, shape *C.struct_switchyard_shape_head, text *C.char, room C.int64_t) C.int32_t {
	return guard(func() error {
		p, err := placeOf(place)
		if err != nil {
			return err
		}
		why, err := p.Explain(uintptr(dst), shapeOf(p, shape))
		if err == nil && room > 0 {
			out := unsafe.Slice((*byte)(unsafe.Pointer(text)), int(room))
			out[copy(out[:room-1], why)] = 0
		}
		return err
	})
}

// switchyard_fault is the error that exchanges of a place which have run by now have come to and that no ticket tells.
//
//export switchyard_fault
func switchyard_fault(place C.uint64_t) C.int32_t {
	return guard(func() error {
		p, err := placeOf(place)
		if err != nil {
			return err
		}
		return p.Fault()
	})
}

// switchyard_refuse tells ranks that compare their calls that this one does not make the next one, because of an error with this code and
// text. It always fails: with that error, or on the host, where it does not wait, with Again.
//
//export switchyard_refuse
func switchyard_refuse(place C.uint64_t, code C.int32_t, text *C.char, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, 0, func(p core.Place) (core.Ticket, error) {
		return p.Refuse(core.Refusal(core.Code(code), C.GoString(text)))
	})
}

// switchyard_all_reduce combines src of all ranks into every rank's dst, which may be src. The place, the stream and the ticket are as
// in switchyard_all_to_all.
//
//export switchyard_all_reduce
func switchyard_all_reduce(place, stream C.uint64_t, dst, src unsafe.Pointer, bytes C.int64_t, dtype, op C.int32_t, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.AllReduce(uintptr(stream), buffer(dst, bytes), buffer(src, bytes), kernels.DType(dtype), kernels.ReduceOp(op))
	})
}

// switchyard_reduce_scatter combines src of all ranks and leaves this rank's slice in dst, likewise.
//
//export switchyard_reduce_scatter
func switchyard_reduce_scatter(place, stream C.uint64_t, dst unsafe.Pointer, dstBytes C.int64_t, src unsafe.Pointer, srcBytes C.int64_t,
	dtype, op C.int32_t, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.ReduceScatter(uintptr(stream), buffer(dst, dstBytes), buffer(src, srcBytes), kernels.DType(dtype), kernels.ReduceOp(op))
	})
}

// switchyard_all_gather puts src of rank k into slice k of every rank's dst, likewise.
//
//export switchyard_all_gather
func switchyard_all_gather(place, stream C.uint64_t, dst unsafe.Pointer, dstBytes C.int64_t, src unsafe.Pointer, srcBytes C.int64_t,
	wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return at(place, ticket, wait, func(p core.Place) (core.Ticket, error) {
		return p.AllGather(uintptr(stream), buffer(dst, dstBytes), buffer(src, srcBytes))
	})
}

// switchyard_barrier completes once all ranks have submitted it. This call and those below submit an operation on a stream, 0 for the
// communicator's own, and wait for it for wait microseconds; Again says that it is still under way, and its buffers are in use until the
// ticket is complete.
//
//export switchyard_barrier
func switchyard_barrier(communicator, stream C.uint64_t, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, wait, func(c *core.Comm) (core.Ticket, error) {
		if err := hostStream(stream); err != nil {
			return 0, err
		}
		return c.Barrier()
	})
}

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

// switchyard_split makes a subgroup of the ranks that pass the same color, ordered by key. The ticket's value is its
// communicator, or 0 for a negative color; words is as in switchyard_open.
//
//export switchyard_split
func switchyard_split(communicator C.uint64_t, color, key C.int64_t, words *C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		w := newWords()
		*words = C.uint64_t(shm.Addr(w))
		return c.Split(int(color), int(key), w, put[*core.Comm])
	})
}

// switchyard_shrink makes a communicator of the ranks that are left, without the n ranks of leave_out, and waits for them for within
// microseconds, 0 for as long as operations do. The ticket's value is the communicator; words is as in switchyard_open.
//
//export switchyard_shrink
func switchyard_shrink(communicator C.uint64_t, leaveOut *C.int64_t, n, within C.int64_t, words *C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) {
		var out []int
		for _, r := range numbers(leaveOut, n) {
			out = append(out, int(r))
		}
		w := newWords()
		*words = C.uint64_t(shm.Addr(w))
		return c.Shrink(out, time.Duration(within)*time.Microsecond, w, put[*core.Comm])
	})
}

// switchyard_close ends a communicator, together with all its ranks. keep leaves the symmetric memory mapped. The caller
// drops the handle when the ticket is complete.
//
//export switchyard_close
func switchyard_close(communicator C.uint64_t, keep C.int32_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(c *core.Comm) (core.Ticket, error) { return c.Close(keep != 0) })
}

// switchyard_abort fails a group on all its ranks.
//
//export switchyard_abort
func switchyard_abort(communicator C.uint64_t, reason *C.char) C.int32_t {
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err == nil {
			c.Abort(C.GoString(reason))
		}
		return err
	})
}

// switchyard_abandon ends a communicator without its peers. Operations under way get drain milliseconds and are aborted
// then; afterwards no memory of the caller is in use. keep leaves the symmetric memory mapped.
//
//export switchyard_abandon
func switchyard_abandon(communicator C.uint64_t, drain C.int64_t, keep C.int32_t) C.int32_t {
	return guard(func() error {
		c, err := core.Get[*core.Comm](handles, uint64(communicator))
		if err == nil {
			c.Abandon(time.Duration(drain)*time.Millisecond, keep != 0)
		}
		return err
	})
}

// switchyard_drop forgets a handle that the caller no longer needs.
//
//export switchyard_drop
func switchyard_drop(handle C.uint64_t) C.int32_t {
	return guard(func() error { handles.Drop(uint64(handle)); return nil })
}

// switchyard_dispatcher makes a dispatcher of a place. opts is a dispatch.Options. The ticket's value is its handle.
//
//export switchyard_dispatcher
func switchyard_dispatcher(communicator, place C.uint64_t, opts *C.char, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		var o dispatch.Options
		if err := options(opts, &o); err != nil {
			return 0, err
		}
		p, err := placeOf(place)
		if err != nil {
			return 0, err
		}
		return p.NewDispatcher(o, put[*core.Dispatcher])
	})
}

// switchyard_dispatcher_info is the most rows that this rank can get, how many dispatches are alive, and this rank's experts, of which
// there are experts and room for room in expert.
//
//export switchyard_dispatcher_info
func switchyard_dispatcher_info(dispatcher C.uint64_t, maxRows, alive, experts, expert *C.int64_t, room C.int64_t) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		local := d.Experts()
		*maxRows, *alive, *experts = C.int64_t(d.MaxRows()), C.int64_t(d.Alive()), C.int64_t(len(local))
		out := numbers(expert, room)
		for i, e := range local[:min(len(local), len(out))] {
			out[i] = int64(e)
		}
		return nil
	})
}

// switchyard_dispatcher_counters is what this rank has done so far: for each of experts how many choices of its tokens that got, and for
// each of ranks the bytes of rows sent there and the nanoseconds waited for it.
//
//export switchyard_dispatcher_counters
func switchyard_dispatcher_counters(dispatcher C.uint64_t, choices *C.int64_t, experts C.int64_t, bytes, waited *C.int64_t, ranks C.int64_t) C.int32_t {
	return guard(func() error {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return err
		}
		c, err := d.Counters()
		if err != nil {
			return err
		}
		copy(numbers(choices, experts), c.Choices)
		copy(numbers(bytes, ranks), c.Bytes)
		out := numbers(waited, ranks)
		for i, w := range c.Waited[:min(len(c.Waited), len(out))] {
			out[i] = w.Nanoseconds()
		}
		return nil
	})
}

// switchyard_dispatcher_close ends a dispatcher.
//
//export switchyard_dispatcher_close
func switchyard_dispatcher_close(communicator, dispatcher C.uint64_t, ticket *C.uint64_t) C.int32_t {
	return on(communicator, ticket, 0, func(*core.Comm) (core.Ticket, error) {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return 0, err
		}
		handles.Drop(uint64(dispatcher))
		return d.Close()
	})
}

// dispatching makes a call of a dispatcher, as switchyard_all_to_all describes for a place.
func dispatching(dispatcher C.uint64_t, ticket *C.uint64_t, wait C.int64_t, handle uint64, call func(*core.Dispatcher, *core.Handle) (core.Ticket, error)) C.int32_t {
	return guarded(func() (core.Code, error) {
		d, err := core.Get[*core.Dispatcher](handles, uint64(dispatcher))
		if err != nil {
			return 0, err
		}
		var h *core.Handle
		if handle != 0 {
			if h, err = core.Get[*core.Handle](handles, handle); err != nil {
				return 0, err
			}
		}
		t, err := call(d, h)
		if err != nil || d.OnGPU() {
			return core.OK, err
		}
		return await(d.Comm(), t, ticket, wait)
	})
}

// switchyard_dispatch makes a core.DispatchCall. It is enqueued or submitted as switchyard_all_to_all describes. The ticket's value is a
// handle of the dispatch, which is in the call where that was enqueued.
//
//export switchyard_dispatch
func switchyard_dispatch(dispatcher, stream C.uint64_t, call *C.struct_switchyard_dispatch_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.DispatchCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, c.Handle, func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.Dispatch(uintptr(stream), c, h, put[*core.Handle])
	})
}

// switchyard_combine makes a core.CombineCall, likewise.
//
//export switchyard_combine
func switchyard_combine(dispatcher, stream C.uint64_t, call *C.struct_switchyard_combine_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.CombineCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, c.Handle, func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.Combine(uintptr(stream), c, h)
	})
}

// switchyard_combine_backward makes a core.BackwardCall, likewise.
//
//export switchyard_combine_backward
func switchyard_combine_backward(dispatcher, stream C.uint64_t, call *C.struct_switchyard_backward_call, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	c := (*core.BackwardCall)(unsafe.Pointer(call))
	return dispatching(dispatcher, ticket, wait, c.Handle, func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.CombineBackward(uintptr(stream), c, h)
	})
}

// switchyard_receive makes the second half of the dispatch, or of the combine, that a handle is in, likewise.
//
//export switchyard_receive
func switchyard_receive(dispatcher, stream, handle C.uint64_t, combine C.int32_t, wait C.int64_t, ticket *C.uint64_t) C.int32_t {
	return dispatching(dispatcher, ticket, wait, uint64(handle), func(d *core.Dispatcher, h *core.Handle) (core.Ticket, error) {
		return d.Receive(uintptr(stream), h, combine != 0)
	})
}

// switchyard_output is where what a dispatch leaves lies, as core.Handle.Output has it: an address and bytes for each of 9 parts.
//
//export switchyard_output
func switchyard_output(handle C.uint64_t, out *C.int64_t) C.int32_t {
	return guard(func() error {
		h, err := core.Get[*core.Handle](handles, uint64(handle))
		if err != nil {
			return err
		}
		to := numbers(out, 18)
		for i, b := range h.Output() {
			to[2*i], to[2*i+1] = int64(b.Addr), b.Bytes
		}
		return nil
	})
}

// switchyard_counts waits wait microseconds for how many rows a dispatch brought, and else returns Again: the length of the output, and
// for each of local experts how many, for each of groups the first row and one behind the last, and for each of ranks how many came from
// there.
//
//export switchyard_counts
func switchyard_counts(handle C.uint64_t, wait C.int64_t, rows, counts *C.int64_t, local C.int64_t, offsets *C.int64_t, groups C.int64_t, rankCounts *C.int64_t, ranks C.int64_t) C.int32_t {
	return guarded(func() (core.Code, error) {
		h, err := core.Get[*core.Handle](handles, uint64(handle))
		if err != nil {
			return 0, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(wait)*time.Microsecond)
		defer cancel()
		c, err := h.HostCounts(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			return core.Again, nil
		}
		if err != nil {
			return 0, err
		}
		*rows = C.int64_t(c.Rows)
		widen(numbers(counts, local), c.Counts)
		widen(numbers(offsets, groups+1), c.Offsets)
		widen(numbers(rankCounts, ranks), c.RankCounts)
		return core.OK, nil
	})
}

func widen(to []int64, from []int32) {
	for i, v := range from[:min(len(from), len(to))] {
		to[i] = int64(v)
	}
}

// switchyard_release gives the output of a dispatch back.
//
//export switchyard_release
func switchyard_release(handle C.uint64_t) C.int32_t {
	return guard(func() error {
		h, err := core.Get[*core.Handle](handles, uint64(handle))
		if err == nil {
			handles.Drop(uint64(handle))
			h.Release()
		}
		return err
	})
}
