// Package kernels is the language of plans and engines: operations ([Operation], by [Family]), the interfaces that run them ([Engine]
// and [Port]), data types, errors, the symmetric heap as a kernel sees it ([Space]), and the words with which ranks signal.
//
// There are two engines, in Go (package kernels/host) and in CUDA C++ (package kernels/cuda). A heap makes its own,
// memory.Heap.Engine. Packages alltoallv, allreduce and dispatch decide what to move, and know of no engine.
//
// # Protocol
//
// Every communicator owns a control block at the same offset of each rank's segment, laid out as its engine likes. Each word that a rank
// writes in the control block of another has one writer. A call has a number, its epoch, and a chunk of a message has one within the call;
// both are in one sequence number ([Seq]), which only grows. So a word of an earlier call, or of one that failed, is never taken for new.
// The opening comments of the engines' files describe their words.
package kernels
