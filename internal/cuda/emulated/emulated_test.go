package emulated_test

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
)

const (
	least = emulated.LeastGranule
	good  = emulated.GoodMulticast

	illegalState cuda.Code = 401
)

// rig is a team of two devices.
type rig struct {
	*testing.T
	dev [2]*cuda.Device
	ctx [2]*cuda.Context
}

// newRig is nil where the test runs in another process.
func newRig(t *testing.T) *rig {
	if !emulated.Driver(t) {
		return nil
	}
	r := &rig{T: t}
	for i := range r.dev {
		r.dev[i], r.ctx[i] = emulated.Device(t, i)
	}
	return r
}

func (r *rig) count(c emulated.Count) int { return c.Of(r.T, r.dev[0]) }

func (r *rig) must(err error) {
	r.Helper()
	require.NoError(r.T, err)
}

// object is a multicast object with both devices in it.
func (r *rig) object(n int64, t cuda.HandleType) cuda.MemHandle {
	h, err := r.ctx[0].MulticastCreate(2, n, t)
	r.must(err)
	for _, c := range r.ctx {
		r.must(c.MulticastAddDevice(h))
	}
	return h
}

func (r *rig) memory(i int, n int64) cuda.MemHandle {
	h, err := r.ctx[i].MemCreate(n, cuda.PosixFile)
	r.must(err)
	return h
}

// reserved is n bytes of addresses for the test.
func (r *rig) reserved(n int64) uintptr {
	at, err := r.ctx[0].Reserve(n, good, 0)
	r.must(err)
	r.Cleanup(func() { r.must(r.ctx[0].Unreserve(at, n)) })
	return at
}

func (r *rig) release(hs ...cuda.MemHandle) {
	for _, h := range hs {
		r.must(r.ctx[0].MemRelease(h))
	}
}

func (r *rig) nothingIsLeft() {
	for _, c := range []emulated.Count{emulated.Handles, emulated.Mappings, emulated.Binds, emulated.Files, emulated.Memory, emulated.Multicast, emulated.Mistakes} {
		require.Zero(r.T, r.count(c), c)
	}
}

func TestTheDriverRefusesABindBeforeEveryDeviceIsAdded(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	h, err := r.ctx[0].MulticastCreate(2, good, cuda.PosixFile)
	r.must(err)
	m, at := r.memory(0, good), r.reserved(good)
	r.must(r.ctx[0].MulticastAddDevice(h))
	require.ErrorIs(t, r.ctx[0].MulticastBind(h, 0, m, 0, good), illegalState)
	require.ErrorIs(t, r.ctx[0].MemMap(at, good, 0, h), illegalState)
	require.ErrorIs(t, r.ctx[0].MulticastAddDevice(h), cuda.InvalidValue, "it is in it")
	r.must(r.ctx[1].MulticastAddDevice(h))
	r.must(r.ctx[0].MulticastBind(h, 0, m, 0, good))
	require.ErrorIs(t, r.ctx[0].MulticastBind(h, least, m, least, least), cuda.InvalidValue, "there is memory already")
	r.must(r.ctx[0].MemMap(at, good, 0, h))
	r.must(r.ctx[0].MemUnmap(at, good))
	r.must(r.ctx[0].MulticastUnbind(h, 0, good))
	r.release(h, m)
	r.nothingIsLeft()
}

func TestM6_AMulticastObjectIsMappedAsAWholeFromItsBeginning(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	h, at := r.object(2*good, cuda.PosixFile), r.reserved(2*good)
	require.ErrorIs(t, r.ctx[0].MemMap(at, good, good, h), cuda.InvalidValue)
	require.ErrorIs(t, r.ctx[0].MemMap(at, good, least, h), cuda.InvalidValue)
	r.must(r.ctx[0].MemMap(at, 2*good, 0, h))
	r.must(r.ctx[0].MemUnmap(at, 2*good))
	r.release(h)
	r.nothingIsLeft()
}

func TestTheDriverRefusesAWrongGranularity(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	for recommended, want := range map[bool]int64{false: least, true: good} {
		n, err := r.ctx[0].MulticastGranularity(2, cuda.PosixFile, recommended)
		r.must(err)
		require.Equal(t, want, n)
	}
	_, err := r.ctx[0].MulticastCreate(2, least+emulated.Granule, cuda.PosixFile)
	require.ErrorIs(t, err, cuda.InvalidValue)
	h, m, at := r.object(2*least, cuda.PosixFile), r.memory(0, 2*least), r.reserved(good)
	for _, wrong := range [][3]int64{{emulated.Granule, 0, least}, {0, emulated.Granule, least}, {0, 0, emulated.Granule}, {least, 0, 2 * least}, {0, least, 2 * least}} {
		require.ErrorIs(t, r.ctx[0].MulticastBind(h, wrong[0], m, wrong[1], wrong[2]), cuda.InvalidValue, "%v", wrong)
	}
	require.ErrorIs(t, r.ctx[0].MemMap(at+emulated.Granule, 2*least, 0, h), cuda.InvalidValue)
	r.must(r.ctx[0].MulticastBind(h, least, m, 0, least))
	r.must(r.ctx[0].MulticastUnbind(h, least, least))
	r.release(h, m)
	r.nothingIsLeft()
}

// What is written through the object is in the memory of both devices, each bind's where it is.
func TestTwoBindsOfAnObjectHaveDistinctAddresses(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	h, mc := r.object(good, cuda.PosixFile), r.reserved(good)
	r.must(r.ctx[0].MemMap(mc, good, 0, h))
	r.must(r.ctx[0].SetAccess(mc, good, r.dev[0]))
	var memory []cuda.MemHandle
	var at [2][2]uintptr
	for i, c := range r.ctx {
		for k := range 2 {
			m := r.memory(i, least)
			memory = append(memory, m)
			r.must(c.MulticastBind(h, int64(k)*least, m, 0, least))
			at[i][k] = r.reserved(least)
			r.must(c.MemMap(at[i][k], least, 0, m))
			r.must(c.SetAccess(at[i][k], least, r.dev[i]))
		}
	}
	for k := range 2 {
		r.must(r.ctx[0].Write(0, mc+uintptr(k*least+100), []byte{byte(10 + k), byte(20 + k)}))
	}
	require.ErrorIs(t, r.ctx[0].Write(0, mc+2*least, []byte{1}), cuda.InvalidValue, "no memory is there")
	require.ErrorIs(t, r.ctx[0].Read(0, make([]byte, 1), mc), cuda.InvalidValue, "whose?")
	for i, c := range r.ctx {
		for k := range 2 {
			got := make([]byte, 2)
			r.must(c.Read(0, got, at[i][k]+100))
			require.Equal(t, []byte{byte(10 + k), byte(20 + k)}, got)
			r.must(c.MemUnmap(at[i][k], least))
			r.must(c.MulticastUnbind(h, int64(k)*least, least))
		}
	}
	r.must(r.ctx[0].MemUnmap(mc, good))
	r.release(append(memory, h)...)
	r.nothingIsLeft()
}

// The creator's handle can go after an export to a file, because the file is a reference, and not after one to a fabric handle.
func TestM6_AFabricHandleHoldsNoReference(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	h := r.object(good, cuda.PosixFile|cuda.Fabric)
	fd, err := r.ctx[0].ExportFD(h)
	r.must(err)
	name, err := r.ctx[0].ExportFabric(h)
	r.must(err)
	r.release(h)
	again, err := r.ctx[1].ImportFD(fd)
	r.must(err)
	second, err := syscall.Dup(fd)
	r.must(err)
	r.must(os.NewFile(uintptr(fd), "").Close())
	r.release(again)
	require.Equal(t, 1, r.count(emulated.Files), "a duplicate is open")
	again, err = r.ctx[1].ImportFabric(name)
	r.must(err)
	r.must(os.NewFile(uintptr(second), "").Close())
	require.Zero(t, r.count(emulated.Files))
	require.Equal(t, good>>20, r.count(emulated.Multicast), "a handle is there")
	r.release(again)
	_, err = r.ctx[1].ImportFabric(name)
	require.ErrorIs(t, err, cuda.InvalidValue, "the object has gone")
	r.nothingIsLeft()

	only, err := r.ctx[0].MulticastCreate(2, good, cuda.PosixFile)
	r.must(err)
	_, err = r.ctx[0].ExportFabric(only)
	require.ErrorIs(t, err, cuda.InvalidValue)
	r.release(only)
}

func TestWhatIsBoundStays(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	h, m := r.object(good, cuda.PosixFile), r.memory(1, good)
	r.must(r.ctx[1].MulticastBind(h, 0, m, 0, good))
	r.release(m)
	require.Equal(t, good>>20, emulated.Memory.Of(t, r.dev[1]))
	require.Equal(t, 1, r.count(emulated.Binds))
	require.ErrorIs(t, r.ctx[1].MulticastUnbind(h, 0, least), cuda.InvalidValue)
	require.Equal(t, 1, r.count(emulated.Mistakes), "to unbind something else")
	r.must(r.ctx[1].MulticastUnbind(h, 0, good))
	require.Zero(t, emulated.Memory.Of(t, r.dev[1]))
	m = r.memory(0, good)
	r.must(r.ctx[0].MulticastBind(h, 0, m, 0, good))
	r.release(m, h)
	require.Equal(t, 2, r.count(emulated.Mistakes), "to leave a bind behind")
	require.Zero(t, r.count(emulated.Memory))
}

func TestCapacityIsBounded(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	h := r.object(emulated.MulticastBytes-good, cuda.PosixFile)
	_, err := r.ctx[0].MulticastCreate(2, 2*good, cuda.PosixFile)
	require.ErrorIs(t, err, cuda.OutOfMemory)
	m := r.memory(0, emulated.DeviceBytes-good)
	_, err = r.ctx[0].MemCreate(2*good, cuda.PosixFile)
	require.ErrorIs(t, err, cuda.OutOfMemory)
	r.release(h, m)
	r.nothingIsLeft()
}

func TestACallFailsWhereATestWantsIt(t *testing.T) {
	r := newRig(t)
	if r == nil {
		return
	}
	emulated.Fail(t, r.ctx[1], 2)
	m := r.memory(1, good)
	r.release(r.memory(0, good), m) // with the context of device 0
	h, err := r.ctx[1].MemCreate(good, cuda.PosixFile)
	require.Error(t, err)
	require.Zero(t, h)
	require.Equal(t, []int{2, 1}, []int{emulated.Calls.Of(t, r.dev[1]), emulated.Fired.Of(t, r.dev[1])})
	require.Zero(t, emulated.Fired.Of(t, r.dev[0]))
	m = r.memory(1, good)
	emulated.Fail(t, r.ctx[1], 1)
	require.Error(t, r.ctx[1].MemRelease(m), "it is done and fails")
	r.nothingIsLeft()
}
