// clang-format off
//go:build cgo && linux
// clang-format on

#define _GNU_SOURCE
#include "swcuda_context.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef sw_result (*get_proc_v1)(const char *, void **, int32_t, uint64_t);
typedef sw_result (*get_proc_v2)(const char *, void **, int32_t, uint64_t, int32_t *);

static void *entry(get_proc_v2 v2, get_proc_v1 v1, const char *name, int32_t version)
{
	void *fn = NULL;
	int32_t found = 0;
	if (v2 != NULL)
		return v2(name, &fn, version, 0, &found) == 0 && found == 0 ? fn : NULL;
	return v1(name, &fn, version, 0) == 0 ? fn : NULL;
}

sw_result sw_open(sw_driver **out, char *why, size_t why_len)
{
	*out = NULL;
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (lib == NULL) {
		const char *e = dlerror();
		snprintf(why, why_len, "%s", e != NULL ? e : "libcuda.so.1 cannot be opened");
		return SW_NO_DRIVER;
	}
	get_proc_v2 v2 = (get_proc_v2)dlsym(lib, "cuGetProcAddress_v2");
	get_proc_v1 v1 = (get_proc_v1)dlsym(lib, "cuGetProcAddress");
	if (v2 == NULL && v1 == NULL) {
		snprintf(why, why_len, "libcuda.so.1 has no cuGetProcAddress (older than CUDA 11.3)");
		dlclose(lib);
		return SW_NO_DRIVER;
	}
	sw_driver *d = calloc(1, sizeof *d);
	if (d == NULL) {
		snprintf(why, why_len, "out of memory");
		dlclose(lib);
		return SW_NO_DRIVER;
	}
	d->lib = lib;
#define SW_LOAD(name, version, params) *(void **)&d->name = entry(v2, v1, #name, version);
	SW_ENTRIES(SW_LOAD)
#undef SW_LOAD
	if (d->cuInit == NULL || d->cuGetErrorName == NULL || d->cuCtxGetCurrent == NULL ||
	    d->cuCtxPushCurrent == NULL || d->cuCtxPopCurrent == NULL) {
		snprintf(why, why_len, "libcuda.so.1 lacks basic entry points");
		sw_close(d);
		return SW_NO_DRIVER;
	}
	sw_result r = d->cuInit(0);
	if (r != 0) {
		const char *name = NULL;
		d->cuGetErrorName(r, &name);
		snprintf(why, why_len, "cuInit: %s (%d)", name != NULL ? name : "unknown error", r);
		sw_close(d);
		return r;
	}
	*out = d;
	return 0;
}

void sw_close(sw_driver *d)
{
	if (d == NULL)
		return;
	dlclose(d->lib);
	free(d);
}

static const char *const op_names[] = {
#define SW_NAME(name) #name,
    SW_OPS(SW_NAME)
#undef SW_NAME
};

const char *sw_op_name(int32_t op) { return op >= 0 && op < SW_OP_COUNT ? op_names[op] : NULL; }

const char *sw_error_name(sw_driver *d, sw_result r)
{
	const char *name = NULL;
	if (d == NULL || d->cuGetErrorName(r, &name) != 0)
		return NULL;
	return name;
}

sw_result sw_enter(sw_driver *d, uint64_t ctx, int *pushed)
{
	*pushed = 0;
	if (ctx == 0)
		return 0;
	sw_handle now = NULL;
	sw_result r = d->cuCtxGetCurrent(&now);
	if (r != 0)
		return r;
	if ((uint64_t)(uintptr_t)now == ctx)
		return 0;
	r = d->cuCtxPushCurrent((sw_handle)(uintptr_t)ctx);
	*pushed = r == 0;
	return r;
}

void sw_leave(sw_driver *d, int pushed)
{
	sw_handle old;
	if (pushed)
		d->cuCtxPopCurrent(&old);
}
