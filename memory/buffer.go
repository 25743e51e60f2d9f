package memory

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
)

// Buffer is memory of a heap's pool: Len bytes at Offset of this rank's segment, and, because all ranks
// make the same calls, at the same offset of every other rank's.
type Buffer struct {
	own    region
	heap   *Heap
	piece  int32
	seg    int32
	n      int64
	stream device.Stream // it was allocated on
	view   View
}

// Clear makes n bytes from off on of this rank's buffer zero before it returns. Nothing else uses them.
func (b *Buffer) Clear(off, n int64) error {
	if off < 0 || n < 0 || off > b.n-n {
		return fmt.Errorf("memory: clear [%d, %d+%d) of a buffer of %d bytes: %w", off, off, n, b.n, ErrInvalid)
	}
	if n == 0 {
		return nil
	}
	if err := b.view.Valid(); err != nil {
		return fmt.Errorf("memory: clear %d bytes: %w", n, err)
	}
	if err := b.heap.back.clear(b.heap.at(b.heap.space.Rank, b.own.off+off), n); err != nil {
		return fmt.Errorf("memory: clear %d bytes: %w", n, err)
	}
	return nil
}

// maxAlloc keeps sums of sizes and offsets away from overflow. No address space is as large.
const maxAlloc = 1 << 56

// Alloc takes n bytes, 0 included, from the pool, for use by the host from now on. Offsets are multiples
// of 256. The content is undefined. If a stream freed the memory and has not run that far, Alloc blocks
// until it has.
//
// Every rank makes the same calls of Alloc and Free, in the same order. Then (Segment, Offset) is the
// same on every rank (M1). Alloc never talks to a peer and never maps memory: if no free piece is large
// enough, the error is ErrOutOfMemory on every rank, and Grow helps. A negative size is an ErrInvalid and
// does not count as a call.
func (h *Heap) Alloc(n int64) (*Buffer, error) { return h.AllocOn(nil, n) }

// AllocOn is Alloc for use by work enqueued on s from now on. It does not block: if another stream freed
// the memory, s waits for it. A nil stream is the host, as in Alloc.
func (h *Heap) AllocOn(s device.Stream, n int64) (*Buffer, error) {
	b, err := h.alloc(s, n)
	if err != nil {
		return nil, fmt.Errorf("memory: allocate %d bytes: %w", n, err)
	}
	return b, nil
}

func (h *Heap) alloc(s device.Stream, n int64) (*Buffer, error) {
	if n < 0 || n > maxAlloc {
		return nil, fmt.Errorf("%w: not a size", ErrInvalid)
	}
	if err := h.foreign(s); err != nil {
		return nil, err
	}
	b := &Buffer{heap: h, n: n, stream: s}
	b.own.heap, b.own.what = h, "buffer"

	h.mu.Lock()
	if err := h.usable(); err != nil {
		h.mu.Unlock()
		return nil, err
	}
	i, rest, ok := h.pool.alloc(n)
	if !ok {
		h.journal.add(call{kind: callAlloc, size: n, off: -1})
		err := fmt.Errorf("%w: %d of %d bytes are free, at most %d in a row: a larger Options.SegmentBytes or Heap.Grow makes room",
			ErrOutOfMemory, h.pool.total-h.pool.used, h.pool.total, h.pool.largest())
		h.mu.Unlock()
		return nil, err
	}
	at := h.pool.pieces[i]
	h.journal.add(call{kind: callAlloc, seg: at.seg, size: n, off: at.off})
	h.peak = max(h.peak, h.pool.used)
	h.fences.split(i, rest)
	wait := h.fences.of(i)
	h.mu.Unlock()

	b.piece, b.seg, b.own.off = i, at.seg, at.off
	b.view = View{own: &b.own, n: n}
	if mem := h.space.Mem; mem != nil {
		lo := h.at(h.space.Rank, at.off)
		b.view.mem = mem[lo : lo+n : lo+n]
	} else {
		b.view.ptr = h.space.Base + uintptr(h.at(h.space.Rank, at.off))
	}

	// Not under the lock: the host may block here.
	waits, err := await(wait, s)
	if waits > 0 {
		h.mu.Lock()
		h.waits += int64(waits)
		h.mu.Unlock()
	}
	if err != nil {
		err = fmt.Errorf("wait for the stream that freed the memory: %w", err)
		return nil, errors.Join(err, b.Free())
	}
	return b, nil
}

// foreign refuses a stream of another device.
func (h *Heap) foreign(s device.Stream) error {
	if s == nil {
		return nil
	}
	if device.IsNil(s) {
		return fmt.Errorf("%w: the stream is a nil %T", ErrInvalid, s)
	}
	if d := s.Device(); d.Kind() != h.dev.Kind() || d.Index() != h.dev.Index() {
		return fmt.Errorf("%w: a stream of %v on a heap of %v", ErrInvalid, d, h.dev)
	}
	return nil
}

// Free gives the memory back: nothing uses it any more. It is FreeOn with the host as the stream.
func (b *Buffer) Free() error { return b.FreeOn(nil) }

// FreeOn gives the memory back once work enqueued on s before has run. For the pool the memory is free at
// once, so offsets do not depend on the stream's progress; the next user of the memory waits for s. All
// uses of the buffer come before this position of s.
//
// A second Free is an ErrFreed and not a call. If s cannot mark its position, FreeOn waits for s and returns
// its error; the memory is free all the same.
func (b *Buffer) FreeOn(s device.Stream) error {
	if err := b.free(s); err != nil {
		return fmt.Errorf("memory: free %d bytes at offset %d: %w", b.n, b.own.off, err)
	}
	return nil
}

func (b *Buffer) free(s device.Stream) error {
	h := b.heap
	if err := h.foreign(s); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed.Load() {
		return errClosed
	}
	if b.own.freed.Swap(true) {
		return ErrFreed
	}

	// The next user need not wait for streams that this buffer's user has waited for: that wait has ended on
	// the host, and precedes later work on the stream that made it.
	i := b.piece
	if b.stream == nil || b.stream == s {
		h.fences.clear(i)
	}
	var err error
	if s != nil {
		var e device.Event
		if e, err = s.Record(); err == nil {
			h.fences.add(i, s, e)
		} else {
			err = errors.Join(err, s.Synchronize())
		}
	}
	h.journal.add(call{kind: callFree, seg: b.seg, size: b.n, off: b.own.off})
	whole, gone := h.pool.release(i)
	for _, g := range gone {
		if g != 0 {
			h.fences.join(whole, g)
		}
	}
	if s != nil && err == nil {
		err = h.fences.condense(whole, s)
	}
	return err
}

// View is the whole buffer.
func (b *Buffer) View() View { return b.view }

// Offset is where the buffer begins, from the start of a segment, in bytes: at
// base + rank*stride + Offset in the address space of every rank.
func (b *Buffer) Offset() int64 { return b.own.off }

// Segment is the number of the pool's segment that contains the buffer: 0 for the heap's first memory, k for that
// of the k-th Grow. Offset counts from the start of the rank's address range in every one.
func (b *Buffer) Segment() int { return int(b.seg) }

// Len is the length given to Alloc, in bytes.
func (b *Buffer) Len() int64 { return b.n }

// Bytes is this rank's memory on the host, nil on other devices. It is dead after the heap's Close.
func (b *Buffer) Bytes() []byte { return b.view.mem }
