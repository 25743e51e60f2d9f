package p2p_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// sharer is a rank of a test that shares memory of its own with one other.
type sharer struct {
	*worldtest.Rank
	x       *p2p.Endpoint
	s       device.Stream
	foreign func(n int64) (v memory.View, free func())
	write   func(v memory.View, b []byte)
	read    func(v memory.View) []byte
}

func onHost(r *worldtest.Rank) *sharer {
	return &sharer{Rank: r, x: endpoint(r, p2p.Options{Timeout: 20 * time.Second}),
		foreign: func(n int64) (memory.View, func()) {
			fd, err := shm.Create("p2p", n)
			r.Must(err)
			m, err := memory.MapFile(fd, 0, n)
			r.Must(err)
			return m.View(), func() { r.Must(m.Close()) }
		},
		write: func(v memory.View, b []byte) { copy(v.Bytes(), b) },
		read:  func(v memory.View) []byte { return v.Bytes() },
	}
}

func onGPU(g *gpu) *sharer { return &sharer{g.Rank, g.x, g.s, g.foreign, g.write, g.read} }

// lent has each rank put into memory of the rank before it that no other rank knows of, and get what that has there. sizes are at most most.
func lent(rounds int, most int64) func(g *sharer) {
	return func(g *sharer) {
		n, me := g.Size(), g.Rank.Rank()
		next, last := (me+1)%n, (me+n-1)%n
		mine, free := g.foreign(2 * most)
		src, freeSrc := g.foreign(most)
		shared, err := g.Heap.Share(next, mine)
		g.Must(err)
		theirs, err := g.Heap.Open(g.Ctx, last)
		g.Must(err)
		require.Equal(g.T, last, theirs.Peer())
		g.Barrier()
		rnd := rand.New(rand.NewPCG(91, 0)) // alike on all ranks
		for round := range rounds {
			size := 1 + rnd.Int64N(1<<(1+rnd.IntN(20)))%most
			if round == rounds-1 {
				size = most // on a GPU by a copy engine
			}
			off := rnd.Int64N(most - size + 1)
			b := make([]byte, size)
			fill(b, round, me, last)
			g.write(src.Slice(0, size), b)
			g.Must(g.x.Put(g.s, last, theirs.View().Slice(off, size), src.Slice(0, size)))
			g.Must(g.x.Signal(g.s, last, 0))
			g.Must(g.x.Wait(g.s, next, 0))
			g.Must(worldtest.Check(g.read(mine.Slice(off, size)), round, next, me))
			fill(b, round+1000, me, next)
			g.write(mine.Slice(most+off, size), b)
			g.Must(g.x.Signal(g.s, next, 1))
			g.Must(g.x.Wait(g.s, last, 1))
			g.Must(g.x.Get(g.s, last, src.Slice(0, size), theirs.View().Slice(most+off, size)))
			g.Must(worldtest.Check(g.read(src.Slice(0, size)), round+1000, last, me))
			g.Barrier()
		}
		for name, c := range map[string]struct {
			peer int
			at   memory.View
			is   error
			text string
		}{
			"of another rank": {next, theirs.View().Slice(0, 8), p2p.ErrInvalid, fmt.Sprintf("memory that rank %d has shared, want that of rank %d", last, next)},
			"own":             {last, mine.Slice(0, 8), p2p.ErrInvalid, "not symmetric memory"},
			"other length":    {last, theirs.View().Slice(0, 9), p2p.ErrInvalid, "8 bytes here, 9 at rank"},
		} {
			if n == 2 && name == "of another rank" {
				continue
			}
			err := g.x.Put(g.s, c.peer, c.at, src.Slice(0, 8))
			require.ErrorIs(g.T, err, c.is, name)
			require.ErrorContains(g.T, err, c.text, name)
		}
		require.Panics(g.T, func() { theirs.View().Slice(2*most-4, 8) }, "out of range")
		stale := theirs.View().Slice(0, 8)
		g.Must(theirs.Close())
		require.ErrorIs(g.T, g.x.Put(g.s, last, stale, src.Slice(0, 8)), memory.ErrFreed)
		require.ErrorIs(g.T, g.x.Get(g.s, last, src.Slice(0, 8), stale), memory.ErrFreed)
		g.Must(shared.Close(g.Ctx))
		free()
		freeSrc()
	}
}

func TestPutsAndGetsOfMemoryThatTwoRanksShare(t *testing.T) {
	run := func(r *worldtest.Rank) {
		g := onHost(r)
		lent(30, 6<<20)(g)
		r.Must(g.x.Close(r.Ctx))
	}
	worldtest.Local(t, 3, segment, run)
	t.Run("processes", func(t *testing.T) { worldtest.Procs(t, 2, segment, run) })
}

// Elements that both ranks know are compared, as in every put.
func TestSharedMemoryKnowsItsElements(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		g := onHost(r)
		mine, free := g.foreign(64)
		shared, err := r.Heap.Share(1-r.Rank(), memory.As[float32](mine))
		r.Must(err)
		theirs, err := r.Heap.Open(r.Ctx, 1-r.Rank())
		r.Must(err)
		err = g.x.Put(nil, 1-r.Rank(), theirs.View(), memory.Wrap(make([]int32, 16)))
		require.ErrorIs(r.T, err, p2p.ErrInvalid)
		require.ErrorContains(r.T, err, "int32")
		r.Must(g.x.Put(nil, 1-r.Rank(), theirs.View(), memory.Wrap(make([]float32, 16))))
		r.Must(theirs.Close())
		r.Must(shared.Close(r.Ctx))
		free()
		r.Must(g.x.Close(r.Ctx))
	})
}

func TestPutsAndGetsOfSharedMemoryOnEmulatedGPUs(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	small := p2p.Options{MaxSMs: 2, Boxes: 6, EagerBytes: 100, StagingBytes: 4096, Timeout: time.Hour} // of a clock that goes as the threads do
	gpus(t, 3, 16<<20, small, func(g *gpu) { lent(6, 20<<10)(onGPU(g)) })
	gpus(t, 2, 16<<20, small, func(g *gpu) { lent(1, 4<<20)(onGPU(g)) })
}

func TestCUDA_PutsAndGetsOfMemoryThatTwoRanksShare(t *testing.T) {
	for _, n := range []int{2, 3} {
		gpus(t, n, 64<<20, p2p.Options{Timeout: 10 * time.Second}, func(g *gpu) { lent(30, 6<<20)(onGPU(g)) })
	}
}

// lentMessages has rank 0 send messages of its own memory, which rank 1 reads where they lie while it has that open, and else out of staging:
// their bytes are then in its segment.
func lentMessages(n int64) func(g *gpu) {
	return func(g *gpu) {
		me, peer := g.Rank.Rank(), 1-g.Rank.Rank()
		mine, free := g.foreign(3 * n)
		var between func() // of rank 1, when rank 0 has begun to send
		staged := func(what string, call int, src memory.View) bool {
			g.T.Helper()
			g.Barrier()
			if me == 0 {
				b := make([]byte, src.Len())
				fill(b, call, 0, 1)
				g.write(src, b)
				g.Must(g.x.Send(g.s, peer, 5, src))
				g.Barrier()
				g.Must(g.s.Synchronize())
				return false
			}
			g.Barrier()
			if between != nil {
				between()
			}
			dst := mine.Slice(0, src.Len())
			g.Must(g.x.Recv(g.s, peer, 5, dst))
			got := g.read(dst)
			if err := worldtest.Check(got, call, 0, 1); err != nil {
				g.T.Errorf("%s: %v", what, err)
			}
			sp := g.Heap.Space()
			return bytes.Contains(g.read(memory.Device(sp.Addr(1, 0), g.Heap.Stats().Committed)), got[len(got)-32:]) // the last chunk stays there
		}
		require.Equal(g.T, me == 1, staged("before", 1, mine.Slice(n, n)))
		var shared *memory.Shared
		var theirs *memory.Opened
		var err error
		if me == 0 {
			shared, err = g.Heap.Share(1, mine.Slice(n, n))
			g.Must(err)
		}
		require.Equal(g.T, me == 1, staged("not open", 2, mine.Slice(n, n)))
		if me == 1 {
			theirs, err = g.Heap.Open(g.Ctx, 0)
			g.Must(err)
		}
		require.False(g.T, staged("open", 3, mine.Slice(n, n)))
		require.False(g.T, staged("a part", 4, mine.Slice(n+7, n-7)))
		require.Equal(g.T, me == 1, staged("more", 5, mine.Slice(n+7, n)))
		require.Equal(g.T, me == 1, staged("before it", 6, mine.Slice(n-1, n)))
		between = func() { g.Must(theirs.Close()) }
		require.Equal(g.T, me == 1, staged("closed on its way", 7, mine.Slice(n, n)))
		between = nil
		require.Equal(g.T, me == 1, staged("closed", 9, mine.Slice(n, n)))
		if me == 0 {
			g.Must(shared.Close(g.Ctx))
		}
		require.Equal(g.T, me == 1, staged("taken back", 8, mine.Slice(n, n)))
		for i := range 200 { // rows are used again
			if me == 0 {
				shared, err = g.Heap.Share(1, mine.Slice(n, n))
				g.Must(err)
			} else {
				theirs, err = g.Heap.Open(g.Ctx, 0)
				g.Must(err)
			}
			if i%100 == 99 {
				require.False(g.T, staged("again", i, mine.Slice(n, n)))
			}
			if me == 0 {
				g.Must(shared.Close(g.Ctx))
			} else {
				g.Must(theirs.Close())
			}
		}
		g.Barrier()
		free()
	}
}

func TestMessagesOfSharedMemoryOnEmulatedGPUs(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	small := p2p.Options{MaxSMs: 2, Boxes: 6, EagerBytes: 100, StagingBytes: 4096, Timeout: time.Hour} // of a clock that goes as the threads do
	gpus(t, 2, 16<<20, small, lentMessages(20<<10))
}

func TestCUDA_MessagesOfMemoryThatTwoRanksShare(t *testing.T) {
	gpus(t, 2, 64<<20, p2p.Options{Timeout: 10 * time.Second}, lentMessages(3<<20))
}

// Who puts into memory of a rank that dies is told so, and can still close it.
func TestF2_SharedMemoryOfADeadProcess(t *testing.T) {
	worldtest.Local(t, 2, segment, func(r *worldtest.Rank) {
		g := onHost(r)
		mine, free := g.foreign(64)
		shared, err := r.Heap.Share(1-r.Rank(), mine)
		r.Must(err)
		theirs, err := r.Heap.Open(r.Ctx, 1-r.Rank())
		r.Must(err)
		if r.Rank() == 0 {
			r.Must(g.x.Wait(nil, 1, 0))
			r.Group.Kill()
			return
		}
		r.Must(g.x.Signal(nil, 0, 0))
		<-r.Group.Done()
		require.ErrorIs(r.T, g.x.Put(nil, 0, theirs.View(), mine), comm.ErrPeerLost)
		r.Must(theirs.Close())
		r.Must(shared.Close(r.Ctx))
		free()
		r.Must(g.x.Close(r.Ctx))
	})
}
