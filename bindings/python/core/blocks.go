package core

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/memory"
)

// Block is symmetric memory that was handed out: the same Offset on every rank.
type Block struct {
	comm   *Comm
	gpu    *GPU // whose memory it is, nil on the host
	buffer *memory.Buffer
	addr   uintptr
	bytes  int64
	freed  bool
}

// Addr, Len and Offset say where the memory is: in this process, how many bytes, and where in every rank's segment.
func (b *Block) Addr() uintptr { return b.addr }

// Len is the length in bytes.
func (b *Block) Len() int64 { return b.bytes }

// Offset is where it begins in every rank's segment.
func (b *Block) Offset() int64 { return b.buffer.Offset() }

// Free submits that the memory be given back, after the operations submitted before and, on a GPU, after what stream has
// been given by the time that the operation runs. Every rank submits the same.
func (b *Block) Free(stream uintptr) (Ticket, error) {
	in := b.home()
	in.mu.Lock()
	if b.freed {
		in.mu.Unlock()
		return 0, fmt.Errorf("core: %w", memory.ErrFreed)
	}
	b.freed = true
	in.live = slices.DeleteFunc(in.live, func(k *Block) bool { return k == b })
	in.mu.Unlock()
	return b.comm.do(func() (int64, error) {
		s, err := b.gpu.stream(stream)
		if err != nil {
			return 0, err
		}
		return 0, b.buffer.FreeOn(s)
	})
}

func (b *Block) home() *blocks {
	if b.gpu != nil {
		return &b.gpu.blocks
	}
	return &b.comm.blocks
}

// blocks are those of one heap that are in use, by address.
type blocks struct {
	mu   sync.RWMutex
	live []*Block
}

// find is where the block that holds addr is in live, or would be. in.mu is held.
func (in *blocks) find(addr uintptr) (int, bool) {
	i, exact := slices.BinarySearchFunc(in.live, addr, func(b *Block, a uintptr) int {
		switch {
		case b.addr < a:
			return -1
		case b.addr > a:
			return 1
		}
		return 0
	})
	if exact {
		return i, true
	}
	if i > 0 && addr < in.live[i-1].addr+uintptr(in.live[i-1].bytes) {
		return i - 1, true
	}
	return i, false
}

// view is the memory as a part of the block that holds all of it.
func (in *blocks) view(b Buffer) (memory.View, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	if i, ok := in.find(b.Addr); ok {
		k := in.live[i]
		if off := int64(b.Addr - k.addr); b.Bytes <= k.bytes-off {
			return k.buffer.View().Slice(off, b.Bytes), true
		}
	}
	return memory.View{}, false
}

// allocate takes n bytes of h for use by s. Where the heap is full it grows: every rank gets here in the same call.
func (in *blocks) allocate(ctx context.Context, h *memory.Heap, s device.Stream, n int64) (*Block, error) {
	buffer, err := h.AllocOn(s, n)
	if errors.Is(err, memory.ErrOutOfMemory) {
		if err = h.Grow(ctx, n); err == nil {
			buffer, err = h.AllocOn(s, n)
		}
	}
	if err != nil {
		return nil, err
	}
	b := &Block{buffer: buffer, addr: buffer.View().Ptr(), bytes: n}
	if n > 0 {
		in.mu.Lock()
		i, _ := in.find(b.addr)
		in.live = slices.Insert(in.live, i, b)
		in.mu.Unlock()
	}
	return b, nil
}
