/* The part of the CUDA driver API that Switchyard uses, declared from NVIDIA's public documentation so that building
 * needs no CUDA header. Every name is prefixed: this file can stand next to <cuda.h>. */
#ifndef SWCUDA_H
#define SWCUDA_H

#include <stddef.h>
#include <stdint.h>

typedef int32_t sw_result; /* CUresult */
typedef uint64_t sw_ptr;   /* CUdeviceptr */
typedef void *sw_handle;   /* CUcontext, CUstream, CUevent, CUmodule, CUfunction, CUgraph, CUgraphExec */

typedef struct {
	int32_t type; /* 1: device */
	int32_t id;
} sw_mem_location;

typedef struct {
	int32_t type; /* 1: pinned */
	int32_t handle_types;
	sw_mem_location location;
	void *win32;
	struct {
		uint8_t compression;
		uint8_t gpu_direct_rdma;
		uint16_t usage;
		uint8_t reserved[4];
	} flags;
} sw_mem_prop;

typedef struct {
	sw_mem_location location;
	int32_t flags; /* 3: read and write */
} sw_mem_access;

typedef struct {
	int32_t src_access_order; /* 1: stream */
	sw_mem_location src_hint, dst_hint;
	uint32_t flags; /* 1: prefer overlap with compute */
} sw_memcpy_attributes;

typedef struct {
	int32_t id;
	int32_t pad;
	union {
		int32_t i32;
		struct {
			uint32_t x, y, z;
		} dim;
		char bytes[64];
	} value;
} sw_launch_attribute;

typedef struct {
	uint32_t grid[3], block[3];
	uint32_t shared_bytes;
	sw_handle stream;
	sw_launch_attribute *attrs;
	uint32_t attr_count;
} sw_launch_config;

typedef struct {
	char bytes[64];
} sw_ipc_handle;

typedef struct {
	uint32_t devices;
	size_t size;
	uint64_t handle_types;
	uint64_t flags;
} sw_multicast_prop;

/* The entry points: name, version of its interface, parameters. A version selects between interfaces of one name. */
/* clang-format off */
#define SW_ENTRIES(X) \
	X(cuInit, 2000, (uint32_t)) \
	X(cuGetErrorName, 6000, (sw_result, const char **)) \
	X(cuDriverGetVersion, 2020, (int32_t *)) \
	X(cuDeviceGetCount, 2000, (int32_t *)) \
	X(cuDeviceGet, 2000, (int32_t *, int32_t)) \
	X(cuDeviceGetName, 2000, (char *, int32_t, int32_t)) \
	X(cuDeviceGetUuid, 11040, (void *, int32_t)) \
	X(cuDeviceGetAttribute, 2000, (int32_t *, int32_t, int32_t)) \
	X(cuDeviceCanAccessPeer, 4000, (int32_t *, int32_t, int32_t)) \
	X(cuDevicePrimaryCtxRetain, 7000, (sw_handle *, int32_t)) \
	X(cuDevicePrimaryCtxRelease, 11000, (int32_t)) \
	X(cuCtxGetCurrent, 4000, (sw_handle *)) \
	X(cuCtxPushCurrent, 4000, (sw_handle)) \
	X(cuCtxPopCurrent, 4000, (sw_handle *)) \
	X(cuCtxSynchronize, 2000, (void)) \
	X(cuCtxEnablePeerAccess, 4000, (sw_handle, uint32_t)) \
	X(cuCtxGetStreamPriorityRange, 5050, (int32_t *, int32_t *)) \
	X(cuStreamCreateWithPriority, 5050, (sw_handle *, uint32_t, int32_t)) \
	X(cuStreamDestroy, 4000, (sw_handle)) \
	X(cuStreamSynchronize, 2000, (sw_handle)) \
	X(cuStreamWaitEvent, 3020, (sw_handle, sw_handle, uint32_t)) \
	X(cuStreamIsCapturing, 10000, (sw_handle, int32_t *)) \
	X(cuStreamGetCtx, 9020, (sw_handle, sw_handle *)) \
	X(cuStreamWaitValue64, 11070, (sw_handle, sw_ptr, uint64_t, uint32_t)) \
	X(cuStreamWriteValue64, 11070, (sw_handle, sw_ptr, uint64_t, uint32_t)) \
	X(cuStreamBeginCapture, 10010, (sw_handle, int32_t)) \
	X(cuStreamEndCapture, 10000, (sw_handle, sw_handle *)) \
	X(cuThreadExchangeStreamCaptureMode, 10010, (int32_t *)) \
	X(cuEventCreate, 2000, (sw_handle *, uint32_t)) \
	X(cuEventDestroy, 4000, (sw_handle)) \
	X(cuEventRecord, 2000, (sw_handle, sw_handle)) \
	X(cuEventQuery, 2000, (sw_handle)) \
	X(cuEventSynchronize, 2000, (sw_handle)) \
	X(cuEventElapsedTime, 2000, (float *, sw_handle, sw_handle)) \
	X(cuMemGetInfo, 3020, (size_t *, size_t *)) \
	X(cuMemAlloc, 3020, (sw_ptr *, size_t)) \
	X(cuMemFree, 3020, (sw_ptr)) \
	X(cuMemGetAddressRange, 3020, (sw_ptr *, size_t *, sw_ptr)) \
	X(cuMemHostAlloc, 2020, (void **, size_t, uint32_t)) \
	X(cuMemFreeHost, 2000, (void *)) \
	X(cuMemHostGetDevicePointer, 3020, (sw_ptr *, void *, uint32_t)) \
	X(cuMemcpyAsync, 4000, (sw_ptr, sw_ptr, size_t, sw_handle)) \
	X(cuMemcpyBatchAsync, 12080, (sw_ptr *, sw_ptr *, size_t *, size_t, sw_memcpy_attributes *, size_t *, size_t, size_t *, sw_handle)) \
	X(cuMemcpyHtoDAsync, 3020, (sw_ptr, const void *, size_t, sw_handle)) \
	X(cuMemcpyDtoHAsync, 3020, (void *, sw_ptr, size_t, sw_handle)) \
	X(cuMemsetD8Async, 3020, (sw_ptr, uint8_t, size_t, sw_handle)) \
	X(cuPointerGetAttributes, 7000, (uint32_t, int32_t *, void **, sw_ptr)) \
	X(cuMemAddressReserve, 10020, (sw_ptr *, size_t, size_t, sw_ptr, uint64_t)) \
	X(cuMemAddressFree, 10020, (sw_ptr, size_t)) \
	X(cuMemCreate, 10020, (uint64_t *, size_t, const sw_mem_prop *, uint64_t)) \
	X(cuMemRelease, 10020, (uint64_t)) \
	X(cuMemMap, 10020, (sw_ptr, size_t, size_t, uint64_t, uint64_t)) \
	X(cuMemUnmap, 10020, (sw_ptr, size_t)) \
	X(cuMemSetAccess, 10020, (sw_ptr, size_t, const sw_mem_access *, size_t)) \
	X(cuMemExportToShareableHandle, 10020, (void *, uint64_t, int32_t, uint64_t)) \
	X(cuMemImportFromShareableHandle, 10020, (uint64_t *, void *, int32_t)) \
	X(cuMemGetAllocationGranularity, 10020, (size_t *, const sw_mem_prop *, int32_t)) \
	X(cuMemRetainAllocationHandle, 11000, (uint64_t *, void *)) \
	X(cuMulticastCreate, 12010, (uint64_t *, const sw_multicast_prop *)) \
	X(cuMulticastAddDevice, 12010, (uint64_t, int32_t)) \
	X(cuMulticastBindMem, 12010, (uint64_t, size_t, uint64_t, size_t, size_t, uint64_t)) \
	X(cuMulticastUnbind, 12010, (uint64_t, int32_t, size_t, size_t)) \
	X(cuMulticastGetGranularity, 12010, (size_t *, const sw_multicast_prop *, int32_t)) \
	X(cuIpcGetMemHandle, 4010, (sw_ipc_handle *, sw_ptr)) \
	X(cuIpcOpenMemHandle, 11000, (sw_ptr *, sw_ipc_handle, uint32_t)) \
	X(cuIpcCloseMemHandle, 4010, (sw_ptr)) \
	X(cuModuleLoadData, 2000, (sw_handle *, const void *)) \
	X(cuModuleUnload, 2000, (sw_handle)) \
	X(cuModuleGetFunction, 2000, (sw_handle *, sw_handle, const char *)) \
	X(cuFuncLoad, 12040, (sw_handle)) \
	X(cuFuncGetAttribute, 2020, (int32_t *, int32_t, sw_handle)) \
	X(cuFuncSetAttribute, 9000, (sw_handle, int32_t, int32_t)) \
	X(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, (int32_t *, sw_handle, int32_t, size_t)) \
	X(cuLaunchKernelEx, 11060, (const sw_launch_config *, sw_handle, void **, void **)) \
	X(cuGraphInstantiateWithFlags, 11040, (sw_handle *, sw_handle, uint64_t)) \
	X(cuGraphLaunch, 10000, (sw_handle, sw_handle)) \
	X(cuGraphExecDestroy, 10000, (sw_handle)) \
	X(cuGraphDestroy, 10000, (sw_handle))
/* clang-format on */

#define SW_FIELD(name, version, params) sw_result(*name) params;
typedef struct {
	void *lib;
	SW_ENTRIES(SW_FIELD)
} sw_driver;
#undef SW_FIELD

/* Results of our own, outside the driver's range. */
enum {
	SW_NO_DRIVER = -1,   /* the library cannot be opened */
	SW_NO_ENTRY = -2,    /* this driver lacks the entry point */
	SW_BAD_COMMAND = -3, /* a malformed batch */
};

/* Operations of sw_call. Go's constants have the same order; a test compares the names. */
/* clang-format off */
#define SW_OPS(X) \
	X(cuDriverGetVersion) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid) \
	X(cuDeviceGetAttribute) X(cuDeviceCanAccessPeer) \
	X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxGetCurrent) \
	X(cuCtxSynchronize) X(cuCtxEnablePeerAccess) X(cuCtxGetStreamPriorityRange) X(cuStreamCreateWithPriority) \
	X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamIsCapturing) \
	X(cuStreamGetCtx) X(cuStreamWaitValue64) X(cuStreamWriteValue64) X(cuStreamBeginCapture) X(cuStreamEndCapture) \
	X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime) \
	X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemGetAddressRange) X(cuMemHostAlloc) X(cuMemFreeHost) \
	X(cuMemcpyAsync) X(cuMemcpyHtoD) X(cuMemcpyDtoH) X(cuMemsetD8Async) \
	X(cuPointerGetAttributes) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) \
	X(cuMemUnmap) X(cuMemSetAccess) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) \
	X(cuMemGetAllocationGranularity) X(cuMemRetainAllocationHandle) X(cuMulticastCreate) X(cuMulticastAddDevice) \
	X(cuMulticastBindMem) X(cuMulticastUnbind) X(cuMulticastGetGranularity) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) \
	X(cuIpcCloseMemHandle) X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) \
	X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
	X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy)
/* clang-format on */

#define SW_OP(name) SW_OP_##name,
enum { SW_OPS(SW_OP) SW_OP_COUNT };
#undef SW_OP

/* sw_open opens the driver and initialises it. On SW_NO_DRIVER, why says what the loader said. */
sw_result sw_open(sw_driver **out, char *why, size_t why_len);
void sw_close(sw_driver *d);

/* sw_call performs one operation with the context current (0: none needed). a holds arguments and takes results; p is
 * memory that the operation reads or fills. */
sw_result sw_call(sw_driver *d, uint64_t ctx, int32_t op, uint64_t *a, void *p);

const char *sw_op_name(int32_t op);
const char *sw_error_name(sw_driver *d, sw_result r);

/* Commands of a batch. Each begins with a header; sizes are multiples of 8 bytes. */
enum {
	SW_CMD_LAUNCH = 1,
	SW_CMD_COPY,
	SW_CMD_COPIES,
	SW_CMD_SET,
	SW_CMD_WAIT_VALUE,
	SW_CMD_WRITE_VALUE,
	SW_CMD_RECORD,
	SW_CMD_WAIT_EVENT
};

typedef struct {
	uint16_t kind;
	uint16_t stream; /* index into the streams of the submission */
	uint32_t bytes;  /* of the whole command, header included */
} sw_cmd;

enum { SW_LAUNCH_COOPERATIVE = 1, SW_LAUNCH_PROGRAMMATIC = 2, SW_LAUNCH_REMOTE_DOMAIN = 4 };

typedef struct {
	sw_cmd cmd;
	uint64_t function;
	uint32_t grid[3], block[3];
	uint32_t shared_bytes;
	uint32_t flags;
	uint32_t cluster; /* blocks of a cluster along x, 0 or 1: none */
	uint32_t arg_bytes;
	/* the kernel's only parameter, padded to 8 bytes */
} sw_cmd_launch;

typedef struct {
	sw_cmd cmd;
	uint64_t a, b, c, d;
} sw_cmd_words; /* COPY: dst, src, bytes. SET: dst, value, bytes. WAIT/WRITE: address, value, flags. RECORD/WAIT_EVENT:
                   event. COPIES: count, flags, then count of dst, src and bytes */

/* sw_submit runs the commands in order. On an error, *at is the byte offset of the command that failed. */
sw_result sw_submit(sw_driver *d, uint64_t ctx, const uint64_t *streams, int32_t stream_count, const void *commands,
                    int64_t bytes, int64_t *at);

#endif
