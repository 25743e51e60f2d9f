package alltoallv_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// matrix draws a split matrix that is the same on every rank: what each rank sends to each, in elements.
func matrix(rnd *rand.Rand, n int, limit int64) [][]int64 {
	m := make([][]int64, n)
	for i := range m {
		m[i] = make([]int64, n)
		for j := range m[i] {
			switch rnd.IntN(4) {
			case 0: // nothing
			case 1:
				m[i][j] = []int64{1, 2, 3, 5, 15, 17, 127, 128, 129}[rnd.IntN(9)]
			default:
				m[i][j] = rnd.Int64N(limit + 1)
			}
		}
	}
	return m
}

func column(m [][]int64, k int) []int64 {
	c := make([]int64, len(m))
	for i := range m {
		c[i] = m[i][k]
	}
	return c
}

func total(v []int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

// exchange runs one call of the matrix m (elements of elem bytes) on rank r, from and to the given memory, and checks
// every byte. dst and src may be larger than needed.
func exchange(r *worldtest.Rank, x *alltoallv.Exchanger, s device.Stream, dst, src memory.View, m [][]int64, elem int64, call int) error {
	me := r.Rank()
	sp := &alltoallv.Splits{Send: m[me], Recv: column(m, me), ElemSize: elem}
	in, out := src.Bytes(), dst.Bytes()
	var at int64
	for p, n := range sp.Send {
		for i := range n * elem {
			in[at+i] = worldtest.Element(call, me, p, i)
		}
		at += n * elem
	}
	for i := range out {
		out[i] = 0xa5
	}
	if err := x.Exchange(s, dst, src, sp); err != nil {
		return err
	}
	if s != nil {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	// The source is ours again: late reads would show on the receivers.
	for i := range in {
		in[i] = 0x5a
	}
	at = 0
	for p, n := range sp.Recv {
		if err := worldtest.Check(out[at:at+n*elem], call, p, me); err != nil {
			return err
		}
		at += n * elem
	}
	for i := at; i < int64(len(out)); i++ {
		if out[i] != 0xa5 {
			return fmt.Errorf("call %d wrote behind the output, at %d of %d", call, i, at)
		}
	}
	return nil
}

// random runs a few calls of random splits through every kind of buffer, twice each, so that the second is warm.
func random(r *worldtest.Rank, o alltoallv.Options, seed uint64, calls int, limit int64) {
	x, err := alltoallv.New(r.Ctx, r.Heap, o)
	r.Must(err)
	n := int64(r.Size())
	// Unaligned on purpose, and differently on every rank.
	src := memory.Host(make([]byte, n*limit+64)[r.Rank()%7:])
	symSrc, err := r.Heap.Alloc(n*limit + 64)
	r.Must(err)
	symDst, err := r.Heap.Alloc(n*limit + 64)
	r.Must(err)
	rnd := rand.New(rand.NewPCG(seed, 7))
	call := 0
	for range calls {
		elem := []int64{1, 1, 2, 4, 8, 12}[rnd.IntN(6)]
		m := matrix(rnd, r.Size(), limit/elem)
		for range 2 {
			for kind := range 3 {
				call++
				need := total(column(m, r.Rank()))*elem + int64(kind)
				from, to := src, memory.Host(make([]byte, need+3)[3:])
				if kind > 0 {
					from = symSrc.View().Slice(3, n*limit)
					to = symDst.View().Slice(int64(r.Rank()%5), need)
				}
				if kind == 2 {
					from = src
				}
				if err := exchange(r, x, nil, to, from, m, elem, call); err != nil {
					r.Must(fmt.Errorf("kind %d, element %d bytes, splits %v: %w", kind, elem, m, err))
				}
			}
		}
	}
	r.Must(x.Close(r.Ctx))
	r.Must(x.Close(r.Ctx))
	r.Must(errors.Join(symSrc.Free(), symDst.Free()))
}

func TestX5_RandomSplitsAgainstReference(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for n := 1; n <= 9; n++ {
		for _, algorithm := range []string{"", "packet", "direct", "pipelined", "ring"} {
			t.Run(fmt.Sprintf("ranks=%d/%s", n, algorithm), func(t *testing.T) {
				limit := int64(4 << 10)
				if n <= 4 {
					limit = 64 << 10
				}
				worldtest.Local(t, n, 64<<20, func(r *worldtest.Rank) {
					random(r, alltoallv.Options{Algorithm: algorithm, EagerBytes: 1000, SlotBytes: 2048, Slots: 3}, seed, 4, limit)
				})
			})
		}
	}
}

func TestX5_UpToOneMiB(t *testing.T) {
	worldtest.Local(t, 3, 128<<20, func(r *worldtest.Rank) { random(r, alltoallv.Options{}, 3, 6, 1<<20) })
}

func TestX5_AcrossProcesses(t *testing.T) {
	for _, n := range []int{2, 3, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			worldtest.Procs(t, n, 64<<20, func(r *worldtest.Rank) {
				for i, algorithm := range []string{"", "ring", "pipelined"} {
					random(r, alltoallv.Options{Algorithm: algorithm}, uint64(i), 5, 100<<10)
				}
			})
		})
	}
}

func TestX5_MoreThanFourGiBInTotal(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 9 GiB of memory")
	}
	const n, part = 2, 1<<31 + 12345
	worldtest.Local(t, n, 2*part+64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		src, err := r.Heap.Alloc(part)
		r.Must(err)
		dst, err := r.Heap.Alloc(part)
		r.Must(err)
		// 64-bit values unique to sender and place.
		words := func(b []byte, check bool, from int) {
			for i := 0; i+8 <= len(b); i += 8 {
				w := uint64(from+1)<<48 + uint64(i)
				for k := range 8 {
					if check && b[i+k] != byte(w>>(8*k)) {
						r.Must(fmt.Errorf("byte %d is %#x", i+k, b[i+k]))
					}
					if !check {
						b[i+k] = byte(w >> (8 * k))
					}
				}
			}
		}
		me, other := r.Rank(), 1-r.Rank()
		words(src.Bytes(), false, me)
		sp := &alltoallv.Splits{Send: make([]int64, n), Recv: make([]int64, n)}
		sp.Send[other], sp.Recv[other] = part, part
		r.Must(x.Exchange(nil, dst.View(), src.View(), sp))
		words(dst.Bytes(), true, other)
		r.Must(x.Close(r.Ctx))
	})
}

func TestX1_ZeroBytesSignalAndWaitOnce(t *testing.T) {
	worldtest.Local(t, 4, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		none := make([]int64, r.Size())
		var arrived atomic.Int32
		all, err := r.Group.Share(r.Ctx, &arrived)
		r.Must(err)
		counter := all[0].(*atomic.Int32)
		for call := range 200 {
			counter.Add(1)
			r.Must(x.Exchange(nil, memory.View{}, memory.View{}, &alltoallv.Splits{Send: none, Recv: none}))
			// Nobody leaves an exchange of nothing before all have come.
			if got := int(counter.Load()); got < (call+1)*r.Size() {
				r.Must(fmt.Errorf("call %d: left after %d arrivals", call, got))
			}
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestX2_CachesNeedNoAgreement(t *testing.T) {
	worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
		// Caches of different sizes: a hit on one rank is a miss on another.
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{CacheEntries: 1 + 3*r.Rank()})
		r.Must(err)
		buf, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		src := memory.Host(make([]byte, 1<<20))
		base := [][]int64{{10, 2000, 30}, {40, 50, 60000}, {70, 80, 90}}
		for call := range 60 {
			m := [][]int64{append([]int64(nil), base[0]...), append([]int64(nil), base[1]...), append([]int64(nil), base[2]...)}
			switch call % 4 {
			case 1: // only rank 0's row changes, and of the others only what they get from it
				m[0][0] = int64(11 + call)
			case 2: // rank 1 gets more from rank 0: displacements of what it gets from rank 2 move
				m[0][1] = int64(20000 + call)
			}
			r.Must(exchange(r, x, nil, buf.View(), src, m, 1, call))
		}
		st := x.CacheStats()
		if r.Rank() == 2 && st.Hits == 0 || r.Rank() == 0 && st.Misses < 30 {
			r.Must(fmt.Errorf("the caches did not differ as meant: %+v", st))
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestX3_SlowConsumer(t *testing.T) {
	worldtest.Local(t, 3, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{EagerBytes: 4096, SlotBytes: 4096, Slots: 2})
		r.Must(err)
		sym, err := r.Heap.Alloc(1 << 20)
		r.Must(err)
		foreign, src := memory.Host(make([]byte, 1<<20)), memory.Host(make([]byte, 1<<20))
		rnd := rand.New(rand.NewPCG(5, 5))
		for call := range 60 {
			m := matrix(rnd, 3, 30000)
			if r.Rank() == call%3 {
				time.Sleep(2 * time.Millisecond) // the others run ahead as far as they may
			}
			dst := foreign
			if call%2 == 0 {
				dst = sym.View()
			}
			r.Must(exchange(r, x, nil, dst, src, m, 1, call))
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestX7_StagingIsNotRewrittenBeforeItsCopy(t *testing.T) {
	// One slot a pair and messages of many chunks: every chunk reuses the slot of the one before.
	worldtest.Local(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: "pipelined", EagerBytes: -1, PacketBytes: -1, SlotBytes: 128, Slots: 1})
		r.Must(err)
		src, dst := memory.Host(make([]byte, 1<<18)), memory.Host(make([]byte, 1<<18))
		for call := range 10 {
			r.Must(exchange(r, x, nil, dst, src, [][]int64{{0, 100001}, {50003, 1}}, 1, call))
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestX9_ChangingSplitsKeepMemoryFlat(t *testing.T) {
	calls := 60000
	if testing.Short() {
		calls = 3000
	}
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		buf, err := r.Heap.Alloc(1 << 16)
		r.Must(err)
		src := memory.Host(make([]byte, 1<<16))
		sp := &alltoallv.Splits{Send: make([]int64, 2), Recv: make([]int64, 2)}
		me, other := r.Rank(), 1-r.Rank()
		var before int64
		for call := range calls {
			if call == calls/10 {
				before = heapInUse()
			}
			sp.Send[me], sp.Recv[me] = int64(call%7), int64(call%7)
			sp.Send[other], sp.Recv[other] = int64((call*31+me)%3000), int64((call*31+other)%3000)
			r.Must(x.Exchange(nil, buf.View(), src, sp))
		}
		if grown := heapInUse() - before; grown > 4<<20 {
			r.Must(fmt.Errorf("Go memory grew by %d bytes over %d calls", grown, calls))
		}
		if st := x.CacheStats(); st.Entries > 256 {
			r.Must(fmt.Errorf("the cache holds %d entries", st.Entries))
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestX8_RingFinishesForEveryWorld(t *testing.T) {
	for n := 2; n <= 64; n++ {
		if testing.Short() && n > 9 && n != 64 {
			continue
		}
		worldtest.Local(t, n, 32<<20, func(r *worldtest.Rank) {
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Algorithm: "ring", EagerBytes: -1, PacketBytes: -1, SlotBytes: 1024, Slots: 1})
			r.Must(err)
			m := make([][]int64, n)
			for i := range m {
				m[i] = make([]int64, n)
				for j := range m[i] {
					m[i][j] = int64((i*7 + j*3) % 200)
				}
			}
			src, dst := memory.Host(make([]byte, 200*n)), memory.Host(make([]byte, 200*n))
			for call := range 2 {
				r.Must(exchange(r, x, nil, dst, src, m, 1, call))
			}
			r.Must(x.Close(r.Ctx))
		})
	}
}

func TestSixtyFourRanksInOneProcess(t *testing.T) {
	worldtest.Local(t, 64, 128<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		rnd := rand.New(rand.NewPCG(64, 64))
		src, dst := memory.Host(make([]byte, 64*3000)), memory.Host(make([]byte, 64*3000))
		for call := range 5 {
			r.Must(exchange(r, x, nil, dst, src, matrix(rnd, 64, 3000), 1, call))
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestTwoGroupsOnOneHeapFromTwoStreams(t *testing.T) {
	worldtest.Local(t, 4, 128<<20, func(r *worldtest.Rank) {
		var xs [2]*alltoallv.Exchanger
		var streams [2]device.Stream
		for i := range xs {
			var err error
			xs[i], err = alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
			r.Must(err)
			streams[i], err = device.Host().NewStream()
			r.Must(err)
		}
		done := make(chan error, 2)
		for i := range xs {
			go func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 1))
				src, dst := memory.Host(make([]byte, 1<<18)), memory.Host(make([]byte, 1<<18))
				for call := range 40 {
					if err := exchange(r, xs[i], streams[i], dst, src, matrix(rnd, 4, 40000), 1, call+1000*i); err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
		}
		err := errors.Join(<-done, <-done)
		r.Must(err)
		for i := range xs {
			r.Must(streams[i].Close())
			r.Must(xs[i].Close(r.Ctx))
		}
	})
}

func TestStreamsOrderOneExchanger(t *testing.T) {
	worldtest.Local(t, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		var streams [3]device.Stream // the third is nil: inline
		for i := range 2 {
			streams[i], err = device.Host().NewStream()
			r.Must(err)
		}
		// A chain: the output of each call is the input of the next, on changing streams.
		a, err := r.Heap.Alloc(40000)
		r.Must(err)
		b, err := r.Heap.Alloc(40000)
		r.Must(err)
		for i := range a.Bytes() {
			a.Bytes()[i] = byte(i*3 + r.Rank())
		}
		want := append([]byte(nil), a.Bytes()...)
		sp := &alltoallv.Splits{Send: []int64{20000, 20000}, Recv: []int64{20000, 20000}}
		for i := range 20 { // an even number of transpositions is the identity
			from, to := a, b
			if i%2 == 1 {
				from, to = b, a
			}
			r.Must(x.Exchange(streams[(i*2+i/5)%3], to.View(), from.View(), sp))
		}
		r.Must(x.Exchange(nil, b.View(), a.View(), sp))
		if string(a.Bytes()) != string(want) {
			r.Must(errors.New("the chain is out of order"))
		}
		for _, s := range streams[:2] {
			r.Must(s.Close())
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestBarrier(t *testing.T) { worldtest.Local(t, 4, 32<<20, nobodyLeavesEarly(4)) }

// nobodyLeavesEarly checks that no rank leaves a barrier before all have come.
func nobodyLeavesEarly(size int) func(r *worldtest.Rank) {
	var came atomic.Int64
	return func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
		r.Must(err)
		s, err := r.Heap.Device().NewStream()
		r.Must(err)
		for call := range 20 {
			time.Sleep(time.Duration((r.Rank()+call)%size) * time.Millisecond)
			came.Add(1)
			if call%2 == 0 {
				r.Must(x.Barrier(nil))
			} else {
				r.Must(x.Barrier(s))
				r.Must(s.Synchronize())
			}
			if n := came.Load(); n < int64(size*(call+1)) {
				r.Must(fmt.Errorf("barrier %d ended when %d had come", call, n))
			}
		}
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	}
}

func TestF1_DeadlineNamesThePeer(t *testing.T) {
	one := []int64{1, 1, 1}
	for name, call := range map[string]func(x *alltoallv.Exchanger) error{
		"alltoallv": func(x *alltoallv.Exchanger) error {
			return x.Exchange(nil, memory.Host(make([]byte, 3)), memory.Host(make([]byte, 3)), &alltoallv.Splits{Send: one, Recv: one})
		},
		"barrier": func(x *alltoallv.Exchanger) error { return x.Barrier(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			var waited sync.WaitGroup
			waited.Add(2)
			worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
				x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: proctest.Scaled(500 * time.Millisecond)})
				r.Must(err)
				r.Barrier()
				if r.Rank() == 1 {
					waited.Wait() // does not call
					return
				}
				defer waited.Done()
				err = call(x)
				var pe *comm.PeerError
				if !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 || pe.Epoch != 1 || pe.Op != name {
					r.Must(fmt.Errorf("got %v", err))
				}
				if err := x.Exchange(nil, memory.View{}, memory.View{}, &alltoallv.Splits{Send: one, Recv: one}); !errors.Is(err, comm.ErrTimeout) {
					r.Must(fmt.Errorf("a broken exchanger went on: %v", err))
				}
			})
		})
	}
}

func TestF2_AbortEndsWaits(t *testing.T) {
	var others sync.WaitGroup // that are past the barrier, which would end with the abort
	others.Add(2)
	worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 5 * time.Minute})
		r.Must(err)
		r.Barrier()
		if r.Rank() == 2 {
			others.Wait()
			time.Sleep(30 * time.Millisecond)
			r.Group.Abort(errors.New("pulled the plug"))
			return
		}
		others.Done()
		one := []int64{1, 1, 1}
		start := time.Now()
		err = x.Exchange(nil, memory.Host(make([]byte, 3)), memory.Host(make([]byte, 3)), &alltoallv.Splits{Send: one, Recv: one})
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != 2 || time.Since(start) > time.Minute {
			t.Errorf("rank %d: got %v after %v", r.Rank(), err, time.Since(start))
		}
	})
}

func TestF3_BadArgumentsAreRefusedWithTheirValues(t *testing.T) {
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		freed, err := r.Heap.Alloc(100)
		r.Must(err)
		stale := freed.View()
		r.Must(freed.Free())
		b := memory.Host(make([]byte, 100))
		c := memory.Host(make([]byte, 100))
		ok, empty := []int64{1, 1}, []int64{0, 0}
		f32, f64 := memory.Wrap(make([]float32, 8)), memory.Wrap(make([]float64, 4))
		for _, bad := range []struct {
			dst, src memory.View
			s        *alltoallv.Splits
			says     string
			is       error
		}{
			{b, c, nil, "nil splits", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: []int64{-3, 0}, Recv: ok}, "-3", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: ok, Recv: []int64{1}}, "1 receive splits for 2 ranks", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: []int64{math.MaxInt64, 1}, Recv: ok}, "overflows", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: []int64{1 << 61, 1 << 61}, Recv: ok, ElemSize: 4}, "overflows", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: ok, Recv: ok, ElemSize: -1}, "element size -1", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: ok, Recv: ok, SendDispls: []int64{0}}, "1 send displacements", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: ok, Recv: ok, RecvDispls: []int64{0, -7}}, "-7", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: []int64{2, 2}, Recv: []int64{2, 2}, RecvDispls: []int64{0, 1}}, "overlap", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: []int64{60, 60}, Recv: []int64{60, 60}}, "100 bytes", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: []int64{50, 50}, Recv: []int64{50, 50}, RecvDispls: []int64{0, 51}}, "need 101", alltoallv.ErrInvalid},
			{b, b, &alltoallv.Splits{Send: ok, Recv: ok}, "overlap", alltoallv.ErrInvalid},
			{stale, b, &alltoallv.Splits{Send: ok, Recv: ok}, "freed", memory.ErrFreed},
			{b, stale, &alltoallv.Splits{Send: ok, Recv: ok}, "freed", memory.ErrFreed},
			{b.Slice(0, 1), c.Slice(0, 1), &alltoallv.Splits{Send: empty, Recv: empty, SendDispls: []int64{0, 2}}, "the source has 1 bytes, the send splits [0 0] at [0 2] of 1-byte elements need 2", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: empty, Recv: empty, RecvDispls: []int64{101, 0}}, "the destination has 100 bytes, the receive splits [0 0] at [101 0]", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: empty, Recv: empty, ElemSize: 8, SendDispls: []int64{0, 1 << 61}}, "overflows", alltoallv.ErrInvalid},
			{b, c, &alltoallv.Splits{Send: ok, Recv: ok, Limits: alltoallv.Limits{MaxSMs: 1 << 32}}, "MaxSMs is 4294967296", alltoallv.ErrInvalid},
			{f32, f64, &alltoallv.Splits{Send: ok, Recv: ok, ElemSize: 8}, "the source has elements of float64, the destination of float32", alltoallv.ErrInvalid},
			{b, f64, &alltoallv.Splits{Send: ok, Recv: ok, ElemSize: 4}, "elements of float64, the send splits [1 1] of 4-byte elements cut one", alltoallv.ErrInvalid},
			{f64, f64, &alltoallv.Splits{Send: ok, Recv: ok, ElemSize: 8, SendDispls: []int64{0, 4}}, "need 40", alltoallv.ErrInvalid},
			{f32, b, &alltoallv.Splits{Send: []int64{4, 4}, Recv: []int64{4, 4}, RecvDispls: []int64{0, 6}}, "elements of float32, the receive splits [4 4] at [0 6] of 1-byte elements cut one", alltoallv.ErrInvalid},
		} {
			err := x.Exchange(nil, bad.dst, bad.src, bad.s)
			if err == nil || !errors.Is(err, bad.is) {
				r.Must(fmt.Errorf("%+v: got %v, want %v", bad.s, err, bad.is))
			}
			require.ErrorContains(r.T, err, bad.says)
		}
		var none *device.HostStream
		for _, err := range []error{x.Exchange(none, b, c, &alltoallv.Splits{Send: ok, Recv: ok}), x.Barrier(none), x.Counts(none, ok, make([]int64, 2))} {
			require.ErrorIs(r.T, err, alltoallv.ErrInvalid)
			require.ErrorContains(r.T, err, "the stream is a nil *device.HostStream")
		}
		_, err = alltoallv.New(r.Ctx, nil, alltoallv.Options{})
		require.ErrorIs(r.T, err, alltoallv.ErrInvalid)
		require.ErrorContains(r.T, err, "the heap is nil")
		err = x.Counts(nil, []int64{4, -5}, make([]int64, 2))
		require.ErrorIs(r.T, err, alltoallv.ErrInvalid)
		require.ErrorContains(r.T, err, "the count for rank 1 is -5")
		if r.Rank() == 0 {
			uneven := []int64{2, 1}
			if err := x.Exchange(nil, b, c, &alltoallv.Splits{Send: uneven, Recv: ok}); !errors.Is(err, alltoallv.ErrInvalid) {
				r.Must(fmt.Errorf("own part: %v", err))
			}
		}
		// Nothing of this has happened: the next call works.
		r.Must(exchange(r, x, nil, b, c, [][]int64{{1, 2}, {3, 4}}, 1, 1))
		r.Must(x.Close(r.Ctx))
		if err := x.Exchange(nil, b, c, &alltoallv.Splits{Send: ok, Recv: ok}); !errors.Is(err, alltoallv.ErrClosed) {
			r.Must(fmt.Errorf("closed: %v", err))
		}
	})
}

func TestF3_DisagreementOnCountsIsNamed(t *testing.T) {
	for _, pair := range [][2]int64{{5, 6}, {0, 100}, {100, 5000}, {5000, 100}, {5000, 60000}, {60000, 5000}, {60000, 61000}, {60000, 0}, {10, 60000}, {60000, 10}, {12, 16}, {0, 16}, {16, 0}, {100, 100000}} {
		for _, validate := range []bool{false, true} {
			for _, inPlace := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d_%d/validate=%v/inplace=%v", pair[0], pair[1], validate, inPlace), func(t *testing.T) {
					worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
						x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{EagerBytes: 8 << 10, Validate: validate, Timeout: time.Minute})
						r.Must(err)
						buf, err := r.Heap.Alloc(1 << 20)
						r.Must(err)
						dst := memory.Host(make([]byte, 1<<20))
						if inPlace {
							dst = buf.View()
						}
						src := memory.Host(make([]byte, 1<<20))
						sp := &alltoallv.Splits{Send: []int64{0, 0, 0}, Recv: []int64{0, 0, 0}}
						if r.Rank() == 0 {
							sp.Send[1] = pair[0]
						}
						if r.Rank() == 1 {
							sp.Recv[0] = pair[1]
						}
						err = x.Exchange(nil, dst, src, sp)
						var mismatch *kernels.CountMismatchError
						switch {
						case validate:
							if !errors.Is(err, comm.ErrMismatch) {
								r.Must(fmt.Errorf("got %v", err))
							}
							require.ErrorContains(r.T, err, fmt.Sprintf("rank 0 sends %d bytes to rank 1, which expects %d", pair[0], pair[1]))
						case r.Rank() == 1:
							if !errors.Is(err, comm.ErrMismatch) || !errors.As(err, &mismatch) || mismatch.Src != 0 || mismatch.Dst != 1 || mismatch.Sent != uint64(pair[0]) || mismatch.Expected != uint64(pair[1]) {
								r.Must(fmt.Errorf("got %v", err))
							}
						case r.Rank() == 2:
							r.Must(err)
						case err != nil && !errors.As(err, &mismatch):
							r.Must(fmt.Errorf("sender got %v", err))
						}
						// The exchanger is as good as before. The sender knows by the end of the next call.
						told := 0
						if !validate && err != nil {
							told++
						}
						for call := range 3 {
							err := exchange(r, x, nil, dst, src, [][]int64{{1, 60000, 3}, {300, 0, 9000}, {5, 6, 7}}, 1, call)
							if r.Rank() == 0 && call == 0 && errors.As(err, &mismatch) {
								require.Equal(r.T, kernels.CountMismatchError{Src: 0, Dst: 1, Sent: uint64(pair[0]), Expected: uint64(pair[1]), Epoch: 1}, *mismatch)
								told++
								continue
							}
							r.Must(err)
						}
						if !validate && r.Rank() < 2 {
							require.Equal(r.T, 1, told, "rank %d", r.Rank())
						}
						r.Must(x.Close(r.Ctx))
					})
				})
			}
		}
	}
}

func TestF3_DifferentOptionsAreNamed(t *testing.T) {
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{EagerBytes: int64(1000 * (1 + r.Rank()))})
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "eager to 1000")
		require.ErrorContains(r.T, err, "eager to 2000")
	})
}

func TestF3_OneRanksLackOfMemoryIsEveryRanksError(t *testing.T) {
	worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
		odd := func(n int64) error {
			if r.Rank() == 1 {
				b, err := r.Heap.Alloc(n)
				r.Must(err)
				defer func() { r.Must(b.Free()) }()
			}
			_, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
			return err
		}
		err := odd(r.Heap.Stats().LargestFree)
		require.ErrorIs(r.T, err, memory.ErrOutOfMemory)
		require.ErrorContains(r.T, err, "rank 1")
		err = odd(1000) // has its room elsewhere
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "offset")
		require.Zero(r.T, r.Heap.Stats().InUse)
	})
}

func TestCounts(t *testing.T) {
	worldtest.Local(t, 4, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		for call := range 5 {
			send, recv := make([]int64, 4), make([]int64, 4)
			for p := range send {
				send[p] = int64(1000*r.Rank() + 10*p + call)
			}
			r.Must(x.Counts(nil, send, recv))
			for p := range recv {
				if want := int64(1000*p + 10*r.Rank() + call); recv[p] != want {
					r.Must(fmt.Errorf("from rank %d: %d, want %d", p, recv[p], want))
				}
			}
		}
		r.Must(x.Close(r.Ctx))
	})
}

func TestF3_ClosedGroupIsRefused(t *testing.T) {
	worldtest.Local(t, 2, 32<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		r.Barrier()
		r.Must(r.Group.Close())
		one := []int64{1, 1}
		err = x.Exchange(nil, memory.Host(make([]byte, 2)), memory.Host(make([]byte, 2)), &alltoallv.Splits{Send: one, Recv: one})
		require.ErrorIs(r.T, err, comm.ErrClosed)
	})
}

// Close ends with its context while an exchange on a stream, and one behind it, wait for a rank that does not call.
func TestF1_CloseEndsWithItsContext(t *testing.T) {
	t.Parallel() // it mostly waits
	run := func(t *testing.T, world func(testing.TB, int, int64, func(*worldtest.Rank))) {
		for _, bytes := range []int64{8, 1 << 20} {
			world(t, 2, 64<<20, func(r *worldtest.Rank) {
				x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: 5 * time.Minute})
				r.Must(err)
				b, err := r.Heap.Alloc(4 * bytes)
				r.Must(err)
				s, err := r.Device.NewStream()
				r.Must(err)
				r.Barrier()
				if r.Rank() == 0 {
					parts := []int64{bytes, bytes}
					for range 2 {
						r.Must(x.Exchange(s, b.View().Slice(0, 2*bytes), b.View().Slice(2*bytes, 2*bytes), &alltoallv.Splits{Send: parts, Recv: parts}))
					}
				}
				ctx, cancel := context.WithTimeout(r.Ctx, 300*time.Millisecond)
				defer cancel()
				start := time.Now()
				err = x.Close(ctx)
				if took := time.Since(start); took > time.Minute || errors.Is(err, kernels.ErrRunning) {
					r.Must(fmt.Errorf("close after %v: %w", took, err))
				}
				if r.Rank() == 0 {
					require.ErrorIs(r.T, err, context.DeadlineExceeded)
				}
				s.Synchronize()
				r.Must(s.Close())
			})
		}
	}
	t.Run("host", func(t *testing.T) { run(t, worldtest.Local) })
	t.Run("cuda", func(t *testing.T) { run(t, worldtest.GPUs) })
}
