// The C ABI of Switchyard. What the functions do is said in abi.go.
#ifndef SWITCHYARD_H
#define SWITCHYARD_H

#include <stdint.h>

// An error's text and the rank it is about belong to the thread that made the failing call, until its next one fails.
const char *switchyard_last_error(void);
int32_t switchyard_last_error_rank(void);

// How many pools for torch's allocator a process can have. Pool k is asked by switchyard_pool_alloc_k and
// switchyard_pool_free_k, which have the types that torch.cuda.memory.CUDAPluggableAllocator wants:
// void *alloc(ssize_t size, int device, void *stream) and void free(void *p, ssize_t size, int device, void *stream).
#define SWITCHYARD_POOLS 16

// For the Go side.
void switchyard_set_error(const char *text, uint64_t n, int32_t rank);

#endif
