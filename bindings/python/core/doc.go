// Package core is the Python binding without cgo: what the C ABI offers, in Go's types.
//
// A [Comm] is one rank's end of a group with everything that calls from Python need: the group, a symmetric heap, an
// exchanger and a reducer, and one worker that runs its operations in the order in which they were submitted. A caller
// submits and gets a [Ticket], and waits for the ticket, in slices if it has signals to look after. So a call from
// Python can be interrupted without harm to the operation, and every operation has an error of its own.
//
// A [GPU] is a Comm's end on one GPU. Its exchanges are enqueued on a stream by whoever asks for them, without the worker,
// since a GPU has its own order of work and CUDA graphs capture what a thread enqueues. Memory of it is allocated by the
// worker, as what all ranks do alike. An [Arena] is a piece of that memory which torch's allocator divides.
//
// [Handles] gives integers to the objects that cross the C ABI.
package core
