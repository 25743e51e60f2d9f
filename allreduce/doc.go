// Package allreduce combines what all ranks of a group have: all-reduce, reduce-scatter, all-gather and broadcast, and
// the buckets that reduce a model's gradients while backward still runs.
//
// A [Reducer] owns its channels in a symmetric heap and is made once, by all ranks together. Every call is then made by
// all ranks in the same order. It does no host communication and, once warm, allocates nothing.
//
//	r, err := allreduce.New(ctx, heap, allreduce.Options{})
//	err = r.AllReduce(nil, dst, src, kernels.Float32, kernels.Sum)
//
// [Buckets] do the same for gradients, overlapped with the computation that makes them.
//
// # Algorithms
//
// The size of a call, the number of ranks and the options decide, so that all ranks choose alike; [Reducer.Explain] says
// what and why, Options.Algorithm leaves no choice.
//
//   - one-shot: every rank pushes all its data into every peer's staging, which is double-buffered, and each reduces
//     everything for itself. One signal to each peer, for small calls.
//   - two-shot: every rank reduces one slice of the elements and hands the result to all, chunk by chunk.
//   - ring: chunks travel around the ranks, once to be reduced and once to be gathered. Every step is between neighbours.
//
// Where the buffers lie is each rank's own business and is told in the call itself. In two-shot a source in the symmetric
// heap is read by its reader directly, other sources are pushed into fixed staging; a destination in the heap is written
// by its writers directly, results for others are fetched. So buffers in the heap are not copied; other buffers go
// through a fixed amount of staging, whatever their length.
//
// On GPUs small calls travel in packets, whose words carry their signal with them: in one shot or in two. Larger ones go in two shots through
// the buffers themselves where peers can reach them, and through staging where not. There is no ring. All ranks take equally many
// multiprocessors, which Options.MaxSMs bounds. Calls can be captured into a CUDA graph.
//
// # Multicast
//
// With Options.Multicast, on a heap with memory.Options.Multicast, all-reduces that only add go by NVLink multicast: every rank has the switches
// add one part of the elements, and store the result on all ranks. Each byte then crosses a rank's link once in and once out, however many
// ranks there are. Input is staged and results are taken from staging, by other warps or other blocks, except where all ranks have the
// buffer at the same place of the heap, at a multiple of 16 bytes, and it is whole 16 bytes. These paths have never run on hardware. They are
// off by default, and wherever NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1 or TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is set.
//
// # What the result is
//
// One-shot and two-shot combine elements in the order of the ranks; a ring begins with the rank after the slice's owner
// and ends with the owner. Floats of 16 and 8 bits are combined in float32, also on their way around a ring, and rounded
// once. Every element is combined by one rank, or by all in the same order: with one algorithm the result is the same bits
// on every rank and every time, in place or not, whatever the alignment. By multicast it is the same bits on every rank; in what order a switch
// adds floats is not known. Integers wrap around. Min and Max propagate NaN.
// An average is the sum divided by the number of ranks, and is refused for integers.
package allreduce
