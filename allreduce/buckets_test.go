package allreduce

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/vec"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// fill writes what rank has in gradient i of a step; the values are small enough for bfloat16 to sum exactly.
func fill(b *Buckets, i, rank, step int) {
	for k := range b.elements(i) {
		b.set(i, k, float32((rank+1)*(1+(i+step+k)%4)))
	}
}

func (b *Buckets) elements(i int) int {
	return int(b.View(i).Len() / b.buckets[b.gradients[i].bucket].dtype.Size())
}

func (b *Buckets) set(i, k int, v float32) {
	if b.buckets[b.gradients[i].bucket].dtype == kernels.BFloat16 {
		shm.View[vec.BFloat16](b.View(i).Bytes())[k] = vec.ToBFloat16(v)
		return
	}
	b.Float32(i)[k] = v
}

func (b *Buckets) at(i, k int) float32 {
	if b.buckets[b.gradients[i].bucket].dtype == kernels.BFloat16 {
		return shm.View[vec.BFloat16](b.View(i).Bytes())[k].Float32()
	}
	return b.Float32(i)[k]
}

// check compares gradient i with the sum (or average) over the ranks.
func check(b *Buckets, i, ranks, step int) error {
	for k := range b.elements(i) {
		want := float32(ranks*(ranks+1)/2) * float32(1+(i+step+k)%4)
		if b.op == kernels.Avg {
			want /= float32(ranks)
		}
		if got := b.at(i, k); got != want {
			return fmt.Errorf("step %d gradient %d element %d is %v, want %v", step, i, k, got, want)
		}
	}
	return nil
}

func someGradients() []Gradient {
	var gs []Gradient
	for i, n := range []int{1000, 1, 0, 17, 5000, 30000, 3, 64, 2000, 999, 16} {
		g := Gradient{Len: n}
		if i%4 == 1 {
			g.DType = kernels.BFloat16
		}
		gs = append(gs, g)
	}
	return gs
}

func TestBucketsReduceEveryGradient(t *testing.T) {
	for _, o := range []BucketOptions{{}, {BucketBytes: 8 << 10}, {BucketBytes: 1}, {BucketBytes: 8 << 10, Op: kernels.Avg},
		{BucketBytes: 8 << 10, Reducer: Options{Algorithm: "ring"}}} {
		t.Run(fmt.Sprintf("%d bytes %v %s", o.BucketBytes, o.Op, o.Reducer.Algorithm), func(t *testing.T) {
			worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
				b, err := NewBuckets(r.Ctx, r.Heap, someGradients(), o)
				r.Must(err)
				s, err := device.Host().NewStream()
				r.Must(err)
				rnd := rand.New(rand.NewPCG(1, uint64(r.Rank())))
				for step := range 12 {
					order := rnd.Perm(b.Len()) // every rank has an order of its own
					for _, i := range order {
						fill(b, i, r.Rank(), step)
						if step%3 == 1 {
							r.Must(b.Ready(s, i))
						} else {
							r.Must(b.Ready(nil, i))
						}
					}
					if step%3 == 2 {
						r.Must(b.Wait(s))
						r.Must(s.Synchronize())
					} else {
						r.Must(b.Wait(nil))
					}
					for i := range b.Len() {
						r.Must(check(b, i, 3, step))
					}
				}
				r.Must(s.Close())
				r.Must(b.Close(r.Ctx))
				r.Must(b.Close(r.Ctx))
				require.ErrorIs(r.T, b.Ready(nil, 0), ErrClosed)
				require.ErrorIs(r.T, b.Wait(nil), ErrClosed)
			})
		})
	}
}

func TestBucketsAcrossProcesses(t *testing.T) {
	worldtest.Procs(t, 3, 16<<20, func(r *worldtest.Rank) {
		b, err := NewBuckets(r.Ctx, r.Heap, someGradients(), BucketOptions{BucketBytes: 8 << 10})
		r.Must(err)
		for step := range 10 {
			for i := range b.Len() {
				fill(b, i, r.Rank(), step)
				r.Must(b.Ready(nil, i))
			}
			r.Must(b.Wait(nil))
			for i := range b.Len() {
				r.Must(check(b, i, 3, step))
			}
		}
		r.Must(b.Close(r.Ctx))
	})
}

// The buckets before the last are reduced while the last gradient is still being computed.
func TestBucketsOverlapWithCompute(t *testing.T) {
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		b, err := NewBuckets(r.Ctx, r.Heap, []Gradient{{Len: 5000}, {Len: 5000}, {Len: 5000}}, BucketOptions{BucketBytes: 20000})
		r.Must(err)
		require.Equal(r.T, 3, b.NumBuckets())
		for step := range 3 {
			fill(b, 0, r.Rank(), step)
			r.Must(b.Ready(nil, 0))
			fill(b, 2, r.Rank(), step) // out of order: has to wait for bucket 1
			r.Must(b.Ready(nil, 2))
			require.Equal(r.T, 1, b.launched)
			// Bucket 0 comes to its end without any further call.
			r.Must(b.stream.Synchronize())
			r.Must(check(b, 0, 3, step))
			require.Equal(r.T, float32(r.Rank()+1)*float32(1+(2+step)%4), b.Float32(2)[0], "not launched")
			require.ErrorContains(r.T, b.Wait(nil), "1 of 3 gradients are not ready: 1")
			fill(b, 1, r.Rank(), step)
			r.Must(b.Ready(nil, 1))
			r.Must(b.Wait(nil))
			for i := range 3 {
				r.Must(check(b, i, 3, step))
			}
		}
		r.Must(b.Close(r.Ctx))
	})
}

// A gradient that a stream still writes is not reduced before.
func TestBucketsWaitForTheStreamThatWrites(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		b, err := NewBuckets(r.Ctx, r.Heap, []Gradient{{Len: 1000}}, BucketOptions{})
		r.Must(err)
		s := device.NewHostStream()
		r.Must(s.Enqueue(task(func() error {
			time.Sleep(20 * time.Millisecond)
			fill(b, 0, r.Rank(), 0)
			return nil
		})))
		r.Must(b.Ready(s, 0))
		r.Must(b.Wait(nil))
		r.Must(check(b, 0, 2, 0))
		r.Must(s.Close())
		r.Must(b.Close(r.Ctx))
	})
}

type task func() error

func (t task) Run() error { return t() }

func TestF3_BucketsRefuse(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		for _, bad := range []struct {
			g    []Gradient
			o    BucketOptions
			is   error
			says string
		}{
			{[]Gradient{{Len: -4}}, BucketOptions{}, ErrInvalid, "-4"},
			{[]Gradient{{Len: 4}, {Len: 4, DType: kernels.Int64}}, BucketOptions{}, ErrUnsupported, "gradient 1 of int64"},
			{nil, BucketOptions{Op: kernels.Max}, ErrUnsupported, "max"},
			{nil, BucketOptions{BucketBytes: -1}, ErrInvalid, "-1"},
			{[]Gradient{{Len: 4 + r.Rank()}}, BucketOptions{}, comm.ErrMismatch, "digest"},
			{[]Gradient{{Len: 4}}, BucketOptions{BucketBytes: int64(5 + r.Rank())}, comm.ErrMismatch, "buckets of 6 bytes"},
			{[]Gradient{{Len: 1 << 50}}, BucketOptions{}, memory.ErrOutOfMemory, "out of memory"},
		} {
			_, err := NewBuckets(r.Ctx, r.Heap, bad.g, bad.o)
			require.ErrorContains(r.T, err, bad.says)
			require.ErrorIs(r.T, err, bad.is)
		}
		b, err := NewBuckets(r.Ctx, r.Heap, []Gradient{{Len: 4}, {Len: 4}}, BucketOptions{})
		r.Must(err)
		require.ErrorContains(r.T, b.Ready(nil, 2), "gradient 2 of 2")
		r.Must(b.Ready(nil, 1))
		require.ErrorContains(r.T, b.Ready(nil, 1), "gradient 1 is ready already")
		r.Must(b.Ready(nil, 0))
		r.Must(b.Wait(nil))
		r.Must(b.Close(r.Ctx))
		used := r.Heap
		r.Must(used.Verify(r.Ctx))
	})
}

func TestF2_BucketsNameTheLostRank(t *testing.T) {
	var others sync.WaitGroup // that have their buckets: what ranks still make together would end with the abort
	others.Add(2)
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		b, err := NewBuckets(r.Ctx, r.Heap, []Gradient{{Len: 100}, {Len: 100}}, BucketOptions{BucketBytes: 400})
		r.Must(err)
		defer b.Close(r.Ctx)
		if r.Rank() == 1 {
			others.Wait()
			r.Must(b.Ready(nil, 0))
			r.Group.Abort(errors.New("no more"))
			return
		}
		others.Done()
		for _, call := range []func() error{
			func() error { return errors.Join(b.Ready(nil, 0), b.Ready(nil, 1), b.Wait(nil)) },
			func() error { return b.Wait(nil) },
		} {
			err = call()
			var pe *comm.PeerError
			if !errors.As(err, &pe) || pe.Rank != 1 {
				r.T.Errorf("rank %d: got %v", r.Rank(), err)
			}
		}
	})
}

func TestBucketsAllocateNothingOnceWarm(t *testing.T) {
	worldtest.Local(t, 2, 16<<20, func(r *worldtest.Rank) {
		b, err := NewBuckets(r.Ctx, r.Heap, someGradients(), BucketOptions{BucketBytes: 8 << 10})
		r.Must(err)
		step := func() {
			for i := range b.Len() {
				r.Must(b.Ready(nil, i))
			}
			r.Must(b.Wait(nil))
		}
		r.AllocatesNothing(step)
		r.Must(b.Close(r.Ctx))
	})
}
