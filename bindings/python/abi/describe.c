#include "switchyard.h"

#include <stdlib.h>

// DLPack's DLManagedTensor, version 0, of bytes in a row.
struct description {
	void *data;
	struct {
		int32_t kind, number;
	} device;
	int32_t ndim;
	struct {
		uint8_t code, bits;
		uint16_t lanes;
	} dtype;
	int64_t *shape, *strides;
	uint64_t byte_offset;
	void *context;
	void (*deleter)(struct description *);
	int64_t bytes;
};

static void forget(struct description *d) { free(d); }

void *switchyard_describe(uint64_t data, int64_t bytes, int32_t kind, int32_t device) {
	struct description *d = calloc(1, sizeof *d);
	if (!d)
		return NULL;
	d->data = (void *)(uintptr_t)data;
	d->device.kind = kind;
	d->device.number = device;
	d->ndim = 1;
	d->dtype.code = 1; // unsigned
	d->dtype.bits = 8;
	d->dtype.lanes = 1;
	d->bytes = bytes;
	d->shape = &d->bytes;
	d->deleter = forget;
	return d;
}
