package cuda_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/proxy"
	"github.com/switchyard-moe/switchyard/internal/rails/railtest"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	kernelscuda "github.com/switchyard-moe/switchyard/kernels/cuda"
)

// hosts are two ranks of this process, joined by UCX over TCP, as two hosts are: rank r on GPU r, or both on one GPU.
type hosts struct {
	t     *testing.T
	plan  kernelscuda.RingPlan
	ranks [2]*hostRank
}

type hostRank struct {
	ctx     *cuda.Context
	stream  cuda.Stream
	kernel  cuda.Function
	segment *cuda.HostBuffer
	queue   *cuda.HostBuffer
	fault   *cuda.HostBuffer
	device  uintptr // of the control block, the state and the words of the queue
	posts   *kernelscuda.Queue
	rail    rails.Rail
	proxy   *proxy.Proxy
}

const (
	queueSlots  = 64
	controlRoom = kernels.HeaderBytes + 4096
	deviceBytes = controlRoom + 4096
	wrongAt     = controlRoom + 2048
)

func newHosts(t *testing.T, plan kernelscuda.RingPlan) *hosts {
	t.Helper()
	d, err := cuda.Open()
	if errors.Is(err, cuda.ErrUnavailable) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	n, err := d.DeviceCount()
	require.NoError(t, err)
	if n == 0 {
		t.Skip("needs a GPU: the driver sees none")
	}
	if os.Getenv("UCX_TLS") == "" {
		t.Setenv("UCX_TLS", "tcp,self")
	}
	h := &hosts{t: t, plan: plan}
	for rank := range h.ranks {
		h.ranks[rank] = h.open(d, rank, rank%n)
	}
	for rank, r := range h.ranks {
		require.NoError(t, r.rail.Connect(1-rank, h.ranks[1-rank].rail.Address()))
	}
	return h
}

func (h *hosts) open(d *cuda.Driver, rank, gpu int) *hostRank {
	t, r := h.t, &hostRank{}
	v, err := d.Device(gpu)
	require.NoError(t, err)
	r.ctx, err = v.Primary()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.ctx.Close()) })
	image, err := kernelscuda.RingImage(v)
	require.NoError(t, err)
	m, err := r.ctx.LoadModule(image)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.ctx.UnloadModule(m)) })
	r.kernel, err = r.ctx.Function(m, "ring_trial")
	require.NoError(t, err)
	r.stream, err = r.ctx.NewStream(0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.ctx.DestroyStream(r.stream)) })
	for _, b := range []struct {
		to **cuda.HostBuffer
		n  int64
	}{{&r.segment, h.plan.Segment()}, {&r.queue, kernelscuda.QueueBytes(queueSlots)}, {&r.fault, 4096}} {
		*b.to, err = r.ctx.NewHostBuffer(b.n)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, (*b.to).Close()) })
	}
	r.device, err = r.ctx.MemAlloc(deviceBytes)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.ctx.MemFree(r.device)) })
	require.NoError(t, r.ctx.Set(r.stream, r.device, 0, deviceBytes))
	require.NoError(t, r.ctx.SynchronizeStream(r.stream))

	railtest.NeedUCX(t, ucx.Open, ucx.ErrUnavailable)
	r.rail, err = ucx.Open(rails.Config{Rank: rank, Size: 2, Key: 0x5157, Segment: r.segment.Bytes(), Ring: func() {}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.rail.Close()) })
	require.NoError(t, r.rail.Open(0, h.plan.Segment()))
	r.posts = kernelscuda.NewQueue(r.queue.Bytes(), queueSlots)
	r.proxy = proxy.New(r.rail, r.segment.Bytes())
	t.Cleanup(r.proxy.Interrupt)
	r.posts.Captured() // kernels of several blocks do not count themselves
	r.proxy.Add(r.posts)
	return r
}

func (h *hosts) launch(rank, chunks int, timeout time.Duration) {
	r := h.ranks[rank]
	m := kernelscuda.RingMemory{
		Control: r.device, State: r.device + controlRoom, Next: r.device + controlRoom + 1024, Wrong: r.device + wrongAt,
		Queue: r.queue.Addr(), Segment: r.segment.Addr(), Fault: r.fault.Addr(), Slots: queueSlots,
	}
	var b cuda.Batch
	b.Launch(0, cuda.Launch{
		Function: r.kernel, Grid: [3]uint32{uint32(h.plan.Blocks), 1, 1}, Block: [3]uint32{256, 1, 1}, Flags: cuda.RemoteDomain,
		Args: h.plan.NewRingTrial(rank, 1-rank, m, chunks, timeout).Args(),
	})
	require.NoError(h.t, r.ctx.Submit(&b, uintptr(r.stream)))
}

// ended waits for all launches, and wants all bytes to be right.
func (h *hosts) ended(what string) {
	for rank, r := range h.ranks {
		require.NoError(h.t, r.ctx.SynchronizeStream(r.stream))
		kind, peer := kernelscuda.FaultOf(r.fault.Bytes())
		require.Zero(h.t, kind, "%s: rank %d waits for rank %d; its proxy: %v", what, rank, peer, r.proxy.Err())
	}
	for rank, r := range h.ranks {
		wrong := make([]byte, 8)
		require.NoError(h.t, r.ctx.Read(r.stream, wrong, r.device+wrongAt))
		require.Equal(h.t, make([]byte, 8), wrong, "%s: bytes of rank %d that are wrong", what, rank)
		require.NoError(h.t, r.proxy.Err())
	}
}

// Kernels of two ranks trade chunks through their proxies, in launches and in a graph that is replayed. Every byte is compared.
func TestRingsOfGPUs(t *testing.T) {
	for _, p := range []kernelscuda.RingPlan{
		{Blocks: 1, Slots: 1, Gives: 1, SlotBytes: 8}, {Blocks: 4, Slots: 3, Gives: 2, SlotBytes: 5000},
		{Blocks: 8, Slots: 4, Gives: 1, SlotBytes: 1 << 10}, {Blocks: 8, Slots: 2, Gives: 2, SlotBytes: 128 << 10},
	} {
		t.Run(fmt.Sprintf("%+v", p), func(t *testing.T) {
			h := newHosts(t, p)
			const timeout, chunks = 20 * time.Second, 200
			for range 3 {
				h.launch(0, chunks, timeout)
				h.launch(1, chunks, timeout)
			}
			h.ended("launches")
			var graphs [2]cuda.GraphExec
			for rank, r := range h.ranks {
				require.NoError(t, r.ctx.BeginCapture(r.stream, cuda.RelaxedCapture))
				h.launch(rank, chunks, timeout)
				g, err := r.ctx.EndCapture(r.stream)
				require.NoError(t, err)
				graphs[rank], err = r.ctx.Instantiate(g)
				require.NoError(t, err)
				require.NoError(t, r.ctx.DestroyGraph(g))
			}
			for range 3 {
				for rank, r := range h.ranks {
					require.NoError(t, r.ctx.LaunchGraph(graphs[rank], r.stream))
				}
			}
			h.ended("replays")
			for rank, r := range h.ranks {
				require.NoError(t, r.ctx.DestroyGraphExec(graphs[rank]))
			}
		})
	}
}

// The same kernels on the emulated driver, with real proxies and rails.
func TestRingsThroughProxies(t *testing.T) {
	if !emulated.Kernels(t, ".") {
		return
	}
	for _, p := range []kernelscuda.RingPlan{
		{Blocks: 1, Slots: 1, Gives: 1, SlotBytes: 8}, {Blocks: 3, Slots: 3, Gives: 2, SlotBytes: 700}, {Blocks: 8, Slots: 2, Gives: 2, SlotBytes: 100},
	} {
		h := newHosts(t, p)
		const calls, chunks = 3, 12
		for range calls {
			h.launch(0, chunks, time.Hour) // of the emulation's own time
			h.launch(1, chunks, time.Hour)
		}
		h.ended(fmt.Sprintf("%+v", p))
		for _, r := range h.ranks {
			epoch := make([]byte, 8)
			require.NoError(t, r.ctx.Read(r.stream, epoch, r.device+kernels.HeaderBytes))
			require.EqualValues(t, calls, binary.LittleEndian.Uint64(epoch), "calls that have run")
		}
	}
}

// A kernel whose peer does not come ends at its deadline, and when it is told to.
func TestF1_RingsOfGPUsEnd(t *testing.T) {
	plan := kernelscuda.RingPlan{Blocks: 2, Slots: 2, Gives: 1, SlotBytes: 1 << 10}
	h := newHosts(t, plan)
	h.launch(0, 10, 300*time.Millisecond)
	require.NoError(t, h.ranks[0].ctx.SynchronizeStream(h.ranks[0].stream))
	kind, peer := kernelscuda.FaultOf(h.ranks[0].fault.Bytes())
	require.EqualValues(t, kernelscuda.FaultTimeout, kind)
	require.EqualValues(t, 1, peer)

	h = newHosts(t, plan)
	h.launch(0, 10, time.Minute)
	kernelscuda.Stop(h.ranks[0].fault.Bytes())
	start := time.Now()
	require.NoError(t, h.ranks[0].ctx.SynchronizeStream(h.ranks[0].stream))
	require.Less(t, time.Since(start), 20*time.Second)
	kind, _ = kernelscuda.FaultOf(h.ranks[0].fault.Bytes())
	require.EqualValues(t, kernelscuda.FaultAborted, kind)
}

// What a put and its signal take from kernel to kernel, and from host to host in the same run. In each round both ranks send and await a
// chunk, so a round is the time one way.
func TestMeasureRingsOfGPUs(t *testing.T) {
	if testing.Short() {
		t.Skip("measures")
	}
	for _, bytes := range []int64{8, 1 << 10, 16 << 10, 128 << 10} {
		h := newHosts(t, kernelscuda.RingPlan{Blocks: 1, Slots: 4, Gives: 2, SlotBytes: bytes})
		const rounds = 1000
		var kernel, host []time.Duration
		for range 5 {
			start := time.Now()
			h.launch(0, rounds, 20*time.Second)
			h.launch(1, rounds, 20*time.Second)
			h.ended("measured")
			kernel = append(kernel, time.Since(start)/rounds)
			host = append(host, h.hostRounds(bytes, rounds))
		}
		slices.Sort(kernel)
		slices.Sort(host)
		t.Logf("%d bytes one way: from kernel to kernel %v, from host to host %v; medians of 5 times %d", bytes, kernel[2], host[2], rounds)
	}
}

// hostRounds has threads of the host do what the kernels do, by the rails alone.
func (h *hosts) hostRounds(bytes int64, rounds int) time.Duration {
	a, b := h.ranks[0], h.ranks[1]
	const word = 3000 &^ 7
	before := shm.Word(a.segment.Bytes(), word).Load()
	start := time.Now()
	done := make(chan error, 2)
	for rank, r := range []*hostRank{a, b} {
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			at := h.plan.Segment() - bytes
			for k := range uint64(rounds) {
				if err := r.rail.Put(1-rank, at, r.segment.Bytes()[at:], word); err != nil {
					done <- err
					return
				}
				for end := time.Now().Add(20 * time.Second); shm.Word(r.segment.Bytes(), word).Load() < before+k+1; {
					if time.Now().After(end) {
						done <- fmt.Errorf("rank %d: no put %d", rank, k)
						return
					}
					_ = unix.Nanosleep(&unix.Timespec{Nsec: 1}, nil)
				}
			}
			done <- nil
		}()
	}
	for range 2 {
		require.NoError(h.t, <-done)
	}
	return time.Since(start) / time.Duration(rounds)
}
