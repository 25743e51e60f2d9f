package p2p_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// foreign is memory of the driver, as tensors lie in.
func (g *gpu) foreign(n int64) (v memory.View, free func()) {
	c := g.Device.(*device.CUDADevice).Context()
	p, err := c.MemAlloc(max(n, 16))
	g.Must(err)
	return memory.Device(p, n), func() { g.Must(c.MemFree(p)) }
}

// exchange has every rank send messages of random tags and sizes to all others and receive theirs, in every round: as one batch, as batches of
// sends and of receives on two streams, or small ones one by one, sends first. Messages lie in the heap or elsewhere.
func exchange(rounds int, most int64) func(g *gpu) {
	return func(g *gpu) {
		n, me := g.Size(), g.Rank.Rank()
		heap := alloc(g.Rank, 12*most*int64(n))
		away, free := g.foreign(12 * most * int64(n))
		side, err := g.Device.NewStream()
		g.Must(err)
		g.Barrier()
		rnd := rand.New(rand.NewPCG(79, uint64(me)))
		for round := range rounds {
			way := round % 3
			var used int64
			view := func(bytes int64) memory.View {
				off := used + rnd.Int64N(32)
				used += bytes + 64
				return []memory.View{heap, away}[rnd.IntN(2)].Slice(off, bytes)
			}
			var sends, receives []p2p.Message
			var check []func()
			for i := range n - 1 {
				peer := (me + 1 + i) % n
				for _, c := range sized(round, me, peer, way, most) {
					v, b := view(c.n), make([]byte, c.n)
					fill(b, round*10+c.id, me, peer)
					g.write(v, b)
					sends = append(sends, p2p.Message{Peer: peer, Tag: c.tag, View: v})
				}
				for _, c := range shuffled(rnd, sized(round, peer, me, way, most)) {
					v := view(c.n)
					from := new(int)
					receives = append(receives, p2p.Message{Receive: true, Peer: peer, Tag: c.tag, View: v, From: from})
					check = append(check, func() {
						g.Must(worldtest.Check(g.read(v), round*10+c.id, peer, me))
						if way != 2 && *from != peer {
							g.Must(fmt.Errorf("a message from rank %d is said to be from rank %d", peer, *from))
						}
					})
				}
			}
			g.Must(g.s.Synchronize())
			switch way {
			case 0:
				g.Must(g.x.Batch(g.s, append(slices.Clone(receives), sends...)...))
			case 1:
				g.Must(g.x.Batch(g.s, sends...))
				g.Must(g.x.Batch(side, receives...))
			case 2:
				for _, m := range sends {
					g.Must(g.x.Send(g.s, m.Peer, m.Tag, m.View))
				}
				for _, m := range receives {
					g.Must(g.x.Recv(nil, m.Peer, m.Tag, m.View))
				}
			}
			g.Must(errors.Join(g.s.Synchronize(), side.Synchronize(), g.x.Fault()))
			for _, f := range check {
				f()
			}
		}
		g.Barrier()
		free()
		g.Must(side.Close())
	}
}

// sized is notes with sizes to most, in a way that has single messages small ones.
func sized(round, src, dst, way int, most int64) (list []note) {
	for _, c := range notes(round, src, dst) {
		c.n = c.n * most >> 19
		if way == 2 {
			c.n = min(c.n, 100)
		}
		list = append(list, c)
	}
	return list
}

// disagree has ranks with different sizes for messages, of which both learn; after that messages work, more than there are boxes.
func disagree(g *gpu) {
	v, me := alloc(g.Rank, 64<<10), g.Rank.Rank()
	g.Barrier()
	for _, sent := range []int64{10, 20 << 10} {
		mine := v.Slice(0, sent)
		wrong := func(err error) {
			var m *kernels.MessageMismatchError
			if !errors.As(err, &m) || m.Src != 0 || m.Dst != 1 || m.Tag != 5 || int64(m.Sent) != sent || int64(m.Expected) != sent-1 {
				g.Must(fmt.Errorf("got %w", err))
			}
		}
		if me == 1 {
			wrong(g.x.Recv(nil, 0, 5, mine.Slice(0, sent-1)))
			g.Barrier()
			g.Must(g.x.Recv(nil, 0, 5, mine))
			continue
		}
		err := g.x.Send(nil, 1, 5, mine)
		g.Barrier()
		if err == nil { // it was done
			err = g.x.Send(nil, 1, 5, mine)
		}
		wrong(err)
		g.Must(g.x.Send(nil, 1, 5, mine))
	}
	g.Barrier()
	for range 40 {
		g.Must(g.x.Batch(g.s, p2p.Message{Peer: 1 - me, Tag: 7, View: v.Slice(0, 20<<10)},
			p2p.Message{Receive: true, Peer: 1 - me, Tag: 7, View: v.Slice(20<<10, 20<<10)}))
	}
	g.Must(errors.Join(g.s.Synchronize(), g.x.Fault()))
	list := slices.Repeat([]p2p.Message{{Peer: 1 - me, View: v}}, 65)
	require.ErrorContains(g.T, g.x.Batch(g.s, list...), "batch of 65 messages, want at most 64 on GPUs")
}

// untaken has a tag that nobody receives.
func untaken(g *gpu) {
	v, me := alloc(g.Rank, 64<<10), g.Rank.Rank()
	g.Barrier()
	var err error
	var late *comm.PeerError
	if me == 0 {
		err = g.x.Send(nil, 1, 7, v.Slice(0, 20<<10))
		require.ErrorContains(g.T, err, "(tag 7, 20480 bytes to rank 1)")
	} else {
		err = g.x.Recv(nil, 0, 8, v.Slice(0, 1000))
		require.ErrorContains(g.T, err, "(tag 8, 1000 bytes from rank 0)")
	}
	require.ErrorIs(g.T, err, comm.ErrTimeout)
	require.True(g.T, errors.As(err, &late) && late.Rank == 1-me)
}

// crowd has batches with more messages that wait for their receivers than there are boxes.
func crowd(bytes int64, rounds int) func(g *gpu) {
	return func(g *gpu) {
		const each = 32
		me := g.Rank.Rank()
		v := alloc(g.Rank, 2*each*bytes)
		g.Barrier()
		for round := range rounds {
			var list []p2p.Message
			for i := range int64(each) {
				b := make([]byte, bytes)
				fill(b, round*each+int(i), me, 1-me)
				out := v.Slice(2*i*bytes, bytes)
				g.write(out, b)
				list = append(list, p2p.Message{Peer: 1 - me, Tag: uint64(i), View: out},
					p2p.Message{Receive: true, Peer: 1 - me, Tag: uint64(i), View: v.Slice((2*i+1)*bytes, bytes)})
			}
			g.Must(g.x.Batch(g.s, list...))
			g.Must(errors.Join(g.s.Synchronize(), g.x.Fault()))
			for i := range each {
				g.Must(worldtest.Check(g.read(list[2*i+1].View), round*each+i, 1-me, me))
			}
		}
	}
}

// The same kernels on the emulated driver, whose processor runs them on the heap's own memory.
func TestMessagesOnEmulatedGPUs(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	small := p2p.Options{MaxSMs: 2, Boxes: 6, EagerBytes: 100, StagingBytes: 4096, Timeout: time.Hour} // of a clock that goes as the threads do
	gpus(t, 3, 16<<20, small, exchange(6, 16<<10))
	gpus(t, 2, 16<<20, small, disagree)
	gpus(t, 2, 16<<20, small, crowd(300, 2))
	small.Timeout = 2 * time.Millisecond
	gpus(t, 2, 16<<20, small, untaken)
}

func TestCUDA_MessagesFollowTheModel(t *testing.T) {
	for _, n := range []int{2, 3} {
		gpus(t, n, 256<<20, p2p.Options{Timeout: 10 * time.Second}, exchange(40, 3<<20))
	}
}

func TestCUDA_MoreMessagesThanBoxes(t *testing.T) {
	gpus(t, 2, 64<<20, p2p.Options{Boxes: 4, Timeout: 10 * time.Second}, crowd(16<<10, 200))
}

func TestCUDA_F3_MessagesThatDisagreeAreNamed(t *testing.T) {
	gpus(t, 2, 64<<20, p2p.Options{Timeout: 10 * time.Second}, disagree)
	gpus(t, 2, 64<<20, p2p.Options{Timeout: 500 * time.Millisecond}, untaken)
}

// A graph is replayed: its messages have new numbers.
func TestCUDA_MessagesInAGraph(t *testing.T) {
	gpus(t, 2, 64<<20, p2p.Options{Timeout: 10 * time.Second}, func(g *gpu) {
		me, peer := g.Rank.Rank(), 1-g.Rank.Rank()
		for _, n := range []int64{100, 8 << 10, 1 << 20} {
			in, out := alloc(g.Rank, n), alloc(g.Rank, n)
			away, free := g.foreign(n)
			g.Barrier()
			graph, err := g.s.Capture(func() error {
				return errors.Join(
					g.x.Batch(g.s, p2p.Message{Peer: peer, Tag: 1, View: out}, p2p.Message{Receive: true, Peer: peer, Tag: 1, View: away}),
					g.x.Batch(g.s, p2p.Message{Peer: peer, Tag: 2, View: away}, p2p.Message{Receive: true, Peer: peer, Tag: 2, View: in}))
			})
			g.Must(err)
			g.Barrier() // to make a graph may wait in the driver for a kernel on that GPU, which may wait for this rank
			for round := range 20 {
				b := make([]byte, n)
				fill(b, round, me, me) // it comes back
				g.write(out, b)
				g.Must(graph.Launch(g.s))
				g.Must(worldtest.Check(g.read(in), round, me, me))
				g.Must(g.x.Fault())
			}
			g.Barrier()
			g.Must(graph.Close())
			free()
		}
	})
}
