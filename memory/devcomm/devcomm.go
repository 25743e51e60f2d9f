package devcomm

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"reflect"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/communicator"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// Conditions that callers tell apart with errors.Is. They are those of package comm.
var (
	// ErrInvalid is the cause of every error about arguments. Nothing has been enqueued then.
	ErrInvalid = comm.ErrInvalid
	// ErrUnsupported means that the heap's device does not have kernels of users.
	ErrUnsupported = comm.ErrUnsupported
	// ErrClosed is returned by calls on a closed Comm.
	ErrClosed = comm.ErrClosed
)

func invalid(format string, args ...any) error { return comm.Invalid("devcomm", format, args...) }

// maxSignals bounds Options.Signals.
const maxSignals = 1 << 12

// maxShared bounds Grid.SharedBytes. No multiprocessor has as much.
const maxShared = 1 << 24

// Options of a Comm. The zero value works. All ranks pass the same number of signals.
type Options struct {
	// Signals is how many there are from each rank to each other; default 256, at most 4096. Each takes 32 bytes a peer.
	Signals int
	// Timeout bounds every wait of a kernel; default 30 s. After it an error names the peer.
	Timeout time.Duration
}

// Comm is one rank's end of the kernels of users of a group. Its methods may be called from several goroutines.
//
// A launch that has run into an error is reported by Fault and by the next Launch, which then has not happened. A kernel of another version
// of switchyard.cuh is an error of its launch alone (*kernels.DeviceVersionError). A peer that does not come within Options.Timeout is named
// in a *comm.PeerError, and so is a lost one; the Comm is broken then.
type Comm struct {
	c      *communicator.Communicator
	port   kernels.DevicePort
	within time.Duration
}

// Kernel is a kernel of a user's, ready to be launched. It is the Comm's.
type Kernel struct {
	of *Comm
	f  uintptr

	fits Grid // the last one that was asked for, with all blocks that fit; the Comm's lock is held
}

// Grid is how a kernel is launched, in one dimension. All blocks of a launch must fit on the GPU at the same time, since they wait for those
// of other ranks.
type Grid struct {
	Blocks, Threads int
	// SharedBytes of dynamic shared memory are each block's.
	SharedBytes int
}

// New makes a Comm. It is collective: every rank of the heap's group calls it, in the same order as its other allocations, with equal options.
// The heap is on GPUs (ErrUnsupported), and grows if it has no room. A failure on one rank is an error on all. The caller closes the Comm
// before the heap.
func New(ctx context.Context, h *memory.Heap, o Options) (*Comm, error) {
	var refused error
	switch {
	case o.Signals < 0 || o.Signals > maxSignals:
		refused = invalid("Options.Signals is %d, want 0 to %d", o.Signals, maxSignals)
	case o.Timeout < 0:
		refused = invalid("Options.Timeout is %v", o.Timeout)
	case !onGPU(h):
		refused = fmt.Errorf("devcomm: %w: kernels of users on %v: they run on GPUs", ErrUnsupported, h.Device())
	}
	o.Timeout = cmp.Or(o.Timeout, communicator.DefaultTimeout)
	x := &Comm{within: o.Timeout}
	bounds := kernels.DeviceBounds{Size: h.Group().Size(), Signals: cmp.Or(o.Signals, 256), Timeout: o.Timeout}
	var err error
	x.c, err = communicator.Open(ctx, h, communicator.Config{
		Name: "devcomm", Must: []string{fmt.Sprintf("%d signals", bounds.Signals)}, Family: &bounds, Timeout: o.Timeout,
	}, refused)
	if err != nil {
		return nil, err
	}
	x.port = x.c.Port().(kernels.DevicePort)
	return x, nil
}

func onGPU(h *memory.Heap) bool {
	_, ok := h.Device().(*device.CUDADevice)
	return ok
}

// Argument is the address of this rank's switchyard::communicator, in memory of the GPU. It is valid until Close.
func (x *Comm) Argument() uintptr { return x.port.Argument() }

// Load finds a kernel by its name (extern "C") in a cubin, a fatbin or PTX. It can wait for running kernels, also for those of other ranks on
// this GPU, so ranks load before they launch.
func (x *Comm) Load(image []byte, name string) (*Kernel, error) {
	if len(image) == 0 || name == "" {
		return nil, invalid("a kernel of %d bytes with the name %q", len(image), name)
	}
	x.c.Lock()
	defer x.c.Unlock()
	if err := x.c.Alive(); err != nil {
		return nil, err
	}
	f, err := x.port.Load(image, name)
	if err != nil {
		return nil, fmt.Errorf("devcomm: load %s: %w", name, err)
	}
	return &Kernel{of: x, f: f}, nil
}

// Launch enqueues a kernel on s, behind the last launch, or runs it if s is nil. args is the kernel's one parameter, a struct of numbers that
// lies in memory as in C++, without padding, or its bytes; it is copied. All ranks launch the same kernels in the same order.
func (x *Comm) Launch(s device.Stream, k *Kernel, g Grid, args any) error {
	params, err := parameter(args)
	switch {
	case err != nil:
		return err
	case k == nil || k.of != x:
		return invalid("launch: the kernel is not one of this Comm")
	case g.Blocks < 1 || g.Threads < 1 || g.Threads > 1024 || g.SharedBytes < 0 || g.SharedBytes > maxShared:
		return invalid("launch: %d blocks of %d threads with %d bytes, want at least 1 block, 1 to 1024 threads and 0 to %d bytes", g.Blocks, g.Threads, g.SharedBytes, maxShared)
	}
	x.c.Lock()
	defer x.c.Unlock()
	if err := x.c.Usable(); err != nil {
		return err
	}
	if err := k.check(g); err != nil {
		return err
	}
	op := &kernels.DeviceKernel{Function: k.f, Blocks: g.Blocks, Threads: g.Threads, SharedBytes: g.SharedBytes, Args: params}
	op.Timeout, op.Note.Payload = x.within, -1
	return x.c.Launch(s, op)
}

// check refuses more blocks than run at the same time.
func (k *Kernel) check(g Grid) error {
	if k.fits.Blocks == 0 || k.fits.Threads != g.Threads || k.fits.SharedBytes != g.SharedBytes {
		most, err := k.of.port.AtOnce(k.f, g.Threads, g.SharedBytes)
		if err != nil {
			return fmt.Errorf("devcomm: launch: %w", err)
		}
		k.fits = Grid{most, g.Threads, g.SharedBytes}
	}
	if g.Blocks > k.fits.Blocks {
		return invalid("launch: %d blocks of %d threads with %d bytes of shared memory, of which %d run at the same time on this rank's share of the GPU",
			g.Blocks, g.Threads, g.SharedBytes, k.fits.Blocks)
	}
	return nil
}

// parameter is a kernel's parameter as it lies in memory.
func parameter(args any) ([]byte, error) {
	params, raw := args.([]byte)
	if !raw {
		var err error
		if params, err = binary.Append(nil, binary.NativeEndian, args); err != nil {
			return nil, invalid("launch: arguments: %v", err)
		}
	}
	if len(params) == 0 || !raw && uintptr(len(params)) != reflect.Indirect(reflect.ValueOf(args)).Type().Size() {
		return nil, invalid("launch: arguments of %d bytes in a %T, want a struct of numbers without padding", len(params), args)
	}
	return params, nil
}

// Fault returns the error of launches that have run by now, nil if there is none.
func (x *Comm) Fault() error { return x.c.Fault() }

// Close waits for the launches and gives the memory back. It is collective and idempotent. When ctx ends, kernels that wait for peers give up.
func (x *Comm) Close(ctx context.Context) error { return x.c.Close(ctx) }
