package kernels

import (
	"fmt"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
)

// DeviceBounds is the family of kernels that users write. GPUs have it.
type DeviceBounds struct {
	Size int // ranks
	// Signals is how many there are from each rank to each other.
	Signals int
	// Timeout bounds every wait of the kernels.
	Timeout time.Duration
}

// Family is "devcomm".
func (*DeviceBounds) Family() string { return "devcomm" }

// DeviceKernel is one launch of a kernel of a user's. Its rank may launch it by other means as well.
type DeviceKernel struct {
	Launched
	Function        uintptr // of DevicePort.Load
	Blocks, Threads int     // of the grid, and of each block
	SharedBytes     int     // of dynamic shared memory of each block
	Args            []byte  // the kernel's one parameter, as it lies in memory
}

// Operation is "own kernel".
func (*DeviceKernel) Operation() string { return "own kernel" }

// DevicePort is what a Port of DeviceBounds has in addition.
type DevicePort interface {
	Port
	// Argument is the address, on the device, of the struct switchyard::communicator that kernels take (switchyard.cuh).
	Argument() uintptr
	// Load finds a kernel in a cubin, a fatbin or PTX. It can wait for running kernels. The kernel is the engine's until that is closed.
	Load(image []byte, name string) (uintptr, error)
	// AtOnce is how many blocks of a kernel of Load run on the device at the same time, of those that this rank may have there.
	AtOnce(function uintptr, threads, sharedBytes int) (int, error)
}

// DeviceVersionError says that a kernel was built for another version of switchyard.cuh. It has done nothing.
type DeviceVersionError struct {
	Call            uint64
	Kernel, Library uint64 // versions
}

// Error states both versions.
func (e *DeviceVersionError) Error() string {
	return fmt.Sprintf("kernels: call %d: the kernel was built for version %d of switchyard.cuh, this library has version %d: build it anew", e.Call, e.Kernel, e.Library)
}

// Unwrap is comm.ErrMismatch.
func (e *DeviceVersionError) Unwrap() error { return comm.ErrMismatch }

func (*DeviceVersionError) recoverable() {}
