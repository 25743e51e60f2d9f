package cuda

import (
	"errors"
	"fmt"
	"structs"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// deviceVersion is SWITCHYARD_VERSION of include/switchyard.cuh, and deviceWords its struct communicator.
const deviceVersion = 1

type deviceWords struct {
	_ structs.HostLayout

	version, signals uint32
	rank, size       uint32
	base, stride     uint64
	segments         uint64
	control, lines   place
	abort            place
	record           uint64
	timeoutNs        uint64
}

// plainShared is the dynamic shared memory that a block has without asking.
const plainShared = 48 << 10

// deviceFaultVersion is the kind of a fault that no other kernels have: sent holds the kernel's version, expected that of the library.
const deviceFaultVersion = 100

// devices are the kernels of users of one communicator. It is a family.
type devices struct {
	common
	*kernels.DeviceBounds
	offset int64 // of a struct sw_control, the words of kernels, and the lines of signals
}

func newDevices(b *kernels.DeviceBounds, offset int64) *devices {
	return &devices{DeviceBounds: b, offset: offset}
}

func (x *devices) members() int { return x.Size }

func (x *devices) check() error {
	if x.Signals < 1 || x.Timeout <= 0 {
		return fmt.Errorf("kernels: devcomm: bounds %+v", *x.DeviceBounds)
	}
	return nil
}

func (x *devices) words() int64 { return x.offset + controlAlign }
func (x *devices) lines() int64 { return x.offset + 2*controlAlign }

func (x *devices) layout() kernels.Layout {
	n := 2*controlAlign + int64(x.Size)*int64(x.Signals)*lineBytes
	return kernels.Layout{Bytes: n, Zero: n}
}

func (x *devices) fault(f *faultWords, _ int) error {
	if f.kind != deviceFaultVersion {
		return nil
	}
	return &kernels.DeviceVersionError{Call: f.epoch, Kernel: f.sent, Library: f.expected}
}

// load loads nothing: the kernels are the user's.
func (x *devices) load(*Engine) error { return nil }

// add appends a launch. A kernel of a user's does not wait for the one before it in its own code, as ours do, so it begins after that.
func (x *devices) add(p *port, op kernels.Operation) error {
	k, ok := op.(*kernels.DeviceKernel)
	if !ok {
		return errForeign
	}
	p.batch.Launch(0, cuda.Launch{
		Function: cuda.Function(k.Function), Grid: [3]uint32{uint32(k.Blocks), 1, 1}, Block: [3]uint32{uint32(k.Threads), 1, 1},
		SharedBytes: uint32(k.SharedBytes), Args: k.Args, Flags: p.e.flags &^ cuda.Programmatic,
	})
	return nil
}

// devicePort is a port with kernels of users.
type devicePort struct {
	*port
	x *devices
}

// opened writes what kernels read.
func (x *devices) opened(p *port) (kernels.Port, error) {
	w := p.world(x.offset, x.Timeout)
	words := deviceWords{
		version: deviceVersion, signals: uint32(x.Signals), rank: w.rank, size: w.size, base: w.base, stride: w.stride, segments: w.segments,
		control: x.offset, lines: x.lines(), abort: abortOffset, record: w.fault, timeoutNs: w.timeoutNs,
	}
	d := &devicePort{port: p, x: x}
	if err := p.e.write(d.Argument(), cuda.BytesOf(&words)); err != nil {
		return nil, errors.Join(fmt.Errorf("kernels: open %s: %w", p.name, err), p.Close())
	}
	return d, nil
}

// Argument is as kernels.DevicePort has it.
func (d *devicePort) Argument() uintptr { return d.e.space.Addr(d.e.space.Rank, d.x.words()) }

// Load is as kernels.DevicePort has it.
func (d *devicePort) Load(image []byte, name string) (uintptr, error) {
	m, err := d.e.ctx.LoadModule(image)
	if err != nil {
		return 0, err
	}
	d.e.mu.Lock()
	d.e.modules = append(d.e.modules, m)
	d.e.mu.Unlock()
	f, err := d.e.ctx.Function(m, name)
	return uintptr(f), err
}

// AtOnce is as kernels.DevicePort has it.
func (d *devicePort) AtOnce(function uintptr, threads, sharedBytes int) (int, error) {
	f := cuda.Function(function)
	if sharedBytes > plainShared {
		if err := d.e.ctx.SetFunctionAttribute(f, cuda.FunctionMaxDynamicShared, sharedBytes); err != nil {
			return 0, err
		}
	}
	each, err := d.e.ctx.BlocksPerMultiprocessor(f, threads, sharedBytes)
	return each * (d.e.multiprocessors / d.e.sharers), err
}
