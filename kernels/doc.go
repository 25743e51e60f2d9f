// Package kernels is what plans and engines agree on: how a symmetric heap looks from a kernel, the words that ranks
// signal with, data types, reductions, and the arguments of every kernel.
//
// A kernel exists twice, with the same name, arguments and protocol: in Go (package kernels/host) and in CUDA C++
// (package kernels/cuda). What to move is decided before, in packages alltoallv, allreduce and dispatch.
//
// # Protocol
//
// Every communicator owns a control block at the same offset of each rank's segment. An ordered pair of ranks, src to
// dst, has two kinds of lines in it, each 64 bytes and with one writer:
//
//   - the signal line, in dst's segment, written by src: "chunk k of call e is there, of a message of b bytes";
//   - credit lines, in src's segment, written by dst: "chunk k of call e may be written to this place, this long".
//
// The first word of a line is its sequence number, call epoch and chunk in one ([Seq]). It is written last, with
// release semantics, and waiting means "at least". It only ever grows, so a line left over from an earlier call, or
// from a call that failed, can never be taken for a new one.
package kernels
