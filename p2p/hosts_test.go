package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// The tests of one host hold on two.
func TestAlsoOnTwoHosts(t *testing.T) {
	worldtest.Again(t, "RegisteredMemory|Follow|Rings|CloseEnds|Allocate|Emulated|Overtaken|EachSignal|SizesThatDisagree|SharedMemory|LetGo")
}

// Messages, puts and gets between hosts follow the same models as on one, with a process for every rank, in network namespaces.
func TestTransfersAcrossHostsOfProcesses(t *testing.T) {
	worldtest.EachHostWorld(t, segment, func(r *worldtest.Rank) {
		messages(8)(r)
		putsAndGets(5)(r)
	})
}

func TestTransfersAcrossHosts(t *testing.T) {
	for _, w := range worldtest.HostWorlds()[:3] {
		t.Run(fmt.Sprintf("%d of %d", w[0], w[1]), func(t *testing.T) {
			worldtest.Hosts(t, w[0], w[1], segment, func(r *worldtest.Rank) {
				messages(20)(r)
				putsAndGets(20)(r)
			})
		})
	}
}

// Ranks that are lost in the middle of messages, or of puts and signals, are named on all hosts, and the hosts that are left go on.
func TestF2_ADeadHostIsNamed(t *testing.T) {
	others := func(r *worldtest.Rank) (peers []int) {
		for peer := range r.Size() {
			if peer != r.Rank() {
				peers = append(peers, peer)
			}
		}
		return peers
	}
	t.Run("messages", func(t *testing.T) {
		worldtest.HostDies(t, segment, func(r *worldtest.Rank) (func() error, func(context.Context) error) {
			x := endpoint(r, p2p.Options{Timeout: time.Minute})
			src, dst := make([][]byte, r.Size()), make([][]byte, r.Size()) // of each peer: messages may arrive side by side
			var list []p2p.Message
			for _, peer := range others(r) {
				n := 1 + peer*r.Rank()*200_000
				src[peer], dst[peer] = make([]byte, n), make([]byte, n)
				fill(src[peer], 0, r.Rank(), peer)
				list = append(list, p2p.Message{Peer: peer, View: memory.Host(src[peer])}, p2p.Message{Receive: true, Peer: peer, View: memory.Host(dst[peer])})
			}
			return func() error {
				for _, peer := range others(r) {
					clear(dst[peer])
				}
				err := x.Batch(nil, list...)
				for _, peer := range others(r) {
					if err == nil {
						err = worldtest.Check(dst[peer], 0, peer, r.Rank())
					}
				}
				return err
			}, x.Close
		})
	})
	t.Run("signals", func(t *testing.T) {
		worldtest.HostDies(t, segment, func(r *worldtest.Rank) (func() error, func(context.Context) error) {
			const room = 1 << 18
			x, at := endpoint(r, p2p.Options{Timeout: time.Minute}), alloc(r, int64(room*r.Size()))
			part := func(rank int) memory.View { return at.Slice(int64(room*rank), room) }
			fill(part(r.Rank()).Bytes(), 0, r.Rank(), 0)
			return func() (err error) {
				for _, peer := range others(r) {
					err = errors.Join(err, x.Put(nil, peer, part(r.Rank()), part(r.Rank())), x.Signal(nil, peer, 0))
				}
				for _, peer := range others(r) {
					if err == nil {
						err = x.Wait(nil, peer, 0)
					}
					if err == nil { // the peer may put the same again meanwhile
						err = worldtest.Check(part(peer).Bytes(), 0, peer, 0)
					}
				}
				return err
			}, x.Close
		})
	})
}

// A message that was copied aside arrives while its sender makes no call, and memory can be got from a rank that makes none.
func TestARankThatMakesNoCallIsServed(t *testing.T) {
	worldtest.Hosts(t, 2, 1, segment, func(r *worldtest.Rank) {
		x, at := endpoint(r, p2p.Options{Timeout: 20 * time.Second}), alloc(r, 300<<10)
		if r.Rank() == 0 {
			fill(at.Bytes(), 1, 0, 1)
			src := make([]byte, 1<<20)
			fill(src, 2, 0, 1)
			r.Must(x.Send(nil, 1, 3, memory.Host(src)))
			clear(src)
			r.Barrier()
		} else {
			r.Barrier()
			got := make([]byte, 1<<20)
			r.Must(x.Recv(nil, 0, 3, memory.Host(got)))
			r.Must(worldtest.Check(got, 2, 0, 1))
			r.Must(x.Get(nil, 0, memory.Host(got[:300<<10]), at))
			r.Must(worldtest.Check(got[:300<<10], 1, 0, 1))
		}
		r.Barrier()
		r.Must(x.Close(r.Ctx))
	})
}

// Registered memory of a rank on another host is refused.
func TestF3_RegisteredMemoryOfAnotherHostIsRefused(t *testing.T) {
	worldtest.Hosts(t, 2, 1, segment, func(r *worldtest.Rank) {
		x, page := endpoint(r, p2p.Options{}), int64(os.Getpagesize())
		fd, err := shm.Create("p2p", page)
		r.Must(err)
		m, err := memory.MapFile(fd, 0, page)
		r.Must(err)
		g, err := r.Heap.Register(r.Ctx, m.View())
		r.Must(err)
		for _, err := range []error{x.Put(nil, 1-r.Rank(), g.View(), memory.Host(make([]byte, page))), x.Get(nil, 1-r.Rank(), memory.Host(make([]byte, page)), g.View())} {
			require.ErrorIs(r.T, err, comm.ErrUnsupported)
			require.ErrorContains(r.T, err, fmt.Sprintf("registered memory of rank %d on host %d", 1-r.Rank(), 1-r.Rank()))
		}
		r.Barrier()
		r.Must(g.Deregister(r.Ctx))
		r.Must(x.Close(r.Ctx))
		r.Must(m.Close())
	})
}

// Ranks of two hosts that disagree on a size both get both: of a message that its sender was done with, from Close at the latest.
func TestF3_SizesThatDisagreeAcrossHosts(t *testing.T) {
	worldtest.Hosts(t, 2, 1, segment, func(r *worldtest.Rank) {
		named := func(err error, sent, expected uint64) {
			var m *kernels.MessageMismatchError
			require.ErrorIs(r.T, err, comm.ErrMismatch)
			require.ErrorAs(r.T, err, &m)
			require.Equal(r.T, kernels.MessageMismatchError{Src: 0, Dst: 1, Tag: 5, Number: m.Number, Sent: sent, Expected: expected}, *m)
		}
		for _, sent := range []int64{100 << 10, 10} {
			x := endpoint(r, p2p.Options{Timeout: 10 * time.Second, ParkBytes: -1})
			v := memory.Host(make([]byte, sent))
			if r.Rank() == 0 {
				if err := x.Send(nil, 1, 5, v); sent > 10 {
					named(err, uint64(sent), uint64(sent-1))
					r.Must(x.Send(nil, 1, 5, v))
				}
				if err := x.Close(r.Ctx); sent == 10 {
					named(err, 10, 9)
				} else {
					r.Must(err)
				}
				continue
			}
			named(x.Recv(nil, 0, 5, v.Slice(0, sent-1)), uint64(sent), uint64(sent-1))
			if sent > 10 {
				r.Must(x.Recv(nil, 0, 5, v))
			}
			r.Must(x.Close(r.Ctx))
		}
	})
}
