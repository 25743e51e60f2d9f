package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// gpu opens the driver and device 0, or skips the test with the reason.
func gpu(t *testing.T) (*Driver, *Context) {
	t.Helper()
	d, err := Open()
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	n, err := d.DeviceCount()
	require.NoError(t, err)
	if n == 0 {
		t.Skip("needs a GPU: the driver sees none")
	}
	v, err := d.Device(0)
	require.NoError(t, err)
	c, err := v.Primary()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return d, c
}

func TestErrorsSayWhatFailed(t *testing.T) {
	err := fmt.Errorf("memory: grow: %w", &Error{Op: "cuMemCreate", Code: OutOfMemory, Name: "CUDA_ERROR_OUT_OF_MEMORY"})
	require.EqualError(t, err, "memory: grow: cuda: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)")
	require.ErrorIs(t, err, OutOfMemory)
	require.NotErrorIs(t, err, InvalidValue)
	require.NotErrorIs(t, err, ErrUnsupported)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "cuMemCreate", e.Op)

	missing := &Error{Op: "cuMemcpyBatchAsync", Code: codeNoEntry}
	require.ErrorIs(t, missing, ErrUnsupported)
	require.EqualError(t, missing, "cuda: cuMemcpyBatchAsync: this driver does not have it")
}

func TestFeatureErrorsNameTheDevices(t *testing.T) {
	for want, err := range map[string]error{
		"cuda: device 1 lacks file descriptor handles": &FeatureError{Feature: "file descriptor handles", Device: 1},
		"cuda: no peer access from device 2 to 5: take GPUs that reach each other, by CUDA_VISIBLE_DEVICES; switch MIG and, on PCIe bridges, ACS off": &PeerError{Pairs: [][2]int{{2, 5}}},
		"cuda: no peer access from device 0 to 1, 1 to 0, 0 to 2, 2 to 0, 2 more: take GPUs that reach each other, by CUDA_VISIBLE_DEVICES; switch MIG and, on PCIe bridges, ACS off": &PeerError{
			Pairs: [][2]int{{0, 1}, {1, 0}, {0, 2}, {2, 0}, {1, 2}, {2, 1}}},
	} {
		require.ErrorIs(t, err, ErrUnsupported)
		require.EqualError(t, err, want)
	}
}

func TestWithoutADriverOpenSaysSo(t *testing.T) {
	d, err := Open()
	if err == nil {
		require.NoError(t, d.Close())
		t.Skip("this machine has a driver")
	}
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotEqual(t, ErrUnavailable.Error(), err.Error(), "the reason is missing")
}

func TestAClosedDriverIsRefused(t *testing.T) {
	d := &Driver{}
	require.NoError(t, d.Close())
	_, err := d.DeviceCount()
	require.ErrorIs(t, err, ErrClosed)
}

func TestBatchKeepsItsMemory(t *testing.T) {
	var b Batch
	fill := func() {
		b.Reset()
		b.Launch(0, Launch{Function: 1, Grid: [3]uint32{2, 1, 1}, Block: [3]uint32{32, 1, 1}})
		b.Copy(1, 2, 3, 4)
		b.Set(0, 5, 6, 7)
	}
	fill()
	require.Zero(t, testing.AllocsPerRun(20, fill))
	require.Equal(t, launchBytes+2*wordsBytes, len(b.b))
	b.Reset()
	require.Empty(t, b.b)
	b.Launch(0, Launch{Args: []byte{1, 2, 3}})
	require.Equal(t, launchBytes+8, len(b.b))
}

func TestDeviceTellsAboutItself(t *testing.T) {
	d, c := gpu(t)
	v := c.Device()
	require.GreaterOrEqual(t, d.Version(), 11030)
	name, err := v.Name()
	require.NoError(t, err)
	require.NotEmpty(t, name)
	id, err := v.UUID()
	require.NoError(t, err)
	require.NotZero(t, id)
	sms, err := v.Attribute(Multiprocessors)
	require.NoError(t, err)
	require.Positive(t, sms)
	f, err := v.Features()
	require.NoError(t, err)
	t.Logf("%s %x, %d multiprocessors, CUDA %d, %+v", name, id, sms, d.Version(), f)
	_, err = d.Device(4096)
	require.ErrorIs(t, err, InvalidDevice)
}

func TestEveryPairOfDevicesReachesTheOther(t *testing.T) {
	d, _ := gpu(t)
	n, err := d.DeviceCount()
	require.NoError(t, err)
	var all []*Device
	for i := range n {
		v, err := d.Device(i)
		require.NoError(t, err)
		all = append(all, v)
	}
	err = CheckDevices(all, Requirements{VirtualMemory: true, PosixFiles: true, CooperativeLaunch: true})
	if err != nil {
		require.ErrorIs(t, err, ErrUnsupported)
		t.Skip(err)
	}
}

func TestMemoryStreamsAndEvents(t *testing.T) {
	_, c := gpu(t)
	s, err := c.NewStream(0)
	require.NoError(t, err)
	from, err := c.NewEvent(true)
	require.NoError(t, err)
	to, err := c.NewEvent(true)
	require.NoError(t, err)
	p, err := c.MemAlloc(1 << 20)
	require.NoError(t, err)

	require.NoError(t, c.Record(from, s))
	require.NoError(t, c.Set(s, p, 0xa5, 1<<20))
	require.NoError(t, c.Copy(s, p, p+512, 100))
	require.NoError(t, c.Record(to, s))
	require.NoError(t, c.SynchronizeEvent(to))
	took, err := c.Elapsed(from, to)
	require.NoError(t, err)
	require.Positive(t, took)

	got := make([]byte, 1<<20)
	require.NoError(t, c.Read(s, got, p))
	require.Equal(t, bytes.Repeat([]byte{0xa5}, 1<<20), got)
	require.NoError(t, c.Write(s, p+3, []byte("switchyard")))
	require.NoError(t, c.Read(s, got[:10], p+3))
	require.Equal(t, "switchyard", string(got[:10]))

	info, err := c.Pointer(p + 77)
	require.NoError(t, err)
	require.Equal(t, DeviceMemory, info.Type)
	require.Equal(t, p, info.Base)
	require.EqualValues(t, 1<<20, info.Size)
	require.NotZero(t, info.BufferID)
	base, size, err := c.AddressRange(p + 5)
	require.NoError(t, err)
	require.Equal(t, p, base)
	require.EqualValues(t, 1<<20, size)
	if info.LegacyIPC {
		h, err := c.IPCGet(p)
		require.NoError(t, err)
		require.NotZero(t, h)
	}
	require.NoError(t, c.MemFree(p))
	again, err := c.MemAlloc(1 << 20)
	require.NoError(t, err)
	next, err := c.Pointer(again)
	require.NoError(t, err)
	require.NotEqual(t, info.BufferID, next.BufferID, "M7: an allocation's identity is never used again")
	require.NoError(t, c.MemFree(again))

	require.NoError(t, c.DestroyEvent(from))
	require.NoError(t, c.DestroyEvent(to))
	require.NoError(t, c.DestroyStream(s))
}

func TestMemoryKnowsItsDevice(t *testing.T) {
	d, _ := gpu(t)
	n, err := d.DeviceCount()
	require.NoError(t, err)
	for i := range n {
		v, err := d.Device(i)
		require.NoError(t, err)
		c, err := v.Primary()
		require.NoError(t, err)
		p, err := c.MemAlloc(3 << 20)
		require.NoError(t, err)
		info, err := c.Pointer(p + 1<<20)
		require.NoError(t, err)
		require.Equal(t, i, info.Device)
		require.Equal(t, p, info.Base)
		require.EqualValues(t, 3<<20, info.Size)
		require.False(t, info.Managed)
		require.NoError(t, c.MemFree(p))
		require.NoError(t, c.Close())
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

func TestVirtualMemoryIsSharedByFileDescriptorAndLeaksNothing(t *testing.T) {
	_, c := gpu(t)
	f, err := c.Device().Features()
	require.NoError(t, err)
	if !f.VirtualMemory || !f.PosixFiles {
		t.Skipf("needs virtual memory and file handles: %+v", f)
	}
	g, err := c.Granularity(PosixFile, true)
	require.NoError(t, err)
	s, err := c.NewStream(0)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.DestroyStream(s)) }()

	once := func() {
		base, err := c.Reserve(4*g, 0, 0)
		require.NoError(t, err)
		h, err := c.MemCreate(g, PosixFile)
		require.NoError(t, err)
		fd, err := c.ExportFD(h)
		require.NoError(t, err)
		h2, err := c.ImportFD(fd)
		require.NoError(t, err)
		require.NoError(t, os.NewFile(uintptr(fd), "shared").Close())
		require.NoError(t, c.MemMap(base, g, 0, h))
		require.NoError(t, c.MemMap(base+2*uintptr(g), g, 0, h2))
		require.NoError(t, c.SetAccess(base, g, c.Device()))
		require.NoError(t, c.SetAccess(base+2*uintptr(g), g, c.Device()))
		require.NoError(t, c.Write(s, base+100, []byte("one memory")))
		got := make([]byte, 10)
		require.NoError(t, c.Read(s, got, base+2*uintptr(g)+100))
		require.Equal(t, "one memory", string(got))
		info, err := c.Pointer(base + 100)
		require.NoError(t, err)
		require.Equal(t, DeviceMemory, info.Type)
		r, err := c.RetainHandle(base)
		require.NoError(t, err)
		require.NoError(t, c.MemUnmap(base, g))
		require.NoError(t, c.MemUnmap(base+2*uintptr(g), g))
		for _, h := range []MemHandle{h, h2, r} {
			require.NoError(t, c.MemRelease(h))
		}
		require.NoError(t, c.Unreserve(base, 4*g))
	}
	once()
	free, _, err := c.MemInfo()
	require.NoError(t, err)
	fds := openFiles(t)
	for range 50 {
		once()
	}
	free2, _, err := c.MemInfo()
	require.NoError(t, err)
	require.Equal(t, free, free2, "device memory")
	require.Equal(t, fds, openFiles(t), "file descriptors")
}

func TestHostBufferIsSeenByBoth(t *testing.T) {
	_, c := gpu(t)
	b, err := c.NewHostBuffer(4096)
	require.NoError(t, err)
	s, err := c.NewStream(0)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 4096), b.Bytes())
	require.NoError(t, c.Set(s, b.Addr()+8, 7, 16))
	require.NoError(t, c.SynchronizeStream(s))
	require.Equal(t, bytes.Repeat([]byte{7}, 16), b.Bytes()[8:24])
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	require.NoError(t, c.DestroyStream(s))
}

// fillPTX stores (thread index + add) to out[i] for i < n.
const fillPTX = `
.version 7.0
.target sm_80
.address_size 64
.visible .entry fill(.param .align 8 .b8 args[16])
{
	.reg .pred p;
	.reg .b32 r<6>;
	.reg .b64 d<4>;
	ld.param.u64 d1, [args];
	ld.param.u32 r1, [args+8];
	ld.param.u32 r2, [args+12];
	mov.u32 r3, %ctaid.x;
	mov.u32 r4, %ntid.x;
	mov.u32 r5, %tid.x;
	mad.lo.u32 r3, r3, r4, r5;
	setp.ge.u32 p, r3, r2;
	@p ret;
	cvta.to.global.u64 d1, d1;
	mul.wide.u32 d2, r3, 4;
	add.u64 d3, d1, d2;
	add.u32 r3, r3, r1;
	st.global.u32 [d3], r3;
	ret;
}
`

func TestBatchLaunchesAndCapturesInOneCrossing(t *testing.T) {
	_, c := gpu(t)
	m, err := c.LoadModule(cString(fillPTX))
	if err != nil {
		t.Skipf("this driver does not compile PTX: %v", err)
	}
	fill, err := c.Function(m, "fill")
	require.NoError(t, err)
	_, err = c.Function(m, "nothing")
	require.ErrorIs(t, err, NotFound)
	regs, err := c.FunctionAttribute(fill, FunctionRegisters)
	require.NoError(t, err)
	require.Positive(t, regs)
	per, err := c.BlocksPerMultiprocessor(fill, 256, 0)
	require.NoError(t, err)
	require.Positive(t, per)

	const n = 1000
	p, err := c.MemAlloc(8 * n)
	require.NoError(t, err)
	s1, err := c.NewStream(0)
	require.NoError(t, err)
	s2, err := c.NewStream(0)
	require.NoError(t, err)
	ev, err := c.NewEvent(false)
	require.NoError(t, err)

	params := binary.LittleEndian.AppendUint64(nil, uint64(p))
	params = binary.LittleEndian.AppendUint32(params, 42)
	params = binary.LittleEndian.AppendUint32(params, n)
	var b Batch
	b.Set(0, p, 0xff, 8*n)
	b.Launch(0, Launch{Function: fill, Grid: [3]uint32{8, 1, 1}, Block: [3]uint32{128, 1, 1}, Flags: Cooperative | RemoteDomain, Args: params})
	b.Record(0, ev)
	b.WaitEvent(1, ev)
	half := uintptr(4 * n)
	b.Copies(1, []Span{{p + half, p, 2 * n}, {p + half + 2*n, p + 2*n, 2 * n}}, true)
	flag, err := c.MemAlloc(8) // the stream writes into memory that the copies do not touch
	require.NoError(t, err)
	defer func() { require.NoError(t, c.MemFree(flag)) }()
	b.WriteValue(1, flag, 5)
	b.WaitValue(1, flag, 5)
	check := func() {
		t.Helper()
		got := make([]byte, 8*n)
		require.NoError(t, c.SynchronizeStream(s2))
		require.NoError(t, c.Read(s2, got, p))
		for i := range n {
			require.EqualValues(t, i+42, binary.LittleEndian.Uint32(got[4*i:]))
			require.EqualValues(t, i+42, binary.LittleEndian.Uint32(got[4*(n+i):]))
		}
	}
	require.NoError(t, c.Submit(&b, uintptr(s1), uintptr(s2)))
	check()
	require.Zero(t, testing.AllocsPerRun(50, func() {
		if err := c.Submit(&b, uintptr(s1), uintptr(s2)); err != nil {
			t.Error(err)
		}
	}), "a submission allocates nothing")
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := time.Now()
	const rounds = 2000
	one := Batch{}
	one.Launch(0, Launch{Function: fill, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{32, 1, 1}, Args: params})
	for range rounds {
		require.NoError(t, c.Submit(&one, uintptr(s1)))
	}
	require.NoError(t, c.SynchronizeStream(s1))
	t.Logf("one launch: %v of host time", time.Since(start)/rounds)

	var g Batch
	g.Set(0, p, 0, 8*n)
	g.Launch(0, Launch{Function: fill, Grid: [3]uint32{8, 1, 1}, Block: [3]uint32{128, 1, 1}, Flags: Cooperative, Args: params})
	g.Copy(0, p+half, p, 4*n)
	require.NoError(t, c.BeginCapture(s2, RelaxedCapture))
	ok, err := c.Capturing(s2)
	require.NoError(t, err)
	require.True(t, ok)
	require.NoError(t, c.Submit(&g, uintptr(s2)))
	graph, err := c.EndCapture(s2)
	require.NoError(t, err)
	x, err := c.Instantiate(graph)
	require.NoError(t, err)
	for range 3 {
		require.NoError(t, c.Set(s2, p, 0xff, 8*n))
		require.NoError(t, c.LaunchGraph(x, s2))
		check()
	}
	require.NoError(t, c.DestroyGraphExec(x))
	require.NoError(t, c.DestroyGraph(graph))

	tooLarge := Batch{}
	tooLarge.Launch(0, Launch{Function: fill, Grid: [3]uint32{1 << 20, 1, 1}, Block: [3]uint32{1024, 1, 1}, Flags: Cooperative, Args: params})
	require.ErrorIs(t, c.Submit(&tooLarge, uintptr(s1)), CooperativeTooLarge, "X6: refused at launch")
	require.Error(t, c.Submit(&b, uintptr(s1)), "the batch names a second stream")

	require.NoError(t, c.DestroyEvent(ev))
	require.NoError(t, c.DestroyStream(s1))
	require.NoError(t, c.DestroyStream(s2))
	require.NoError(t, c.MemFree(p))
	require.NoError(t, c.UnloadModule(m))
}
