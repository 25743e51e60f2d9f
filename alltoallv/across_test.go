package alltoallv_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// acrossKernels is where the kernels' sources are.
const acrossKernels = "../kernels/cuda"

// acrossRank is a rank with a GPU, emulated or not, that counts as on a host of its own or with its mates.
type acrossRank struct {
	t    *testing.T
	ctx  context.Context
	g    *comm.Group
	d    *device.CUDADevice
	h    *memory.Heap
	s    device.Stream
	size int
	lost bool // the group has failed, as it should
}

// onGPUsOfHosts runs f on n ranks, perHost of them on a host, with UCX between hosts.
func onGPUsOfHosts(t *testing.T, n, perHost int, o memory.Options, f func(r *acrossRank) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	gpus, err := device.CUDACount()
	require.NoError(t, err)
	groups, err := comm.Local(n, comm.LocalOptions{PerHost: perHost})
	require.NoError(t, err)
	o.ShareGPUs = true
	errs := make([]error, n)
	var ranks sync.WaitGroup
	for rank, g := range groups {
		ranks.Go(func() {
			errs[rank] = func() (err error) {
				r := &acrossRank{t: t, ctx: ctx, g: g, size: n}
				if r.d, err = device.CUDA(rank % gpus); err != nil {
					return err
				}
				if r.s, err = r.d.NewStream(); err != nil {
					return err
				}
				if r.h, err = memory.NewHeap(ctx, g, r.d, o); err != nil {
					return err
				}
				if err := f(r); err != nil {
					err = fmt.Errorf("rank %d: %w", rank, err)
					g.Abort(err)
					return errors.Join(err, r.h.Close(ctx))
				}
				if r.lost {
					return errors.Join(r.h.Close(ctx), r.s.Close(), r.d.Close())
				}
				return errors.Join(r.h.Verify(ctx), r.h.Close(ctx), r.s.Close(), r.d.Close(), g.Close())
			}()
		})
	}
	ranks.Wait()
	require.NoError(t, errors.Join(errs...))
}

// splitsOf draws what all ranks send to each other in a call.
func splitsOf(seed uint64, call, n int, most int64) [][]int64 {
	rng := rand.New(rand.NewPCG(seed, uint64(call)))
	m := make([][]int64, n)
	for s := range m {
		for range n {
			b := rng.Int64N(most + 1)
			if rng.IntN(4) == 0 {
				b = 0
			}
			m[s] = append(m[s], b)
		}
	}
	return m
}

func acrossByte(call, from, to int, i int64) byte {
	return byte(int64(call)*41 + int64(from)*31 + int64(to)*17 + i*3 + i>>8)
}

// exchangeAcross makes a call with these splits, in arguments or, with live not nil, in memory of the device, and compares every byte.
func (r *acrossRank) exchangeAcross(x *alltoallv.Exchanger, call int, m [][]int64, dst, src, live *memory.Buffer) error {
	sp := &alltoallv.Splits{}
	for p, me := 0, r.g.Rank(); p < r.size; p++ {
		sp.Send, sp.Recv = append(sp.Send, m[me][p]), append(sp.Recv, m[p][me])
	}
	if live != nil {
		sp = &alltoallv.Splits{Live: live.View()}
	}
	return r.launched(call, m, dst, src, live, func() error { return x.Exchange(r.s, dst.View(), src.View(), sp) }, x.Fault)
}

// launched fills the input and, if there is room for them, the splits, has a call launched, and compares every byte of the output.
func (r *acrossRank) launched(call int, m [][]int64, dst, src, live *memory.Buffer, launch, fault func() error) error {
	me := r.g.Rank()
	var out, want []byte
	table := make([]int64, 4*r.size)
	for p := range r.size {
		table[p], table[r.size+p] = m[me][p], int64(len(out))
		table[2*r.size+p], table[3*r.size+p] = m[p][me], int64(len(want))
		for i := range m[me][p] {
			out = append(out, acrossByte(call, me, p, i))
		}
		for i := range m[p][me] {
			want = append(want, acrossByte(call, p, me, i))
		}
	}
	if err := memory.Copy(r.s, src.View().Slice(0, int64(len(out))), memory.Host(out)); err != nil {
		return err
	}
	if live != nil {
		if err := memory.Copy(r.s, live.View(), memory.Host(shm.Bytes(table))); err != nil {
			return err
		}
	}
	if err := errors.Join(launch(), r.s.Synchronize()); err != nil {
		return err
	}
	if err := fault(); err != nil {
		return err
	}
	got := make([]byte, len(want))
	if err := errors.Join(memory.Copy(r.s, memory.Host(got), dst.View().Slice(0, int64(len(want)))), r.s.Synchronize()); err != nil {
		return err
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("call %d: byte %d is %d, want %d", call, i, got[i], want[i])
		}
	}
	return nil
}

// buffers are an output, an input and room for splits.
func (r *acrossRank) buffers(bytes int64) (dst, src, live *memory.Buffer, err error) {
	for _, b := range []struct {
		to **memory.Buffer
		n  int64
	}{{&dst, bytes}, {&src, bytes}, {&live, alltoallv.LiveBytes(r.size)}} {
		if *b.to, err = r.h.Alloc(b.n); err != nil {
			return nil, nil, nil, err
		}
	}
	return dst, src, live, nil
}

// Exchanges of GPUs on several hosts, of any splits, in arguments and in memory; the place of the first communicator's rings serves the next.
func TestX5_AcrossHostsOfGPUs(t *testing.T) {
	worldtest.NeedUCX(t)
	if !emulated.Kernels(t, acrossKernels) {
		return
	}
	for _, w := range [][2]int{{2, 1}, {4, 2}} {
		onGPUsOfHosts(t, w[0], w[1], memory.Options{SegmentBytes: 32 << 20, RailBytes: 1 << 20}, func(r *acrossRank) error {
			const most = 9000
			dst, src, live, err := r.buffers(most * int64(r.size))
			if err != nil {
				return err
			}
			for seed := range uint64(2) {
				x, err := alltoallv.New(r.ctx, r.h, alltoallv.Options{MaxSMs: 1, CopySMs: -1, PacketBytes: 1000, Timeout: time.Hour})
				if err != nil {
					return err
				}
				for call := range 4 {
					l := live
					if call%2 == 0 {
						l = nil
					}
					if err := r.exchangeAcross(x, call, splitsOf(seed, call, r.size, most>>(6*(call/2))), dst, src, l); err != nil {
						return err
					}
				}
				if err := x.Close(r.ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// Two ranks of different hosts that disagree on a count both learn it from this call, with both values; splits in memory that reach outside are
// an error of all ranks, which names the part. The next call works.
func TestF3_AcrossHostsOfGPUs(t *testing.T) {
	worldtest.NeedUCX(t)
	if !emulated.Kernels(t, acrossKernels) {
		return
	}
	onGPUsOfHosts(t, 4, 2, memory.Options{SegmentBytes: 32 << 20, RailBytes: 1 << 20}, func(r *acrossRank) error {
		dst, src, live, err := r.buffers(4000)
		if err != nil {
			return err
		}
		x, err := alltoallv.New(r.ctx, r.h, alltoallv.Options{MaxSMs: 1, CopySMs: -1, PacketBytes: 1000, Timeout: time.Hour})
		if err != nil {
			return err
		}
		m := splitsOf(1, 0, 4, 900)
		m[1][2] = 500
		me := r.g.Rank()
		if me == 2 { // expects something else
			m[1][2] = 600
		}
		err = r.exchangeAcross(x, 0, m, dst, src, nil)
		var c *kernels.CountMismatchError
		if me == 1 || me == 2 {
			if !errors.As(err, &c) || c.Src != 1 || c.Dst != 2 || c.Sent != 500 || c.Expected != 600 {
				return fmt.Errorf("ranks 1 and 2 disagree: %w", err)
			}
		} else if err != nil {
			return err
		}
		m = splitsOf(1, 1, 4, 900)
		if err := r.exchangeAcross(x, 1, m, dst, src, live); err != nil {
			return err
		}
		table := make([]int64, 16)
		if me == 3 {
			table[0], table[4] = 100, 3950 // to rank 0, of the other host
		}
		if err := memory.Copy(r.s, live.View(), memory.Host(shm.Bytes(table))); err != nil {
			return err
		}
		if err := x.Exchange(r.s, dst.View(), src.View(), &alltoallv.Splits{Live: live.View()}); err != nil {
			return err
		}
		if err := r.s.Synchronize(); err != nil {
			return err
		}
		var s *kernels.SplitsError
		if err := x.Fault(); !errors.As(err, &s) || s.Rank != 3 || s.Peer != 0 || !s.Send || s.Bytes != 100 || s.Offset != 3950 || s.Limit != 4000 {
			return fmt.Errorf("splits of rank 3 reach outside: %w", err)
		}
		return errors.Join(r.exchangeAcross(x, 3, m, dst, src, nil), x.Close(r.ctx))
	})
}

// A wait for a rank of another host ends at the deadline, or when the group fails, and names the rank and its host. After a deadline the next
// communicator on the heap works.
func TestF1_AcrossHostsOfGPUs(t *testing.T) {
	worldtest.NeedUCX(t)
	if !emulated.Kernels(t, acrossKernels) {
		return
	}
	for _, fails := range []bool{false, true} {
		var called sync.WaitGroup
		called.Add(1)
		onGPUsOfHosts(t, 2, 1, memory.Options{SegmentBytes: 32 << 20, RailBytes: 1 << 20}, func(r *acrossRank) error {
			dst, src, _, err := r.buffers(4000)
			if err != nil {
				return err
			}
			o := alltoallv.Options{MaxSMs: 1, CopySMs: -1, Timeout: time.Millisecond} // of the emulation's own time
			if fails {
				o.Timeout = time.Hour
			}
			x, err := alltoallv.New(r.ctx, r.h, o)
			if err != nil {
				return err
			}
			if r.g.Rank() == 0 {
				err = x.Exchange(r.s, dst.View(), src.View(), &alltoallv.Splits{Send: []int64{1, 2000}, Recv: []int64{1, 2000}})
				called.Done()
				if err = errors.Join(err, r.s.Synchronize()); err != nil {
					return err
				}
				err = x.Fault()
				var late *comm.PeerError
				if want := comm.ErrTimeout; !fails && (!errors.Is(err, want) || !errors.As(err, &late) || late.Rank != 1 || !strings.Contains(err.Error(), "on host 1")) {
					return fmt.Errorf("rank 1 does not come: %w", err)
				}
				if fails && !errors.Is(err, comm.ErrAborted) {
					return fmt.Errorf("the group fails: %w", err)
				}
			} else if called.Wait(); fails {
				r.g.Abort(errors.New("a test"))
			}
			r.lost = fails
			if err := x.Close(r.ctx); r.g.Rank() == 1 && !fails && err != nil { // rank 0 has an error, and says so again
				return fmt.Errorf("close: %w", err)
			}
			if fails {
				return nil
			}
			if _, err := r.h.AllocRail(r.h.RailBytes()); !errors.Is(err, memory.ErrOutOfMemory) {
				return fmt.Errorf("the rings of the failed call have been given back: %w", err)
			}
			o.Timeout = time.Hour
			x, err = alltoallv.New(r.ctx, r.h, o)
			if err != nil {
				return fmt.Errorf("after a failed call: %w", err)
			}
			for call := range 3 {
				if err := r.exchangeAcross(x, call, splitsOf(7, call, 2, 2000), dst, src, nil); err != nil {
					return fmt.Errorf("after a failed call: %w", err)
				}
			}
			if err := x.Close(r.ctx); err != nil {
				return fmt.Errorf("close the next: %w", err)
			}
			return nil
		})
	}
}
