package p2p_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

var measure = flag.Bool("measure", false, "measure transfers on GPUs")

// gpu is one rank with a stream of its own.
type gpu struct {
	*worldtest.Rank
	s *device.CUDAStream
	x *p2p.Endpoint
}

func gpus(t *testing.T, n int, room int64, o p2p.Options, f func(g *gpu)) {
	worldtest.GPUs(t, n, room, func(r *worldtest.Rank) {
		s, err := r.Device.NewStream()
		r.Must(err)
		g := &gpu{Rank: r, s: s.(*device.CUDAStream), x: endpoint(r, o)}
		r.Barrier() // to allocate can wait for running kernels
		f(g)
		r.Barrier()
		r.Must(g.x.Close(r.Ctx))
		r.Must(s.Close())
	})
}

func (g *gpu) stream() device.Stream {
	s, err := g.Device.NewStream()
	g.Must(err)
	return s
}

func (g *gpu) write(v memory.View, b []byte) {
	if len(b) > 0 {
		g.Must(memory.Copy(g.s, v, memory.Host(b)))
	}
}

func (g *gpu) read(v memory.View) []byte {
	b := make([]byte, v.Len())
	if len(b) > 0 {
		g.Must(memory.Copy(g.s, memory.Host(b), v))
	}
	g.Must(g.s.Synchronize())
	return b
}

func TestCUDA_PutsAndGetsFollowTheModel(t *testing.T) {
	const room = 12 << 20
	for _, n := range []int{2, 3} {
		gpus(t, n, 160<<20, p2p.Options{Timeout: 10 * time.Second}, func(g *gpu) {
			me := g.Rank.Rank()
			inbox, out, got := alloc(g.Rank, room*int64(n)), alloc(g.Rank, room*int64(n)), alloc(g.Rank, room)
			g.Barrier()
			sizes := rand.New(rand.NewPCG(5, 0)) // alike on all ranks
			for round := range 30 {
				n0 := sizes.Int64N(1 << (4 + sizes.IntN(19)))
				if round%10 == 9 {
					n0 = 4<<20 + sizes.Int64N(6<<20) // by a copy engine
				}
				off, to := sizes.Int64N(64), sizes.Int64N(64)
				for i := range n - 1 {
					peer := (me + 1 + i) % n
					b := make([]byte, n0)
					fill(b, round, me, peer)
					src := out.Slice(int64(peer)*room+off, n0)
					g.write(src, b)
					g.Must(g.x.Put(g.s, peer, inbox.Slice(int64(me)*room+to, n0), src))
					g.Must(g.x.Signal(g.s, peer, round%8))
				}
				for i := range n - 1 {
					peer := (me + 1 + i) % n
					g.Must(g.x.Wait(g.s, peer, round%8))
					g.Must(worldtest.Check(g.read(inbox.Slice(int64(peer)*room+to, n0)), round, peer, me))
					g.Must(g.x.Get(g.s, peer, got.Slice(off, n0), inbox.Slice(int64(me)*room+to, n0)))
					g.Must(worldtest.Check(g.read(got.Slice(off, n0)), round, me, peer))
				}
				g.Barrier()
			}
		})
	}
}

// A graph is replayed: its signals and waits count on.
func TestCUDA_TransfersInAGraph(t *testing.T) {
	gpus(t, 2, 32<<20, p2p.Options{Timeout: 10 * time.Second}, func(g *gpu) {
		me, peer := g.Rank.Rank(), 1-g.Rank.Rank()
		in, out := alloc(g.Rank, 64<<10), alloc(g.Rank, 64<<10)
		g.Barrier()
		graph, err := g.s.Capture(func() error {
			return errors.Join(g.x.Put(g.s, peer, in, out), g.x.Signal(g.s, peer, 0), g.x.Wait(g.s, peer, 0))
		})
		g.Must(err)
		g.Barrier() // to make a graph may wait in the driver for a kernel on that GPU, which may wait for this rank
		for round := range 20 {
			b := make([]byte, out.Len())
			fill(b, round, me, peer)
			g.write(out, b)
			g.Must(graph.Launch(g.s))
			g.Must(worldtest.Check(g.read(in), round, peer, me))
			g.Must(g.x.Fault())
			g.Barrier()
		}
		g.Must(graph.Close())
	})
}

// A wait that fails is told once, with its peer. The signal that comes later is consumed by a later wait, and calls with other ranks go on.
func TestCUDA_F1_AWaitNamesThePeerAndLeavesOtherCallsAlone(t *testing.T) {
	var late atomic.Bool
	gpus(t, 3, 32<<20, p2p.Options{Timeout: 300 * time.Millisecond}, func(g *gpu) {
		switch g.Rank.Rank() {
		case 0:
			start := time.Now()
			for range 20 {
				g.Must(g.x.Wait(g.s, 1, 2))
			}
			g.Must(g.s.Synchronize())
			err := g.x.Fault()
			var pe *comm.PeerError
			if took := time.Since(start); !errors.Is(err, comm.ErrTimeout) || !errors.As(err, &pe) || pe.Rank != 1 || took > 3*time.Second {
				g.Must(fmt.Errorf("got %v after %v", err, took)) // 6 s if each waited
			}
			require.ErrorContains(g.T, err, "(semaphore 2): it has signalled 0 times, and this rank has consumed 0")
			g.Must(g.x.Fault())
			g.Must(g.x.Signal(g.s, 2, 0))
			g.Must(g.x.Wait(g.s, 2, 0))
			g.Must(g.s.Synchronize())
			late.Store(true)
			g.Must(g.x.Wait(nil, 1, 2))
		case 1:
			for !late.Load() {
				time.Sleep(time.Millisecond)
			}
			g.Must(g.x.Signal(nil, 0, 2))
		case 2:
			for g.x.Wait(nil, 0, 0) != nil { // rank 0 comes late
			}
			g.Must(g.x.Signal(nil, 0, 0))
		}
	})
}

// One way of a signal and its wait, of a put with them and of a message, messages both ways, and large puts next to copies by the driver; in
// graphs, medians.
func TestCUDA_MeasureTransfers(t *testing.T) {
	if !*measure {
		t.Skip("measures; -measure")
	}
	const turns = 200
	gpus(t, 2, 2<<30, p2p.Options{}, func(g *gpu) {
		me, peer := g.Rank.Rank(), 1-g.Rank.Rank()
		in, out := alloc(g.Rank, 512<<20), alloc(g.Rank, 512<<20)
		g.Barrier()
		replay := func(what string, ways int, f func() error) {
			graph, err := g.s.Capture(f)
			g.Must(err)
			var us []float64
			for range 12 {
				g.Barrier()
				start := time.Now()
				g.Must(graph.Launch(g.s))
				g.Must(g.s.Synchronize())
				us = append(us, float64(time.Since(start).Nanoseconds())/1e3/float64(ways))
			}
			g.Must(g.x.Fault())
			g.Must(graph.Close())
			slices.Sort(us)
			if me == 0 {
				fmt.Printf("%-40s %10.2f us (%.2f to %.2f)\n", what, us[len(us)/2], us[0], us[len(us)-1])
			}
		}
		pingPong := func(n int64) func() error {
			send := func() error {
				var err error
				if n > 0 {
					err = g.x.Put(g.s, peer, in.Slice(0, n), out.Slice(0, n))
				}
				return errors.Join(err, g.x.Signal(g.s, peer, 0))
			}
			return func() (err error) {
				for i := range 2 * turns {
					if i%2 == me {
						err = errors.Join(err, send())
					} else {
						err = errors.Join(err, g.x.Wait(g.s, peer, 0))
					}
				}
				return err
			}
		}
		for _, n := range []int64{0, 8 << 10, 64 << 10, 1 << 20} {
			replay(fmt.Sprintf("put of %d, signal, wait, one way", n), 2*turns, pingPong(n))
		}
		away, free := g.foreign(512 << 20)
		for _, n := range []int64{0, 8 << 10, 64 << 10, 1 << 20} {
			replay(fmt.Sprintf("message of %d, one way", n), 2*turns, func() (err error) {
				for i := range 2 * turns {
					if i%2 == me {
						err = errors.Join(err, g.x.Send(g.s, peer, 0, out.Slice(0, n)))
					} else {
						err = errors.Join(err, g.x.Recv(g.s, peer, 0, in.Slice(0, n)))
					}
				}
				return err
			})
		}
		large := []int64{8 << 10, 1 << 20, 8 << 20, 64 << 20, 512 << 20}
		const each = 10
		for _, n := range large {
			for i, src := range []memory.View{out, away} {
				where := []string{"of the heap", "of other memory"}[i]
				send := p2p.Message{Peer: peer, View: src.Slice(0, n)}
				receive := p2p.Message{Receive: true, Peer: peer, View: in.Slice(0, n)}
				batches := func(list ...p2p.Message) func() error {
					return func() (err error) {
						for range each {
							err = errors.Join(err, g.x.Batch(g.s, list...))
						}
						return err
					}
				}
				replay(fmt.Sprintf("messages of %d %s, both ways", n, where), each, batches(send, receive))
				replay(fmt.Sprintf("messages of %d %s, all of one rank", n, where), each, batches([]p2p.Message{send, receive}[me]))
			}
		}
		g.Barrier()
		free()
		direct := func(n int64) error {
			d := g.Device.(*device.CUDADevice)
			place, err := g.Heap.Counterpart(in, peer)
			space := g.Heap.Space()
			return errors.Join(err, d.Context().Copy(cuda.Stream(g.s.Handle()), space.Addr(peer, place), out.Ptr(), n))
		}
		for _, n := range append([]int64{256 << 10, 2 << 20, 4<<20 - 16}, large...) {
			copies := func() (err error) {
				for range each {
					err = errors.Join(err, direct(n))
				}
				return err
			}
			for range 2 {
				replay(fmt.Sprintf("put of %d, both ways", n), each, func() (err error) {
					for range each {
						err = errors.Join(err, g.x.Put(g.s, peer, in.Slice(0, n), out.Slice(0, n)))
					}
					return err
				})
				replay(fmt.Sprintf("peer copy of %d, both ways", n), each, copies)
			}
			replay(fmt.Sprintf("peer copy of %d, of one rank", n), each, func() error {
				if me == 1 {
					return g.x.Signal(g.s, peer, 0) // a graph has something in it
				}
				return copies()
			})
		}
	})
}
