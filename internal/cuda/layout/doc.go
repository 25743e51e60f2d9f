// Package layout reads the header that the CUDA kernels and Go share with cgo, for the test that Go lays arguments out as
// the kernels read them.
package layout
