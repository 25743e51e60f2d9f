package host

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
	"github.com/switchyard-moe/switchyard/kernels"
)

// pointsAcrossWorld is ranks on hosts whose ports make transfers.
type pointsAcrossWorld struct {
	*acrossWorld
	issued []atomic.Uint64
	limit  int64 // up to where their control blocks go
}

func newPointsAcrossWorld(t *testing.T, net *double.Net, hosts, perHost int, c kernels.PointBounds) *pointsAcrossWorld {
	w := &pointsAcrossWorld{acrossWorld: newAcrossWorld(t, net, hosts, perHost, 1, 64)}
	w.issued = make([]atomic.Uint64, len(w.engines))
	for r, e := range w.engines {
		own := c
		own.Size, own.Hosts = len(w.engines), w.bounds[r].Hosts
		layout, err := e.Layout(&own)
		require.NoError(t, err)
		clear(e.space.Range(e.space.Rank, kernels.HeaderBytes, layout.Zero))
		p, err := e.Open(&own, kernels.HeaderBytes)
		require.NoError(t, err)
		w.ports = append(w.ports, p)
		w.limit = kernels.AlignUp(kernels.HeaderBytes+layout.Bytes, 4096)
	}
	for _, p := range w.ports {
		p.Ready()
		t.Cleanup(func() { require.NoError(t, p.Close()) })
	}
	return w
}

func (w *pointsAcrossWorld) turn(r int) kernels.Turn {
	return kernels.Turn{Number: w.issued[r].Add(1), Issued: &w.issued[r]}
}

func (w *pointsAcrossWorld) messages(r int, within time.Duration, list ...kernels.Message) error {
	return w.ports[r].Launch(nil, &kernels.Messages{Launched: kernels.Launched{Timeout: within}, List: list, Turn: w.turn(r)})
}

func (w *pointsAcrossWorld) transfer(r int, within time.Duration, a kernels.Transfer) error {
	a.Timeout, a.Turn = within, w.turn(r)
	return w.ports[r].Launch(nil, &a)
}

func inMemory(b []byte) kernels.Buffer { return kernels.Buffer{Mem: b, Bytes: int64(len(b))} }

// empty reports whether no message waits for its receiver.
func (w *pointsAcrossWorld) empty() bool {
	for _, p := range w.ports {
		for _, f := range p.(*port).fam.(*transfers).across.pairs {
			f.mu.Lock()
			f.answers()
			n := len(f.unanswered())
			f.mu.Unlock()
			if n > 0 {
				return false
			}
		}
	}
	return true
}

// noteBytes are the sizes of messages, one tag for each, so that sizes agree whichever are lost. All words of a message have its number.
var noteBytes = []int{8, 16, 304, 2000}

func noted(tag int, id uint64) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, id), noteBytes[tag]/8)
}

// Ranks of several hosts send and receive while both sides give up at any time, and puts land late and out of order: what arrives is whole and
// in order, and when they are patient again everything arrives.
func TestF1_MessagesAcrossHostsThatAreGivenUp(t *testing.T) {
	for _, world := range [][2]int{{2, 1}, {2, 2}, {3, 1}} {
		for _, park := range []int64{-1, 1 << 20} {
			t.Run(fmt.Sprintf("%d hosts of %d, %d", world[0], world[1], park), func(t *testing.T) {
				w := newPointsAcrossWorld(t, double.New(uint64(world[0]), 2*time.Millisecond), world[0], world[1],
					kernels.PointBounds{Semaphores: 1, Boxes: 3, EagerBytes: 16, StagingBytes: 128, ParkBytes: park})
				n := len(w.engines)
				var sent, got, gaveUp atomic.Int64
				var all, senders sync.WaitGroup
				over := make(chan struct{})
				check := func(err error) bool {
					if err == nil {
						return true
					}
					if !errors.Is(err, comm.ErrTimeout) && !errors.Is(err, kernels.ErrFailed) {
						t.Error(err)
					}
					gaveUp.Add(1)
					return false
				}
				for me := range n {
					for peer := range n {
						if peer == me {
							continue
						}
						senders.Go(func() {
							rnd := rand.New(rand.NewPCG(uint64(me), uint64(peer)))
							for id := uint64(1); id <= 60; id++ {
								tag := rnd.IntN(len(noteBytes))
								b := noted(tag, id)
								within := time.Duration(rnd.IntN(8000)) * time.Microsecond
								if check(w.messages(me, within, kernels.Message{Peer: peer, Tag: uint64(tag), Buffer: inMemory(b)})) {
									sent.Add(1)
								}
								clear(b)
							}
						})
						for tag := range noteBytes {
							all.Go(func() {
								rnd, last := rand.New(rand.NewPCG(uint64(me), uint64(100*tag+peer))), uint64(0)
								for {
									within := time.Duration(rnd.IntN(8000)) * time.Microsecond
									b := make([]byte, noteBytes[tag])
									if !check(w.messages(me, within, kernels.Message{Receive: true, Peer: peer, Tag: uint64(tag), Buffer: inMemory(b)})) {
										select {
										case <-over:
											return
										default:
										}
										continue
									}
									id := binary.LittleEndian.Uint64(b)
									if id <= last || !bytes.Equal(b, noted(tag, id)) {
										t.Errorf("rank %d from %d, tag %d: message %d behind %d, %v", me, peer, tag, id, last, b[:8])
									}
									last = id
									got.Add(1)
								}
							})
						}
					}
				}
				senders.Wait()
				require.Eventually(t, w.empty, time.Minute, time.Millisecond)
				close(over)
				all.Wait()
				t.Logf("%d sent, %d received, %d given up", sent.Load(), got.Load(), gaveUp.Load())
				require.Positive(t, got.Load())
				for me := range n {
					all.Go(func() {
						for round := range 20 {
							var list []kernels.Message
							var into [][]byte
							for peer := range n {
								if peer != me {
									b := make([]byte, noteBytes[3])
									into = append(into, b)
									list = append(list, kernels.Message{Peer: peer, Tag: 3, Buffer: inMemory(noted(3, uint64(1000+round)))},
										kernels.Message{Receive: true, Peer: peer, Tag: 3, Buffer: inMemory(b)})
								}
							}
							if err := w.messages(me, 20*time.Second, list...); err != nil {
								t.Error(err)
								return
							}
							for _, b := range into {
								if !bytes.Equal(b, noted(3, uint64(1000+round))) {
									t.Errorf("rank %d, round %d: got %v", me, round, b[:8])
								}
							}
						}
					})
				}
				all.Wait()
			})
		}
	}
}

// A signal comes behind the puts before it, also where they land out of order. A rank that gets is served while the other one makes no call.
func TestPutsAcrossHostsComeBeforeTheirSignal(t *testing.T) {
	const slots, each, most = 4, 300 << 10, 20 * time.Second
	w := newPointsAcrossWorld(t, double.New(3, time.Millisecond), 2, 1, kernels.PointBounds{Semaphores: 2, Boxes: 3, EagerBytes: 16, StagingBytes: 64 << 10})
	var both sync.WaitGroup
	both.Go(func() {
		for i := range 100 {
			if i >= slots {
				require.NoError(t, w.transfer(0, most, kernels.Transfer{Kind: kernels.WaitTransfer, Peer: 1, Semaphore: 1}))
			}
			src := bytes.Repeat([]byte{byte(i)}, each)
			require.NoError(t, w.transfer(0, most, kernels.Transfer{Kind: kernels.PutTransfer, Peer: 1, Buffer: inMemory(src), Place: w.limit + int64(i%slots*each)}))
			clear(src)
			require.NoError(t, w.transfer(0, most, kernels.Transfer{Kind: kernels.SignalTransfer, Peer: 1}))
		}
	})
	both.Go(func() {
		for i := range 100 {
			require.NoError(t, w.transfer(1, most, kernels.Transfer{Kind: kernels.WaitTransfer, Peer: 0}))
			got := w.engines[1].space.Range(0, w.limit+int64(i%slots*each), each)
			require.True(t, bytes.Equal(bytes.Repeat([]byte{byte(i)}, each), got), i)
			if i%10 == 0 {
				b := make([]byte, each)
				require.NoError(t, w.transfer(1, most, kernels.Transfer{Kind: kernels.GetTransfer, Peer: 0, Buffer: inMemory(b), Place: w.limit}))
				require.Equal(t, make([]byte, each), b)
			}
			require.NoError(t, w.transfer(1, most, kernels.Transfer{Kind: kernels.SignalTransfer, Peer: 0, Semaphore: 1}))
		}
	})
	both.Wait()
	b := make([]byte, slots*each)
	require.NoError(t, w.transfer(0, most, kernels.Transfer{Kind: kernels.GetTransfer, Peer: 1, Buffer: inMemory(b), Place: w.limit}))
	require.True(t, bytes.Equal(w.engines[1].space.Range(0, w.limit, slots*each), b))
}

// So many signals can wait for a rank of another host. One more waits for room, has a deadline that names the rank and its host, and can be made
// again.
func TestF1_SignalsAcrossHostsAreBounded(t *testing.T) {
	w := newPointsAcrossWorld(t, double.New(4, 100*time.Microsecond), 2, 1, kernels.PointBounds{Semaphores: 2, Boxes: 1, EagerBytes: 16, StagingBytes: 64})
	signal := kernels.Transfer{Kind: kernels.SignalTransfer, Peer: 1, Semaphore: 1}
	for range signalLog {
		require.NoError(t, w.transfer(0, 10*time.Second, signal))
	}
	err := w.transfer(0, 50*time.Millisecond, signal)
	require.EqualError(t, err, "comm: signal: rank 1: timed out after 50ms: on host 1: it has not consumed the last 64 signals of semaphore 1")
	for range signalLog {
		require.NoError(t, w.transfer(1, 10*time.Second, kernels.Transfer{Kind: kernels.WaitTransfer, Peer: 0, Semaphore: 1}))
	}
	require.NoError(t, w.transfer(0, 10*time.Second, signal))
	require.NoError(t, w.transfer(1, 10*time.Second, kernels.Transfer{Kind: kernels.WaitTransfer, Peer: 0, Semaphore: 1}))
	err = w.transfer(1, 50*time.Millisecond, kernels.Transfer{Kind: kernels.WaitTransfer, Peer: 0, Semaphore: 1})
	require.EqualError(t, err, "comm: wait: rank 0: timed out after 50ms (semaphore 1): on host 0: it has signalled 65 times, and this rank has consumed 65")
}
