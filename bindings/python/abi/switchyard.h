// The C ABI of Switchyard. What the functions do is said in abi.go.
#ifndef SWITCHYARD_H
#define SWITCHYARD_H

#include <stdint.h>

// An error's text and the rank it is about belong to the thread that made the failing call, until its next one fails.
const char *switchyard_last_error(void);
int32_t switchyard_last_error_rank(void);

// For the Go side.
void switchyard_set_error(const char *text, uint64_t n, int32_t rank);

#endif
