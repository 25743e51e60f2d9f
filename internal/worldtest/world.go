// Package worldtest gives tests a world of ranks with a symmetric heap: in one process, or one process a rank by running
// the test binary again.
package worldtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/memory"
)

// Rank is what a test sees of one rank. T fails the whole test; Ctx ends with it.
type Rank struct {
	T      testing.TB
	Ctx    context.Context
	Group  *comm.Group
	Device device.Device
	Heap   *memory.Heap
}

// Rank and Size of the world.
func (r *Rank) Rank() int { return r.Group.Rank() }

// Size of the world.
func (r *Rank) Size() int { return r.Group.Size() }

// Must fails the test with the rank's number when err is not nil, and ends the calling goroutine.
func (r *Rank) Must(err error) {
	r.T.Helper()
	if err != nil {
		r.T.Errorf("rank %d: %v", r.Rank(), err)
		r.Group.Abort(err)
		panic(stop)
	}
}

// Barrier waits for all ranks.
func (r *Rank) Barrier() { r.T.Helper(); r.Must(r.Group.Barrier(r.Ctx)) }

// Local runs f on n ranks of this process, each on a goroutine of its own, with a heap of segment bytes a rank.
func Local(t testing.TB, n int, segment int64, f func(r *Rank)) {
	t.Helper()
	inProcess(t, n, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// Hosts is Local for ranks on hosts of perHost each, joined by UCX. The test is skipped without UCX.
func Hosts(t testing.TB, n, perHost int, segment int64, f func(r *Rank)) {
	t.Helper()
	needUCX(t)
	onHosts(t, n, perHost, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// HostProcs is Procs for ranks in network namespaces of perHost each, joined by UCX. The test is skipped where one or the other cannot be.
func HostProcs(t *testing.T, n, perHost int, segment int64, f func(r *Rank)) {
	t.Helper()
	needUCX(t)
	if !proctest.Again() {
		spaces := proctest.Namespaces(t, n/perHost)
		ps := make([]*proctest.Process, n)
		for r := range ps {
			ps[r] = proctest.Rank(t, r, n, spaces[0].IP+":29412", proctest.Spec{Within: 6 * time.Minute, Via: spaces[r/perHost].Via,
				Env: []string{fmt.Sprint("LOCAL_RANK=", r%perHost), fmt.Sprint("LOCAL_WORLD_SIZE=", perHost)}})
		}
		require.NoError(t, errors.Join(proctest.Failures(ps)...))
		return
	}
	procs(t, n, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// needUCX skips the test without UCX, and has it use nothing but TCP.
func needUCX(t testing.TB) {
	t.Helper()
	t.Setenv("UCX_TLS", "tcp,self")
	r, err := ucx.Open(rails.Config{Size: 1})
	if errors.Is(err, ucx.ErrUnavailable) {
		t.Skip("needs UCX: ", err)
	}
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

// inProcess runs f for n ranks of this process, each on a goroutine of its own.
func inProcess(t testing.TB, n int, f func(ctx context.Context, g *comm.Group)) {
	t.Helper()
	onHosts(t, n, n, f)
}

func onHosts(t testing.TB, n, perHost int, f func(ctx context.Context, g *comm.Group)) {
	t.Helper()
	groups, err := comm.Local(n, comm.LocalOptions{PerHost: perHost})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() { f(ctx, g) })
	}
	wg.Wait()
}

// GPUs runs f on n ranks of this process with a heap of GPU memory. Ranks share a GPU where there are fewer. The test is
// skipped without a GPU.
func GPUs(t testing.TB, n int, segment int64, f func(r *Rank)) {
	t.Helper()
	GPUHeaps(t, n, memory.Options{SegmentBytes: segment}, f)
}

// GPUHeaps is GPUs with options for the heap.
func GPUHeaps(t testing.TB, n int, o memory.Options, f func(r *Rank)) {
	t.Helper()
	gpus := countGPUs(t)
	inProcess(t, n, func(ctx context.Context, g *comm.Group) { runGPURank(t, ctx, g, gpus, o, f) })
}

// countGPUs counts the GPUs. It skips the test without one.
func countGPUs(t testing.TB) int {
	t.Helper()
	gpus, err := device.CUDACount()
	if errors.Is(err, device.ErrUnavailable) || err == nil && gpus == 0 {
		t.Skipf("no GPU: %v", err)
	}
	require.NoError(t, err)
	return gpus
}

func runGPURank(t testing.TB, ctx context.Context, g *comm.Group, gpus int, o memory.Options, f func(r *Rank)) {
	d, err := device.CUDA(g.Rank() % gpus)
	if err != nil {
		t.Errorf("rank %d: %v", g.Rank(), err)
		g.Abort(err)
		return
	}
	defer d.Close()
	o.ShareGPUs = true
	runRank(t, ctx, g, d, o, f)
}

func runRank(t testing.TB, ctx context.Context, g *comm.Group, d device.Device, o memory.Options, f func(r *Rank)) {
	defer g.Close()
	h, err := memory.NewHeap(ctx, g, d, o)
	if err != nil {
		t.Errorf("rank %d: %v", g.Rank(), err)
		g.Abort(err)
		return
	}
	defer h.Close(ctx)
	defer func() {
		if p := recover(); p != nil && p != stop {
			panic(p)
		}
	}()
	f(&Rank{T: t, Ctx: ctx, Group: g, Device: d, Heap: h})
}

// stop ends one rank's goroutine after a failure; the others end by the abort.
var stop = new(int)

// Procs runs f on n processes: the test binary again, with only the calling test. f must reach the same Procs call there.
func Procs(t *testing.T, n int, segment int64, f func(r *Rank)) {
	t.Helper()
	procs(t, n, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// GPUProcs is GPUHeaps on n processes, as Procs. Kernels of processes that share a GPU take turns of some milliseconds, so
// keep it small.
func GPUProcs(t *testing.T, n int, o memory.Options, f func(r *Rank)) {
	t.Helper()
	gpus := countGPUs(t)
	procs(t, n, func(ctx context.Context, g *comm.Group) { runGPURank(t, ctx, g, gpus, o, f) })
}

func procs(t *testing.T, n int, run func(ctx context.Context, g *comm.Group)) {
	t.Helper()
	if !proctest.Again() {
		ps := proctest.Ranks(t, n, loopback.Addr(), proctest.Spec{Within: 6 * time.Minute})
		require.NoError(t, errors.Join(proctest.Failures(ps)...))
		return
	}
	conf, err := comm.FromEnv()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	g, err := comm.Join(ctx, conf)
	require.NoError(t, err)
	run(ctx, g)
}

// Element is a byte that is as good as unique to its place: call, sender, receiver and index.
func Element(call, src, dst int, i int64) byte {
	h := uint64(call+1)*0x9e3779b97f4a7c15 ^ uint64(src+1)*0xbf58476d1ce4e5b9 ^ uint64(dst+1)*0x94d049bb133111eb ^ uint64(i+1)*0xd6e8feb86659fd93
	h ^= h >> 29
	return byte(h * 0xff51afd7ed558ccd >> 56)
}

// Check compares what dst received from src.
func Check(got []byte, call, src, dst int) error {
	for i, b := range got {
		if want := Element(call, src, dst, int64(i)); b != want {
			return fmt.Errorf("call %d: byte %d of %d from rank %d to rank %d is %#x, want %#x", call, i, len(got), src, dst, b, want)
		}
	}
	return nil
}
