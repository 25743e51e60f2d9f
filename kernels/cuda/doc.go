// Package cuda is the engine that runs kernels on NVIDIA GPUs. The kernels are CUDA C++, compiled ahead and embedded, so
// that users need neither nvcc nor a toolkit; `make kernels` builds them anew.
//
// The engine enqueues on streams and never waits, allocates or synchronises: a launch is one cgo crossing and can be
// captured into a CUDA graph. A kernel that cannot finish, because a peer did not come in time, because of the abort word,
// or because two ranks disagree on a size, writes that to a record that the port's Fault reads.
package cuda
