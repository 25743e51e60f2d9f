// Package kernels is what plans and engines agree on: what operations are ([Operation], by [Family]), who runs them ([Engine]
// and [Port]), data types, errors, how a symmetric heap looks from a kernel ([Space]), and the words that ranks signal with.
//
// There are two engines, in Go (package kernels/host) and in CUDA C++ (package kernels/cuda). A heap makes its own,
// memory.Heap.Engine. What to move is decided before, in packages alltoallv, allreduce and dispatch, which know of no engine.
//
// # Protocol
//
// Every communicator owns a control block at the same offset of each rank's segment, laid out as its engine likes. An ordered
// pair of ranks, src to dst, has two kinds of lines in it, each with one writer:
//
//   - the signal line, in dst's segment, written by src: "chunk k of call e is there, of a message of b bytes";
//   - credit lines, in src's segment, written by dst: "chunk k of call e may be written to this place, this long".
//
// The first word of a line is its sequence number, call epoch and chunk in one ([Seq]). It is written last, with
// release semantics, and waiting means "at least". It only ever grows, so a line left over from an earlier call, or
// from a call that failed, can never be taken for a new one.
package kernels
