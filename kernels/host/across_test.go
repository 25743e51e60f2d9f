package host

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
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
	place   int64 // of outputs that peers can write, 0 for none
}

// newAcrossWorld makes it with calls inside hosts in the modes of a small family.
func newAcrossWorld(t *testing.T, net *double.Net, hosts, perHost, slots int, slotBytes int64) *acrossWorld {
	return newAcrossWorldOf(t, net, hosts, perHost, slots, slotBytes, 4<<20)
}

// newAcrossWorldOf has segments of stride bytes.
func newAcrossWorldOf(t *testing.T, net *double.Net, hosts, perHost, slots int, slotBytes, stride int64) *acrossWorld {
	w, size := &acrossWorld{}, hosts*perHost
	hostOf := make([]int, size)
	for r := range hostOf {
		hostOf[r] = r / perHost
	}
	joined := make([]rails.Rail, size)
	for host := range hosts {
		ranks := make([]int, perHost)
		for p := range ranks {
			ranks[p] = host*perHost + p
		}
		rng, err := shm.Reserve(stride * int64(perHost))
		require.NoError(t, err)
		t.Cleanup(func() { rng.Close() })
		fd, err := shm.Create("kernels-test", stride*int64(perHost))
		require.NoError(t, err)
		require.NoError(t, rng.MapFD(0, fd, 0, stride*int64(perHost)))
		bells := NewBells(perHost)
		for p, rank := range ranks {
			e := New(kernels.Space{Mem: rng.Bytes(), Base: rng.Addr(), Stride: stride, Rank: p, Size: perHost, Ranks: ranks, Host: host}, bells, func() error { return nil })
			rail, err := net.Open(rails.Config{Rank: rank, Size: size, Key: 7, Segment: e.space.Segment(p), Ring: e.Ring})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, rail.Close()) })
			require.NoError(t, rail.Open(0, stride))
			joined[rank], w.engines = rail, append(w.engines, e)
			w.bounds = append(w.bounds, kernels.ExchangeBounds{Size: size, Slots: slots, SlotBytes: slotBytes, EagerBytes: 100, PacketBytes: 20, BundleBytes: 448,
				Hosts: &kernels.Hosts{Rank: rank, Ranks: ranks, Host: hostOf, Limit: stride, Rail: rail}})
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
	out := buffer(dst, -1)
	if e := w.engines[rank]; w.place > 0 {
		dst = e.space.Range(e.space.Rank, w.place, int64(len(dst)))
		out = buffer(dst, w.place)
	}
	for p, n := range m[rank] {
		for i := range n {
			src[ro.SendOffsets[p]+i] = element(call, rank, p, i)
		}
	}
	if err := w.ports[rank].Launch(nil, &kernels.AllToAllV{Routes: ro, Src: buffer(src, -1), Dst: out, Launched: kernels.Launched{Timeout: timeout}}); err != nil {
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

// Large messages go to their places in outputs that peers can write, in pieces, and through rings to those that they cannot, or that lie
// where puts do not reach. Some calls have both.
func TestX3_LargeMessagesOfHostsLandInPlace(t *testing.T) {
	w := newAcrossWorld(t, double.New(1, 300*time.Microsecond), 2, 2, 3, 64<<10)
	w.open(t)
	for call, place := range []int64{2 << 20, 0, 2 << 20, 3 << 20} {
		w.place = place
		for r := range w.bounds {
			w.bounds[r].Hosts.Limit = 3 << 20
		}
		const big = 2*putBytes + 5
		m := [][]int64{{0, 3, 7, 449}, {1, 2, putBytes, 448}, {putBytes + 1, 0, 5, 6}, {500, big, 9, 0}}
		for r, err := range w.each(func(rank int) error { return w.call(rank, call, m, time.Minute) }) {
			require.NoError(t, err, "rank %d, call %d", r, call)
		}
		if p := w.families(1)[0]; call == 0 {
			require.EqualValues(t, 3, p.across.peers[1].landed, "chunks from rank 3 in place")
		}
	}
	require.EqualValues(t, 6, w.families(1)[0].across.peers[1].landed)
	for _, err := range w.each(func(rank int) error { return w.ports[rank].(*port).Rest() }) {
		require.NoError(t, err)
	}
}

// families are the exchanges of ranks.
func (w *acrossWorld) families(ranks ...int) (all []*exchanges) {
	for _, r := range ranks {
		all = append(all, w.ports[r].(*port).fam.(*exchanges))
	}
	return all
}

// A bundle is one put for a host, and takes no other where all messages are small.
func TestX3_SmallMessagesAreOnePutAHost(t *testing.T) {
	w := newAcrossWorld(t, double.New(1, 300*time.Microsecond), 3, 2, 3, 1024)
	rails := make([]*countedRail, len(w.bounds))
	for r := range rails {
		rails[r] = &countedRail{Rail: w.bounds[r].Hosts.Rail}
		w.bounds[r].Hosts.Rail = rails[r]
	}
	w.open(t)
	const calls = 5
	for _, err := range w.each(func(rank int) error {
		for call := range calls {
			if err := w.call(rank, call, slices.Repeat([][]int64{{1, 0, 448, 3, 4, 440}}, 6), time.Minute); err != nil {
				return err
			}
		}
		return nil
	}) {
		require.NoError(t, err)
	}
	for _, r := range rails {
		require.EqualValues(t, 2*calls, r.puts.Load())
	}
}

type countedRail struct {
	rails.Rail
	puts atomic.Int64
}

func (r *countedRail) Put(peer int, place int64, src []byte, signal int64) error {
	r.puts.Add(1)
	return r.Rail.Put(peer, place, src, signal)
}

// A silent rank of another host is named at its deadline while others still move bytes.
func TestF1_SilenceIsThatOfEachRank(t *testing.T) {
	t.Parallel() // it mostly waits
	w := newAcrossWorld(t, double.New(1, 4*time.Millisecond), 3, 1, 1, 512)
	w.open(t)
	m := [][]int64{{0, 8 << 20, 1}, {8 << 20, 0, 1}, {1, 1, 0}} // takes 16384 round trips of up to 4 ms
	start := time.Now()
	errs := w.each(func(rank int) error {
		if rank == 2 {
			return nil
		}
		return w.call(rank, 1, m, 2*time.Second)
	})
	require.Less(t, time.Since(start), 20*time.Second)
	for rank := range 2 {
		var peer *comm.PeerError
		require.ErrorIs(t, errs[rank], comm.ErrTimeout)
		require.True(t, errors.As(errs[rank], &peer) && peer.Rank == 2, "%v", errs[rank])
	}
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
						if err := w.call(rank, call, m, time.Minute); err != nil {
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
	t.Parallel() // it mostly waits
	net := double.New(1, 100*time.Microsecond)
	w := newAcrossWorld(t, net, 2, 2, 4, 512)
	w.open(t)
	m := [][]int64{{5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}}
	for _, err := range w.each(func(rank int) error { return w.call(rank, 1, m, time.Minute) }) {
		require.NoError(t, err)
	}
	errs := w.each(func(rank int) error {
		if rank > 1 { // they do not come
			return nil
		}
		return w.call(rank, 2, m, time.Second)
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
		return w.call(rank, 3, m, time.Second)
	})
	require.True(t, slices.ContainsFunc(errs, func(err error) bool {
		var peer *comm.PeerError
		return errors.Is(err, comm.ErrPeerLost) && errors.As(err, &peer) && peer.Rank == 3
	}), "%v", errs)
}

// A rank that waits for one of another host is not to blame: the other is, also for a rank that waits for the first.
func TestF2_TheCulpritIsOnAnotherHost(t *testing.T) {
	w := newAcrossWorld(t, double.New(1, 0), 2, 2, 4, 512)
	w.open(t)
	var wait waiter
	wait.begin(w.ports[1].(*port), nil, call{at: w.families(1)[0].c.Epoch(), epoch: 1}, time.Minute)
	for range 2 { // the first is a look
		require.NoError(t, wait.idle(w.families(1)[0].across.far(3)))
	}
	require.Equal(t, []int{-1, 3}, w.engines[0].Awaits())
	err := w.call(0, 1, [][]int64{{5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}, {5, 5, 5, 5}}, 100*time.Millisecond)
	var peer *comm.PeerError
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.True(t, errors.As(err, &peer) && peer.Rank == 3, "%v", err)
	require.ErrorContains(t, err, "rank 1 waits for rank 3 of another host")
	wait.busy()
	require.Equal(t, -1, w.engines[0].Awaits()[1])
	require.Equal(t, []int{3, -1}, w.engines[1].Awaits(), "the word of a wait that failed says who is to blame")
}

// An interrupt ends a wait for another host at once.
func TestF1_AnInterruptEndsAWaitForAnotherHost(t *testing.T) {
	w := newAcrossWorld(t, double.New(1, 100*time.Microsecond), 2, 1, 4, 512)
	w.open(t)
	time.AfterFunc(50*time.Millisecond, w.engines[0].Interrupt)
	start := time.Now()
	require.ErrorIs(t, w.call(0, 1, [][]int64{{5, 5}, {5, 5}}, 5*time.Minute), comm.ErrAborted)
	require.Less(t, time.Since(start), time.Minute)
}
