package host

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/double"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// acrossWorld is ranks on hosts of perHost each, joined by the rails of a test.
type acrossWorld struct {
	engines []*Engine // by rank
	ports   []kernels.Port
	bounds  []kernels.ExchangeBounds
}

// newAcrossWorld makes it with calls inside hosts in the modes of a small family.
func newAcrossWorld(t *testing.T, net *double.Net, hosts, perHost, slots int, slotBytes int64) *acrossWorld {
	w, size := &acrossWorld{}, hosts*perHost
	joined := make([]rails.Rail, size)
	for host := range hosts {
		ranks := make([]int, perHost)
		for p := range ranks {
			ranks[p] = host*perHost + p
		}
		const stride = 4 << 20
		rng, err := shm.Reserve(stride * int64(perHost))
		require.NoError(t, err)
		t.Cleanup(func() { rng.Close() })
		fd, err := shm.Create("kernels-test", stride*int64(perHost))
		require.NoError(t, err)
		require.NoError(t, rng.MapFD(0, fd, 0, stride*int64(perHost)))
		bells := NewBells(perHost)
		for p, rank := range ranks {
			e := New(kernels.Space{Mem: rng.Bytes(), Base: rng.Addr(), Stride: stride, Rank: p, Size: perHost, Ranks: ranks}, bells, func() error { return nil })
			rail, err := net.Open(rails.Config{Rank: rank, Size: size, Key: 7, Segment: e.space.Segment(p), Ring: e.Ring})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, rail.Close()) })
			require.NoError(t, rail.Open(0, stride))
			joined[rank], w.engines = rail, append(w.engines, e)
			w.bounds = append(w.bounds, kernels.ExchangeBounds{Size: size, Slots: slots, SlotBytes: slotBytes, EagerBytes: 100, PacketBytes: 20,
				Hosts: &kernels.Hosts{Rank: rank, Ranks: ranks, Rail: rail}})
		}
	}
	for a := range joined {
		for b := range joined {
			if a/perHost != b/perHost {
				require.NoError(t, joined[a].Connect(b, joined[b].Address()))
			}
		}
	}
	return w
}

// open makes a port for each rank, in clear memory, all at the same place.
func (w *acrossWorld) open(t *testing.T) {
	w.ports = nil
	for r, e := range w.engines {
		layout, err := e.Layout(&w.bounds[r])
		require.NoError(t, err)
		require.Less(t, kernels.HeaderBytes+layout.Bytes, e.space.Stride)
		clear(e.space.Range(e.space.Rank, kernels.HeaderBytes, layout.Zero))
		p, err := e.Open(&w.bounds[r], kernels.HeaderBytes)
		require.NoError(t, err)
		w.ports = append(w.ports, p)
	}
	for _, p := range w.ports {
		p.Ready()
	}
}

// each runs f on every rank and returns the errors.
func (w *acrossWorld) each(f func(rank int) error) []error {
	errs := make([]error, len(w.ports))
	var all sync.WaitGroup
	for r := range w.ports {
		all.Go(func() { errs[r] = f(r) })
	}
	all.Wait()
	return errs
}

// call is one exchange of the matrix on a rank, every byte of which is checked.
func (w *acrossWorld) call(rank, call int, m [][]int64, timeout time.Duration) error {
	ro := routes(m, rank)
	src, dst := make([]byte, ro.SendOffsets[len(m)-1]+m[rank][len(m)-1]), make([]byte, ro.RecvOffsets[len(m)-1]+m[len(m)-1][rank])
	for p, n := range m[rank] {
		for i := range n {
			src[ro.SendOffsets[p]+i] = element(call, rank, p, i)
		}
	}
	if err := w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(src, -1), Dst: buffer(dst, -1), Launched: kernels.Launched{Timeout: timeout}}); err != nil {
		return err
	}
	clear(src) // it is ours again
	for p := range m {
		for i := range m[p][rank] {
			if got, want := dst[ro.RecvOffsets[p]+i], element(call, p, rank, i); got != want {
				return fmt.Errorf("call %d: byte %d from rank %d is %d, want %d", call, i, p, got, want)
			}
		}
	}
	return nil
}

// Messages arrive as they were sent over rails on which puts of different words overtake each other and bytes come late, with rings that are
// full all the time; and a communicator at the place of another begins anew.
func TestX3_RailsThatReorder(t *testing.T) {
	for _, c := range []struct{ hosts, perHost, slots int }{{2, 1, 1}, {2, 1, 4}, {2, 2, 2}, {3, 2, 3}} {
		t.Run(fmt.Sprintf("%d hosts of %d, %d slots", c.hosts, c.perHost, c.slots), func(t *testing.T) {
			w := newAcrossWorld(t, double.New(uint64(c.slots), 300*time.Microsecond), c.hosts, c.perHost, c.slots, 512)
			for seed := range uint64(3) {
				w.open(t)
				for r, err := range w.each(func(rank int) error {
					rnd := rand.New(rand.NewPCG(seed, 1))
					for call := range 12 {
						m := make([][]int64, len(w.ports))
						for s := range m {
							for range m {
								m[s] = append(m[s], []int64{0, 1, 447, 448, 449, 960, rnd.Int64N(4000)}[rnd.IntN(7)])
							}
						}
						if err := w.call(rank, call, m, 20*time.Second); err != nil {
							return err
						}
					}
					return nil
				}) {
					require.NoError(t, err, "rank %d", r)
				}
				for _, err := range w.each(func(rank int) error { return w.ports[rank].(*port).Rest() }) {
					require.NoError(t, err)
				}
			}
		})
	}
}

// Ranks of another host that do not come are named at the deadline, and a lost one as soon as it is put to.
func TestF1_ALostHostIsNamedAtTheDeadline(t *testing.T) {
	net := double.New(1, 100*time.Microsecond)
	w := newAcrossWorld(t, net, 2, 2, 4, 512)
	w.open(t)
	m := [][]int64{{5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}}
	for _, err := range w.each(func(rank int) error { return w.call(rank, 1, m, 10*time.Second) }) {
		require.NoError(t, err)
	}
	errs := w.each(func(rank int) error {
		if rank > 1 { // they do not come
			return nil
		}
		return w.call(rank, 2, m, 100*time.Millisecond)
	})
	for rank := range 2 {
		var peer *comm.PeerError
		require.ErrorIs(t, errs[rank], comm.ErrTimeout)
		require.True(t, errors.As(errs[rank], &peer) && peer.Rank >= 2, "%v", errs[rank])
	}

	net.Lose(3)
	errs = w.each(func(rank int) error {
		if rank > 1 {
			return nil
		}
		return w.call(rank, 3, m, 10*time.Second)
	})
	require.True(t, slices.ContainsFunc(errs, func(err error) bool {
		var peer *comm.PeerError
		return errors.Is(err, comm.ErrPeerLost) && errors.As(err, &peer) && peer.Rank == 3
	}), "%v", errs)
}

// An interrupt ends a wait for another host at once.
func TestF1_AnInterruptEndsAWaitForAnotherHost(t *testing.T) {
	w := newAcrossWorld(t, double.New(1, 100*time.Microsecond), 2, 1, 4, 512)
	w.open(t)
	time.AfterFunc(50*time.Millisecond, w.engines[0].Interrupt)
	start := time.Now()
	require.ErrorIs(t, w.call(0, 1, [][]int64{{5, 5}, {5, 5}}, 30*time.Second), comm.ErrAborted)
	require.Less(t, time.Since(start), 10*time.Second)
}
