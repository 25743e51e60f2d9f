/* What the C files of this package share. */
#ifndef SW_CUDA_CONTEXT_H
#define SW_CUDA_CONTEXT_H

#include "swcuda.h"

/* sw_enter makes ctx current unless it is already; sw_leave undoes exactly that. A caller's thread, such as Python's,
 * finds its own context again. */
sw_result sw_enter(sw_driver *d, uint64_t ctx, int *pushed);
void sw_leave(sw_driver *d, int pushed);

#define HANDLE(v) ((sw_handle)(uintptr_t)(v))
#define NEED(fn) \
	if (d->fn == NULL) \
	return SW_NO_ENTRY

#endif
