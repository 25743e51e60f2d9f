// Package host is the engine that runs kernels in Go on the memory of this machine. It is the default of everyone
// without a GPU and the reference that the CUDA engine is compared with.
package host
