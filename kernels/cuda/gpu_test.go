package cuda

import (
	_ "embed"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

//go:embed verify.fatbin
var verifyImage []byte

var (
	oneGPU      = flag.Bool("one-gpu", false, "put all ranks on GPU 0")
	cooperative = flag.Bool("cooperative", false, "launch with the cooperative attribute")
	plain       = flag.Bool("plain", false, "launch without programmatic order")
	local       = flag.Bool("local", false, "launch in the memory domain of other kernels")
)

var keepContexts sync.Once

// world is a symmetric heap over the GPUs of this process, rank r on GPU r modulo their number.
type world struct {
	t      testing.TB
	size   int
	stride int64
	base   uintptr
	driver *cuda.Driver
	ranks  []*rank
	ch     *channels
	heap   int64 // first offset behind the channels
	calls  uint64
}

type rank struct {
	id          int
	ctx         *cuda.Context
	s           cuda.Stream
	e           *Engine
	p           *port
	handle      cuda.MemHandle
	verify      cuda.Module
	fill, check cuda.Function
	wrong       uintptr
}

func newWorld(t testing.TB, size int, segment int64, family kernels.Channels) *world {
	t.Helper()
	d, err := cuda.Open()
	if errors.Is(err, cuda.ErrUnavailable) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	n, err := d.DeviceCount()
	require.NoError(t, err)
	if n == 0 {
		t.Skip("needs a GPU: the driver sees none")
	}
	if *oneGPU {
		n = 1
	}
	w := &world{t: t, size: size, driver: d}
	keepContexts.Do(func() { // making a context anew for every test takes a second
		d, err := cuda.Open()
		require.NoError(t, err)
		for i := range n {
			v, err := d.Device(i)
			require.NoError(t, err)
			_, err = v.Primary()
			require.NoError(t, err)
		}
	})
	var all []*cuda.Device
	for i := range min(n, size) {
		v, err := d.Device(i)
		require.NoError(t, err)
		all = append(all, v)
	}
	if err := cuda.CheckDevices(all, cuda.Requirements{VirtualMemory: true, CooperativeLaunch: true}); err != nil {
		t.Skip(err)
	}
	family.Size = size
	c := channels{family, kernels.HeaderBytes}
	w.ch = &c
	w.heap = kernels.AlignUp(c.offset+c.bytes(), 1<<21)
	w.stride = kernels.AlignUp(w.heap+segment, 1<<21)
	for r := range size {
		ctx, err := all[r%len(all)].Primary()
		require.NoError(t, err)
		w.ranks = append(w.ranks, &rank{id: r, ctx: ctx})
	}
	c0 := w.ranks[0].ctx
	w.base, err = c0.Reserve(w.stride*int64(size), 1<<21, 0)
	require.NoError(t, err)
	for r, k := range w.ranks {
		k.handle, err = k.ctx.MemCreate(w.stride, cuda.NoHandle)
		require.NoError(t, err)
		require.NoError(t, c0.MemMap(w.segment(r), w.stride, 0, k.handle))
		require.NoError(t, c0.SetAccess(w.segment(r), w.stride, all...))
	}
	for r, k := range w.ranks {
		k.s, err = k.ctx.NewStream(0)
		require.NoError(t, err)
		require.NoError(t, k.ctx.Set(k.s, w.segment(r), 0, c.offset+c.controlBytes()))
		require.NoError(t, k.ctx.SynchronizeStream(k.s))
		k.e, err = New(k.ctx, kernels.Space{Base: w.base, Stride: w.stride, Rank: r, Size: size}, (size+len(all)-1)/len(all), func() error { return nil })
		require.NoError(t, err)
		p, err := k.e.Open(&c.Channels, c.offset)
		require.NoError(t, err)
		k.p = p.(*port)
		if *cooperative {
			k.e.flags |= cuda.Cooperative
		}
		if *plain {
			k.e.flags &^= cuda.Programmatic
		}
		if *local {
			k.e.flags &^= cuda.RemoteDomain
		}
		k.verify, err = k.ctx.LoadModule(verifyImage)
		require.NoError(t, err)
		k.fill, err = k.ctx.Function(k.verify, "fill")
		require.NoError(t, err)
		k.check, err = k.ctx.Function(k.verify, "check")
		require.NoError(t, err)
		k.wrong, err = k.ctx.MemAlloc(8)
		require.NoError(t, err)
	}
	return w
}

func (w *world) close() {
	for _, k := range w.ranks {
		require.NoError(w.t, k.ctx.SynchronizeStream(k.s))
	}
	for r, k := range w.ranks {
		require.NoError(w.t, k.p.Close())
		require.NoError(w.t, k.e.Close())
		require.NoError(w.t, k.ctx.UnloadModule(k.verify))
		require.NoError(w.t, k.ctx.MemFree(k.wrong))
		require.NoError(w.t, k.ctx.DestroyStream(k.s))
		require.NoError(w.t, k.ctx.MemUnmap(w.segment(r), w.stride))
		require.NoError(w.t, k.ctx.MemRelease(k.handle))
	}
	require.NoError(w.t, w.ranks[0].ctx.Unreserve(w.base, w.stride*int64(w.size)))
	for _, k := range w.ranks {
		require.NoError(w.t, k.ctx.Close())
	}
	require.NoError(w.t, w.driver.Close())
}

func (w *world) segment(r int) uintptr { return w.base + uintptr(int64(r)*w.stride) }

// seed of the message from s to d in a call.
func seed(call uint64, s, d int) uint64 { return call<<40 | uint64(s)<<52 ^ uint64(d)<<28 }

// value is byte i of a message, as verify.cu has it.
func value(seed, i uint64) byte {
	z := (seed + i>>3) * 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return byte((z ^ z>>31) >> (8 * (i & 7)))
}

func (k *rank) enqueue(b *cuda.Batch, f cuda.Function, words ...uint64) {
	var args []byte
	for _, v := range words {
		args = binary.LittleEndian.AppendUint64(args, v)
	}
	b.Launch(0, cuda.Launch{Function: f, Grid: [3]uint32{64, 1, 1}, Block: [3]uint32{256, 1, 1}, Args: args})
}

// routes of rank r for a matrix of bytes, m[s][d]. pad gives the gap before each message in both buffers.
func routes(m [][]int64, r int, pad func() int64) *kernels.Routes {
	n := len(m)
	o := &kernels.Routes{}
	var at, to int64
	for p := range n {
		at += pad()
		to += pad()
		o.SendBytes, o.SendOffsets = append(o.SendBytes, m[r][p]), append(o.SendOffsets, at)
		o.RecvBytes, o.RecvOffsets = append(o.RecvBytes, m[p][r]), append(o.RecvOffsets, to)
		at += m[r][p]
		to += m[p][r]
	}
	for i := 1; i < n; i++ {
		o.Order = append(o.Order, int32((r+i)%n))
		o.ReverseOrder = append(o.ReverseOrder, int32((r+n-i)%n))
	}
	return o
}

func extent(bytes, offsets []int64) int64 {
	var e int64
	for k, n := range bytes {
		e = max(e, offsets[k]+n)
	}
	return e
}

// call is one exchange on all ranks.
type call struct {
	m        [][]int64
	routes   []*kernels.Routes
	inPlace  bool
	schedule kernels.Schedule
	timeout  time.Duration
	src, dst int64 // offsets in the segments
	copies   bool  // by the copy engines
}

const poison = 0xA7

// prepare fills the sources and poisons the outputs, on the streams.
func (w *world) prepare(c *call) {
	w.calls++
	for r, k := range w.ranks {
		o := c.routes[r]
		var b cuda.Batch
		for p, n := range o.SendBytes {
			if n > 0 {
				k.enqueue(&b, k.fill, uint64(w.segment(r))+uint64(c.src+o.SendOffsets[p]), uint64(n), seed(w.calls, r, p), 0)
			}
		}
		b.Set(0, w.segment(r)+uintptr(c.dst), poison, extent(o.RecvBytes, o.RecvOffsets)+64)
		require.NoError(w.t, k.ctx.Submit(&b, uintptr(k.s)))
	}
}

func (w *world) exchange(c *call, r int) *kernels.AllToAllV {
	x := &kernels.AllToAllV{
		Routes: c.routes[r], Schedule: c.schedule, Launched: kernels.Launched{Timeout: c.timeout},
		Src: kernels.Buffer{Ptr: w.segment(r) + uintptr(c.src), Bytes: w.stride - c.src},
		Dst: kernels.Buffer{Ptr: w.segment(r) + uintptr(c.dst), Bytes: w.stride - c.dst},
	}
	if c.inPlace {
		x.Dst.Place, x.Dst.Reach = c.dst, true
	}
	if x.Schedule.Copies = c.copies; c.copies {
		routes := *x.Routes
		for _, o := range c.routes {
			routes.PeerOffsets = append(routes.PeerOffsets, o.RecvOffsets[r])
		}
		x.Routes = &routes
	}
	return x
}

func (w *world) launch(c *call) {
	for r, k := range w.ranks {
		require.NoError(w.t, k.p.submit(uintptr(k.s), w.exchange(c, r)))
	}
}

func (w *world) sync() {
	w.t.Helper()
	for _, k := range w.ranks {
		require.NoError(w.t, k.ctx.SynchronizeStream(k.s))
	}
	for r, k := range w.ranks {
		require.NoError(w.t, k.p.err(), "rank %d", r)
	}
}

// verifyHost compares every byte of the outputs, gaps included.
func (w *world) verifyHost(c *call, what string) {
	w.t.Helper()
	for r, k := range w.ranks {
		o := c.routes[r]
		got := make([]byte, extent(o.RecvBytes, o.RecvOffsets)+64)
		require.NoError(w.t, k.ctx.Read(k.s, got, w.segment(r)+uintptr(c.dst)))
		want := make([]byte, len(got))
		for i := range want {
			want[i] = poison
		}
		for p, n := range o.RecvBytes {
			sd := seed(w.calls, p, r)
			for i := range n {
				want[o.RecvOffsets[p]+i] = value(sd, uint64(i))
			}
		}
		if i := firstDifference(got, want); i >= 0 {
			from := "a gap"
			for p, n := range o.RecvBytes {
				if int64(i) >= o.RecvOffsets[p] && int64(i) < o.RecvOffsets[p]+n {
					from = fmt.Sprintf("byte %d of %d from rank %d", int64(i)-o.RecvOffsets[p], n, p)
				}
			}
			bad := 0
			for j := range got {
				if got[j] != want[j] {
					bad++
				}
			}
			require.Failf(w.t, "wrong byte", "%s: rank %d, %s: %#x instead of %#x; %d bytes wrong of %d", what, r, from, got[i], want[i], bad, len(got))
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// verifyDevice compares the messages on the GPUs.
func (w *world) verifyDevice(c *call, what string) {
	w.t.Helper()
	for r, k := range w.ranks {
		o := c.routes[r]
		var b cuda.Batch
		b.Set(0, k.wrong, 0, 8)
		for p, n := range o.RecvBytes {
			if n > 0 {
				k.enqueue(&b, k.check, uint64(w.segment(r))+uint64(c.dst+o.RecvOffsets[p]), uint64(n), seed(w.calls, p, r), uint64(k.wrong))
			}
		}
		require.NoError(w.t, k.ctx.Submit(&b, uintptr(k.s)))
	}
	for r, k := range w.ranks {
		var got [8]byte
		require.NoError(w.t, k.ctx.Read(k.s, got[:], k.wrong))
		require.Zero(w.t, binary.LittleEndian.Uint64(got[:]), "%s: wrong bytes on rank %d", what, r)
	}
}

func (w *world) newCall(m [][]int64, pad func() int64) *call {
	c := &call{m: m, inPlace: true, timeout: 20 * time.Second, src: w.heap}
	var most int64
	for r := range w.size {
		o := routes(m, r, pad)
		c.routes = append(c.routes, o)
		most = max(most, extent(o.SendBytes, o.SendOffsets))
	}
	c.dst = kernels.AlignUp(c.src+most, 256)
	for r := range w.size {
		end := c.dst + extent(c.routes[r].RecvBytes, c.routes[r].RecvOffsets) + 64
		require.LessOrEqual(w.t, end, w.stride, "the test's segment is too small")
	}
	return c
}

func none() int64 { return 0 }

func uniform(n int, bytes int64) [][]int64 {
	m := make([][]int64, n)
	for i := range m {
		m[i] = slices.Repeat([]int64{bytes}, n)
	}
	return m
}

func random(rng *rand.Rand, n int, pick func() int64) [][]int64 {
	m := make([][]int64, n)
	for i := range m {
		m[i] = make([]int64, n)
		for j := range m[i] {
			m[i][j] = pick()
		}
	}
	return m
}

var testChannels = kernels.Channels{Stripes: 4, Slots: 2, SlotBytes: 8192, PacketBytes: 4096}

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
		w := newWorld(t, size, 8<<20, testChannels)
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
	w := newWorld(t, 4, 256<<20, kernels.Channels{Stripes: 16, Slots: 2, SlotBytes: 128 << 10, PacketBytes: 64 << 10})
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
		w := newWorld(t, size, 16<<20, testChannels)
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
	w := newWorld(t, 2, 8<<20, testChannels)
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
	w := newWorld(t, 4, 16<<20, testChannels)
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
	w := newWorld(t, 3, 8<<20, testChannels)
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
			// an eager call between two replays
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
	w := newWorld(t, 3, 8<<20, testChannels)
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
		w := newWorld(t, 2, 8<<20, testChannels)
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
			w := newWorld(t, 3, 8<<20, testChannels)
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

// endsWaits has a rank wait for one that does not come, in small and large calls, until end has returned.
func endsWaits(t *testing.T, end func(w *world, k *rank)) {
	for _, bytes := range []int64{100, 100_000} {
		w := newWorld(t, 2, 8<<20, testChannels)
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
			w := newWorld(t, 2, 8<<20, testChannels)
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
			w.launch(c) // the sender of a packet hears in it
			for _, k := range w.ranks {
				require.NoError(t, k.ctx.SynchronizeStream(k.s))
			}
			if p.sent <= testChannels.PacketBytes {
				require.ErrorAs(t, w.ranks[0].p.Fault(), &m, "%+v", p)
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
	w := newWorld(t, 4, 8<<20, testChannels)
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

// each runs f for every rank on a thread of its own.
func (w *world) each(f func(k *rank)) {
	var g sync.WaitGroup
	for _, k := range w.ranks {
		g.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			f(k)
		})
	}
	g.Wait()
}
