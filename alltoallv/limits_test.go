package alltoallv

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda"
	"github.com/switchyard-moe/switchyard/memory"
)

// onGPUs is the schedule of rank 0 of 8 GPUs for even splits, and what Explain tells of it.
func onGPUs(t *testing.T, o Options, bytes int64, inPlace bool, l Limits) (kernels.Schedule, Decision) {
	t.Helper()
	c, err := o.complete(8, new(cuda.Engine), device.CUDAKind)
	require.NoError(t, err)
	r, err := newRegistry(&o, 0, 8, device.CUDAKind)
	require.NoError(t, err)
	r.traits = gpu
	k := planner{registry: r, cache: newCache(4), bounds: &c}
	sp := equal(8, bytes, true)
	sp.Limits = l
	p, err := k.of(sp)
	require.NoError(t, err)
	d := k.explain(p, inPlace)
	s := p.schedule[k.ready(p, inPlace)]
	require.Equal(t, [3]float64{float64(s.Blocks), float64(s.CopyBlocks), s.Rate}, [3]float64{float64(d.SMs), float64(d.CopySMs), d.Rate}, "Explain tells what runs")
	return s, d
}

func TestLimitsOfACallBoundItsMultiprocessors(t *testing.T) {
	const large = 128 << 20
	for _, c := range []struct {
		name       string
		o          Options
		inPlace    bool
		l          Limits
		most       int // that send, at most
		copies     int // more that copy out of staging, at most
		noneCopies bool
	}{
		{name: "by default as many copy as send", most: 16, copies: 16},
		{name: "no more send than copy", l: Limits{CopySMs: 3}, most: 3, copies: 3},
		{name: "no others copy", l: Limits{CopySMs: -1}, most: 16, noneCopies: true},
		{name: "few send", l: Limits{MaxSMs: 4}, most: 4, copies: 4},
		{name: "few send, others copy", o: Options{MaxSMs: 8}, l: Limits{MaxSMs: 4, CopySMs: 4}, most: 4, copies: 4},
		{name: "not more than the communicator's", o: Options{MaxSMs: 4}, l: Limits{MaxSMs: 16}, most: 4, noneCopies: true},
		{name: "of the communicator", o: Options{CopySMs: 2}, most: 2, copies: 2},
		{name: "in place nobody copies", inPlace: true, l: Limits{MaxSMs: 6}, most: 6, noneCopies: true},
	} {
		s, _ := onGPUs(t, c.o, large, c.inPlace, c.l)
		require.LessOrEqual(t, s.Blocks, c.most, c.name)
		require.LessOrEqual(t, s.CopyBlocks, c.copies, c.name)
		require.Equal(t, c.noneCopies, s.CopyBlocks == 0, c.name)
		if s.CopyBlocks > 0 && s.Blocks > 0 {
			require.Equal(t, s.Blocks, s.CopyBlocks, "%s: as many copy as send", c.name)
		}
	}
}

func TestACallCanLeaveMultiprocessorsAlone(t *testing.T) {
	s, d := onGPUs(t, Options{}, 8<<20, true, Limits{NoSMs: true})
	require.True(t, s.Copies && d.Forced && d.Algorithm == "copy")
	require.Zero(t, s.Blocks)
	s, d = onGPUs(t, Options{}, 8<<20, true, Limits{Algorithm: "copy"})
	require.True(t, s.Copies && d.Forced)
	require.Equal(t, ownSMs, s.Blocks, "what stays on the rank")
	s, _ = onGPUs(t, Options{}, 8<<20, true, Limits{})
	require.False(t, s.Copies)
	s, d = onGPUs(t, Options{NoSMs: true}, 8<<20, true, Limits{Algorithm: "ring"})
	require.False(t, s.Copies, "the call takes the place of the communicator's choice")
	require.Equal(t, "ring", d.Algorithm)
	s, _ = onGPUs(t, Options{}, 8<<20, false, Limits{NoSMs: true})
	require.False(t, s.Copies, "Exchange refuses it: the output is not symmetric")
}

// Each rank has limits of its own, from call to call.
func TestLimitsAreARanksOwn(t *testing.T) {
	worldtest.Local(t, 3, 32<<20, func(r *worldtest.Rank) {
		x, err := New(r.Ctx, r.Heap, Options{})
		r.Must(err)
		sp := &Splits{Send: []int64{50_000, 50_000, 50_000}, Recv: []int64{50_000, 50_000, 50_000}}
		src, dst := make([]byte, 150_000), make([]byte, 150_000)
		for call, name := range []string{"ring", "direct", "pipelined", ""} {
			if r.Rank() == 1 {
				sp.Limits.Algorithm = name
			}
			for i := range src {
				src[i] = byte(1 + call*40 + r.Rank()*10 + i/50_000)
			}
			clear(dst)
			r.Must(x.Exchange(nil, memory.Host(dst), memory.Host(src), sp))
			for i := range dst {
				require.EqualValues(r.T, 1+call*40+i/50_000*10+r.Rank(), dst[i])
			}
			d, err := x.Explain(sp, false)
			r.Must(err)
			require.Equal(r.T, name != "" && r.Rank() == 1, d.Forced)
		}
		for _, bad := range []Limits{{Algorithm: "none such"}, {MaxSMs: -1}, {NoSMs: true, Algorithm: "ring"}} {
			sp.Limits = bad
			require.ErrorIs(r.T, x.Exchange(nil, memory.Host(dst), memory.Host(src), sp), comm.ErrInvalid)
		}
		r.Must(x.Close(r.Ctx))
	})
}
