package core

import (
	"fmt"
	"slices"
	"sync"
)

// Arena is symmetric memory of a GPU that this rank hands out by itself, for an allocator that asks when it likes to, such
// as torch's. All of it is one Block. The pieces lie at other offsets on every rank, which exchanges allow:
// a receiver tells where its output is. Peers write only what an exchange on this rank names as its output, and only while
// that runs.
type Arena struct {
	gpu   *GPU
	block *Block

	mu   sync.Mutex
	free spans
	used map[uintptr]int64
}

// arenaAlign is the alignment of cudaMalloc.
const arenaAlign = 512

// NewArena submits the allocation of an arena of n bytes. Every rank submits the same. put names it and the name is the
// ticket's value; when it fails the memory goes back, on this rank only if the ranks differ in that.
func (g *GPU) NewArena(stream uintptr, n int64, put func(*Arena) (uint64, error)) (Ticket, error) {
	if n <= 0 {
		return 0, fmt.Errorf("core: %w: a pool of %d bytes", ErrInvalid, n)
	}
	return g.comm.do(func() (int64, error) {
		b, err := g.allocate(stream, n+arenaAlign) // the heap's buffers are less aligned
		if err != nil {
			return 0, err
		}
		a := &Arena{gpu: g, block: b, used: make(map[uintptr]int64)}
		a.free.give((b.addr+arenaAlign-1)/arenaAlign*arenaAlign, n/arenaAlign*arenaAlign)
		id, err := put(a)
		if err != nil {
			return 0, err
		}
		return int64(id), nil
	})
}

// Device is the GPU's ordinal.
func (a *Arena) Device() int { return a.gpu.dev.Index() }

// Alloc takes n bytes, 0 when there is no room.
func (a *Arena) Alloc(n int64) uintptr {
	n = max(n+arenaAlign-1, arenaAlign) / arenaAlign * arenaAlign
	a.mu.Lock()
	defer a.mu.Unlock()
	addr := a.free.take(n)
	if addr != 0 {
		a.used[addr] = n
	}
	return addr
}

// Free gives memory back. Like cudaFree it waits for the GPU, because work on any stream may use the memory yet.
func (a *Arena) Free(addr uintptr) error {
	err := a.gpu.dev.Context().Synchronize()
	a.mu.Lock()
	defer a.mu.Unlock()
	n, ok := a.used[addr]
	if !ok {
		return fmt.Errorf("core: %w: %#x was not taken from this pool", ErrInvalid, addr)
	}
	delete(a.used, addr)
	a.free.give(addr, n)
	return err
}

// span is n bytes at addr.
type span struct {
	addr uintptr
	n    int64
}

// spans are apart from each other and in the order of their addresses.
type spans []span

// take cuts n bytes off the first span that has them, 0 when none has.
func (f *spans) take(n int64) uintptr {
	for i := range *f {
		s := &(*f)[i]
		if s.n < n {
			continue
		}
		addr := s.addr
		s.addr += uintptr(n)
		if s.n -= n; s.n == 0 {
			*f = slices.Delete(*f, i, i+1)
		}
		return addr
	}
	return 0
}

// give adds n bytes at addr.
func (f *spans) give(addr uintptr, n int64) {
	i, _ := slices.BinarySearchFunc(*f, addr, func(s span, a uintptr) int {
		if s.addr < a {
			return -1
		}
		return 1
	})
	*f = slices.Insert(*f, i, span{addr, n})
	join := func(i int) {
		if i < 0 || i+1 >= len(*f) || (*f)[i].addr+uintptr((*f)[i].n) != (*f)[i+1].addr {
			return
		}
		(*f)[i].n += (*f)[i+1].n
		*f = slices.Delete(*f, i+1, i+2)
	}
	join(i)
	join(i - 1)
}
