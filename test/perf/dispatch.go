package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// benchDispatch times dispatch and combine on the device that the flags say.
func benchDispatch(ctx context.Context, g *comm.Group, c config) ([]row, error) {
	if c.Device == "cuda" {
		return benchMoE(ctx, g, c)
	}
	return benchHostDispatch(ctx, g, c)
}

// dispatchOptions are those that the flags ask for.
func dispatchOptions(c config) (dispatch.Options, error) {
	o := dispatch.Options{
		Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden, MaxTokens: c.Tokens, Handles: 1, Quantize: c.Quantize, HostCounts: true,
	}
	var err error
	if o.Table, err = c.dispatchTable(); err != nil {
		return o, err
	}
	known := false
	for o.Layout = 0; o.Layout.Valid(); o.Layout++ {
		if known = o.Layout.String() == c.Layout; known {
			break
		}
	}
	if !known {
		return o, fmt.Errorf("-layout: %q is no layout", c.Layout)
	}
	for _, d := range []kernels.DType{kernels.Float32, kernels.BFloat16, kernels.Float16} {
		if d.String() == c.DType {
			o.DType, o.CombineDType = d, d
			return o, nil
		}
	}
	return o, fmt.Errorf("-dtype: %q is no type of tokens", c.DType)
}

// benchHostDispatch times Dispatch followed by Combine, with experts that do nothing, so that every token comes back as its
// own multiple. Next to it stands the time of copying the bytes that had to move, once, with copy, by the same ranks at
// the same time.
func benchHostDispatch(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	n, me := g.Size(), g.Rank()
	o, err := dispatchOptions(c)
	if err != nil {
		return nil, err
	}
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{SegmentBytes: 1 << 30})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	d, err := dispatch.New(ctx, h, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close(ctx)) }()
	fence, err := newFence(ctx, h)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fence.Close(ctx)) }()

	b := newDispatchBatch(d, o, me)
	if o.Quantize { // what the experts make of float8 lies elsewhere
		made, err := h.Alloc(int64(d.MaxRows()) * int64(o.Hidden) * o.CombineDType.Size())
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, made.Free()) }()
		b.made = made.View()
	}
	before, err := d.Counters()
	if err != nil {
		return nil, err
	}
	if err := b.first(ctx); err != nil {
		return nil, err
	}
	after, err := d.Counters()
	if err != nil {
		return nil, err
	}
	var moved, link int64
	for p := range after.Bytes {
		sent := after.Bytes[p] - before.Bytes[p]
		moved += sent
		if p != me {
			link += sent
		}
	}
	from, to := make([]byte, moved), make([]byte, moved)
	for i := range from {
		from[i] = byte(i)
	}
	copy(to, from)
	var calls, copies timer
	warm, timed := 3, 30
	if c.Iters > 0 {
		timed = c.Iters
	}
	for i := -warm; i < timed; i++ {
		for _, part := range []struct {
			t *timer
			f func() error
		}{{&calls, b.call}, {&copies, func() error { copy(to, from); return nil }}} {
			if err := fence.Barrier(nil); err != nil {
				return nil, err
			}
			start := time.Now()
			if err := part.f(); err != nil {
				return nil, err
			}
			if i >= 0 {
				part.t.us = append(part.t.us, float64(time.Since(start).Nanoseconds())/1e3)
			}
		}
	}
	if err := b.check(); err != nil {
		return nil, err
	}
	us, err := calls.merge(ctx, g)
	if err != nil {
		return nil, err
	}
	copyUS, err := copies.merge(ctx, g)
	if err != nil || me != 0 {
		return nil, err
	}
	plain := median(copyUS)
	what := c.Layout + " " + c.DType
	if c.Quantize {
		what += " as float8"
	}
	return []row{row{Op: c.Op, Ranks: n, Procs: c.Procs, Device: "host", Splits: fmt.Sprintf("top-%d of %d", c.TopK, c.Experts), Algorithm: what,
		BytesPerRank: moved, GBpsLink: float64(link) / median(us) / 1e3, Checked: true, CopyUS: &plain}.timed(us)}, nil
}

// dispatchBatch is one rank's tokens and what becomes of them.
type dispatchBatch struct {
	d      *dispatch.Dispatcher
	o      dispatch.Options
	tokens dispatch.Tokens
	x      []float32
	y      memory.View
	made   memory.View // the experts' rows; empty: those of the dispatch
	times  []float32   // by which each token should come back multiplied
}

func newDispatchBatch(d *dispatch.Dispatcher, o dispatch.Options, me int) *dispatchBatch {
	rnd := rand.New(rand.NewPCG(1, uint64(me)))
	x := make([]float32, o.MaxTokens*o.Hidden)
	for i := range x {
		x[i] = rnd.Float32() - 0.5
	}
	b := &dispatchBatch{d: d, o: o, times: make([]float32, o.MaxTokens)}
	idx, weights := make([]int32, o.MaxTokens*o.TopK), make([]float32, o.MaxTokens*o.TopK)
	for t := range o.MaxTokens {
		ranks := map[int]bool{}
		for k, e := range rnd.Perm(o.Experts)[:o.TopK] {
			idx[t*o.TopK+k], weights[t*o.TopK+k] = int32(e), float32(k+1)/8
			if rank := d.Placement().Rank(me, t, e); !o.Layout.ByToken() {
				b.times[t] += float32(k+1) / 8
			} else if !ranks[rank] {
				ranks[rank] = true
				b.times[t]++
			}
		}
	}
	plain := make([]byte, int64(len(x))*o.DType.Size())
	encode(o.DType, plain, x)
	b.x = decode(o.DType, plain)
	b.y = memory.Host(make([]byte, len(plain)))
	b.tokens = dispatch.Tokens{X: memory.Host(plain), Experts: memory.Host(shm.Bytes(idx)), Weights: memory.Host(shm.Bytes(weights))}
	return b
}

// first is a call in which the experts work, so that later ones find their rows where these are not those of the dispatch.
func (b *dispatchBatch) first(ctx context.Context) error {
	h, err := b.d.Dispatch(nil, b.tokens)
	if err != nil {
		return err
	}
	defer h.Release()
	rows := h.Rows()
	if b.made.Len() > 0 {
		counts, err := h.HostCounts(ctx)
		if err != nil {
			return err
		}
		wide := decode(kernels.Float8E4M3, rows.Bytes()[:counts.Rows*b.o.Hidden])
		scales, blocks := shm.View[float32](h.Scales().Bytes()), (b.o.Hidden+127)/128
		for i := range wide {
			wide[i] *= scales[i/b.o.Hidden*blocks+i%b.o.Hidden/128]
		}
		rows = b.made
		encode(b.o.CombineDType, rows.Bytes(), wide)
	}
	return b.d.Combine(nil, b.y, rows, h, dispatch.CombineOptions{})
}

// call is what is timed.
func (b *dispatchBatch) call() error {
	h, err := b.d.Dispatch(nil, b.tokens)
	if err != nil {
		return err
	}
	defer h.Release()
	rows := b.made
	if rows.Len() == 0 {
		rows = h.Rows()
	}
	return b.d.Combine(nil, b.y, rows, h, dispatch.CombineOptions{})
}

// check compares the last result.
func (b *dispatchBatch) check() error {
	within := map[kernels.DType]float64{kernels.Float32: 1e-5, kernels.BFloat16: 2e-2, kernels.Float16: 2e-3}[b.o.DType]
	if b.o.Quantize {
		within = 0.1
	}
	for i, y := range decode(b.o.CombineDType, b.y.Bytes()) {
		t := i / b.o.Hidden
		if want := b.x[i] * b.times[t]; !(math.Abs(float64(y-want)) <= within*float64(b.times[t])) {
			return fmt.Errorf("dispatch: element %d of token %d is %v, want %v", i%b.o.Hidden, t, y, want)
		}
	}
	return nil
}

// encode and decode rows of a type.
func encode(d kernels.DType, to []byte, v []float32) {
	switch d {
	case kernels.Float16:
		vec.Store(shm.View[vec.Float16](to)[:len(v)], v, 1)
	case kernels.BFloat16:
		vec.Store(shm.View[vec.BFloat16](to)[:len(v)], v, 1)
	default:
		copy(shm.View[float32](to), v)
	}
}

func decode(d kernels.DType, b []byte) []float32 {
	v := make([]float32, int64(len(b))/d.Size())
	switch d {
	case kernels.Float8E4M3:
		vec.Load(v, shm.View[vec.Float8E4M3](b))
	case kernels.Float16:
		vec.Load(v, shm.View[vec.Float16](b))
	case kernels.BFloat16:
		vec.Load(v, shm.View[vec.BFloat16](b))
	default:
		copy(v, shm.View[float32](b))
	}
	return v
}
