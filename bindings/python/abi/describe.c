#include "_cgo_export.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

struct hold {
	uint64_t handle;
	atomic_int users;
	pid_t process;
};

void *switchyard_hold(uint64_t handle)
{
	struct hold *h = malloc(sizeof *h);
	if (!h)
		return NULL;
	h->handle = handle;
	atomic_init(&h->users, 1);
	h->process = getpid();
	return h;
}

void switchyard_share(void *hold) { atomic_fetch_add(&((struct hold *)hold)->users, 1); }

void switchyard_unhold(void *hold)
{
	struct hold *h = hold;
	if (atomic_fetch_sub(&h->users, 1) != 1)
		return;
	if (h->process == getpid()) // a forked child has no threads of the library's
		switchyard_release(h->handle);
	free(h);
}

// DLPack's DLManagedTensor, version 0.
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
	int64_t extents[2];
};

static void forget(struct description *d)
{
	if (d->context)
		switchyard_unhold(d->context);
	free(d);
}

void *switchyard_describe(const struct switchyard_tensor *tensor, void *hold)
{
	struct description *d = calloc(1, sizeof *d);
	if (!d)
		return NULL;
	d->data = (void *)(uintptr_t)tensor->data;
	d->device.kind = (int32_t)tensor->kind;
	d->device.number = (int32_t)tensor->device;
	d->ndim = (int32_t)tensor->ndim;
	d->dtype.code = (uint8_t)tensor->code;
	d->dtype.bits = (uint8_t)tensor->bits;
	d->dtype.lanes = 1;
	d->extents[0] = tensor->shape[0];
	d->extents[1] = tensor->shape[1];
	d->shape = d->extents;
	d->deleter = forget;
	if (hold)
		switchyard_share(hold);
	d->context = hold;
	return d;
}
