package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

func init() { worldtest.Unseen() }

const segment = 16 << 20

// endpoint makes an Endpoint that ends with the test.
func endpoint(r *worldtest.Rank, o p2p.Options) *p2p.Endpoint {
	r.T.Helper()
	x, err := p2p.New(r.Ctx, r.Heap, o)
	r.Must(err)
	return x
}

func alloc(r *worldtest.Rank, n int64) memory.View {
	r.T.Helper()
	b, err := r.Heap.Alloc(n)
	r.Must(err)
	return b.View()
}

func fill(b []byte, call, src, dst int) {
	for i := range b {
		b[i] = worldtest.Element(call, src, dst, int64(i))
	}
}

// piece is one put of the model: part of a rank's room in its receiver's inbox.
type piece struct {
	off, n    int64
	semaphore int
	foreign   bool // its source is no memory of the heap
}

// plan is what src puts to dst in a round. All ranks draw the same.
func plan(round, src, dst int, room int64, semaphores int) (pieces []piece) {
	rnd := rand.New(rand.NewPCG(uint64(round), uint64(src*64+dst)))
	var at int64
	for range rnd.IntN(5) {
		n := rnd.Int64N(1 << rnd.IntN(17))
		if at += rnd.Int64N(70); at+n > room {
			break
		}
		pieces = append(pieces, piece{at, n, rnd.IntN(semaphores), rnd.IntN(2) == 0})
		at += n
	}
	return pieces
}

// In every round each rank puts pieces to each other in an order of its own and signals them one by one. The receiver consumes all signals, in
// another order, and finds its whole inbox as the model has it; then it reads the same pieces where their senders have them.
func putsAndGets(rounds int) func(r *worldtest.Rank) {
	const room, semaphores = 160 << 10, 3
	return func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Semaphores: semaphores + 2})
		n, me := r.Size(), r.Rank()
		inbox, outbox := alloc(r, room*int64(n)), alloc(r, room*int64(n))
		model := make([]byte, room*n)
		s, err := r.Device.NewStream()
		r.Must(err)
		rnd := rand.New(rand.NewPCG(77, uint64(me)))
		streams := []device.Stream{nil, s}
		for round := range rounds {
			// A put goes to where this rank's room lies in the peer's inbox, from the peer's room in the outbox.
			for _, i := range rnd.Perm(n - 1) {
				peer := (me + 1 + i) % n
				on := streams[rnd.IntN(2)]
				for _, c := range plan(round, me, peer, room, semaphores) {
					src := outbox.Slice(int64(peer)*room+c.off, c.n)
					fill(src.Bytes(), round, me, peer)
					if c.foreign {
						b := make([]byte, c.n)
						copy(b, src.Bytes())
						src = memory.Host(b)
					}
					r.Must(x.Put(on, peer, inbox.Slice(int64(me)*room+c.off, c.n), src))
					r.Must(x.Signal(on, peer, c.semaphore))
				}
			}
			for _, i := range rnd.Perm(n - 1) {
				peer := (me + 1 + i) % n
				pieces := plan(round, peer, me, room, semaphores)
				for _, i := range rnd.Perm(len(pieces)) {
					r.Must(x.Wait(nil, peer, pieces[i].semaphore))
				}
				for _, c := range pieces {
					at := int64(peer)*room + c.off
					fill(model[at:at+c.n], round, peer, me)
					got := make([]byte, c.n)
					r.Must(x.Get(nil, peer, memory.Host(got), outbox.Slice(int64(me)*room+c.off, c.n)))
					r.Must(worldtest.Check(got, round, peer, me))
				}
			}
			require.Equal(r.T, model, inbox.Bytes(), "round %d, rank %d", round, me)
			r.Must(s.Synchronize())
			for i := range n - 1 { // a sender overwrites nothing that its receiver has not read
				r.Must(x.Signal(nil, (me+1+i)%n, semaphores))
			}
			for i := range n - 1 {
				r.Must(x.Wait(nil, (me+1+i)%n, semaphores))
			}
		}
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	}
}

func TestPutsAndGetsFollowTheModel(t *testing.T) {
	for n := 2; n <= 4; n++ {
		worldtest.Local(t, n, segment, putsAndGets(60))
	}
	t.Run("processes", func(t *testing.T) { worldtest.Procs(t, 3, segment, putsAndGets(60)) })
}

// Memory that was registered is reached like the heap's own, and no further than its rank has registered.
func TestRegisteredMemoryIsReached(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{})
		page := int64(os.Getpagesize())
		mine := page * int64(3-r.Rank()) // rank 1 has a page less
		fd, err := shm.Create("p2p", 3*page)
		r.Must(err)
		m, err := memory.MapFile(fd, 0, mine)
		r.Must(err)
		g, err := r.Heap.Register(r.Ctx, m.View())
		r.Must(err)
		if r.Rank() == 0 {
			src := make([]byte, page)
			fill(src, 1, 0, 1)
			r.Must(x.Put(nil, 1, m.View().Slice(page, page), memory.Host(src)))
			r.Must(x.Signal(nil, 1, 0))
			err := x.Put(nil, 1, m.View().Slice(page+1, page), memory.Host(src))
			require.ErrorIs(r.T, err, p2p.ErrInvalid)
			require.ErrorContains(r.T, err, fmt.Sprintf("bytes %d to %d of registered memory of which rank 1 has %d", page+1, 2*page+1, 2*page))
			r.Must(x.Get(nil, 1, memory.Host(src), g.View().Slice(0, page)))
			require.Equal(r.T, make([]byte, page), src)
		} else {
			r.Must(x.Wait(nil, 0, 0))
			r.Must(worldtest.Check(m.Bytes()[page:], 1, 0, 1))
		}
		r.Barrier()
		stale := g.View()
		r.Must(g.Deregister(r.Ctx))
		require.ErrorIs(r.T, x.Put(nil, 1-r.Rank(), stale, stale), memory.ErrFreed)
		require.ErrorIs(r.T, x.Put(nil, 1-r.Rank(), m.View(), m.View()), p2p.ErrInvalid, "it is symmetric no more")
		r.Must(x.Close(r.Ctx))
		r.Must(m.Close())
	})
}

// Each signal is consumed once, by whichever thread comes first, and none is left.
func TestEachSignalIsConsumedOnce(t *testing.T) {
	const threads, each = 4, 500
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		call := x.Signal
		if r.Rank() == 1 {
			call = x.Wait
		}
		var all sync.WaitGroup
		for range threads {
			all.Go(func() {
				for range each {
					if err := call(nil, 1-r.Rank(), 3); err != nil {
						r.T.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		r.Must(x.Close(r.Ctx))
		y := endpoint(r, p2p.Options{Timeout: time.Second}) // the same memory, and no signal in it
		if r.Rank() == 1 {
			err := y.Wait(nil, 0, 3)
			require.ErrorIs(r.T, err, comm.ErrTimeout)
			require.ErrorContains(r.T, err, "waits in barrier")
		}
		r.Barrier()
		r.Must(y.Close(r.Ctx))
	})
}

// A wait on one stream holds up no call on another, though it was called first.
func TestAWaitHoldsUpNoOtherStream(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{})
		s, err := r.Device.NewStream()
		r.Must(err)
		r.Must(x.Wait(s, 1-r.Rank(), 0))
		r.Must(x.Signal(nil, 1-r.Rank(), 1))
		r.Must(x.Wait(nil, 1-r.Rank(), 1))
		r.Must(x.Signal(nil, 1-r.Rank(), 0))
		r.Must(s.Synchronize())
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	})
}

// Of the waits in a stream only the first waits for the deadline. What it failed on is not lost: the signal that comes later is consumed by a
// later wait, and calls with other ranks have gone on all the time.
func TestF1_AWaitNamesThePeerAndLeavesOtherCallsAlone(t *testing.T) {
	var late atomic.Bool
	worldtest.Local(t, 3, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: 3 * time.Second})
		r.Barrier()
		switch r.Rank() {
		case 0:
			s, err := r.Device.NewStream()
			r.Must(err)
			start := time.Now()
			for range 20 {
				r.Must(x.Wait(s, 1, 0))
			}
			for i := range 50 {
				r.Must(x.Signal(nil, 2, 0))
				if err := x.Wait(nil, 2, 0); err != nil {
					r.Must(fmt.Errorf("turn %d with rank 2: %w", i, err))
				}
			}
			err = s.Synchronize()
			var pe *comm.PeerError
			if took := time.Since(start); !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 || took > 40*time.Second {
				r.Must(fmt.Errorf("got %v after %v", err, took)) // 60 s if each waited
			}
			require.ErrorContains(r.T, err, "wait: rank 1: timed out after 3s (semaphore 0): it has signalled 0 times, and this rank has consumed 0")
			late.Store(true)
			r.Must(x.Wait(nil, 1, 0))
		case 1:
			for !late.Load() {
				time.Sleep(time.Millisecond)
			}
			r.Must(x.Signal(nil, 0, 0))
		case 2:
			for range 50 {
				r.Must(x.Wait(nil, 0, 0))
				r.Must(x.Signal(nil, 0, 0))
			}
		}
		r.Barrier()
		r.Must(x.Close(r.Ctx))
	})
}

func TestF1_CloseEndsWithItsContext(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: 5 * time.Minute})
		s, err := r.Device.NewStream()
		r.Must(err)
		other := make(chan error, 1)
		r.Must(x.Wait(s, 1-r.Rank(), 0))
		go func() { other <- x.Wait(nil, 1-r.Rank(), 1) }()
		r.Barrier()
		ctx, cancel := context.WithTimeout(r.Ctx, 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		err = x.Close(ctx)
		require.ErrorIs(r.T, err, context.DeadlineExceeded)
		require.NotErrorIs(r.T, err, kernels.ErrRunning)
		require.Less(r.T, time.Since(start), time.Minute)
		require.Error(r.T, <-other)
		require.Error(r.T, s.Synchronize())
		require.ErrorIs(r.T, x.Signal(nil, 1-r.Rank(), 0), p2p.ErrClosed)
		r.Must(s.Close())
	})
}

func TestF2_AWaitForADeadProcessNamesIt(t *testing.T) {
	worldtest.Procs(t, 3, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		if r.Rank() == 1 {
			for _, peer := range []int{0, 2} {
				r.Must(x.Wait(nil, peer, 1))
			}
			os.Exit(0)
		}
		r.Must(x.Signal(nil, 1, 1))
		start := time.Now()
		err := x.Wait(nil, 1, 0)
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, comm.ErrPeerLost) || time.Since(start) > 40*time.Second {
			r.T.Errorf("rank %d: got %v after %v", r.Rank(), err, time.Since(start))
		}
	})
}

func TestF3_BadArgumentsAreRefusedWithTheirValues(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{})
		at, foreign, me, peer := alloc(r, 100), memory.Host(make([]byte, 100)), r.Rank(), 1-r.Rank()
		freed, err := r.Heap.Alloc(100)
		r.Must(err)
		stale := freed.View()
		r.Must(freed.Free())
		_, nilHeap := p2p.New(r.Ctx, nil, p2p.Options{})
		for i, bad := range []struct {
			err  error
			is   error
			says []string
		}{
			{x.Put(nil, peer, at, foreign.Slice(0, 99)), p2p.ErrInvalid, []string{"put", "99 bytes here", "100 at rank"}},
			{x.Get(nil, peer, foreign.Slice(0, 99), at), p2p.ErrInvalid, []string{"get", "99 bytes here", "100 at rank"}},
			{x.Put(nil, peer, memory.As[float32](at), memory.As[float64](foreign)), p2p.ErrInvalid, []string{"put: elements of float64 here, of float32 at rank"}},
			{x.Get(nil, peer, memory.As[int32](foreign), memory.As[float32](at)), p2p.ErrInvalid, []string{"get: elements of int32 here, of float32 at rank"}},
			{x.Put(nil, peer, foreign, at), p2p.ErrInvalid, []string{"100 bytes at", "not symmetric memory"}},
			{x.Get(nil, peer, at, stale), memory.ErrFreed, []string{"get"}},
			{x.Put(nil, peer, at, stale), memory.ErrFreed, []string{"put"}},
			{x.Put(nil, peer, at, memory.Device(4096, 100)), p2p.ErrInvalid, []string{"0x1000", "memory of host"}},
			{x.Put(nil, me, at, foreign), p2p.ErrInvalid, []string{fmt.Sprintf("rank %d, want another of the 2 ranks than %d", me, me)}},
			{x.Put(nil, 2, at, foreign), p2p.ErrInvalid, []string{"rank 2"}},
			{x.Signal(nil, -1, 0), p2p.ErrInvalid, []string{"rank -1"}},
			{x.Signal((*device.HostStream)(nil), peer, 0), p2p.ErrInvalid, []string{"the stream is a nil *device.HostStream"}},
			{x.Send((*device.HostStream)(nil), peer, 0, foreign), p2p.ErrInvalid, []string{"the stream is a nil *device.HostStream"}},
			{nilHeap, p2p.ErrInvalid, []string{"the heap is nil"}},
			{x.Signal(nil, peer, 8), p2p.ErrInvalid, []string{"semaphore 8, want 0 to 7"}},
			{x.Wait(nil, peer, -1), p2p.ErrInvalid, []string{"semaphore -1, want 0 to 7"}},
		} {
			require.ErrorIs(r.T, bad.err, bad.is, "case %d", i)
			for _, s := range bad.says {
				require.ErrorContains(r.T, bad.err, s, "case %d", i)
			}
		}
		require.Equal(r.T, make([]byte, 100), at.Bytes())
		r.Must(x.Signal(nil, peer, 7))
		r.Must(x.Wait(nil, peer, 7))
		r.Must(x.Close(r.Ctx))
	})
}

func TestF3_DifferentOptionsAreNamedAtNew(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		_, err := p2p.New(r.Ctx, r.Heap, p2p.Options{Semaphores: 4 + r.Rank()})
		require.ErrorIs(r.T, err, comm.ErrMismatch)
		require.ErrorContains(r.T, err, "4 semaphores")
		require.ErrorContains(r.T, err, "5 semaphores")
		require.Zero(r.T, r.Heap.Stats().InUse)
	})
}

func TestTransfersAllocateNothingOnceWarm(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{})
		at, peer := alloc(r, 64<<10), 1-r.Rank()
		s, err := r.Device.NewStream()
		r.Must(err)
		call := func() {
			r.Must(x.Put(s, peer, at.Slice(0, 32<<10), at.Slice(32<<10, 32<<10)))
			r.Must(x.Signal(s, peer, 0))
			r.Must(x.Wait(nil, peer, 0))
			r.Must(x.Get(nil, peer, at.Slice(32<<10, 32<<10), at.Slice(32<<10, 32<<10)))
			r.Must(s.Synchronize())
		}
		r.AllocatesNothing(call)
		r.Must(s.Close())
		r.Must(x.Close(r.Ctx))
	})
}
