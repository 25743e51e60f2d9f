package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
)

// lender is a rank of a test with memory of its own outside the heap.
type lender struct {
	*rankT
	g    *comm.Group
	h    *Heap
	make func(n int64) (v View, free func())
	read func(v View) []byte
	set  func(v View, b []byte)
}

func hostLender(t *rankT, g *comm.Group) *lender {
	return &lender{rankT: t, g: g, h: heapOf(t, g, Options{}),
		make: func(n int64) (View, func()) {
			fd := object(t, n+100)
			m := mapped(t, fd, 0, n+100)
			require.NoError(t, closeFD(fd))
			return m.View().Slice(100, n), func() { require.NoError(t, m.Close()) }
		},
		read: func(v View) []byte { return v.Bytes() },
		set:  func(v View, b []byte) { copy(v.Bytes(), b) },
	}
}

// cudaLender has memory of cudaMalloc, or of cuMemCreate.
func cudaLender(r *cudaRank, mapped bool) *lender {
	return &lender{rankT: r.rankT, g: r.g, h: r.h, read: r.read, set: r.write,
		make: func(n int64) (View, func()) {
			if !mapped {
				p := r.malloc(n + 512)
				return Device(p+512, n), func() { r.free(p) }
			}
			o := newOutside(r, r.d, roundUp(n+512, r.h.granule))
			return Device(o.addr+512, n), func() {
				o.empty(r)
				require.NoError(r, o.c.Unreserve(o.addr, o.room))
			}
		},
	}
}

func (l *lender) barrier() { require.NoError(l, l.g.Barrier(l.ctx)) }

func (l *lender) share(peer int, v View) *Shared {
	s, err := l.h.Share(peer, v)
	require.NoError(l, err)
	return s
}

func (l *lender) open(peer int) *Opened {
	o, err := l.h.Open(l.ctx, peer)
	require.NoError(l, err)
	return o
}

// briefly is a context that is over before anybody comes.
func briefly(t *rankT) context.Context {
	ctx, cancel := context.WithTimeout(t.ctx, time.Millisecond)
	time.AfterFunc(time.Minute, cancel)
	return ctx
}

// notNow checks the error of a call that waited for rank until its context ended.
func notNow(t *rankT, err error, rank int, text string) {
	require.ErrorIs(t, err, comm.ErrTimeout)
	var p *comm.PeerError
	require.ErrorAs(t, err, &p)
	require.Equal(t, rank, p.Rank)
	require.ErrorContains(t, err, text)
}

func TestM4_AShareIsTakenBackWhenItsImporterHasClosedIt(t *testing.T) { everywhere(t, 3, "share") }

func shareScenario(t *rankT, g *comm.Group) { lend(hostLender(t, g)) }

func TestM4_CUDASharesAreTakenBackWhenTheirImportersHaveClosedThem(t *testing.T) {
	needGPU(t)
	everywhere(t, 3, "cuda share")
	everywhere(t, 3, "legacy share")
}

func cudaShareScenario(t *rankT, g *comm.Group) {
	for _, mapped := range []bool{false, true} {
		if mapped && t.legacy {
			break // such a heap has no file descriptors
		}
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		lend(cudaLender(r, mapped))
		require.NoError(t, r.s.Close())
		require.NoError(t, r.d.Close())
	}
}

func TestM4_EmulatedSharesAreTakenBackWhenTheirImportersHaveClosedThem(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	for how, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
		for _, name := range []string{"cuda share", "legacy share"} {
			t.Run(fmt.Sprint(how, " ", name), func(t *testing.T) { runRanks(t, groups(t, 3), scenarios[name]) })
			a.nothingIsLeft(how, name)
		}
	}
}

// lend has rank 0 share memory with the others, and them with it, in every way. It closes the heap.
func lend(l *lender) {
	t, h, me := l.rankT, l.h, l.g.Rank()
	const n = 300_000
	v, free := l.make(n)
	l.set(v, pattern(n, me, me, 1))
	l.barrier()
	if me == 2 {
		// another rank's memory, in ranges that overlap, and one of them twice
		all, part, again := l.open(0), l.open(0), l.open(0)
		require.Equal(t, 0, all.Peer())
		require.EqualValues(t, n, all.View().Len())
		require.Equal(t, pattern(n, 0, 0, 1), l.read(all.View()))
		require.Equal(t, pattern(n, 0, 0, 1)[70_001:75_001], l.read(part.View()))
		require.Equal(t, part.View().Ptr(), again.View().Ptr(), "one mapping")
		if l.h.gpu != nil {
			require.Len(t, h.shares.loans, 1, "an allocation is mapped once")
			require.Equal(t, all.View().Ptr()+70_001, part.View().Ptr())
		}
		l.set(part.View().Slice(1, 3), []byte("new"))
		_, ok := all.View().Symmetric(h)
		require.False(t, ok, "it is no place of the heap")
		rank, ok := h.Lender(all.View().Slice(5, 6))
		require.True(t, ok)
		require.Equal(t, 0, rank)
		_, err := h.Share(1, all.View())
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "that of another rank")
		l.barrier()
		l.barrier() // rank 0 has found that it is open

		require.NoError(t, all.Close())
		require.NoError(t, all.Close())
		require.ErrorIs(t, all.View().Valid(), ErrFreed)
		require.Equal(t, []byte("new"), l.read(again.View().Slice(1, 3)))
		require.NoError(t, part.Close())
		require.NoError(t, again.Close())
		require.Empty(t, h.shares.loans)
		require.Empty(t, h.shares.opened)
		l.barrier()
		_, err = h.Open(briefly(t), 0)
		notNow(t, err, 0, "open memory of rank 0")
	}
	if me == 0 {
		all, part, again := l.share(2, v), l.share(2, v.Slice(70_001, 5000)), l.share(2, v.Slice(70_001, 5000))
		l.barrier()
		require.Equal(t, []byte("new"), l.read(v.Slice(70_002, 3)))
		for _, s := range []*Shared{all, part, again} {
			notNow(t, s.Close(briefly(t)), 2, "rank 2 has them open")
		}
		l.barrier()
		l.barrier()
		for _, s := range []*Shared{part, again, all, all} {
			require.NoError(t, s.Close(t.ctx))
		}
		require.Empty(t, h.shares.shared)
	}
	if me == 1 {
		for range 3 {
			l.barrier()
		}
	}
	l.barrier()

	// a ring, in which all share first; it is opened while others close
	next, last := (me+1)%3, (me+2)%3
	s := l.share(next, v.Slice(10, 100_000))
	notNow(t, s.Wait(briefly(t)), next, "has not opened them")
	l.barrier()
	o := l.open(last)
	require.Equal(t, pattern(n, last, last, 1)[10:20], l.read(o.View().Slice(0, 10)))
	require.NoError(t, o.Close())
	require.NoError(t, s.Close(t.ctx))

	// memory that was freed and allocated again is other memory (M7)
	free()
	v, free = l.make(n)
	l.set(v, pattern(n, me, me, 2))
	s = l.share(next, v)
	o = l.open(last)
	require.Equal(t, pattern(n, last, last, 2), l.read(o.View()))

	// what is wrong is refused on this rank alone, and offered to nobody
	b, err := h.Alloc(100)
	require.NoError(t, err)
	for _, c := range []struct {
		peer int
		v    View
		is   error
		text string
	}{
		{me, v, ErrInvalid, "want another of the 3 ranks"},
		{3, v, ErrInvalid, "rank 3"},
		{-1, v, ErrInvalid, "rank -1"},
		{next, View{}, ErrInvalid, "no bytes"},
		{next, b.View(), ErrUnsupported, "symmetric heap already"},
		{next, Host(make([]byte, 10)), ErrUnsupported, ""},
	} {
		_, err := h.Share(c.peer, c.v)
		require.ErrorIs(t, err, c.is)
		require.ErrorContains(t, err, c.text)
	}
	_, err = h.Open(t.ctx, me)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = h.Open(briefly(t), last)
	notNow(t, err, last, "open memory of rank")
	l.barrier()

	// the heap closes what is open; another offer was never opened
	l.share(last, v)
	require.NoError(t, h.Close(t.ctx))
	require.ErrorIs(t, o.View().Valid(), ErrFreed)
	require.NoError(t, o.Close())
	require.NoError(t, s.Close(t.ctx))
	_, err = h.Share(next, v)
	require.ErrorIs(t, err, ErrClosed)
	_, err = h.Open(t.ctx, last)
	require.ErrorIs(t, err, ErrClosed)
	free()
}

func TestSharesAreLimited(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		v, free := l.make(10)
		if g.Rank() == 0 {
			for range maxShared {
				l.share(1, v)
			}
			_, err := l.h.Share(1, v)
			require.ErrorIs(t, err, ErrOutOfMemory)
			require.ErrorContains(t, err, "1024 shares")
		}
		require.NoError(t, l.h.Close(t.ctx))
		free()
	})
}

// now is a context that has ended.
func now() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestM4_AnOfferThatIsNotOpenedIsWithdrawn(t *testing.T) { everywhere(t, 2, "withdraw") }

func TestM4_EmulatedOffersThatAreNotOpenedAreWithdrawn(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	for _, name := range []string{"cuda withdraw", "legacy withdraw"} {
		runRanks(t, socketRanks(t, 2), scenarios[name])
		a.nothingIsLeft(name)
	}
}

func withdrawScenario(t *rankT, g *comm.Group) {
	l := hostLender(t, g)
	withdraw(l)
	require.NoError(t, l.h.Close(t.ctx))
}

func cudaWithdrawScenario(t *rankT, g *comm.Group) {
	r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
	withdraw(cudaLender(r, !t.legacy))
	r.close()
}

// withdraw has rank 0 take offers back that rank 1 has not opened, comes to later, or opens at that moment.
func withdraw(l *lender) {
	t, h, exporter := l.rankT, l.h, l.g.Rank() == 0
	v, free := l.make(5000)
	l.set(v, pattern(5000, 0, 0, 1))
	l.barrier()
	if exporter {
		began := time.Now()
		for range 2 {
			s := l.share(1, v)
			row := s.row
			require.NoError(t, s.Close(now()))
			require.NoError(t, s.Close(now()))
			require.NoError(t, s.Wait(now()))
			require.Empty(t, h.shares.shared)
			require.Empty(t, *h.shares.inRows.Load())
			next := l.share(1, v.Slice(0, 100))
			require.Equal(t, row, next.row, "the row is free again")
			require.NoError(t, next.Close(briefly(t)))
		}
		require.Less(t, time.Since(began), 10*time.Second)
		s := l.share(1, v)
		l.barrier()
		require.NoError(t, s.Close(t.ctx))
		require.Zero(t, h.shares.unfound(1), "the peer has come to all")
	} else {
		l.barrier()
		for k := range 4 {
			_, err := h.Open(t.ctx, 0)
			require.ErrorIs(t, err, ErrFreed)
			require.ErrorContains(t, err, fmt.Sprintf("memory: open memory of rank 0: memory was freed: the rank has withdrawn its offer %d, of %d bytes", k+1, []int{5000, 100}[k%2]))
		}
		o := l.open(0)
		require.Equal(t, pattern(5000, 0, 0, 1), l.read(o.View()))
		require.NoError(t, o.Close())
		_, err := h.Open(briefly(t), 0)
		notNow(t, err, 0, "it has shared nothing with this rank that is not taken")
	}

	l.barrier()
	s := l.share(1-l.g.Rank(), v) // both ranks
	require.NoError(t, s.Close(now()))
	l.barrier()
	_, err := h.Open(t.ctx, 1-l.g.Rank())
	require.ErrorIs(t, err, ErrFreed)

	for round := range 100 {
		l.barrier()
		if exporter {
			s := l.share(1, v)
			time.Sleep(time.Duration(round%5) * 20 * time.Microsecond)
			if err := s.Close(now()); err != nil {
				require.ErrorContains(t, err, "rank 1 has them open")
				require.NoError(t, s.Close(t.ctx))
			}
			require.Empty(t, h.shares.shared)
			continue
		}
		o, err := h.Open(t.ctx, 0)
		if err != nil {
			require.ErrorIs(t, err, ErrFreed)
			continue
		}
		require.Equal(t, pattern(5000, 0, 0, 1)[:10], l.read(o.View().Slice(0, 10)))
		require.NoError(t, o.Close())
	}
	l.barrier()
	require.Empty(t, h.shares.loans)
	free()
}

// A peer that is left out lives on: its process still answers.
func TestF2_OffersToRanksThatWereLeftOutAreWithdrawn(t *testing.T) {
	for kind, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
		t.Run(kind, func(t *testing.T) {
			leftOut, withdrawn := make(chan error, 1), make(chan struct{})
			var met sync.WaitGroup // a rank may still be in a barrier that others have left
			met.Add(3)
			meet := func(l *lender) {
				l.barrier()
				met.Done()
				met.Wait()
			}
			runRanks(t, groups(t, 3), func(t *rankT, g *comm.Group) {
				l := hostLender(t, g)
				if g.Rank() == 2 {
					meet(l)
					<-g.Done()
					select {
					case <-withdrawn:
					case <-t.ctx.Done():
					}
					_, err := l.h.Open(t.ctx, 0)
					leftOut <- err
				} else {
					v, free := l.make(100)
					s := l.share(2, v)
					meet(l)
					small, err := g.Shrink(t.ctx, 2)
					require.NoError(t, err)
					require.NoError(t, s.Close(now()))
					require.Empty(t, l.h.shares.shared)
					free()
					if g.Rank() == 0 {
						close(withdrawn)
						require.ErrorIs(t, <-leftOut, comm.ErrPeerLost)
					}
					require.NoError(t, small.Close())
				}
				_ = l.h.Close(t.ctx)
			})
		})
	}
}

func TestWithdrawnOffersAreLimited(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		v, free := l.make(10)
		if g.Rank() == 0 {
			for range maxShared - 1 {
				require.NoError(t, l.share(1, v).Close(now()))
			}
			s := l.share(1, v)
			_, err := l.h.Share(1, v)
			require.ErrorIs(t, err, ErrOutOfMemory)
			require.ErrorContains(t, err, "1 shares with that rank are not closed, and 1023 were withdrawn and have not been opened since")
			l.barrier()
			l.barrier()
			require.NoError(t, l.share(1, v).Close(now()))
			require.NoError(t, s.Close(now()))
		} else {
			l.barrier()
			for range 2 {
				_, err := l.h.Open(t.ctx, 0)
				require.ErrorIs(t, err, ErrFreed)
			}
			l.barrier()
		}
		require.NoError(t, l.h.Close(t.ctx))
		free()
	})
}

// A rank that waits is shown, with whom it waits for and since when.
func TestWaitsForSharedMemoryAreShown(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		v, free := l.make(10)
		waits := func(operation string, peer int) {
			rank, _ := g.Flight()
			require.Eventually(t, func() bool {
				all := rank.State(false).Running
				return len(all) == 1 && all[0].Operation == operation && all[0].WaitsFor == peer && all[0].Group == g.Name() && time.Since(all[0].Since) < time.Minute
			}, time.Minute, time.Millisecond)
		}
		done := make(chan error, 1)
		if g.Rank() == 0 {
			go func() {
				o, err := l.h.Open(t.ctx, 1)
				if err == nil {
					err = o.Close()
				}
				done <- err
			}()
			waits("open memory", 1)
			l.barrier()
			require.NoError(t, <-done)
			l.barrier()
			rank, _ := g.Flight()
			state := rank.State(false)
			require.Empty(t, state.Running)
			require.Positive(t, state.Waited[flight.Wait{Operation: "open memory", Peer: 1}])
			l.barrier()
			require.NoError(t, l.open(1).Close())
		} else {
			l.barrier()
			s := l.share(0, v)
			l.barrier()
			require.NoError(t, s.Close(t.ctx))
			s = l.share(0, v)
			ctx := flight.Continued(t.ctx, time.Now().Add(-30*time.Second))
			go func() { done <- s.Close(ctx) }()
			waits("take back memory", 0)
			rank, _ := g.Flight()
			require.Greater(t, time.Since(rank.State(false).Running[0].Since), 30*time.Second, "a wait that goes on")
			l.barrier()
			require.NoError(t, <-done)
		}
		require.NoError(t, l.h.Close(t.ctx))
		free()
	})
}

func TestF3_MemoryOfAFreedMappingIsNotShared(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		v, free := l.make(10)
		free()
		_, err := l.h.Share(1-g.Rank(), v)
		require.ErrorIs(t, err, ErrFreed)
		require.NoError(t, l.h.Close(t.ctx))
	})
}

// A file that was made shorter would fault where it is read: the importer refuses it, and its rank has it back.
func TestAShareThatCannotBeMappedIsRefused(t *testing.T) {
	runRanks(t, socketRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		if g.Rank() == 0 {
			fd := object(t, 1<<20)
			m := mapped(t, fd, 0, 1<<20)
			s := l.share(1, m.View())
			require.NoError(t, unix.Ftruncate(fd, 4096))
			l.barrier()
			require.NoError(t, s.Close(t.ctx))
			require.NoError(t, m.Close())
			require.NoError(t, closeFD(fd))
		} else {
			l.barrier()
			_, err := l.h.Open(t.ctx, 0)
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, "of memory that has 4096 bytes")
		}
		// the next one is right
		v, free := l.make(100)
		s := l.share(1-g.Rank(), v)
		require.NoError(t, l.open(1-g.Rank()).Close())
		require.NoError(t, s.Close(t.ctx))
		require.NoError(t, l.h.Close(t.ctx))
		free()
	})
}

func TestF4_MalformedOffersAreRefused(t *testing.T) {
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		if g.Rank() == 0 {
			m := l.h.shares.mail
			for _, text := range []string{
				"no JSON", `{}`, `{"Number":7,"Descriptor":true,"Bytes":-1,"Span":4096}`, `{"Number":7,"Descriptor":true,"Bytes":4097,"Span":4096}`,
				`{"Number":7,"Descriptor":true,"Bytes":1,"Lead":-1,"Span":4096}`, `{"Number":7,"Descriptor":true,"Bytes":9223372036854775807,"Lead":1}`,
				`{"Number":7,"Bytes":1,"Span":4096}`, `{"Number":7,"Descriptor":true,"Bytes":1,"Span":4096,"Row":300}`,
				`{"Number":7,"Descriptor":true,"Bytes":1,"Span":4096}`, // has a ticket without a descriptor
			} {
				require.NoError(t, m.Send(1, ticketOf(7), []byte{wordTicket}))
				require.NoError(t, m.Send(1, topicOffers, []byte(text)))
			}
			v, free := l.make(100)
			require.NoError(t, l.share(1, v).Close(t.ctx))
			free()
		} else {
			for range 9 {
				_, err := l.h.Open(t.ctx, 0)
				require.ErrorContains(t, err, "malformed offer")
			}
			require.NoError(t, l.open(0).Close())
		}
		require.NoError(t, l.h.Close(t.ctx))
	})
}

func TestF3_SharesDoNotLeaveTheirHost(t *testing.T) {
	gs, err := comm.Local(4, comm.LocalOptions{PerHost: 2})
	require.NoError(t, err)
	net := double.New(4, time.Millisecond)
	runRanks(t, gs, func(t *rankT, g *comm.Group) {
		h, err := newHeap(t.ctx, g, device.Host(), Options{SegmentBytes: 2 << 20}, newBacking, net.Open)
		require.NoError(t, err)
		me := g.Rank()
		m := mapped(t, object(t, 1000), 0, 1000)
		far, near := (me+2)%4, me^1
		_, err = h.Share(far, m.View())
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, fmt.Sprintf("rank %d is on host %d, and handles of memory do not leave host %d", far, far/2, me/2))
		_, err = h.Open(t.ctx, far)
		require.ErrorIs(t, err, ErrUnsupported)
		copy(m.Bytes(), fmt.Sprint("of rank ", me))
		s, err := h.Share(near, m.View())
		require.NoError(t, err)
		notNow(t, s.Wait(briefly(t)), near, fmt.Sprintf("rank %d has not opened them", near))
		require.NoError(t, g.Barrier(t.ctx))
		o, err := h.Open(t.ctx, near)
		require.NoError(t, err)
		require.Equal(t, near, o.Peer())
		require.Equal(t, fmt.Sprint("of rank ", near), string(o.View().Bytes()[:9]))
		_, err = h.Open(briefly(t), near)
		notNow(t, err, near, "open memory of rank")
		require.NoError(t, o.Close())
		require.NoError(t, s.Close(t.ctx))
		require.NoError(t, h.Close(t.ctx))
		require.NoError(t, m.Close())
	})
}

func TestF2_SharesOfDeadProcesses(t *testing.T) {
	errs := processes(t, 3, "share killed")
	require.ErrorContains(t, errs[1], "killed")
	require.NoError(t, errors.Join(errs[0], errs[2]))
}

// shareKilledScenario: rank 1 dies, which has memory of rank 0 open and whose memory rank 0 has open; rank 2 lives.
func shareKilledScenario(t *rankT, g *comm.Group) {
	l := hostLender(t, g)
	me := g.Rank()
	v, free := l.make(5000)
	l.set(v, pattern(5000, me, me, 3))
	var shared []*Shared
	var opened []*Opened
	for p := range 3 {
		if p != me {
			shared = append(shared, l.share(p, v))
		}
	}
	var unopened *Shared
	for p := range 3 {
		if p != me {
			opened = append(opened, l.open(p))
		}
	}
	if me != 1 {
		unopened = l.share(1, v)
	}
	l.barrier()
	_ = g.Barrier(t.ctx) // which rank 1's death may overtake
	if me == 1 {
		require.NoError(t, unix.Kill(os.Getpid(), unix.SIGKILL))
	}
	_, err := l.h.Open(t.ctx, 1)
	require.ErrorIs(t, err, comm.ErrPeerLost)
	_, err = l.h.Open(t.ctx, 2-me)
	require.ErrorIs(t, err, comm.ErrPeerLost, "the group has failed")
	_, err = l.h.Share(1, v)
	require.ErrorIs(t, err, comm.ErrPeerLost)
	require.NoError(t, unopened.Close(t.ctx), "nobody opens it any more")
	// the memory of the dead process is there until it is closed, and who lives waits for the other
	for _, o := range opened {
		require.Equal(t, pattern(5000, o.Peer(), o.Peer(), 3), l.read(o.View()))
	}
	for _, s := range shared {
		if l.h.named(s.rank) == 1 {
			require.NoError(t, s.Close(t.ctx), "its mapping has gone with it")
		}
	}
	for _, o := range opened {
		require.NoError(t, o.Close())
	}
	for _, s := range shared {
		require.NoError(t, s.Close(t.ctx))
	}
	free()
	require.NoError(t, l.h.Close(t.ctx))
}

// Each call of the importer's driver, and of the exporter's, fails once: that rank gets the error, the other has its memory back, nothing is
// left, and the next share is right.
func TestM5_AFailureOfAnyDriverCallOfAShareLeaksNothing(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	runRanks(t, socketRanks(t, 2), func(t *rankT, g *comm.Group) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20})
		me := g.Rank()
		for _, mapped := range []bool{true, false} {
			l := cudaLender(r, mapped)
			v, free := l.make(1000)
			for victim := range 2 {
				for n := 1; ; n++ {
					l.barrier()
					if me == victim {
						emulated.Fail(t, a.ctx[me], n)
					}
					var err error
					if me == 0 {
						var s *Shared
						s, err = r.h.Share(1, v)
						if err != nil { // and it is free again
							emulated.Fail(t, a.ctx[0], 0)
							s = l.share(1, v)
						}
						require.NoError(t, s.Close(t.ctx))
					} else {
						var o *Opened
						if o, err = r.h.Open(t.ctx, 0); err == nil {
							err = o.Close()
						}
					}
					over := []int64{0}
					if me == victim {
						emulated.Fail(t, a.ctx[me], 0)
						if err == nil {
							over[0] = 1
							require.Greater(t, n, 1)
						}
					}
					require.Empty(t, r.h.shares.shared)
					require.Empty(t, r.h.shares.loans)
					if gather(t, g, over)[victim][0] == 1 {
						break
					}
				}
			}
			l.barrier()
			free()
		}
		r.close()
	})
	a.nothingIsLeft()
}

// Descriptors of offers that were withdrawn or refused are closed on both ends.
func TestM5_OffersThatAreNotOpenedLeaveNoDescriptors(t *testing.T) {
	var mu sync.Mutex // whoever counts has one open
	runRanks(t, socketRanks(t, 2), func(t *rankT, g *comm.Group) {
		l := hostLender(t, g)
		fd := object(t, 1<<20)
		m := mapped(t, fd, 0, 1<<20)
		require.NoError(t, unix.Ftruncate(fd, 4096))
		fds := func() int {
			l.barrier()
			mu.Lock()
			list, err := os.ReadDir("/proc/self/fd")
			mu.Unlock()
			require.NoError(t, err)
			l.barrier()
			return len(list)
		}
		one := func() {
			if g.Rank() == 1 {
				for range 2 {
					_, err := l.h.Open(t.ctx, 0)
					require.Error(t, err)
				}
				return
			}
			require.NoError(t, l.share(1, m.View()).Close(now())) // withdrawn, or refused just before
			require.NoError(t, l.share(1, m.View()).Close(t.ctx))
		}
		for range 10 {
			one()
		}
		before := fds()
		for range 200 {
			one()
		}
		require.LessOrEqual(t, fds(), before)
		// those that nobody comes to are not kept either
		if g.Rank() == 0 {
			for range 200 {
				require.NoError(t, l.share(1, m.View()).Close(now()))
			}
		}
		require.LessOrEqual(t, fds(), before)
		require.NoError(t, l.h.Close(t.ctx))
		require.NoError(t, m.Close())
		require.NoError(t, closeFD(fd))
	})
}

func TestM5_SharesLeaveNothing(t *testing.T) {
	for kind, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
		t.Run(kind, func(t *testing.T) {
			var mu sync.Mutex
			runRanks(t, groups(t, 2), func(t *rankT, g *comm.Group) {
				l := hostLender(t, g)
				peer := 1 - g.Rank()
				one := func() {
					v, free := l.make(1 << 20)
					s := l.share(peer, v)
					require.NoError(t, l.open(peer).Close())
					require.NoError(t, s.Close(t.ctx))
					free()
				}
				count := func() (fds, maps int) {
					l.barrier()
					mu.Lock()
					list, err := os.ReadDir("/proc/self/fd")
					maps = mappings()
					mu.Unlock()
					require.NoError(t, err)
					l.barrier()
					return len(list), maps
				}
				for range 10 {
					one()
				}
				fds, maps := count()
				for range 100 {
					one()
				}
				fds2, maps2 := count()
				require.LessOrEqual(t, fds2, fds)
				require.Less(t, maps2, maps+100)
				require.NoError(t, l.h.Close(t.ctx))
			})
		})
	}
}
