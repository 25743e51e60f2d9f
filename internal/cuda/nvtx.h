#ifndef SW_NVTX_H
#define SW_NVTX_H

#include <stddef.h>
#include <stdint.h>

/* sw_nvtx_open asks the profiler whose library path names for NVTX's functions. 1: there is one that wants ranges. Once
 * a process. */
int sw_nvtx_open(const char *path);

/* sw_nvtx_start begins a range with the name "switchyard: " and n bytes of name, which need no end. Its payload is
 * bytes, none if that is negative. sw_nvtx_end ends the range, on any thread. */
uint64_t sw_nvtx_start(const char *name, size_t n, int64_t bytes);
void sw_nvtx_end(uint64_t range);

#endif
