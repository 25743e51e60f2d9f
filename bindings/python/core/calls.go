package core

import (
	"context"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// run executes one operation, on the worker.
func (c *Comm) run(o *op) (int64, error) {
	if o.kind == opDo {
		return o.do()
	}
	if c.exchanger == nil || c.reducer == nil {
		return 0, fmt.Errorf("core: %w: the ranks have not joined", ErrInvalid)
	}
	switch o.kind {
	case opBarrier:
		return 0, c.exchanger.Barrier(nil)
	case opAllToAll:
		return 0, c.exchanger.Exchange(nil, o.dst, o.src, &o.splits)
	case opAllReduce:
		return 0, c.reducer.AllReduce(nil, o.dst, o.src, o.dtype, o.reduce)
	case opReduceScatter:
		return 0, c.reducer.ReduceScatter(nil, o.dst, o.src, o.dtype, o.reduce)
	case opAllToAllByPlan:
		return 0, c.reducer.AllToAll(nil, o.dst, o.src, o.dtype)
	case opBroadcast:
		return 0, c.reducer.Broadcast(nil, o.dst, o.root)
	default:
		return 0, c.reducer.AllGather(nil, o.dst, o.src, kernels.Uint8)
	}
}

// Buffer is memory of a caller: an address and a length.
type Buffer struct {
	Addr  uintptr
	Bytes int64
}

// view is the memory as operations take it: symmetric where it is.
func (c *Comm) view(b Buffer) (memory.View, error) {
	if b.Bytes < 0 || b.Bytes > 0 && b.Addr == 0 {
		return memory.View{}, fmt.Errorf("core: %w: %d bytes at address %#x", ErrInvalid, b.Bytes, b.Addr)
	}
	if b.Bytes == 0 {
		return memory.View{}, nil
	}
	if v, ok := c.blocks.view(b); ok {
		return v, nil
	}
	if v, ok := c.opened.view(b); ok {
		return v, nil
	}
	return memory.Host(shm.At(b.Addr, b.Bytes)), nil
}

func (c *Comm) views(dst, src Buffer) (d, s memory.View, err error) {
	if d, err = c.view(dst); err == nil {
		s, err = c.view(src)
	}
	return d, s, err
}

// AllToAll submits an exchange, as Place describes. The shape is copied; the buffers are the operation's until it is
// complete.
func (c *Comm) AllToAll(stream, dst, src uintptr, shape Shape) (Ticket, error) {
	if err := onHost(stream, shape); err != nil {
		return 0, err
	}
	d, s, err := c.views(Buffer{dst, shape.DstBytes}, Buffer{src, shape.SrcBytes})
	if err != nil {
		return 0, err
	}
	ranks := c.Size()
	return c.put(func(o *op) {
		o.kind, o.dst, o.src = opAllToAll, d, s
		o.splits.Send, o.splits.Recv = append(o.splits.Send[:0], shape.send(ranks)...), append(o.splits.Recv[:0], shape.recv(ranks)...)
		o.splits.ElemSize = shape.Row
	})
}

// onHost refuses what only GPUs have.
func onHost(stream uintptr, shape Shape) error {
	switch {
	case stream != 0:
		return fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
	case *shape.ShapeHead != ShapeHead{Row: shape.Row, DstBytes: shape.DstBytes, SrcBytes: shape.SrcBytes}:
		return fmt.Errorf("core: %w: splits in device memory, displacements at the peers and limits are for GPUs", ErrInvalid)
	}
	return nil
}

// Explain says how an exchange into dst would be carried.
func (c *Comm) Explain(dst uintptr, shape Shape) (string, error) {
	h, _, err := c.ready()
	if err != nil {
		return "", err
	}
	if err := onHost(0, shape); err != nil {
		return "", err
	}
	d, err := c.view(Buffer{dst, shape.DstBytes})
	if err != nil {
		return "", err
	}
	_, inPlace := d.Symmetric(h)
	var sp alltoallv.Splits
	shape.assign(c.Size(), &sp)
	decision, err := c.exchanger.Explain(&sp, inPlace)
	if err != nil {
		return "", err
	}
	return decision.String(), nil
}

// Fault is nil: tickets tell the errors of the host's exchanges.
func (c *Comm) Fault() error { return nil }

// Barrier submits a barrier, which no rank leaves before all have come.
func (c *Comm) Barrier() (Ticket, error) { return c.put(func(o *op) { o.kind = opBarrier }) }

// AllReduce submits an all-reduce, as Place describes.
func (c *Comm) AllReduce(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error) {
	return c.reduction(opAllReduce, stream, dst, src, dt, o)
}

// ReduceScatter submits a reduce-scatter, as Place describes.
func (c *Comm) ReduceScatter(stream uintptr, dst, src Buffer, dt kernels.DType, o kernels.ReduceOp) (Ticket, error) {
	return c.reduction(opReduceScatter, stream, dst, src, dt, o)
}

// AllGather submits an all-gather, as Place describes.
func (c *Comm) AllGather(stream uintptr, dst, src Buffer) (Ticket, error) {
	return c.reduction(opAllGather, stream, dst, src, kernels.Uint8, kernels.Sum)
}

// Broadcast submits a broadcast, as Place describes.
func (c *Comm) Broadcast(stream uintptr, bytes Buffer, root int) (Ticket, error) {
	if err := broadcasts(c.Size(), root); err != nil {
		return 0, err
	}
	if stream != 0 {
		return 0, fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
	}
	v, err := c.view(bytes)
	if err != nil {
		return 0, err
	}
	return c.put(func(o *op) { o.kind, o.dst, o.src, o.root = opBroadcast, v, memory.View{}, root })
}

// broadcasts refuses a root that is no rank.
func broadcasts(size, root int) error {
	if root < 0 || root >= size {
		return fmt.Errorf("core: %w: broadcast of rank %d, want 0 to %d", ErrInvalid, root, size-1)
	}
	return nil
}

func (c *Comm) reduction(kind opKind, stream uintptr, dst, src Buffer, dt kernels.DType, r kernels.ReduceOp) (Ticket, error) {
	if stream != 0 {
		return 0, fmt.Errorf("core: %w: stream %#x on the host, which has none", ErrInvalid, stream)
	}
	d, s, err := c.views(dst, src)
	if err != nil {
		return 0, err
	}
	return c.put(func(o *op) { o.kind, o.dst, o.src, o.dtype, o.reduce = kind, d, s, dt, r })
}

// Refuse submits that this rank does not make the call that the others make now, as Place describes.
func (c *Comm) Refuse(why error) (Ticket, error) {
	return c.do(func() (int64, error) { return 0, c.refuse(why) })
}

// refuse takes part in the comparison of a call, with why this rank does not make it. The error is never nil.
func (c *Comm) refuse(why error) error {
	why = fmt.Errorf("core: %w", why)
	_, g, err := c.ready()
	if err != nil || !c.options.Validate {
		return errors.Join(why, err)
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.timeout())
	defer cancel()
	_, err = agree.On(ctx, g, agree.Claim{}, why)
	return err
}

// Alloc submits an allocation of symmetric memory, as Place describes.
func (c *Comm) Alloc(stream uintptr, n int64, put func(*Block) uint64) (Ticket, error) {
	if stream != 0 || n < 0 {
		return 0, fmt.Errorf("core: %w: %d bytes for stream %#x of the host", ErrInvalid, n, stream)
	}
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		ctx, cancel := c.meeting()
		defer cancel()
		b, err := c.blocks.allocate(ctx, h, nil, n)
		if err != nil {
			return 0, err
		}
		b.comm = c
		return int64(put(b)), nil
	})
}

// Verify submits a comparison of what the ranks have allocated and freed.
func (c *Comm) Verify() (Ticket, error) {
	return c.do(func() (int64, error) {
		h, _, err := c.ready()
		if err != nil {
			return 0, err
		}
		ctx, cancel := c.meeting()
		defer cancel()
		return 0, h.Verify(ctx)
	})
}
