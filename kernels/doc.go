// Package kernels has the words that calls, their options and their errors share, and then the language of plans and engines.
//
// # For callers
//
// Calls take a data type ([DType]: [Uint8], [Int32], [Int64], [Float16], [BFloat16], [Float32], [Float64], [Float8E4M3], [Float8E5M2]), and
// reductions an operator ([ReduceOp]: [Sum], [Avg], [Min], [Max], [Prod]). Options.Multicast of an allreduce is a [Pipeline], and its
// Explain is asked about a [Collective]. [AnyRank] is the peer of a receive that takes a message of any rank. [DotChains] says how
// gradients of weights are rounded. Package dispatch has names of its own for layouts ([RowLayout]), for a [ScaleFormat] and for a
// [Weighting].
//
// errors.As finds in the error of a call what ranks disagreed about. After each of these errors the communicator works on:
//
//   - [CallMismatchError] and [OrderError]: ranks made different calls.
//   - [CountMismatchError] and [MessageMismatchError]: two ranks have different sizes, or types of elements, for one message.
//   - [SplitsError]: splits in device memory do not fit the buffers.
//   - [OverflowError], [IndexError] and [ShortError]: a dispatch does not fit, a choice is no expert, rows are too few.
//   - [MaskedError]: the other ranks go on without this one.
//
// # For engines
//
// The rest is for who writes plans and engines: operations ([Operation], by [Family]), the interfaces that run them ([Engine] and [Port]),
// the symmetric heap as a kernel sees it ([Space]), and the words with which ranks signal.
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
