package memory

import (
	"fmt"
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// View is contiguous memory that an operation reads or writes. It is a small value, made without
// allocation. It keeps Go memory alive, but not a buffer or a mapping, which Free or Close ends. The
// zero View is empty.
//
// Views of buffers and registrations are symmetric: peers reach the memory by its place in the segment.
// Views of Go memory, of device memory and of mappings are foreign: operations stage them. Mappings and
// device memory become symmetric by Heap.Register. Two ranks share them alone by Heap.Share and Heap.Open.
type View struct {
	own *region // of a buffer, a registration or a mapping; nil for memory that has no owner here
	mem []byte  // the bytes, on the host
	ptr uintptr // the address, on other devices
	off int64   // from the start of own
	n   int64

	elem kernels.Elements // of what the memory is known to consist
}

// region is memory with an owner in this package.
type region struct {
	heap *Heap // whose symmetric memory it is; nil for a mapping
	// lender is, for memory of another rank of the host, its number there plus 1.
	lender int
	id     identity // of a mapping
	fd     int      // of a mapping
	off    int64    // in the segment; of a mapping in what id names
	what   string   // for messages
	freed  atomic.Bool
}

// Host is a view of host memory outside a heap. It shares b's bytes; later changes of the slice b itself
// do not change the view.
func Host(b []byte) View { return View{mem: b[:len(b):len(b)], n: int64(len(b))} }

// Device is a view of n bytes of device memory at ptr that do not belong to a heap, such as a tensor.
// The caller keeps them alive, registered ones until Deregister or Close has returned. It panics when n is negative.
func Device(ptr uintptr, n int64) View {
	if n < 0 {
		panic(fmt.Sprintf("memory: device view of %d bytes", n))
	}
	return View{ptr: ptr, n: n}
}

// Len is the length in bytes.
func (v View) Len() int64 { return v.n }

// Slice is n bytes of v from off on. Like a slice expression it panics when they do not lie in v.
func (v View) Slice(off, n int64) View {
	if off < 0 || n < 0 || off > v.n-n {
		panic(fmt.Sprintf("memory: slice [%d, %d+%d) of a view of %d bytes", off, off, n, v.n))
	}
	if v.mem != nil {
		v.mem = v.mem[off : off+n : off+n]
	} else {
		v.ptr += uintptr(off)
	}
	v.off += off
	v.n = n
	return v
}

// Bytes is the memory on the host, nil for device memory. Unlike Valid it does not check that the memory
// still exists, because work that was enqueued before may still use a freed buffer.
func (v View) Bytes() []byte { return v.mem }

// Ptr is the address of the first byte on the device that the memory belongs to.
func (v View) Ptr() uintptr {
	if v.mem != nil {
		return shm.Addr(v.mem)
	}
	return v.ptr
}

// OnHost reports whether Bytes is the memory; an empty view is on every device.
func (v View) OnHost() bool { return v.mem != nil || v.n == 0 && v.ptr == 0 }

// Symmetric reports whether peers reach v in h, and the place in this rank's segment at which v begins, for
// kernels.Space.Addr. It is true for views of h's buffers and registrations, and for views of a mapping or of
// device memory inside memory that is registered with h. It finds those by the memory's identity, never by its
// address (M7). ok is false for memory that was freed or deregistered.
func (v View) Symmetric(h *Heap) (off int64, ok bool) {
	switch {
	case v.own == nil:
		if v.ptr == 0 || h.registered.Load() == nil {
			return 0, false
		}
		id, at, ok := h.back.locate(v)
		if !ok {
			return 0, false
		}
		if r := h.find(id, at, v.n); r != nil {
			return r.own.off + at - r.from, true
		}
		return 0, false
	case v.own.freed.Load() || v.own.lender != 0:
		return 0, false
	case v.own.heap == h:
		return v.own.off + v.off, true
	case v.own.heap != nil:
		return 0, false
	}
	if r := h.find(v.own.id, v.own.off+v.off, v.n); r != nil {
		return r.own.off + v.own.off + v.off - r.from, true
	}
	return 0, false
}

// Valid returns nil while the memory may be used, an ErrFreed once the buffer, registration or mapping was
// freed, and an ErrClosed once its heap was closed. Memory without an owner in this package is always valid.
func (v View) Valid() error {
	switch r := v.own; {
	case r == nil:
		return nil
	case r.freed.Load():
		return fmt.Errorf("memory: %s of %d bytes at offset %d: %w", r.what, v.n, r.off+v.off, ErrFreed)
	case r.heap != nil && r.heap.closed.Load():
		return fmt.Errorf("memory: %s of %d bytes at offset %d: %w", r.what, v.n, r.off+v.off, errClosed)
	}
	return nil
}
