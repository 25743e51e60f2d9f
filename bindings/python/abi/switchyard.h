// The C ABI of Switchyard. What the functions do is said in abi.go.
#ifndef SWITCHYARD_H
#define SWITCHYARD_H

#include <stdint.h>

// An error's text and the rank it is about belong to the thread that made the failing call, until its next one fails.
const char *switchyard_last_error(void);
int32_t switchyard_last_error_rank(void);

// A DLPack description (DLManagedTensor) of so many bytes at an address of a device, NULL where there is no memory for it. Who takes
// the capsule that it is put in calls its deleter, which may be after all of Python has gone.
void *switchyard_describe(uint64_t data, int64_t bytes, int32_t kind, int32_t device);

// How many pools for torch's allocator a process can have. Pool k is asked by switchyard_pool_alloc_k and
// switchyard_pool_free_k, which have the types that torch.cuda.memory.CUDAPluggableAllocator wants:
// void *alloc(ssize_t size, int device, void *stream) and void free(void *p, ssize_t size, int device, void *stream).
#define SWITCHYARD_POOLS 16

// For the Go side.
void switchyard_set_error(const char *text, uint64_t n, int32_t rank);

#endif
