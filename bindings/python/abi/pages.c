#include "_cgo_export.h"

#include <sys/mman.h>

// Pages of x86-64, and of aarch64 with pages of 4 KiB, that are large.
#define LARGE ((uint64_t)2 << 20)

void switchyard_large(uint64_t addr, int64_t bytes)
{
	const uint64_t from = (addr + LARGE - 1) & -LARGE, to = (addr + (uint64_t)bytes) & -LARGE;
	if (bytes >= (int64_t)(4 * LARGE) && from < to)
		(void)madvise((void *)(uintptr_t)from, to - from, MADV_HUGEPAGE);
}
