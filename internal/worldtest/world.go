// Package worldtest gives tests a world of ranks with a symmetric heap: in one process, or one process a rank by running
// the test binary again.
package worldtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
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
	ends   []func() error // of what Stream and Alloc have made
}

// Stream is a stream of the rank's device. The world closes it.
func (r *Rank) Stream() device.Stream {
	r.T.Helper()
	s, err := r.Device.NewStream()
	r.Must(err)
	r.ends = append(r.ends, s.Close)
	return s
}

// Alloc is memory of the heap, in the same order on all ranks. The world frees it.
func (r *Rank) Alloc(bytes int64) memory.View {
	r.T.Helper()
	b, err := r.Heap.Alloc(bytes)
	r.Must(err)
	r.ends = append(r.ends, b.Free)
	return b.View()
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

// Unseen hides this process from switchyard status. Tests of other packages ask every process of the user at any time, and what the answer
// allocates would count in a test that allows no allocation. It is called before a communicator is opened.
func Unseen() { os.Setenv("SWITCHYARD_STATUS", "0") }

var perTest = flag.Int("hosts", 1, "put the ranks of Local on so many hosts, where there are as many on each")

// Local runs f on n ranks of this process, each on a goroutine of its own, with a heap of segment bytes a rank. With the flag hosts the ranks
// are on several.
func Local(t testing.TB, n int, segment int64, f func(r *Rank)) {
	t.Helper()
	if *perTest > 1 && n%*perTest == 0 {
		Hosts(t, n, n / *perTest, 32<<20+segment, f)
		return
	}
	inProcess(t, n, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// Hosts is Local for ranks on hosts of perHost each, joined by UCX. The test is skipped without UCX.
func Hosts(t testing.TB, n, perHost int, segment int64, f func(r *Rank)) {
	t.Helper()
	NeedUCX(t)
	onHosts(t, n, perHost, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// Again runs the tests of this binary once more, as short ones and with their ranks on two hosts, but for those whose names match skip. It does
// so once: the test that calls it is not run again, and it is skipped without UCX.
func Again(t *testing.T, skip string) {
	t.Helper()
	if *perTest > 1 {
		t.Skip("this is the second run")
	}
	NeedUCX(t)
	out, err := exec.Command(os.Args[0], "-test.short", "-hosts=2", "-test.skip=Hosts|Processes|CUDA|"+skip).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// hostProcs is Procs for ranks in network namespaces of perHost each, joined by UCX. A rate such as 2gbit bounds what each namespace sends.
// The test is skipped where namespaces or UCX cannot be had.
func hostProcs(t *testing.T, n, perHost int, rate string, segment int64, f func(r *Rank)) {
	t.Helper()
	if proctest.Again() {
		hostProc(t, segment, f)
		return
	}
	_, ps := startHostProcs(t, n, perHost, rate, nil)
	require.NoError(t, errors.Join(proctest.Failures(ps)...))
}

// startHostProcs starts the processes, which run the test again and call hostProc there.
func startHostProcs(t *testing.T, n, perHost int, rate string, delays *proctest.Delays, env ...string) ([]*proctest.Namespace, []*proctest.Process) {
	t.Helper()
	NeedUCX(t)
	spaces := proctest.Namespaces(t, n/perHost)
	for _, s := range spaces {
		if rate != "" {
			s.Limit(rate)
		}
	}
	ps := make([]*proctest.Process, n)
	for r := range ps {
		ps[r] = proctest.Rank(t, r, n, spaces[0].IP+":29412", proctest.Spec{Within: 6 * time.Minute, Via: spaces[r/perHost].Via, Delays: delays,
			Env: append([]string{fmt.Sprint("LOCAL_RANK=", r%perHost), fmt.Sprint("LOCAL_WORLD_SIZE=", perHost)}, env...)})
	}
	return spaces, ps
}

// hostProc is one of these processes.
func hostProc(t *testing.T, segment int64, f func(r *Rank)) {
	t.Helper()
	NeedUCX(t)
	proc(t, func(ctx context.Context, g *comm.Group) {
		runRank(t, ctx, g, device.Host(), memory.Options{SegmentBytes: segment}, f)
	})
}

// NeedUCX skips the test without UCX, and has it use nothing but TCP.
func NeedUCX(t testing.TB) {
	t.Helper()
	if *perTest == 1 { // else Again has set it, before tests that run at the same time
		t.Setenv("UCX_TLS", "tcp,self")
	}
	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
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

// Devices runs f on worlds of each of the numbers of ranks, on the host and, if there are GPUs, on those.
func Devices(t *testing.T, segment int64, f func(r *Rank), ranks ...int) {
	for _, n := range ranks {
		t.Run(fmt.Sprintf("host/ranks=%d", n), func(t *testing.T) { Local(t, n, segment, f) })
		t.Run(fmt.Sprintf("cuda/ranks=%d", n), func(t *testing.T) { GPUs(t, n, segment, f) })
	}
}

// countGPUs counts the GPUs. It skips the test without one.
func countGPUs(t testing.TB) int {
	t.Helper()
	gpus, err := device.CUDACount()
	if errors.Is(err, device.ErrUnavailable) || err == nil && gpus == 0 {
		t.Skipf("no GPU: %v", err)
	}
	require.NoError(t, err)
	require.NoError(t, keepContexts())
	return gpus
}

// The driver takes 32 queues, the most that it can have, in place of 8. Ranks of one process that share a GPU have streams of their own, and
// those that share a queue can hold each other up for ever: a call waits for a peer's, which is behind it.
func init() {
	os.Setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
}

// keepContexts opens all GPUs of which it has none yet, so that their contexts last as long as the process: it takes a GPU a second to make one.
var keepContexts = sync.OnceValue(func() error {
	gpus, err := device.CUDACount()
	for i := range gpus {
		if _, openErr := device.CUDA(i); openErr != nil {
			err = errors.Join(err, openErr)
		}
	}
	return err
})

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
	r := &Rank{T: t, Ctx: ctx, Group: g, Device: d, Heap: h}
	f(r)
	for _, end := range r.ends {
		r.Must(end())
	}
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
	proc(t, run)
}

// proc is a rank in a process of its own.
func proc(t *testing.T, run func(ctx context.Context, g *comm.Group)) {
	t.Helper()
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
