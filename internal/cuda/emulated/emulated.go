// Package emulated runs tests on a CUDA driver that needs no GPU (testdata/driver.cpp): memory, its handles and mappings, multicast
// objects, streams that run at once, and kernels, which do nothing or, those of exchanges, of reductions and plans, of rings and one of a
// user's, run on the processor. It counts who refers to what, refuses what the driver's documentation forbids, and fails on demand. Only
// files of tests import it.
package emulated

import (
	_ "embed"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/env"
)

//go:embed testdata/driver.cpp
var source []byte

// Devices is how many GPUs the driver has. Each has DeviceBytes of memory; multicast objects together have MulticastBytes.
const (
	Devices        = 4
	DeviceBytes    = 3 << 29
	MulticastBytes = 3 << 29
)

// The granularities: of memory, and the smallest and the recommended of multicast objects.
const (
	Granule       = 2 << 20
	LeastGranule  = 4 << 20
	GoodMulticast = 16 << 20
)

// Count is something that the driver counts.
type Count int32

// The counts. Calls, Fired, Memory and Others are of one device, the others of the process.
const (
	Handles       Count = iota // of memory and multicast objects
	Mappings                   // of both
	Binds                      // of memory to multicast objects
	Files                      // exported descriptors that are open
	Memory                     // MiB that exist
	Multicast                  // MiB of multicast objects that exist
	Reservations               // of addresses
	Others                     // streams, events, modules, pinned buffers and retained contexts
	Mistakes                   // what the driver could not refuse and nobody should do
	Calls                      // since Fail
	Fired                      // 1: the call that Fail has named has failed
	Launches                   // of kernels of multicast
	BlockLaunches              // of those in which blocks work together
	Blocks                     // of all kernels that have been launched
	ElfModules                 // that have been loaded, and were no fatbins
)

// Leaks are the counts that are as before when all has been given back.
func Leaks() []Count {
	return []Count{Handles, Mappings, Binds, Files, Memory, Multicast, Reservations, Others, Mistakes}
}

// String is the count's name.
func (c Count) String() string {
	return [...]string{"handles", "mappings", "binds", "files", "MiB of memory", "MiB of multicast objects", "reservations", "streams, events and the like",
		"mistakes", "calls", "failures", "launches", "launches of blocks", "blocks", "ELF files"}[c]
}

// The driver's ways of hearing a test.
const (
	counts   = 1 << 20 // attributes of a device from here on
	settings = 0xE000  // a function whose attributes are set

	failAttribute        = 0
	noMulticastAttribute = 1
	versionAttribute     = 2
	majorAttribute       = 3
	noPeersAttribute     = 4
)

// Of is the count of a device.
func (c Count) Of(t require.TestingT, d *cuda.Device) int {
	n, err := d.Attribute(cuda.Attribute(counts + int32(c)))
	require.NoError(t, err)
	return n
}

// Fail has the n-th call from now on of the context's device fail, or none when n is 0. What gives something back does so all the same.
func Fail(t require.TestingT, c *cuda.Context, n int) {
	require.NoError(t, c.SetFunctionAttribute(settings, failAttribute, n))
}

// WithoutMulticast has devices say that they have no multicast objects, until the test ends.
func WithoutMulticast(t *testing.T, c *cuda.Context) {
	require.NoError(t, c.SetFunctionAttribute(settings, noMulticastAttribute, 1))
	t.Cleanup(func() { require.NoError(t, c.SetFunctionAttribute(settings, noMulticastAttribute, 0)) })
}

// WithoutPeers has devices say that they do not reach each other's memory, until the test ends.
func WithoutPeers(t *testing.T, c *cuda.Context) {
	require.NoError(t, c.SetFunctionAttribute(settings, noPeersAttribute, 1))
	t.Cleanup(func() { require.NoError(t, c.SetFunctionAttribute(settings, noPeersAttribute, 0)) })
}

// Version has the driver, when it is opened next, implement that version of CUDA, 12040 for 12.4, for GPUs of compute capability major.0, until
// the test ends. It then refuses entry points and code that such a driver does not have or load.
func Version(t *testing.T, c *cuda.Context, version, major int) {
	set := func(version, major int) {
		require.NoError(t, c.SetFunctionAttribute(settings, versionAttribute, version))
		require.NoError(t, c.SetFunctionAttribute(settings, majorAttribute, major))
	}
	set(version, major)
	t.Cleanup(func() { set(13000, 9) })
}

// child names the variable that tells a test that it runs on the emulated driver.
const child = "SWITCHYARD_TEST_EMULATED"

// build compiles the driver, and more sources, which are in inputs, and has a library in dir be that driver.
func build(dir string, inputs []string, paths ...string) error {
	driver := filepath.Join(dir, "driver.cpp")
	if err := os.WriteFile(driver, source, 0o666); err != nil {
		return err
	}
	flags := []string{"-std=c++20", "-Og", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wno-unknown-pragmas", `-DSW_EMULATED="emulated.h"`}
	library, err := Compile(dir, "driver", append(inputs, driver), flags, append(paths, driver, "-lpthread"))
	if err != nil {
		return err
	}
	return os.Symlink(library, filepath.Join(dir, "libcuda.so.1"))
}

// Driver reports whether this process has the emulated driver. Where it has not, it has one built, runs the test again in a process that has,
// and reports false when that has passed: the test then returns. In that process nothing forbids multicast; a real driver is never there.
// Where the environment forbids multicast and there is a real driver, the test is skipped.
func Driver(t *testing.T) bool {
	t.Helper()
	return run(t, nil)
}

// Kernels is Driver for a test that has kernels of exchanges, of reductions, of plans, of rings, between two ranks, or the one of
// examples/kernels run, whose sources are in folder, kernels/cuda from the module's root. A processor takes turns among all of their threads,
// so the fewer the better.
func Kernels(t *testing.T, folder string) bool {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the emulation switches stacks in the instructions of amd64")
	}
	emulation := filepath.Join(folder, "testdata", "emulate")
	if _, err := os.Stat(emulation); err != nil {
		_, err := os.Stat(filepath.Join(folder, "..", "..", "go.mod"))
		require.Error(t, err, "there is no %s: the test would never run", emulation)
		t.Skip("the sources are not next to the test binary")
	}
	examples := filepath.Join(folder, "..", "..", "examples", "kernels")
	return run(t, []string{folder, filepath.Join(folder, "..", "..", "internal", "cuda", "layout"), examples},
		"-I"+emulation, "-I"+folder, "-I"+filepath.Join(folder, "include"), "-I"+examples, filepath.Join(emulation, "device.cpp"))
}

func run(t *testing.T, inputs []string, paths ...string) bool {
	t.Helper()
	if os.Getenv(child) != "" {
		d, err := cuda.Open()
		require.NoError(t, err)
		defer func() { require.NoError(t, d.Close()) }()
		v, err := d.Device(0)
		require.NoError(t, err)
		name, err := v.Name()
		require.NoError(t, err)
		require.Equal(t, "emulated", name)
		for _, forbids := range []string{"NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST"} {
			t.Setenv(forbids, "")
		}
		return true
	}
	if d, err := cuda.Open(); err == nil {
		require.NoError(t, d.Close())
		if by := env.MulticastDisabledBy(); by != "" {
			t.Skipf("%s: the emulated driver would have multicast, beside the real one", by)
		}
	} else if errors.Is(err, cuda.ErrNotBuilt) {
		t.Skip(err)
	}
	dir := t.TempDir()
	err := build(dir, inputs, paths...)
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("needs a C++ compiler")
	}
	require.NoError(t, err)
	args := []string{"-test.run=^" + t.Name() + "$", "-test.count=1", "-test.timeout=20m"}
	if testing.Short() {
		args = append(args, "-test.short")
	}
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), child+"=1", "LD_LIBRARY_PATH="+dir)
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "PASS", "%s", out)
	return false
}

// Device is the emulated GPU of that number and its context, for the test.
func Device(t *testing.T, ordinal int) (*cuda.Device, *cuda.Context) {
	d, err := cuda.Open()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	v, err := d.Device(ordinal)
	require.NoError(t, err)
	c, err := v.Primary()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return v, c
}
