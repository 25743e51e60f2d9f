#include "_cgo_export.h"

#include <sys/types.h>

// torch's allocator passes its functions no word of ours, so every pool has a pair of its own.
#define POOL(k) \
	void *switchyard_pool_alloc_##k(ssize_t size, int device, void *stream) \
	{ \
		(void)stream; \
		return switchyard_pool_take(k, size, device); \
	} \
	void switchyard_pool_free_##k(void *p, ssize_t size, int device, void *stream) \
	{ \
		(void)size; \
		(void)device; \
		(void)stream; \
		switchyard_pool_give(k, p); \
	}

POOL(0)
POOL(1)
POOL(2)
POOL(3)
POOL(4)
POOL(5)
POOL(6)
POOL(7)
POOL(8)
POOL(9)
POOL(10)
POOL(11)
POOL(12)
POOL(13)
POOL(14)
POOL(15)

_Static_assert(SWITCHYARD_POOLS == 16, "a pair of functions for each pool");
