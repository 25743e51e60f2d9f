package memory

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/rails/proxy"
)

// defaultRail is Options.RailBytes where it is 0.
const defaultRail = 64 << 20

// across is what a heap of GPUs on several hosts has for its kernels besides the rail.
type across struct {
	segment pinned // that of the rail
	proxy   *proxy.Proxy
	pool    pool // of the segment, as equal on all ranks as that of the heap
}

// pinRail makes the rail segment.
func (h *Heap) pinRail() (*across, error) {
	n := roundUp(h.railBytes, alignment)
	p, err := h.back.pin(n)
	if err != nil {
		return nil, fmt.Errorf("pin a rail segment of %d bytes (Options.RailBytes): %w", n, err)
	}
	a := &across{segment: p}
	a.pool.add(0, n)
	return a, nil
}

// end ends the proxy, before the rail is closed. Kernels have ended, or have been told to.
func (a *across) end() {
	if a != nil && a.proxy != nil {
		a.proxy.Interrupt()
	}
}

// close gives the segment back, in which nothing lands any more.
func (a *across) close() error {
	if a == nil {
		return nil
	}
	return a.segment.Close()
}

// NoGPUsOn is the ErrUnsupported of what GPUs of n hosts do not have.
func NoGPUsOn(n int) error {
	return fmt.Errorf("%w: GPUs on %d hosts; pods of one machine are one host where SWITCHYARD_SOCKETS is a folder that they share", ErrUnsupported, n)
}

// RailBuffer is a part of this rank's rail segment, and of every other rank's at the same place.
type RailBuffer struct {
	heap   *Heap
	piece  int32
	off, n int64
	freed  bool // heap.mu is held
}

// AllocRail takes n zero bytes of the rail segment, in which words count puts from 0 on. Only a heap of GPUs on several hosts has one; on
// others the error is ErrUnsupported. Like those of Alloc, its calls and those of Free are the same on all ranks in the same order, so the
// place is the same on all ranks (M1), and Verify compares them. No rank puts to the memory before all have returned. The error is
// ErrOutOfMemory, with the bytes that are free, where it has no room; Options.RailBytes sets its size.
func (h *Heap) AllocRail(n int64) (*RailBuffer, error) {
	b, err := h.allocRail(n)
	if err != nil {
		return nil, fmt.Errorf("memory: allocate %d bytes of the rail segment: %w", n, err)
	}
	return b, nil
}

func (h *Heap) allocRail(n int64) (*RailBuffer, error) {
	if n < 0 || n > maxAlloc {
		return nil, fmt.Errorf("%w: not a size", ErrInvalid)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.usable(); err != nil {
		return nil, err
	}
	if h.across == nil {
		return nil, fmt.Errorf("%w: only heaps of GPUs on several hosts have one", ErrUnsupported)
	}
	p := &h.across.pool
	i, _, ok := p.alloc(n)
	if !ok {
		h.journal.add(call{kind: callAllocRail, size: n, off: -1})
		return nil, fmt.Errorf("%w: %d of %d bytes are free, at most %d in a row: a larger Options.RailBytes makes room",
			ErrOutOfMemory, p.total-p.used, p.total, p.largest())
	}
	at := p.pieces[i]
	h.journal.add(call{kind: callAllocRail, seg: at.seg, size: n, off: at.off})
	clear(h.across.segment.Bytes()[at.off : at.off+at.size])
	h.rail.Forget(at.off, at.off+at.size)
	return &RailBuffer{heap: h, piece: i, off: at.off, n: n}, nil
}

// Offset is where the buffer begins in the rail segment of every rank, in bytes.
func (b *RailBuffer) Offset() int64 { return b.off }

// Free gives the memory back: no kernel uses it any more, and no put is on its way to it on any rank, or the rail is interrupted. A second
// Free is an ErrFreed and not a call. It works on a nil RailBuffer.
func (b *RailBuffer) Free() error {
	if b == nil {
		return nil
	}
	h := b.heap
	h.mu.Lock()
	defer h.mu.Unlock()
	var err error
	switch {
	case h.closed.Load():
		err = errClosed
	case b.freed:
		err = ErrFreed
	default:
		b.freed = true
		h.journal.add(call{kind: callFreeRail, size: b.n, off: b.off})
		h.across.pool.release(b.piece)
		return nil
	}
	return fmt.Errorf("memory: free %d bytes at offset %d of the rail segment: %w", b.n, b.off, err)
}

// RailBytes is the size of the rail segment, 0 on a heap without one.
func (h *Heap) RailBytes() int64 {
	if h.across == nil {
		return 0
	}
	return int64(len(h.across.segment.Bytes()))
}
