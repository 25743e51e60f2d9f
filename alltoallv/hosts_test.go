package alltoallv_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Exchanges of any splits cross hosts, with rings of any number of slots, and with slots so small that a message takes many.
func TestX5_AcrossHosts(t *testing.T) {
	for _, w := range worldtest.HostWorlds() {
		for i, o := range []alltoallv.Options{{}, {BundleBytes: -1}, {Slots: 1, SlotBytes: 128, BundleBytes: 300}, {Slots: 3, SlotBytes: 2048, Algorithm: "ring"}, {Algorithm: "pipelined"}} {
			t.Run(fmt.Sprintf("%d of %d/%d", w[0], w[1], i), func(t *testing.T) {
				limit := int64(64 << 10)
				if o.SlotBytes == 128 {
					limit = 3000
				}
				worldtest.Hosts(t, w[0], w[1], 64<<20, func(r *worldtest.Rank) {
					random(r, o, uint64(i), 4, limit)
					random(r, o, uint64(i), 2, limit) // at the places of the last
				})
			})
		}
	}
	t.Run("1 MiB", func(t *testing.T) {
		worldtest.Hosts(t, 4, 2, 128<<20, func(r *worldtest.Rank) { random(r, alltoallv.Options{}, 3, 3, 1<<20) })
	})
}

// The same with a process for every rank, in network namespaces.
func TestX5_AcrossHostsOfProcesses(t *testing.T) {
	worldtest.EachHostWorld(t, 64<<20, func(r *worldtest.Rank) { random(r, alltoallv.Options{}, 5, 5, 300<<10) })
}

func TestBarrierAcrossHosts(t *testing.T) { worldtest.Hosts(t, 4, 2, 32<<20, nobodyLeavesEarly(4)) }

// Calls on streams, of splits in memory, follow each other without a rank that waits for them.
func TestLiveSplitsAcrossHosts(t *testing.T) {
	worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		s, err := r.Device.NewStream()
		r.Must(err)
		const calls, room = 20, 20000
		outs := make([][]byte, calls)
		for call := range calls {
			m := [][]int64{{1, 3000, int64(call), 0}, {0, 2, 5, 9000}, {4000, 1, 0, int64(100 * call)}, {7, 0, 7000, 3}}
			live, at := make([]int64, 16), [2]int64{}
			src, dst := make([]byte, room), make([]byte, room)
			for p := range 4 {
				for side, n := range [2]int64{m[r.Rank()][p], m[p][r.Rank()]} {
					live[8*side+p], live[8*side+4+p] = n, at[side]
					at[side] += n
				}
				for i := range m[r.Rank()][p] {
					src[live[4+p]+i] = worldtest.Element(call, r.Rank(), p, i)
				}
			}
			outs[call] = dst
			r.Must(x.Exchange(s, memory.Host(dst), memory.Host(src), &alltoallv.Splits{Live: memory.Host(shm.Bytes(live))}))
		}
		r.Must(s.Synchronize())
		for call, out := range outs {
			m := [][]int64{{1, 3000, int64(call), 0}, {0, 2, 5, 9000}, {4000, 1, 0, int64(100 * call)}, {7, 0, 7000, 3}}
			for p, n := range column(m, r.Rank()) {
				r.Must(worldtest.Check(out[:n], call, p, r.Rank()))
				out = out[n:]
			}
		}
		r.Must(errors.Join(s.Close(), x.Close(r.Ctx)))
	})
}

// Splits in memory that do not fit are every rank's error, on all hosts, and the next call works.
func TestF3_BadLiveSplitsAcrossHosts(t *testing.T) {
	worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
		r.Must(err)
		for bad := range 4 {
			live := make([]int64, 16)
			for p := range 4 {
				live[p], live[4+p], live[8+p], live[12+p] = 100, int64(100*p), 100, int64(100*p)
			}
			if r.Rank() == bad {
				live[3-bad] = 1 << 40
			}
			err := x.Exchange(nil, memory.Host(make([]byte, 400)), memory.Host(make([]byte, 400)), &alltoallv.Splits{Live: memory.Host(shm.Bytes(live))})
			var refused *kernels.SplitsError
			if !errors.As(err, &refused) {
				r.Must(fmt.Errorf("got %v", err))
			}
			require.Equal(r.T, kernels.SplitsError{Rank: bad, Peer: 3 - bad, Send: true, Bytes: 1 << 40, Offset: int64(100 * (3 - bad)), Limit: 400,
				Epoch: uint64(2*bad + 1)}, *refused)
			m := [][]int64{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 1000, 11, 12}, {13, 14, 70000, 16}}
			r.Must(exchange(r, x, nil, memory.Host(make([]byte, 80000)), memory.Host(make([]byte, 80000)), m, 1, bad))
		}
		r.Must(x.Close(r.Ctx))
	})
}

// Two ranks of different hosts that disagree on a size both know both sizes from that call, the others know nothing of it, and the next
// call works.
func TestF3_DisagreementAcrossHosts(t *testing.T) {
	for _, pair := range [][2]int64{{5, 6}, {0, 100}, {100, 0}, {5000, 60000}, {60000, 5000}, {900000, 10}, {10, 900000}} {
		worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
			x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute, SlotBytes: 16 << 10})
			r.Must(err)
			src, dst := memory.Host(make([]byte, 1<<20)), memory.Host(make([]byte, 1<<20))
			for call := range 3 {
				sp := &alltoallv.Splits{Send: make([]int64, 4), Recv: make([]int64, 4)}
				if r.Rank() == 1 {
					sp.Send[2] = pair[0]
				}
				if r.Rank() == 2 {
					sp.Recv[1] = pair[1]
				}
				err = x.Exchange(nil, dst, src, sp)
				if r.Rank() == 1 || r.Rank() == 2 {
					var mismatch *kernels.CountMismatchError
					if !errors.As(err, &mismatch) {
						r.Must(fmt.Errorf("got %v", err))
					}
					require.Equal(r.T, kernels.CountMismatchError{Src: 1, Dst: 2, Sent: uint64(pair[0]), Expected: uint64(pair[1]), Epoch: uint64(2*call + 1)}, *mismatch)
				} else {
					r.Must(err)
				}
				m := [][]int64{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 1000, 11, 12}, {13, 14, 70000, 16}}
				r.Must(exchange(r, x, nil, dst, src, m, 1, call))
			}
			r.Must(x.Close(r.Ctx))
		})
	}
}

// A disagreement inside a host names the ranks by their numbers in the group.
func TestF3_DisagreementOfRanksOfALaterHost(t *testing.T) {
	worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: time.Minute})
		r.Must(err)
		sp := &alltoallv.Splits{Send: make([]int64, 4), Recv: make([]int64, 4)}
		if r.Rank() == 2 {
			sp.Send[3] = 5000
		}
		if r.Rank() == 3 {
			sp.Recv[2] = 6000
		}
		err = x.Exchange(nil, memory.Host(make([]byte, 8000)), memory.Host(make([]byte, 8000)), sp)
		if r.Rank() == 3 {
			require.ErrorContains(r.T, err, "rank 2 sends 5000 bytes to rank 3, which expects 6000")
		}
		r.Must(x.Close(r.Ctx))
	})
}

// A rank of another host that does not come is named at the deadline, and Explain says what crosses.
func TestF1_DeadlineNamesARankOfAnotherHost(t *testing.T) {
	var waited sync.WaitGroup
	waited.Add(3)
	worldtest.Hosts(t, 4, 2, 64<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{Timeout: proctest.Scaled(time.Second)})
		r.Must(err)
		sp := &alltoallv.Splits{Send: []int64{5, 5, 5, 5}, Recv: []int64{5, 5, 5, 5}}
		d, err := x.Explain(sp, false)
		r.Must(err)
		require.Equal(r.T, 2, d.Across)
		require.Contains(r.T, d.String(), "1 packet, 0 eager, 0 credit; to other hosts: 2 bundled, 0 straight")
		if r.Rank() != 3 {
			err = x.Exchange(nil, memory.Host(make([]byte, 20)), memory.Host(make([]byte, 20)), sp)
			waited.Done()
			require.ErrorContains(r.T, err, "rank 3")
			require.ErrorContains(r.T, err, "timed out")
		} else {
			waited.Wait() // a barrier before would be a mistake of its own
		}
		r.Barrier()
		r.Must(x.Close(r.Ctx))
		y, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{}) // in the same memory, in which nothing lands late
		r.Must(err)
		m := [][]int64{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 1000, 11, 12}, {13, 14, 70000, 16}}
		r.Must(exchange(r, y, nil, memory.Host(make([]byte, 80000)), memory.Host(make([]byte, 80000)), m, 1, 1))
		r.Must(y.Close(r.Ctx))
	})
}

// Ranks that are lost in the middle of exchanges are named on all hosts, and the hosts that are left go on.
func TestF2_ARankOfAnotherHostDies(t *testing.T) {
	worldtest.HostDies(t, 64<<20, func(r *worldtest.Rank) (func() error, func(context.Context) error) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		const each = 1 << 18
		n, call := r.Size(), 0
		src, dst := memory.Host(make([]byte, each*n)), memory.Host(make([]byte, each*n))
		m := slices.Repeat([][]int64{slices.Repeat([]int64{each}, n)}, n)
		return func() error {
			call++
			return exchange(r, x, nil, dst, src, m, 1, call)
		}, x.Close
	})
}
