package cuda

import (
	"bytes"
	"fmt"
	"runtime"
	"unsafe"
)

// op is an operation of the C side, in the order of SW_OPS in swcuda.h.
type op int32

const (
	opDriverGetVersion op = iota
	opDeviceGetCount
	opDeviceGet
	opDeviceGetName
	opDeviceGetUUID
	opDeviceGetAttribute
	opDeviceCanAccessPeer
	opPrimaryCtxRetain
	opPrimaryCtxRelease
	opCtxGetCurrent
	opCtxSynchronize
	opCtxEnablePeerAccess
	opCtxGetStreamPriorityRange
	opStreamCreate
	opStreamDestroy
	opStreamSynchronize
	opStreamWaitEvent
	opStreamIsCapturing
	opStreamGetCtx
	opStreamWaitValue64
	opStreamWriteValue64
	opStreamBeginCapture
	opStreamEndCapture
	opEventCreate
	opEventDestroy
	opEventRecord
	opEventQuery
	opEventSynchronize
	opEventElapsedTime
	opMemGetInfo
	opMemAlloc
	opMemFree
	opMemGetAddressRange
	opMemHostAlloc
	opMemFreeHost
	opMemcpyAsync
	opMemcpyHtoD
	opMemcpyDtoH
	opMemsetD8Async
	opPointerGetAttributes
	opMemAddressReserve
	opMemAddressFree
	opMemCreate
	opMemRelease
	opMemMap
	opMemUnmap
	opMemSetAccess
	opMemExport
	opMemImport
	opMemGranularity
	opMemRetainHandle
	opMulticastCreate
	opMulticastAddDevice
	opMulticastBind
	opMulticastUnbind
	opMulticastGranularity
	opIPCGet
	opIPCOpen
	opIPCClose
	opModuleLoadData
	opModuleUnload
	opModuleGetFunction
	opFuncGetAttribute
	opFuncSetAttribute
	opOccupancy
	opGraphInstantiate
	opGraphLaunch
	opGraphExecDestroy
	opGraphDestroy
	opCount
)

// opNames are the entry points, for errors.
var opNames = [opCount]string{
	"cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid",
	"cuDeviceGetAttribute", "cuDeviceCanAccessPeer",
	"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxGetCurrent",
	"cuCtxSynchronize", "cuCtxEnablePeerAccess", "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority",
	"cuStreamDestroy", "cuStreamSynchronize", "cuStreamWaitEvent", "cuStreamIsCapturing",
	"cuStreamGetCtx", "cuStreamWaitValue64", "cuStreamWriteValue64", "cuStreamBeginCapture", "cuStreamEndCapture",
	"cuEventCreate", "cuEventDestroy", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuEventElapsedTime",
	"cuMemGetInfo", "cuMemAlloc", "cuMemFree", "cuMemGetAddressRange", "cuMemHostAlloc", "cuMemFreeHost",
	"cuMemcpyAsync", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemsetD8Async",
	"cuPointerGetAttributes", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap",
	"cuMemUnmap", "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
	"cuMemGetAllocationGranularity", "cuMemRetainAllocationHandle", "cuMulticastCreate", "cuMulticastAddDevice",
	"cuMulticastBindMem", "cuMulticastUnbind", "cuMulticastGetGranularity", "cuIpcGetMemHandle", "cuIpcOpenMemHandle",
	"cuIpcCloseMemHandle", "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction",
	"cuFuncGetAttribute", "cuFuncSetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor",
	"cuGraphInstantiate", "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy",
}

// args carries the arguments of an operation to C and its results back.
type args [8]uint64

// Driver is the opened CUDA driver of this process.
type Driver struct {
	t       table
	version int
}

// leastVersion is that of the latest interface that Switchyard cannot do without, and of the oldest assembler that kernels come from.
const leastVersion = 12040

// Open opens libcuda.so.1, looks its entry points up and initialises it. It may be called any number of times; each
// Driver is closed on its own. The error wraps ErrUnavailable where there is no driver; one that is older than CUDA 12.4 is
// refused with another error, with both versions, so that nobody takes it for a machine without GPUs.
func Open() (*Driver, error) {
	t, err := openTable()
	if err != nil {
		return nil, err
	}
	d := &Driver{t: t}
	var a args
	if err := d.call(0, opDriverGetVersion, &a, nil); err != nil {
		closeTable(t)
		return nil, err
	}
	d.version = int(a[0])
	if d.version < leastVersion {
		closeTable(t)
		return nil, fmt.Errorf("cuda: the driver implements CUDA %s, and the kernels need %s: install NVIDIA's driver 550 or newer",
			release(d.version), release(leastVersion))
	}
	return d, nil
}

// release is a version as people write it, "12.4" of 12040.
func release(version int) string { return fmt.Sprintf("%d.%d", version/1000, version%1000/10) }

// Version is the CUDA version the driver implements: 13000 for 13.0.
func (d *Driver) Version() int { return d.version }

// Close forgets the entry points. Contexts of the driver must be released before. It is idempotent.
func (d *Driver) Close() error {
	if d != nil && d.t != nil {
		closeTable(d.t)
		d.t = nil
	}
	return nil
}

func (d *Driver) call(ctx uintptr, o op, a *args, p unsafe.Pointer) error {
	if d == nil || d.t == nil {
		return ErrClosed
	}
	c := invoke(d.t, ctx, o, a, p)
	runtime.KeepAlive(p)
	if c == 0 {
		return nil
	}
	return d.error(opNames[o], c)
}

func (d *Driver) error(what string, c Code) error {
	e := &Error{Op: what, Code: c}
	if c > 0 {
		e.Name = errorName(d.t, c)
	}
	return e
}

// text is a C string in a buffer.
func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// cString is s with its terminating zero.
func cString(s string) []byte { return append([]byte(s), 0) }
