// clang-format off
//go:build cgo && linux
// clang-format on

/* One call of the driver, by its number in SW_OPS. */
#include "swcuda_context.h"

#include <string.h>

#define GIVE(type, init, index, call) \
	do { \
		type v = init; \
		sw_result r_ = (call); \
		if (r_ == 0) \
			a[index] = (uint64_t)v; \
		return r_; \
	} while (0)

static sw_mem_prop device_prop(int32_t device, int32_t handle_types)
{
	sw_mem_prop p;
	memset(&p, 0, sizeof p);
	p.type = 1;
	p.handle_types = handle_types;
	p.location.type = 1;
	p.location.id = device;
	return p;
}

/* devices, size, handle types */
static sw_multicast_prop multicast_prop(const uint64_t *a)
{
	sw_multicast_prop p;
	memset(&p, 0, sizeof p);
	p.devices = (uint32_t)a[0];
	p.size = a[1];
	p.handle_types = a[2];
	return p;
}

enum { SW_HANDLE_FILE = 1 };

static sw_result pointer_attributes(sw_driver *d, uint64_t *a)
{
	/* memory type, device ordinal, buffer id, range start, range size, legacy IPC capable, allowed handle types,
	 * managed */
	int32_t kinds[8] = {2, 9, 7, 11, 12, 10, 14, 8};
	/* Eight bytes for each: of some the driver writes more than an int. */
	uint64_t v[8] = {0};
	void *data[8] = {&v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7]};
	sw_result r = d->cuPointerGetAttributes(8, kinds, data, a[0]);
	if (r != 0)
		return r;
	a[0] = (uint32_t)v[0];
	a[1] = (uint64_t)(int64_t)(int32_t)v[1];
	a[2] = v[2];
	a[3] = v[3];
	a[4] = v[4];
	a[5] = v[5] != 0;
	a[6] = (uint32_t)v[6];
	a[7] = v[7] != 0;
	return 0;
}

static sw_result set_access(sw_driver *d, uint64_t *a, const int32_t *devices)
{
	sw_mem_access desc[64];
	size_t n = (size_t)a[2];
	if (n > 64)
		return SW_BAD_COMMAND;
	for (size_t i = 0; i < n; i++) {
		desc[i].location.type = 1;
		desc[i].location.id = devices[i];
		desc[i].flags = 3;
	}
	return d->cuMemSetAccess(a[0], a[1], desc, n);
}

static sw_result call(sw_driver *d, int32_t op, uint64_t *a, void *p)
{
	sw_result r;
	switch (op) {
	case SW_OP_cuDriverGetVersion:
		NEED(cuDriverGetVersion);
		GIVE(int32_t, 0, 0, d->cuDriverGetVersion(&v));
	case SW_OP_cuDeviceGetCount:
		NEED(cuDeviceGetCount);
		GIVE(int32_t, 0, 0, d->cuDeviceGetCount(&v));
	case SW_OP_cuDeviceGet:
		NEED(cuDeviceGet);
		GIVE(int32_t, 0, 0, d->cuDeviceGet(&v, (int32_t)a[0]));
	case SW_OP_cuDeviceGetName:
		NEED(cuDeviceGetName);
		return d->cuDeviceGetName(p, (int32_t)a[1], (int32_t)a[0]);
	case SW_OP_cuDeviceGetUuid:
		NEED(cuDeviceGetUuid);
		return d->cuDeviceGetUuid(p, (int32_t)a[0]);
	case SW_OP_cuDeviceGetAttribute:
		NEED(cuDeviceGetAttribute);
		GIVE(int32_t, 0, 0, d->cuDeviceGetAttribute(&v, (int32_t)a[1], (int32_t)a[0]));
	case SW_OP_cuDeviceCanAccessPeer:
		NEED(cuDeviceCanAccessPeer);
		GIVE(int32_t, 0, 0, d->cuDeviceCanAccessPeer(&v, (int32_t)a[0], (int32_t)a[1]));
	case SW_OP_cuDevicePrimaryCtxRetain:
		NEED(cuDevicePrimaryCtxRetain);
		GIVE(sw_handle, NULL, 0, d->cuDevicePrimaryCtxRetain(&v, (int32_t)a[0]));
	case SW_OP_cuDevicePrimaryCtxRelease:
		NEED(cuDevicePrimaryCtxRelease);
		return d->cuDevicePrimaryCtxRelease((int32_t)a[0]);
	case SW_OP_cuCtxGetCurrent:
		GIVE(sw_handle, NULL, 0, d->cuCtxGetCurrent(&v));
	case SW_OP_cuCtxSynchronize:
		NEED(cuCtxSynchronize);
		return d->cuCtxSynchronize();
	case SW_OP_cuCtxEnablePeerAccess:
		NEED(cuCtxEnablePeerAccess);
		return d->cuCtxEnablePeerAccess(HANDLE(a[0]), 0);
	case SW_OP_cuCtxGetStreamPriorityRange: {
		NEED(cuCtxGetStreamPriorityRange);
		int32_t least = 0, greatest = 0;
		r = d->cuCtxGetStreamPriorityRange(&least, &greatest);
		a[0] = (uint64_t)(int64_t)least;
		a[1] = (uint64_t)(int64_t)greatest;
		return r;
	}
	case SW_OP_cuStreamCreateWithPriority:
		NEED(cuStreamCreateWithPriority);
		GIVE(sw_handle, NULL, 0, d->cuStreamCreateWithPriority(&v, (uint32_t)a[0], (int32_t)a[1]));
	case SW_OP_cuStreamDestroy:
		NEED(cuStreamDestroy);
		return d->cuStreamDestroy(HANDLE(a[0]));
	case SW_OP_cuStreamSynchronize:
		NEED(cuStreamSynchronize);
		return d->cuStreamSynchronize(HANDLE(a[0]));
	case SW_OP_cuStreamWaitEvent:
		NEED(cuStreamWaitEvent);
		return d->cuStreamWaitEvent(HANDLE(a[0]), HANDLE(a[1]), 0);
	case SW_OP_cuStreamIsCapturing:
		NEED(cuStreamIsCapturing);
		GIVE(int32_t, 0, 0, d->cuStreamIsCapturing(HANDLE(a[0]), &v));
	case SW_OP_cuStreamGetCtx:
		NEED(cuStreamGetCtx);
		GIVE(sw_handle, NULL, 0, d->cuStreamGetCtx(HANDLE(a[0]), &v));
	case SW_OP_cuStreamWaitValue64:
		NEED(cuStreamWaitValue64);
		return d->cuStreamWaitValue64(HANDLE(a[0]), a[1], a[2], (uint32_t)a[3]);
	case SW_OP_cuStreamWriteValue64:
		NEED(cuStreamWriteValue64);
		return d->cuStreamWriteValue64(HANDLE(a[0]), a[1], a[2], (uint32_t)a[3]);
	case SW_OP_cuStreamBeginCapture:
		NEED(cuStreamBeginCapture);
		return d->cuStreamBeginCapture(HANDLE(a[0]), (int32_t)a[1]);
	case SW_OP_cuStreamEndCapture:
		NEED(cuStreamEndCapture);
		GIVE(sw_handle, NULL, 0, d->cuStreamEndCapture(HANDLE(a[0]), &v));
	case SW_OP_cuEventCreate:
		NEED(cuEventCreate);
		GIVE(sw_handle, NULL, 0, d->cuEventCreate(&v, (uint32_t)a[0]));
	case SW_OP_cuEventDestroy:
		NEED(cuEventDestroy);
		return d->cuEventDestroy(HANDLE(a[0]));
	case SW_OP_cuEventRecord:
		NEED(cuEventRecord);
		return d->cuEventRecord(HANDLE(a[0]), HANDLE(a[1]));
	case SW_OP_cuEventQuery:
		NEED(cuEventQuery);
		return d->cuEventQuery(HANDLE(a[0]));
	case SW_OP_cuEventSynchronize:
		NEED(cuEventSynchronize);
		return d->cuEventSynchronize(HANDLE(a[0]));
	case SW_OP_cuEventElapsedTime: {
		NEED(cuEventElapsedTime);
		float ms = 0;
		r = d->cuEventElapsedTime(&ms, HANDLE(a[0]), HANDLE(a[1]));
		a[0] = (uint64_t)((double)ms * 1e6);
		return r;
	}
	case SW_OP_cuMemGetInfo: {
		NEED(cuMemGetInfo);
		size_t available = 0, total = 0;
		r = d->cuMemGetInfo(&available, &total);
		a[0] = available;
		a[1] = total;
		return r;
	}
	case SW_OP_cuMemAlloc:
		NEED(cuMemAlloc);
		GIVE(sw_ptr, 0, 0, d->cuMemAlloc(&v, a[0]));
	case SW_OP_cuMemFree:
		NEED(cuMemFree);
		return d->cuMemFree(a[0]);
	case SW_OP_cuMemGetAddressRange: {
		NEED(cuMemGetAddressRange);
		sw_ptr base = 0;
		size_t size = 0;
		r = d->cuMemGetAddressRange(&base, &size, a[0]);
		a[0] = base;
		a[1] = size;
		return r;
	}
	case SW_OP_cuMemHostAlloc: {
		NEED(cuMemHostAlloc);
		NEED(cuMemHostGetDevicePointer);
		NEED(cuMemFreeHost);
		void *host = NULL;
		sw_ptr dev = 0;
		r = d->cuMemHostAlloc(&host, a[0], (uint32_t)a[1]);
		if (r != 0)
			return r;
		r = d->cuMemHostGetDevicePointer(&dev, host, 0);
		if (r != 0) {
			d->cuMemFreeHost(host);
			return r;
		}
		memset(host, 0, a[0]);
		a[0] = (uint64_t)(uintptr_t)host;
		a[1] = dev;
		return 0;
	}
	case SW_OP_cuMemFreeHost:
		NEED(cuMemFreeHost);
		return d->cuMemFreeHost(HANDLE(a[0]));
	case SW_OP_cuMemcpyAsync:
		NEED(cuMemcpyAsync);
		return d->cuMemcpyAsync(a[0], a[1], a[2], HANDLE(a[3]));
	/* Memory of Go is not pinned. A copy of it that finds work on its stream waits inside the driver, and holds up
	   copies on all streams of the context: those of a rank, say, for whose signal that work waits. */
	case SW_OP_cuMemcpyHtoD:
		NEED(cuMemcpyHtoDAsync);
		NEED(cuStreamSynchronize);
		r = d->cuStreamSynchronize(HANDLE(a[2]));
		r = r != 0 ? r : d->cuMemcpyHtoDAsync(a[0], p, a[1], HANDLE(a[2]));
		return r != 0 ? r : d->cuStreamSynchronize(HANDLE(a[2]));
	case SW_OP_cuMemcpyDtoH:
		NEED(cuMemcpyDtoHAsync);
		NEED(cuStreamSynchronize);
		r = d->cuStreamSynchronize(HANDLE(a[2]));
		r = r != 0 ? r : d->cuMemcpyDtoHAsync(p, a[0], a[1], HANDLE(a[2]));
		return r != 0 ? r : d->cuStreamSynchronize(HANDLE(a[2]));
	case SW_OP_cuMemsetD8Async:
		NEED(cuMemsetD8Async);
		return d->cuMemsetD8Async(a[0], (uint8_t)a[1], a[2], HANDLE(a[3]));
	case SW_OP_cuPointerGetAttributes:
		NEED(cuPointerGetAttributes);
		return pointer_attributes(d, a);
	case SW_OP_cuMemAddressReserve:
		NEED(cuMemAddressReserve);
		GIVE(sw_ptr, 0, 0, d->cuMemAddressReserve(&v, a[0], a[1], a[2], 0));
	case SW_OP_cuMemAddressFree:
		NEED(cuMemAddressFree);
		return d->cuMemAddressFree(a[0], a[1]);
	case SW_OP_cuMemCreate: {
		NEED(cuMemCreate);
		sw_mem_prop prop = device_prop((int32_t)a[1], (int32_t)a[2]);
		GIVE(uint64_t, 0, 0, d->cuMemCreate(&v, a[0], &prop, 0));
	}
	case SW_OP_cuMemRelease:
		NEED(cuMemRelease);
		return d->cuMemRelease(a[0]);
	case SW_OP_cuMemMap:
		NEED(cuMemMap);
		return d->cuMemMap(a[0], a[1], a[2], a[3], 0);
	case SW_OP_cuMemUnmap:
		NEED(cuMemUnmap);
		return d->cuMemUnmap(a[0], a[1]);
	case SW_OP_cuMemSetAccess:
		NEED(cuMemSetAccess);
		return set_access(d, a, p);
	case SW_OP_cuMemExportToShareableHandle: {
		NEED(cuMemExportToShareableHandle);
		if (a[1] != SW_HANDLE_FILE)
			return d->cuMemExportToShareableHandle(p, a[0], (int32_t)a[1], 0);
		int fd = -1;
		r = d->cuMemExportToShareableHandle(&fd, a[0], (int32_t)a[1], 0);
		a[0] = (uint64_t)(int64_t)fd;
		return r;
	}
	case SW_OP_cuMemImportFromShareableHandle:
		NEED(cuMemImportFromShareableHandle);
		GIVE(uint64_t, 0, 0,
		     d->cuMemImportFromShareableHandle(&v, a[1] == SW_HANDLE_FILE ? HANDLE(a[0]) : p, (int32_t)a[1]));
	case SW_OP_cuMemGetAllocationGranularity: {
		NEED(cuMemGetAllocationGranularity);
		sw_mem_prop prop = device_prop((int32_t)a[0], (int32_t)a[1]);
		GIVE(size_t, 0, 0, d->cuMemGetAllocationGranularity(&v, &prop, (int32_t)a[2]));
	}
	case SW_OP_cuMemRetainAllocationHandle:
		NEED(cuMemRetainAllocationHandle);
		GIVE(uint64_t, 0, 0, d->cuMemRetainAllocationHandle(&v, HANDLE(a[0])));
	case SW_OP_cuMulticastCreate: {
		NEED(cuMulticastCreate);
		sw_multicast_prop prop = multicast_prop(a);
		GIVE(uint64_t, 0, 0, d->cuMulticastCreate(&v, &prop));
	}
	case SW_OP_cuMulticastAddDevice:
		NEED(cuMulticastAddDevice);
		return d->cuMulticastAddDevice(a[0], (int32_t)a[1]);
	case SW_OP_cuMulticastBindMem:
		NEED(cuMulticastBindMem);
		return d->cuMulticastBindMem(a[0], a[1], a[2], a[3], a[4], 0);
	case SW_OP_cuMulticastUnbind:
		NEED(cuMulticastUnbind);
		return d->cuMulticastUnbind(a[0], (int32_t)a[1], a[2], a[3]);
	case SW_OP_cuMulticastGetGranularity: {
		NEED(cuMulticastGetGranularity);
		sw_multicast_prop prop = multicast_prop(a);
		GIVE(size_t, 0, 0, d->cuMulticastGetGranularity(&v, &prop, (int32_t)a[3]));
	}
	case SW_OP_cuIpcGetMemHandle: {
		NEED(cuIpcGetMemHandle);
		sw_ipc_handle h;
		r = d->cuIpcGetMemHandle(&h, a[0]);
		if (r == 0)
			memcpy(p, &h, sizeof h);
		return r;
	}
	case SW_OP_cuIpcOpenMemHandle: {
		NEED(cuIpcOpenMemHandle);
		sw_ipc_handle h;
		memcpy(&h, p, sizeof h);
		GIVE(sw_ptr, 0, 0, d->cuIpcOpenMemHandle(&v, h, 1));
	}
	case SW_OP_cuIpcCloseMemHandle:
		NEED(cuIpcCloseMemHandle);
		return d->cuIpcCloseMemHandle(a[0]);
	case SW_OP_cuModuleLoadData:
		NEED(cuModuleLoadData);
		GIVE(sw_handle, NULL, 0, d->cuModuleLoadData(&v, p));
	case SW_OP_cuModuleUnload:
		NEED(cuModuleUnload);
		return d->cuModuleUnload(HANDLE(a[0]));
	case SW_OP_cuModuleGetFunction: {
		NEED(cuModuleGetFunction);
		sw_handle f = NULL;
		r = d->cuModuleGetFunction(&f, HANDLE(a[0]), p);
		/* Load it now: lazy loading at the first launch would wait for kernels that wait for this rank. */
		if (r == 0 && d->cuFuncLoad != NULL)
			r = d->cuFuncLoad(f);
		if (r == 0)
			a[0] = (uint64_t)(uintptr_t)f;
		return r;
	}
	case SW_OP_cuFuncGetAttribute:
		NEED(cuFuncGetAttribute);
		GIVE(int32_t, 0, 0, d->cuFuncGetAttribute(&v, (int32_t)a[1], HANDLE(a[0])));
	case SW_OP_cuFuncSetAttribute:
		NEED(cuFuncSetAttribute);
		return d->cuFuncSetAttribute(HANDLE(a[0]), (int32_t)a[1], (int32_t)a[2]);
	case SW_OP_cuOccupancyMaxActiveBlocksPerMultiprocessor:
		NEED(cuOccupancyMaxActiveBlocksPerMultiprocessor);
		GIVE(int32_t, 0, 0,
		     d->cuOccupancyMaxActiveBlocksPerMultiprocessor(&v, HANDLE(a[0]), (int32_t)a[1], a[2]));
	case SW_OP_cuGraphInstantiate:
		NEED(cuGraphInstantiateWithFlags);
		GIVE(sw_handle, NULL, 0, d->cuGraphInstantiateWithFlags(&v, HANDLE(a[0]), 0));
	case SW_OP_cuGraphLaunch:
		NEED(cuGraphLaunch);
		return d->cuGraphLaunch(HANDLE(a[0]), HANDLE(a[1]));
	case SW_OP_cuGraphExecDestroy:
		NEED(cuGraphExecDestroy);
		return d->cuGraphExecDestroy(HANDLE(a[0]));
	case SW_OP_cuGraphDestroy:
		NEED(cuGraphDestroy);
		return d->cuGraphDestroy(HANDLE(a[0]));
	}
	return SW_BAD_COMMAND;
}

/* Somebody's capture that is not a relaxed one forbids this thread, or with a global one every thread, calls that could
 * reach into it, such as asking for the state of an event, and what is forbidden also breaks the capture. Ours never
 * do. */
static void exchange_capture_mode(sw_driver *d, int32_t *mode)
{
	if (d->cuThreadExchangeStreamCaptureMode != NULL)
		d->cuThreadExchangeStreamCaptureMode(mode);
}

sw_result sw_call(sw_driver *d, uint64_t ctx, int32_t op, uint64_t *a, void *p)
{
	int pushed;
	int32_t mode = 2; /* relaxed */
	sw_result r = sw_enter(d, ctx, &pushed);
	if (r != 0)
		return r;
	if (ctx != 0)
		exchange_capture_mode(d, &mode);
	r = call(d, op, a, p);
	if (ctx != 0)
		exchange_capture_mode(d, &mode);
	sw_leave(d, pushed);
	return r;
}
