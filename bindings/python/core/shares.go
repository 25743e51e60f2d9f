package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/memory"
)

// Waits is how a caller waits for a peer: at most For each time that it asks, and Limit in all, of which Waited has gone. A Limit of 0 is that
// of operations. So a caller comes back from time to time, and nothing goes on behind its back where it then does not ask again.
type Waits struct{ Limit, Waited, For time.Duration }

// until calls what ends with its context. It returns false without an error where that has ended, and the caller may ask again, which is not so
// the last time.
func (w Waits) until(c *Comm, call func(ctx context.Context, last bool) error) (over bool, err error) {
	left := max(cmp.Or(w.Limit, c.timeout())-w.Waited, 0)
	ctx, cancel := context.WithTimeout(flight.Continued(c.ctx, time.Now().Add(-w.Waited)), min(left, w.For))
	defer cancel()
	last := left <= w.For
	err = call(ctx, last)
	if !last && errors.Is(err, comm.ErrTimeout) && c.ctx.Err() == nil {
		return false, nil
	}
	return true, err
}

// Shared is memory that one other rank may open. It must not be freed before Close has been over without an error.
type Shared struct {
	comm   *Comm
	shared *memory.Shared
	file   *memory.Mapping // that it lies in, nil on a GPU
}

// Close takes the memory back, as memory.Shared.Close. It waits as Waits says, and is not over where the caller is to ask again: an offer that
// the peer has not opened is withdrawn the last time.
func (s *Shared) Close(w Waits) (over bool, err error) {
	over, err = w.until(s.comm, func(ctx context.Context, last bool) error {
		if last {
			return s.shared.Close(ctx)
		}
		return s.shared.Wait(ctx)
	})
	if over && err == nil && s.file != nil {
		err = s.file.Close()
	}
	return over, err
}

// Opened is memory of another rank.
type Opened struct {
	in     *opened
	gpu    *GPU // nil on the host
	memory *memory.Opened
}

// Memory is where it is in this process.
func (o *Opened) Memory() Buffer {
	v := o.memory.View()
	return Buffer{Addr: v.Ptr(), Bytes: v.Len()}
}

// Close gives the memory back to its rank. It first waits until the GPU has run what it has been given.
func (o *Opened) Close() error {
	o.in.mu.Lock()
	o.in.live = slices.DeleteFunc(o.in.live, func(k *Opened) bool { return k == o })
	o.in.mu.Unlock()
	var err error
	if o.gpu != nil && o.memory.View().Valid() == nil {
		err = o.gpu.dev.Context().Synchronize()
	}
	return errors.Join(err, o.memory.Close())
}

// opened is what a heap has open of other ranks' memory.
type opened struct {
	mu   sync.RWMutex
	live []*Opened
}

// view is memory as a part of what is open and holds all of it.
func (in *opened) view(b Buffer) (memory.View, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	for _, o := range in.live {
		at := o.Memory()
		if off := int64(b.Addr - at.Addr); b.Addr >= at.Addr && off+b.Bytes <= at.Bytes {
			return o.memory.View().Slice(off, b.Bytes), true
		}
	}
	return memory.View{}, false
}

// open opens what a rank has shared.
func (in *opened) open(c *Comm, g *GPU, h *memory.Heap, peer int, w Waits) (o *Opened, err error) {
	_, err = w.until(c, func(ctx context.Context, _ bool) error {
		m, err := h.Open(ctx, peer)
		if err == nil {
			o = &Opened{in: in, gpu: g, memory: m}
		}
		return err
	})
	if o == nil || err != nil {
		return nil, err
	}
	in.mu.Lock()
	in.live = append(in.live, o)
	in.mu.Unlock()
	return o, nil
}

// Share offers memory of a file, as Place describes.
func (c *Comm) Share(peer int, b Buffer, fd int, offset int64) (*Shared, error) {
	h, _, err := c.ready()
	if err != nil {
		return nil, err
	}
	if b.Bytes <= 0 || offset < 0 {
		return nil, fmt.Errorf("core: %w: %d bytes at byte %d of a file", ErrInvalid, b.Bytes, offset)
	}
	lead := offset % int64(os.Getpagesize())
	m, err := memory.MapFile(fd, offset-lead, lead+b.Bytes)
	if err != nil {
		return nil, err
	}
	s, err := h.Share(peer, m.View().Slice(lead, b.Bytes))
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return &Shared{comm: c, shared: s, file: m}, nil
}

// OpenShared opens memory of a file, as Place describes.
func (c *Comm) OpenShared(peer int, w Waits) (*Opened, error) {
	h, _, err := c.ready()
	if err != nil {
		return nil, err
	}
	return c.opened.open(c, nil, h, peer, w)
}

// Share offers memory of the GPU, as Place describes.
func (g *GPU) Share(peer int, b Buffer, _ int, _ int64) (*Shared, error) {
	g.mu.Lock()
	closed := g.closed
	v, err := g.view(b)
	g.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case err != nil:
		return nil, err
	}
	s, err := g.heap.Share(peer, v)
	if err != nil {
		return nil, err
	}
	return &Shared{comm: g.comm, shared: s}, nil
}

// OpenShared opens memory of a GPU, as Place describes.
func (g *GPU) OpenShared(peer int, w Waits) (*Opened, error) {
	return g.opened.open(g.comm, g, g.heap, peer, w)
}
