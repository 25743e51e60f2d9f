package allreduce

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Gradient describes one of the gradients that Buckets hold.
type Gradient struct {
	// Len is its number of elements.
	Len int
	// DType is its floating-point type; the zero value means kernels.Float32.
	DType kernels.DType
}

// BucketOptions of Buckets. The zero value works. All ranks pass the same.
type BucketOptions struct {
	// BucketBytes is the size at which the next bucket begins; default 4 MiB. A larger gradient has a bucket of its own.
	BucketBytes int64
	// Op combines the ranks' gradients: the default kernels.Sum, or kernels.Avg.
	Op kernels.ReduceOp
	// Reducer are the options of the buckets' own reducer. On GPUs its MaxSMs is 16 by default, so that the computation keeps the other
	// multiprocessors.
	Reducer Options
}

// The defaults of BucketOptions.Reducer. Buckets are symmetric, so only a ring needs staging. Few multiprocessors already use most of a
// link, and the computation needs the others.
const (
	bucketStaging = 1 << 20
	bucketSMs     = 16
)

// Buckets hold the gradients of a model and all-reduce them while backward still computes.
//
// The gradients lie in a few buckets in the symmetric heap, so a reduction copies nothing: backward writes gradient i into
// View(i) (or Float32(i)), calls Ready(i), and goes on. Once all gradients of a bucket are ready, and all earlier buckets have
// been launched, Ready launches the bucket's all-reduce on a stream of its own. Wait returns when all buckets are reduced: the
// gradients are then the same on every rank, at the same place. List the gradients in the order in which backward completes
// them, last layer first, so that buckets fill early.
//
// In each step the caller writes every gradient and marks it Ready once, in any order, then calls Wait. Between its Ready and
// Wait a gradient belongs to the reduction. Between Wait and the next Ready it is the caller's; Buckets never clear it.
//
// All ranks launch buckets in the same order, for any order of their Ready calls. Buckets have a control block of their own, so other
// reductions may run at the same time. The methods may be called from several goroutines.
type Buckets struct {
	reducer *Reducer
	stream  device.Stream // the reductions run on it
	op      kernels.ReduceOp

	mu        sync.Mutex
	gradients []gradient
	buckets   []bucket // in the order of their launches
	launched  int      // how many of them, in this step
	failed    error
	closed    bool
}

type gradient struct {
	bucket  int
	off, n  int64 // bytes in the bucket
	view    memory.View
	isReady bool
}

type bucket struct {
	dtype   kernels.DType
	bytes   int64
	members int
	last    int // the last gradient listed
	missing int // gradients that are not ready in this step
	view    memory.View
}

// NewBuckets makes buckets for the gradients. It is collective: every rank of the heap's group calls it, in the same order
// as its other allocations, with equal gradients and options. The gradients are zero at first. The caller closes the
// buckets before the heap.
func NewBuckets(ctx context.Context, h *memory.Heap, gradients []Gradient, o BucketOptions) (*Buckets, error) {
	b := &Buckets{op: o.Op}
	complaint := b.pack(gradients, &o)
	if o.Reducer.StagingBytes == 0 {
		o.Reducer.StagingBytes = bucketStaging
	}
	if o.Reducer.MaxSMs == 0 {
		o.Reducer.MaxSMs = bucketSMs
	}
	own := owner{err: complaint}
	own.must = fmt.Sprintf("%d gradients (digest %016x) in buckets of %d bytes, %v; ", len(gradients), digest(gradients), o.BucketBytes, o.Op)
	for k := range b.buckets {
		own.bytes += kernels.AlignUp(b.buckets[k].bytes, kernels.LineBytes)
	}
	r, err := newReducer(ctx, h, o.Reducer, own)
	if err != nil {
		return nil, err
	}
	b.reducer = r
	b.divide(r.c.Extra())
	if b.stream, err = h.Device().NewStream(); err != nil {
		return nil, errors.Join(fmt.Errorf("allreduce: stream of the buckets: %w", err), b.Close(ctx))
	}
	return b, nil
}

func digest(gradients []Gradient) uint64 {
	words := make([]int64, 0, 2*len(gradients))
	for _, g := range gradients {
		words = append(words, int64(g.Len), int64(g.DType))
	}
	return xxhash.Sum64(shm.Bytes(words))
}

// gradientAlign keeps gradients on cache lines of their own.
const gradientAlign = 64

// pack gives each gradient its bucket and offset.
func (b *Buckets) pack(gradients []Gradient, o *BucketOptions) error {
	switch {
	case o.BucketBytes < 0:
		return invalid("BucketOptions.BucketBytes is %d", o.BucketBytes)
	case o.BucketBytes == 0:
		o.BucketBytes = 4 << 20
	}
	if o.Op != kernels.Sum && o.Op != kernels.Avg {
		return fmt.Errorf("allreduce: gradients (%v): %w", o.Op, ErrUnsupported)
	}
	filling := map[kernels.DType]int{} // the bucket that is not full yet
	for i, g := range gradients {
		dt := g.DType
		switch dt {
		case kernels.Uint8:
			dt = kernels.Float32
		case kernels.Int32, kernels.Int64:
			return fmt.Errorf("allreduce: gradient %d of %v: %w", i, dt, ErrUnsupported)
		}
		if !dt.Valid() || g.Len < 0 || int64(g.Len) > 1<<50 {
			return invalid("gradient %d has %d elements of %v", i, g.Len, dt)
		}
		n := int64(g.Len) * dt.Size()
		padded := (n + gradientAlign - 1) / gradientAlign * gradientAlign
		k, ok := filling[dt]
		if !ok || b.buckets[k].bytes > 0 && b.buckets[k].bytes+padded > o.BucketBytes {
			k = len(b.buckets)
			filling[dt] = k
			b.buckets = append(b.buckets, bucket{dtype: dt})
		}
		p := &b.buckets[k]
		b.gradients = append(b.gradients, gradient{bucket: k, off: p.bytes, n: n})
		p.bytes += padded
		p.members++
		p.missing++
		p.last = i
	}
	// A bucket cannot be launched before its last gradient is ready, so buckets are launched in this order.
	order := make([]int, len(b.buckets))
	for k := range order {
		order[k] = k
	}
	slices.SortFunc(order, func(k, l int) int { return b.buckets[k].last - b.buckets[l].last })
	sorted, place := make([]bucket, len(order)), make([]int, len(order))
	for at, k := range order {
		sorted[at], place[k] = b.buckets[k], at
	}
	b.buckets = sorted
	for i := range b.gradients {
		b.gradients[i].bucket = place[b.gradients[i].bucket]
	}
	return nil
}

// divide gives the buckets their memory, which is zero.
func (b *Buckets) divide(all memory.View) {
	var at int64
	for k := range b.buckets {
		p := &b.buckets[k]
		p.view = all.Slice(at, p.bytes)
		at += kernels.AlignUp(p.bytes, kernels.LineBytes)
	}
	for i := range b.gradients {
		g := &b.gradients[i]
		p := &b.buckets[g.bucket]
		g.view = as(p.dtype, p.view.Slice(g.off, g.n))
	}
}

// as is v with its elements known to be of a floating-point type.
func as(t kernels.DType, v memory.View) memory.View {
	switch t {
	case kernels.Float16:
		return memory.As[memory.Float16](v)
	case kernels.BFloat16:
		return memory.As[memory.BFloat16](v)
	case kernels.Float64:
		return memory.As[float64](v)
	case kernels.Float8E4M3:
		return memory.As[memory.Float8E4M3](v)
	case kernels.Float8E5M2:
		return memory.As[memory.Float8E5M2](v)
	}
	return memory.As[float32](v)
}

// Len is the number of gradients.
func (b *Buckets) Len() int { return len(b.gradients) }

// NumBuckets is the number of buckets.
func (b *Buckets) NumBuckets() int { return len(b.buckets) }

// View is the memory of gradient i, whose elements are known, the same until Close.
func (b *Buckets) View(i int) memory.View { return b.gradients[i].view }

// Float32 is gradient i, for gradients of that type on the host; nil on a GPU. It is dead after Close.
func (b *Buckets) Float32(i int) []float32 {
	g := &b.gradients[i]
	if dt := b.buckets[g.bucket].dtype; dt != kernels.Float32 {
		panic(fmt.Sprintf("allreduce: gradient %d is %v, not float32", i, dt))
	}
	return shm.View[float32](g.view.Bytes())
}

// Ready marks gradient i complete: as soon as the work enqueued on s so far has run, or, with a nil stream, now. It launches
// the reductions that have become possible and does not wait for them. A gradient without a contribution in a step must be
// Ready too, with zeros. A second call in a step is an error.
func (b *Buckets) Ready(s device.Stream, i int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.usable(); err != nil {
		return err
	}
	if i < 0 || i >= len(b.gradients) {
		return invalid("gradient %d of %d", i, len(b.gradients))
	}
	if err := b.reducer.c.Takes(s); err != nil {
		return err
	}
	g := &b.gradients[i]
	if g.isReady {
		return invalid("gradient %d is ready already", i)
	}
	if s != nil {
		e, err := s.Record()
		if err == nil {
			err = b.stream.Wait(e)
		}
		if err != nil {
			return fmt.Errorf("allreduce: gradient %d: %w", i, err)
		}
	}
	g.isReady = true
	b.buckets[g.bucket].missing--
	for b.launched < len(b.buckets) && b.buckets[b.launched].missing == 0 {
		p := &b.buckets[b.launched]
		if err := b.reducer.AllReduce(b.stream, p.view, p.view, p.dtype, b.op); err != nil {
			b.failed = fmt.Errorf("bucket %d: %w", b.launched, err)
			return b.usable()
		}
		b.launched++
	}
	return nil
}

// Wait ends a step. With a nil stream it blocks until all gradients are reduced and returns the first error of their
// reductions. Otherwise it returns at once, work enqueued on s from now on finds the gradients reduced, and a later call
// returns an error of the reductions. If a gradient is not Ready, Wait returns an error, and the step continues.
func (b *Buckets) Wait(s device.Stream) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.usable(); err != nil {
		return err
	}
	if err := b.reducer.c.Takes(s); err != nil {
		return err
	}
	if b.launched < len(b.buckets) {
		var missing []string
		for i := range b.gradients {
			if !b.gradients[i].isReady {
				missing = append(missing, fmt.Sprint(i))
			}
		}
		return invalid("%d of %d gradients are not ready: %s", len(missing), len(b.gradients), strings.Join(missing, ", "))
	}
	var err error
	if s == nil {
		if err = b.stream.Synchronize(); err == nil {
			err = b.reducer.Fault()
		}
	} else {
		var e device.Event
		if e, err = b.stream.Record(); err == nil {
			err = s.Wait(e)
		}
	}
	if err != nil {
		b.failed = err
		return b.usable()
	}
	b.launched = 0
	for i := range b.gradients {
		b.gradients[i].isReady = false
	}
	for k := range b.buckets {
		b.buckets[k].missing = b.buckets[k].members
	}
	return nil
}

func (b *Buckets) usable() error {
	switch {
	case b.closed:
		return fmt.Errorf("allreduce: buckets are %w", ErrClosed)
	case b.failed != nil:
		return fmt.Errorf("allreduce: gradients: %w", b.failed)
	}
	return nil
}

// Close waits for the reductions that have been launched and gives the memory back. It is collective and idempotent.
func (b *Buckets) Close(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	var errs []error
	if b.stream != nil {
		errs = append(errs, b.stream.Close())
	}
	return errors.Join(append(errs, b.reducer.Close(ctx))...)
}
