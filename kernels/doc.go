// Package kernels is what plans and engines agree on: what operations are ([Operation], by [Family]), who runs them ([Engine]
// and [Port]), data types, errors, how a symmetric heap looks from a kernel ([Space]), and the words that ranks signal with.
//
// There are two engines, in Go (package kernels/host) and in CUDA C++ (package kernels/cuda). A heap makes its own,
// memory.Heap.Engine. What to move is decided before, in packages alltoallv, allreduce and dispatch, which know of no engine.
//
// # Protocol
//
// Every communicator owns a control block at the same offset of each rank's segment, laid out as its engine likes. An ordered pair of
// ranks, src to dst, has two kinds of words in the control block of an exchange, and each word has one writer:
//
//   - src writes signals in dst's segment: "chunk k of call e is there";
//   - dst writes credits in src's segment: "chunk k of call e may be written to this place".
//
// A sequence number holds call and chunk ([Seq]). A rank writes it last, with release semantics, and waits until it is at least the
// wanted one. It only grows, so what an earlier or failed call left over never counts as new.
//
// The host engine keeps a signal or a credit in one line of LineBytes, the sequence number first. The CUDA engine has a signal line for
// each stripe of a message; a GPU stores 16 bytes at once, so each 16 bytes of its credits carry the number. A dispatch on a GPU counts
// the calls of each handle by themselves. The opening comments of kernels/host/lanes.go and of the files of kernels/cuda say the rest.
package kernels
