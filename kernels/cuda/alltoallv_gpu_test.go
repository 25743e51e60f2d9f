package cuda

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

var testBounds = kernels.ExchangeBounds{Stripes: 4, Slots: 2, SlotBytes: 8192, PacketBytes: 4096}

var schedules = []struct {
	name    string
	inPlace bool
	s       kernels.Schedule
}{
	{"ring", true, kernels.Schedule{Window: 1}},
	{"ring at a rate", true, kernels.Schedule{Window: 1, Rate: 50}},
	{"mesh", true, kernels.Schedule{}},
	{"mesh, few blocks", true, kernels.Schedule{Blocks: 3}},
	{"staged mesh", false, kernels.Schedule{}},
	{"staged ring at a rate", false, kernels.Schedule{Window: 1, Rate: 50}},
	{"staged by choice", true, kernels.Schedule{Window: 1, Staged: true}},
	{"staged, one block", false, kernels.Schedule{Window: 1, Blocks: 1}},
	{"staged, copied out by other blocks", false, kernels.Schedule{Window: 1, Blocks: 2, CopyBlocks: 2, Rate: 50}},
}

func TestX5_AnyCountsAnyAlignment(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	odd := []int64{0, 1, 2, 3, 5, 15, 17, 47, 48, 49, 1535, 1536, 1537, 4095, 4096, 4097, 16384, 16385, 50001, 65536, 100003}
	sizes := []int{1, 2, 3, 4, 8}
	if testing.Short() { // under compute-sanitizer
		sizes = []int{3}
	}
	for _, size := range sizes {
		w := newWorld(t, size, 8<<20, testBounds)
		for _, k := range schedules {
			for trial := range 4 {
				limit := len(odd)
				if trial == 0 {
					limit = 15 // packets alone
				}
				pad := func() int64 { return rng.Int64N(40) }
				if trial == 3 {
					pad = func() int64 { return 16 * rng.Int64N(3) }
				}
				c := w.newCall(random(rng, size, func() int64 { return odd[rng.IntN(limit)] }), pad)
				c.inPlace, c.schedule = k.inPlace, k.s
				what := fmt.Sprintf("%d ranks, %s, trial %d", size, k.name, trial)
				w.prepare(c)
				w.launch(c)
				w.sync()
				w.verifyHost(c, what)
			}
		}
		w.close()
	}
}

func TestX5_LargeMessages(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	w := newWorld(t, 4, 256<<20, kernels.ExchangeBounds{Stripes: 16, Slots: 2, SlotBytes: 128 << 10, PacketBytes: 64 << 10})
	defer w.close()
	for _, k := range schedules {
		for _, skew := range []bool{false, true} {
			c := w.newCall(random(rng, 4, func() int64 {
				if skew {
					return rng.Int64N(8 << 20)
				}
				return 8 << 20
			}), func() int64 {
				if skew {
					return rng.Int64N(33)
				}
				return 0
			})
			c.inPlace, c.schedule = k.inPlace, k.s
			w.prepare(c)
			w.launch(c)
			w.sync()
			w.verifyDevice(c, fmt.Sprintf("%s, skew %v", k.name, skew))
		}
	}
}

func TestCopyEnginesExchange(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	for _, size := range []int{1, 2, 3, 5} {
		w := newWorld(t, size, 16<<20, testBounds)
		for trial := range 6 {
			c := w.newCall(random(rng, size, func() int64 { return rng.Int64N(200_000) >> (rng.IntN(2) * 8) }), func() int64 { return rng.Int64N(40) })
			c.copies = trial%3 != 2
			w.prepare(c)
			w.launch(c)
			w.launch(c)
			w.sync()
			w.verifyHost(c, fmt.Sprintf("%d ranks, trial %d", size, trial))
		}
		w.close()
	}
}

func TestCopyEnginesNoticeAWrongPlace(t *testing.T) {
	w := newWorld(t, 2, 8<<20, testBounds)
	defer w.close()
	c := w.newCall(uniform(2, 100_000), func() int64 { return 256 })
	c.copies, c.timeout = true, time.Second
	x := w.exchange(c, 0)
	x.Routes.PeerOffsets[1] += 16
	require.NoError(t, w.ranks[0].p.submit(uintptr(w.ranks[0].s), x))
	require.NoError(t, w.ranks[1].p.submit(uintptr(w.ranks[1].s), w.exchange(c, 1)))
	for _, k := range w.ranks {
		require.NoError(t, k.ctx.SynchronizeStream(k.s))
	}
	require.ErrorContains(t, w.ranks[0].p.err(), "granted")
}

func TestX3_CallsFollowEachOtherWithoutWaiting(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	w := newWorld(t, 4, 16<<20, testBounds)
	defer w.close()
	for round := range 60 {
		c := w.newCall(random(rng, 4, func() int64 { return rng.Int64N(1 << (4 + round%16)) }), func() int64 { return rng.Int64N(20) })
		k := schedules[round%len(schedules)]
		c.inPlace, c.schedule = k.inPlace, k.s
		w.prepare(c)
		for range 1 + round%5 {
			w.launch(c) // several times in a row, each rank on its own
		}
		if round%3 == 0 {
			w.sync()
			w.verifyHost(c, fmt.Sprintf("round %d, %s", round, k.name))
		} else {
			w.verifyDevice(c, fmt.Sprintf("round %d, %s", round, k.name))
		}
	}
	w.sync()
}

func TestGraphsReplay(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	w := newWorld(t, 3, 8<<20, testBounds)
	defer w.close()
	for _, k := range schedules {
		c := w.newCall(random(rng, 3, func() int64 { return rng.Int64N(60000) }), func() int64 { return rng.Int64N(20) })
		c.inPlace, c.schedule = k.inPlace, k.s
		graphs := make([]cuda.Graph, 3)
		execs := make([]cuda.GraphExec, 3)
		for r, k := range w.ranks {
			require.NoError(t, k.ctx.BeginCapture(k.s, cuda.RelaxedCapture))
			for range 3 {
				require.NoError(t, k.p.submit(uintptr(k.s), w.exchange(c, r)))
			}
			var err error
			graphs[r], err = k.ctx.EndCapture(k.s)
			require.NoError(t, err)
			execs[r], err = k.ctx.Instantiate(graphs[r])
			require.NoError(t, err)
		}
		for replay := range 5 {
			w.prepare(c)
			for r, k := range w.ranks {
				require.NoError(t, k.ctx.LaunchGraph(execs[r], k.s))
			}
			w.sync()
			w.verifyHost(c, fmt.Sprintf("%s, replay %d", k.name, replay))
			// a call without a graph between two replays
			w.launch(c)
		}
		w.sync()
		for r, k := range w.ranks {
			require.NoError(t, k.ctx.DestroyGraphExec(execs[r]))
			require.NoError(t, k.ctx.DestroyGraph(graphs[r]))
		}
	}
}

func TestSplitsAreReadFromDeviceMemory(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	w := newWorld(t, 3, 8<<20, testBounds)
	defer w.close()
	tables := make([]uintptr, 3)
	for r, k := range w.ranks {
		var err error
		tables[r], err = k.ctx.MemAlloc(4 * 3 * 8)
		require.NoError(t, err)
	}
	for trial := range 6 {
		c := w.newCall(random(rng, 3, func() int64 { return rng.Int64N(20000) }), func() int64 { return rng.Int64N(20) })
		c.inPlace = trial%2 == 0
		w.prepare(c)
		for r, k := range w.ranks {
			var table []byte
			o := c.routes[r]
			for _, v := range [][]int64{o.SendBytes, o.SendOffsets, o.RecvBytes, o.RecvOffsets} {
				for _, n := range v {
					table = binary.LittleEndian.AppendUint64(table, uint64(n))
				}
			}
			require.NoError(t, k.ctx.Write(k.s, tables[r], table))
		}
		for r, k := range w.ranks {
			x := w.exchange(c, r)
			x.Splits = kernels.Buffer{Ptr: tables[r], Bytes: 4 * 3 * 8}
			x.Src.Bytes, x.Dst.Bytes = extent(c.routes[r].SendBytes, c.routes[r].SendOffsets), extent(c.routes[r].RecvBytes, c.routes[r].RecvOffsets)
			require.NoError(t, k.p.submit(uintptr(k.s), x))
		}
		w.sync()
		w.verifyHost(c, fmt.Sprintf("trial %d", trial))
	}
	for r, k := range w.ranks {
		require.NoError(t, k.ctx.MemFree(tables[r]))
	}
}

func TestSplitsInDeviceMemoryThatReachPastABufferMoveNothing(t *testing.T) {
	for _, p := range []struct {
		word  int // of the table of rank 0
		value int64
		want  kernels.SplitsError
	}{
		{1, 1001, kernels.SplitsError{Peer: 1, Send: true, Bytes: 1001, Offset: 1000, Limit: 2000}},
		{3, -1, kernels.SplitsError{Peer: 1, Send: true, Bytes: 1000, Offset: -1, Limit: 2000}},
		{5, 1 << 62, kernels.SplitsError{Peer: 1, Bytes: 1 << 62, Offset: 1000, Limit: 2000}},
		{6, 1001, kernels.SplitsError{Peer: 0, Bytes: 1000, Offset: 1001, Limit: 2000}},
	} {
		w := newWorld(t, 2, 8<<20, testBounds)
		c := w.newCall(uniform(2, 1000), none)
		w.prepare(c)
		for r, k := range w.ranks {
			words := []int64{1000, 1000, 0, 1000, 1000, 1000, 0, 1000}
			if r == 0 {
				words[p.word] = p.value
			}
			var table []byte
			for _, n := range words {
				table = binary.LittleEndian.AppendUint64(table, uint64(n))
			}
			x := w.exchange(c, r)
			x.Splits = kernels.Buffer{Ptr: w.segment(r) + uintptr(w.stride) - 4096, Bytes: 4 * 2 * 8}
			x.Src.Bytes, x.Dst.Bytes = 2000, 2000
			require.NoError(t, k.ctx.Write(k.s, x.Splits.Ptr, table))
			require.NoError(t, k.p.submit(uintptr(k.s), x))
		}
		for _, k := range w.ranks {
			require.NoError(t, k.ctx.SynchronizeStream(k.s))
		}
		p.want.Epoch = 1
		var got *kernels.SplitsError
		require.ErrorAs(t, w.ranks[0].p.err(), &got)
		require.Equal(t, p.want, *got)
		require.ErrorAs(t, w.ranks[1].p.err(), &got)
		require.Equal(t, p.want, *got)
		out := make([]byte, 2000)
		require.NoError(t, w.ranks[0].ctx.Read(w.ranks[0].s, out, w.segment(0)+uintptr(c.dst)))
		for i, v := range out {
			require.EqualValues(t, poison, v, "byte %d", i)
		}
		w.close()
	}
}

func TestF1_AMissingRankIsNamedWithinTheDeadline(t *testing.T) {
	for _, bytes := range []int64{100, 100_000} {
		for _, inPlace := range []bool{true, false} {
			w := newWorld(t, 3, 8<<20, testBounds)
			c := w.newCall(uniform(3, bytes), none)
			c.inPlace, c.timeout = inPlace, 200*time.Millisecond
			w.prepare(c)
			w.launch(c)
			w.sync()
			start := time.Now()
			for r, k := range w.ranks[:2] { // rank 2 stays away
				require.NoError(t, k.p.submit(uintptr(k.s), w.exchange(c, r)))
			}
			for _, k := range w.ranks[:2] {
				require.NoError(t, k.ctx.SynchronizeStream(k.s))
			}
			require.Less(t, time.Since(start), 2*time.Second)
			for _, k := range w.ranks[:2] {
				err := k.p.err()
				require.ErrorIs(t, err, comm.ErrTimeout)
				var p *comm.PeerError
				require.ErrorAs(t, err, &p)
				require.EqualValues(t, 2, p.Epoch)
			}
			// later launches return at once
			start = time.Now()
			require.NoError(t, w.ranks[0].p.submit(uintptr(w.ranks[0].s), w.exchange(c, 0)))
			require.NoError(t, w.ranks[0].ctx.SynchronizeStream(w.ranks[0].s))
			require.Less(t, time.Since(start), 100*time.Millisecond)
			w.close()
		}
	}
}

// A message of 20 MiB at 8 MB/s, written in place: its one signal comes at its end, three times later than the deadline. The receiver waits
// for it, and the sender in the next call for the receiver's.
func TestF1_WhoWritesALongMessageIsNotSilent(t *testing.T) {
	w := newWorld(t, 2, 64<<20, testBounds)
	defer w.close()
	c := w.newCall([][]int64{{0, 20 << 20}, {200_000, 0}}, none)
	c.timeout, c.schedule = 800*time.Millisecond, kernels.Schedule{Window: 1, Blocks: 1, Rate: 0.0082}
	w.prepare(c)
	start := time.Now()
	w.launch(c)
	w.launch(c)
	w.sync()
	require.Greater(t, time.Since(start), 4*c.timeout, "the message is to take long")
	w.verifyHost(c, "a long message")
}

// endsWaits has a rank wait for one that does not come, in small and large calls, until end has returned.
func endsWaits(t *testing.T, end func(w *world, k *rank)) {
	for _, bytes := range []int64{100, 100_000} {
		w := newWorld(t, 2, 8<<20, testBounds)
		c := w.newCall(uniform(2, bytes), none)
		c.timeout = time.Minute
		k := w.ranks[0]
		require.NoError(t, k.p.submit(uintptr(k.s), w.exchange(c, 0)))
		time.Sleep(20 * time.Millisecond)
		end(w, k)
		start := time.Now()
		require.NoError(t, k.ctx.SynchronizeStream(k.s))
		require.Less(t, time.Since(start), time.Second)
		require.ErrorIs(t, k.p.err(), comm.ErrAborted)
		w.close()
	}
}

func TestF1_TheAbortWordEndsEveryWait(t *testing.T) {
	endsWaits(t, func(w *world, k *rank) {
		other, err := k.ctx.NewStream(0)
		require.NoError(t, err)
		require.NoError(t, k.ctx.Set(other, w.segment(0)+kernels.AbortOffset, 1, 8))
		require.NoError(t, k.ctx.DestroyStream(other)) // its work goes on
	})
}

// A thread that frees memory waits in the driver for the kernels that run, and nobody else gets into it meanwhile.
func TestF1_InterruptReachesKernelsPastABusyDriver(t *testing.T) {
	endsWaits(t, func(_ *world, k *rank) {
		b, err := k.ctx.NewHostBuffer(4096)
		require.NoError(t, err)
		freed := make(chan error, 1)
		go func() { freed <- b.Close() }()
		time.Sleep(20 * time.Millisecond)
		start := time.Now()
		k.p.e.Interrupt()
		require.NoError(t, <-freed)
		require.Less(t, time.Since(start), time.Second)
	})
}

func TestF3_RanksThatDisagreeOnASizeLearnBothValues(t *testing.T) {
	for _, p := range []struct{ sent, expected int64 }{{100, 200}, {100, 100_000}, {100_000, 100}, {100_000, 50_000}, {50_000, 100_000}, {0, 7}} {
		for _, inPlace := range []bool{true, false} {
			w := newWorld(t, 2, 8<<20, testBounds)
			c := w.newCall(uniform(2, 100_000), none)
			c.inPlace = inPlace
			ok := c.routes[0].SendBytes[1]
			c.routes[0].SendBytes[1], c.routes[1].RecvBytes[0] = p.sent, p.expected
			w.launch(c)
			for _, k := range w.ranks {
				require.NoError(t, k.ctx.SynchronizeStream(k.s))
			}
			err := w.ranks[1].p.err()
			var m *kernels.CountMismatchError
			require.ErrorAs(t, err, &m, "%+v", p)
			require.Equal(t, kernels.CountMismatchError{Src: 0, Dst: 1, Sent: uint64(p.sent), Expected: uint64(p.expected), Epoch: 1}, *m)
			// the next call works
			c.routes[0].SendBytes[1], c.routes[1].RecvBytes[0] = ok, ok
			for _, k := range w.ranks {
				if k.p.err() != nil {
					require.ErrorIs(t, k.p.Fault(), comm.ErrMismatch)
				}
				require.NoError(t, k.p.Fault(), "it is told once")
			}
			w.launch(c)
			for _, k := range w.ranks {
				require.NoError(t, k.ctx.SynchronizeStream(k.s))
			}
			heard := w.ranks[0].p.Fault() // the sender of a packet, which the receiver's headers tell
			if p.sent > testBounds.PacketBytes {
				require.NoError(t, heard, "%+v", p)
			} else {
				require.ErrorAs(t, heard, &m, "%+v", p)
				require.Equal(t, kernels.CountMismatchError{Src: 0, Dst: 1, Sent: uint64(p.sent), Expected: uint64(p.expected), Epoch: 1}, *m)
			}
			for _, k := range w.ranks {
				require.NoError(t, k.p.Fault(), "it is told once")
			}
			w.prepare(c)
			w.launch(c)
			w.sync()
			w.verifyHost(c, fmt.Sprintf("after %+v", p))
			w.close()
		}
	}
}

func TestX9_ManyChangingSplits(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	w := newWorld(t, 4, 8<<20, testBounds)
	defer w.close()
	rounds := 3000
	if testing.Short() {
		rounds = 200
	}
	var before runtime.MemStats
	var free int64
	for i := range rounds {
		if i == rounds/10 {
			w.sync()
			runtime.GC()
			runtime.ReadMemStats(&before)
			var err error
			free, _, err = w.ranks[0].ctx.MemInfo()
			require.NoError(t, err)
		}
		c := w.newCall(random(rng, 4, func() int64 { return rng.Int64N(1 << (i % 18)) }), none)
		k := schedules[i%len(schedules)]
		c.inPlace, c.schedule = k.inPlace, k.s
		if i%500 == 0 {
			w.prepare(c)
			w.launch(c)
			w.verifyDevice(c, fmt.Sprintf("round %d", i))
			continue
		}
		w.launch(c)
	}
	w.sync()
	now, _, err := w.ranks[0].ctx.MemInfo()
	require.NoError(t, err)
	require.Equal(t, free, now, "device memory")
}
