// Package shm holds everything the host engine needs that Go's safe subset cannot say: shared memory objects, fixed
// mappings, words that several processes read and write, futexes, and reinterpretation of bytes as numbers. Together
// with internal/vec, internal/cuda and the C ABI it is the only place with unsafe code or raw system calls.
package shm

import _ "github.com/switchyard-moe/switchyard/internal/platform" // a clear word on other systems
