package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
)

// ledger is what the emulated driver holds, by count and device.
type ledger map[emulated.Count][emulated.Devices]int

// accounts are the emulated devices and what the driver held when they were opened.
type accounts struct {
	*testing.T
	dev    [emulated.Devices]*cuda.Device
	ctx    [emulated.Devices]*cuda.Context
	before ledger
}

func newAccounts(t *testing.T) *accounts {
	a := &accounts{T: t}
	for i := range a.dev {
		a.dev[i], a.ctx[i] = emulated.Device(t, i)
	}
	a.before = a.now()
	return a
}

func (a *accounts) now() ledger {
	l := make(ledger)
	for _, c := range emulated.Leaks() {
		var n [emulated.Devices]int
		for i, d := range a.dev {
			n[i] = c.Of(a, d)
		}
		l[c] = n
	}
	return l
}

func (a *accounts) nothingIsLeft(why ...any) {
	a.Helper()
	now := a.now()
	for _, c := range emulated.Leaks() {
		require.Equal(a, a.before[c], now[c], append([]any{c.String() + " %v"}, fmt.Sprint(why...))...)
	}
}

// emulatedRanks runs s on n ranks of the emulated driver, in one process that knows it and in one that does not, with multicast objects that
// are passed in either way; afterwards the driver holds what it held before.
func emulatedRanks(t *testing.T, n int, s func(t *rankT, g *comm.Group, by Multicast)) {
	a := newAccounts(t)
	for _, by := range []Multicast{MulticastByFile, MulticastByFabric} {
		for how, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
			t.Run(fmt.Sprint(how, " ", by), func(t *testing.T) {
				runRanks(t, groups(t, n), func(t *rankT, g *comm.Group) { s(t, g, by) })
			})
			a.nothingIsLeft(how, by)
		}
	}
}

func TestMulticastReachesEveryRanksMemory(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	emulatedRanks(t, 3, func(t *rankT, g *comm.Group, by Multicast) {
		r := newCUDARank(t, g, Options{SegmentBytes: 3 << 20, Multicast: by})
		sp, me := r.h.Space(), g.Rank()
		on, why := r.h.Multicast()
		require.True(t, on, why)
		require.Zero(t, sp.Multicast%emulated.GoodMulticast)
		require.EqualValues(t, 1, len(r.h.multi.objects))
		extents := 1
		// each rank in its turn writes at both ends of everything there is, in its own mapping
		check := func() {
			require.Len(t, r.h.extents, extents)
			for from := range g.Size() {
				for i, e := range r.h.extents {
					for k, at := range []int64{e.off + 4096*int64(16*(1-min(i, 1))), e.off + e.n - 100} {
						want := pattern(100, from, i, k+10*extents)
						r.barrier()
						if me == from {
							require.NoError(t, r.d.Context().Write(0, sp.Multicast+uintptr(at), want))
						}
						r.barrier()
						require.True(t, bytes.Equal(want, r.read(r.peer(me, at, 100))), "extent %d, from rank %d", i, from)
					}
				}
			}
		}
		check()
		for _, n := range []int64{1, 4 << 20, 8 << 20, 40 << 20} { // into the first object's rest, across its end, and more than an object
			require.NoError(t, r.h.Grow(t.ctx, n))
			extents++
			check()
		}
		require.Len(t, r.h.multi.objects, 3)
		require.Len(t, r.h.multi.objects[0].bound, 4, "several binds of one object")
		r.barrier()
		if me == 0 {
			d := r.d.Context().Device()
			require.Equal(t, 3*g.Size(), emulated.Handles.Of(t, d), "one of each object on each rank, none of memory")
			require.Zero(t, emulated.Files.Of(t, d))
		}
		r.barrier()
		b, err := r.h.Alloc(30 << 20)
		require.NoError(t, err)
		require.Greater(t, b.Segment(), 0)
		r.barrier()
		if me == 1 {
			require.NoError(t, r.d.Context().Write(0, sp.Multicast+uintptr(b.Offset()), []byte{7}))
		}
		r.barrier()
		require.EqualValues(t, 7, r.read(b.View())[0])
		r.barrier()
		r.close()
	})
}

func TestMulticastIsOffUnlessItIsAskedForAndAllowed(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	without := func(t *testing.T, ranks int, o Options, wants ...string) {
		t.Helper()
		runRanks(t, localRanks(t, ranks), func(t *rankT, g *comm.Group) {
			r := newCUDARank(t, g, o)
			on, why := r.h.Multicast()
			require.False(t, on)
			require.Zero(t, r.h.Space().Multicast)
			for _, want := range wants {
				require.Contains(t, why, want)
			}
			if len(wants) == 0 {
				require.Empty(t, why)
			}
			r.barrier()
			require.Zero(t, emulated.Multicast.Of(t, r.d.Context().Device()))
			require.NoError(t, r.h.Grow(t.ctx, 1<<20))
			r.barrier()
			r.close()
		})
		a.nothingIsLeft(wants)
	}
	asked := Options{SegmentBytes: 2 << 20, Multicast: MulticastByFile}
	without(t, 2, Options{SegmentBytes: 2 << 20})
	without(t, 1, asked, "one rank")
	without(t, 5, asked, "ranks 0 and 4 share a GPU")
	for name, v := range map[string]string{"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, v)
			without(t, 2, asked, "rank 0: its environment forbids it", name+"="+v)
		})
	}
	t.Run("no such device", func(t *testing.T) {
		emulated.WithoutMulticast(t, a.ctx[0])
		without(t, 2, asked, "rank 0: its GPU has none")
	})
}

func TestMulticastOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{Multicast: MulticastByFile}, {Multicast: 7}} {
		runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
			_, err := NewHeap(t.ctx, g, device.Host(), o)
			require.ErrorIs(t, err, ErrInvalid)
		})
	}
	if !emulated.Driver(t) {
		return
	}
	runRanks(t, localRanks(t, 2), func(t *rankT, g *comm.Group) {
		d := rankGPU(t, g.Rank())
		_, err := NewHeap(t.ctx, g, d, Options{LegacyIPC: true, Multicast: MulticastByFile})
		require.ErrorIs(t, err, ErrInvalid)
		_, err = NewHeap(t.ctx, g, d, Options{Multicast: Multicast(g.Rank())})
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "multicast: rank 0 has none, rank 1 has by file descriptor")
		require.NoError(t, d.Close())
	})
}

// The driver has room for one such object, and each GPU for one such segment.
func TestM6_MulticastObjectsOf1GiBComeAndGo(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	const times, size = 120, 1 << 30
	gs := [][]*comm.Group{localRanks(t, 2), socketRanks(t, 2)}
	for i := range times {
		by := MulticastByFile + Multicast(i/2%2)
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for r, g := range gs[i%2] {
			wg.Go(func() {
				errs[r] = runRank(g, func(t *rankT, g *comm.Group) {
					d := rankGPU(t, r)
					h, err := NewHeap(t.ctx, g, d, Options{SegmentBytes: size - 64<<10, ReserveBytes: 2 * size, Multicast: by, ShareGPUs: true})
					require.NoError(t, err)
					require.EqualValues(t, size, h.extents[0].n)
					require.NoError(t, g.Barrier(t.ctx))
					require.Equal(t, 1024, emulated.Multicast.Of(t, d.Context().Device()))
					require.ErrorIs(t, h.Grow(t.ctx, size), ErrOutOfMemory)
					require.NoError(t, h.Close(t.ctx))
					require.NoError(t, d.Close())
				})
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...), "time %d", i)
		a.nothingIsLeft("time ", i)
	}
	for _, g := range gs {
		require.NoError(t, errors.Join(g[0].Close(), g[1].Close()))
	}
}

// Each call of each rank's driver fails once, while a heap is made, grows and is closed. A failure on one rank is one on all, and
// nothing is left of it.
func TestAFailureOfAnyDriverCallLeaksNothing(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	a := newAccounts(t)
	const ranks = 3
	type outcome struct{ made, grown, closed error }
	try := func(g *comm.Group, d *device.CUDADevice, by Multicast) (o outcome) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		h, err := NewHeap(ctx, g, d, Options{SegmentBytes: 6 << 20, Multicast: by, ShareGPUs: true})
		if o.made = err; err != nil {
			return o
		}
		o.grown = h.Grow(ctx, 14<<20) // in the first object's rest and in a second one
		o.closed = h.Close(ctx)
		return o
	}
	for how, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
		for _, by := range []Multicast{MulticastByFile, MulticastByFabric} {
			if testing.Short() && (how == "local") != (by == MulticastByFile) {
				continue
			}
			t.Run(fmt.Sprint(how, " ", by), func(t *testing.T) {
				gs := groups(t, ranks)
				var devices [ranks]*device.CUDADevice
				for r := range devices {
					devices[r] = rankGPU(t, r)
				}
				held := (&accounts{T: t, dev: a.dev}).now()
				failed := 0
				for victim := range ranks {
					for n := 1; ; n++ {
						emulated.Fail(t, a.ctx[victim], n)
						var outcomes [ranks]outcome
						var wg sync.WaitGroup
						for r := range ranks {
							wg.Go(func() { outcomes[r] = try(gs[r], devices[r], by) })
						}
						wg.Wait()
						what := fmt.Sprintf("call %d of rank %d: %+v", n, victim, outcomes)
						fired := emulated.Fired.Of(t, a.dev[victim]) == 1
						emulated.Fail(t, a.ctx[victim], 0)
						for r, o := range outcomes {
							require.Equal(t, outcomes[0].made == nil, o.made == nil, what)
							require.Equal(t, outcomes[0].grown == nil, o.grown == nil, what)
							require.True(t, r == victim || o.closed == nil, what)
							require.NoError(t, gs[r].Err(), what)
						}
						(&accounts{T: t, dev: a.dev, before: held}).nothingIsLeft(what)
						if outcomes != [ranks]outcome{} {
							failed++
						}
						if !fired {
							require.Equal(t, [ranks]outcome{}, outcomes)
							require.Greater(t, n, 80, "calls")
							break
						}
					}
				}
				require.Greater(t, failed, ranks*70, "failures that were told")
				for r := range ranks {
					require.NoError(t, devices[r].Close())
					require.NoError(t, gs[r].Close())
				}
			})
			a.nothingIsLeft()
		}
	}
}

// A rank that closes lets go of its peers' memory at once, and of its own, which they may still use, when they have done so too.
func TestM4_BindsLastUntilAllRanksClose(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	emulatedRanks(t, 2, func(t *rankT, g *comm.Group, by Multicast) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20, Multicast: by})
		r.barrier()
		if d := r.d.Context().Device(); g.Rank() == 1 {
			views := emulated.Mappings.Of(t, d)
			require.Equal(t, 2, emulated.Binds.Of(t, d))
			r.barrier()
			require.Eventually(t, func() bool { return emulated.Mappings.Of(t, d) < views }, time.Minute, time.Millisecond)
			time.Sleep(10 * time.Millisecond)
			require.Equal(t, 2, emulated.Binds.Of(t, d))
			require.NoError(t, r.d.Context().Write(0, r.h.Space().Multicast+64<<10, []byte{1}))
		} else {
			r.barrier()
		}
		r.close()
	})
}

// A rank that is lost leaves its peers with what they hold, which Close gives back.
func TestMulticastIsGivenBackWhenTheGroupFails(t *testing.T) {
	if !emulated.Driver(t) {
		return
	}
	emulatedRanks(t, 3, func(t *rankT, g *comm.Group, by Multicast) {
		r := newCUDARank(t, g, Options{SegmentBytes: 2 << 20, Multicast: by})
		_ = g.Barrier(t.ctx) // which the abort may reach first
		if g.Rank() == 1 {
			g.Abort(errors.New("enough"))
		}
		<-g.Done()
		require.ErrorIs(t, r.h.Grow(t.ctx, 20<<20), comm.ErrAborted)
		r.close()
	})
}
