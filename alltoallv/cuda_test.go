package alltoallv_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// gpuCall is one exchange on a GPU with what it sends and what must come.
type gpuCall struct {
	r        *worldtest.Rank
	s        device.Stream
	sp       *alltoallv.Splits
	src, dst memory.View
	want     []byte
}

func newGPUCall(r *worldtest.Rank, s device.Stream, dst, src memory.View, m [][]int64, call int) *gpuCall {
	me := r.Rank()
	c := &gpuCall{r: r, s: s, sp: &alltoallv.Splits{Send: m[me], Recv: column(m, me)}, src: src}
	c.want = bytes.Repeat([]byte{0xa5}, int(dst.Len()))
	var in []byte
	for p, n := range c.sp.Send {
		for i := range n {
			in = append(in, worldtest.Element(call, me, p, i))
		}
	}
	var at int64
	for p, n := range c.sp.Recv {
		for i := range n {
			c.want[at+i] = worldtest.Element(call, p, me, i)
		}
		at += n
	}
	c.dst = dst
	if len(in) > 0 {
		r.Must(memory.Copy(s, src.Slice(0, int64(len(in))), memory.Host(in)))
	}
	c.poison()
	return c
}

func (c *gpuCall) poison() {
	if c.dst.Len() > 0 {
		c.r.Must(memory.Copy(c.s, c.dst, memory.Host(bytes.Repeat([]byte{0xa5}, int(c.dst.Len())))))
	}
}

func (c *gpuCall) check() error {
	if c.dst.Len() == 0 {
		return nil
	}
	got := make([]byte, c.dst.Len())
	if err := memory.Copy(c.s, memory.Host(got), c.dst); err != nil {
		return err
	}
	for i := range got {
		if got[i] != c.want[i] {
			return fmt.Errorf("byte %d of %d is %#x, want %#x (receives %v)", i, len(got), got[i], c.want[i], c.sp.Recv)
		}
	}
	return nil
}

// algorithms are the built-in ones that n ranks can use on the GPUs of this machine. Streams of one process and GPU share a few
// queues: work that waits for an exchange, such as a copy behind it, can keep the exchange of another rank from its turn. With
// copy engines that is always so, and many ranks on a GPU are too many.
func algorithms(n int) []string {
	all := []string{"packet", "direct", "pipelined", "ring"}
	if gpus, err := device.CUDACount(); err == nil && n <= 4*gpus {
		all = append(all, "copy")
	}
	return all
}

// peerDispls is where rank me's part begins in every rank's packed output.
func peerDispls(m [][]int64, me int) []int64 {
	at := make([]int64, len(m))
	for k := range m {
		at[k] = total(column(m, k)[:me])
	}
	return at
}

func gpuStream(r *worldtest.Rank) device.Stream {
	s, err := r.Device.NewStream()
	r.Must(err)
	return s
}

func TestCUDA_X5_RandomSplitsAgainstReference(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4, 8} {
		for _, algorithm := range append(algorithms(n), "") {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				const limit = 100 << 10
				worldtest.GPUs(t, n, 256<<20, func(r *worldtest.Rank) {
					// Few blocks, so that ranks which share a GPU run side by side.
					x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: algorithm, MaxSMs: 2, PacketBytes: 4 << 10, SlotBytes: 2048, Timeout: 20 * time.Second})
					r.Must(err)
					s := gpuStream(r)
					size := int64(n) * (limit + 64)
					src, err := r.Heap.Alloc(size)
					r.Must(err)
					sym, err := r.Heap.Alloc(size)
					r.Must(err)
					rnd := rand.New(rand.NewPCG(11, uint64(n)))
					for call := range 12 {
						m := matrix(rnd, n, limit)
						need := total(column(m, r.Rank()))
						dst := sym.View().Slice(int64(call%5*3), need+int64(call%3))
						c := newGPUCall(r, s, dst, src.View().Slice(int64(call%7), size-7), m, call)
						if algorithm == "copy" {
							c.sp.PeerDispls = peerDispls(m, r.Rank())
						}
						r.Must(x.Exchange(s, c.dst, c.src, c.sp))
						r.Must(s.Synchronize())
						r.Must(x.Fault())
						if err := c.check(); err != nil {
							r.Must(fmt.Errorf("call %d: %w", call, err))
						}
					}
					r.Must(s.Close())
					r.Must(x.Close(r.Ctx))
				})
			})
		}
	}
}

// Skewed calls that are large enough for an order of their own, with a popular rank that the order of others does not begin with.
func TestCUDA_X5_SkewedCallsInAnOrderOfTheirOwn(t *testing.T) {
	for _, n := range []int{3, 4, 8} {
		for _, algorithm := range algorithms(n) {
			if algorithm != "ring" && algorithm != "copy" {
				continue
			}
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				m := make([][]int64, n)
				for from := range m {
					for to := range n {
						popularity := (to+n-2)%n + 1 // rank 2 first
						m[from] = append(m[from], int64(18<<20/(n-1)/popularity+from))
					}
				}
				worldtest.GPUs(t, n, 192<<20, func(r *worldtest.Rank) {
					x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: algorithm, MaxSMs: 2, SlotBytes: 16 << 10, Timeout: 20 * time.Second})
					r.Must(err)
					s := gpuStream(r)
					src, err := r.Heap.Alloc(64 << 20)
					r.Must(err)
					dst, err := r.Heap.Alloc(64 << 20)
					r.Must(err)
					c := newGPUCall(r, s, dst.View().Slice(0, total(column(m, r.Rank()))), src.View(), m, 1)
					c.sp.PeerDispls = peerDispls(m, r.Rank())
					for range 3 {
						c.poison()
						r.Must(x.Exchange(s, c.dst, c.src, c.sp))
						r.Must(s.Synchronize())
						r.Must(x.Fault())
						r.Must(c.check())
					}
					r.Must(s.Close())
					r.Must(x.Close(r.Ctx))
				})
			})
		}
	}
}

func TestCUDA_GraphReplays(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{MaxSMs: 4, Timeout: 20 * time.Second})
		r.Must(err)
		s := gpuStream(r)
		src, err := r.Heap.Alloc(4 << 20)
		r.Must(err)
		dst, err := r.Heap.Alloc(4 << 20)
		r.Must(err)
		for i, m := range [][][]int64{{{5, 300}, {17, 3}}, {{1000, 900001}, {700003, 0}}} {
			need := total(column(m, r.Rank()))
			c := newGPUCall(r, s, dst.View().Slice(0, need), src.View(), m, i)
			g, err := s.(*device.CUDAStream).Capture(func() error {
				for range 3 {
					if err := x.Exchange(s, c.dst, c.src, c.sp); err != nil {
						return err
					}
				}
				return nil
			})
			r.Must(err)
			r.Barrier() // to make a graph may wait in the driver for a kernel on that GPU, which may wait for this rank
			for range 20 {
				c.poison()
				r.Must(g.Launch(s))
				r.Must(s.Synchronize())
				r.Must(x.Fault())
				r.Must(c.check())
			}
			r.Must(g.Close())
		}
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	})
}

func TestCUDA_NoSMsIsRefusedWhereCopyEnginesCannot(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{NoSMs: true, PacketBytes: -1})
		r.Must(err)
		b, err := r.Heap.Alloc(4000)
		r.Must(err)
		sp := &alltoallv.Splits{Send: []int64{500, 500}, Recv: []int64{500, 500}}
		err = x.Exchange(nil, b.View().Slice(0, 1000), b.View().Slice(2000, 1000), sp)
		if !errors.Is(err, alltoallv.ErrInvalid) {
			r.Must(fmt.Errorf("got %v", err))
		}
		sp.PeerDispls = []int64{500 * int64(r.Rank()), 500 * int64(r.Rank())}
		r.Must(x.Exchange(nil, b.View().Slice(0, 1000), b.View().Slice(2000, 1000), sp))
		r.Must(x.Close(r.Ctx))
	})
}

func TestCUDA_Barrier(t *testing.T) { worldtest.GPUs(t, 2, 64<<20, nobodyLeavesEarly(2)) }

func TestCUDA_CountsAndInlineCalls(t *testing.T) {
	worldtest.GPUs(t, 3, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 20 * time.Second})
		r.Must(err)
		send, recv := make([]int64, 3), make([]int64, 3)
		for p := range send {
			send[p] = int64(100*r.Rank() + p)
		}
		r.Must(x.Counts(nil, send, recv))
		for p := range recv {
			if recv[p] != int64(100*p+r.Rank()) {
				r.Must(fmt.Errorf("counts %v", recv))
			}
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestCUDA_F3_DisagreementOnCountsIsNamed(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{MaxSMs: 2, Timeout: 5 * time.Second})
		r.Must(err)
		b, err := r.Heap.Alloc(2 << 20)
		r.Must(err)
		src, dst := b.View().Slice(0, 1<<20), b.View().Slice(1<<20, 1<<20)
		sp, bad := &alltoallv.Splits{Send: []int64{0, 0}, Recv: []int64{0, 0}}, uint64(1)
		if r.Rank() == 0 {
			sp.Send[1] = 300000
		} else {
			sp.Recv[0] = 300001
		}
		err = x.Exchange(nil, dst, src, sp)
		var mismatch *kernels.CountMismatchError
		if r.Rank() == 1 && (!errors.As(err, &mismatch) || mismatch.Sent != 300000 || mismatch.Expected != 300001) {
			r.Must(fmt.Errorf("got %v", err))
		}
		if r.Rank() == 0 {
			r.Must(err) // it was a packet: its sender hears in the next call
		}
		r.Barrier()
		for _, n := range []int64{300000, 1000000} {
			good := &alltoallv.Splits{Send: []int64{10, n}, Recv: []int64{10, n}}
			if r.Rank() == 1 {
				good = &alltoallv.Splits{Send: []int64{n, 10}, Recv: []int64{n, 10}}
			}
			for call := range 2 {
				err = x.Exchange(nil, dst, src, good)
				if r.Rank() == 0 && call == 0 {
					mismatch = nil
					if !errors.As(err, &mismatch) || *mismatch != (kernels.CountMismatchError{Src: 0, Dst: 1, Epoch: bad, Sent: 300000, Expected: 300001}) {
						r.Must(fmt.Errorf("the sender got %v", err))
					}
					continue
				}
				r.Must(err)
			}
			bad += 3
			err = x.Exchange(nil, dst, src, sp)
			if r.Rank() == 1 && !errors.As(err, &mismatch) {
				r.Must(fmt.Errorf("got %v", err))
			}
		}
		if err = x.Barrier(nil); r.Rank() == 0 && errors.As(err, &mismatch) {
			err = nil
		}
		r.Must(err)
		r.Must(x.Fault())
		r.Must(x.Close(r.Ctx))
	})
}

func TestCUDA_F1_DeadlineNamesThePeer(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 200 * time.Millisecond})
		r.Must(err)
		b, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		if r.Rank() == 1 {
			time.Sleep(time.Second) // does not call
			return
		}
		one := []int64{1, 1}
		err = x.Exchange(nil, b.View().Slice(0, 2), b.View().Slice(100, 2), &alltoallv.Splits{Send: one, Recv: one})
		var pe *comm.PeerError
		if !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 {
			r.Must(fmt.Errorf("got %v", err))
		}
	})
}

func TestCUDA_F2_AbortEndsWaits(t *testing.T) {
	worldtest.GPUs(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
		r.Must(err)
		b, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		r.Barrier()
		if r.Rank() == 1 {
			time.Sleep(200 * time.Millisecond)
			r.Group.Abort(errors.New("pulled the plug"))
			return
		}
		one := []int64{1, 1}
		start := time.Now()
		err = x.Exchange(nil, b.View().Slice(0, 2), b.View().Slice(100, 2), &alltoallv.Splits{Send: one, Recv: one})
		var pe *comm.PeerError
		if !errors.As(err, &pe) || time.Since(start) > 10*time.Second {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}
