package p2p_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// Every rank sends 40 messages of 2 tags, some small and some large, to each other, and takes as many as it gets from any rank, one by one, in
// batches, and from three goroutines. Each arrives once, with the rank that sent it, and those of one rank and tag in their order.
func TestMessagesFromAnyRank(t *testing.T) {
	const each = 40
	size := func(tag int) int { return []int{16, 64 << 10}[tag] }
	for _, ranks := range []int{2, 3, 5} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			worldtest.Local(t, ranks, 32<<20, func(r *worldtest.Rank) {
				x := endpoint(r, p2p.Options{Timeout: time.Minute})
				others := r.Size() - 1
				var sending sync.WaitGroup
				for peer := range r.Size() {
					if peer == r.Rank() {
						continue
					}
					sending.Go(func() {
						for i := range each {
							b := make([]byte, size(i%2))
							binary.LittleEndian.PutUint64(b, uint64(r.Rank()))
							binary.LittleEndian.PutUint64(b[len(b)-8:], uint64(i))
							r.Must(x.Send(nil, peer, uint64(i%2), memory.Host(b)))
						}
					})
				}
				var mu sync.Mutex
				next := make(map[[2]int]int) // by rank and tag
				take := func(b []byte, from, tag int) error {
					mu.Lock()
					defer mu.Unlock()
					src, i := int(binary.LittleEndian.Uint64(b)), int(binary.LittleEndian.Uint64(b[len(b)-8:]))
					if want := next[[2]int{from, tag}]; src != from || i != 2*want+tag {
						return fmt.Errorf("message %d of rank %d with tag %d, want %d of rank %d", i, src, tag, 2*want+tag, from)
					}
					next[[2]int{from, tag}]++
					return nil
				}
				rnd := rand.New(rand.NewPCG(5, uint64(r.Rank())))
				for range each / 2 {
					switch rnd.IntN(3) {
					case 0: // one by one
						for tag := range 2 {
							for range others {
								from, b := -1, make([]byte, size(tag))
								r.Must(x.Batch(nil, p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: uint64(tag), View: memory.Host(b), From: &from}))
								r.Must(take(b, from, tag))
							}
						}
					case 1:
						var list []p2p.Message
						from, b := make([]int, 2*others), make([][]byte, 2*others)
						for k := range from {
							b[k] = make([]byte, size(k%2))
							list = append(list, p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: uint64(k % 2), View: memory.Host(b[k]), From: &from[k]})
						}
						r.Must(x.Batch(nil, list...))
						for k := range from {
							r.Must(take(b[k], from[k], k%2))
						}
					case 2: // both tags at the same time
						var wg sync.WaitGroup
						for tag := range 2 {
							wg.Go(func() {
								for range others {
									from, b := -1, make([]byte, size(tag))
									r.Must(x.Batch(nil, p2p.Message{Receive: true, Peer: p2p.AnyRank, Tag: uint64(tag), View: memory.Host(b), From: &from}))
									r.Must(take(b, from, tag))
								}
							})
						}
						wg.Wait()
					}
				}
				sending.Wait()
				for key, n := range next {
					require.Equal(r.T, each/2, n, key)
				}
				r.Must(x.Close(r.Ctx))
			})
		})
	}
}

// A receive from any rank and those from one rank take their turns in the order in which they begin.
func TestAnyRankTakesItsTurn(t *testing.T) {
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: time.Minute})
		if r.Rank() == 0 {
			var got [3][1]byte
			var from [3]int
			sources := []int64{-1, -1, -1}
			list := []p2p.Message{
				{Receive: true, Peer: 1, View: memory.Host(got[0][:]), From: &from[0], Source: memory.Wrap(sources[:1])},
				{Receive: true, Peer: p2p.AnyRank, View: memory.Host(got[1][:]), From: &from[1], Source: memory.Wrap(sources[1:2])},
				{Receive: true, Peer: 1, View: memory.Host(got[2][:]), From: &from[2]},
			}
			r.Must(x.Batch(nil, list...))
			require.Equal(r.T, [3][1]byte{{1}, {2}, {3}}, got)
			require.Equal(r.T, [3]int{1, 1, 1}, from)
			require.Equal(r.T, []int64{1, 1, -1}, sources)
			list[0].Source = memory.Wrap(sources)
			require.ErrorIs(r.T, x.Batch(nil, list...), comm.ErrInvalid)
			r.Must(x.Send(nil, 2, 0, memory.Host([]byte{0})))
			r.Must(x.Recv(nil, p2p.AnyRank, 0, memory.Host(got[0][:])))
			require.Equal(r.T, byte(4), got[0][0])
		}
		if r.Rank() == 1 {
			for i := range 3 {
				r.Must(x.Send(nil, 0, 0, memory.Host([]byte{byte(i + 1)})))
			}
		}
		if r.Rank() == 2 {
			var now [1]byte
			r.Must(x.Recv(nil, 0, 0, memory.Host(now[:])))
			r.Must(x.Send(nil, 0, 0, memory.Host([]byte{4})))
		}
		r.Must(x.Close(r.Ctx))
	})
}

// A receive from any rank that nobody meets names what is there, and of which ranks; sizes that disagree name both; and the next one works.
func TestF1_AReceiveFromAnyRankHasADeadline(t *testing.T) {
	worldtest.Local(t, 3, 16<<20, func(r *worldtest.Rank) {
		x := endpoint(r, p2p.Options{Timeout: proctest.Scaled(300 * time.Millisecond)})
		b := make([]byte, 4)
		if r.Rank() == 0 {
			err := x.Recv(nil, p2p.AnyRank, 7, memory.Host(b))
			require.ErrorIs(r.T, err, comm.ErrTimeout)
			require.ErrorContains(r.T, err, "tag 7, 4 bytes from any rank")
			require.ErrorContains(r.T, err, "no rank has sent a message that rank 0 has not received")
			var named *comm.PeerError
			require.False(r.T, errors.As(err, &named), err)
		}
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 2 {
			r.Must(x.Send(nil, 0, 8, memory.Host([]byte("four"))))
			r.Must(x.Send(nil, 0, 9, memory.Host([]byte("five!"))))
		}
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 0 {
			err := x.Recv(nil, p2p.AnyRank, 7, memory.Host(b))
			require.ErrorContains(r.T, err, "rank 2 has sent what rank 0 has not received: tag 8, 4 bytes; tag 9, 5 bytes")
			require.ErrorIs(r.T, x.Recv(nil, p2p.AnyRank, 9, memory.Host(b)), comm.ErrMismatch)
			r.Must(x.Recv(nil, p2p.AnyRank, 8, memory.Host(b)))
			require.Equal(r.T, "four", string(b))
			require.ErrorIs(r.T, x.Send(nil, p2p.AnyRank, 8, memory.Host(b)), comm.ErrInvalid)
		}
		r.Must(x.Close(r.Ctx))
	})
}
