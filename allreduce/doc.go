// Package allreduce combines buffers of all ranks of a group: all-reduce, reduce-scatter, all-gather and broadcast, and buckets
// that reduce a model's gradients while backward still runs.
//
// All ranks make a [Reducer] together, once, over a symmetric heap. They then make all calls in the same order. A call talks to no
// socket and, once warm, allocates nothing.
//
//	r, err := allreduce.New(ctx, heap, allreduce.Options{})
//	err = r.AllReduce(nil, dst, src, kernels.Float32, kernels.Sum)
//
// [Buckets] all-reduce gradients while the computation makes further ones.
//
// # Algorithms
//
// The size of a call, the number of ranks and the options decide the algorithm, so that all ranks choose alike. [Reducer.Explain]
// names it with the reason, and Options.Algorithm forces one.
//
//   - one-shot: every rank pushes all its data into every peer's staging, which is double-buffered, and each reduces
//     everything for itself. One signal to each peer, for small calls.
//   - two-shot: every rank reduces one slice of the elements and hands the result to all, chunk by chunk.
//   - ring: chunks travel around the ranks, once to be reduced and once to be gathered. Every step is between neighbours.
//
// Each rank tells the others in the call itself where its buffers lie. In two-shot, peers read a source in the symmetric heap
// directly, and other sources are pushed into staging; peers write a destination in the heap directly, and ranks fetch the
// results for other destinations. So buffers in the heap are not copied; other buffers go through staging of a fixed size.
//
// On GPUs small calls travel in packets, whose words carry their signal: in one shot or in two. Larger calls go in two shots through the
// buffers themselves if peers can reach them, and otherwise through staging. GPUs have no ring. All ranks take equally many
// multiprocessors, which Options.MaxSMs bounds. Calls can be captured into a CUDA graph.
//
// # Multicast
//
// With Options.Multicast, on a heap with memory.Options.Multicast, all-gathers and reductions that only add go by NVLink multicast: every
// rank makes the switches add one slice of the elements, and store one slice on all ranks. Each byte of an all-reduce then crosses a rank's
// link once in and once out, for any number of ranks. Other warps or blocks stage the input of what is reduced, and take what is gathered from
// staging, unless all ranks have the buffer at the same place of the heap, at a multiple of 16 bytes, with slices whose lengths are multiples
// of 16. In small calls one store of a packet reaches all ranks, which combine for themselves. These paths have never run on hardware. They are
// off by default, and if a rank has set NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1 or TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
//
// # Results
//
// One-shot and two-shot combine elements in the order of the ranks; a ring begins with the rank after the slice's owner
// and ends with the owner. Floats of 16 and 8 bits are combined in float32, also on their way around a ring, and rounded
// once. Every element is combined by one rank, or by all in the same order: with one algorithm the result is the same bits
// on every rank and every time, in place or not, with any alignment. By multicast it is the same bits on every rank; the order in which a
// switch adds floats is not known. Integers wrap around. Min and Max propagate NaN.
// An average is the sum divided by the number of ranks, and is refused for integers.
//
// # Several hosts
//
// On several hosts the ranks of each combine what they have, in the order of ranks, and each slice of that, in float32 where elements are
// narrower, crosses to the ranks of equal local rank on the other hosts. These combine the hosts' results in the order of hosts, and round
// once. So results are the same bits on every rank and every time. A byte of the result crosses once from each host to each other host.
package allreduce
