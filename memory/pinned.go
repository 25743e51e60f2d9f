package memory

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/kernels"
)

// Pinned is memory of the host that kernels of this rank read and write too, such as words in which they report their progress to the
// host. It lies outside the heap, and peers do not reach it.
type Pinned struct {
	p pinned
	n int64
}

// Pin makes n zero bytes of such memory, a multiple of 8. It can wait for running kernels. The caller closes it, before the heap.
func (h *Heap) Pin(n int64) (*Pinned, error) {
	if n <= 0 || n%8 != 0 {
		return nil, fmt.Errorf("memory: pin %d bytes, want a multiple of 8: %w", n, ErrInvalid)
	}
	p, err := h.back.pin(n)
	if err != nil {
		return nil, fmt.Errorf("memory: pin %d bytes: %w", n, err)
	}
	return &Pinned{p: p, n: n}, nil
}

// Bytes is the memory, nil after Close.
func (p *Pinned) Bytes() []byte { return p.p.Bytes() }

// Operand is n bytes from off on, for an operation of the heap's engine.
func (p *Pinned) Operand(off, n int64) kernels.Buffer {
	return kernels.Buffer{Mem: p.p.Bytes()[off : off+n : off+n], Ptr: p.p.Addr() + uintptr(off), Bytes: n}
}

// Close gives the memory back; no kernel uses it any more. It is idempotent, and works on a nil Pinned.
func (p *Pinned) Close() error {
	if p == nil {
		return nil
	}
	if err := p.p.Close(); err != nil {
		return fmt.Errorf("memory: unpin %d bytes: %w", p.n, err)
	}
	return nil
}
