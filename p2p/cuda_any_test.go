package p2p_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// fromAny has each rank send two messages of each of two tags to all others in every round, and take as many from any rank: with its sends in
// one batch, one by one without a stream, or on a second stream behind receives from one rank. Each arrives once, with the rank that sent it,
// and those of one rank and tag in their order.
func fromAny(rounds int, large int64) func(g *gpu) {
	const each = 2
	return func(g *gpu) {
		n, me := g.Size(), g.Rank.Rank()
		sizes := [2]int64{24, large}
		room := (sizes[0] + sizes[1] + 256) * int64(each*n)
		out, in, senders := alloc(g.Rank, room), alloc(g.Rank, room), alloc(g.Rank, 8*int64(2*each*n))
		away, free := g.foreign(room)
		side, third := g.stream(), g.stream()
		g.Barrier()
		for round := range rounds {
			tag := func(t int) uint64 { return uint64(2*round + t) } // a rank may be a round ahead
			var sends, receives []p2p.Message
			sources, used := []memory.View{out, away}[round/3%2], int64(0)
			for i := range n - 1 {
				peer := (me + 1 + i) % n
				for k := range 2 * each {
					v := sources.Slice(used, sizes[k%2])
					used += (v.Len() + 127) / 128 * 128
					b := make([]byte, v.Len())
					fill(b, 10*round+k, me, peer)
					g.write(v, b)
					sends = append(sends, p2p.Message{Peer: peer, Tag: tag(k % 2), View: v})
				}
			}
			used = 0
			for k := range 2 * each * (n - 1) {
				v := in.Slice(used, sizes[k%2])
				used += (v.Len() + 127) / 128 * 128
				receives = append(receives, p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: tag(k % 2), View: v, Source: senders.Slice(8*int64(k), 8)})
			}
			g.Must(g.s.Synchronize())
			from := make([]int, len(receives))
			switch round % 3 {
			case 0:
				g.Must(g.x.Batch(g.s, append(sends, receives...)...))
			case 1:
				g.Must(g.x.Batch(side, sends...))
				for i := range receives {
					if receives[i].From = &from[i]; i%2 == 0 {
						receives[i].Source = memory.View{}
					}
					g.Must(g.x.Batch(nil, receives[i]))
				}
			case 2:
				first := (me + 1) % n // whose first messages are taken by receives from it
				receives[0].Peer, receives[1].Peer = first, first
				g.Must(g.x.Batch(side, sends...))
				g.Must(g.x.Batch(g.s, receives[:2]...)) // behind which those on the other stream come
				g.Must(g.x.Batch(third, receives[2:]...))
			}
			g.Must(errors.Join(g.s.Synchronize(), side.Synchronize(), third.Synchronize(), g.x.Fault()))
			told := g.read(senders)
			next := make(map[[2]int]int) // by rank and tag
			for i, m := range receives {
				if m.Source.Len() > 0 {
					src := int(binary.LittleEndian.Uint64(told[8*i:]))
					if m.From != nil && src != from[i] {
						g.Must(fmt.Errorf("round %d: message %d is from rank %d on the device, from rank %d on the host", round, i, src, from[i]))
					}
					from[i] = src
				}
				key := [2]int{from[i], i % 2}
				if next[key] == each || from[i] == me || from[i] >= n || m.Peer != p2p.AnyRank && from[i] != m.Peer {
					g.Must(fmt.Errorf("round %d: message %d is from rank %d", round, i, from[i]))
				}
				g.Must(worldtest.Check(g.read(m.View), 10*round+2*next[key]+i%2, from[i], me))
				next[key]++
			}
		}
		g.Barrier()
		free()
		g.Must(errors.Join(side.Close(), third.Close()))
	}
}

// anyInTurn has receives from any rank and from one take their turns in the order in which they were enqueued, in a batch and on two streams.
func anyInTurn(g *gpu) {
	v, side := alloc(g.Rank, 64), g.stream()
	at := func(i int64) memory.View { return v.Slice(16*i, 4) }
	g.Barrier()
	switch g.Rank.Rank() {
	case 0:
		g.Must(g.x.Batch(g.s, p2p.Message{Receive: true, Peer: 1, View: at(0)}, p2p.Message{Receive: true, Peer: p2p.AnyRank, View: at(1)},
			p2p.Message{Receive: true, Peer: 1, View: at(2)}))
		g.Must(g.s.Synchronize())
		require.Equal(g.T, "1st 2nd 3rd ", string(g.read(at(0)))+string(g.read(at(1)))+string(g.read(at(2))))
		g.Must(g.x.Recv(g.s, 1, 1, at(0)))
		g.Must(g.x.Recv(side, p2p.AnyRank, 1, at(1)))
		g.Must(g.x.Recv(g.s, 1, 1, at(2)))
		g.Must(errors.Join(g.s.Synchronize(), side.Synchronize(), g.x.Fault()))
		require.Equal(g.T, "1st 2nd 3rd ", string(g.read(at(0)))+string(g.read(at(1)))+string(g.read(at(2))))
	case 1:
		for tag := range uint64(2) {
			for _, text := range []string{"1st ", "2nd ", "3rd "} {
				g.write(at(0), []byte(text))
				g.Must(g.x.Send(g.s, 0, tag, at(0)))
			}
		}
		g.Must(errors.Join(g.s.Synchronize(), g.x.Fault()))
	}
	g.Barrier()
	g.Must(side.Close())
}

// anyUntaken has receives from any rank that nobody meets: they say what is there. Sizes that disagree are named, and the next one works.
func anyUntaken(g *gpu) {
	v := alloc(g.Rank, 64)
	g.Barrier()
	any := func(tag uint64) (from int, err error) {
		from = -1
		err = g.x.Batch(nil, p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: tag, View: v.Slice(0, 4), From: &from})
		return from, err
	}
	if g.Rank.Rank() == 0 {
		_, err := any(7)
		require.ErrorIs(g.T, err, comm.ErrTimeout)
		require.ErrorContains(g.T, err, "(tag 7, 4 bytes from any rank): no rank has sent a message that rank 0 has not received")
		var named *comm.PeerError
		require.False(g.T, errors.As(err, &named), err)
		// Receives that were enqueued before the failure do not wait as long again, and there is one error.
		for range 3 {
			g.Must(g.x.Recv(g.s, p2p.AnyRank, 7, v.Slice(0, 4)))
		}
		g.Must(g.s.Synchronize())
		require.ErrorContains(g.T, g.x.Fault(), "from any rank")
		g.Must(g.x.Fault())
	}
	g.Barrier()
	if g.Rank.Rank() == 1 {
		g.write(v.Slice(0, 10), []byte("four five!"))
		g.Must(g.x.Send(nil, 0, 8, v.Slice(0, 4)))
		g.Must(g.x.Send(nil, 0, 9, v.Slice(5, 5)))
	}
	g.Barrier()
	if g.Rank.Rank() == 0 {
		_, err := any(7)
		require.ErrorContains(g.T, err, "rank 1 has sent what rank 0 has not received: tag 8, 4 bytes; tag 9, 5 bytes")
		var sizes *kernels.MessageMismatchError
		_, err = any(9)
		require.True(g.T, errors.As(err, &sizes) && sizes.Src == 1 && sizes.Sent == 5 && sizes.Expected == 4, err)
		from, err := any(8)
		g.Must(err)
		require.Equal(g.T, 1, from)
		require.Equal(g.T, "four", string(g.read(v.Slice(0, 4))))
	}
	g.Barrier()
	if g.Rank.Rank() == 1 {
		require.ErrorIs(g.T, g.x.Send(nil, 0, 8, v.Slice(0, 4)), comm.ErrMismatch)
	}
	one := p2p.Message{Receive: true, Peer: p2p.AnyRank, View: v.Slice(0, 4), From: new(int)}
	require.ErrorIs(g.T, g.x.Batch(g.s, one), p2p.ErrUnsupported)
	one.From, one.Source = nil, v.Slice(20, 8)
	require.ErrorIs(g.T, g.x.Batch(g.s, one), p2p.ErrInvalid)
	one.Source = v.Slice(16, 4)
	require.ErrorIs(g.T, g.x.Batch(g.s, one), p2p.ErrInvalid)
	require.ErrorIs(g.T, g.x.Batch(g.s, p2p.Message{Peer: 1 - g.Rank.Rank(), View: v.Slice(0, 4), Source: v.Slice(16, 8)}), p2p.ErrInvalid)
	require.ErrorIs(g.T, g.x.Send(g.s, p2p.AnyRank, 8, v), p2p.ErrInvalid)
}

func TestMessagesFromAnyRankOnEmulatedGPUs(t *testing.T) {
	if !emulated.Kernels(t, "../kernels/cuda") {
		return
	}
	small := p2p.Options{MaxSMs: 2, Boxes: 6, EagerBytes: 100, StagingBytes: 4096, Timeout: time.Hour} // of a clock that goes as the threads do
	gpus(t, 3, 16<<20, small, fromAny(6, 10<<10))
	gpus(t, 2, 16<<20, small, anyInTurn)
	small.Timeout = 2 * time.Millisecond
	gpus(t, 2, 16<<20, small, anyUntaken)
}

func TestCUDA_MessagesFromAnyRank(t *testing.T) {
	for _, n := range []int{2, 3} {
		gpus(t, n, 256<<20, p2p.Options{Timeout: 10 * time.Second}, fromAny(30, 1<<20))
	}
	gpus(t, 2, 64<<20, p2p.Options{Timeout: 10 * time.Second}, anyInTurn)
}

func TestCUDA_F1_AReceiveFromAnyRankHasADeadline(t *testing.T) {
	gpus(t, 2, 64<<20, p2p.Options{Timeout: 500 * time.Millisecond}, anyUntaken)
}

// A graph is replayed: each time it takes the messages of that time, and leaves the ranks in memory of the device.
func TestCUDA_MessagesFromAnyRankInAGraph(t *testing.T) {
	gpus(t, 3, 64<<20, p2p.Options{Timeout: 10 * time.Second}, func(g *gpu) {
		me := g.Rank.Rank()
		for _, n := range []int64{100, 1 << 20} {
			in, out, senders := alloc(g.Rank, 2*n), alloc(g.Rank, n), alloc(g.Rank, 16)
			g.Barrier()
			graph, err := g.s.Capture(func() error {
				if me != 0 {
					return g.x.Send(g.s, 0, 1, out)
				}
				return g.x.Batch(g.s, p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: 1, View: in.Slice(0, n), Source: senders.Slice(0, 8)},
					p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: 1, View: in.Slice(n, n), Source: senders.Slice(8, 8)})
			})
			g.Must(err)
			g.Barrier() // to make a graph may wait in the driver for a kernel on that GPU, which may wait for this rank
			for round := range 20 {
				b := make([]byte, n)
				fill(b, round, me, 0)
				g.write(out, b)
				g.Must(graph.Launch(g.s))
				g.Must(g.s.Synchronize())
				g.Must(g.x.Fault())
				if me == 0 {
					told := g.read(senders)
					for i := range int64(2) {
						g.Must(worldtest.Check(g.read(in.Slice(i*n, n)), round, int(told[8*i]), 0))
					}
					require.Equal(g.T, byte(3), told[0]+told[8]) // one of each
				}
				g.Barrier()
			}
			g.Must(graph.Close())
		}
	})
}
