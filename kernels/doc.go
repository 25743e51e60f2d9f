// Package kernels is what plans and engines agree on: what operations are ([Operation], by [Family]), who runs them ([Engine]
// and [Port]), data types, errors, how a symmetric heap looks from a kernel ([Space]), and the words that ranks signal with.
//
// There are two engines, in Go (package kernels/host) and in CUDA C++ (package kernels/cuda). A heap makes its own,
// memory.Heap.Engine. What to move is decided before, in packages alltoallv, allreduce and dispatch, which know of no engine.
//
// # Protocol
//
// Every communicator owns a control block at the same offset of each rank's segment, laid out as its engine likes. What a rank writes in the
// block of another has one writer. A call has a number, its epoch, and a chunk of a message one within the call; both are in one sequence
// number ([Seq]), which only ever grows. So what is left over from an earlier call, or from one that failed, is never taken for new.
package kernels
