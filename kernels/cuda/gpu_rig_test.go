package cuda

import (
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

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

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
	ch     *exchanges
	heap   int64 // first offset behind the control block
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

func newWorld(t testing.TB, size int, segment int64, family kernels.ExchangeBounds) *world {
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
	c := newExchanges(&family, kernels.HeaderBytes)
	w.ch = c
	w.heap = kernels.AlignUp(c.block().end, 1<<21)
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
		require.NoError(t, k.ctx.Set(k.s, w.segment(r), 0, c.block().slots))
		require.NoError(t, k.ctx.SynchronizeStream(k.s))
		k.e, err = New(k.ctx, kernels.Space{Base: w.base, Stride: w.stride, Rank: r, Size: size}, (size+len(all)-1)/len(all), func() error { return nil })
		require.NoError(t, err)
		p, err := k.e.Open(c.ExchangeBounds, c.offset)
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
		image, err := imageOf(k.e.code, "verify")
		require.NoError(t, err)
		k.verify, err = k.ctx.LoadModule(image)
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
