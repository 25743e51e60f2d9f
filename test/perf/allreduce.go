package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/test/reference"
)

// reduction is what benchAllReduce measures: a collective, its elements and operator.
type reduction struct {
	coll  kernels.Collective
	dtype kernels.DType
	op    kernels.ReduceOp
	ranks int
}

func parseReduction(c config, ranks int) (d reduction, err error) {
	d.ranks = ranks
	for _, coll := range []kernels.Collective{kernels.AllReduce, kernels.ReduceScatter, kernels.AllGather} {
		if coll.String() == c.Collective {
			d.coll = coll
		}
	}
	for _, dt := range []kernels.DType{kernels.Float32, kernels.BFloat16} {
		if dt.String() == c.DType {
			d.dtype = dt
		}
	}
	for d.op = 0; d.op.Valid() && d.op.String() != c.Reduce; {
		d.op++
	}
	switch {
	case d.coll == 0:
		return d, fmt.Errorf("-collective: %q is not all-reduce, reduce-scatter or all-gather", c.Collective)
	case d.dtype == 0:
		return d, fmt.Errorf("-dtype: %q is not float32 or bfloat16", c.DType)
	case !d.op.Valid():
		return d, fmt.Errorf("-op: %q is no reduction", c.Reduce)
	}
	return d, nil
}

func (d reduction) String() string {
	if !d.coll.Reduces() {
		return fmt.Sprintf("%v of %v", d.coll, d.dtype)
	}
	return fmt.Sprintf("%v (%v) of %v", d.coll, d.op, d.dtype)
}

// period is after how many elements the values come again.
const period = 5 << 10

// value is a small integer, so that every result is exact.
func (d reduction) value(rank int, i int64) float64 { return float64(1 + (int64(rank)*3+i)%5) }

// combined is what the ranks' values make.
func (d reduction) combined(i int64) float64 {
	return reference.Reduced(d.op, d.ranks, func(rank int) float64 { return d.value(rank, i) })
}

// fill writes elements first, first+1, ... of a series into b.
func (d reduction) fill(b []byte, first int64, of func(i int64) float64) {
	es := d.dtype.Size()
	n := min(int64(len(b)), period*es)
	for i := range n / es {
		reference.Put(b, d.dtype, i, of(first+i))
	}
	for n > 0 && n < int64(len(b)) {
		n += int64(copy(b[n:], b[:n]))
	}
}

// holds checks every element of b.
func (d reduction) holds(b []byte, first int64, of func(i int64) float64) error {
	es := d.dtype.Size()
	want := make([]byte, min(int64(len(b)), period*es))
	d.fill(want, first, of)
	for at := 0; at < len(b); at += len(want) {
		got := b[at:min(at+len(want), len(b))]
		if bytes.Equal(got, want[:len(got)]) {
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				return fmt.Errorf("%v: element %d is wrong", d, (int64(at+i))/es)
			}
		}
	}
	return nil
}

// lengths are the bytes of the source and the destination of a rank for size bytes of all slices.
func (d reduction) lengths(size int64) (in, out int64) {
	in, out = size, size
	if !d.coll.Reduces() {
		in /= int64(d.ranks)
	}
	if !d.coll.Gathers() {
		out /= int64(d.ranks)
	}
	return in, out
}

func (d reduction) load(b []byte, me int) {
	first := int64(0)
	if !d.coll.Reduces() {
		first = int64(me) * int64(len(b)) / d.dtype.Size()
	}
	d.fill(b, first, func(i int64) float64 { return d.value(me, i) })
}

func (d reduction) check(b []byte, me int) error {
	es := d.dtype.Size()
	if d.coll.Reduces() {
		first := int64(0)
		if !d.coll.Gathers() {
			first = int64(me) * int64(len(b)) / es
		}
		return d.holds(b, first, d.combined)
	}
	part := int64(len(b) / d.ranks)
	for p := range d.ranks {
		slice := b[int64(p)*part:][:part]
		if err := d.holds(slice, int64(p)*part/es, func(i int64) float64 { return d.value(p, i) }); err != nil {
			return fmt.Errorf("slice %d: %w", p, err)
		}
	}
	return nil
}

func (d reduction) call(x *allreduce.Reducer, s device.Stream, dst, src memory.View) error {
	switch d.coll {
	case kernels.AllReduce:
		return x.AllReduce(s, dst, src, d.dtype, d.op)
	case kernels.ReduceScatter:
		return x.ReduceScatter(s, dst, src, d.dtype, d.op)
	}
	return x.AllGather(s, dst, src, d.dtype)
}

// linkBytes is what a link has to carry in a direction.
func (d reduction) linkBytes(size int64) float64 {
	b := float64(d.ranks-1) / float64(d.ranks) * float64(size)
	if d.coll == kernels.AllReduce {
		b *= 2
	}
	return b
}

// benchAllReduce times a collective out of place.
func benchAllReduce(ctx context.Context, g *comm.Group, c config) (rows []row, err error) {
	d, err := parseReduction(c, g.Size())
	if err != nil {
		return nil, err
	}
	whole := int64(g.Size()) * d.dtype.Size()
	sizes := make([]int64, len(c.Sizes))
	var in, out int64
	for i, size := range c.Sizes {
		sizes[i] = size / whole * whole
		a, b := d.lengths(sizes[i])
		in, out = max(in, a), max(out, b)
	}
	r, err := newReduceRig(ctx, g, c, in, out)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	o := allreduce.Options{Algorithm: c.Algorithm, MaxSMs: c.SMs}
	if c.Table != "" {
		if o.Table, err = allreduce.LoadTable(c.Table); err != nil {
			return nil, err
		}
	}
	x, err := allreduce.New(ctx, r.heap(), o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	label := d.String()
	if c.Staged {
		label += ", staged"
	}
	for i, size := range sizes {
		us, err := r.reduce(ctx, x, d, size)
		if err != nil {
			return nil, fmt.Errorf("%s, %d bytes: %w", label, size, err)
		}
		if g.Rank() != 0 {
			continue
		}
		how, err := x.Explain(d.coll, size/d.dtype.Size(), d.dtype)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row{Op: c.Op, Ranks: d.ranks, Procs: c.Procs, Device: c.Device, Splits: label, Algorithm: how.Way, SMs: how.Blocks, Rate: how.Rate,
			BytesPerRank: c.Sizes[i], GBpsLink: d.linkBytes(size) / median(us) / 1e3, Checked: true}.timed(us))
	}
	return rows, nil
}

// reduceRig is one rank's heap and buffers on some device, and how reductions are timed there.
type reduceRig interface {
	heap() *memory.Heap
	// reduce runs a reduction of size bytes, checks every element of the output and returns the slowest rank's microseconds a call.
	reduce(ctx context.Context, x *allreduce.Reducer, d reduction, size int64) ([]float64, error)
	close(ctx context.Context) error
}

// newReduceRig makes buffers of in and out bytes, and room for the control block of a reducer.
func newReduceRig(ctx context.Context, g *comm.Group, c config, in, out int64) (reduceRig, error) {
	if c.Device == "cuda" {
		return newCUDARig(ctx, g, c, in, out, cudaControl)
	}
	return newHostRig(ctx, g, c, in, out, hostControl)
}

func (r *hostRig) reduce(ctx context.Context, x *allreduce.Reducer, d reduction, size int64) ([]float64, error) {
	in, out := d.lengths(size)
	src, dst := r.src.View().Slice(0, in), r.dst.View().Slice(0, out)
	if r.c.Staged {
		src, dst = memory.Host(make([]byte, in)), memory.Host(make([]byte, out))
	}
	me := r.h.Group().Rank()
	d.load(src.Bytes(), me)
	for i, b := 0, dst.Bytes(); i < len(b); i++ {
		b[i] = 0xff
	}
	var t timer
	warm, timed := r.c.iterations(size)
	for i := -warm; i < timed; i++ {
		if err := r.fence.Barrier(nil); err != nil {
			return nil, err
		}
		start := time.Now()
		if err := d.call(x, nil, dst, src); err != nil {
			return nil, err
		}
		if i >= 0 {
			t.us = append(t.us, float64(time.Since(start).Nanoseconds())/1e3)
		}
	}
	if err := d.check(dst.Bytes(), me); err != nil {
		return nil, err
	}
	return t.merge(ctx, r.h.Group())
}

func (r *cudaRig) reduce(ctx context.Context, x *allreduce.Reducer, d reduction, size int64) (us []float64, err error) {
	in, out := d.lengths(size)
	src, dst := r.src.View().Slice(0, in), r.dst.View().Slice(0, out)
	c := r.dev.Context()
	if r.c.Staged {
		for _, v := range []*memory.View{&src, &dst} {
			p, err := c.MemAlloc(v.Len())
			if err != nil {
				return nil, err
			}
			defer func() { err = errors.Join(err, c.MemFree(p)) }()
			*v = memory.Device(p, v.Len())
		}
	}
	me := r.h.Group().Rank()
	d.load(r.host[:in], me)
	if err := memory.Copy(r.s, src, memory.Host(r.host[:in])); err != nil {
		return nil, err
	}
	if err := c.Set(cuda.Stream(r.s.Handle()), dst.Ptr(), 0xff, dst.Len()); err != nil {
		return nil, err
	}
	t, err := r.calls(ctx, size, x.Fault, func() error { return d.call(x, r.s, dst, src) })
	if err != nil {
		return nil, err
	}
	got := r.host[:out]
	if err := memory.Copy(r.s, memory.Host(got), dst); err != nil {
		return nil, err
	}
	if err := d.check(got, me); err != nil {
		return nil, err
	}
	// Freeing can wait for running kernels: no rank frees before all are through.
	if err := r.h.Group().Barrier(ctx); err != nil {
		return nil, err
	}
	return t.merge(ctx, r.h.Group())
}
