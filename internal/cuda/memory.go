package cuda

import (
	"fmt"
	"unsafe"
)

// MemInfo is the device's free and total memory in bytes.
func (c *Context) MemInfo() (free, total int64, err error) {
	var a args
	err = c.call(opMemGetInfo, &a, nil)
	return int64(a[0]), int64(a[1]), err
}

// MemAlloc allocates n bytes of device memory, which MemFree returns.
func (c *Context) MemAlloc(n int64) (uintptr, error) {
	a := args{uint64(n)}
	if err := c.call(opMemAlloc, &a, nil); err != nil {
		return 0, fmt.Errorf("%d bytes on %v: %w", n, c.dev, err)
	}
	return uintptr(a[0]), nil
}

// MemFree frees what MemAlloc allocated. It can wait for running kernels.
func (c *Context) MemFree(p uintptr) error {
	a := args{uint64(p)}
	return c.call(opMemFree, &a, nil)
}

// AddressRange is the allocation that holds p.
func (c *Context) AddressRange(p uintptr) (base uintptr, size int64, err error) {
	a := args{uint64(p)}
	err = c.call(opMemGetAddressRange, &a, nil)
	return uintptr(a[0]), int64(a[1]), err
}

// Copy enqueues a copy of n bytes between any two places that unified addressing knows.
func (c *Context) Copy(s Stream, dst, src uintptr, n int64) error {
	a := args{uint64(dst), uint64(src), uint64(n), uint64(s)}
	return c.call(opMemcpyAsync, &a, nil)
}

// Set enqueues setting n bytes to a value.
func (c *Context) Set(s Stream, dst uintptr, value byte, n int64) error {
	a := args{uint64(dst), uint64(value), uint64(n), uint64(s)}
	return c.call(opMemsetD8Async, &a, nil)
}

// Write waits for the stream, copies host bytes to the device, and waits for that. For the control plane and tests.
func (c *Context) Write(s Stream, dst uintptr, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	a := args{uint64(dst), uint64(len(src)), uint64(s)}
	return c.call(opMemcpyHtoD, &a, unsafe.Pointer(&src[0]))
}

// Read waits for the stream, copies device bytes to the host, and waits for that. For the control plane and tests.
func (c *Context) Read(s Stream, dst []byte, src uintptr) error {
	if len(dst) == 0 {
		return nil
	}
	a := args{uint64(src), uint64(len(dst)), uint64(s)}
	return c.call(opMemcpyDtoH, &a, unsafe.Pointer(&dst[0]))
}

// MemoryType says what kind of memory an address is.
type MemoryType uint32

// DeviceMemory is memory of a GPU. A type of 0 is memory that the driver has not been told of.
const DeviceMemory MemoryType = 2

// Pointer is what the driver knows of an address.
type Pointer struct {
	Type       MemoryType
	Device     int    // ordinal
	BufferID   uint64 // identity of the allocation: never used twice in a process
	Base       uintptr
	Size       int64  // of the allocation
	LegacyIPC  bool   // IPCGet works
	Exportable uint32 // CUmemAllocationHandleType bits of a virtual-memory allocation
	Managed    bool
}

// Pointer asks the driver about an address.
func (c *Context) Pointer(p uintptr) (Pointer, error) {
	a := args{uint64(p)}
	if err := c.call(opPointerGetAttributes, &a, nil); err != nil {
		return Pointer{}, err
	}
	return Pointer{
		Type: MemoryType(a[0]), Device: int(int64(a[1])), BufferID: a[2], Base: uintptr(a[3]), Size: int64(a[4]),
		LegacyIPC: a[5] != 0, Exportable: uint32(a[6]), Managed: a[7] != 0,
	}, nil
}

// HostBuffer is pinned host memory that kernels reach too.
type HostBuffer struct {
	c    *Context
	mem  []byte
	addr uintptr
}

// NewHostBuffer allocates n zeroed bytes of pinned memory, mapped for every device.
func (c *Context) NewHostBuffer(n int64) (*HostBuffer, error) {
	a := args{uint64(n), 3} // portable, device-mapped
	if err := c.call(opMemHostAlloc, &a, nil); err != nil {
		return nil, fmt.Errorf("%d bytes of pinned memory: %w", n, err)
	}
	host := uintptr(a[0])
	return &HostBuffer{c: c, mem: unsafe.Slice((*byte)(foreign(host)), n), addr: uintptr(a[1])}, nil
}

// foreign turns an address of memory outside the Go heap into a pointer.
func foreign(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// Bytes is the memory on the host, nil after Close.
func (b *HostBuffer) Bytes() []byte { return b.mem }

// Addr is the memory's address on the device.
func (b *HostBuffer) Addr() uintptr { return b.addr }

// Close frees the memory; no kernel may use it any more. It is idempotent.
func (b *HostBuffer) Close() error {
	if b == nil || b.mem == nil {
		return nil
	}
	a := args{uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.mem))))}
	b.mem = nil
	return b.c.call(opMemFreeHost, &a, nil)
}

// HandleType says how an allocation of virtual memory can leave the process (CUmemAllocationHandleType).
type HandleType uint32

// The handle types.
const (
	NoHandle  HandleType = 0
	PosixFile HandleType = 1
	Fabric    HandleType = 8
)

// MemHandle is physical memory (CUmemGenericAllocationHandle). Every handle is released once; mappings keep the memory.
type MemHandle uint64

// Reserve reserves n bytes of address space.
func (c *Context) Reserve(n, align int64, hint uintptr) (uintptr, error) {
	a := args{uint64(n), uint64(align), uint64(hint)}
	err := c.call(opMemAddressReserve, &a, nil)
	return uintptr(a[0]), err
}

// Unreserve returns address space in which nothing is mapped any more.
func (c *Context) Unreserve(base uintptr, n int64) error {
	a := args{uint64(base), uint64(n)}
	return c.call(opMemAddressFree, &a, nil)
}

// Granularity is what sizes, offsets and addresses of mappings are multiples of: the recommended size, or the smallest.
func (c *Context) Granularity(t HandleType, recommended bool) (int64, error) {
	a := args{c.dev.handle, uint64(t), 0}
	if recommended {
		a[2] = 1
	}
	err := c.call(opMemGranularity, &a, nil)
	return int64(a[0]), err
}

// MemCreate allocates n bytes of physical memory on the context's device.
func (c *Context) MemCreate(n int64, t HandleType) (MemHandle, error) {
	a := args{uint64(n), c.dev.handle, uint64(t)}
	if err := c.call(opMemCreate, &a, nil); err != nil {
		return 0, fmt.Errorf("%d bytes on %v: %w", n, c.dev, err)
	}
	return MemHandle(a[0]), nil
}

// MemRelease gives a handle up. The memory goes when its last handle and mapping have gone.
func (c *Context) MemRelease(h MemHandle) error {
	a := args{uint64(h)}
	return c.call(opMemRelease, &a, nil)
}

// MemMap maps n bytes of h, from offset off, at addr. SetAccess must follow.
func (c *Context) MemMap(addr uintptr, n, off int64, h MemHandle) error {
	a := args{uint64(addr), uint64(n), uint64(off), uint64(h)}
	return c.call(opMemMap, &a, nil)
}

// MemUnmap undoes a mapping. It can wait for running kernels.
func (c *Context) MemUnmap(addr uintptr, n int64) error {
	a := args{uint64(addr), uint64(n)}
	return c.call(opMemUnmap, &a, nil)
}

// SetAccess lets devices (at most 64) read and write a mapped range.
func (c *Context) SetAccess(addr uintptr, n int64, devices ...*Device) error {
	if len(devices) == 0 {
		return nil
	}
	ids := make([]int32, len(devices))
	for i, v := range devices {
		ids[i] = int32(v.handle)
	}
	a := args{uint64(addr), uint64(n), uint64(len(ids))}
	return c.call(opMemSetAccess, &a, unsafe.Pointer(&ids[0]))
}

// ExportFD makes a file descriptor of a handle created with PosixFile. The caller closes it.
func (c *Context) ExportFD(h MemHandle) (int, error) {
	a := args{uint64(h), uint64(PosixFile)}
	if err := c.call(opMemExport, &a, nil); err != nil {
		return -1, err
	}
	return int(int64(a[0])), nil
}

// ImportFD makes a handle of a file descriptor that another process exported. The descriptor stays the caller's.
func (c *Context) ImportFD(fd int) (MemHandle, error) {
	a := args{uint64(fd), uint64(PosixFile)}
	if err := c.call(opMemImport, &a, nil); err != nil {
		return 0, err
	}
	return MemHandle(a[0]), nil
}

// FabricHandle names memory, or a multicast object, that was created with Fabric to other processes, also on other hosts of the same
// NVLink fabric.
type FabricHandle [64]byte

// ExportFabric is the name of a handle created with Fabric. It holds no reference: the memory has to live until all have imported it.
func (c *Context) ExportFabric(h MemHandle) (FabricHandle, error) {
	f := new(FabricHandle)
	a := args{uint64(h), uint64(Fabric)}
	err := c.call(opMemExport, &a, unsafe.Pointer(f))
	return *f, err
}

// ImportFabric makes a handle of a name.
func (c *Context) ImportFabric(f FabricHandle) (MemHandle, error) {
	p := new(FabricHandle)
	*p = f
	a := args{0, uint64(Fabric)}
	if err := c.call(opMemImport, &a, unsafe.Pointer(p)); err != nil {
		return 0, err
	}
	return MemHandle(a[0]), nil
}

// RetainHandle is a new handle of the memory mapped at addr.
func (c *Context) RetainHandle(addr uintptr) (MemHandle, error) {
	a := args{uint64(addr)}
	err := c.call(opMemRetainHandle, &a, nil)
	return MemHandle(a[0]), err
}

// IPCHandle names an allocation of MemAlloc to other processes.
type IPCHandle [64]byte

// IPCGet is the handle of the allocation that begins at base.
func (c *Context) IPCGet(base uintptr) (IPCHandle, error) {
	h := new(IPCHandle)
	a := args{uint64(base)}
	err := c.call(opIPCGet, &a, unsafe.Pointer(h))
	return *h, err
}

// IPCOpen maps another process's allocation. IPCClose must come before the exporter frees it.
func (c *Context) IPCOpen(h IPCHandle) (uintptr, error) {
	p := new(IPCHandle)
	*p = h
	var a args
	err := c.call(opIPCOpen, &a, unsafe.Pointer(p))
	return uintptr(a[0]), err
}

// IPCClose unmaps what IPCOpen mapped.
func (c *Context) IPCClose(p uintptr) error {
	a := args{uint64(p)}
	return c.call(opIPCClose, &a, nil)
}
