package alltoallv_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
)

// needGPUs skips a test where there are none, or no UCX.
func needGPUs(t *testing.T) {
	t.Helper()
	if n, err := device.CUDACount(); err != nil || n == 0 {
		t.Skipf("needs a GPU: %d, %v", n, err)
	}
	worldtest.NeedUCX(t)
}

// Exchanges of GPUs that count as on several hosts, of a few bytes to 3 MiB a rank, in arguments and in memory of the GPU.
func TestCUDA_X5_AcrossHosts(t *testing.T) {
	needGPUs(t)
	for _, w := range [][2]int{{2, 1}, {4, 2}} {
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			onGPUsOfHosts(t, w[0], w[1], memory.Options{SegmentBytes: 128 << 20}, func(r *acrossRank) error {
				const most = 3 << 20
				dst, src, live, err := r.buffers(most * int64(r.size))
				if err != nil {
					return err
				}
				x, err := alltoallv.New(r.ctx, r.h, alltoallv.Options{Timeout: 10 * time.Second})
				if err != nil {
					return err
				}
				for call := range 24 {
					l := live
					if call%2 == 0 {
						l = nil
					}
					if err := r.exchangeAcross(x, call, splitsOf(7, call, r.size, most>>(call%12*2)), dst, src, l); err != nil {
						return err
					}
				}
				return x.Close(r.ctx)
			})
		})
	}
}

// One graph exchanges between hosts with other splits at every replay.
func TestCUDA_AGraphAcrossHostsReplaysWithOtherSplits(t *testing.T) {
	needGPUs(t)
	onGPUsOfHosts(t, 2, 1, memory.Options{SegmentBytes: 32 << 20}, func(r *acrossRank) error {
		const most = 200 << 10
		dst, src, live, err := r.buffers(2 * most)
		if err != nil {
			return err
		}
		x, err := alltoallv.New(r.ctx, r.h, alltoallv.Options{Timeout: 10 * time.Second})
		if err != nil {
			return err
		}
		g, err := r.s.(*device.CUDAStream).Capture(func() error {
			return x.Exchange(r.s, dst.View(), src.View(), &alltoallv.Splits{Live: live.View()})
		})
		if err != nil {
			return err
		}
		for call := range 40 {
			if err := r.launched(call, splitsOf(9, call, 2, most>>(call%10)), dst, src, live, func() error { return g.Launch(r.s) }, x.Fault); err != nil {
				return err
			}
		}
		return errors.Join(g.Close(), x.Close(r.ctx))
	})
}

// How long an exchange between two GPUs takes that count as on two hosts, in a graph of 20 calls.
func TestCUDA_MeasureAcrossHosts(t *testing.T) {
	needGPUs(t)
	if testing.Short() {
		t.Skip("measures")
	}
	for _, bytes := range []int64{8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20} {
		times := make([]time.Duration, 2)
		onGPUsOfHosts(t, 2, 1, memory.Options{SegmentBytes: 64 << 20}, func(r *acrossRank) error {
			dst, src, live, err := r.buffers(2 * bytes)
			if err != nil {
				return err
			}
			x, err := alltoallv.New(r.ctx, r.h, alltoallv.Options{Timeout: 10 * time.Second})
			if err != nil {
				return err
			}
			me := int64(r.g.Rank())
			table := make([]int64, 8) // nothing stays on the rank
			table[1-me], table[5-me] = bytes, bytes
			if err := memory.Copy(r.s, live.View(), memory.Host(shm.Bytes(table))); err != nil {
				return err
			}
			const calls, rounds = 20, 9
			g, err := r.s.(*device.CUDAStream).Capture(func() error {
				for range calls {
					if err := x.Exchange(r.s, dst.View(), src.View(), &alltoallv.Splits{Live: live.View()}); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
			var took []time.Duration
			for range rounds {
				if err := r.g.Barrier(r.ctx); err != nil {
					return err
				}
				start := time.Now()
				if err := errors.Join(g.Launch(r.s), r.s.Synchronize(), x.Fault()); err != nil {
					return err
				}
				took = append(took, time.Since(start)/calls)
			}
			slices.Sort(took)
			times[me] = took[rounds/2]
			return errors.Join(g.Close(), x.Close(r.ctx))
		})
		t.Logf("%d bytes to the other host and back: %v an exchange, median of 9 times 20", bytes, slices.Max(times))
		require.NotZero(t, slices.Max(times))
	}
}
